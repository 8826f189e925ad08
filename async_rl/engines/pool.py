"""Which engine serves which call, and which engines may serve at all.

```
   add ──► JOINING ──serve(version)──► SERVING ◄──serve(version)── UPDATING
                 ▲                      │   └────hold()──────────────▲ │
                 └──rejoin()── QUARANTINED ◄────quarantine(error)──────┘
```

Calls are given only to engines that serve at an attested weight version. A trajectory goes back to the engine
that holds its prefix (sticky) unless that one is clearly busier than the least loaded; load is counted in
tokens. Waiting is by event: whoever waits for an engine wakes the moment one serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Final

from async_rl.engines.protocol import Engine
from async_rl.errors import EngineError
from async_rl.metrics import Metrics

log = logging.getLogger(__name__)

_STICKY_SLACK: Final = 1.5
"""The engine with the prefix is kept while its load is below this multiple of the least loaded one's: moving
for less pays a prefill for next to nothing."""

_MAX_HOMES: Final = 65536
"""Remembered trajectory homes; the oldest are forgotten first, which costs a prefix-cache hit, no more."""


class EngineState(StrEnum):
    """Where an engine stands; see the module's diagram."""

    JOINING = "joining"
    SERVING = "serving"
    UPDATING = "updating"
    QUARANTINED = "quarantined"


class _Slot:
    """What the pool knows of one engine."""

    def __init__(self, engine: Engine, now: float) -> None:
        self.engine = engine
        self.state = EngineState.JOINING
        self.weight_version = -1
        self.running_calls = 0
        self.load_tokens = 0
        self.error: Exception | None = None
        self.strikes = 0
        self.idle_since: float | None = now
        self.idle_s = 0.0


class Lease:
    """The right to make one call on one engine; given back when the `async with` ends."""

    def __init__(self, pool: EnginePool, slot: _Slot) -> None:
        self._pool = pool
        self._slot = slot

    @property
    def engine(self) -> Engine:
        """The engine to call."""
        return self._slot.engine

    @property
    def weight_version(self) -> int:
        """The version the engine serves now; it can move during the call unless updates abort."""
        return self._slot.weight_version

    @property
    def interrupted(self) -> bool:
        """Whether the engine has stopped serving since the lease was given, so that an abort is ours."""
        return self._slot.state is not EngineState.SERVING

    def failed(self, error: EngineError) -> None:
        """Report that the engine failed under this call: nobody is sent there until it has rejoined."""
        self._pool.quarantine(self._slot.engine.engine_id, error)

    def suspicious(self, error: EngineError) -> None:
        """Report an answer that cannot be right; an engine that gives several is quarantined."""
        self._pool.strike(self._slot.engine.engine_id, error)


class EnginePool:
    """All engines of a run.

    Example:
        >>> async with pool.lease(trajectory_id, tokens=900) as lease:
        ...     async for event in lease.engine.generate(request): ...
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float], max_strikes: int = 3) -> None:
        """Start empty.

        Args:
            metrics: Where states, versions and loads are shown.
            clock: Monotonic seconds.
            max_strikes: Suspicious answers that quarantine an engine.
        """
        self._metrics = metrics
        self._clock = clock
        self._max_strikes = max_strikes
        self._slots: dict[str, _Slot] = {}
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._changed = asyncio.Event()
        self._waiting = 0
        self._started = clock()

    # -- membership ---------------------------------------------------------------------------------------

    def add(self, engine: Engine) -> None:
        """Take an engine in; it serves nobody before `serve`."""
        self._slots[engine.engine_id] = _Slot(engine, self._clock())
        self._show(self._slots[engine.engine_id])

    def serve(self, engine_id: str, weight_version: int) -> bool:
        """Let an engine serve at a version that was read back from it; False when it failed meanwhile."""
        slot = self._slots[engine_id]
        if slot.state is EngineState.QUARANTINED:
            return False
        slot.state, slot.weight_version, slot.error = EngineState.SERVING, weight_version, None
        self._show(slot)
        self._notify()
        return True

    def hold(self, engine_id: str) -> bool:
        """Send a serving engine nothing more, because its weights will change; False when it failed."""
        slot = self._slots[engine_id]
        if slot.state is not EngineState.SERVING:
            return False
        slot.state = EngineState.UPDATING
        self._show(slot)
        return True

    def rejoin(self, engine_id: str) -> None:
        """A quarantined engine has been restarted: it may be brought up to date now."""
        slot = self._slots[engine_id]
        slot.state, slot.weight_version, slot.strikes = EngineState.JOINING, -1, 0
        self._show(slot)
        self._notify()

    def quarantine(self, engine_id: str, error: Exception) -> None:
        """Send an engine nothing more until it has rejoined."""
        slot = self._slots[engine_id]
        if slot.state is EngineState.QUARANTINED:
            return
        log.warning("engine %s is quarantined at version %d: %s", engine_id, slot.weight_version, error)
        slot.state, slot.error = EngineState.QUARANTINED, error
        self._metrics.engine_quarantined_total.labels(engine_id).inc()
        self._show(slot)
        self._notify()

    def strike(self, engine_id: str, error: EngineError) -> None:
        """Count an answer that cannot be right."""
        slot = self._slots[engine_id]
        slot.strikes += 1
        log.warning("engine %s, strike %d of %d: %s", engine_id, slot.strikes, self._max_strikes, error)
        if slot.strikes >= self._max_strikes:
            self.quarantine(engine_id, error)

    # -- calls --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, key: str, tokens: int) -> AsyncIterator[Lease]:
        """Wait for an engine and hold a place on it.

        Args:
            key: Trajectory id; calls of one trajectory prefer one engine.
            tokens: Tokens the call will hold there at most, prompt and answer.
        """
        if (slot := self._choose(key)) is None:
            begin = self._clock()
            self._waiting += 1
            try:
                while (slot := self._choose(key)) is None:
                    await self._changed.wait()
            finally:
                self._waiting -= 1
            self._metrics.stage_wait_seconds.labels("engine").observe(self._clock() - begin)
        self._enter(slot, tokens)
        try:
            yield Lease(self, slot)
        finally:
            self._leave(slot, tokens)

    def forget(self, key: str) -> None:
        """A trajectory is done; its home need not be remembered."""
        self._homes.pop(key, None)

    def _choose(self, key: str) -> _Slot | None:
        serving = [slot for slot in self._slots.values() if slot.state is EngineState.SERVING]
        if not serving:
            return None
        least = min(serving, key=lambda slot: slot.load_tokens)
        home = self._slots.get(self._homes.get(key, ""))
        if (
            home is not None
            and home.state is EngineState.SERVING
            and home.load_tokens <= least.load_tokens * _STICKY_SLACK
        ):
            return home
        self._homes[key] = least.engine.engine_id
        self._homes.move_to_end(key)
        if len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)
        return least

    def _enter(self, slot: _Slot, tokens: int) -> None:
        if slot.idle_since is not None:
            slot.idle_s += self._clock() - slot.idle_since
            slot.idle_since = None
        slot.running_calls += 1
        slot.load_tokens += tokens
        self._metrics.engine_running_requests.labels(slot.engine.engine_id).set(slot.running_calls)

    def _leave(self, slot: _Slot, tokens: int) -> None:
        slot.running_calls -= 1
        slot.load_tokens -= tokens
        if slot.running_calls == 0:
            slot.idle_since = self._clock()
        self._metrics.engine_running_requests.labels(slot.engine.engine_id).set(slot.running_calls)

    # -- what others ask ----------------------------------------------------------------------------------

    def engines(self, *states: EngineState) -> Sequence[Engine]:
        """Engines in any of the states; all without an argument."""
        return [slot.engine for slot in self._slots.values() if not states or slot.state in states]

    def version_of(self, engine_id: str) -> int:
        """The attested version of an engine, -1 before the first."""
        return self._slots[engine_id].weight_version

    def error_of(self, engine_id: str) -> Exception | None:
        """Why an engine is quarantined."""
        return self._slots[engine_id].error

    @property
    def oldest_version(self) -> int:
        """A lower bound of the version that a call made from now on samples under."""
        return min(
            (
                slot.weight_version
                for slot in self._slots.values()
                if slot.state in (EngineState.SERVING, EngineState.UPDATING)
            ),
            default=0,
        )

    @property
    def idle_share(self) -> float:
        """Share of the engines' time in which they had no call at all, since the pool was made."""
        now = self._clock()
        elapsed = (now - self._started) * max(1, len(self._slots))
        idle = sum(
            slot.idle_s + (now - slot.idle_since if slot.idle_since is not None else 0.0)
            for slot in self._slots.values()
        )
        return idle / elapsed if elapsed > 0 else 0.0

    def restart_clock(self) -> None:
        """Count idle time from now on: starting up is not idling."""
        self._started = self._clock()
        for slot in self._slots.values():
            slot.idle_s = 0.0
            slot.idle_since = self._started if slot.running_calls == 0 else None

    async def wait_quarantined(self) -> str:
        """Wait until some engine is quarantined, and name it."""
        while True:
            for engine_id, slot in self._slots.items():
                if slot.state is EngineState.QUARANTINED:
                    return engine_id
            await self._changed.wait()

    def waiting_for(self) -> str | None:
        """What calls wait for, in words; None when no call waits."""
        if not self._waiting:
            return None
        states = ", ".join(f"{engine_id} {slot.state}" for engine_id, slot in self._slots.items())
        return f"{self._waiting} calls wait for an engine that serves ({states or 'no engine yet'})"

    def _notify(self) -> None:
        """Wake everybody who waits; later waiters get a fresh event."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _show(self, slot: _Slot) -> None:
        engine_id = slot.engine.engine_id
        self._metrics.engine_up.labels(engine_id).set(slot.state is not EngineState.QUARANTINED)
        self._metrics.engine_weight_version.labels(engine_id).set(slot.weight_version)
