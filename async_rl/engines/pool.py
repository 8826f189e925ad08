"""The engines of a run: their states, and the transitions between states.

```
 add_engine ──► JOINING ──serve_engine──► SERVING ◄──serve_engine── UPDATING
                   ▲                        │ │ └─────hold_engine──────▲ │
                   └─rejoin─ QUARANTINED ◄──┼─┴──quarantine_engine───────┘
                                            └─drain_engine─► DRAINING ──remove_engine──► gone

 SERVING ──lend_engine──► EVALUATING ──serve_engine, or recall_engine ─► JOINING──► SERVING
```

An engine that is lent to an evaluation keeps its weights until it is taken back: it serves no rollouts, and
weight updates skip it. A reserved engine serves evaluations only: it goes from JOINING to EVALUATING each
time.

`LeaseDispatcher` gives calls to serving engines, `PoolStatistics` reports their load. Quarantine drops all
calls of an engine at once: each ends with the engine's error, whatever it waits for, and its session
continues with its tokens on another engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Final

from async_rl.engine_protocol import Engine, InterruptMode
from async_rl.engines import balancing
from async_rl.engines.back_pressure import BackPressure
from async_rl.engines.balancing import Balancer
from async_rl.engines.lease import BoundedRequest, EngineLoad, EngineSlot, EngineSnapshot, EngineState
from async_rl.engines.lease_dispatcher import LeaseDispatcher
from async_rl.engines.pool_statistics import PoolStatistics
from async_rl.engines.request_refusals import RequestRefusals
from async_rl.engines.revocation import LeaseHolder, Revocation, wait_for_confirmations
from async_rl.errors import (
    CallLost,
    EngineBusy,
    EngineError,
    InvariantError,
    LocalShortage,
    RequestRefused,
    VersionMismatch,
)
from async_rl.observability.metrics import Metrics
from async_rl.runtime.serving_clock import ServingClock
from async_rl.runtime.waits import progressed, waiting

__all__ = ["EngineLoad", "EnginePool", "EngineState"]

log = logging.getLogger(__name__)

_STRIKE_MEMORY_S: Final = 600.0
"""Strikes further apart are no pattern: over days, any engine loses a connection now and then."""


_REFUSAL_PAUSE_S: Final = 1.0
"""Time without calls for an engine whose refusal of a request is doubted; then it gets one call at a time. It
always has the least load, so no other would be given a call that shows whether the requests are wrong."""

_MAY_SERVE: Final = (EngineState.JOINING, EngineState.UPDATING, EngineState.SERVING)
"""States of engines that serve rollouts now or soon."""


class EnginePool(LeaseHolder):
    """All engines of a run."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Callable[[], float],
        max_strikes: int = 3,
    ) -> None:
        """Start without engines.

        Args:
            metrics: Where states, versions and loads are shown.
            clock: Monotonic seconds.
            max_strikes: Implausible answers or lost calls after which an engine is quarantined.
        """
        self._metrics = metrics
        self._clock = clock
        self._max_strikes = max_strikes
        self._slots: dict[str, EngineSlot] = {}
        self._balancer = Balancer(max_prefill_tokens=balancing.MAX_PREFILL_TOKENS)
        self.dispatcher = LeaseDispatcher(self._slots, self._balancer, self, metrics, clock)
        """Gives calls to engines: what sessions know of the pool."""
        self._need_repair: dict[str, None] = {}
        """Engines that need repair: finding them among thousands at every change would cost seconds."""
        self._changed = asyncio.Event()
        self._serving: set[str] = set()
        self.lease_holders: dict[LeaseHolder, None] = {}
        """Other processes that make calls under leases of this pool, and pools its engines are lent to."""
        self.statistics = PoolStatistics(self._slots, self._balancer, self.lease_holders, clock)
        """Loads and idle time."""
        self.serving_clock = ServingClock(clock)
        """Runs while some engine serves."""
        self._oldest_version: int | None = None
        """Cached until the next change of a state or version."""

    # -- transitions --------------------------------------------------------------------------------------

    def announce_version(self, weight_version: int) -> None:
        """Expect that calls sample under a version from now on: engines are about to load it."""
        self.dispatcher.newest_version = max(self.dispatcher.newest_version, weight_version)

    def add_engine(self, engine: Engine, *, newcomer: bool = False) -> None:
        """Add an engine; it gets no calls before `serve_engine`.

        Args:
            engine: The engine.
            newcomer: Whether it joins a running job, so that `repair` must load the current weights into it.
        """
        slot = EngineSlot(engine, self._clock())
        slot.newcomer = newcomer
        self._slots[engine.engine_id] = slot
        # Evaluated at the scrape: a gauge that follows each call would cost as much as placing the call.
        running = self._metrics.engine_running_requests.labels(engine.engine_id)
        running.set_function(lambda: slot.num_calls)
        self._balancer.add_engine(engine.engine_id)
        self._enter_state(slot, EngineState.JOINING)

    def serve_engine(self, engine_id: str, weight_version: int, *, keeps_cache: bool = False) -> bool:
        """Let an engine serve a version that was verified on it.

        Args:
            engine_id: The engine.
            weight_version: The version it serves.
            keeps_cache: Whether earlier prefixes are still in its cache (`in_place`).

        Returns:
            False when it failed meanwhile, or is draining.
        """
        slot = self._slots.get(engine_id)
        if slot is None or slot.state in (EngineState.QUARANTINED, EngineState.DRAINING):
            return False
        slot.epoch += 1
        if not keeps_cache:
            slot.num_flushes += 1
            slot.recompute_tokens = self._balancer.load_of(engine_id)
        slot.weight_version, slot.error, slot.newcomer = weight_version, None, False
        self.announce_version(weight_version)
        slot.progress_s = slot.decode_s = self._clock()
        for call in slot.streaming:
            call.heard_s = slot.progress_s
        self._enter_state(slot, EngineState.EVALUATING if slot.reserved else EngineState.SERVING)
        progressed()
        return True

    def reserve_engine(self, engine_id: str) -> None:
        """Reserve an engine that does not serve yet for evaluations."""
        self._slots[engine_id].reserved = True

    def lend_engine(self, engine_id: str) -> bool:
        """Lend a serving engine, with the weights it has, to an evaluation; False when it failed.

        Its calls go on until the evaluation interrupts it.
        """
        return self._leave_state(engine_id, EngineState.SERVING, EngineState.EVALUATING)

    def recall_engine(self, engine_id: str) -> bool:
        """Take an engine back from an evaluation, to load the current weights; False when it failed."""
        return self._leave_state(engine_id, EngineState.EVALUATING, EngineState.JOINING)

    def hold_engine(self, engine_id: str) -> bool:
        """Give a serving engine no more calls, because its weights will change; False when it failed."""
        return self._leave_state(engine_id, EngineState.SERVING, EngineState.UPDATING)

    def rejoin_engine(self, engine_id: str) -> None:
        """Let a quarantined engine that was restarted load the current weights."""
        slot = self._slots[engine_id]
        slot.restart_count += 1
        slot.has_answered = False
        slot.weight_version = -1
        slot.strikes.clear()
        slot.back_pressure, slot.refusals = BackPressure(), RequestRefusals()
        self._balancer.limit_calls(engine_id, slot.back_pressure.max_calls)
        self._end_pause(slot)
        self._enter_state(slot, EngineState.JOINING)

    def quarantine_engine(self, engine_id: str, error: Exception, *, wrong_weights: bool = False) -> None:
        """Give an engine no more calls until it has rejoined, and drop the calls it has.

        Args:
            engine_id: The engine.
            error: Why.
            wrong_weights: Whether an answer has shown that it samples by other weights than those published
                to it: the tokens of its calls are discarded.
        """
        slot = self._slots.get(engine_id)
        if slot is None or slot.state is EngineState.QUARANTINED:
            return
        log.warning("engine %s is quarantined at version %d: %s", engine_id, slot.weight_version, error)
        slot.error = error
        self._metrics.engine_quarantined_total.labels(engine_id).inc()
        self._enter_state(slot, EngineState.QUARANTINED)
        kind = VersionMismatch if wrong_weights else CallLost
        slot.drop_requests(kind, f"engine {engine_id} is quarantined: {error}")

    def record_failed_repair(self, engine_id: str, error: Exception) -> None:
        """Record why a quarantined engine could not be repaired."""
        if (slot := self._slots.get(engine_id)) is not None:
            self.quarantine_engine(engine_id, error)
            slot.error = error

    def record_strike(self, engine_id: str, error: EngineError) -> None:
        """Implements `EngineFailureListener.record_strike`.

        After `max_strikes` of them the engine is quarantined.
        """
        slot = self._slots.get(engine_id)
        if slot is None:
            return
        now = self._clock()
        while slot.strikes and now - slot.strikes[0] > _STRIKE_MEMORY_S:
            slot.strikes.popleft()
        slot.strikes.append(now)
        log.warning("engine %s, strike %d of %d: %s", engine_id, len(slot.strikes), self._max_strikes, error)
        if len(slot.strikes) >= self._max_strikes:
            self.quarantine_engine(engine_id, error, wrong_weights=isinstance(error, VersionMismatch))

    def record_back_pressure(self, engine_id: str, error: EngineBusy) -> None:
        """Give an engine fewer calls, and none for a while, because it refused one while it served.

        An engine that refuses calls for long and completes none is quarantined.
        """
        slot = self._slots.get(engine_id)
        if slot is None or slot.state is not EngineState.SERVING:  # without its memory it refuses all
            return
        self._metrics.engine_busy_total.labels(engine_id).inc()
        pressure, now, accepted = slot.back_pressure, self._clock(), slot.num_calls - 1
        if slot.pause is not None:  # sent before the pause
            pressure.lower_limit(now, accepted)
        else:
            pause_s = pressure.record_refusal(now, error, accepted=accepted)
            log.warning("engine %s is busy, no calls for %.1f s: %s", engine_id, pause_s, error)
            self._pause_engine(slot, pause_s)
        self._balancer.limit_calls(engine_id, pressure.max_calls)
        if pressure.is_broken(now, running=len(slot.streaming)):
            self.quarantine_engine(engine_id, error)

    def record_refused_request(self, engine_id: str, trajectory_id: str, error: RequestRefused) -> bool:
        """Implements `EngineFailureListener.record_refused_request`.

        An engine that is doubted gets few calls, so that others are given them. A refusal is a strike once
        others have accepted requests.
        """
        slot = self._slots.get(engine_id)
        if slot is None or slot.state is not EngineState.SERVING:
            return False
        refusals = slot.refusals
        refusals.record_refusal(trajectory_id, self._clock())
        if not self.doubts_refusals(engine_id):
            self._balancer.limit_calls(engine_id, slot.back_pressure.max_calls)
            return True
        if slot.pause is None:
            self._balancer.limit_calls(engine_id, 1)
            self._pause_engine(slot, _REFUSAL_PAUSE_S)
        others = [other for other in self._slots.values() if other is not slot]
        if refusals.are_suspicious and any(other.refusals.accepted_s > refusals.since_s for other in others):
            problem = (
                f"engine {engine_id} refuses the requests of {refusals.num_trajectories} trajectories in a "
                f"row, and other engines accept theirs: {error}"
            )
            self.record_strike(engine_id, EngineError(problem))
        return False

    def doubts_refusals(self, engine_id: str) -> bool:
        """Return whether an engine that refuses a request as wrong may be wrong itself.

        So it is if it refuses all, or serves alone while others are updated, unless those refuse all too.
        """
        slot = self._slots[engine_id]
        if not slot.refusals.are_suspicious and not self._serving <= {engine_id}:
            return False
        return any(
            other is not slot
            and other.state in _MAY_SERVE
            and not other.reserved
            and not other.refusals.are_suspicious
            for other in self._slots.values()
        )

    @contextmanager
    def paused_calls(self, engine_id: str, limit_s: float) -> Iterator[None]:
        """Give a serving engine no calls while the block runs, at most for `limit_s`."""
        slot = self._slots[engine_id]
        if slot.pause is not None:  # it is busy
            yield
            return
        self._pause_engine(slot, limit_s)
        pause = slot.pause
        try:
            yield
        finally:
            if slot.pause is pause:
                self._end_pause(slot)

    def _pause_engine(self, slot: EngineSlot, pause_s: float) -> None:
        """Give a serving engine no calls for a while."""
        slot.pause = asyncio.get_running_loop().call_later(pause_s, self._end_pause, slot)
        self._balancer.close_engine(slot.engine.engine_id)

    def _end_pause(self, slot: EngineSlot) -> None:
        """Let an engine be called again that was busy."""
        if slot.pause is None:
            return
        slot.pause.cancel()
        slot.pause = None
        engine_id = slot.engine.engine_id
        if self._slots.get(engine_id) is slot and slot.state is EngineState.SERVING:
            self._balancer.open_engine(engine_id)
            self.dispatcher.admit_waiting()

    def record_local_shortage(self, error: LocalShortage) -> None:
        """Make no calls for a while, because this process lacks what a connection needs."""
        self.dispatcher.pause_calls(str(error))

    async def drain_engine(self, engine_id: str) -> None:
        """Give an engine no more calls because it will leave; returns when its calls have ended."""
        slot = self._slots[engine_id]
        self._enter_state(slot, EngineState.DRAINING)
        with waiting("drain", engine_id):
            await slot.empty.wait()

    def remove_engine(self, engine_id: str) -> None:
        """Remove an engine. The calls it still has are dropped; their sessions go on with other engines."""
        slot = self._slots.pop(engine_id)
        self._end_pause(slot)
        self._need_repair.pop(engine_id, None)
        self._serving.discard(engine_id)
        self._balancer.remove_engine(engine_id)
        self._oldest_version = None
        slot.drop_requests(CallLost, f"engine {engine_id} has left")
        for gauge in (
            self._metrics.engine_up,
            self._metrics.engine_weight_version,
            self._metrics.engine_running_requests,
        ):
            gauge.remove(engine_id)
        self._notify()

    @asynccontextmanager
    async def bounded_request(self, engine_id: str, limit_s: float) -> AsyncIterator[BoundedRequest]:
        """Bound a request to an engine that is not a call: by a time limit, and by the engine's quarantine.

        The block is a wait for an update of the engine. The limit begins again whenever a piece of a routing
        payload arrives, for which the request may wait, and when workers have confirmed that they send the
        engine nothing more: a silent worker is waited for as long as its leases are valid. It is not over
        before workers that receive payloads have reported.

        Raises:
            TimeoutError: When either comes first.
            EngineError: When the engine has left.
        """
        slot = self._slots.get(engine_id)
        if slot is None:
            raise EngineError(f"engine {engine_id} has left")
        async with (
            asyncio.timeout(None) as limit,
            waiting("engine update", engine_id, scope=limit) as wait,
        ):
            request = BoundedRequest(slot, limit, limit_s, wait)
            slot.bounded_requests.add(request)
            try:
                yield request
            finally:
                request.close()
                slot.bounded_requests.discard(request)

    async def interrupt_engine(self, engine: Engine, mode: InterruptMode) -> None:
        """End an epoch of an engine that gets no more calls; afterwards no call runs under its weights.

        ```
         hold, lend, drain, quarantine ──► revoke ──► interrupt ──► the engine's confirmation
         no more leases                    no more    running calls end (abort), or pause (retract, in_place)
                                           requests   end_engine: its process ends
        ```

        Every change of an engine goes through here or, if it failed, through `end_engine`: updates, device
        phases, loans, joins, departures, repairs. The next epoch begins with `serve_engine`.

        Raises:
            InvariantError: The engine still serves.
            EngineError: It does not end its calls.
        """
        await self._revoke_leases(engine.engine_id, aborts=mode == "abort")
        await engine.interrupt(mode)

    async def end_engine(self, engine_id: str, end: Callable[[str], Awaitable[None]]) -> None:
        """End an epoch of an engine that failed, and would confirm nothing: `end` ends its process.

        Raises:
            InvariantError: The engine still serves.
        """
        await self._revoke_leases(engine_id, aborts=True)
        if engine_id in self._slots:  # it has not left meanwhile
            await end(engine_id)

    @property
    def is_silent(self) -> bool:
        """Implements `LeaseHolder.is_silent`."""
        return False

    def begin_revocation(self, engine_id: str, *, aborts: bool) -> Sequence[Revocation]:
        """Implements `LeaseHolder.begin_revocation`: the pool that has lent the engine takes it away."""
        slot = self._slots.get(engine_id)
        if slot is not None and slot.state is EngineState.SERVING:
            self.quarantine_engine(engine_id, EngineError(f"engine {engine_id} is not lent any longer"))
        return self._begin_revocations(engine_id, aborts=aborts)

    def _begin_revocations(self, engine_id: str, *, aborts: bool) -> Sequence[Revocation]:
        holders = self.lease_holders
        return [each for holder in holders for each in holder.begin_revocation(engine_id, aborts=aborts)]

    async def _revoke_leases(self, engine_id: str, *, aborts: bool) -> None:
        """Wait until no other process sends requests to an engine under the leases it has now."""
        slot = self._slots.get(engine_id)
        if slot is not None and slot.state is EngineState.SERVING:
            raise InvariantError(f"engine {engine_id} is interrupted, and it still gets calls: hold it first")
        revocations = self._begin_revocations(engine_id, aborts=aborts)
        with ExitStack() as suspended:
            for request in slot.bounded_requests if slot is not None else ():
                suspended.enter_context(request.suspended())
            await wait_for_confirmations(revocations, engine_id)

    # -- queries ------------------------------------------------------------------------------------------

    def engines(self, *states: EngineState) -> Sequence[Engine]:
        """Return the engines in any of the states; all engines without an argument."""
        return [slot.engine for slot in self._slots.values() if not states or slot.state in states]

    def engine(self, engine_id: str) -> Engine:
        """Return an engine of the pool."""
        return self._slots[engine_id].engine

    def has_engine(self, state: EngineState) -> bool:
        """Return whether an engine is in this state."""
        return any(slot.state is state for slot in self._slots.values())

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._slots

    def snapshot_of(self, engine_id: str) -> EngineSnapshot | None:
        """Return the state of an engine and what it serves; None when it is not in the pool."""
        slot = self._slots.get(engine_id)
        return slot.snapshot if slot is not None else None

    def version_of(self, engine_id: str) -> int:
        """Return the verified version of an engine, -1 before the first."""
        return self._slots[engine_id].weight_version

    def error_of(self, engine_id: str) -> Exception | None:
        """Return the error for which an engine is quarantined."""
        return self._slots[engine_id].error

    @property
    def oldest_version(self) -> int:
        """A lower bound of the version that a call made from now on samples under."""
        if self._oldest_version is None:
            sampling = (EngineState.SERVING, EngineState.UPDATING)
            slots = self._slots.values()
            versions = [slot.weight_version for slot in slots if slot.state in sampling]
            if not versions:  # a lent engine is not older when it is taken back
                versions = [slot.weight_version for slot in slots if slot.lent]
            self._oldest_version = min(versions, default=0)
        return self._oldest_version

    @property
    def has_active_engine(self) -> bool:
        """Whether some engine serves, or will once its weight update or evaluation ends."""
        active = (EngineState.SERVING, EngineState.UPDATING)
        return any(slot.state in active or slot.lent for slot in self._slots.values())

    def needs_repair(self, engine_id: str) -> bool:
        """Whether an engine of the pool is quarantined, or a newcomer."""
        return engine_id in self._need_repair

    async def wait_for_repair(self, under_way: Container[str] = ()) -> str:
        """Wait until an engine needs repair whose repair is not under way; returns its id."""
        while True:
            for engine_id in self._need_repair:
                if engine_id not in under_way:
                    return engine_id
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Wait until the state of some engine changes."""
        await self._changed.wait()

    # -- inside -------------------------------------------------------------------------------------------

    def _leave_state(self, engine_id: str, before: EngineState, after: EngineState) -> bool:
        """Move an engine from one state to another; False when it is not in the first."""
        slot = self._slots.get(engine_id)
        if slot is None or slot.state is not before:
            return False
        self._enter_state(slot, after)
        return True

    def _enter_state(self, slot: EngineSlot, state: EngineState) -> None:
        engine_id = slot.engine.engine_id
        slot.state = state
        self._oldest_version = None
        if slot.needs_repair:
            self._need_repair[engine_id] = None
        else:
            self._need_repair.pop(engine_id, None)
        if state is EngineState.SERVING:
            self._serving.add(engine_id)
        else:
            self._serving.discard(engine_id)
        if state is EngineState.SERVING and slot.pause is None:
            self._balancer.open_engine(engine_id)
        else:
            self._balancer.close_engine(engine_id)
        self._metrics.engine_up.labels(engine_id).set(state is not EngineState.QUARANTINED)
        self._metrics.engine_weight_version.labels(engine_id).set(slot.weight_version)
        self._notify()

    def _notify(self) -> None:
        """Run or stop the serving clock, admit waiting calls, and wake all that wait for a change.

        Later waiters get a fresh event.
        """
        self.serving_clock.set_paused(not self._serving)
        self.dispatcher.admit_waiting()
        self._changed.set()
        self._changed = asyncio.Event()
