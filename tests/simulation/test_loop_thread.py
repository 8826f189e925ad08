"""Files, disk usage and SQLite keep to threads while a run continues; with real time, files and threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.trainer_protocol import StepResult
from tests.simulation.test_loop import FlakyReward, make_config, run
from tests.support.local_cluster import LocalCluster
from tests.support.loop_blockers import loop_blockers

pytestmark = pytest.mark.real_time

STEPS = 8


@pytest.mark.real
@pytest.mark.parametrize("drops", [False, True])
async def test_nothing_slow_runs_on_the_event_loop(calculator: Path, tmp_path: Path, drops: bool) -> None:
    """With `drops`, groups are dropped that have files: some of their trajectories have ended."""
    FlakyReward.calls = 0
    validation = tmp_path / "validation.jsonl"
    validation.write_text("".join((calculator / "data" / "tasks.jsonl").read_text().splitlines(True)[:4]))
    failing = (
        f"rollout.reward={FlakyReward.__module__}:FlakyReward.score",
        "rollout.max_attempts=1",
        "rollout.min_group_size=3",
        "rollout.max_failed_share=1",
    )
    config = make_config(
        calculator,
        tmp_path,
        f"run.max_steps={STEPS}",
        "queue.journal_s=0.05",
        f"data.validation=[{{path: {validation}}}]",
        "evaluation.every=2",
        *(failing if drops else ()),
    )
    cluster = LocalCluster(config, step_s=0.05)
    train_step = cluster.trainer.train_step
    with loop_blockers() as blockers:

        async def train_watched(path: str, step: int) -> StepResult:
            blockers.stop()  # the trainer is another process
            result = await train_step(path, step)
            if step < STEPS:  # neither the start nor the end of the run
                blockers.start()
            return result

        cluster.trainer.train_step = train_watched  # type: ignore[method-assign]
        summary = await run(config, cluster)
    assert ("too_few_siblings" in summary.trajectories.dropped) == drops
    assert not blockers.places


def test_a_blocking_call_is_found(tmp_path: Path) -> None:
    from async_rl.runtime.files import replace_file

    with loop_blockers() as blockers:
        replace_file(tmp_path / "before", b"")
        blockers.start()
        replace_file(tmp_path / "a", b"")
        blockers.stop()
    assert any("runtime/files.py:replace_file" in place for place in blockers.places)
