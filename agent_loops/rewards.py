"""Rewards: `reward(task, completion) -> float | Mapping[str, float]`, sync or async.

A mapping holds `"reward"`, on which the policy is trained, and parts that are only recorded.
"""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal
from fractions import Fraction
from numbers import Number
from typing import Any, Final
from unicodedata import normalize

from async_rl.types import Completion, Task

_OPEN_THOUGHT, _CLOSE_THOUGHT = "<think>", "</think>"

_DECIMAL: Final = r"""
    (?: (?: \d{1,3} (?:[,_]\d{3})+ (?!\d) | \d{1,2} (?:,\d\d){1,6} ,\d{3} (?!\d) | \d+ ) (?:\.\d+)?
      | (?<![\w.]) \.\d+ ) (?: [eE][-+]?\d+ )?
"""
_TIMES: Final = r"\s*(?:[x\u00d7*\u00b7\u22c5]|\\times|\\cdot)\s*"
_TO_THE: Final = r"(?:\s*\^\s*|\*\*|[ ]+\*\*[ ]+)"
"""Stars with one space are Markdown: `**42** 5`."""
_ARGUMENT: Final = rf"{{ \s* -?{_DECIMAL} \s* }} | \d"
NUMBER: Final = re.compile(
    rf"""
    (?<![A-Za-z\d_^]) (?<!\d\.) (?<!\^{{)
    (?P<sign> -(?P<open>\()? | ) (?:\\?[$\u00a3\u20ac\u00a5])?
    (?: (?: (?P<whole>\d+) (?: [ ]+ (?=\d+\s?/) | \s* (?=\\[dtc]?frac) ) )?
        (?: \\[dtc]?frac \s* (?P<top>{_ARGUMENT}) \s* (?P<bottom>{_ARGUMENT})
          | (?P<numerator> \( \s* -?{_DECIMAL} \s* \) | {_DECIMAL} ) \s? / \s?
            (?P<denominator> \( \s* -?{_DECIMAL} \s* \) | -?{_DECIMAL} )
        )
      | (?: (?P<factor>{_DECIMAL}) {_TIMES} (?=10{_TO_THE}) )? (?P<number>{_DECIMAL})
        (?: {_TO_THE} {{? (?P<exponent>[-+]?\d+) }}? )?
    )
    (?(open) \s* \) ) (?!\d)
    """,
    re.VERBOSE,
)
"""A decimal number, a fraction, a mixed number (`1 1/2`), a power, or a number in scientific notation."""
_GROUPED: Final = re.compile(
    r"(?<![A-Za-z\d_])(?<!\d[.,])\d{1,3}(?P<mark>,\\!|\{,\}|\\[,; ]|[ '\u2019\u00a0\u2009\u202f])\d{3}"
    r"(?:(?P=mark)\d{3})*(?!\d|\s?/)"
)
"""A number whose thousands are separated by something other than a comma."""
_SMALL_DIGITS: Final = re.compile(
    "[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+|[\u00bc-\u00be\u2150-\u215e]"
)
"""Superscripts, or one character that is a fraction."""
_MAX_EXPONENT: Final = 10_000
_RELATIVE_TOLERANCE: Final = Fraction(1, 10**6)
"""The tolerance for reference answers with a fraction; whole numbers must be equal."""


def exact_match(task: Task, completion: Completion) -> float:
    """Return 1 if the answer equals the reference answer, ignoring surrounding white space; else 0.

    Raises:
        ValueError: The task has no answer.
    """
    return float(final_answer(completion).strip() == reference_answer(task).strip())


def last_number(task: Task, completion: Completion) -> float:
    r"""Return 1 if the last number of the answer equals the last number of the reference answer; else 0.

    This suits mathematics datasets such as GSM8K ("#### 42"). Numbers may be written `1,665`, `1 665`, `.5`,
    `1e5`, `3 x 10^5`, `1/2`, `1 1/2` and `\frac{1}{2}`.

    Raises:
        ValueError: The task's answer has no number.
    """
    reference = reference_answer(task)
    expected = _last_number(reference)
    if expected is None:
        raise ValueError(f"the answer {reference!r:.200} has no number; expected one")
    actual = _last_number(final_answer(completion))
    if actual is None:
        return 0.0
    if expected.denominator == 1:
        return float(actual == expected)
    return float(abs(actual - expected) <= _RELATIVE_TOLERANCE * abs(expected))


def reference_answer(task: Task) -> str:
    """Return the answer of a task as text: `42` for 42.0, which columns with gaps hold.

    Raises:
        ValueError: The task has none, so that any reward would be wrong, or one that is no text or number.
    """
    answer = task.answer
    if answer is not None and not isinstance(answer, str | Number):
        raise ValueError(f"the answer is a {type(answer).__name__}; expected text or a number")
    if answer is None or answer != answer or not str_of_number(answer).strip():
        raise ValueError(
            "the task has no answer: set data.keys.answer to the column of the dataset that holds the answers"
        )
    if isinstance(answer, float):
        return f"{Decimal(repr(float(answer))):f}".removesuffix(".0")
    return str_of_number(answer)


def str_of_number(value: Any) -> str:
    """Return `str(value)`, also of a whole number with more digits than Python converts to text."""
    return str(Decimal(value)) if type(value) is int else str(value)


def final_answer(completion: Completion) -> str:
    """Return the text of an answer after its thoughts: nothing of a thought that was cut off."""
    _, closed, text = completion.text.rpartition(_CLOSE_THOUGHT)
    if not closed and completion.is_in_thought:
        return ""
    return text.partition(_OPEN_THOUGHT)[0]


def plain_text(text: str) -> str:
    r"""Return a text with numbers in ASCII and without marks of thousands except commas, such as `\,`."""

    def ascii_digits(found: re.Match[str]) -> str:
        top, slash, bottom = normalize("NFKC", found[0]).partition("\u2044")
        return rf"\frac{{{top}}}{{{bottom}}}" if slash else f"^{{{top}}}"

    text = _SMALL_DIGITS.sub(ascii_digits, text).replace("\u2212", "-").replace("\u2044", "/")
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text)
    return _GROUPED.sub(lambda found: found[0].replace(found["mark"], ""), text)


def simple_numbers(text: str) -> str:
    """Return a plain text whose numbers are decimals, or fractions such as `3/2` for `1 1/2`."""

    def simple(found: re.Match[str]) -> str:
        if re.fullmatch(r"-?[\d.,]+", found[0]):
            return found[0]
        try:
            return str(_value(found))
        except (ArithmeticError, ValueError):  # Python does not convert it to text
            return found[0]

    return NUMBER.sub(simple, text)


def _last_number(text: str) -> Fraction | None:
    """Return the value of the last number, or None if there is none or it cannot be computed."""
    for last in deque(NUMBER.finditer(plain_text(text)), maxlen=1):
        try:
            return _value(last)
        except ArithmeticError:
            break
    return None


def _value(found: re.Match[str]) -> Fraction:
    """Return the value of a number.

    Raises:
        ArithmeticError: It divides by zero, or its exponent is too large to compute.
    """
    sign = -1 if found["sign"] else 1
    if found["number"] is None:
        top, bottom = found["top"] or found["numerator"], found["bottom"] or found["denominator"]
        return sign * (_decimal(found["whole"] or "0") + _decimal(top) / _decimal(bottom))
    value = _decimal(found["number"])
    if found["exponent"]:
        if len(found["exponent"]) > 5 or abs(int(found["exponent"])) * len(found["number"]) > _MAX_EXPONENT:
            raise OverflowError("the exponent is too large")
        value **= int(found["exponent"])
    return sign * value * _decimal(found["factor"] or "1")


def _decimal(text: str) -> Fraction:
    number = Decimal(re.sub(r"[,_{}()\s]", "", text))
    if abs(number.adjusted()) > _MAX_EXPONENT:
        raise OverflowError("the number is too large")
    return Fraction(number)
