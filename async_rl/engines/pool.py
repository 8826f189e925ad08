"""Which engine serves which call, and which engines may serve at all.

```
   add ──► JOINING ──serve(version)──► SERVING ◄──serve(version)── UPDATING
              ▲                         │ │ └─────hold()──────────────▲ │
              └─rejoin()─ QUARANTINED ◄─┼─┴──quarantine(error)──────────┘
                                        └─drain()─► DRAINING ──remove()──► gone

   SERVING ──lend()──► EVALUATING ──serve(version), or recall() ─► JOINING──► SERVING
```

An engine that is lent out keeps its weights until it is taken back: it serves nobody here, and no update
looks at it. One that is reserved goes from JOINING to EVALUATING, again and again.

Calls are given only to engines that serve at an attested weight version; `balancing` says to which. Who waits
for an engine is let in in the order of the keys, oldest trajectory first, the moment there is room. An engine
that is quarantined loses its calls at once: each ends with the engine's error, whatever it was waiting for,
and its session goes on elsewhere with the tokens that it has.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import asynccontextmanager
from typing import Final

from async_rl.engine_protocol import Engine
from async_rl.engines.balancing import Balancer
from async_rl.engines.lease import (
    CachedPrefix,
    EngineLoad,
    EngineSlot,
    EngineSnapshot,
    EngineState,
    Lease,
    Recomputed,
)
from async_rl.errors import EngineError
from async_rl.observability.metrics import Metrics
from async_rl.runtime.waits import progressed, waiting

__all__ = ["EngineLoad", "EnginePool", "EngineState", "Lease"]

log = logging.getLogger(__name__)

_MAX_HOMES: Final = 65536
"""Remembered trajectory homes; the oldest are forgotten first, which costs a prefix-cache hit, no more."""

_STRIKE_MEMORY_S: Final = 600.0
"""Strikes further apart are no pattern: over days, any engine loses a connection now and then."""

_NAMED_STATES: Final = 8
"""Engines that are listed by name when somebody asks what calls wait for; more are counted."""


class EnginePool:
    """All engines of a run.

    Example:
        >>> async with pool.lease(trajectory_id, tokens=900, prompt=400) as lease:
        ...     async for event in lease.generate(request): ...
    """

    def __init__(
        self,
        metrics: Metrics,
        clock: Callable[[], float],
        max_strikes: int = 3,
        max_prefill_tokens: int | None = None,
    ) -> None:
        """Start empty.

        Args:
            metrics: Where states, versions and loads are shown.
            clock: Monotonic seconds.
            max_strikes: Suspicious answers or lost calls that quarantine an engine.
            max_prefill_tokens: See `balancing.Balancer`.
        """
        self._metrics = metrics
        self._clock = clock
        self._max_strikes = max_strikes
        self._balancer = Balancer(max_prefill_tokens=max_prefill_tokens)
        self._slots: dict[str, EngineSlot] = {}
        self._broken: dict[str, None] = {}
        """Those that need repair: to look for them among thousands with every change would cost seconds."""
        self._homes: OrderedDict[str, CachedPrefix] = OrderedDict()
        self._changed = asyncio.Event()
        self._num_asked = self._num_placed = 0
        self._waiters: list[tuple[str, int, Lease, asyncio.Future[None]]] = []
        self._oldest: int | None = None  # None: to be found again
        self._started = clock()

    # -- membership ---------------------------------------------------------------------------------------

    def add(self, engine: Engine, *, newcomer: bool = False) -> None:
        """Take an engine in; it serves nobody before `serve`.

        Args:
            engine: The engine.
            newcomer: Whether it joins a running job, so that `repair` must bring it to its weights.
        """
        slot = EngineSlot(engine, self._clock())
        slot.newcomer = newcomer
        self._slots[engine.engine_id] = slot
        self._balancer.add(engine.engine_id)
        self._moved(slot, EngineState.JOINING)

    def serve(self, engine_id: str, weight_version: int, *, keeps_cache: bool = False) -> bool:
        """Let an engine serve at a version that was read back from it.

        Args:
            engine_id: Which.
            weight_version: What it serves.
            keeps_cache: Whether prefixes of before are still in its cache (`in_place`).

        Returns:
            False when it failed meanwhile, or is to leave.
        """
        slot = self._slots.get(engine_id)
        if slot is None or slot.state in (EngineState.QUARANTINED, EngineState.DRAINING):
            return False
        if not keeps_cache:
            slot.epoch += 1
            slot.recompute_tokens = self._balancer.load(engine_id)
        slot.weight_version, slot.error, slot.newcomer = weight_version, None, False
        slot.progress_s = slot.decode_s = self._clock()
        for call in slot.streaming:
            call.heard_s = slot.progress_s
        self._moved(slot, EngineState.EVALUATING if slot.reserved else EngineState.SERVING)
        progressed()
        return True

    def reserve(self, engine_id: str) -> None:
        """An engine that does not serve yet will serve evaluations, and nobody else."""
        self._slots[engine_id].reserved = True

    def lend(self, engine_id: str) -> bool:
        """Take a serving engine out, with the weights that it has, for an evaluation; False when it failed.

        Its calls go on; whoever lends it interrupts it.
        """
        slot = self._slots.get(engine_id)
        if slot is None or slot.state is not EngineState.SERVING:
            return False
        self._moved(slot, EngineState.EVALUATING)
        return True

    def recall(self, engine_id: str) -> bool:
        """An engine's evaluation is over, and it is brought to the current weights; False when it failed."""
        slot = self._slots.get(engine_id)
        if slot is None or slot.state is not EngineState.EVALUATING:
            return False
        self._moved(slot, EngineState.JOINING)
        return True

    @property
    def lends(self) -> bool:
        """Whether an engine is lent out that will serve again."""
        return any(s.state is EngineState.EVALUATING and not s.reserved for s in self._slots.values())

    def hold(self, engine_id: str) -> bool:
        """Send a serving engine nothing more, because its weights will change; False when it failed."""
        slot = self._slots.get(engine_id)
        if slot is None or slot.state is not EngineState.SERVING:
            return False
        self._moved(slot, EngineState.UPDATING)
        return True

    def rejoin(self, engine_id: str) -> None:
        """A quarantined engine was restarted: it may be brought up to date."""
        slot = self._slots[engine_id]
        slot.restart_count += 1
        slot.weight_version = -1
        slot.strikes.clear()
        self._moved(slot, EngineState.JOINING)

    def quarantine(self, engine_id: str, error: Exception) -> None:
        """Send an engine nothing more until it has rejoined, and take its calls away."""
        slot = self._slots.get(engine_id)
        if slot is None or slot.state is EngineState.QUARANTINED:
            return
        log.warning("engine %s is quarantined at version %d: %s", engine_id, slot.weight_version, error)
        slot.error = error
        self._metrics.engine_quarantined_total.labels(engine_id).inc()
        self._moved(slot, EngineState.QUARANTINED)
        self._drop_all(slot, f"engine {engine_id} is quarantined: {error}")

    def not_repaired(self, engine_id: str, error: Exception) -> None:
        """A quarantined engine could not be brought back, for this reason."""
        if (slot := self._slots.get(engine_id)) is not None:
            self.quarantine(engine_id, error)
            slot.error = error

    def strike(self, engine_id: str, error: EngineError) -> None:
        """Count an answer that cannot be right, or a call that was lost."""
        slot = self._slots.get(engine_id)
        if slot is None:
            return
        now = self._clock()
        while slot.strikes and now - slot.strikes[0] > _STRIKE_MEMORY_S:
            slot.strikes.popleft()
        slot.strikes.append(now)
        log.warning("engine %s, strike %d of %d: %s", engine_id, len(slot.strikes), self._max_strikes, error)
        if len(slot.strikes) >= self._max_strikes:
            self.quarantine(engine_id, error)

    async def drain(self, engine_id: str) -> None:
        """Send an engine nothing more because it will leave; returns when its calls have ended."""
        slot = self._slots[engine_id]
        self._moved(slot, EngineState.DRAINING)
        with waiting("drain", engine_id):
            await slot.empty.wait()

    def remove(self, engine_id: str) -> None:
        """Forget an engine. Calls that it still has are dropped, and go on elsewhere."""
        slot = self._slots.pop(engine_id)
        self._broken.pop(engine_id, None)
        self._balancer.remove(engine_id)
        self._oldest = None
        self._drop_all(slot, f"engine {engine_id} has left")
        for gauge in (
            self._metrics.engine_up,
            self._metrics.engine_weight_version,
            self._metrics.engine_running_requests,
        ):
            if (engine_id,) in gauge._metrics:
                gauge.remove(engine_id)
        self._notify()

    def drop_silent_call(self, engine_id: str, why: str) -> None:
        """End the call of an engine that has been silent for longest; its session goes on with the rest."""
        for call in [*self._slots[engine_id].streaming][:1]:
            call.drop(why)

    def drop_overtaken_call(self, engine_id: str, why: str) -> None:
        """End the oldest call of an engine that has not had a token."""
        for call in [*self._slots[engine_id].prefilling][:1]:
            call.drop(why)

    # -- calls --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, key: str, tokens: int, *, prompt: int = 0) -> AsyncIterator[Lease]:
        """Wait for an engine and hold a place on it.

        Args:
            key: Trajectory id; calls of one trajectory prefer one engine, and the smallest key waits least:
                ids that grow with time let the oldest trajectory in first.
            tokens: Tokens the call will hold there at most, prompt and answer.
            prompt: Of these, tokens of the prompt.
        """
        lease = Lease(self, self._clock, key, tokens, prompt, self._homes.get(key))
        self._num_asked += 1
        if self._waiters or not self._place(lease):
            await self._wait_for_place(lease)
        try:
            yield lease
        finally:
            self._leave(lease)

    @asynccontextmanager
    async def attended(self, engine_id: str, limit_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Bound what is asked of an engine beside calls: by a limit, and by its quarantine.

        Raises:
            TimeoutError: When either comes first.
        """
        slot = self._slots[engine_id]
        async with asyncio.timeout(limit_s) as limit:
            slot.attended.add(limit)
            try:
                yield limit
            finally:
                slot.attended.discard(limit)

    def share_home(self, key: str, other: str) -> None:
        """A trajectory begins with what another has: their engine is preferred by both."""
        if (home := self._homes.get(key)) is not None:
            self._homes[other] = home

    def forget(self, key: str) -> None:
        """A trajectory is done; its home need not be remembered."""
        self._homes.pop(key, None)

    async def _wait_for_place(self, lease: Lease) -> None:
        """Wait in line; the line moves when an engine serves, a call has its first token, or one ends."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (lease.key, self._num_asked, lease, turn))
        self._admit()
        try:
            with waiting("engine", why=self._states):
                await turn
        except BaseException:
            if lease.placed:  # cancelled in the moment in which it got its place
                self._leave(lease)
            else:
                turn.cancel()
            raise
        self._metrics.stage_wait_seconds.labels("engine").observe(self._clock() - lease.asked_s)

    def _admit(self) -> None:
        """Let in who waits, in order, until one finds no place."""
        while self._waiters:
            *_, lease, turn = self._waiters[0]
            if not turn.done():
                if not self._place(lease):
                    return
                turn.set_result(None)
            heapq.heappop(self._waiters)

    def _place(self, lease: Lease) -> bool:
        home, held = lease.home, 0
        slot = self._slots.get(home.engine_id) if home is not None else None
        cause: Recomputed | None = None
        if home is not None:
            if (
                slot is None
                or slot.restart_count != home.restart_count
                or slot.state is EngineState.QUARANTINED
            ):
                cause = "failover"
            elif slot.epoch != home.epoch:
                cause = "update"
            else:
                held = min(home.tokens, lease.prompt)
        cached = home is not None and cause is None and 2 * held >= lease.prompt
        chosen = self._balancer.choose(home=home.engine_id if home is not None else None, cached=cached)
        if chosen is None:
            return False
        if home is not None and cause is None and chosen != home.engine_id:
            cause, held = "moved", 0
        slot, prefill_tokens = self._slots[chosen], lease.prompt - held
        if slot.idle_since is not None:
            slot.idle_s += self._clock() - slot.idle_since
            slot.idle_since = None
        self._balancer.begin(chosen, tokens=lease.tokens, prefill_tokens=prefill_tokens)
        self._num_placed += 1
        lease.place(slot, self._num_placed, prefill_tokens, cause)
        self._metrics.engine_running_requests.labels(chosen).set(slot.num_calls)
        return True

    def _leave(self, lease: Lease) -> None:
        slot, engine_id = lease.slot, lease.engine.engine_id
        prefilled = lease in slot.streaming
        del (slot.streaming if prefilled else slot.prefilling)[lease]
        if not slot.num_calls:
            slot.idle_since = self._clock()
            slot.empty.set()
        if self._slots.get(engine_id) is not slot:
            return  # it has left, with its load
        if not prefilled:
            self._balancer.prefilled(engine_id, lease.prefill_tokens)
        if prefilled or lease.home is None:
            self._remember(lease, lease.prompt + lease.received if prefilled else 0)
        self._balancer.end(engine_id, lease.tokens)
        self._metrics.engine_running_requests.labels(engine_id).set(slot.num_calls)
        self._admit()

    def _remember(self, lease: Lease, tokens: int) -> None:
        """Where the trajectory's tokens are. The last one sampled was never fed."""
        slot = lease.slot
        home = CachedPrefix(slot.engine.engine_id, lease.restart_count, lease.epoch, max(0, tokens - 1))
        self._homes[lease.key] = home
        self._homes.move_to_end(lease.key)
        if len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)

    # -- what leases report -------------------------------------------------------------------------------

    def first_token(self, lease: Lease, waited_s: float) -> None:
        """See `lease.Desk`."""
        engine_id = lease.engine.engine_id
        if self._slots.get(engine_id) is lease.slot:
            self._balancer.prefilled(engine_id, lease.prefill_tokens)
        kind = "new" if lease.home is None else "again" if lease.cause is not None else "next"
        self._metrics.first_token_seconds.labels(kind).observe(waited_s)
        self._admit()

    def recomputed(self, tokens: int, cause: Recomputed) -> None:
        """See `lease.Desk`."""
        self._metrics.prefilled_again_tokens_total.labels(cause).inc(tokens)

    # -- what others ask ----------------------------------------------------------------------------------

    def engines(self, *states: EngineState) -> Sequence[Engine]:
        """Engines in any of the states; all without an argument."""
        return [slot.engine for slot in self._slots.values() if not states or slot.state in states]

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._slots

    def standing_of(self, engine_id: str) -> EngineSnapshot | None:
        """Where an engine stands; None when it is not one of the pool."""
        slot = self._slots.get(engine_id)
        return slot.standing if slot is not None else None

    def version_of(self, engine_id: str) -> int:
        """The attested version of an engine, -1 before the first."""
        return self._slots[engine_id].weight_version

    def error_of(self, engine_id: str) -> Exception | None:
        """Why an engine is quarantined."""
        return self._slots[engine_id].error

    def vitals(self, engine_id: str) -> EngineLoad:
        """What the calls of an engine tell of its health."""
        return self._slots[engine_id].vitals(self._balancer.prefill(engine_id))

    @property
    def oldest_version(self) -> int:
        """A lower bound of the version that a call made from now on samples under."""
        if self._oldest is None:
            sampling = (EngineState.SERVING, EngineState.UPDATING)
            slots = self._slots.values()
            versions = [slot.weight_version for slot in slots if slot.state in sampling]
            if not versions:  # one that is lent out is no older when it comes back
                lent = EngineState.EVALUATING
                versions = [s.weight_version for s in slots if s.state is lent and not s.reserved]
            self._oldest = min(versions, default=0)
        return self._oldest

    @property
    def imbalance(self) -> float:
        """Highest load of an engine over the mean, see `Balancer.imbalance`."""
        return self._balancer.imbalance

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
            slot.idle_since = self._started if not slot.num_calls else None

    async def wait_for_repair(self, under_way: Container[str] = ()) -> str:
        """Wait until some engine needs repair that nobody repairs yet, and name it."""
        while True:
            for engine_id in self._broken:
                if engine_id not in under_way:
                    return engine_id
            await self.changed()

    def needs_repair(self, engine_id: str) -> bool:
        """Whether an engine of the pool is quarantined, or a newcomer."""
        return engine_id in self._broken

    def has(self, *states: EngineState) -> bool:
        """Whether some engine is in any of the states."""
        return any(slot.state in states for slot in self._slots.values())

    async def changed(self) -> None:
        """Wait until some engine's state changes."""
        await self._changed.wait()

    # -- inside -------------------------------------------------------------------------------------------

    def _states(self) -> str:
        if len(self._slots) > _NAMED_STATES:
            counts = Counter(slot.state for slot in self._slots.values())
            return ", ".join(f"{count} {state}" for state, count in counts.items())
        names = (f"{engine_id} {slot.state}" for engine_id, slot in self._slots.items())
        return ", ".join(names) or "no engine yet"

    def _moved(self, slot: EngineSlot, state: EngineState) -> None:
        """An engine has changed its state, or its version."""
        engine_id = slot.engine.engine_id
        slot.state = state
        self._oldest = None
        if slot.needs_repair:
            self._broken[engine_id] = None
        else:
            self._broken.pop(engine_id, None)
        if state is EngineState.SERVING:
            self._balancer.open(engine_id)
        else:
            self._balancer.close(engine_id)
        self._metrics.engine_up.labels(engine_id).set(state is not EngineState.QUARANTINED)
        self._metrics.engine_weight_version.labels(engine_id).set(slot.weight_version)
        self._notify()

    def _notify(self) -> None:
        """Let in who can be, and wake everybody who waits for a change; later waiters get a fresh event."""
        self._admit()
        self._changed.set()
        self._changed = asyncio.Event()

    def _drop_all(self, slot: EngineSlot, why: str) -> None:
        for call in slot.calls():
            call.drop(why)
        for limit in slot.attended:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())
