"""What a trainer has of weights, for transports that send them piece by piece to a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from async_rl.engine_protocol import DiskUpdate, DistributedUpdate, GroupInvite, TensorUpdate
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.server import free_port
from async_rl.weights.buckets import spec_of
from async_rl.weights.weight_folder import WeightFolder
from tests.support.sglang_world import SGLangWorld, in_trainer_order
from trainer.megatron.weight_owners import assign_owners
from trainer.weights.weight_export import WeightExport

BUCKET_BYTES = 64 << 10


class WeightSender:
    """Sends the second weights of a world."""

    def __init__(self, world: SGLangWorld, scratch: Path) -> None:
        self._scratch = scratch
        self._before, after = world.weights
        self.tensors = in_trainer_order(load_file(after / "model.safetensors"))
        self.export = WeightExport(
            *[lambda: iter(self.tensors.items())] * 3,
            0,
            torch.device("cpu"),
            owners=lambda: assign_owners([(0, [spec_of(*each) for each in self.tensors.items()])], (0,)),
            group_timeout_s=30.0,
        )
        self.plan = self.export.plan_buckets(BUCKET_BYTES)
        assert len(self.plan) > 2

    async def broadcast(self, engine: SGLangEngine, version: int) -> None:
        invite = GroupInvite(
            group_name="test",
            backend="gloo",
            host="127.0.0.1",
            port=free_port("127.0.0.1"),
            world_size=2,
            rank_offset=1,
        )
        await asyncio.gather(
            asyncio.to_thread(self.export.open_group, invite), engine.join_weight_group(invite)
        )
        update = DistributedUpdate(weight_version=version, group_name="test", buckets=self.plan)
        await asyncio.gather(
            asyncio.to_thread(self.export.send_weights, ["test"], BUCKET_BYTES),
            engine.update_weights(update, flush=True),
        )
        await asyncio.gather(
            asyncio.to_thread(self.export.close_group, "test"), engine.leave_weight_group("test-0")
        )

    async def share(
        self, engine: SGLangEngine, version: int, before: Callable[[int], None] = lambda number: None
    ) -> None:
        async def buckets() -> AsyncGenerator[list[bytes], None]:
            for number in range(len(self.plan)):
                before(number)
                yield self.export.share_bucket(number, BUCKET_BYTES, [0])

        update = TensorUpdate(weight_version=version, num_buckets=len(self.plan), buckets=buckets)
        await engine.update_weights(update, flush=True)

    async def delta(self, engine: SGLangEngine, version: int) -> None:
        now, folder = self.tensors, WeightFolder(self._scratch / "host")
        self.tensors = in_trainer_order(load_file(self._before / "model.safetensors"))
        assert not self.export.write_delta(self._scratch / "delta", None, version - 1)
        self.tensors = now
        assert self.export.write_delta(self._scratch / "delta", version - 1, version)
        folder.copy_version(str(self._before), version - 1)
        path = folder.apply_delta(str(self._scratch / "delta"))
        await engine.update_weights(DiskUpdate(weight_version=version, path=path), flush=True)
