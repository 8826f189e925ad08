"""Sends weights from the trainer to engines in buckets: by broadcast, or through shared memory.

The engine updater calls a sender once per wave of engines:

```
 begin_sending(engines) ─► update_for(engine) ──► the engine receives ──► end_receiving(engine)
                       └─► send_buckets()     ──►       ▲
```
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from async_rl.engine_protocol import DistributedUpdate, TensorSpec, TensorUpdate, WeightUpdate
from async_rl.trainer_protocol import Trainer
from async_rl.weights.engine_groups import EngineGroups
from async_rl.weights.relay import BucketRelay


class BucketSender(Protocol):
    """Sends the weights of one version to a wave of engines."""

    async def plan_buckets(self) -> None:
        """Plan the buckets, which are the same for every version."""
        ...

    def can_reach(self, engine_id: str) -> bool:
        """Whether an engine can receive: a broadcast to one that cannot would wait for it."""
        ...

    def begin_sending(self, engine_ids: Sequence[str]) -> None:
        """Prepare a wave: these engines receive all buckets, or stop with `end_receiving`."""
        ...

    def update_for(self, engine_id: str, version: int) -> WeightUpdate:
        """Return the request that makes an engine of the wave receive the buckets.

        Raises:
            WeightSyncError: When the engine cannot receive any more.
        """
        ...

    async def send_buckets(self) -> None:
        """Send all buckets to the wave.

        Raises:
            EngineError: When no engine received them.
        """
        ...

    def end_receiving(self, engine_id: str) -> None:
        """Stop waiting for an engine, whether it received all buckets or failed."""
        ...


class BroadcastSender:
    """`weights.transport: distributed`: broadcasts each bucket into the process groups of the engines."""

    def __init__(self, trainer: Trainer, groups: EngineGroups, bucket_bytes: int) -> None:
        """Send nothing yet."""
        self._trainer = trainer
        self._groups = groups
        self._bucket_bytes = bucket_bytes
        self._buckets: tuple[tuple[TensorSpec, ...], ...] = ()
        self._engine_ids: Sequence[str] = ()

    async def plan_buckets(self) -> None:
        """Implements `BucketSender.plan_buckets`."""
        self._buckets = await self._trainer.plan_buckets(self._bucket_bytes)

    def can_reach(self, engine_id: str) -> bool:
        """Implements `BucketSender.can_reach`."""
        return engine_id in self._groups

    def begin_sending(self, engine_ids: Sequence[str]) -> None:
        """Implements `BucketSender.begin_sending`."""
        self._engine_ids = engine_ids

    def update_for(self, engine_id: str, version: int) -> WeightUpdate:
        """Implements `BucketSender.update_for`."""
        return DistributedUpdate(
            weight_version=version, group_name=self._groups.name_of(engine_id), buckets=self._buckets
        )

    async def send_buckets(self) -> None:
        """Implements `BucketSender.send_buckets`."""
        groups = [self._groups.name_of(engine_id) for engine_id in self._engine_ids]
        await self._trainer.send_weights(groups, self._bucket_bytes)

    def end_receiving(self, engine_id: str) -> None:
        """Implements `BucketSender.end_receiving`. The trainer notices a failed group by itself."""


class SharedMemorySender:
    """`weights.transport: tensor`: the trainer fills buckets in memory that engines on its node open."""

    def __init__(self, trainer: Trainer, *, tp_size: int, bucket_bytes: int) -> None:
        """Send nothing yet; each of an engine's `tp_size` ranks gets a payload of its own."""
        self._trainer = trainer
        self._tp_size = tp_size
        self._bucket_bytes = bucket_bytes
        self._num_buckets = 0
        self._relay: BucketRelay[Mapping[str, Sequence[bytes]]] = BucketRelay([], 0, self._share_bucket)

    async def plan_buckets(self) -> None:
        """Implements `BucketSender.plan_buckets`."""
        self._num_buckets = len(await self._trainer.plan_buckets(self._bucket_bytes))

    def can_reach(self, engine_id: str) -> bool:
        """Implements `BucketSender.can_reach`."""
        return True

    def begin_sending(self, engine_ids: Sequence[str]) -> None:
        """Implements `BucketSender.begin_sending`."""
        self._relay = BucketRelay(engine_ids, self._num_buckets, self._share_bucket)

    def update_for(self, engine_id: str, version: int) -> WeightUpdate:
        """Implements `BucketSender.update_for`."""
        relay = self._relay

        async def buckets() -> AsyncGenerator[Sequence[bytes], None]:
            async for payloads in relay.buckets(engine_id):
                yield payloads[engine_id]

        return TensorUpdate(weight_version=version, num_buckets=self._num_buckets, buckets=buckets)

    async def send_buckets(self) -> None:
        """Implements `BucketSender.send_buckets`."""
        await self._relay.fetch_buckets()

    def end_receiving(self, engine_id: str) -> None:
        """Implements `BucketSender.end_receiving`."""
        self._relay.remove_reader(engine_id)

    async def _share_bucket(self, number: int) -> Mapping[str, Sequence[bytes]]:
        """Return a bucket in shared memory: for each reader as many payloads as it has ranks."""
        readers, ranks = self._relay.readers, self._tp_size
        payloads = await self._trainer.share_bucket(number, self._bucket_bytes, ranks * len(readers))
        return {reader: payloads[i * ranks : (i + 1) * ranks] for i, reader in enumerate(readers)}
