"""A session on engines of the test's choice, without an orchestrator."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from async_rl.config import (
    Config,
    RolloutConfig,
    RoutingConfig,
    SimulatedEngines,
    WeightsConfig,
)
from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import AdapterUpdate, DiskUpdate, Engine, EngineFacts, InterruptMode
from async_rl.engines.pool import EnginePool
from async_rl.engines.simulated import routing_rows
from async_rl.observability.metrics import Metrics
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.session.transcript import OpenBranchEntry, Transcript, entry_without_journal
from async_rl.store.journal import JournalEntry
from async_rl.types import RoutingTrace, Task, Trajectory
from verification.simulation.breakable_engine import BreakableEngine

PROMPT = 7
FACTS = EngineFacts(
    num_layers=3, moe_layers=(1, 2), num_experts=32, top_k=2, vocab_size=512, context_length=4096
)

_numbers = count()
"""Numbers of requests in this process: SGLang aborts an id again two seconds after its answer, so that a
second request with that id would be cut short."""


class PlainChat:
    """Seven tokens of prompt, two for each later message; token 2 stops, 104 ends a turn."""

    stop_token_ids = (2,)
    end_of_turn_ids = (104,)

    def prompt_ids(self, messages: Any, tools: Any = ()) -> np.ndarray:
        return np.arange(PROMPT, dtype=np.int32)

    def append_ids(self, messages: Any, *, after_length: bool = False) -> np.ndarray:
        return np.full(2 * len(messages) + after_length, 9, np.int32)

    def decode(self, token_ids: Any) -> str:
        return " ".join(map(str, token_ids))

    def raw_text(self, token_ids: Any) -> str:
        return self.decode(token_ids)


class Bench:
    """A pool of engines that serve version 0, and a session on it."""

    def __init__(
        self,
        *engines: Engine,
        facts: EngineFacts = FACTS,
        merge: str = "replace",
        replay: str = "r3",
        interrupt: InterruptMode = "abort",
        flip_sample: float = 0.0,
        weights: Sequence[str] = ("", ""),
        update: type[DiskUpdate | AdapterUpdate] = DiskUpdate,
        entry: JournalEntry | None = None,
        chat: ChatFormat | None = None,
        open_branch_entry: OpenBranchEntry = entry_without_journal,
        newest_version: int = 99,
        **rollout: Any,
    ) -> None:
        """Start a pool and a session.

        `weights[v % 2]` is the folder of version v, `entry` the journal's; engines may report versions up to
        `newest_version`.
        """
        self.weights = weights
        self.update = update
        self.metrics = Metrics()
        self.interrupt: InterruptMode = interrupt
        self.pool = EnginePool(self.metrics, lambda: 0.0, max_strikes=100)
        self.pool.announce_version(newest_version)
        self.engines = engines
        for engine in engines:
            self.pool.add_engine(engine)
            self.pool.serve_engine(engine.engine_id, 0)
        self.chat = chat or cast(ChatFormat, PlainChat())
        sections = SimpleNamespace(  # which need not fit together
            rollout=RolloutConfig(**{"max_context_tokens": 64, "max_new_tokens": 16, **rollout}),
            routing=RoutingConfig(merge=merge, replay=replay, flip_sample=flip_sample),
            weights=WeightsConfig(interrupt=interrupt),
        )
        self.context = SessionContext(
            config=cast(Config, sections),
            chat=self.chat,
            metrics=self.metrics,
            clock=lambda: 0.0,
            serving_clock=self.pool.own.serving_clock,
            calls=self.pool.dispatcher,
            facts=facts,
            new_id=lambda: f"b{next(_numbers):031x}",
        )
        transcript = Transcript(self.context, entry or JournalEntry("0" * 32), open_branch_entry)
        task = Task(task_id="t", messages=[])
        self.session = RolloutSession(self.context, task, transcript, group_id="g")

    def start(self) -> None:
        self.session.start([{"role": "user", "content": "hi"}])

    async def begin(self) -> None:
        """Start the session and generate its first turn."""
        self.start()
        await self.session.generate()

    async def finish(self) -> Trajectory:
        return await self.session.finish_trajectory("completed", {"reward": 1.0})

    async def bump(self, version: int, *, flush: bool | None = None) -> None:
        """Load a version into all engines as a weight update does."""
        flush = self.interrupt != "in_place" if flush is None else flush
        for engine in self.engines:
            self.pool.hold_engine(engine.engine_id)
            await engine.interrupt(self.interrupt)
            update = self.update(weight_version=version, path=self.weights[version % 2])
            await engine.update_weights(update, flush=flush)
            await engine.resume_generation(self.interrupt)
            self.pool.serve_engine(engine.engine_id, version)

    async def abort(self) -> None:
        """Abort all calls of the engines, which resume under the same weights."""
        for engine in self.engines:
            version = self.pool.version_of(engine.engine_id)
            self.pool.hold_engine(engine.engine_id)
            await engine.interrupt("abort")
            await engine.resume_generation("abort")
            self.pool.serve_engine(engine.engine_id, version)

    def counted(self, name: str, **labels: str) -> float:
        """Return the value of a metric, 0 if it was never set."""
        return self.metrics.registry.get_sample_value(f"async_rl_{name}", labels) or 0.0


class Watched:
    """A policy that depends on position and prefix alone, with events for lengths of sequences.

    Its tokens do not depend on the weights, so that runs with and without interruptions are comparable.
    """

    def __init__(self, stop_at: Sequence[int] = ()) -> None:
        """End a turn where the sequence would reach one of these lengths."""
        self.stop_at = frozenset(stop_at)
        self._reached: dict[int, asyncio.Event] = {}

    def __call__(self, prefix: Sequence[int], rng: random.Random) -> int | None:
        length = len(prefix) + 1
        for wanted, event in self._reached.items():
            if length >= wanted:
                event.set()
        return None if length in self.stop_at else 20 + (7 * length + 3 * prefix[-1]) % 300

    async def reaches(self, length: int) -> None:
        """Wait until some sequence has this many tokens."""
        await self._reached.setdefault(length, asyncio.Event()).wait()


def simulated(
    policy: Watched, engine_id: str = "engine-0", *, facts: EngineFacts = FACTS, **config: Any
) -> BreakableEngine:
    """A simulated engine of the bench's model."""
    return BreakableEngine(engine_id, SimulatedEngines(**config), seed=1, policy=policy, facts=facts)


def row_versions(trace: RoutingTrace) -> list[int]:
    """Return the version of each row of a trace."""
    return [span.weight_version for span in trace.spans for _ in range(span.start, span.end)]


def rows_under(
    trajectory: Trajectory, versions: Sequence[int] | int, facts: EngineFacts = FACTS
) -> np.ndarray:
    """The rows that a simulated engine reports for a trajectory, each under its version."""
    fed = trajectory.token_ids[:-1]
    each = np.broadcast_to(np.asarray(versions, np.int32), fed.shape)
    return routing_rows(fed, each, facts)
