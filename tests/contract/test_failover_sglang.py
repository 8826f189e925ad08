"""A real SGLang server that stops in the middle of calls: who notices, and what is left of the tokens."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
import pytest

from async_rl.config import RolloutConfig, RoutingConfig, SimulatedEngines
from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import Chunk, DiskUpdate, Engine, Finish, GenerateRequest
from async_rl.engines.health import HealthWatch
from async_rl.engines.pool import EnginePool
from async_rl.observability.metrics import Metrics
from async_rl.queue.journal import JournalEntry
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.session.transcript import Transcript
from async_rl.runtime.supervision import Nursery, services
from async_rl.types import Task
from tests.support.sessions import PROMPT, PlainChat, Watched, _numbers, simulated

pytestmark = pytest.mark.sglang

CALLS, TOKENS = 3, 150
"""Calls under way when the server stops, and tokens that each has by then, at least."""


class Endless(PlainChat):
    """Turns end by their length only."""

    stop_token_ids = ()  # type: ignore[assignment]


class Counted:
    """A real engine, and what came from it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokens = 0
        self.reached = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk | Finish]:
        async for event in self._engine.generate(request):
            if isinstance(event, Chunk):
                self.tokens += len(event.token_ids)
                if self.tokens >= CALLS * TOKENS:
                    self.reached.set()
            yield event


async def test_nearly_all_tokens_survive_and_calls_move_when_a_server_is_stopped(sglang_world: Any) -> None:
    """SIGSTOP of the whole group: no connection breaks, no process ends, and nothing answers."""
    real = Counted(sglang_world.engine())
    await real.wait_ready()
    await real.update_weights(DiskUpdate(weight_version=0, path=str(sglang_world.weights[0])), flush=True)
    spare = simulated(Watched(), "spare", facts=sglang_world.facts)
    metrics = Metrics()
    pool = EnginePool(metrics, time.monotonic)
    config = SimulatedEngines(stall_s=4.0, probe_s=0.5, probe_timeout_s=0.5, probe_misses=3)
    for engine in (real, spare):
        pool.add_engine(cast(Engine, engine))
    pool.serve_engine("engine-0", 0)

    context = SessionContext(
        chat=cast(ChatFormat, Endless()),
        rollout=RolloutConfig(max_context_tokens=1024, max_new_tokens=900),
        metrics=metrics,
        clock=time.monotonic,
        serving_clock=pool.serving_clock,
        calls=pool,
        facts=sglang_world.facts,
        routing=RoutingConfig(),
        interrupt="abort",
        new_id=lambda: f"f{next(_numbers):031x}",
    )

    def session(number: int) -> RolloutSession:
        transcript = Transcript(context, JournalEntry(f"{number:032x}"))
        made = RolloutSession(context, Task(task_id="t", messages=[]), transcript, group_id="g")
        made.start([{"role": "user", "content": "hi"}])
        return made

    sessions = [session(number) for number in range(CALLS)]
    group = sglang_world.server.pid
    try:
        async with Nursery() as nursery:
            for number, made in enumerate(sessions):
                nursery.start_task(f"session {number}", made.generate())
            await real.reached.wait()
            # From here on: on a slow machine probes could be missed before, when no other engine serves.
            async with services(health=HealthWatch(pool, config, metrics, time.monotonic).watch_engines):
                os.killpg(group, signal.SIGSTOP)
                pool.serve_engine("spare", 0)
                async with asyncio.timeout(60):
                    assert await pool.wait_for_repair() == "engine-0"
    finally:
        os.killpg(group, signal.SIGCONT)
    trajectories = [await made.finish_trajectory("completed", {"reward": 1.0}) for made in sessions]
    kept = sum(len(s.token_ids) for t in trajectories for s in t.sampled if s.engine_id == "engine-0")
    # Nothing that came is lost; what the server had sampled and not sent yet is a step of each call.
    assert kept == real.tokens >= CALLS * TOKENS
    assert kept / (kept + CALLS) >= 0.99
    for trajectory in trajectories:
        assert [s.engine_id for s in trajectory.sampled] == ["engine-0", "spare"]
        assert trajectory.outcome.num_failovers == 1
        assert trajectory.num_tokens == PROMPT + 900
        assert np.isfinite(trajectory.rollout_log_probs).all()
    await real.wait_ready()  # it goes on as if nothing had been, for the tests after this one
    assert (await real.health()).weight_version == 0
    await real.interrupt("abort")
    await real.close()
