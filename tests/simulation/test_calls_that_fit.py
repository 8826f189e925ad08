"""Adaptive numbers of calls against fixed ones, in virtual time, on engines with small KV caches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

import numpy as np
import pytest

from async_rl.config import MaxCalls, SimulatedEngines
from async_rl.engine_protocol import Chunk, DiskUpdate, Finish, GenerateRequest, SamplingParams
from async_rl.engines.pool import EnginePool
from async_rl.engines.simulated import SimulatedEngine
from async_rl.observability.metrics import Metrics
from async_rl.planning.virtual_time import run_virtual
from async_rl.runtime.supervision import Nursery

CACHE = 1000
LONGEST = 120
SECONDS = 60.0


class Measured(NamedTuple):
    """What was delivered in the second half of the time."""

    tokens_per_s: float
    retractions_per_call: float


def measure(max_calls: MaxCalls, prompt_at: Callable[[float], int], *, update_every_s: float) -> Measured:
    """Let 48 trajectories ask one engine for answers of 30 tokens in the mean, one after the other."""

    async def main() -> Measured:
        loop = asyncio.get_running_loop()
        config = SimulatedEngines(
            max_running_requests=64,
            max_total_tokens=CACHE,
            decode_step_s=0.05,
            prefill_tokens_per_s=4000.0,
            mean_new_tokens=30.0,
        )
        engine, pool = SimulatedEngine("a", config), EnginePool(Metrics(), loop.time, max_calls=max_calls)
        pool.add_engine(engine)
        pool.serve_engine("a", 0)
        rng, numbers, found = random.Random(0), count(), [0, 0, 0]

        async def one_trajectory() -> None:
            key = f"{next(numbers):032x}"
            ids = [4 + rng.randrange(500) for _ in range(prompt_at(loop.time()))]
            left, reason = LONGEST, "abort"
            while reason == "abort":
                async with pool.dispatcher.lease(key, len(ids) + left, prompt=len(ids)) as lease:
                    request = GenerateRequest(
                        request_id=f"{key}-{lease.epoch_name}",
                        input_ids=np.array(ids, np.int32),
                        max_new_tokens=left,
                        sampling=SamplingParams(),
                    )
                    async for event in lease.generate(request):
                        counts = loop.time() > SECONDS / 2
                        if isinstance(event, Chunk):
                            ids += event.token_ids.tolist()
                            left -= len(event.token_ids)
                            found[0] += counts * len(event.token_ids)
                        elif isinstance(event, Finish):
                            reason = event.reason
                            found[1] += counts * len(event.retractions)
                            found[2] += counts
            pool.dispatcher.forget_trajectory(key)

        async def trajectories() -> None:
            while True:
                await one_trajectory()

        async def updates() -> None:
            for version in count(1):
                await asyncio.sleep(update_every_s)
                pool.hold_engine("a")
                await pool.interrupt_engine(engine, "abort")
                await engine.update_weights(DiskUpdate(weight_version=version, path=""), flush=True)
                pool.serve_engine("a", version)

        async with Nursery() as nursery:
            for number in range(48):
                nursery.start_task(f"trajectory {number}", trajectories())
            nursery.start_task("updates", updates())
            await asyncio.sleep(SECONDS)
            nursery.cancel_tasks()
        return Measured(found[0] / (SECONDS / 2), found[1] / found[2])

    return run_virtual(main())


WORKLOADS: dict[str, Callable[[float], int]] = {
    "short prompts": lambda now: 10,
    "long prompts": lambda now: 100,
    "prompts that become longer": lambda now: 10 if now < SECONDS / 2 else 100,
}


@pytest.mark.long
@pytest.mark.parametrize("workload", WORKLOADS)
def test_an_adaptive_number_of_calls_does_nearly_as_well_as_the_best_fixed_one(workload: str) -> None:
    """Also with weight updates, after which all calls resume at once with long prefixes.

    The engine prefills beside decoding, so a retraction costs it nearly nothing: the worst case for a limit.
    """
    prompt_at = WORKLOADS[workload]
    fixed = {calls: measure(calls, prompt_at, update_every_s=7.0) for calls in (16, 32, None)}
    adaptive = measure("adaptive", prompt_at, update_every_s=7.0)
    assert adaptive.tokens_per_s >= 0.9 * max(each.tokens_per_s for each in fixed.values())
