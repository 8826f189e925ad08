"""Trainer ranks that send weights to engines of small processes, by the driver's own weight updates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import torch

from async_rl.config import Config, PlacementConfig, SGLangEngines
from async_rl.config.engine_settings import WeightsConfig
from async_rl.engine_protocol import Engine, GroupInvite, WeightBucket
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.engines.sglang.server import free_port
from async_rl.observability.metrics import Metrics
from async_rl.trainer_protocol import SendReport, Trainer
from async_rl.weights.buckets import spec_of
from async_rl.weights.weight_sync import WeightSync
from tests.support.weight_receiver import ReceivingEngine, children_of, digest_of, open_sockets, pace
from trainer.megatron.weight_owners import WeightOwners, assign_owners
from trainer.weights.weight_export import WeightExport


class Ranks:
    """The ranks of a trainer, each with the tensors that it sends."""

    def __init__(self, num_senders: int, bucket_bytes: int, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        specs = [spec_of(*each) for each in self.tensors.items()]
        self.owners: WeightOwners = assign_owners([(0, specs)] * num_senders, tuple(range(num_senders)))
        self.bucket_bytes = bucket_bytes
        self.before_tensor: Callable[[int], None] = lambda number: None
        """Called with the number of each tensor that is about to be sent."""
        self.bytes_per_s = 0.0
        """How much each rank may send; 0 sets no limit."""
        self.sockets: dict[int, list[int]] = {}
        """By sender: those of its group."""
        self.exports = [
            WeightExport(
                self._all,
                lambda rank=rank: self._sent_by(rank),
                lambda: iter(()),
                rank,
                torch.device("cpu"),
                owners=lambda: self.owners,
                group_timeout_s=60.0,
            )
            for rank in range(num_senders)
        ]

    def _all(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(self.tensors.items()):
            self.before_tensor(number)
            yield name, tensor

    def _sent_by(self, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        for number, spec in enumerate(self.owners.specs):
            if self.owners.rank_of[spec.name] == rank:
                self.before_tensor(number)
                yield spec.name, self.tensors[spec.name]

    def change(self) -> str:
        """Change all weights, and return the digest of what engines are to receive."""
        for tensor in self.tensors.values():
            tensor.add_(1)
        return digest_of(self.owners.plan_buckets(self.bucket_bytes), self.tensors)

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        calls = [asyncio.to_thread(getattr(export, method), *arguments) for export in self.exports]
        return await asyncio.gather(*calls)

    async def publish(self, directory: str, weight_version: int) -> None: ...

    async def plan_buckets(self, bucket_bytes: int) -> tuple[WeightBucket, ...]:
        return self.owners.plan_buckets(bucket_bytes)

    async def open_weight_group(self, invite: GroupInvite) -> None:
        before = open_sockets()
        await self._call("open_group", invite)
        self.sockets[invite.sender] = sorted(set(open_sockets()) - set(before))
        if self.bytes_per_s:
            pace(self.sockets[invite.sender], self.bytes_per_s / children_of(0, invite.world_size))

    async def close_weight_group(self, group_name: str) -> None:
        await self._call("close_group", group_name)

    async def abort_weight_group(self, group_name: str) -> None:
        for export in self.exports:
            export.abort_group(group_name)

    async def send_weights(self, group_names: list[str], bucket_bytes: int) -> SendReport:
        return SendReport.of_slowest(await self._call("send_weights", group_names, bucket_bytes))

    async def share_bucket(self, number: int, bucket_bytes: int, copies: int) -> list[bytes]:
        export = self.exports[0]
        export.allocate_buffers([each.tensors for each in self.owners.plan_buckets(bucket_bytes)])
        return await asyncio.to_thread(export.share_bucket, number, bucket_bytes, copies)

    async def checksums(self) -> dict[str, str]:
        return self.exports[0].checksums()


def even_tensors(num_bytes: int, number: int) -> dict[str, torch.Tensor]:
    """Return tensors of a size."""
    return {f"t{i}": torch.full((num_bytes // 4,), float(i + 1)) for i in range(number)}


class World(NamedTuple):
    """Ranks and engines, and what the driver has of them."""

    pool: EnginePool
    engines: Sequence[Any]
    ranks: Ranks
    sync: WeightSync

    def serving(self) -> dict[str, int]:
        serving = self.pool.engines(EngineState.SERVING)
        return {each.engine_id: self.pool.version_of(each.engine_id) for each in serving}


@asynccontextmanager
async def receiving_world(
    folder: Path, ranks: Ranks, faults: Sequence[Sequence[str]]
) -> AsyncIterator[World]:
    """Yield engines that serve version 0, some with a fault (see `weight_receiver.main`)."""
    starts = (ReceivingEngine.start(f"engine-{number:02}", *fault) for number, fault in enumerate(faults))
    engines = await asyncio.gather(*starts)
    try:
        if ranks.bytes_per_s:  # a receiver passes the buckets of all senders on
            for number, engine in enumerate(engines):
                children = _children_of(number, len(engines), len(ranks.exports))
                await engine.command("limit", bytes_per_s=ranks.bytes_per_s / max(1, children))
        world = world_of(folder, ranks, engines)
        await world.sync.start_from_version(0, folder)
        yield world
    finally:
        await asyncio.gather(*(engine.end() for engine in engines))


def _children_of(number: int, num_engines: int, num_senders: int) -> int:
    """Return how many sends of an engine there are in the groups of all senders (`EngineGroups._shift`)."""
    shifts = [sender * num_engines // num_senders for sender in range(num_senders)]
    ranks = [1 + (number + shift) % num_engines for shift in shifts]
    return sum(children_of(rank, num_engines + 1) for rank in ranks)


def world_of(
    folder: Path,
    ranks: Ranks,
    engines: Sequence[Any],
    transport: Literal["distributed", "tensor"] = "distributed",
) -> World:
    """Return what the driver has of ranks and engines, before it starts."""
    pool = EnginePool(Metrics(), time.monotonic)
    for engine in engines:
        pool.add_engine(cast(Engine, engine))

    async def open_port(rank: int) -> tuple[str, int]:
        return "127.0.0.1", free_port("127.0.0.1")

    routes = SimpleNamespace(
        weight_backend="gloo",
        abortable_servers=True,
        open_port=open_port,
        local_folder=lambda engine_id: SimpleNamespace(),
        ranks_beside=lambda engine_id: (),
    )
    weights = WeightsConfig(transport=transport, bucket_bytes=ranks.bucket_bytes, timeout_s=60.0)
    sync = WeightSync(
        cast(
            Config,
            SimpleNamespace(
                weights=weights, engine=SGLangEngines(), adapters=None, placement=PlacementConfig()
            ),
        ),
        pool=pool,
        trainer=cast(Trainer, ranks),
        routes=cast(Any, routes),
        directory=folder,
        metrics=Metrics(),
        clock=time.monotonic,
    )
    return World(pool, engines, ranks, sync)
