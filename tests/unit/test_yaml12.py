"""YAML 1.2 scalars, as in configs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from async_rl.runtime import yaml12


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("no", "no"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("1e-6", 1e-6),
        ("1.5E3", 1500.0),
        ("-.5", -0.5),
        ("12", 12),
        ("-3", -3),
        ("null", None),
        ("1.2.3", "1.2.3"),
        ("'1e-6'", "1e-6"),
        ("[off, 1e-6, true]", ["off", 1e-6, True]),
        (".inf", math.inf),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("1:00", "1:00"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("+7", 7),
        ("2026-11-28", "2026-11-28"),
        ("s:\n  a: &a\n    <<: {x: 1}\n    x: 2\nb:\n  <<: *a\n", {"s": {"a": {"x": 2}}, "b": {"x": 2}}),
    ],
)
def test_scalars_are_read_as_yaml_1_2_has_them(text: str, value: Any) -> None:
    read = yaml12.load(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a, !!float x]", "'x' is not valid for its tag !!float (line 1, column 5)"),
        ("!!float ''", "'' is not valid for its tag !!float (line 1, column 1)"),
        ("a:\n  !!bool 1", "'1' is not valid for its tag !!bool (line 2, column 3)"),
        ("!!timestamp x", "'x' is not valid for its tag !!timestamp (line 1, column 1)"),
        ("!!timestamp 2026-99-99", "'2026-99-99' is not valid for its tag !!timestamp (line 1, column 1)"),
        ("!!int x", "'x' is not valid for its tag !!int (line 1, column 1)"),
        ("{!!float x: 1}", "'x' is not valid for its tag !!float (line 1, column 2)"),
        ("9" * 5000, "is not valid for its tag !!int (line 1, column 1)"),
        ('["a" "b"]', "expected ',' or ']', but got '<scalar>' (line 1, column 6)"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, words: str) -> None:
    with pytest.raises(yaml12.YAMLError) as caught:
        yaml12.load(text)
    assert words in yaml12.describe_error(caught.value)


@pytest.mark.parametrize("keys", ["a 'a'", "1 01", "1 1.0", "1 true", "true True", "~ null", "<< <<"])
def test_a_key_is_refused_the_second_time_however_it_is_written(keys: str) -> None:
    text = "".join(f"{key}: {{}}\n" for key in keys.split())
    with pytest.raises(yaml12.YAMLError, match="is in line 1 already"):
        yaml12.load(text)
    assert len(yaml12.load("1: a\n'1': b")) == 2


@pytest.mark.parametrize(
    "value",
    [
        "off",
        "1e-6",
        "true",
        "12",
        "010",
        "1:00",
        "1_000",
        "2026-11-28",
        "",
        "a: b",
        1e-6,
        True,
        None,
        math.inf,
    ],
)
def test_what_is_written_reads_back_the_same(value: Any) -> None:
    read = yaml12.load(yaml12.dump({"key": value}))["key"]
    assert read == value
    assert type(read) is type(value)
