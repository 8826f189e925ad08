"""Compares answers as mathematics: `rollout.reward: agent_loops.rewards_math:math_answer`.

The comparison uses `math-verify` on sympy, which may never finish. It runs in the main threads of worker
processes, because its own limits need signals.
"""

from __future__ import annotations

import importlib.util

from async_rl.errors import EnvironmentNotReady
from async_rl.runtime.worker_processes import in_processes
from async_rl.types import Completion, Task

if importlib.util.find_spec("math_verify") is None:
    raise EnvironmentNotReady(
        "agent_loops.rewards_math compares answers with the package math-verify, which is not installed: run "
        "`pip install -e '.[rewards]'` in async_rl's checkout"
    )


@in_processes(2)
def math_answer(task: Task, completion: Completion, limit_s: int = 5) -> float:
    r"""Return 1 if the answer equals the reference mathematically, else 0.

    The last `\boxed{}` of the completion counts, or else its last formula or number. The reference is the
    text after `####` (GSM8K), or else the whole answer of the task.

    Args:
        task: The task, whose answer is the reference.
        completion: The completion with the answer.
        limit_s: Seconds for parsing an answer, and again for comparing it; a slower answer is wrong.

    Raises:
        ValueError: The reference is not mathematics.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    reference = str(task.answer).rpartition("####")[2].strip()
    if "$" not in reference and "\\boxed" not in reference:
        reference = f"\\boxed{{{reference}}}"
    gold = parse(reference, extraction_config=[LatexExtractionConfig()], parsing_timeout=limit_s)
    if not gold:
        raise ValueError(f"the reference answer {task.answer!r:.200} cannot be read as mathematics")
    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
    answer = parse(completion.text, extraction_config=kinds, parsing_timeout=limit_s)
    return float(verify(gold, answer, timeout_seconds=limit_s))
