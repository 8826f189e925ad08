"""Weights reach an engine on a GPU through shared memory, by handles, and over NCCL if it has its own GPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from async_rl.engine_protocol import DistributedUpdate, GroupInvite, TensorUpdate, WeightBucket
from async_rl.engines.device_memory import stop_engine
from async_rl.engines.sglang.server import free_port
from async_rl.errors import WeightSyncError
from async_rl.weights.broadcast import WeightGroup, send_buckets
from async_rl.weights.buckets import fill_buckets, largest_of, plan_buckets, spec_of
from tests.gpu import device
from tests.gpu.models import build, serving
from tests.support.engine_calls import call
from trainer.megatron.weight_owners import assign_owners
from trainer.weights.weight_export import WeightExport

pytestmark = pytest.mark.proof(needs="trainer engine", seconds=300)
PROMPT = list(range(40, 72))
BUCKET_BYTES = 16 << 20


def on_device(model: Path) -> list[tuple[str, torch.Tensor]]:
    """Yield the weights of a folder on this process's GPU, as a trainer exports them."""
    from safetensors.torch import load_file

    tensors = sorted(load_file(model / "model.safetensors").items())
    return [(name, tensor.bfloat16().to(device.DEVICE)) for name, tensor in tensors]


def size_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> int:
    return sum(tensor.nbytes for _, tensor in tensors)


@pytest.mark.proof(value=42)
async def test_an_engine_takes_weights_through_shared_memory(tmp_path: Path, measure) -> None:
    """Weights sent through shared memory give an engine the answers of one started with them."""
    await take_shared_weights(tmp_path, measure, shares_device=False)


@pytest.mark.proof(value=72)
async def test_an_engine_takes_weights_by_handles_on_a_shared_gpu(tmp_path: Path, measure) -> None:
    """Weights that stay on a shared GPU give an engine, which has memory for nothing else, the same answers.

    No bucket is left on the device when the engine has answered.
    """
    await take_shared_weights(tmp_path, measure, shares_device=True)


async def take_shared_weights(tmp_path: Path, measure, *, shares_device: bool) -> None:
    old, new = build(tmp_path / "old", seed=0), build(tmp_path / "new", seed=1)
    async with serving(new, tmp_path) as engine:
        expected = await call(engine, PROMPT, 32)
    tensors = on_device(new)
    export = WeightExport(
        *[lambda: iter(tensors)] * 3,
        0,
        torch.device(device.DEVICE),
        owners=lambda: assign_owners([(0, [spec_of(*each) for each in tensors])], (0,)),
        group_timeout_s=60,
        shares_device=shares_device and device.ON_GPU,  # as the trainer has it
    )
    buckets, held = export.plan_buckets(BUCKET_BYTES), torch.cuda.memory_allocated()

    async def shared() -> AsyncGenerator[Sequence[bytes], None]:
        for number in range(len(buckets)):
            yield await asyncio.to_thread(export.share_bucket, number, BUCKET_BYTES, [0])

    async with serving(old, tmp_path, shared=shares_device) as engine:
        if shares_device:
            empty = await (await stop_engine(engine, engine.interrupt)).release_all()
            loadable = await empty.resume_weights()
        begin = time.perf_counter()
        await engine.update_weights(
            TensorUpdate(weight_version=1, num_buckets=len(buckets), buckets=shared), flush=True
        )
        seconds = time.perf_counter() - begin
        export.release_device()
        assert torch.cuda.memory_allocated() == held
        if shares_device:
            await loadable.resume_rest()
        found = await call(engine, PROMPT, 32)
    export.close()
    measure("sent and loaded", size_of(tensors) / 2**30 / seconds, "GiB/s")
    assert found.token_ids == expected.token_ids


@pytest.mark.proof(needs="trainer", value=58, seconds=120)
def test_a_first_broadcast_ends_when_a_member_does_not_come(measure) -> None:
    """A sender whose receiver died after it had joined stops waiting when told to; its GPU computes on."""
    device.cannot_rehearse("Gloo has no communicator to wait for")
    where: dict[str, Any] = {"host": "127.0.0.1", "port": free_port("127.0.0.1"), "world_size": 2}
    invite = GroupInvite(group_name="first", backend="nccl", rank_offset=1, **where)
    data = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(WeightGroup, invite, 120)
        store = dist.TCPStore(*where.values(), False, timedelta(seconds=60))  # joins, and does no more
        group = joining.result()
        sending = pool.submit(group.start_broadcast, data)
        with pytest.raises(TimeoutError):
            sending.result(timeout=5)  # it waits for the other one
        begin = time.perf_counter()
        group.abort("the engine has died")
        with pytest.raises(WeightSyncError, match="aborted"):
            sending.result(timeout=30)
    measure("from the abort", time.perf_counter() - begin, "s")
    group.close()
    del store
    assert int((data + 1).sum()) == 1 << 20


@pytest.mark.proof(needs="engine two-gpus", value=43)
async def test_an_engine_takes_weights_over_nccl(
    tmp_path: Path, measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a broadcast over NCCL an engine gives the same answers as one started with those weights."""
    old, new = build(tmp_path / "old", seed=0), build(tmp_path / "new", seed=1)
    async with serving(new, tmp_path) as engine:
        expected = await call(engine, PROMPT, 32)
    if device.ON_GPU:
        torch.cuda.set_device(1)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    tensors = on_device(new)
    buckets = plan_buckets([spec_of(name, tensor) for name, tensor in tensors], BUCKET_BYTES)
    invite = GroupInvite(
        group_name="proof",
        backend=device.BACKEND,
        host="127.0.0.1",
        port=free_port("127.0.0.1"),
        world_size=2,
        rank_offset=1,
    )
    async with serving(old, tmp_path) as engine:
        async with asyncio.TaskGroup() as group:
            joining = group.create_task(asyncio.to_thread(WeightGroup, invite, 120))
            group.create_task(engine.join_weight_group(invite))
        update = DistributedUpdate(
            weight_version=1, group_name="proof", buckets=tuple(WeightBucket(0, each) for each in buckets)
        )
        buffers = [
            torch.empty(largest_of(buckets), dtype=torch.uint8, device=device.DEVICE) for _ in range(2)
        ]
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.update_weights(update, flush=True))
            filled = fill_buckets(tensors, buckets, buffers)
            group.create_task(asyncio.to_thread(send_buckets, filled, [joining.result()]))
        seconds = time.perf_counter() - begin
        found = await call(engine, PROMPT, 32)
        joining.result().close()
    measure("sent and loaded", size_of(tensors) / 2**30 / seconds, "GiB/s")
    assert found.token_ids == expected.token_ids
