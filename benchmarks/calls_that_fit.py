"""Adaptive numbers of calls against fixed ones, on a real SGLang server with a tiny KV cache.

    python benchmarks/calls_that_fit.py [--quick] [--json FILE]

64 trajectories ask one server on the CPU for answers, one after the other, through the pool, which gives the
server a fixed number of calls at once, or an adaptive one (`engine.max_calls`). Reported: sampled tokens per
second of CPU time of the scheduler of the server, which limits it and depends little on other work;
their ratio to the best fixed number of the same round, with its range; retractions per call.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.config import MaxCalls
from async_rl.engine_protocol import Chunk, GenerateRequest, SamplingParams
from async_rl.engines.pool import EnginePool
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.observability.metrics import Metrics
from async_rl.runtime.supervision import Nursery
from benchmarks.support.tables import Row, argument_parser, report
from tests.support.sglang_world import SGLangWorld

CACHE = 4096
FIXED = (8, 16, 64)
TRAJECTORIES = 64
PROMPT = 64
LONGEST = 1024
STOPS = (0, 1, 2)
"""Tokens that end an answer, of 300: answers have 100 to 200 tokens on average, and some have all 1024."""


class Measured(NamedTuple):
    """One setting in one round."""

    tokens_per_cpu_s: float
    retractions_per_call: float
    calls: float
    """Mean of those that the server had."""


def scheduler_cpu_s() -> float:
    """Return the CPU time so far of the schedulers of servers that this process started."""
    children = psutil.Process().children(recursive=True)
    schedulers = [each for each in children if any("sglang::scheduler" in part for part in each.cmdline())]
    return sum(sum(each.cpu_times()[:2]) for each in schedulers)


async def measure(engine: SGLangEngine, max_calls: MaxCalls, tokens: int, seed: int) -> Measured:
    """Deliver some tokens to warm up, and then three times as many."""
    pool = EnginePool(Metrics(), time.monotonic, max_calls=max_calls)
    pool.add_engine(engine)
    pool.serve_engine(engine.engine_id, 0)
    rng, numbers = random.Random(seed), count()
    delivered = retracted = ended = 0
    held: list[int] = []
    reached: asyncio.Event = asyncio.Event()

    async def one_trajectory() -> None:
        nonlocal delivered, retracted, ended
        key = f"{seed:08x}{next(numbers):024x}"
        request = GenerateRequest(
            request_id=key,
            input_ids=np.array([4 + rng.randrange(290) for _ in range(PROMPT)], np.int32),
            max_new_tokens=LONGEST,
            sampling=SamplingParams(stop_token_ids=STOPS),
        )
        async with pool.dispatcher.lease(key, PROMPT + LONGEST, prompt=PROMPT) as lease:
            async with aclosing(lease.generate(request)) as stream:
                async for event in stream:
                    if isinstance(event, Chunk):
                        delivered += len(event.token_ids)
                        if delivered >= limit:
                            reached.set()
                    else:
                        ended += 1
                        retracted += sum(each.count for each in event.retractions)
                        held.append(pool.load_of(engine.engine_id).calls)
        pool.dispatcher.forget_trajectory(key)

    async def trajectories() -> None:
        while True:
            await one_trajectory()

    limit = tokens
    async with Nursery() as nursery:
        for number in range(TRAJECTORIES):
            nursery.start_task(f"trajectory {number}", trajectories())
        await reached.wait()
        began_s, began, limit = scheduler_cpu_s(), delivered, delivered + 3 * tokens
        retracted, ended = 0, 0
        held.clear()
        reached.clear()
        await reached.wait()
        measured = Measured(
            (delivered - began) / (scheduler_cpu_s() - began_s),
            retracted / max(1, ended),
            float(np.mean(held or [0])),
        )
        nursery.cancel_tasks()
    await engine.interrupt("abort")
    return measured


async def compare(world: SGLangWorld, rounds: int, tokens: int) -> list[Row]:
    """Measure all settings in turn."""
    settings: tuple[MaxCalls, ...] = (*FIXED, "adaptive")
    found: dict[MaxCalls, list[Measured]] = {each: [] for each in settings}
    for number in range(rounds):
        for setting in settings:
            engine = world.engine()
            await engine.wait_ready()
            try:
                found[setting].append(await measure(engine, setting, tokens, number))
            finally:
                await engine.close()
            print(setting, found[setting][-1], file=sys.stderr, flush=True)
    rates = {setting: np.array([each.tokens_per_cpu_s for each in found[setting]]) for setting in settings}
    best = np.max([rates[setting] for setting in FIXED], axis=0)
    return [
        {
            "calls at once": str(setting),
            "tokens / CPU s": float(np.median(rates[setting])),
            "of the best fixed": np.percentile(rates[setting] / best, (50, 0, 100)).tolist(),
            "retractions / call": float(np.mean([each.retractions_per_call for each in found[setting]])),
            "mean calls": float(np.mean([each.calls for each in found[setting]])),
        }
        for setting in settings
    ]


def main() -> None:
    """Run the benchmark."""
    parser = argument_parser(__doc__, quick="one round of fewer tokens")
    options = parser.parse_args()
    rounds, tokens = (1, 4000) if options.quick else (3, 8000)
    server = {"max_running_requests": TRAJECTORIES, "max_total_tokens": CACHE}
    with (
        tempfile.TemporaryDirectory() as folder,
        SGLangWorld(Path(folder), routing=False, **server) as world,
    ):
        rows = asyncio.run(compare(world, rounds, tokens))
    report(rows, "calls that fit", options.json)


if __name__ == "__main__":
    main()
