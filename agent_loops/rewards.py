"""Rewards: `reward(task, completion) -> float | Mapping[str, float]`, sync or async.

A mapping holds `"reward"`, on which the policy is trained, and parts that are only recorded.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

from async_rl.types import Completion, Task

_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\d)")
_RELATIVE_TOLERANCE = 1e-6
"""The tolerance for reference answers with a fraction; whole numbers must be equal."""


def exact_match(task: Task, completion: Completion) -> float:
    """Return 1 if the answer equals the reference answer, ignoring surrounding white space; else 0."""
    return float(completion.text.strip() == str(task.answer).strip())


def last_number(task: Task, completion: Completion) -> float:
    """Return 1 if the last number of the answer equals the last number of the reference answer; else 0.

    This suits mathematics datasets such as GSM8K ("#### 42"). Thousands separators are understood.
    """
    expected, actual = _last_number(str(task.answer)), _last_number(completion.text)
    if expected is None or actual is None:
        return 0.0
    if expected == expected.to_integral_value():
        return float(actual == expected)
    return float(math.isclose(actual, expected, rel_tol=_RELATIVE_TOLERANCE))


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
