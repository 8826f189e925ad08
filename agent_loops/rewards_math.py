"""Compares answers as mathematics: `rollout.reward: agent_loops.rewards_math:math_answer`.

The comparison uses `math-verify` on sympy, which may never finish. It runs in the main threads of worker
processes, because its own limits need signals.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Final

from agent_loops.rewards import final_answer, reference_answer
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
_CURRENCY: Final = re.compile(r"\\?[$£€]")


@in_processes(2)
def math_answer(task: Task, completion: Completion, limit_s: int = 5) -> float:
    r"""Return 1 if the answer equals the reference mathematically, else 0.

    The last `\boxed{}` after the completion's thoughts counts, or else its last formula or number. The
    reference is the text after `####` (GSM8K), or else the whole answer of the task; it may have a box, too.

    Args:
        task: The task, whose answer is the reference.
        completion: The completion with the answer.
        limit_s: Seconds for parsing an answer, and again for comparing it; a slower answer is wrong.

    Raises:
        ValueError: The task has no answer, or the reference is not mathematics.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    reference = str(reference_answer(task)).rpartition("####")[2].strip()
    boxed = last_box(reference)
    if boxed is None and reference.replace("\\$", "").count("$") < 2:  # no formula
        boxed = _CURRENCY.sub("", reference)
    gold = parse(
        reference if boxed is None else f"\\boxed{{{boxed}}}",
        extraction_config=[LatexExtractionConfig()],
        parsing_timeout=limit_s,
    )
    if not gold:
        raise ValueError(f"the reference answer {task.answer!r:.200} cannot be read as mathematics")
    text = final_answer(completion)
    boxed = last_box(text)  # alone: math-verify would make a set of boxes that are close to each other
    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
    answer = parse(
        text if boxed is None else f"\\boxed{{{boxed}}}", extraction_config=kinds, parsing_timeout=limit_s
    )
    return float(verify(gold, answer, timeout_seconds=limit_s))


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
