"""The engines that a process may call: the driver, for its own sessions, or a rollout worker.

```
 grant ──► SERVING: the dispatcher gives it calls ──► revoke: nothing more is sent, calls go on
                  │                                ──► drop_calls: they end at once
                  └ 429: fewer calls, after a pause (`back_pressure`)
```

Both have the same class, so that calls are balanced, paced, held back and moved in one way. What calls say
against their engines goes to the pool, which alone quarantines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from async_rl.engine_protocol import Engine
from async_rl.engines import lease_dispatcher
from async_rl.engines.back_pressure import BackPressure
from async_rl.engines.cache_limit import CallSizes
from async_rl.engines.lease import (
    BackPressureListener,
    EngineGrant,
    EngineJudge,
    EngineLoad,
    EngineSlot,
    EngineState,
)
from async_rl.engines.lease_dispatcher import Balancer, LeaseDispatcher
from async_rl.engines.request_refusals import RequestRefusals
from async_rl.errors import (
    CallLost,
    EngineBusy,
    EngineError,
    LocalShortage,
    RequestRefused,
)
from async_rl.observability.metrics import Metrics
from async_rl.runtime.serving_clock import ServingClock

log = logging.getLogger(__name__)

_REFUSAL_PAUSE_S: Final = 1.0
"""Time without calls for an engine whose refusal of a request is doubted; then it gets one call at a time. It
always has the least load, so no other would be given a call that shows whether the requests are wrong."""


class GrantedEngines(BackPressureListener):
    """The engines of one model that this process may call, and its calls."""

    def __init__(self, judge: EngineJudge, metrics: Metrics, clock: Callable[[], float]) -> None:
        """Start without engines.

        Args:
            judge: Is told what calls say against engines.
            metrics: Waiting times, recomputed tokens, refusals and stalls.
            clock: Monotonic seconds.
        """
        self.judge = judge
        """Is told what calls say against engines."""
        self._metrics = metrics
        self._clock = clock
        self.slots: dict[str, EngineSlot] = {}
        """The engines by id, also those that it may not call at the moment."""
        self.balancer = Balancer(max_prefill_tokens=lease_dispatcher.MAX_PREFILL_TOKENS)
        self.dispatcher = LeaseDispatcher(self.slots, self.balancer, self, judge, metrics, clock)
        """Gives calls to engines: what sessions know of them."""
        self._sizes = CallSizes()
        self.serving_clock = ServingClock(clock)
        """Runs while some engine serves."""
        self.serving: dict[str, None] = {}
        """The engines that may be called now."""

    # -- grants -------------------------------------------------------------------------------------------

    def expect(self, engine_id: str) -> None:
        """Expect grants of an engine; of engines with the same load the first expected is called."""
        self.balancer.add_engine(engine_id)

    def grant(self, engine: Engine, grant: EngineGrant) -> EngineSlot:
        """Let an engine be called; a grant of the same epoch changes the share of its prefills."""
        now, slot = self._clock(), self.slots.get(grant.engine_id)
        if slot is None:
            slot = self.slots[grant.engine_id] = EngineSlot(engine, grant, self._sizes, now)
            if grant.engine_id not in self.balancer:
                self.expect(grant.engine_id)
            self.balancer.fit_calls(grant.engine_id, slot.cache)
        slot.cache.share_capacity(grant.cache_tokens, grant.max_calls, grant.num_holders)
        before, slot.engine, slot.grant = slot.grant, engine, grant
        self.balancer.share_prefills(grant.engine_id, grant.num_holders)
        self.announce_version(grant.weight_version)
        if before.restart_count != grant.restart_count:
            slot.has_answered = False
            slot.back_pressure, slot.refusals = BackPressure(), RequestRefusals()
            self.balancer.limit_calls(grant.engine_id, slot.back_pressure.max_calls)
            self._end_pause(slot)
        if before.num_flushes != grant.num_flushes:
            slot.recompute_tokens = self.balancer.load_of(grant.engine_id)
        if not slot.is_open:
            slot.progress_s = slot.decode_s = now
            for call in slot.streaming:
                call.heard_s = now
            slot.state = EngineState.SERVING
            self.serving[grant.engine_id] = None
            if slot.pause is None:
                self.balancer.open_engine(grant.engine_id)
            self.notify()
        return slot

    def revoke(self, engine_id: str, state: EngineState = EngineState.UPDATING) -> None:
        """Send nothing more to an engine; calls that have begun go on."""
        slot = self.slots.get(engine_id)
        if slot is None or slot.state is state:
            return
        slot.state = state
        self.balancer.close_engine(engine_id)
        self.serving.pop(engine_id, None)
        self.notify()

    def drop_calls(self, engine_id: str, kind: type[EngineError], why: str) -> None:
        """End the calls of an engine with errors of a kind; their sessions continue elsewhere."""
        if (slot := self.slots.get(engine_id)) is not None:
            for call in slot.calls():
                call.drop(kind(why))  # an error of its own: raised, it holds the frames of its call

    def remove(self, engine_id: str) -> None:
        """Forget an engine, and end its calls."""
        self.revoke(engine_id, EngineState.QUARANTINED)
        self.drop_calls(engine_id, CallLost, f"engine {engine_id} has left")
        if (slot := self.slots.pop(engine_id, None)) is not None:
            self._end_pause(slot)
        self.balancer.remove_engine(engine_id)

    def announce_version(self, weight_version: int) -> None:
        """Expect that calls sample under a version from now on: engines are about to load it."""
        self.dispatcher.newest_version = max(self.dispatcher.newest_version, weight_version)

    def notify(self) -> None:
        """Run or stop the serving clock, and admit waiting calls."""
        self.serving_clock.set_paused(not self.serving)
        self.dispatcher.admit_waiting()

    def load_of(self, engine_id: str) -> EngineLoad | None:
        """Return what this process's calls say about the load of an engine; None if it knows none."""
        if (slot := self.slots.get(engine_id)) is None:
            return None
        silent, queued = slot.silent_call, slot.queued_call
        refused = slot.back_pressure.max_calls < slot.cache.max_calls
        return EngineLoad(
            calls=slot.num_calls,
            tokens=self.balancer.load_of(engine_id),
            progress_s=slot.progress_s,
            prefill_tokens=self.balancer.prefill_tokens_of(engine_id) + slot.recompute_tokens,
            accepted_s=slot.refusals.accepted_s,
            heard_s=slot.heard_s,
            decode_s=slot.decode_s,
            silent_since_s=silent.heard_s if silent is not None else None,
            overtaken_s=queued.overtaken_s if queued is not None else None,
            has_answered=slot.has_answered,
            max_calls=min(slot.back_pressure.max_calls, slot.cache.max_calls),
            limited_by="refusals" if refused else slot.cache.reason,
        )

    # -- what calls report --------------------------------------------------------------------------------

    def record_back_pressure(self, engine_id: str, error: EngineBusy) -> None:
        """Give an engine fewer calls, and none for a while, because it refused one while it served.

        An engine that refuses calls for long and completes none is quarantined.
        """
        slot = self.slots.get(engine_id)
        if slot is None or not slot.is_open:  # without its memory it refuses all
            return
        self._metrics.engine_busy_total.labels(engine_id).inc()
        pressure, now, accepted = slot.back_pressure, self._clock(), slot.num_calls - 1
        if slot.pause is not None:  # sent before the pause
            pressure.lower_limit(now, accepted)
        else:
            pause_s = pressure.record_refusal(now, error, accepted=accepted)
            log.warning("engine %s is busy, no calls for %.1f s: %s", engine_id, pause_s, error)
            self.pause_engine(engine_id, pause_s)
        self.balancer.limit_calls(engine_id, pressure.max_calls)
        if pressure.is_broken(now, running=len(slot.streaming)):
            self.judge.quarantine_engine(engine_id, error)

    def record_refused_request(self, engine_id: str, trajectory_id: str, error: RequestRefused) -> bool:
        """Implements `BackPressureListener.record_refused_request`.

        An engine that is doubted gets few calls, so that others are given them.
        """
        slot = self.slots.get(engine_id)
        if slot is None or not slot.is_open:
            return False
        refusals = slot.refusals
        refusals.record_refusal(trajectory_id, self._clock())
        if not self.judge.doubts_refusals(engine_id):
            self.balancer.limit_calls(engine_id, slot.back_pressure.max_calls)
            return True
        if slot.pause is None:
            self.balancer.limit_calls(engine_id, 1)
            self.pause_engine(engine_id, _REFUSAL_PAUSE_S)
        if refusals.are_suspicious:
            problem = EngineError(
                f"engine {engine_id} refuses the requests of {refusals.num_trajectories} trajectories in a "
                f"row, and other engines accept theirs: {error}"
            )
            self.judge.record_doubted_refusals(engine_id, refusals.since_s, problem)
        return False

    def record_local_shortage(self, error: LocalShortage) -> None:
        """Make no calls for a while, because this process lacks what a connection needs."""
        self.dispatcher.pause_calls(str(error))

    def pause_engine(self, engine_id: str, pause_s: float) -> None:
        """Give a serving engine no calls for a while."""
        slot = self.slots[engine_id]
        if slot.pause is None:
            slot.pause = asyncio.get_running_loop().call_later(pause_s, self._end_pause, slot)
            self.balancer.close_engine(engine_id)

    def _end_pause(self, slot: EngineSlot) -> None:
        """Let an engine be called again that was busy."""
        if slot.pause is None:
            return
        slot.pause.cancel()
        slot.pause = None
        engine_id = slot.grant.engine_id
        if self.slots.get(engine_id) is slot and slot.is_open:
            self.balancer.open_engine(engine_id)
            self.dispatcher.admit_waiting()
