"""Sends weights from the trainer to engines in buckets: by broadcast, or through shared memory.

The engine updater calls a sender once per wave of engines:

```
 connect(engines)
 begin_sending(engines) ─► update_for(engine) ──► the engine receives ──► end_receiving(engine)
                       └─► send_buckets()     ──►       ▲            └──► give_up(engine), if it failed
```
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Final, Protocol

import msgspec

from async_rl.engine_protocol import DistributedUpdate, Engine, TensorUpdate, WeightBucket, WeightUpdate
from async_rl.errors import EngineError
from async_rl.runtime.supervision import run_together
from async_rl.runtime.waits import waiting
from async_rl.trainer_protocol import Trainer
from async_rl.weights.engine_groups import EngineGroups
from async_rl.weights.relay import BucketRelay

_PROBE_S: Final = 2.0
"""How long an engine for which all others wait may take to say that it lives."""


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What sending one version to a wave of engines took."""

    silent: frozenset[Engine] = frozenset()
    """Engines that were found stopped, so that others do not wait for them."""
    gather_s: float = 0.0
    """As `SendReport.gather_s`."""
    send_s: float = 0.0
    """As `SendReport.send_s`."""
    num_bytes: int = 0
    """Bytes of all buckets, as often as they were sent."""


class BucketSender(Protocol):
    """Sends the weights of one version to a wave of engines."""

    async def plan_buckets(self) -> None:
        """Plan the buckets, which are the same for every version."""
        ...

    async def connect(self, engines: Sequence[Engine]) -> Mapping[Engine, EngineError]:
        """Connect engines that are updated together with the trainer; return those that fail, and why."""
        ...

    def forget(self, engine_id: str) -> None:
        """Send an engine nothing as the process that it was: it was restarted."""
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

    async def send_buckets(self) -> Sent:
        """Send all buckets to the wave.

        Raises:
            EngineError: When no engine received them.
        """
        ...

    async def give_up(self, engine_id: str) -> Collection[str]:
        """Give up an engine that failed, and those that cannot receive without it; return these."""
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
        self._buckets: tuple[WeightBucket, ...] = ()
        self._names: list[str] = []
        """The groups of the wave."""
        self._aborted: set[str] = set()
        """Those of them that were given up."""

    async def plan_buckets(self) -> None:
        """Implements `BucketSender.plan_buckets`."""
        self._buckets = await self._trainer.plan_buckets(self._bucket_bytes)
        self._groups.senders = sorted({bucket.sender for bucket in self._buckets})

    async def connect(self, engines: Sequence[Engine]) -> Mapping[Engine, EngineError]:
        """Implements `BucketSender.connect`."""
        with waiting("weight groups"):
            return await self._groups.connect(engines)

    def forget(self, engine_id: str) -> None:
        """Implements `BucketSender.forget`."""
        self._groups.forget(engine_id)

    def begin_sending(self, engine_ids: Sequence[str]) -> None:
        """Implements `BucketSender.begin_sending`."""
        names = {self._groups.find_name(engine_id) for engine_id in engine_ids}
        self._names = sorted(name for name in names if name is not None)
        self._aborted.clear()

    def update_for(self, engine_id: str, version: int) -> WeightUpdate:
        """Implements `BucketSender.update_for`."""
        return DistributedUpdate(
            weight_version=version,
            group_name=self._groups.name_of(engine_id),
            buckets=self._buckets,
            is_concurrent=self._groups.are_concurrent(engine_id),
        )

    async def send_buckets(self) -> Sent:
        """Implements `BucketSender.send_buckets`."""
        report = await self._trainer.send_weights(self._names, self._bucket_bytes)
        silent = ((name, rank) for name, ranks in report.silent.items() for rank in ranks)
        return Sent(
            silent=frozenset(self._groups.engine_of(name, rank) for name, rank in silent),
            gather_s=report.gather_s,
            send_s=report.send_s,
            num_bytes=len(self._names) * sum(bucket.num_bytes for bucket in self._buckets),
        )

    async def give_up(self, engine_id: str) -> Collection[str]:
        """Implements `BucketSender.give_up`: all engines of a group receive, or none."""
        peers, name = self._groups.peers_of(engine_id), self._groups.find_name(engine_id)
        self._groups.forget(engine_id)
        if name is not None and name not in self._aborted:
            self._aborted.add(name)
            await self._trainer.abort_weight_group(name)
        return peers

    def end_receiving(self, engine_id: str) -> None:
        """Implements `BucketSender.end_receiving`. Every sender notices a failed group by itself."""


class SharedMemorySender:
    """`weights.transport: tensor`: the trainer fills buckets in memory that engines on its node open."""

    def __init__(
        self, trainer: Trainer, *, ranks_beside: Callable[[str], Sequence[int]], bucket_bytes: int
    ) -> None:
        """Send nothing yet.

        Args:
            trainer: Fills buckets.
            ranks_beside: Returns for each rank of an engine the trainer rank that it reads from.
            bucket_bytes: Size of a bucket.
        """
        self._trainer = trainer
        self._ranks_beside = ranks_beside
        self._bucket_bytes = bucket_bytes
        self._buckets: tuple[WeightBucket, ...] = ()
        self._engines: dict[str, Engine] = {}
        self._gather_s = 0.0
        self._relay = self._new_relay([])

    async def plan_buckets(self) -> None:
        """Implements `BucketSender.plan_buckets`."""
        self._buckets = await self._trainer.plan_buckets(self._bucket_bytes)

    async def connect(self, engines: Sequence[Engine]) -> Mapping[Engine, EngineError]:
        """Implements `BucketSender.connect`."""
        self._engines = {engine.engine_id: engine for engine in engines}
        return {}

    def forget(self, engine_id: str) -> None:
        """Implements `BucketSender.forget`: what it has opened ended with it."""

    def begin_sending(self, engine_ids: Sequence[str]) -> None:
        """Implements `BucketSender.begin_sending`."""
        self._gather_s = 0.0
        self._relay = self._new_relay(engine_ids)

    def update_for(self, engine_id: str, version: int) -> WeightUpdate:
        """Implements `BucketSender.update_for`."""
        relay = self._relay

        async def buckets() -> AsyncGenerator[Sequence[bytes], None]:
            async for payloads in relay.buckets(engine_id):
                yield payloads[engine_id]

        return TensorUpdate(weight_version=version, num_buckets=len(self._buckets), buckets=buckets)

    async def send_buckets(self) -> Sent:
        """Implements `BucketSender.send_buckets`."""
        await self._relay.fetch_buckets()
        return Sent(
            silent=frozenset(self._engines[engine_id] for engine_id in self._relay.dead),
            gather_s=self._gather_s,
            num_bytes=sum(bucket.num_bytes for bucket in self._buckets),
        )

    async def give_up(self, engine_id: str) -> Collection[str]:
        """Implements `BucketSender.give_up`: the others read on."""
        return ()

    def end_receiving(self, engine_id: str) -> None:
        """Implements `BucketSender.end_receiving`."""
        self._relay.remove_reader(engine_id)

    def _new_relay(self, engine_ids: Sequence[str]) -> BucketRelay[Mapping[str, Sequence[bytes]]]:
        return BucketRelay(engine_ids, len(self._buckets), self._share_bucket, self._find_dead)

    async def _find_dead(self, engine_ids: Sequence[str]) -> Sequence[str]:
        """Return the engines that do not answer."""

        async def has_died(engine_id: str) -> bool:
            try:
                async with asyncio.timeout(_PROBE_S):
                    await self._engines[engine_id].health()
            except (EngineError, TimeoutError):
                return True
            return False

        died = await run_together((f"probe {each}", has_died(each)) for each in engine_ids)
        return [engine_id for engine_id, has in zip(engine_ids, died, strict=True) if has]

    async def _share_bucket(self, number: int) -> Mapping[str, Sequence[bytes]]:
        """Return payloads of a bucket: for each reader as many as it has ranks."""
        ranks = {reader: self._ranks_beside(reader) for reader in self._relay.readers}
        begin_s = asyncio.get_running_loop().time()
        payloads = iter(
            await self._trainer.share_bucket(number, self._bucket_bytes, [*chain(*ranks.values())])
        )
        self._gather_s += asyncio.get_running_loop().time() - begin_s
        return {reader: [next(payloads) for _ in of_reader] for reader, of_reader in ranks.items()}
