"""The records of a run over several incarnations."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from async_rl.engines.pool import EnginePool
from async_rl.errors import AsyncRLError
from async_rl.observability.evaluation_record import EvaluationRecord, evaluation_record_log
from async_rl.observability.metrics import Metrics
from async_rl.observability.record_log import RecordLog
from async_rl.observability.records import StepRecord, TrajectoryCounts, step_record_log
from async_rl.run.run_log import RunLogger, TrainedStep
from async_rl.runtime.supervision import Nursery
from async_rl.store.trajectory_queue import TrajectoryQueue
from async_rl.trainer_protocol import StepResult
from async_rl.types import StoredTrajectory, TakenBatch, TokenSpan
from async_rl.weights.weight_sync import SyncReport
from tests.support.run_config import config_of


class Queue:
    """The part of a queue that the run log uses."""

    def __init__(self) -> None:
        self.groups = Mock()
        self.groups.lengths.distance = None
        self.groups.ledger.counts.return_value = TrajectoryCounts(
            dispatched=3, in_flight=1, queued=0, trained=2
        )


def done(step: int, wait_s: float, **figures: float) -> TrainedStep:
    def stored(name: str, context: int, sampled: int, version: int, **more: Any) -> StoredTrajectory:
        return StoredTrajectory(
            trajectory_id=name,
            group_id="g",
            task_id="task",
            path="",
            nbytes=0,
            checksum=0,
            spans=(TokenSpan(length=context), TokenSpan(length=sampled, weight_version=version)),
            stop_reason="completed",
            **more,
        )

    batch = TakenBatch(
        batch_id=f"batch {step}",
        trainer_version=step,
        group_ids=("g",),
        group_index=(0, 0),
        trajectories=(
            stored("a", 2, 3, step, reward=0.0),
            stored("b", 3, 4, step - 1, reward=1.0, num_resumes=1),
        ),
    )
    result = StepResult(step=step, metrics={"loss": 0.5, "grad_norm": 1.0} | figures)
    return TrainedStep(batch=batch, result=result, wait_s=wait_s, step_s=1.0, sync_hidden_s=0.0)


QUEUE = cast(TrajectoryQueue, Queue())


def make_run_log(
    folder: Path, metrics: Metrics | None = None, clock: Callable[[], float] = lambda: 0.0
) -> RunLogger:
    metrics = metrics or Metrics()
    pool = EnginePool(metrics, clock)
    return RunLogger(config_of(), folder, pool, metrics, clock)


def begun_run_log(folder: Path) -> RunLogger:
    run_log = make_run_log(folder)
    run_log.begin_training(0)
    return run_log


async def test_records_continue_from_the_checkpoint_when_a_run_is_restarted(
    tmp_path: Path,
) -> None:
    for step, time_s in ((1, 10.0), (2, 20.0), (3, 30.0)):
        record = StepRecord(step=step, weight_version=step, time_s=time_s, wait_s=4.0, tokens_per_s=2.0)
        step_record_log(tmp_path / "metrics.jsonl").append(record)
    now_s, metrics = 1000.0, Metrics()
    run_log = make_run_log(tmp_path, metrics, lambda: now_s)
    assert [record.step for record in run_log.records] == [1, 2, 3]
    assert run_log.elapsed_s is None

    await run_log.load_records_until(2)
    now_s += 50.0  # the start
    run_log.begin_training(2)
    assert run_log.elapsed_s == 20.0
    now_s += 5.0
    metrics.sampled_tokens_total.inc(10)
    await run_log.log_step(done(3, wait_s=2.0), SyncReport(weight_version=3), QUEUE)

    written = step_record_log(tmp_path / "metrics.jsonl").read()[-1]
    assert (written.step, written.time_s, written.tokens_per_s) == (3, 25.0, 2.0)
    assert [record.step for record in run_log.records] == [1, 2, 3]
    assert metrics.registry.get_sample_value("async_rl_trainer_idle_ratio") == pytest.approx(10 / 25)
    summary = run_log.summary(Queue().groups.ledger.counts(), ended_s=now_s)
    assert (summary.rl_seconds, summary.tokens_per_s) == (25.0, 2.0)


async def test_evaluations_of_undone_steps_are_removed_when_a_run_is_set_back(tmp_path: Path) -> None:
    """Else the score of an undone version would be that of the version that is trained in its place."""
    file = evaluation_record_log(tmp_path / "evaluations.jsonl")
    for version in (2, 4, 6):
        file.append(EvaluationRecord(weight_version=version, status="done"))
    run_log = make_run_log(tmp_path, Metrics(), lambda: 0.0)
    await run_log.load_records_until(4)
    assert [record.weight_version for record in run_log.evaluations] == [2, 4]
    assert [record.weight_version for record in file.read()] == [2, 4]


async def test_a_run_goes_on_when_its_last_step_was_trained_before_the_update_of_the_one_before_ended(
    tmp_path: Path,
) -> None:
    """With `weights.overlap` a step is trained while the weights of the one before are still sent."""
    metrics = Metrics()
    now_s = 1000.0
    run_log = make_run_log(tmp_path, metrics, lambda: now_s)
    run_log.begin_training(0)
    metrics.sampled_tokens_total.inc(100)
    now_s += 5.0
    run_log.hold_step(done(2, wait_s=1.0), QUEUE)
    now_s += 20.0
    await run_log.log_step(done(1, wait_s=1.0), SyncReport(weight_version=1), QUEUE)
    await run_log.write_held_steps()
    records = step_record_log(tmp_path / "metrics.jsonl").read()
    assert [(record.step, record.time_s) for record in records] == [(1, 25.0), (2, 25.0)]

    metrics = Metrics()
    resumed = make_run_log(tmp_path, metrics, lambda: now_s)
    await resumed.load_records_until(2)
    resumed.begin_training(2)
    assert metrics.registry.get_sample_value("async_rl_sampled_tokens_total") == pytest.approx(100)


async def test_log_probs_after_a_restart_are_compared_with_those_of_the_last_step_before_it(
    tmp_path: Path,
) -> None:
    for step, lag0 in ((1, 0.011), (2, 0.012), (3, None)):  # step 3 had no token of the trainer's version
        figures = {"log_prob_abs_diff": 0.01 * step, "lag0_log_prob_abs_diff": lag0}
        record = StepRecord(step=step, weight_version=step, time_s=step, **figures)
        step_record_log(tmp_path / "metrics.jsonl").append(record)
    metrics = Metrics()
    run_log = make_run_log(tmp_path, metrics)

    def value(tokens: str, when: str) -> float | None:
        labels = {"tokens": tokens, "when": when}
        return metrics.registry.get_sample_value("async_rl_restart_log_prob_abs_diff_nats", labels)

    async def train(step: int, **figures: float) -> None:
        await run_log.log_step(done(step, 0.0, **figures), SyncReport(weight_version=step), QUEUE)

    await run_log.load_records_until(3)
    run_log.begin_training(3)
    await train(4, log_prob_abs_diff=0.7)
    assert (value("all", "before"), value("all", "after")) == (0.03, 0.7)
    assert value("lag0", "before") is None
    await train(5, log_prob_abs_diff=0.04, lag0_log_prob_abs_diff=0.6)
    await train(6, log_prob_abs_diff=0.04, lag0_log_prob_abs_diff=0.01)
    assert (value("all", "before"), value("all", "after")) == (0.03, 0.7)
    assert (value("lag0", "before"), value("lag0", "after")) == (0.012, 0.6)


async def test_the_first_start_of_a_run_is_no_restart(tmp_path: Path) -> None:
    metrics = Metrics()
    run_log = make_run_log(tmp_path, metrics)
    await run_log.load_records_until(0)
    run_log.begin_training(0)
    await run_log.log_step(done(1, 0.0, log_prob_abs_diff=0.7), SyncReport(weight_version=1), QUEUE)
    assert next(iter(metrics.restart_log_prob_abs_diff_nats.collect())).samples == []


@pytest.mark.real_time
@pytest.mark.parametrize("writes", ["log", "checkpoint"])
async def test_a_step_has_one_line_when_its_write_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: str
) -> None:
    """Whatever moment the run is stopped at, a line that is being written is written once."""
    run_log = begun_run_log(tmp_path)
    append, begun, go = RecordLog.append, threading.Event(), threading.Event()

    def append_slowly(self: RecordLog[StepRecord], record: StepRecord) -> None:
        begun.set()
        assert go.wait(30)
        append(self, record)

    monkeypatch.setattr(RecordLog, "append", append_slowly)
    run_log.hold_step(done(1, 0.0), QUEUE)
    async with Nursery() as nursery:
        step = run_log.log_step(done(1, 0.0), replace(SyncReport(weight_version=1), pause_s=3.0), QUEUE)
        task = nursery.start_task("write", step if writes == "log" else run_log.write_held_steps())
        await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        run_log.hold_step(done(2, 0.0), QUEUE)
        if writes == "checkpoint":
            logged = nursery.start_task("log", step)
            await asyncio.sleep(0)  # it has the figures of the update, and waits for the line to be written
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        if writes == "checkpoint":
            await logged
        await run_log.write_held_steps()  # of the last checkpoint
    records = step_record_log(tmp_path / "metrics.jsonl").read()
    assert [(record.step, record.pause_s) for record in records] == [(1, 3.0), (2, 0.0)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


async def test_a_step_is_held_when_the_disk_takes_a_part_of_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_log = begun_run_log(tmp_path)
    pwrite = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[: len(data) // 2], at))
        await run_log.log_step(done(1, 0.0), SyncReport(weight_version=1), QUEUE)
        run_log.hold_step(done(2, 0.0), QUEUE)
        assert step_record_log(tmp_path / "metrics.jsonl").read() == []
    await run_log.write_held_steps()
    assert [record.step for record in step_record_log(tmp_path / "metrics.jsonl").read()] == [1, 2]
    await run_log.write_held_steps()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


async def test_a_step_is_held_when_the_disk_is_read_only_and_a_checkpoint_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_log = begun_run_log(tmp_path)

    def refuse(file: int, data: bytes, at: int) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        await run_log.log_step(done(1, 0.0), SyncReport(weight_version=1), QUEUE)
        with pytest.raises(
            AsyncRLError, match=r"metrics.jsonl cannot be written: Read-only file system; make"
        ):
            await run_log.write_held_steps()
    await run_log.write_held_steps()
    assert [record.step for record in step_record_log(tmp_path / "metrics.jsonl").read()] == [1]


async def test_a_run_says_that_it_learns_nothing_when_all_rewards_are_equal_for_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_log = begun_run_log(tmp_path)

    async def train(step: int, rewards: tuple[float, float]) -> None:
        a, b = done(step, wait_s=0.0).batch.trajectories
        trajectories = (replace(a, reward=rewards[0]), replace(b, reward=rewards[1]))
        trained = done(step, wait_s=0.0)
        batch = replace(trained.batch, trajectories=trajectories)
        await run_log.log_step(replace(trained, batch=batch), SyncReport(weight_version=step), QUEUE)

    for step in range(1, 20):
        await train(step, (1.0, 1.0))
    assert "nothing is learned" not in caplog.text
    await train(20, (0.0, 0.0))
    await train(21, (0.0, 0.0))
    assert caplog.text.count("all rewards equal for 20 groups: nothing is learned") == 1
    assert run_log.summary(Queue().groups.ledger.counts(), ended_s=1.0).groups_without_signal == 21
    await train(22, (0.0, 1.0))
    assert run_log.summary(Queue().groups.ledger.counts(), ended_s=1.0).groups_without_signal == 0


async def test_idle_shares_and_mismatch_are_those_of_the_last_record_when_a_run_is_resumed(
    tmp_path: Path,
) -> None:
    record = StepRecord(step=1, weight_version=1, time_s=10.0, wait_s=4.0, engine_idle_share=0.25)
    step_record_log(tmp_path / "metrics.jsonl").append(record)
    metrics = Metrics()
    run_log = make_run_log(tmp_path, metrics)
    assert math.isnan(metrics.registry.get_sample_value("async_rl_trainer_idle_ratio") or 0)
    await run_log.load_records_until(1)
    run_log.begin_training(1)
    assert metrics.registry.get_sample_value("async_rl_trainer_idle_ratio") == pytest.approx(0.4)
    assert metrics.registry.get_sample_value("async_rl_engine_idle_ratio") == 0.25


async def test_a_step_has_what_updates_made_engines_prefill_again_since_the_last_one(
    tmp_path: Path,
) -> None:
    metrics = Metrics()
    again, lost = metrics.prefilled_again_tokens_total, metrics.first_token_seconds
    again.labels("update").inc(1000)
    run_log = make_run_log(tmp_path, metrics)
    run_log.begin_training(0)
    for tokens, waits in ((70, (1.0, 2.5)), (30, (4.0,)), (0, ())):
        again.labels("update").inc(tokens)
        again.labels("failover").inc(5)
        lost.labels("new").observe(9.0)
        for waited_s in waits:
            lost.labels("again").observe(waited_s)
        step = len(run_log.records) + 1
        await run_log.log_step(done(step, wait_s=2.0), SyncReport(weight_version=step), QUEUE)
    found = [(record.prefilled_again_tokens, record.prefilled_again_s) for record in run_log.records]
    assert found == [(70, 1.75), (30, 4.0), (0, None)]
