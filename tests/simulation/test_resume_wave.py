"""What an update is followed by: everybody has everything to prefill, and engines come back one by one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import NamedTuple, cast
from unittest.mock import patch

import numpy as np

from async_rl.engine_protocol import Chunk, Engine, EngineCapacity, Finish, GenerateRequest, SamplingParams
from async_rl.engines import lease_dispatcher
from async_rl.engines.pool import EnginePool
from async_rl.observability.metrics import Metrics
from async_rl.planning.virtual_time import run_virtual
from async_rl.runtime.supervision import Nursery

ENGINES, TRAJECTORIES = 8, 256
RATE = 20_000.0
"""Tokens an engine prefills in a second."""
BUDGET = 32_768
"""The tokens of `lease_dispatcher.MAX_PREFILL_TOKENS`."""


class Prefilling:
    """Prefills one call after the other, in the order in which they come, and then says one token."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.capacity = EngineCapacity()
        self.free_s = 0.0
        self.done = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk | Finish]:
        now = asyncio.get_running_loop().time()
        self.free_s = max(now, self.free_s) + len(request.input_ids) / RATE
        await asyncio.sleep(self.free_s - now)
        yield Chunk.of([7], [-1.0])
        await self.done.wait()
        yield Finish(reason="length", version_spans=())


class Wave(NamedTuple):
    """How a wave went, seconds since the first engine came back; `ideal_s` is its work over all engines."""

    ideal_s: float
    all_run_s: float
    p99_s: float
    order: list[int]
    imbalance: float


def wave(budget: int | None, *, stagger_s: float = 0.05) -> Wave:
    """Let all trajectories resume at once."""
    rng = random.Random(0)
    lengths = [min(30_000, int(rng.lognormvariate(8.8, 0.8))) for _ in range(TRAJECTORIES)]

    async def main() -> Wave:
        loop = asyncio.get_running_loop()
        with patch.object(lease_dispatcher, "MAX_PREFILL_TOKENS", budget):
            pool = EnginePool(Metrics(), loop.time)
        engines = [Prefilling(f"engine-{index}") for index in range(ENGINES)]
        for engine in engines:
            pool.add_engine(cast(Engine, engine))
        firsts: dict[int, float] = {}
        began: list[int] = []
        finished = asyncio.Event()

        async def resume(number: int) -> None:
            length = lengths[number]
            async with pool.dispatcher.lease(f"{number:032x}", length + 1000, prompt=length) as lease:
                began.append(number)
                request = GenerateRequest(
                    request_id="r",
                    input_ids=np.zeros(length, np.int32),
                    max_new_tokens=1000,
                    sampling=SamplingParams(),
                )
                async for event in lease.generate(request):
                    if isinstance(event, Chunk):
                        firsts[number] = loop.time()
                        if len(firsts) == TRAJECTORIES:
                            finished.set()

        async with Nursery() as nursery:
            for number in rng.sample(range(TRAJECTORIES), TRAJECTORIES):
                nursery.start_task(f"resume {number}", resume(number))
            await asyncio.sleep(0)
            for engine in engines:
                pool.serve_engine(engine.engine_id, 1)
                await asyncio.sleep(stagger_s)
            await finished.wait()
            imbalance = pool.imbalance
            for engine in engines:
                engine.done.set()
        times = np.array(list(firsts.values()))
        ideal_s = sum(lengths) / RATE / ENGINES
        return Wave(ideal_s, float(times.max()), float(np.percentile(times, 99)), began, imbalance)

    return run_virtual(main())


def test_all_run_again_in_little_more_than_the_work_takes_when_prefills_are_paced() -> None:
    paced, at_once = wave(BUDGET), wave(None)
    assert paced.all_run_s < 1.15 * paced.ideal_s
    assert paced.p99_s < 1.15 * paced.ideal_s
    assert paced.imbalance < 1.4
    assert paced.order == list(range(TRAJECTORIES)), "the oldest trajectories run first again"
    together = wave(BUDGET, stagger_s=0.0)
    assert together.all_run_s < 1.15 * together.ideal_s
    # The control: without a pace the first engine that is back draws everybody.
    assert at_once.all_run_s > 4 * at_once.ideal_s
    assert at_once.imbalance > 4
