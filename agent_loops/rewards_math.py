"""Compares answers as mathematics: `rollout.reward: agent_loops.rewards_math:math_answer`.

The comparison uses `math-verify` on sympy, which may never finish. It runs in the main threads of worker
processes, because its own limits need signals.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any, Final

from agent_loops.rewards import NUMBER, final_answer, plain_text, reference_answer, simple_numbers
from async_rl.errors import EnvironmentNotReady
from async_rl.runtime.worker_processes import in_processes
from async_rl.types import Completion, Task

if importlib.util.find_spec("math_verify") is None:
    raise EnvironmentNotReady(
        "agent_loops.rewards_math compares answers with the package math-verify, which is not installed: run "
        "`pip install -e '.[rewards]'` in async_rl's checkout"
    )


_BOX: Final = re.compile(r"\\(?:boxed|fbox)\s*(?:(?=\{)|(?P<bare>[^\s{}$\\]+))")
_MAX_BOXES: Final = 20
"""Boxes that are searched from the end for a complete one."""
_AROUND: Final = re.compile(
    r"^[*\s]*(?:(?:the )?(?:final )?answer(?: is\b|\s*[:=])[*\s]*)?"
    r"|\\?[$£€¥]|\b(?:dollar|euro|pound|cent)s?\b",
    re.IGNORECASE,
)
"""What may be around a number or a formula without a meaning for its value."""
_NAMES: Final = re.compile(r"(?<![\\A-Za-z])(?:pi|sin|cos|tan|log|ln|exp)(?![A-Za-z])")
"""Names that math-verify would read as products of their letters without a backslash."""
_STYLE: Final = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{|[}$*\"]")
_WORDS: Final = re.compile(r"[a-z]|[^\W\d_]{2,}(?:[ '-]+[^\W\d_]+)*")


@in_processes(2)
def math_answer(task: Task, completion: Completion, limit_s: int = 5) -> float:
    r"""Return 1 if the answer equals the reference mathematically, else 0.

    The last `\boxed{}` after the completion's thoughts counts, or else its last formula or number. The
    reference is the text after `####` (GSM8K), or else the whole answer of the task; it may have a box, too.
    A reference of words is compared as text, without case, with the box or else the last words.

    Args:
        task: The task, whose answer is the reference.
        completion: The completion with the answer.
        limit_s: Seconds for parsing an answer, and again for comparing it; a slower answer is wrong.

    Raises:
        ValueError: The task has no answer, or the reference is not mathematics.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    text = final_answer(completion)
    boxed = last_box(text)  # alone: math-verify would make a set of boxes that are close to each other
    reference = reference_answer(task).rpartition("####")[2].strip()
    words = _as_words(last_box(reference) or reference)
    if _WORDS.fullmatch(words) and "$" not in reference:
        answer = _as_words(text if boxed is None else boxed)
        if answer == words or (boxed is None and re.search(rf"\W{re.escape(words)}$", answer)):
            return 1.0
        if len(words) > 2 or not words.isascii():  # else it may be a product of symbols
            return 0.0
    gold = _parse_reference(reference, limit_s)
    if boxed is not None:
        text = f"\\boxed{{{_as_formula(boxed)}}}"
    else:
        is_plain = "\\" not in text and text.count("$") < 2
        text = simple_numbers(plain_text(text)) if is_plain else plain_text(text)
    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
    answer = parse(text, extraction_config=kinds, parsing_timeout=limit_s)
    return float(verify(gold, answer, timeout_seconds=limit_s))


def _parse_reference(reference: str, limit_s: int) -> list[Any]:
    """Return what math-verify reads in a reference.

    Raises:
        ValueError: It reads nothing, or a product of the letters of a word.
    """
    from math_verify import LatexExtractionConfig, parse

    boxed = last_box(reference)
    if boxed is None and reference.replace("\\$", "").count("$") < 2:  # no formula
        boxed = reference
    text = plain_text(reference) if boxed is None else f"\\boxed{{{_as_formula(boxed)}}}"
    gold: list[Any] = parse(text, extraction_config=[LatexExtractionConfig()], parsing_timeout=limit_s)
    formulas = [each for each in gold if not isinstance(each, str)]
    letters = {str(symbol) for each in formulas for symbol in each.free_symbols} | {"e", "i"}
    words = re.findall(r"[^\W\d_]{3,}", reference.lower())
    is_plain = "\\" not in reference and "$" not in reference
    if not gold or (is_plain and (not formulas or any(letters >= set(word) for word in words))):
        raise ValueError(
            f"the reference answer {reference!r:.200} cannot be read as mathematics; expected a number, "
            "LaTeX (with `$` around a product of symbols), or words alone"
        )
    return gold


def _as_formula(text: str) -> str:
    """Return the content of a box without what does not change its value, a number in a simple spelling."""
    text = _NAMES.sub(r"\\\g<0>", _AROUND.sub("", plain_text(text).rstrip("°.* \n")).strip())
    return simple_numbers(text) if NUMBER.fullmatch(text) else text


def _as_words(text: str) -> str:
    """Return a text for comparisons of words: without styles, brackets, and differences of case or spaces."""
    return " ".join(_STYLE.sub("", plain_text(text)).casefold().split()).strip("().")


def last_box(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{}`, or None if there is none."""
    for found in reversed(list(_BOX.finditer(text))[-_MAX_BOXES:]):
        if found["bare"]:
            return found["bare"].rstrip(".,;:")
        depth, escaped = 0, False
        for at in range(found.end(), len(text)):
            depth += 0 if escaped else {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[found.end() + 1 : at]
            escaped = text[at] == "\\" and not escaped
    return None
