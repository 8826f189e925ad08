"""Engines whose streams a test fills by hand, and a pool of them on the loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from async_rl.engine_protocol import (
    Chunk,
    Engine,
    EngineCapacity,
    EngineHealth,
    Finish,
    GenerateRequest,
    PayloadProgress,
    SamplingParams,
)
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.errors import EngineError, RequestRefused
from async_rl.observability.metrics import Metrics
from async_rl.runtime.supervision import Nursery

Said = Chunk | PayloadProgress | Finish | Exception

END = Finish(reason="length", version_spans=())


def tokens(count: int) -> Chunk:
    """Return a chunk of this many tokens."""
    return Chunk.of([7] * count, [-1.0] * count)


async def settle() -> None:
    """Run the event loop until no task can proceed."""
    for _ in range(10):
        await asyncio.sleep(0)


class ManualEngine:
    """An engine whose streams are queues that the test fills; it raises exceptions among the events."""

    def __init__(self, engine_id: str, capacity: EngineCapacity | None = None) -> None:
        self.engine_id = engine_id
        self.capacity = capacity or EngineCapacity()
        self.streams: list[asyncio.Queue[Said]] = []
        self.left = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.weight_version = 0
        self.probes = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk | PayloadProgress | Finish]:
        events: asyncio.Queue[Said] = asyncio.Queue()
        self.streams.append(events)
        try:
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Finish):
                    return
        finally:
            self.left += 1

    def say(self, stream: int, *events: Said) -> None:
        for event in events:
            self.streams[stream].put_nowait(event)

    async def health(self) -> EngineHealth:
        self.probes += 1
        await self.answers.wait()
        return EngineHealth(weight_version=self.weight_version)


class ManualPool:
    """A pool of manual engines that serve, and calls that run beside the test."""

    def __init__(
        self,
        *names: str,
        nursery: Nursery,
        capacities: Mapping[str, EngineCapacity] = MappingProxyType({}),
        **pool: Any,
    ) -> None:
        self.metrics = Metrics()
        self.nursery = nursery
        self.pool = EnginePool(self.metrics, lambda: asyncio.get_running_loop().time(), **pool)
        self.engines = {name: ManualEngine(name, capacities.get(name)) for name in names}
        for name, engine in self.engines.items():
            self.pool.add_engine(cast(Engine, engine))
            self.pool.serve_engine(name, 0)
        self.order: list[str] = []
        self.tokens: dict[str, int] = {}
        self.ended: dict[str, Exception | None] = {}

    async def call(self, key: str, *, prompt: int = 10) -> str:
        """One call; the engine that it went to."""
        async with self.pool.dispatcher.lease(key, prompt + 90, prompt=prompt) as lease:
            self.order.append(key)
            engine_id = lease.engine.engine_id
            request = GenerateRequest(
                request_id=key,
                input_ids=np.zeros(prompt, np.int32),
                max_new_tokens=90,
                sampling=SamplingParams(),
            )
            self.ended[key] = None
            try:
                async for event in lease.generate(request):
                    if isinstance(event, Chunk):
                        self.tokens[key] = self.tokens.get(key, 0) + len(event.token_ids)
            except (EngineError, RequestRefused) as error:
                self.ended[key] = error
        return engine_id

    def start(self, key: str, **prompt: int) -> asyncio.Task[str]:
        return self.nursery.start_task(key, self.call(key, **prompt))

    async def begin(self, *keys: str) -> None:
        """Start calls, and let them reach their engines."""
        for key in keys:
            self.start(key)
        await settle()

    def state(self, engine_id: str) -> EngineState | None:
        standing = self.pool.snapshot_of(engine_id)
        return standing.state if standing is not None else None

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"async_rl_{name}", labels) or 0.0


@asynccontextmanager
async def manual_pool(*names: str, **pool: Any) -> AsyncIterator[ManualPool]:
    """A pool whose calls are cancelled at the end of the block."""
    async with Nursery() as nursery:
        yield ManualPool(*names, nursery=nursery, **pool)
        nursery.cancel_tasks()
