"""A whole run whose sandboxes are lost: the attempts are made again, and never scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from agent_loops.sandboxes import Sandboxes
from async_rl.rollout.session.api import Session
from async_rl.types import Completion, Task
from tests.simulation.test_loop import assert_conserved, make_config, run
from tests.support.local_cluster import LocalCluster
from tests.support.memory_sandboxes import SERVICES, backend


class LosesSandboxes:
    """Has a sandbox, which the first attempt at each task loses."""

    sandboxes: ClassVar[Any]
    seen: ClassVar[set[str]] = set()
    lost: ClassVar[list[str]] = []
    kept: ClassVar[list[str]] = []
    """Trajectories whose attempt had its sandbox to its end."""
    scored: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.given = backend("lossy")

    async def __aenter__(self) -> None:
        self.sandboxes = await Sandboxes(self.given).__aenter__()

    async def __aexit__(self, *error: object) -> None:
        await self.sandboxes.__aexit__(*error)

    async def run(self, task: Task, session: Session) -> None:
        session.start(task.messages)
        async with self.sandboxes.open(session) as box:
            await session.generate()
            loses = session.trajectory_id not in self.seen
            if loses:
                self.seen.add(session.trajectory_id)
                SERVICES["lossy"].running.pop(box.name)
                self.lost.append(session.trajectory_id)
            await box.exec("true")
            if not loses:
                self.kept.append(session.trajectory_id)


def score(task: Task, completion: Completion) -> float:
    LosesSandboxes.scored.append(completion.text)
    return 1.0


async def test_attempts_that_lose_their_sandbox_are_made_again_and_never_scored(
    calculator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = make_config(
        calculator,
        tmp_path,
        "run.max_steps=2",
        f"rollout.agent_loop={__name__}:LosesSandboxes",
        f"rollout.reward={__name__}:score",
        "rollout.max_attempts=2",
        "rollout.max_failed_share=1.0",
    )
    cluster = LocalCluster(config, step_s=0.02)
    summary = await run(config, cluster)
    assert summary.weight_versions == 2
    assert LosesSandboxes.lost
    assert len(LosesSandboxes.scored) <= len(LosesSandboxes.kept)
    assert not summary.trajectories.dropped
    assert_conserved(summary)
    rewards = [reward for batch in cluster.trainer.batches for reward in batch.rewards]
    assert set(rewards) == {1.0}
    assert not SERVICES["lossy"].running
