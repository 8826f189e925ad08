"""Files, disk usage and SQLite keep to threads while a run goes on; with real time, files and threads."""

from __future__ import annotations

from pathlib import Path

from async_rl.trainer_protocol import StepResult
from tests.simulation.test_loop import make_config, run
from tests.support.local_cluster import LocalCluster
from tests.support.loop_blockers import loop_blockers

STEPS = 8

ALLOWED = {"open in observability/record_log.py:append"}
"""One line for each step, appended without waiting for the disk."""


async def test_nothing_slow_runs_on_the_event_loop(calculator: Path, tmp_path: Path) -> None:
    config = make_config(calculator, tmp_path, f"run.max_steps={STEPS}", "queue.journal_s=0.05")
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
        await run(config, cluster)
    assert set(blockers.places) - ALLOWED == set(), blockers.places


def test_a_blocking_call_is_found(tmp_path: Path) -> None:
    from async_rl.runtime.files import replace_file

    with loop_blockers() as blockers:
        replace_file(tmp_path / "before", b"")
        blockers.start()
        replace_file(tmp_path / "a", b"")
        blockers.stop()
    assert any("runtime/files.py:replace_file" in place for place in blockers.places)
