"""Batches that are kept, steps that are captured, and what `async-rl replay-step` says of them."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.cli.main import main
from async_rl.cli.replay_step import ReplayDiffers, replay_step
from async_rl.config import Config, load_config
from async_rl.config.reference import resolved_yaml
from async_rl.errors import ConfigError
from async_rl.run.captures import Captures, load_capture, newest_kept_step, write_capture
from async_rl.store.frames import find_flaws, read_trajectories
from async_rl.store.kept_batches import keep_frames, keep_result, kept_steps, load_batch
from async_rl.trainer_protocol import StepResult, TrainerState
from async_rl.types import TakenBatch
from tests.support.run_config import write_run
from tests.support.stored_batches import store_batch
from tests.support.train_batches import random_batch

USUAL = {"loss": 0.5, "grad_norm": 1.0, "ppo_kl": 0.001, "ppo_kl_bypass": 0.001, "step_s": 1.0}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(write_run(tmp_path))


def batch_of(folder: Path, seed: int = 1) -> TakenBatch:
    return store_batch(folder / f"frames{seed}", random_batch(seed, layers=(1, 2), lengths=(7, 12, 5, 9)))


def result_of(step: int, **metrics: float) -> StepResult:
    return StepResult(step=step, metrics=USUAL | metrics)


def captures_of(config: Config, run_dir: Path, step: int = 0, **settings: Any) -> Captures:
    run_dir.mkdir(parents=True, exist_ok=True)
    return Captures(replace(config, trainer=replace(config.trainer, **settings)), run_dir, step)


async def train(
    captures: Captures, folder: Path, step: int, checkpoint: int = 0, **metrics: float
) -> TakenBatch:
    """Keep and train a batch as a trainer of two ranks does."""
    batch = captures.keep_batch(batch_of(folder, step), step)
    result = result_of(step, **metrics)
    if batch.kept_in is not None:
        kept = Path(batch.kept_in)
        keep_frames(batch, kept, (1, 2), rank=1)
        keep_frames(batch, kept, (0, 3), rank=0)
        keep_result(kept, result)
    await captures.observe_step(result, checkpoint)
    return batch


def write_checkpoint(run_dir: Path, step: int, size: int = 1000) -> None:
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(bytes(size))


def test_a_kept_batch_is_the_batch_when_the_spool_has_deleted_it(tmp_path: Path) -> None:
    batch = batch_of(tmp_path)
    before = read_trajectories(batch)
    kept = tmp_path / "kept"
    keep_frames(replace(batch, kept_in=str(kept)), kept, (0, 2), rank=0)
    keep_frames(replace(batch, kept_in=str(kept)), kept, (1, 3), rank=4)
    for each in batch.trajectories:
        Path(each.path).unlink()
    found = load_batch(kept)
    assert found.kept_in is None
    after = read_trajectories(found)
    for name in ("token_ids", "rollout_log_probs", "routed_experts", "routing_valid", "loss_mask", "rewards"):
        assert np.array_equal(getattr(after, name), getattr(before, name)), name


async def test_batches_are_kept_from_a_checkpoint_to_the_next_within_the_limit(
    config: Config, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    size = batch_of(tmp_path).nbytes
    captures = captures_of(config, run, capture_bytes=2 * size + size // 2)
    for step in (1, 2, 3):
        await train(captures, tmp_path, step)
    assert kept_steps(run / "batches") == [1, 2], "the first ones, with which a replay can begin"
    await train(captures, tmp_path, 4, checkpoint=2)
    assert kept_steps(run / "batches") == []
    await train(captures, tmp_path, 5, checkpoint=4)
    assert kept_steps(run / "batches") == [5]
    captures_of(config, run, 4)
    assert kept_steps(run / "batches") == [], "the next incarnation trains step 5 on another batch"


async def test_nothing_is_kept_when_the_limit_is_0(config: Config, tmp_path: Path) -> None:
    batch = await train(captures_of(config, tmp_path / "run", capture_bytes=0), tmp_path, 1)
    assert batch.kept_in is None
    assert not (tmp_path / "run" / "batches").exists()


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"grad_norm": 5.5}, "grad_norm is 5.5, 5.5 times its median"),
        ({"grad_norm": 4.5}, None),
        ({"ppo_kl": -0.02}, "ppo_kl is 0.02, 20.0 times its median"),
        ({"ppo_kl_bypass": -0.02}, "ppo_kl_bypass is 0.02, 20.0 times its median"),
        ({"ppo_kl": 0.009}, None),  # small, though nine times the median
        ({"updates_skipped": 2.0, "grad_norm": float("nan")}, "2 updates were skipped"),
    ],
)
async def test_a_step_is_captured_when_it_stands_out(
    config: Config, tmp_path: Path, metrics: dict[str, float], reason: str | None
) -> None:
    run = tmp_path / "run"
    captures = captures_of(config, run)
    for step in range(1, 7):
        await train(captures, tmp_path, step)
    await train(captures, tmp_path, 7, **metrics)
    assert kept_steps(run / "captures") == ([] if reason is None else [7])
    if reason is not None:
        manifest = load_capture(run / "captures" / "step_00000007")
        assert (manifest.reason, manifest.base_step, manifest.checkpoint) == (reason, 0, None)
        assert kept_steps(run / "captures" / "step_00000007" / "batches") == [1, 2, 3, 4, 5, 6, 7]


async def test_first_steps_and_a_gradient_of_nothing_are_not_compared(config: Config, tmp_path: Path) -> None:
    captures = captures_of(config, tmp_path / "run")
    await train(captures, tmp_path, 1)
    await train(captures, tmp_path, 2, grad_norm=100.0)
    for step in range(3, 9):
        await train(captures, tmp_path, step, grad_norm=0.0)
    await train(captures, tmp_path, 9)
    assert kept_steps(tmp_path / "run" / "captures") == []


async def test_the_newest_captures_are_kept_and_all_that_were_requested(
    config: Config, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    captures = captures_of(config, run)
    await train(captures, tmp_path, 1)
    write_capture(config, run, 1, "it was requested", requested=True)
    for step in (2, 3, 4, 5):
        await train(captures, tmp_path, step, updates_skipped=1.0)
    assert kept_steps(run / "captures") == [1, 3, 4, 5]


async def test_a_capture_keeps_its_checkpoint_by_links_unless_it_is_too_large(
    config: Config, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    write_checkpoint(run, 2)
    write_checkpoint(run, 4)
    captures = captures_of(config, run, 4)
    await train(captures, tmp_path, 5, checkpoint=4)
    held = load_capture(write_capture(config, run, 5, "test", max_checkpoint_bytes=10_000))
    assert (held.base_step, held.checkpoint) == (4, "checkpoint/step_00000004")
    file = run / "captures" / "step_00000005" / "checkpoint" / "step_00000004" / "weights.bin"
    assert os.stat(file).st_nlink == 2, "linked, not copied"
    referred = load_capture(write_capture(config, run, 5, "test", max_checkpoint_bytes=100))
    assert referred.checkpoint == str(run / "checkpoints" / "step_00000004")
    assert not file.exists()


async def test_files_are_copied_where_there_are_no_links(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(old: str, new: str) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    run = tmp_path / "run"
    await train(captures_of(config, run), tmp_path, 1)
    folder = write_capture(config, run, 1, "test")
    assert len(load_batch(folder / "batches" / "step_00000001").trajectories) == 4


async def test_training_goes_on_when_a_capture_cannot_be_written(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    captures = captures_of(config, run)
    await train(captures, tmp_path, 1)
    (run / "captures").write_text("a file in its place")
    await captures.capture_step(1, "test")
    assert "captures: " in caplog.text


def test_what_is_not_kept_cannot_be_captured(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the batch of step 7 is not kept in .*; kept are: none"):
        write_capture(config, tmp_path, 7, "test")
    with pytest.raises(ConfigError, match="has no batch"):
        newest_kept_step(tmp_path)


async def test_the_step_that_is_being_trained_is_captured_only_when_requested(
    config: Config, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    captures = captures_of(config, run)
    for step in (1, 2):
        await train(captures, tmp_path, step)
    batch = captures.keep_batch(batch_of(tmp_path, 3), 3)
    kept = Path(batch.kept_in or "")
    keep_frames(batch, kept, (1, 2), rank=1)
    assert newest_kept_step(run) == 2, "step 3 has no result yet"
    with pytest.raises(ConfigError, match=r"the batch of step 3 is still being written.*after its step"):
        write_capture(config, run, 3, "test")
    keep_frames(batch, kept, (0,), rank=0)
    with pytest.raises(ConfigError, match=r"is still being written, .* lacks the frames of 1 of 4"):
        write_capture(config, run, 3, "test")
    keep_frames(batch, kept, (0, 3), rank=0)
    assert write_capture(config, run, 3, "test").is_dir()
    assert newest_kept_step(run) == 2
    for step in (1, 2):
        (run / "batches" / f"step_{step:08d}" / "result.msgpack").unlink()
    assert newest_kept_step(run) == 3, "a run that failed in its first step has no result"


# -- async-rl capture, async-rl replay-step


class ReplayedTrainer:
    """Returns results that the test prepared, and notes what it was called with."""

    def __init__(self, results: Callable[[int], dict[str, float]]) -> None:
        self.results = results
        self.checkpoint: str | None = "not set up"
        self.steps: list[int] = []

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        self.checkpoint = checkpoint_dir
        return TrainerState(step=0)

    async def read_batch(self, batch: TakenBatch) -> dict[str, str]:
        return find_flaws(batch.trajectories)

    async def train_step(self, batch: TakenBatch, step: int) -> StepResult:
        assert read_trajectories(batch).num_tokens == 33
        self.steps.append(step)
        return result_of(step, **self.results(step))

    @asynccontextmanager
    async def open(self, config: Config, folder: Path) -> AsyncIterator[Any]:
        yield self


@pytest.fixture
async def captured(config: Config, tmp_path: Path) -> Path:
    """The capture of step 7, whose checkpoint is of step 4."""
    run = tmp_path / "run"
    captures = captures_of(config, run, 4)
    write_checkpoint(run, 4)
    (run / "config.yaml").write_text(resolved_yaml(config))
    for step in (5, 6, 7):
        await train(captures, tmp_path, step, checkpoint=4, loss=step / 10)
    assert main(["capture", str(run)]) == 0
    return run / "captures" / "step_00000007"


def as_captured(step: int) -> dict[str, float]:
    return {"loss": step / 10}


def test_a_replay_trains_from_the_checkpoint_to_the_step(
    captured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = ReplayedTrainer(as_captured)
    assert replay_step(captured, open_trainer=trainer.open) == 0
    assert trainer.steps == [5, 6, 7]
    assert trainer.checkpoint == str(captured / "checkpoint" / "step_00000004")
    out = capsys.readouterr().out
    assert "step 7: loss 0.7 (equal), grad_norm 1 (equal), ppo_kl 0.001 (equal)" in out
    assert "bit for bit" in out


def off_by(amount: float) -> Callable[[int], dict[str, float]]:
    return lambda step: {"loss": step / 10 + (amount if step == 7 else 0.0)}


@pytest.mark.parametrize(
    ("overrides", "difference", "said"),
    [
        ((), 1e-9, r"loss of step 7 is 0.7000000009\d* and was 0.7 in the run, expected equal"),
        (("trainer.micro_batch_tokens=99",), 2e-5, "more than 1e-05 apart"),
        (("trainer.micro_batch_tokens=99",), 9e-6, None),
    ],
)
def test_a_step_that_is_not_reproduced_is_an_error_unless_other_settings_round_otherwise(
    captured: Path, overrides: tuple[str, ...], difference: float, said: str | None
) -> None:
    trainer = ReplayedTrainer(off_by(difference))
    with nullcontext() if said is None else pytest.raises(ReplayDiffers, match=said):
        replay_step(captured, overrides, open_trainer=trainer.open)


def test_a_step_that_failed_in_the_run_is_told_from_one_that_differs(
    captured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (captured / "batches" / "step_00000007" / "result.msgpack").unlink()
    assert replay_step(captured, open_trainer=ReplayedTrainer(off_by(1.0)).open) == 0
    out = capsys.readouterr().out
    assert "step 7: loss 1.7 (not in the run)" in out
    assert "the steps before are reproduced, bit for bit" in " ".join(out.split())
    with pytest.raises(ReplayDiffers, match="loss of step 6"):
        replay_step(captured, open_trainer=ReplayedTrainer(lambda step: {"loss": 0.5}).open)


def test_only_a_step_without_a_result_is_compared_with_nothing(
    captured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (5, 6, 7):
        (captured / "batches" / f"step_{step:08d}" / "result.msgpack").unlink()
    assert replay_step(captured, open_trainer=ReplayedTrainer(off_by(1.0)).open) == 0
    out = capsys.readouterr().out
    assert "step 7 has no result in the run" in out
    assert "reproduced" not in out


def test_missing_batches_are_named_and_the_step_alone_can_be_shown(
    captured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (5, 6):
        for file in (captured / "batches" / f"step_{step:08d}").iterdir():
            file.unlink()
        (captured / "batches" / f"step_{step:08d}").rmdir()
    assert main(["replay-step", str(captured)]) == 1
    assert "lacks the batches of steps 5-6, without which the checkpoint of step 4" in capsys.readouterr().err
    assert main(["replay-step", str(captured), "--until", "rollout"]) == 0
    assert "4 frames" in capsys.readouterr().out


def test_the_batch_is_shown_without_a_trainer(captured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay-step", str(captured), "--until", "rollout", "--json"]) == 0
    groups = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    batch = load_batch(captured / "batches" / "step_00000007")
    assert [group["group"] for group in groups] == list(batch.group_ids)
    assert sum(group["tokens"] for group in groups) == 33
    assert [reward for group in groups for reward in group["rewards"]] == list(batch.rewards)


def test_a_damaged_frame_is_found(captured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = captured / "batches" / "step_00000007" / "frames_00001.bin"
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 1
    data.write_bytes(content)
    assert main(["replay-step", str(captured), "--until", "rollout"]) == 1
    assert "the captured batch is damaged" in capsys.readouterr().err


def test_a_checkpoint_that_was_removed_is_named(captured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = load_capture(captured)
    gone = msgspec.structs.replace(manifest, checkpoint=str(captured / "gone"))
    (captured / "capture.json").write_bytes(msgspec.json.encode(gone))
    assert main(["replay-step", str(captured)]) == 1
    assert f"the checkpoint {captured / 'gone'} was removed" in capsys.readouterr().err


def test_another_folder_is_no_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay-step", str(tmp_path)]) == 2
    assert "is no capture" in capsys.readouterr().err
