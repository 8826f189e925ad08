"""A trainer that dies during a run is restarted in the same run, on simulated engines."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import CheckpointError, EnvironmentNotReady, NonFiniteLoss, TrainerError
from async_rl.run.captures import load_capture
from async_rl.runtime.supervision import first_error
from async_rl.store.kept_batches import keep_frames, kept_steps, load_batch
from async_rl.store.ledger import Ledger
from async_rl.trainer_protocol import StepResult, Trainer
from async_rl.types import TakenBatch, TrainBatch
from tests.simulation.test_loop import assert_conserved, make_config, metrics_of_the_run, run
from tests.support.local_cluster import LocalCluster

Call = Callable[..., Awaitable[Any]]


class RestartedCluster(LocalCluster):
    """Counts the incarnations of its trainer, and makes each call of one fail as configured."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.incarnations = 0
        self.steps: list[tuple[int, int]] = []  # (incarnation, step) of every batch that was trained
        self.faults: dict[tuple[int, str, int], TrainerError | None] = {}
        """Keys are incarnation, method and step (finished, or to be trained by train_step); None hangs."""
        self.starts: list[EnvironmentNotReady] = []
        """Failures of the next starts after the first."""
        for method in ("train_step", "publish", "save_checkpoint"):
            self._break(method, getattr(self.trainer, method))

    async def start_trainer(self) -> Trainer:
        if self.incarnations and self.starts:
            raise self.starts.pop(0)
        self.incarnations += 1
        return await super().start_trainer()

    def _break(self, method: str, call: Call) -> None:
        async def broken(*arguments: Any) -> Any:
            step = arguments[1] if method == "train_step" else self.trainer.step
            key = (self.incarnations, method, step)
            if key in self.faults:
                fault = self.faults.pop(key)
                if fault is None:
                    await asyncio.Future()
                else:
                    raise fault
            result = await call(*arguments)
            if method == "train_step":
                self.steps.append((self.incarnations, step))
            return result

        setattr(self.trainer, method, broken)


def died(doing: str = "train_step") -> TrainerError:
    return TrainerError(f"trainer rank 0 died during {doing}")


def trained_ids(batches: list[TrainBatch]) -> list[str]:
    return [i for batch in batches for i in batch.trajectory_ids]


async def test_the_trainer_comes_back_at_its_checkpoint_when_it_dies_in_a_step(
    calculator, tmp_path, monkeypatch
):
    metrics = metrics_of_the_run(monkeypatch)
    config = make_config(calculator, tmp_path)
    cluster = RestartedCluster(config, step_s=0.02)
    cluster.faults[1, "train_step", 4] = died()  # 1 to 3 are done, the checkpoint is of 2
    summary = await run(config, cluster)
    assert cluster.steps == [(1, 1), (1, 2), (1, 3), (2, 3), (2, 4), (2, 5), (2, 6)]
    assert summary.weight_versions == 6
    assert summary.trajectories.trained == 6 * 16
    assert summary.trajectories.dropped["restart"] >= 16  # the step that the checkpoint does not have
    assert_conserved(summary)
    counted = Counter(trained_ids(cluster.trainer.batches))
    assert set(counted.values()) == {1}
    assert cluster.restarts == []  # the engines stayed up
    assert {(await engine.health()).weight_version for engine in cluster.engines} == {6}
    value = metrics.registry.get_sample_value
    assert (
        value("async_rl_trajectories_dropped_total", {"reason": "restart"})
        == summary.trajectories.dropped["restart"]
    )


async def test_a_step_that_fails_is_captured_with_the_steps_since_the_checkpoint(calculator, tmp_path):
    config = make_config(calculator, tmp_path)
    cluster = RestartedCluster(config, step_s=0.02)
    cluster.faults[1, "train_step", 4] = died()
    train_step = cluster.trainer.train_step
    kept: dict[str, TakenBatch] = {}

    async def keep_and_train(batch: TakenBatch, step: int) -> StepResult:
        assert batch.kept_in is not None
        keep_frames(batch, Path(batch.kept_in), range(len(batch.trajectories)), rank=0)
        kept[batch.kept_in] = batch
        return await train_step(batch, step)

    cluster.trainer.train_step = keep_and_train  # type: ignore[method-assign]
    await run(config, cluster)
    run_dir = tmp_path / "sim"
    assert kept_steps(run_dir / "captures") == [4]
    capture = run_dir / "captures" / "step_00000004"
    manifest = load_capture(capture)
    assert manifest.reason == "it failed: trainer rank 0 died during train_step"
    assert manifest.base_step == 2
    assert kept_steps(capture / "batches") == [3, 4]
    assert load_batch(capture / "batches" / "step_00000004").trajectory_ids
    assert kept_steps(run_dir / "batches") == [5, 6], "those since the checkpoint of step 4"


async def test_engines_serve_the_checkpoints_version_again_when_the_trainer_went_back(calculator, tmp_path):
    config = make_config(calculator, tmp_path)
    cluster = RestartedCluster(config, step_s=0.02)
    cluster.faults[1, "train_step", 6] = died()  # the engines serve 5, the checkpoint is of 4
    versions: list[set[int]] = []
    publish = cluster.trainer.publish

    async def look_and_publish(directory: str, weight_version: int) -> None:
        versions.append({(await engine.health()).weight_version for engine in cluster.engines})
        await publish(directory, weight_version)

    cluster.trainer.publish = look_and_publish  # type: ignore[method-assign]
    await run(config, cluster)
    # Published: 1 to 5, then 4 anew, then 5 and 6, and the export: each finds what came before it.
    assert versions == [{0}, {1}, {2}, {3}, {4}, {5}, {4}, {5}, {6}]


@pytest.mark.parametrize(
    ("method", "step", "every", "again"),
    [
        ("publish", 4, 2, [3, 4, 5, 6]),
        ("save_checkpoint", 4, 2, [3, 4, 5, 6]),
        ("save_checkpoint", 6, 4, [5, 6]),  # at the very end
        ("train_step", 2, 2, [1, 2, 3, 4, 5, 6]),  # before a checkpoint
    ],
)
async def test_the_run_goes_on_when_the_trainer_dies_at_any_time(
    calculator, tmp_path, method, step, every, again
):
    config = make_config(calculator, tmp_path, f"trainer.checkpoint_every={every}")
    cluster = RestartedCluster(config)
    cluster.faults[1, method, step] = died(method)
    summary = await run(config, cluster)
    assert [step for incarnation, step in cluster.steps if incarnation == 2] == again
    assert summary.trajectories.trained == 6 * 16
    assert_conserved(summary)


@pytest.mark.real
async def test_rollouts_fill_the_bound_while_the_trainer_starts(calculator, tmp_path):
    config = make_config(calculator, tmp_path, "rollout.max_staleness=2")
    cluster = RestartedCluster(config)
    cluster.faults[1, "train_step", 3] = died()
    outstanding: list[int] = []
    start = cluster.start_trainer

    def queued_groups() -> int:
        ledger = Ledger(tmp_path / "sim" / "ledger.sqlite")  # a second reader: what is written by now
        try:
            return sum(bool(group.queued) for group in ledger.outstanding())
        finally:
            ledger.close()

    async def start_slowly() -> Trainer:
        if cluster.incarnations:
            await asyncio.sleep(60.0)
            outstanding.append(queued_groups())
        return await start()

    cluster.start_trainer = start_slowly  # type: ignore[method-assign]
    summary = await run(config, cluster)
    # A batch of 4 groups at each of the versions that a staleness of 2 allows, the broken batch among them.
    assert outstanding == [4 * 3]
    assert_conserved(summary)


@pytest.mark.real
async def test_recovery_admits_no_more_than_the_bound_when_it_happens_again_and_again(calculator, tmp_path):
    """Elsewhere each recovery admitted one more batch, until data exceeded the bound (AReaL#1388)."""
    config = make_config(calculator, tmp_path, "rollout.max_staleness=1", "run.max_steps=8")
    cluster = RestartedCluster(config, step_s=0.02)
    for incarnation, step in ((1, 2), (2, 4), (3, 6)):
        cluster.faults[incarnation, "train_step", step] = died()
    summary = await run(config, cluster)
    assert cluster.incarnations == 4
    assert summary.trajectories.trained == 8 * 16
    assert summary.trajectories.in_flight + summary.trajectories.queued <= 4 * 4 * (1 + 1)
    assert_conserved(summary)
    assert len(set(trained_ids(cluster.trainer.batches))) == len(cluster.steps) * 16


async def test_the_run_ends_with_the_cause_when_the_trainer_fails_too_often(calculator, tmp_path):
    config = make_config(calculator, tmp_path, "trainer.max_restarts=2")
    cluster = RestartedCluster(config)
    for incarnation in (1, 2, 3):
        cluster.faults[incarnation, "train_step", 3] = died()
    with pytest.raises(BaseExceptionGroup) as caught:
        await run(config, cluster)
    error = first_error(caught.value)
    assert isinstance(error, TrainerError)
    assert error.exit_code == 1
    assert "the trainer failed 3 times, trainer.max_restarts is 2" in str(error)
    assert "trainer rank 0 died during train_step" in str(error)


@pytest.mark.parametrize("error", [NonFiniteLoss("the loss is nan"), CheckpointError("the disk is full")])
async def test_the_run_ends_at_once_when_a_restart_would_meet_the_same_again(calculator, tmp_path, error):
    config = make_config(calculator, tmp_path)
    cluster = RestartedCluster(config)
    cluster.faults[1, "train_step", 3] = error
    with pytest.raises(BaseExceptionGroup) as caught:
        await run(config, cluster)
    assert first_error(caught.value) is error
    assert cluster.incarnations == 1


async def test_a_start_that_fails_counts_as_a_restart(calculator, tmp_path):
    config = make_config(calculator, tmp_path, "trainer.max_restarts=2")
    cluster = RestartedCluster(config)
    cluster.faults[1, "train_step", 3] = died()
    cluster.starts = [EnvironmentNotReady("no rank came up")]
    summary = await run(config, cluster)
    assert cluster.incarnations == 2
    assert summary.weight_versions == 6
    assert_conserved(summary)


async def test_the_run_is_stopped_in_order_while_the_trainer_starts(calculator, tmp_path):
    config = make_config(calculator, tmp_path)
    stop = asyncio.Event()
    cluster = RestartedCluster(config)
    cluster.faults[1, "train_step", 4] = died()
    start = cluster.start_trainer

    async def start_and_stop() -> Trainer:
        if cluster.incarnations:
            stop.set()
        return await start()

    cluster.start_trainer = start_and_stop  # type: ignore[method-assign]
    summary = await run(config, cluster, stop)
    assert summary.weight_versions == 2  # what the checkpoint has
    assert summary.trajectories.in_flight == 0
    assert_conserved(summary)


async def test_every_prompt_is_trained_once_and_from_its_tokens_when_the_trainer_comes_back(
    calculator, tmp_path, monkeypatch
):
    """Elsewhere a resumed run skips prompts, long ones first, and loses partial answers at a checkpoint
    (NeMo-RL#3599, #3594; verl#4199).
    """
    metrics = metrics_of_the_run(monkeypatch)
    lines = (calculator / "data" / "tasks.jsonl").read_text().splitlines()[:24]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    config = make_config(
        calculator,
        tmp_path,
        f"data.path={tmp_path / 'tasks.jsonl'}",
        "data.epochs=1",
        "run.max_steps=50",
        "rollout.max_context_tokens=480",
        "rollout.max_new_tokens=400",
        "engine.mean_new_tokens=200",
        "engine.decode_step_s=0.002",
    )
    cluster = RestartedCluster(config)
    for incarnation, step in ((1, 2), (2, 4)):
        cluster.faults[incarnation, "train_step", step] = died()
    summary = await run(config, cluster)
    assert cluster.incarnations == 3
    assert summary.trajectories.trained == 24 * 4  # all of the data, each prompt's group once
    assert summary.trajectories.in_flight == summary.trajectories.queued == 0
    assert set(summary.trajectories.dropped) <= {"restart"}
    assert_conserved(summary)
    # What was half written went on from its tokens.
    assert metrics.registry.get_sample_value("async_rl_resumed_tokens_total") > 0
    assert summary.trajectories.dispatched == len(cluster.steps) * 4 * 4
