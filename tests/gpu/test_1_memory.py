"""Device memory moves between trainer and engine and back without losing state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from async_rl.engine_protocol import DiskUpdate
from async_rl.engines.device_memory import stop_engine
from tests.gpu import device
from tests.gpu.models import build, serving
from tests.support.engine_calls import call
from tests.support.train_batches import random_batch
from tests.support.trainers import started, trainer_config, training_state
from trainer.megatron.offload import TrainerOffload

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")
PROMPT = list(range(40, 72))


@pytest.mark.proof(needs="trainer", seconds=90, value=40)
@pytest.mark.parametrize("way", ["regions", "emptied"])
def test_the_trainer_leaves_the_device_and_comes_back(
    way: str, tmp_path: Path, measure, used_gib, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer releases its memory between two steps and restores it bit for bit."""
    model = build(tmp_path / "model", hidden_size=device.sized(1024, 128), num_layers=8)
    batches = [random_batch(seed, layers=8, experts=16, vocab_size=512) for seed in range(2)]
    config = trainer_config(model, dtype="bfloat16")

    def digest(worker) -> list[int]:
        """Return sums of bit patterns of everything that the next step needs."""
        return digest_of(enumerate(training_state(worker)))

    def digest_of(tensors: Iterable[tuple[object, torch.Tensor]]) -> list[int]:
        flat = (tensor.detach().reshape(-1) for _, tensor in tensors)
        return [int(each.view(torch.uint8).to(torch.int64).sum()) for each in flat]

    def timed(move: Callable[[], None]) -> tuple[float, float]:
        """Return the seconds that a call took, and the GiB of device memory in use afterwards."""
        begin = time.perf_counter()
        move()
        return time.perf_counter() - begin, used_gib()

    with started(config) as worker:
        worker.train_on(batches[0], 1)
        offload = TrainerOffload(worker.model, saver=device.saver(monkeypatch) if way == "regions" else None)
        device.free_unused()
        before, expected = used_gib(), digest(worker)
        away_s, during = timed(offload.offload_state)
        moved = offload.num_bytes / 2**30
        back_s, after = timed(offload.reload_state)
        found = [digest(worker)]
        again_s, during_again = timed(
            offload.offload_state
        )  # into host memory that it has from the first time
        back_again_s, _ = timed(offload.reload_state)
        found.append(digest(worker))
        exported = digest_of(worker.export_weights())
        _, with_weights = timed(lambda: offload.offload_state(keep_weights=True))
        kept = digest_of(worker.export_weights())
        _, during_last = timed(offload.offload_state)
        offload.reload_state()
        found.append(digest(worker))
        norm = worker.train_on(batches[1], 2).metrics["grad_norm"]
    with started(config) as worker:
        undisturbed = [worker.train_on(batch, step) for step, batch in enumerate(batches, start=1)]
    measure("memory before", before, "GiB")
    measure("memory while away, first time", during, "GiB")
    measure("memory while away, again", during_again, "GiB")
    measure("memory while only weights stay", with_weights, "GiB")
    measure("memory after", after, "GiB")
    measure("to the host, first time", away_s, "s")
    measure("back, first time", back_s, "s")
    measure("to the host, again", moved / again_s, "GiB/s")
    measure("back, again", moved / back_again_s, "GiB/s")
    assert found == [expected] * 3
    assert kept == exported
    # GPU kernels sum in any order: two runs of the same two steps differ in their last bits.
    assert norm == pytest.approx(undisturbed[1].metrics["grad_norm"], rel=0.02)
    device.end_rehearsal()
    assert during_again < with_weights < before
    assert during_last == pytest.approx(during_again, abs=0.05)
    assert before - during > 0.95 * moved
    assert before - during_again > 0.95 * moved
    assert after == pytest.approx(before, rel=0.1)


@pytest.mark.proof(needs="engine", seconds=240, value=75)
async def test_an_engine_leaves_the_device_and_comes_back(tmp_path: Path, measure, used_gib) -> None:
    """An engine releases weights and cache, is loaded again, and gives the same answers."""
    model, idle = build(tmp_path / "model"), used_gib()
    async with serving(model, tmp_path, shared=True) as engine:
        expected = await call(engine, PROMPT, 32)
        before = used_gib()
        begin = time.perf_counter()
        empty = await (await stop_engine(engine, engine.interrupt)).release_all()
        release_s, during = time.perf_counter() - begin, used_gib()
        begin = time.perf_counter()
        loadable = await empty.resume_weights()
        await engine.update_weights(DiskUpdate(weight_version=1, path=str(model)), flush=True)
        await loadable.resume_rest()
        resume_s, after = time.perf_counter() - begin, used_gib()
        found = await call(engine, PROMPT, 32)
    measure("memory before", before - idle, "GiB")
    measure("memory while away", during - idle, "GiB")
    measure("memory after", after - idle, "GiB")
    measure("stop and release", release_s, "s")
    measure("resume and load", resume_s, "s")
    assert found.token_ids == expected.token_ids
    assert (found.expert_sets == expected.expert_sets).all()
    device.end_rehearsal()
    assert before - during > 0.2 * device.total_gib()
    assert after == pytest.approx(before, rel=0.05)
