"""Whole runs whose agent loops misbehave: what they do costs their trajectories, never the run."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import sys
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

    seen: ClassVar[set[str]] = set()
    misbehaved: ClassVar[set[str]] = set()
    """Trajectories of the attempts that did."""

    async def run(self, task: Task, session: Session) -> Any:
        session.start(task.messages)
        turn = await session.generate()
        if task.task_id in self.seen:
            return None
        self.seen.add(task.task_id)
        self.misbehaved.add(session.trajectory_id)
        return await self.misbehave(session, turn.text)

    async def misbehave(self, session: Session, text: str) -> Any:
        raise NotImplementedError


class InTurns(OneTurn):
    """Exits, awaits a task that it has cancelled, adds no text, or returns what is no reason to stop."""

    async def misbehave(self, session: Session, text: str) -> Any:
        match len(self.seen) % 4:
            case 0:
                sys.exit(3)
            case 1:
                task = asyncio.ensure_future(asyncio.sleep(60))
                task.cancel()
                await task
            case 2:
                session.add_messages([{"role": "tool", "content": None}])
        return {"reward": 1.0}


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


async def test_a_run_goes_on_when_some_attempts_misbehave(calculator: Path, tmp_path: Path) -> None:
    summary, cluster = await go(calculator, tmp_path, "InTurns")
    assert summary.weight_versions == STEPS
    assert_conserved(summary)
    assert set(summary.trajectories.dropped) == {"agent_loop_error"}
    assert len(OneTurn.misbehaved) >= 8
    assert not OneTurn.misbehaved & {
        name for batch in cluster.trainer.batches for name in batch.trajectory_ids
    }


class Polls(OneTurn):
    """Waits for what never comes, and takes its cancellation for a timeout."""

    async def misbehave(self, session: Session, text: str) -> Any:
        while True:
            try:
                await asyncio.wait_for(asyncio.Event().wait(), 0.01)
            except BaseException:
                continue


@pytest.mark.real
async def test_a_run_goes_on_when_loops_swallow_the_cancellation_of_stragglers(
    calculator: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("async_rl.rollout.attempt.CLEAN_UP_S", 0.05, raising=False)
    summary, _ = await go(calculator, tmp_path, "Polls", "rollout.straggler_wait_s=0.01")
    assert summary.weight_versions == STEPS
    assert summary.trajectories.dropped["straggler"] > 1
    assert_conserved(summary)
    gc.collect()  # resumes no loop once more
    told = [record for record in caplog.records if "does not end when it is cancelled" in record.message]
    assert len(told) == 1
    assert f"agent loop {__name__}:Polls" in told[0].message


async def test_an_attempt_is_made_again_when_user_code_finds_no_descriptor(
    calculator: Path, tmp_path: Path
) -> None:
    summary, _ = await go(calculator, tmp_path, "OpensFile", "rollout.max_failed_share=0.01")
    assert len(OneTurn.seen) > STEPS
    assert not summary.trajectories.dropped
    assert_conserved(summary)
