"""Rewards: `reward(task, completion) -> float | Mapping[str, float]`, sync or async.

A mapping holds `"reward"`, on which the policy is trained, and parts that are only recorded.
"""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

from async_rl.types import Completion, Task

_OPEN_THOUGHT, _CLOSE_THOUGHT = "<think>", "</think>"

_DECIMAL: Final = r"(?:(?:\d{1,3}(?:[,_]\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_TIMES: Final = r"\s*(?:[x\u00d7*]|\\times|\\cdot)\s*"
_TO_THE: Final = r"\s*(?:\^|\*\*)\s*"
_NUMBER: Final = re.compile(
    rf"""
    (?<![\w.]) (?P<sign>-?) (?:\\?\$)?
    (?: \\[dt]?frac \s* {{ \s* (?P<top>-?{_DECIMAL}) \s* }} \s* {{ \s* (?P<bottom>{_DECIMAL}) \s* }}
      | (?: (?P<whole>\d+)[ ]+ (?=\d+/) )? (?P<numerator>{_DECIMAL}) \s? / \s? (?P<denominator>{_DECIMAL})
      | (?: (?P<factor>{_DECIMAL}) {_TIMES} (?=10{_TO_THE}) )? (?P<number>{_DECIMAL})
        (?: {_TO_THE} {{? (?P<exponent>[-+]?\d+) }}? )?
    )
    (?!\d)
    """,
    re.VERBOSE,
)
"""A decimal number, a fraction, a mixed number (`1 1/2`), a power, or a number in scientific notation."""
_MAX_EXPONENT: Final = 10_000
_RELATIVE_TOLERANCE: Final = Fraction(1, 10**6)
"""The tolerance for reference answers with a fraction; whole numbers must be equal."""


def exact_match(task: Task, completion: Completion) -> float:
    """Return 1 if the answer equals the reference answer, ignoring surrounding white space; else 0.

    Raises:
        ValueError: The task has no answer.
    """
    return float(final_answer(completion).strip() == str(reference_answer(task)).strip())


def last_number(task: Task, completion: Completion) -> float:
    r"""Return 1 if the last number of the answer equals the last number of the reference answer; else 0.

    This suits mathematics datasets such as GSM8K ("#### 42"). Numbers may be written `1,665`, `.5`, `1e5`,
    `3 x 10^5`, `1/2`, `1 1/2` and `\frac{1}{2}`.

    Raises:
        ValueError: The task's answer has no number.
    """
    expected = _last_number(str(reference_answer(task)))
    if expected is None:
        raise ValueError(f"the answer {task.answer!r:.200} has no number; expected one")
    actual = _last_number(final_answer(completion))
    if actual is None:
        return 0.0
    if expected.denominator == 1:
        return float(actual == expected)
    return float(abs(actual - expected) <= _RELATIVE_TOLERANCE * abs(expected))


def reference_answer(task: Task) -> Any:
    """Return the answer of a task.

    Raises:
        ValueError: The task has none: any reward would then be wrong.
    """
    if task.answer is None:
        raise ValueError(
            "the task has no answer: set data.answer_key to the column of the dataset that holds the answers"
        )
    return task.answer


def final_answer(completion: Completion) -> str:
    """Return the text of an answer after its thoughts: nothing of a thought that was cut off."""
    _, closed, text = completion.text.rpartition(_CLOSE_THOUGHT)
    if not closed and completion.is_in_thought:
        return ""
    return text.partition(_OPEN_THOUGHT)[0]


def _last_number(text: str) -> Fraction | None:
    """Return the value of the last number that can be computed."""
    for last in deque(_NUMBER.finditer(text.replace("\u2212", "-")), maxlen=1):
        try:
            return -_value(last) if last["sign"] else _value(last)
        except ArithmeticError:
            break
    return None


def _value(found: re.Match[str]) -> Fraction:
    """Return the value of a number without its sign.

    Raises:
        ArithmeticError: It divides by zero, or its exponent is too large to compute.
    """
    if found["top"]:
        return _decimal(found["top"]) / _decimal(found["bottom"])
    if found["numerator"]:
        whole = Fraction(found["whole"] or 0)
        return whole + _decimal(found["numerator"]) / _decimal(found["denominator"])
    value = _decimal(found["number"])
    if found["exponent"]:
        if len(found["exponent"]) > 5 or abs(int(found["exponent"])) * len(found["number"]) > _MAX_EXPONENT:
            raise OverflowError("the exponent is too large")
        value **= int(found["exponent"])
    return value * _decimal(found["factor"] or "1")


def _decimal(text: str) -> Fraction:
    number = Decimal(text.replace(",", "").replace("_", ""))
    if abs(number.adjusted()) > _MAX_EXPONENT:
        raise OverflowError("the number is too large")
    return Fraction(number)
