"""Rewards that are called once a group, in the whole loop on simulated engines."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_loops.base import AgentLoop
from async_rl.errors import AsyncRLError
from async_rl.observability.records import Summary
from async_rl.rollout.session.api import Session
from async_rl.runtime.supervision import first_error
from async_rl.types import Completion, Task
from tests.simulation.test_loop import assert_conserved, make_config, run
from tests.support.local_cluster import LocalCluster


class Judge:
    """Remembers what it was asked, and answers as a test wants."""

    asked: list[list[Completion]]
    answer: Callable[[Sequence[Completion]], Any]
    takes_s = 0.1

    @classmethod
    async def score(cls, task: Task, completions: Sequence[Completion]) -> Any:
        cls.asked.append(list(completions))
        await asyncio.sleep(cls.takes_s)
        return cls.answer(completions)


Play = Callable[..., Awaitable[Summary]]


@pytest.fixture
def play(calculator: Path, tmp_path: Path) -> Play:
    ids = itertools.count()

    async def play_run(*overrides: str, limit_s: float | None = None) -> Summary:
        Judge.asked = []
        config = make_config(
            calculator, tmp_path, f"rollout.reward={__name__}:Judge.score", "run.max_steps=3", *overrides
        )
        cluster = LocalCluster(config, step_s=0.5)
        async with asyncio.timeout(limit_s):
            summary = await run(config, cluster, new_id=lambda: f"{next(ids):032x}")
        assert_conserved(summary)
        return summary

    return play_run


async def test_a_group_is_scored_once_and_together(play: Play) -> None:
    Judge.answer = staticmethod(lambda completions: [float(i) for i in range(len(completions))])
    # Two slots for four siblings: a finished sibling must not hold one while it waits for the others.
    summary = await play("rollout.max_concurrent_trajectories=2")
    assert summary.trajectories.dropped == {}
    assert Counter(len(asked) for asked in Judge.asked).keys() == {4}
    assert summary.reward_last == 1.5
    for asked in Judge.asked:
        assert all(len(each.token_ids) == len(each.response_mask) for each in asked)
        assert all(each.response_mask.any() for each in asked)


class TwoVoices(AgentLoop):
    """Has another conversation beside its own; its own words count for both."""

    async def run(self, task: Task, session: Session) -> None:
        session.start(task.messages)
        async with session.conversation() as other:
            other.start(task.messages)
            await other.generate()
        await session.generate()
        session.share_reward()


async def test_who_speaks_for_several_trajectories_is_scored_once(play: Play) -> None:
    Judge.answer = staticmethod(lambda completions: [1.0, 0.0, float("nan"), 0.5])
    summary = await play(f"rollout.agent_loop={__name__}:TwoVoices", "rollout.max_branches=1")
    assert Counter(len(asked) for asked in Judge.asked).keys() == {4}
    assert summary.reward_last == 0.5
    dropped = summary.trajectories.dropped
    assert set(dropped) == {"reward_error"}
    assert dropped["reward_error"] == 2 * len(Judge.asked)


async def test_groups_that_wait_for_their_reward_are_asked_for_again_after_a_restart(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    Judge.answer = staticmethod(lambda completions: [float(i) for i in range(len(completions))])
    with monkeypatch.context() as patch:
        patch.setattr(Judge, "takes_s", 50.0)
        with pytest.raises(TimeoutError):
            await play(limit_s=30.0)
        before = {tuple(each.token_ids.tolist()) for asked in Judge.asked for each in asked}
    summary = await play()
    after = {tuple(each.token_ids.tolist()) for asked in Judge.asked for each in asked}
    assert before
    assert before <= after  # the same answers: nothing was sampled again
    assert summary.trajectories.dropped == {}


async def test_the_run_ends_with_the_cause_when_no_group_is_scored(play: Play) -> None:
    Judge.answer = staticmethod(lambda completions: [1.0])
    with pytest.raises(BaseExceptionGroup) as caught:
        await play()
    error = first_error(caught.value)
    assert isinstance(error, AsyncRLError)
    assert "returned 1 rewards, expected 4, one for each completion" in str(error)
