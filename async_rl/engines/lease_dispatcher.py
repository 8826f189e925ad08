"""Gives calls to engines: which engine serves a call, and in which order calls wait for one.

```
 Transcript ──lease(key, tokens)──► LeaseDispatcher ──► Lease ──generate(request)──► tokens, a finish

 lease(trajectory) ─► an engine below its load bound? ──yes──► Lease
                        └ no ─► waiting line, smallest key first ─► admitted when an engine has capacity
```

A session never learns how engines are updated, repaired or lent, only that a lease has ended early.

Calls are given only to engines that serve a verified weight version; `Balancer` chooses between them. Each
trajectory has a sticky engine, the one of its last call, because its prefix is cached there. One without
follows the last call of its group, whose prompt is cached there.
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

from async_rl.engines.cache_limit import CacheLimit, CallSizes
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

MAX_PREFILL_TOKENS: int | None = 32768
"""Tokens waiting for a first token that make an engine full: it prefills them in about a second. Calls that
wait go to the first engine that is ready. None: all are sent at once."""

SLACK: Final = 0.25
"""How far above the mean load a sticky engine is kept: a quarter costs little batch efficiency and, at 64
calls an engine, is about two standard deviations of random arrivals."""

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


class _EngineEntry:
    """The load of one engine."""

    __slots__ = (
        "cache",
        "load_tokens",
        "max_calls",
        "name",
        "num_calls",
        "num_sharers",
        "order",
        "prefill_tokens",
        "serves",
    )

    def __init__(self, name: str, order: int) -> None:
        self.name = name
        self.order = order
        self.serves = False
        self.load_tokens = 0
        self.prefill_tokens = 0
        self.num_calls = 0
        self.num_sharers = 1
        self.max_calls = math.inf
        self.cache = CacheLimit(CallSizes())

    @property
    def counts(self) -> bool:
        """Whether its load counts in the mean."""
        return self.serves and self.max_calls == math.inf


class Balancer:
    """Loads of engines, and the choice between them in O(log engines). It has no clock and does no I/O.

    ```
    a trajectory with a cached prefix ─► its sticky engine, unless overloaded ──┐
    one whose group has one ───────────► that engine, if it has capacity, too ──┤
    any other ─────────────────────────► the least loaded engine with capacity ─┴─► none? then wait
    ```

    Load is counted in tokens: the most that the calls of an engine can hold there. Five rules, the first
    three against overload cascades seen in systems without them (verl#6533, #7435, #7613):

    - **Bounded loads.** No engine is given a call while its load is above `1 + SLACK` times the mean of the
      serving engines. A sticky engine is kept below that bound even when another is less loaded: an engine
      that restarts empty attracts new trajectories, but not those whose prefix is cached elsewhere.
    - **Paced prefills.** An engine is full while `MAX_PREFILL_TOKENS` or more wait there for the first token
      of their calls. After a restart, a failure or an update all calls have to prefill everything: calls for
      which an engine has no capacity go to the next one, or wait, where they can still be ordered.
    - **A cached prefix keeps its sticky engine** even when that is full: elsewhere the call would need a
      prefill.
    - **Limited calls.** An engine that has refused calls gets a limit of calls (`back_pressure`), which also
      holds for a cached prefix. It takes less than its share, so the mean and the bound leave it out.

    - **Calls that fit.** An engine is full when its KV cache holds no more calls (`cache_limit`), except for
      those whose prefix it has: most of what they need is there.

    So after each choice `load <= (1 + SLACK) * mean before + tokens of the call`. A call that finds no engine
    within the bound waits for the engines below the mean, whose prefills end or fail: the wait ends. It does
    not wait for those that hold no more calls, because their caches are smaller.

    Source of bounded loads: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads",
    arXiv:1608.01350, section 1.

    Example:
        >>> balancer = Balancer()
        >>> for name in ("a", "b"):
        ...     balancer.add_engine(name)
        ...     balancer.open_engine(name)
        >>> balancer.begin_call("a", tokens=100, prefill_tokens=100)
        >>> balancer.choose_engine(), balancer.choose_engine(sticky="a")
        ('b', 'b')
    """

    def __init__(self, *, max_prefill_tokens: int | None = None) -> None:
        """Start without engines.

        Args:
            max_prefill_tokens: Tokens waiting for a first token that make an engine full; None for no limit.
        """
        self._max_prefill_tokens = max_prefill_tokens
        self._entries: dict[str, _EngineEntry] = {}
        self._num_added = 0
        self._num_counted = 0
        self._counted_tokens = 0
        # Serving engines with capacity, by load; outdated entries are skipped.
        self._heap: list[tuple[int, int, _EngineEntry]] = []

    # -- engines ------------------------------------------------------------------------------------------

    def add_engine(self, name: str) -> None:
        """Add an engine; it is not chosen before `open_engine`."""
        self._entries[name] = _EngineEntry(name, self._num_added)
        self._num_added += 1

    def remove_engine(self, name: str) -> None:
        """Forget an engine and its load."""
        self.close_engine(name)
        del self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def open_engine(self, name: str) -> None:
        """Let an engine be chosen, because it serves."""
        self._set(self._entries[name], serves=True)

    def close_engine(self, name: str) -> None:
        """Do not choose an engine any more; its calls count until they end."""
        self._set(self._entries[name], serves=False)

    def limit_calls(self, name: str, max_calls: float) -> None:
        """Give an engine no calls while it has `max_calls` of them."""
        if self._entries[name].max_calls != max_calls:
            self._set(self._entries[name], max_calls=max_calls)

    def fit_calls(self, name: str, cache: CacheLimit) -> None:
        """Give an engine no more calls than a limit says, which changes with its calls."""
        self._entries[name].cache = cache

    def share_prefills(self, name: str, num_sharers: int) -> None:
        """Let so many processes share the tokens that wait on an engine for their first token."""
        entry = self._entries[name]
        entry.num_sharers = num_sharers
        self._offer(entry)

    # -- calls --------------------------------------------------------------------------------------------

    def choose_engine(
        self,
        *,
        prompt: int = 0,
        sticky: str | None = None,
        cached: bool = True,
        siblings: str | None = None,
    ) -> str | None:
        """Return the engine for the next call; None when the call should wait.

        Args:
            prompt: Tokens of the call's prompt.
            sticky: The engine that had the trajectory's last call.
            cached: Whether most of the call's prompt is still in that engine's prefix cache.
            siblings: The engine that has cached the prompt of the trajectory's group; it is chosen unless its
                load is above the mean.
        """
        bound = self._load_bound()
        entry = self._entries.get(sticky) if sticky is not None and cached else None
        if (
            entry is None
            or not entry.serves
            or entry.num_calls >= entry.max_calls
            or entry.load_tokens > bound
        ):
            entry = self._entries.get(siblings) if siblings is not None else None
            if (
                entry is None
                or not entry.serves
                or not self._has_capacity(entry)
                or (1.0 + SLACK) * entry.load_tokens > bound  # else it may be full, and another has a slot
            ):
                entry = self._least_loaded()
            if entry is None or entry.cache.is_full(entry.num_calls, prompt):
                return None
        if entry.load_tokens <= bound or not entry.counts or not self._has_fitting_engine(bound):
            return entry.name
        return None

    def begin_call(self, name: str, *, tokens: int, prefill_tokens: int) -> None:
        """Count a call that can hold `tokens` and needs `prefill_tokens` before its first token."""
        entry = self._entries[name]
        entry.prefill_tokens += prefill_tokens
        entry.num_calls += 1
        self._change(entry, tokens)

    def end_prefill(self, name: str, prefill_tokens: int) -> None:
        """Count a call's prefill as done: its first token came, or it ended without one."""
        entry = self._entries[name]
        was_eligible = self._has_capacity(entry)
        entry.prefill_tokens -= prefill_tokens
        if not was_eligible:
            self._offer(entry)

    def end_call(self, name: str, tokens: int) -> None:
        """Stop counting a call."""
        entry = self._entries[name]
        entry.num_calls -= 1
        self._change(entry, -tokens)

    # -- queries ------------------------------------------------------------------------------------------

    def load_of(self, name: str) -> int:
        """Return the tokens that the calls of an engine can hold at most."""
        return self._entries[name].load_tokens

    def prefill_tokens_of(self, name: str) -> int:
        """Return the tokens that wait on an engine for their call's first token."""
        return self._entries[name].prefill_tokens

    # -- inside -------------------------------------------------------------------------------------------

    def _load_bound(self) -> float:
        return (1.0 + SLACK) * self._counted_tokens / max(1, self._num_counted)

    def _has_fitting_engine(self, bound: float) -> bool:
        """Whether an engine within the bound holds more calls: it is given them once it has prefilled."""
        return any(
            entry.counts and entry.load_tokens <= bound and not entry.cache.is_full(entry.num_calls)
            for entry in self._entries.values()
        )

    def _has_capacity(self, entry: _EngineEntry) -> bool:
        if entry.num_calls >= entry.max_calls or entry.cache.is_full(entry.num_calls):
            return False
        limit = self._max_prefill_tokens
        return limit is None or entry.prefill_tokens * entry.num_sharers < limit

    def _set(
        self, entry: _EngineEntry, *, serves: bool | None = None, max_calls: float | None = None
    ) -> None:
        """Let an engine serve or not, or limit its calls; the mean follows."""
        counted = entry.counts
        entry.serves = entry.serves if serves is None else serves
        entry.max_calls = entry.max_calls if max_calls is None else max_calls
        if counted != entry.counts:
            sign = 1 if entry.counts else -1
            self._num_counted += sign
            self._counted_tokens += sign * entry.load_tokens
        self._offer(entry)

    def _change(self, entry: _EngineEntry, tokens: int) -> None:
        entry.load_tokens += tokens
        if entry.counts:
            self._counted_tokens += tokens
        self._offer(entry)

    def _offer(self, entry: _EngineEntry) -> None:
        """Make an engine eligible at its present load."""
        if not entry.serves or not self._has_capacity(entry):
            return
        heapq.heappush(self._heap, (entry.load_tokens, entry.order, entry))
        if len(self._heap) > 8 * len(self._entries) + 64:
            self._heap = [
                (e.load_tokens, e.order, e)
                for e in self._entries.values()
                if e.serves and self._has_capacity(e)
            ]
            heapq.heapify(self._heap)

    def _least_loaded(self) -> _EngineEntry | None:
        while self._heap:
            load, _, entry = self._heap[0]
            known = self._entries.get(entry.name) is entry
            if known and entry.serves and entry.load_tokens == load and self._has_capacity(entry):
                return entry
            heapq.heappop(self._heap)
        return None


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
        self._group_prompts: dict[str, CachedPrefix] = {}
        """Which engine a call of each group was given last; `tokens` are those of the prompt."""
        self._numbers = count(1)
        """Of leases, when they are asked for and when they are placed."""
        self._waiting_line: list[tuple[str, int, CallRequest, asyncio.Future[Lease]]] = []
        self._more: asyncio.Handle | None = None
        """Continues with `admit_waiting` in the next turn of the event loop."""
        self._shortage = ""
        """Why no calls begin for now; empty: they do."""
        self._pause_s = _SHORTAGE_PAUSE_S

    @asynccontextmanager
    async def lease(self, key: str, tokens: int, *, prompt: int = 0, group: str = "") -> AsyncIterator[Lease]:
        """Wait for an engine and reserve capacity on it.

        Args:
            key: Trajectory id. Calls of one trajectory prefer one engine. The smallest key is admitted first:
                ids that grow with time let the oldest trajectory in first.
            tokens: Tokens that the call holds on the engine at most, prompt and answer.
            prompt: Of these, tokens of the prompt.
            group: The trajectory's group; calls that have to prefill prefer the engine that has its prompt.
        """
        request = CallRequest(
            key=key,
            tokens=tokens,
            prompt=prompt,
            cached_prefix=self._cached_prefixes.get(key),
            group=group,
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

    def forget_trajectory(self, key: str, group: str = "") -> None:
        """Forget the sticky engine of a trajectory that has ended, and that of its group's prompt.

        The next call of the group remembers an engine again. So nothing is kept of a group that has ended.
        """
        self._cached_prefixes.pop(key, None)
        self._group_prompts.pop(group, None)

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
        shared = self._cached_prompt(request.group)
        siblings = shared.engine_id if shared is not None else None
        chosen = self._balancer.choose_engine(
            prompt=request.prompt, sticky=sticky, cached=cached, siblings=siblings
        )
        if chosen is None:
            return None
        if prefix is not None and cause is None and chosen != prefix.engine_id:
            cause, held = "moved", 0
        own_prompt = request.prompt
        if shared is not None and chosen == siblings:
            siblings_hold = max(0, min(shared.tokens, request.prompt - 1))
            held, own_prompt = max(held, siblings_hold), request.prompt - siblings_hold
        slot, prefill_tokens = self._slots[chosen], request.prompt - held
        slot.cache.expect_call(request.prompt, request.tokens - request.prompt)
        slot.cache.held_tokens += own_prompt
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
            own_prompt=own_prompt,
            cause=cause,
        )
        if request.group:
            self._remember_prompt(request, slot)
        if slot.num_calls == 1:
            slot.on_busy(True)
        return lease

    def _cached_prompt(self, group: str) -> CachedPrefix | None:
        """Return the prompt of a group if an engine has it cached; its last call may still be prefilled."""
        prompt = self._group_prompts.get(group)
        slot = self._slots.get(prompt.engine_id) if prompt is not None else None
        if prompt is None or slot is None:
            return None
        now = slot.grant.restart_count, slot.grant.num_flushes
        return prompt if now == (prompt.restart_count, prompt.num_flushes) else None

    def _remember_prompt(self, request: CallRequest, slot: EngineSlot) -> None:
        """Remember the engine of a group's last call. The shortest prompt of them is that of a first turn."""
        before, grant = self._group_prompts.get(request.group), slot.grant
        tokens = request.prompt if before is None else min(before.tokens, request.prompt)
        self._group_prompts[request.group] = CachedPrefix(
            grant.engine_id, grant.restart_count, grant.num_flushes, tokens
        )

    def _end_lease(self, lease: Lease) -> None:
        slot, request, engine_id = lease.slot, lease.request, lease.engine.engine_id
        prefilled = lease in slot.streaming
        slot.cache.record_end(lease.own_prompt, lease.received, slot.num_calls)
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
        names = (f"{engine_id} {slot.state}{_what_holds(slot)}" for engine_id, slot in self._slots.items())
        return ", ".join(names) or "no engine yet"


def _what_holds(slot: EngineSlot) -> str:
    """Return why a serving engine may be given no calls; nothing if it may."""
    if slot.pause is not None:
        return " but busy"
    return " but full" if slot.is_open and slot.cache.is_full(slot.num_calls) else ""
