"""Whole runs whose agent loops misbehave: what they do costs their trajectories, never the run."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from async_rl.observability.records import Summary
from async_rl.rollout.session.api import Session
from async_rl.types import Completion, Task
from tests.simulation.test_loop import assert_conserved, make_config, run
from tests.support.local_cluster import LocalCluster

STEPS = 3


def score(task: Task, completion: Completion) -> float:
    return len(completion.text) % 7 / 7


class OneTurn:
    """Writes one turn; the first attempt at each task misbehaves."""

    seen: ClassVar[set[tuple[type, str]]] = set()
    misbehaved: ClassVar[set[str]] = set()
    """Trajectories of the attempts that did."""

    async def run(self, task: Task, session: Session) -> Any:
        session.start(task.messages)
        turn = await session.generate()
        known, key = self.seen, (type(self), task.task_id)
        if key in known:
            return None
        known.add(key)
        self.misbehaved.add(session.trajectory_id)
        return await self.misbehave(session, turn.text)

    async def misbehave(self, session: Session, text: str) -> Any:
        raise NotImplementedError


class Exits(OneTurn):
    async def misbehave(self, session: Session, text: str) -> Any:
        sys.exit(3)


class RaisesCancelled(OneTurn):
    """Awaits a task that it has cancelled itself, which is a common mistake."""

    async def misbehave(self, session: Session, text: str) -> Any:
        task = asyncio.ensure_future(asyncio.sleep(60))
        task.cancel()
        await task


class AddsOrReturns(OneTurn):
    """Adds a message without text, or returns what is no reason to stop."""

    contents: ClassVar = [None, 42, {"found": 3}, [1, 2]]
    results: ClassVar = [42, {"reward": 1.0}, 0.5, "error"]

    async def misbehave(self, session: Session, text: str) -> Any:
        number = len(self.seen)
        if number % 2:
            return self.results[number // 2 % 4]
        return session.add_messages([{"role": "tool", "content": self.contents[number // 2 % 4]}])


class OpensFile(OneTurn):
    """Opens a file at a moment at which the process has no free descriptor."""

    async def misbehave(self, session: Session, text: str) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/etc/hosts")


async def go(calculator: Path, tmp_path: Path, loop: str, *overrides: str) -> tuple[Summary, LocalCluster]:
    OneTurn.seen.clear()
    OneTurn.misbehaved.clear()
    config = make_config(
        calculator,
        tmp_path,
        f"run.max_steps={STEPS}",
        f"rollout.agent_loop={__name__}:{loop}",
        f"rollout.reward={__name__}:score",
        "rollout.max_attempts=1",
        *overrides,
    )
    cluster = LocalCluster(config, step_s=0.02)
    return await run(config, cluster), cluster


@pytest.mark.parametrize(
    "loop",
    ["AddsOrReturns", "Exits", "RaisesCancelled"],
)
async def test_a_run_goes_on_when_some_attempts_misbehave(
    calculator: Path, tmp_path: Path, loop: str
) -> None:
    summary, cluster = await go(calculator, tmp_path, loop)
    assert summary.weight_versions == STEPS
    assert_conserved(summary)
    assert set(summary.trajectories.dropped) == {"agent_loop_error"}
    assert len(OneTurn.misbehaved) >= 8
    assert not OneTurn.misbehaved & {
        name for batch in cluster.trainer.batches for name in batch.trajectory_ids
    }


class Swallows(OneTurn):
    """Some trajectories are far behind, and what cancels them is caught."""

    async def misbehave(self, session: Session, text: str) -> Any:
        with suppress(BaseException):
            await asyncio.sleep(60)
        session.annotate(late=True)


class Polls(OneTurn):
    """Waits for what never comes, and takes its cancellation for a timeout."""

    async def misbehave(self, session: Session, text: str) -> Any:
        while True:
            try:
                await asyncio.wait_for(asyncio.Event().wait(), 0.01)
            except BaseException:
                continue


@pytest.mark.real
@pytest.mark.parametrize("loop", ["Swallows", "Polls"])
async def test_a_run_goes_on_when_loops_swallow_the_cancellation_of_stragglers(
    calculator: Path,
    tmp_path: Path,
    loop: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("async_rl.rollout.attempt.CLEAN_UP_S", 0.05, raising=False)
    summary, _ = await go(calculator, tmp_path, loop, "rollout.straggler_wait_s=0.01")
    assert summary.weight_versions == STEPS
    assert summary.trajectories.dropped["straggler"] > 1
    assert_conserved(summary)
    gc.collect()  # resumes no loop once more
    told = [record for record in caplog.records if "does not end when it is cancelled" in record.message]
    assert len(told) == 1
    assert f"agent loop {__name__}:{loop}" in told[0].message


async def test_an_attempt_is_made_again_when_user_code_finds_no_descriptor(
    calculator: Path, tmp_path: Path
) -> None:
    summary, _ = await go(calculator, tmp_path, "OpensFile", "rollout.max_failed_share=0.01")
    assert len(OneTurn.seen) > STEPS
    assert not summary.trajectories.dropped
    assert_conserved(summary)
