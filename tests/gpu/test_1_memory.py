"""Device memory goes from one side to the other and back, and nothing is lost on the way."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from async_rl.engines.memory import stop
from async_rl.engines.protocol import DiskUpdate
from tests.gpu.models import build, serving
from tests.support.engine_calls import call
from tests.support.train_batches import random_batch
from tests.support.trainers import started, trainer_config, training_state
from trainer.megatron.offload import Offload

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")
PROMPT = list(range(40, 72))


@pytest.mark.megatron
def test_the_trainer_leaves_the_device_and_comes_back(tmp_path: Path, measure, used_gib) -> None:
    """A trainer gives its memory back between two steps, and goes on bit for bit as if it had not."""
    model = build(tmp_path / "model", hidden_size=1024, num_layers=8)
    batches = [random_batch(seed, layers=8, experts=16, vocab_size=512) for seed in range(2)]
    config = trainer_config(model, dtype="bfloat16")

    def digest(worker) -> list[int]:
        """Of everything the next step needs, as sums of bit patterns."""
        tensors = training_state(worker)
        return [int(t.contiguous().view(torch.uint8).to(torch.int64).sum()) for t in tensors]

    with started(config) as worker:
        worker.train_on(batches[0], 1)
        offload = Offload(worker.model)
        torch.cuda.empty_cache()
        before, expected = used_gib(), digest(worker)
        begin = time.perf_counter()
        offload.offload()
        away_s, during = time.perf_counter() - begin, used_gib()
        moved = offload.num_bytes / 2**30
        begin = time.perf_counter()
        offload.reload()
        back_s, after = time.perf_counter() - begin, used_gib()
        begin = time.perf_counter()
        offload.offload()  # host memory is pinned by now
        again_s = time.perf_counter() - begin
        offload.reload()
        found = digest(worker)
        worker.train_on(batches[1], 2)
        last = digest(worker)
    with started(config) as worker:
        for step, batch in enumerate(batches, start=1):
            worker.train_on(batch, step)
        undisturbed = digest(worker)
    measure("memory before", before, "GiB")
    measure("memory while away", during, "GiB")
    measure("memory after", after, "GiB")
    measure("to the host, first time", away_s, "s")
    measure("to the host, again", moved / again_s, "GiB/s")
    measure("back", moved / back_s, "GiB/s")
    assert found == expected
    assert last == undisturbed
    assert before - during > 0.95 * moved
    assert after == pytest.approx(before, rel=0.1)


@pytest.mark.sglang
async def test_an_engine_leaves_the_device_and_comes_back(tmp_path: Path, measure, used_gib) -> None:
    """An engine gives weights and cache back, is loaded anew, and answers as it did before."""
    model, total = build(tmp_path / "model"), torch.cuda.mem_get_info()[1] / 2**30
    idle = used_gib()
    async with serving(model, tmp_path, shared=True) as engine:
        expected = await call(engine, PROMPT, 32)
        before = used_gib()
        begin = time.perf_counter()
        empty = await (await stop(engine)).release()
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
    assert before - during > 0.2 * total
    assert after == pytest.approx(before, rel=0.05)
