"""A run continues only with its own model, data and settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import load_config
from async_rl.errors import ConfigError
from async_rl.run.identity import check_identity
from async_rl.store.ledger import Ledger
from tests.support.run_config import write_run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = write_run(tmp_path)
    write_tasks(tmp_path, range(20))
    return path


def write_tasks(folder: Path, numbers: Sequence[int]) -> None:
    rows = [{"prompt": f"{number} + 1?", "answer": str(number + 1)} for number in numbers]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def start(config: Path, *overrides: str) -> None:
    check_identity(load_config(config, overrides), config.parent)


def begin(config: Path, *overrides: str, consumed: int = 8) -> None:
    """Start a run, and dispatch the first tasks."""
    start(config, *overrides)
    ledger = Ledger(config.parent / "ledger.sqlite")
    for position in range(consumed):
        ledger.record_dispatch(f"g{position}", f"row-{position}", position, [f"g{position}-0"], 0)
    ledger.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rollout.group_size=4", "rollout.group_size = 2, which is 4 now"),
        ("model.dtype=float32", "model.dtype = bfloat16, which is float32 now"),
        ("trainer.loss.advantages=gae", "trainer.loss.advantages = without a critic, which is gae now"),
        ("trainer.lora.rank=4", "trainer.lora = null"),
        ("run.seed=1", "consumed 8 tasks .*number 1 is another"),
        ("data.shuffle=false", "consumed 8 tasks"),
    ],
)
def test_settings_that_must_not_change_are_refused_with_both_values(
    config: Path, change: str, words: str
) -> None:
    begin(config)
    start(config)
    with pytest.raises(ConfigError, match=words):
        start(config, change)
    start(config)  # what was refused left nothing behind


def test_a_changed_row_is_another_task_when_the_data_are_json_or_csv(config: Path) -> None:
    json_file, csv_file = config.parent / "tasks.json", config.parent / "tasks.csv"
    rows = [{"prompt": f"{number} + 1?", "answer": str(number + 1)} for number in range(20)]
    begin(config, "data.shuffle=false")
    json_file.write_text(json.dumps([*rows, {"prompt": "more", "answer": "1"}]))
    start(config, "data.shuffle=false", f"data.path={json_file}")  # the same tasks, and one behind them
    lines = [f"{row['prompt']},{row['answer']}" for row in rows]
    csv_file.write_text("\n".join(["prompt,answer", *lines]))
    start(config, "data.shuffle=false", f"data.path={csv_file}")
    lines[7] = "another,1"
    csv_file.write_text("\n".join(["prompt,answer", *lines]))
    with pytest.raises(ConfigError, match=r"number 8 is another one in .*tasks\.csv"):
        start(config, "data.shuffle=false", f"data.path={csv_file}")


def test_another_model_is_refused_and_a_moved_one_is_not(config: Path) -> None:
    begin(config)
    model = config.parent / "model"
    model.rename(moved := config.parent / "moved")
    start(config, f"model.path={moved}")
    tree: dict[str, Any] = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(tree | {"rope_theta": 5e5}))
    with pytest.raises(ConfigError, match=r"model in .*moved, which is another one than that in .*moved now"):
        start(config, f"model.path={moved}")


@pytest.mark.parametrize("weight", [b"\x00", b"\x01"])
def test_other_weights_of_the_same_shapes_are_another_model(config: Path, weight: bytes) -> None:
    begin(config)
    weights = config.parent / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + weight)
    if weight == b"\x00":
        start(config)
    else:
        with pytest.raises(ConfigError, match="another one"):
            start(config)


@pytest.mark.parametrize(
    "name", ["vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "added_tokens.json"]
)
def test_another_tokenizer_is_another_model_whichever_files_it_has(config: Path, name: str) -> None:
    file = config.parent / "model" / name
    file.write_text("{}")
    begin(config)
    file.with_suffix(".bak").write_text("{}")
    start(config)
    file.write_text("{ }")
    with pytest.raises(ConfigError, match="another one"):
        start(config)


ORDERED = "data.shuffle=false"


@pytest.mark.parametrize(
    ("consumed", "rows", "allowed"),
    [
        (8, range(30), True),  # it grew
        (8, range(10), True),  # what was not consumed yet is gone
        (8, [*range(8), 99, 98, 97], True),
        (8, [*range(7), 99, *range(8, 20)], False),
        (8, range(7), False),
        (8, range(100, 120), False),
        (25, range(20), True),  # in its second epoch
        (25, range(30), False),  # which has other positions now
        (0, range(100, 120), True),
    ],
)
def test_data_may_change_only_behind_what_was_consumed(
    config: Path, consumed: int, rows: Sequence[int], allowed: bool
) -> None:
    begin(config, ORDERED, consumed=consumed)
    write_tasks(config.parent, rows)
    if allowed:
        start(config, ORDERED)
    else:
        with pytest.raises(ConfigError, match=rf"\(20 tasks\).*{len(rows)} tasks"):
            start(config, ORDERED)


def test_any_task_of_a_weighted_mixture_is_compared_once_the_sequence_was_consumed(config: Path) -> None:
    folder = config.parent
    files = [{"path": f"{folder}/{name}.jsonl", "weight": w} for name, w in (("one", 9), ("tasks", 1))]
    (folder / "one.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}))
    mixture = "data.path=null", f"data.datasets={json.dumps(files)}"
    begin(config, *mixture, consumed=25)
    start(config, *mixture)
    for row in range(20):  # of which most are not among the first 21 positions
        write_tasks(folder, [99 if number == row else number for number in range(20)])
        with pytest.raises(ConfigError, match="is another one in"):
            start(config, *mixture)


@pytest.mark.parametrize("file", ["identity.json", "sequence.u64"])
def test_a_damaged_record_is_named(config: Path, file: str) -> None:
    begin(config)
    (config.parent / file).write_bytes((config.parent / file).read_bytes()[:16])
    with pytest.raises(ConfigError, match=r"has lost what model and data .*restore identity.json"):
        start(config)


def test_a_file_that_grew_is_refused_when_it_is_shuffled(config: Path) -> None:
    begin(config)
    write_tasks(config.parent, range(30))
    with pytest.raises(ConfigError, match="that does not shuffle"):
        start(config)
