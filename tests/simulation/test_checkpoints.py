"""Checkpoints in the background: when the ledger learns of them, and the effect of a failure."""

import json
from typing import Any

import pytest

from async_rl.errors import CheckpointError
from async_rl.run import checkpoints
from async_rl.run.checkpoints import Checkpoints
from async_rl.runtime.supervision import first_error
from async_rl.store.ledger import Ledger
from async_rl.trainer_protocol import Saved, TrainerState
from tests.simulation.test_loop import assert_conserved, make_config, metrics_of_the_run, run
from tests.simulation.test_trainer_restart import RestartedCluster, died


class SlowDisk:
    """Completes or fails a trainer's checkpoints when the test says so."""

    def __init__(self, cluster: RestartedCluster, fails: set[int]) -> None:
        self.trainer, self.fails = cluster.trainer, fails
        self.write = cluster.trainer.save_checkpoint
        self.asked: list[tuple[int, int, bool]] = []  # (step of the checkpoint, step of the trainer, wait)
        self.copied: tuple[int, str, dict[str, Any]] | None = None
        cluster.trainer.save_checkpoint = self.copy  # type: ignore[method-assign]
        cluster.trainer.saved_checkpoint = self.saved  # type: ignore[method-assign]

    async def copy(self, directory: str, extra: dict[str, Any]) -> None:
        assert self.copied is None, "the one before is still being written"
        self.copied = (self.trainer.step, directory, extra)

    async def saved(self, wait: bool) -> Saved:
        assert self.copied is not None
        step, directory, extra = self.copied
        self.asked.append((step, self.trainer.step, wait))
        if not wait:
            return Saved(writing=True)
        self.copied = None
        if step in self.fails:
            return Saved(failure=f"the disk is full at {step}")
        at, self.trainer.step = self.trainer.step, step
        await self.write(directory, extra)
        self.trainer.step = at
        return Saved(step=step)


@pytest.mark.real
async def test_steps_go_on_while_a_checkpoint_is_written_and_the_ledger_learns_when_it_stands(
    calculator, tmp_path, monkeypatch
):
    committed: list[tuple[int, int]] = []
    commit = Ledger.record_checkpoint

    def note(ledger: Ledger, step: int, keep: int) -> None:
        latest = json.loads((tmp_path / "sim" / "checkpoints" / "latest.json").read_text())
        committed.append((step, latest["step"]))
        commit(ledger, step, keep)

    monkeypatch.setattr(Ledger, "record_checkpoint", note)
    config = make_config(calculator, tmp_path)
    cluster = RestartedCluster(config)
    disk = SlowDisk(cluster, fails=set())
    await run(config, cluster)
    assert [step for _, step, wait in disk.asked if not wait] == [2, 3, 4, 5]
    assert [each[:2] for each in disk.asked if each[2]] == [(2, 4), (4, 6), (6, 6)]
    assert committed == [(2, 2), (4, 4), (6, 6)]


async def test_the_trainer_goes_back_to_what_stands_when_it_dies_while_a_checkpoint_is_written(
    calculator, tmp_path
):
    config = make_config(calculator, tmp_path)
    cluster = RestartedCluster(config)
    disk = SlowDisk(cluster, fails=set())
    cluster.faults[1, "train_step", 6] = died()  # that of 4 is copied and never written
    setup = cluster.trainer.setup

    async def begin(directory: str | None) -> TrainerState:
        disk.copied = None
        return await setup(directory)

    cluster.trainer.setup = begin  # type: ignore[method-assign]
    summary = await run(config, cluster)
    assert [step for incarnation, step in cluster.steps if incarnation == 2] == [3, 4, 5, 6]
    assert summary.trajectories.trained == 6 * 16
    assert_conserved(summary)


async def test_the_next_checkpoint_is_tried_when_one_cannot_be_written(calculator, tmp_path, monkeypatch):
    metrics = metrics_of_the_run(monkeypatch)
    config = make_config(calculator, tmp_path)
    cluster = RestartedCluster(config)
    SlowDisk(cluster, fails={2})
    summary = await run(config, cluster)
    assert summary.weight_versions == 6
    assert metrics.registry.get_sample_value("async_rl_checkpoint_failures_total") == 1
    assert metrics.registry.get_sample_value("async_rl_checkpoint_step") == 6


async def test_no_checkpoint_is_written_when_another_driver_has_the_ledger(calculator, tmp_path, monkeypatch):
    start = Checkpoints.start_checkpoint

    async def start_late(checkpoints: Checkpoints, step: int) -> None:
        if step == 6:
            checkpoints._groups.flush_ledger()
            Ledger(tmp_path / "sim" / "ledger.sqlite").rollback(4)
        await start(checkpoints, step)

    monkeypatch.setattr(Checkpoints, "start_checkpoint", start_late)
    config = make_config(calculator, tmp_path)
    with pytest.raises(BaseExceptionGroup) as caught:
        await run(config, RestartedCluster(config))
    assert "another driver has written" in str(first_error(caught.value))
    assert json.loads((tmp_path / "sim" / "checkpoints" / "latest.json").read_text())["step"] == 4


@pytest.mark.parametrize(("fails", "limit"), [({2, 4}, 1), ({6}, 9)])
async def test_the_run_ends_when_too_many_checkpoints_fail_or_the_last_one(
    calculator, tmp_path, monkeypatch, fails, limit
):
    monkeypatch.setattr(checkpoints, "MAX_FAILED_CHECKPOINTS", limit)
    config = make_config(calculator, tmp_path)
    cluster = RestartedCluster(config)
    SlowDisk(cluster, fails=set(fails))
    with pytest.raises(BaseExceptionGroup) as caught:
        await run(config, cluster)
    error = first_error(caught.value)
    assert isinstance(error, CheckpointError)
    assert f"the disk is full at {max(fails)}" in str(error)
    assert cluster.incarnations == 1
