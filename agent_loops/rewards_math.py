"""Mathematical answers, compared as mathematics: `rollout.reward: agent_loops.rewards_math:math_answer`.

The comparison is `math-verify`'s, on sympy, which can compute for ever: it runs in worker processes, in their
main threads, as its own limits by signals want it.
"""

from __future__ import annotations

import importlib.util

from async_rl.errors import EnvironmentNotReady
from async_rl.runtime.worker_processes import in_processes
from async_rl.types import Completion, Task

if importlib.util.find_spec("math_verify") is None:
    raise EnvironmentNotReady(
        "agent_loops.rewards_math compares answers with the package math-verify, which is not installed: pip "
        "install 'async-rl[rewards]'"
    )


@in_processes(2)
def math_answer(task: Task, completion: Completion, limit_s: int = 5) -> float:
    r"""1 when the answer equals the reference, as mathematics; else 0.

    Of the answer, the last `\boxed{}` counts, or else its last formula or number; of the reference, what
    stands after `####` where it has that (GSM8K), and else all of it.

    Args:
        task: Its answer is the reference.
        completion: Of the policy.
        limit_s: For reading an answer, and again for comparing it, seconds; one that takes longer is wrong.

    Raises:
        ValueError: The reference is no mathematics.
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
