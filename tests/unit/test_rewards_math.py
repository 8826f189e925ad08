"""Mathematical answers, in the worker process that the reward asks for."""

from __future__ import annotations

import asyncio
import time

import pytest

from agent_loops import rewards_math
from agent_loops.rewards_math import math_answer
from async_rl.errors import RewardError
from async_rl.observability.metrics import Metrics
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.runtime.worker_processes import processes_asked
from tests.support.reward_functions import make_completion
from tests.support.run_config import config_of
from tests.support.scripted_session import make_task


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("1/2", r"so it is \boxed{\frac{1}{2}}", 1.0),
        (r"\frac{\sqrt{2}}{2}", r"it is $\frac{1}{\sqrt 2}$", 1.0),
        ("She has 10 + 62 = 72.\n#### 72", "First 71, then 72.", 1.0),
        ("1,000", "It is 1000", 1.0),
        ("4", r"4 plus one is \boxed{5}", 0.0),
        ("4", "I do not know", 0.0),
        (4, "4", 1.0),
        ("2", r"\boxed{1}. Wait: \boxed{2}", 1.0),
        ("1", r"\boxed{1}. Wait: \boxed{2}", 0.0),
        ("2", r"\boxed{2}, or \boxed{3", 1.0),
        ("3", r"\fbox{3}", 1.0),
        ("5", r"\boxed 5.", 1.0),
        (r"\$18", r"\boxed{18}", 1.0),
        ("$18", "It is $18.", 1.0),
        ("$x+1$", r"\boxed{1+x}", 1.0),
        (r"so \boxed{7}", r"\boxed{7}", 1.0),
        ("4", r"<think>\boxed{4}", 0.0),
        ("4", r"<think>\boxed{5}</think>\boxed{4}", 1.0),
        ("{1,2}", r"\boxed{\{1, 2\}}", 1.0),
        *(("2 1/3", rf"\boxed{{{text}}}", float(text == "7/3")) for text in ("7/3", "2", "1")),
        *(("3/2", text, 1.0) for text in (r"\boxed{1 1/2}", "It is 1 1/2.")),
        *(
            (answer, r"\boxed{100000}", 1.0)
            for answer in (1e5, "1e5", r"100\,000", "1 x 10^5", "**100000.**")
        ),
        *(
            ("100000", text, 1.0)
            for text in ("It is 1e5.", "10\u2075", r"\boxed{100 000.}", r"$1 \times 10^5$")
        ),
        *(
            (wrong, text, 0.0)
            for wrong in ("0", "10", "100")
            for text in ("10\u2075", "100 000", r"100\,000")
        ),
        (1e-05, r"\boxed{10^{-5}}", 1.0),
        (1e22, r"\boxed{10^{22}}", 1.0),
        (r"10\,000", r"\boxed{0}", 0.0),
        ("-5", "It is \u22125.", 1.0),
        *(
            (answer, r"\boxed{5}", 1.0)
            for answer in ("Answer: 5", "5 dollars", "5\u00b0", "The answer is **5**.")
        ),
        *(("5", f"\\boxed{{{text}}}", 1.0) for text in ("\u00a35", "5\u00b0", "5^\\circ")),
        ("1024", r"\boxed{2**10}", 1.0),
        ("x\u00b2", r"\boxed{x^2}", 1.0),
        ("sqrt(2)", r"\boxed{\sqrt{2}}", 1.0),
        ("2 pi", r"\boxed{2\pi}", 1.0),
        ("sin(x)", r"\boxed{\sin x}", 1.0),
        *(("Paris", text, 1.0) for text in (r"\boxed{\text{paris}}", "It is Paris.", "Paris")),
        *(("Paris", text, 0.0) for text in (r"\boxed{Pairs}", "I like Comparis", "5", "")),
        (r"\text{(B)}", "**B**", 1.0),
        ("B", r"\boxed{C}", 0.0),
        ("xy", r"\boxed{yx}", 1.0),
        ("$abc$", r"\boxed{cba}", 1.0),
    ],
)
def test_answers_are_compared_as_mathematics(answer: object, text: str, reward: float) -> None:
    assert math_answer(make_task(answer=answer), make_completion(text), limit_s=200) == reward


@pytest.mark.parametrize("answer", ["####", "red, 5 apples", "?"])
def test_a_reference_that_is_no_mathematics_is_an_error(answer: str) -> None:
    with pytest.raises(ValueError, match=r"the reference answer .* cannot be read as mathematics"):
        math_answer(make_task(answer=answer), make_completion("4"), limit_s=200)


@pytest.mark.real
@pytest.mark.real_time
async def test_an_answer_that_computes_forever_is_wrong_and_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert processes_asked(rewards_math.math_answer) == 2
    name = "agent_loops.rewards_math:math_answer"
    settings = {"function": name, "processes": 1, "timeout_s": 100, "args": {"limit_s": 5}}
    config = config_of(reward="math", rewards={"math": settings})
    rewards = Rewards(config, decode=str, metrics=Metrics(), clock=time.monotonic)
    try:
        score = asyncio.ensure_future(
            rewards.score_completion(make_task(answer="4"), make_completion(r"\boxed{9^{9^{9^{9}}}}"))
        )
        turns = 0
        while not score.done():
            await asyncio.wait([score], timeout=0.05)
            turns += 1
        assert turns > 10  # the loop ran on meanwhile
        assert await score == {"reward": 0.0}
        with pytest.raises(RewardError, match="raised ValueError: the reference answer"):
            await rewards.score_completion(make_task(answer="?"), make_completion("4"))
    finally:
        await rewards.close()
