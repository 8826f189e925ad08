"""The whole loop with SGLang and Megatron-Core under Ray, on a CPU, on an untrained model.

`tests/contract/test_real_parts.py` has a shorter one.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from agent_loops.tool_loop import ToolLoop
from async_rl import placement
from async_rl.codec import read_frame
from async_rl.config import Config
from async_rl.engine_protocol import Chunk, Finish, GenerateRequest
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.observability.records import Summary, step_record_log
from async_rl.placement.ray_trainer import RayTrainer
from async_rl.rollout.session.api import Session
from async_rl.run.device_sharing import SharedDevices
from async_rl.runtime.supervision import Nursery
from async_rl.trainer_protocol import Trainer
from async_rl.types import StopReason, Task, TrainBatch
from async_rl.weights import checksums
from tests.support.ray_runs import GROUP_SIZE, assert_ledger_holds, make_run_folder, real_config
from tests.support.recording_worker import FOLDER

pytestmark = [
    pytest.mark.real,
    pytest.mark.sglang,
    pytest.mark.megatron,
    pytest.mark.ray,
    pytest.mark.timeout(900),
]


def make_config(calculator: Path, tmp_path: Path, *overrides: str) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": "real", "max_steps": 4},
        "engine": {"num_engines": 2},
        "rollout": {
            "reward": "tests.support.ray_runs:fingerprint",
            "max_concurrent_trajectories": 24,
            "max_staleness": 3,
            "max_new_tokens": 400,
        },
        "trainer": {
            "worker": "tests.support.recording_worker:RecordingWorker",
            "num_ranks": 2,
            "layout": {"ep": 2},
            "groups_per_batch": 3,
        },
    }
    return real_config(calculator, tmp_path, *overrides, sections=sections)


async def run(
    config: Config, monkeypatch: pytest.MonkeyPatch, stop: asyncio.Event | None = None
) -> tuple[Summary, Path, list[TrainBatch]]:
    run_dir = make_run_folder(config)
    monkeypatch.setenv(FOLDER, str(run_dir / "seen"))
    summary = await placement.run(config, run_dir, stop or asyncio.Event())
    seen = sorted((run_dir / "seen").iterdir(), key=lambda path: int(path.stem))
    return summary, run_dir, [read_frame(path, TrainBatch) for path in seen]


def assert_sound(summary: Summary, batches: list[TrainBatch], config: Config) -> None:
    """Check what must hold for any run."""
    assert summary.trajectories.unaccounted == 0
    trained = [i for batch in batches for i in batch.trajectory_ids]
    assert len(set(trained)) == len(trained) == summary.trajectories.trained
    assert summary.staleness_max <= config.rollout.max_staleness
    assert summary.log_prob_abs_diff_mean is not None
    for batch in batches:
        assert batch.routing_valid is not None
        last = np.zeros(batch.num_tokens, bool)
        last[batch.offsets[1:] - 1] = True
        # T - 1 rows for each trajectory, and none for the token that was never fed.
        assert (batch.routing_valid == ~last).all()
        assert batch.routed_experts is not None
        assert batch.routed_experts.max() < batch.num_experts


class FirstUpdate:
    """Makes the first update find a half-written answer, regardless of the speed of the machine.

    Answers of the second group start when the first update's weights are published as files or, on shared
    devices, when the first batch is ready. The update or hand-over continues when one of them has a token.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begins = asyncio.Event()
        self._one_is_written = asyncio.Event()
        publish, generate = RayTrainer.publish, SGLangEngine.generate
        hand_to_trainer = SharedDevices.hand_to_trainer

        async def publish_and_wait(trainer: RayTrainer, directory: str, weight_version: int) -> None:
            await publish(trainer, directory, weight_version)
            if weight_version > 0:  # 0 is what a run starts from, published where engines need its adapter
                self.begins.set()
                await self._one_is_written.wait()

        async def wait_and_hand_to_trainer(devices: SharedDevices, trainer: Trainer) -> None:
            if devices.phases.phase == "engines":  # not while the run starts
                self.begins.set()
                await self._one_is_written.wait()
            await hand_to_trainer(devices, trainer)

        async def generate_and_tell(
            engine: SGLangEngine, request: GenerateRequest
        ) -> AsyncGenerator[Chunk | Finish, None]:
            async with aclosing(generate(engine, request)) as events:
                async for event in events:
                    if self.begins.is_set():
                        self._one_is_written.set()
                    yield event

        monkeypatch.setattr(RayTrainer, "publish", publish_and_wait)
        monkeypatch.setattr(SharedDevices, "hand_to_trainer", wait_and_hand_to_trainer)
        monkeypatch.setattr(SGLangEngine, "generate", generate_and_tell)


class SecondGroupLater(ToolLoop):
    """Starts the first group at once and all others with the first update."""

    first_update: FirstUpdate

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._first: set[str] = set()

    async def run(self, task: Task, session: Session) -> StopReason | None:
        if len(self._first) < GROUP_SIZE:
            self._first.add(session.trajectory_id)
        if session.trajectory_id not in self._first:  # another attempt of the first group does not wait
            await self.first_update.begins.wait()
        return await super().run(task, session)


@pytest.mark.long
async def test_engines_and_trainer_learn_together_with_weights_from_disk(calculator, tmp_path, monkeypatch):
    monkeypatch.setattr(SecondGroupLater, "first_update", FirstUpdate(monkeypatch), raising=False)
    config = make_config(
        calculator,
        tmp_path,
        f"rollout.agent_loop={__name__}:SecondGroupLater",
        "trainer.groups_per_batch=1",
        "rollout.max_staleness=1",
        "run.max_steps=3",
    )
    summary, run_dir, batches = await run(config, monkeypatch)
    assert_sound(summary, batches, config)
    # Equal weights, float32: the trainer's log-probs are the engine's, after a resume too.
    assert summary.log_prob_abs_diff_mean is not None
    assert summary.log_prob_abs_diff_mean < 1e-4
    assert summary.weight_versions == 3
    assert summary.interrupted_share is not None
    assert summary.interrupted_share > 0
    mixed = [
        set(batch.weight_versions[start:end].tolist()) - {-1}
        for batch in batches
        for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    ]
    assert any(len(versions) > 1 for versions in mixed)  # partial rollouts reached the trainer
    records = step_record_log(run_dir / "metrics.jsonl").read()
    assert [record.weight_version for record in records] == [1, 2, 3]
    assert all(np.isfinite(record.grad_norm) and record.grad_norm > 0 for record in records)
    assert len({record.reward_mean for record in records}) > 1
    assert (run_dir / "hf" / "model.safetensors.index.json").exists()  # each rank has written its part
    assert (run_dir / "checkpoints" / "step_00000003").is_dir()


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True])
async def test_engines_serve_the_adapter_that_the_trainer_trains(
    calculator, tmp_path, monkeypatch, caplog, shared
):
    """On devices of their own, and on those of the trainer."""
    caplog.set_level("INFO", logger="async_rl")
    monkeypatch.setattr(SecondGroupLater, "first_update", FirstUpdate(monkeypatch), raising=False)
    monkeypatch.setattr(checksums, "WATCH_EVERY", 1)
    config = make_config(
        calculator,
        tmp_path,
        f"rollout.agent_loop={__name__}:SecondGroupLater",
        f"placement.shared={str(shared).lower()}",
        "trainer.groups_per_batch=1",
        "trainer.lora={rank: 8, alpha: 16, targets: [attention]}",
        "trainer.optimizer.lr=1e-2",
        "rollout.max_staleness=1",
        "engine.max_running_requests=8",
        "routing.probe_every=2",
        "run.max_steps=6",
    )
    summary, run_dir, batches = await run(config, monkeypatch)
    assert_sound(summary, batches, config)
    records = step_record_log(run_dir / "metrics.jsonl").read()
    assert [record.weight_version for record in records] == [1, 2, 3, 4, 5, 6]
    at_once = {r.weight_version - 1: r.lag0_log_prob_abs_diff for r in records if r.tokens_lag0}
    # Versions after the first, whose adapter changes nothing; unshared, all may be trained a version later.
    assert not shared or len(at_once.keys() - {0}) > 0
    assert 0 < max(at_once.values()) < 5e-6  # so engines have each version's adapter
    if not shared:
        later = [abs(record.rollout_kl_lag1) for record in records if record.tokens_lag1]
        assert max(later) > 1e-3  # the control: another version's log-probs are others
        files = {path.name for path in (run_dir / "weights" / "version_6").iterdir()}
        assert files == {"adapter_config.json", "adapter_model.safetensors"}
    assert summary.interrupted_share > 0
    assert "is quarantined" not in caplog.text  # the model's weights were back after each phase
    assert "cannot watch" not in caplog.text
    assert "serves the weights of version" not in caplog.text


@pytest.mark.long
async def test_engines_take_weights_bucket_by_bucket_on_the_trainers_devices(
    calculator, tmp_path, monkeypatch, caplog
):
    """On a CPU through shared memory, with each side's memory where it is on a GPU."""
    caplog.set_level("INFO", logger="async_rl")
    monkeypatch.setattr(SecondGroupLater, "first_update", FirstUpdate(monkeypatch), raising=False)
    config = make_config(
        calculator,
        tmp_path,
        f"rollout.agent_loop={__name__}:SecondGroupLater",
        "placement.shared=true",
        "weights.transport=tensor",
        "weights.bucket_bytes=262144",
        "weights.verify=checksum",
        "trainer.groups_per_batch=1",
        "rollout.max_staleness=1",
        "run.max_steps=4",
    )
    summary, run_dir, batches = await run(config, monkeypatch)
    assert_sound(summary, batches, config)
    assert summary.log_prob_abs_diff_mean < 1e-4
    assert summary.interrupted_share > 0
    records = step_record_log(run_dir / "metrics.jsonl").read()
    assert [record.weight_version for record in records] == [1, 2, 3, 4]
    assert sum(record.sync_bytes for record in records) > 0
    assert list((run_dir / "weights").glob("version_*")) == []
    assert "is quarantined" not in caplog.text


@pytest.mark.long
async def test_broadcast_weights_and_a_killed_engine_and_then_a_resume(
    calculator, tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO", logger="async_rl")
    config = make_config(
        calculator,
        tmp_path,
        "weights.transport=distributed",
        "weights.overlap=true",
        "weights.bucket_bytes=262144",
        "engine.max_running_requests=16",
        "rollout.max_new_tokens=96",
        "routing.merge=splice",
        "trainer.num_ranks=1",
        "trainer.layout.ep=1",
        "trainer.checkpoint_every=2",
        "run.max_steps=1000",
    )
    run_dir, stop = Path(config.run.dir) / config.run.name, asyncio.Event()

    def steps() -> int:
        return len(step_record_log(run_dir / "metrics.jsonl").read())

    async def until(happened: Callable[[], bool]) -> None:
        while not happened():  # noqa: ASYNC110 (files and logs raise no event)
            await asyncio.sleep(0.1)

    async def kill_an_engine_and_stop_once_it_is_back() -> None:
        await until(lambda: steps() >= 2)
        kill_scheduler(os.environ[FOLDER])
        await until(lambda: "serves again" in caplog.text)
        done = steps()
        await until(lambda: steps() >= done + 2)
        stop.set()

    async with Nursery() as nursery:
        running = nursery.start_task("run", run(config, monkeypatch, stop))
        nursery.start_task("kill", kill_an_engine_and_stop_once_it_is_back())
    summary, _, batches = running.result()
    assert "is quarantined" in caplog.text
    assert_sound(summary, batches, config)
    assert summary.trajectories.in_flight == 0  # drained

    resumed = make_config(
        calculator,
        tmp_path,
        "trainer.num_ranks=1",
        "trainer.layout.ep=1",
        f"run.max_steps={len(batches) + 1}",
        "engine.num_engines=1",
        "engine.max_running_requests=16",
        "rollout.max_new_tokens=96",
    )
    again, _, more = await run(resumed, monkeypatch)
    assert_sound(again, more, resumed)
    assert len(more) == len(batches) + 1
    assert_ledger_holds(run_dir)


def kill_scheduler(folder: str) -> int:
    """Kill the scheduler of one engine of this run, the process that holds the model."""
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error):  # one of another test ends
            if "sglang::schedul" in process.info["name"] and process.environ().get(FOLDER) == folder:
                process.kill()
                return int(process.pid)
    raise AssertionError("found no scheduler of an SGLang server of this run")
