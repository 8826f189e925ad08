"""Gives calls to engines: which engine serves a call, and in which order calls wait for one.

```
 Transcript ──lease(key, tokens)──► LeaseDispatcher ──► Lease ──generate(request)──► tokens, a finish

 lease(trajectory) ─► an engine below its load bound? ──yes──► Lease
                        └ no ─► waiting line, smallest key first ─► admitted when an engine has capacity
```

A session never learns how engines are updated, repaired or lent, only that a lease has ended early.

Calls are given only to engines that serve a verified weight version; `balancing` chooses between them. Each
trajectory has a sticky engine, the one of its last call, because its prefix is cached there.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Final

from async_rl.engines.balancing import Balancer
from async_rl.engines.lease import (
    BackPressureListener,
    CachedPrefix,
    CallRequest,
    EngineJudge,
    EngineSlot,
    EngineState,
    Lease,
    Recomputed,
)
from async_rl.observability.metrics import Metrics
from async_rl.runtime.waits import waiting

log = logging.getLogger(__name__)

_SHORTAGE_PAUSE_S: Final = 1.0
_SHORTAGE_PAUSE_MAX_S: Final = 30.0
"""First and longest pause of all calls when this process cannot connect; running calls end meanwhile."""

_MAX_CACHED_PREFIXES: Final = 65536
"""Remembered sticky engines; the oldest are forgotten first, which costs a prefix-cache hit, no more."""

_GRANTS_PER_TURN: Final = 32
"""Waiting calls that are given engines before the event loop comes round: an update's end admits thousands,
and each takes up to a millisecond to begin."""

_NAMED_STATES: Final = 8
"""Engines listed by name in the reason for which a call waits; more engines are counted by state."""


class LeaseDispatcher:
    """Dispatches the calls of all trajectories of a process to the engines that it may call."""

    def __init__(
        self,
        slots: Mapping[str, EngineSlot],
        balancer: Balancer,
        failures: BackPressureListener,
        judge: EngineJudge,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        """Start without calls.

        Args:
            slots: The engines of the pool by id; the pool adds and removes them.
            balancer: The loads of the same engines; the pool says which of them serve.
            failures: Notified of engines that take no calls.
            judge: Notified of engines and calls that fail.
            metrics: Waiting times, running calls and recomputed tokens.
            clock: Monotonic seconds.
        """
        self._slots = slots
        self._balancer = balancer
        self._failures = failures
        self._judge = judge
        self._metrics = metrics
        self._first_token_seconds = {
            kind: metrics.first_token_seconds.labels(kind) for kind in ("new", "again", "next")
        }
        self._clock = clock
        self.newest_version = -1
        """The newest version that a call can have sampled under: engines serve it, or an update has begun."""
        self.valid_until_s = math.inf
        """Until when this process may call engines; the driver always may."""
        self._cached_prefixes: OrderedDict[str, CachedPrefix] = OrderedDict()
        self._numbers = count(1)
        """Of leases, when they are asked for and when they are placed."""
        self._waiting_line: list[tuple[str, int, CallRequest, asyncio.Future[Lease]]] = []
        self._more: asyncio.Handle | None = None
        """Continues with `admit_waiting` in the next turn of the event loop."""
        self._shortage = ""
        """Why no calls begin for now; empty: they do."""
        self._pause_s = _SHORTAGE_PAUSE_S

    @asynccontextmanager
    async def lease(self, key: str, tokens: int, *, prompt: int = 0) -> AsyncIterator[Lease]:
        """Wait for an engine and reserve capacity on it.

        Args:
            key: Trajectory id. Calls of one trajectory prefer one engine. The smallest key is admitted first:
                ids that grow with time let the oldest trajectory in first.
            tokens: Tokens that the call holds on the engine at most, prompt and answer.
            prompt: Of these, tokens of the prompt.
        """
        request = CallRequest(
            key=key,
            tokens=tokens,
            prompt=prompt,
            cached_prefix=self._cached_prefixes.get(key),
            asked_s=self._clock(),
        )
        lease = None if self._waiting_line else self._place_call(request)
        if lease is None:
            lease = await self._wait_for_engine(request)
        try:
            yield lease
        finally:
            self._end_lease(lease)

    async def _wait_for_engine(self, request: CallRequest) -> Lease:
        placed: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting_line, (request.key, next(self._numbers), request, placed))
        self.admit_waiting()
        try:
            if placed.done():
                return placed.result()
            with waiting("engine", why=self.describe_states):
                return await placed
        except BaseException:
            if placed.done() and not placed.cancelled():  # cancelled at this moment
                self._end_lease(placed.result())
            placed.cancel()
            raise

    @property
    def is_valid(self) -> bool:
        """Implements `LeaseListener.is_valid`."""
        return self._clock() < self.valid_until_s

    @property
    def has_capacity(self) -> bool:
        """Whether an engine would be given a call now."""
        return self.is_valid and not self._shortage and self._balancer.choose_engine() is not None

    def admit_waiting(self) -> None:
        """Give engines to the calls that wait, in order, until one finds no capacity."""
        for _ in range(_GRANTS_PER_TURN):
            if not self._waiting_line:
                return
            *_, request, placed = self._waiting_line[0]
            if not placed.done():  # its caller may have left
                if (lease := self._place_call(request)) is None:
                    return
                self._metrics.stage_wait_seconds.labels("engine").observe(self._clock() - request.asked_s)
                placed.set_result(lease)
            heapq.heappop(self._waiting_line)
        if self._more is None:
            self._more = asyncio.get_running_loop().call_soon(self._admit_more)

    def _admit_more(self) -> None:
        self._more = None
        self.admit_waiting()

    def pause_calls(self, why: str) -> None:
        """Begin no calls for a while, because this process cannot connect; longer each time in a row."""
        self._metrics.local_shortages_total.inc()
        if self._shortage:
            return  # of a call that was sent before
        log.error("no calls for %.0f s: %s", self._pause_s, why)
        self._shortage = why
        asyncio.get_running_loop().call_later(self._pause_s, self._end_pause)
        self._pause_s = min(2 * self._pause_s, _SHORTAGE_PAUSE_MAX_S)

    def _end_pause(self) -> None:
        self._shortage = ""
        self.admit_waiting()

    def share_cached_prefix(self, key: str, other: str) -> None:
        """Make the trajectory `other` prefer the engine of `key`, because it begins with the same tokens."""
        if (prefix := self._cached_prefixes.get(key)) is not None:
            self._cached_prefixes[other] = prefix

    def forget_trajectory(self, key: str) -> None:
        """Forget the sticky engine of a trajectory that has ended."""
        self._cached_prefixes.pop(key, None)

    # -- what leases report -------------------------------------------------------------------------------

    def record_first_token(self, lease: Lease, waited_s: float) -> None:
        """Implements `LeaseListener.record_first_token`."""
        engine_id = lease.engine.engine_id
        self._pause_s = _SHORTAGE_PAUSE_S
        if self._slots.get(engine_id) is lease.slot:
            lease.slot.has_answered = True
            pressure = lease.slot.back_pressure
            pressure.record_accepted_call(self._clock())
            lease.slot.refusals.record_accepted_request(self._clock())
            self._balancer.end_prefill(engine_id, lease.prefill_tokens)
            self._balancer.limit_calls(engine_id, pressure.max_calls)
        kind = (
            "new" if lease.request.cached_prefix is None else "again" if lease.cause is not None else "next"
        )
        self._first_token_seconds[kind].observe(waited_s)
        self.admit_waiting()

    def record_recomputed_tokens(self, tokens: int, cause: Recomputed) -> None:
        """Implements `LeaseListener.record_recomputed_tokens`."""
        self._metrics.prefilled_again_tokens_total.labels(cause).inc(tokens)

    # -- inside -------------------------------------------------------------------------------------------

    def _place_call(self, request: CallRequest) -> Lease | None:
        """Give a call an engine; None when none has capacity."""
        if self._shortage or not self.is_valid:
            return None
        prefix, held = request.cached_prefix, 0
        slot = self._slots.get(prefix.engine_id) if prefix is not None else None
        cause: Recomputed | None = None
        if prefix is not None:
            if (
                slot is None
                or slot.grant.restart_count != prefix.restart_count
                or slot.state is EngineState.QUARANTINED
            ):
                cause = "failover"
            elif slot.grant.num_flushes != prefix.num_flushes:
                cause = "update"
            else:
                held = min(prefix.tokens, request.prompt)
        cached = prefix is not None and cause is None and 2 * held >= request.prompt
        sticky = prefix.engine_id if prefix is not None else None
        chosen = self._balancer.choose_engine(sticky=sticky, cached=cached)
        if chosen is None:
            return None
        if prefix is not None and cause is None and chosen != prefix.engine_id:
            cause, held = "moved", 0
        slot, prefill_tokens = self._slots[chosen], request.prompt - held
        self._balancer.begin_call(chosen, tokens=request.tokens, prefill_tokens=prefill_tokens)
        lease = Lease(
            request,
            slot,
            self,
            self._failures,
            self._judge,
            self._clock,
            number=next(self._numbers),
            prefill_tokens=prefill_tokens,
            cause=cause,
        )
        if slot.num_calls == 1:
            slot.on_busy(True)
        return lease

    def _end_lease(self, lease: Lease) -> None:
        slot, request, engine_id = lease.slot, lease.request, lease.engine.engine_id
        prefilled = lease in slot.streaming
        del (slot.streaming if prefilled else slot.prefilling)[lease]
        if not slot.num_calls:
            slot.on_busy(False)
        if self._slots.get(engine_id) is not slot:
            return  # the engine was removed, with its load
        if not prefilled:
            self._balancer.end_prefill(engine_id, lease.prefill_tokens)
        if prefilled or request.cached_prefix is None:
            self._remember_prefix(lease, request.prompt + lease.received if prefilled else 0)
        self._balancer.end_call(engine_id, request.tokens)
        self.admit_waiting()

    def _remember_prefix(self, lease: Lease, tokens: int) -> None:
        """Remember which engine has cached the trajectory's tokens. The last one sampled was never fed."""
        grant = lease.grant
        prefix = CachedPrefix(grant.engine_id, grant.restart_count, grant.num_flushes, max(0, tokens - 1))
        self._cached_prefixes[lease.request.key] = prefix
        self._cached_prefixes.move_to_end(lease.request.key)
        if len(self._cached_prefixes) > _MAX_CACHED_PREFIXES:
            self._cached_prefixes.popitem(last=False)

    def describe_states(self) -> str:
        """Return why calls may wait: what the engines do."""
        if self._shortage:
            return self._shortage
        if len(self._slots) > _NAMED_STATES:
            counts = Counter(slot.state for slot in self._slots.values())
            return ", ".join(f"{count} {state}" for state, count in counts.items())
        names = (
            f"{engine_id} {slot.state}{' but busy' if slot.pause is not None else ''}"
            for engine_id, slot in self._slots.items()
        )
        return ", ".join(names) or "no engine yet"
