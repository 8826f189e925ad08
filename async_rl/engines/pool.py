"""The engines of a run: their states, the transitions between states, and who may call them.

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

A serving engine is granted to the driver's own `GrantedEngines`, and to the rollout workers that have a share
of it (`EngineShares`). Quarantine drops all calls of an engine at once: each ends with the engine's error,
whatever it waits for, and its session continues with its tokens on another engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Final

import msgspec

from async_rl.config import MaxCalls
from async_rl.engine_protocol import Engine, InterruptMode
from async_rl.engines.bounded_request import BoundedRequest
from async_rl.engines.cache_limit import LIMIT_REASONS, LimitReason
from async_rl.engines.grant_holders import EngineShares, GrantHolder, Revocation, wait_for_confirmations
from async_rl.engines.granted_engines import GrantedEngines
from async_rl.engines.lease import EngineGrant, EngineJudge, EngineLoad, EngineState
from async_rl.errors import CallLost, EngineError, InvariantError, VersionMismatch
from async_rl.observability.metrics import Metrics
from async_rl.runtime.stopwatch import Stopwatch
from async_rl.runtime.waits import progressed, waiting

__all__ = ["EngineLoad", "EnginePool", "EngineState"]

log = logging.getLogger(__name__)

_STRIKE_MEMORY_S: Final = 600.0
"""Strikes further apart are no pattern: over days, any engine loses a connection now and then."""

_QUEUED_SHARE: Final = 8
"""An engine is given an eighth more calls than it runs, so that it begins another one as soon as one ends."""

_LEVEL_S: Final = 1.0
"""Between two looks at whether some engines have few calls while others have many."""

_MAY_SERVE: Final = (EngineState.JOINING, EngineState.UPDATING, EngineState.SERVING)
"""States of engines that serve rollouts now or soon."""

_SHARED: Final = (EngineState.SERVING, EngineState.UPDATING)
"""States in which rollout workers keep their shares of an engine: a weight update moves none."""


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's state and what it serves; equal at two moments if nothing happened to it in between."""

    state: EngineState
    weight_version: int
    restart_count: int
    """Number of restarts; each empties the prefix cache."""
    epoch: int
    """How often it has begun to serve: each interruption ends an epoch."""


class EngineRecord:
    """The pool's record of one engine."""

    def __init__(self, engine: Engine, clock: Callable[[], float], *, newcomer: bool) -> None:
        self.engine = engine
        self.state = EngineState.JOINING
        self.weight_version = -1
        self.error: Exception | None = None
        self.strikes: deque[float] = deque()
        self.newcomer = newcomer
        """Whether it joins a running job and has not yet loaded its weights."""
        self.reserved = False
        """Whether it serves evaluations only."""
        self.restart_count = 0
        self.epoch = 0
        self.num_flushes = 0
        self.bounded_requests: set[BoundedRequest] = set()
        """Requests that are not calls: they expire when the engine is quarantined."""
        self.users: dict[GrantHolder, None] = {}
        """The rollout workers that may call it, or still have calls of it."""
        self.idle = Stopwatch(clock)
        """Runs while it has no call."""
        self.idle.set_running(True)
        self.progress_s = clock()
        """When it was known to be alive, apart from its calls."""

    @property
    def snapshot(self) -> EngineSnapshot:
        """Its state and what it serves."""
        return EngineSnapshot(
            state=self.state,
            weight_version=self.weight_version,
            restart_count=self.restart_count,
            epoch=self.epoch,
        )

    def grant(self, max_calls: MaxCalls, *, num_holders: int, has_others: bool) -> EngineGrant:
        """Return the right to call it in its present epoch, of which it takes `max_calls` at once."""
        capacity, adapts = self.engine.capacity, max_calls == "adaptive"
        running = capacity.max_running
        if max_calls == "adaptive":
            max_calls = None if running is None else running + running // _QUEUED_SHARE
        return EngineGrant(
            engine_id=self.engine.engine_id,
            weight_version=self.weight_version,
            restart_count=self.restart_count,
            epoch=self.epoch,
            num_flushes=self.num_flushes,
            num_holders=num_holders,
            has_others=has_others,
            max_calls=max_calls,
            cache_tokens=capacity.cache_tokens if adapts else None,
        )

    @property
    def has_version(self) -> bool:
        """Whether it has served since it was started; one that joins may take part in an update before."""
        return self.weight_version >= 0

    @property
    def needs_repair(self) -> bool:
        """Whether only `repair` can make it serve (again)."""
        return self.state is EngineState.QUARANTINED or (self.newcomer and self.state is EngineState.JOINING)

    @property
    def lent(self) -> bool:
        """Whether it is lent to an evaluation and serves rollouts again afterwards."""
        return self.state is EngineState.EVALUATING and not self.reserved


class EnginePool(EngineJudge):
    """All engines of a run, or of a model in `models`."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Callable[[], float],
        max_strikes: int = 3,
        *,
        max_calls: MaxCalls = None,
        shares_all: bool = False,
    ) -> None:
        """Start without engines.

        Args:
            metrics: Where states, versions and loads are shown.
            clock: Monotonic seconds.
            max_strikes: Implausible answers or lost calls after which an engine is quarantined.
            max_calls: Calls that an engine is given at once: `engine.max_calls`.
            shares_all: Whether all rollout workers may call all engines: those of teachers and judges.
        """
        self._metrics = metrics
        self._clock = clock
        self._max_strikes = max_strikes
        self._max_calls = max_calls
        self._records: dict[str, EngineRecord] = {}
        self.own = GrantedEngines(self, metrics, clock)
        """What the driver's own sessions call."""
        self.dispatcher = self.own.dispatcher
        self.holders: dict[GrantHolder, None] = {}
        """The rollout workers that may call engines; `add_holder` adds one."""
        self.borrowers: dict[EnginePool, None] = {}
        """The pools of evaluations that engines are lent to."""
        self._shares = EngineShares(everywhere=shares_all)
        self._sharing: asyncio.Handle | None = None
        """Shares the engines anew in this turn of the event loop."""
        self._leveling: asyncio.TimerHandle | None = None
        self._need_repair: dict[str, None] = {}
        """Engines that need repair: finding them among thousands at every change would cost seconds."""
        self._changed = asyncio.Event()
        self._counted_from_s = clock()
        self._oldest_version: int | None = None
        """Cached until the next change of a state or version."""

    # -- transitions --------------------------------------------------------------------------------------

    def announce_version(self, weight_version: int) -> None:
        """Expect that calls sample under a version from now on: engines are about to load it."""
        self.own.announce_version(weight_version)

    def add_engine(self, engine: Engine, *, newcomer: bool = False) -> None:
        """Add an engine; it gets no calls before `serve_engine`.

        Args:
            engine: The engine.
            newcomer: Whether it joins a running job, so that `repair` must load the current weights into it.
        """
        record = EngineRecord(engine, self._clock, newcomer=newcomer)
        self._records[engine.engine_id] = record
        self.own.expect(engine.engine_id)
        # Evaluated at the scrape: a gauge that follows each call would cost as much as placing the call.
        running = self._metrics.engine_running_requests.labels(engine.engine_id)
        running.set_function(lambda: self.load_of(engine.engine_id).calls)
        for reason in LIMIT_REASONS:
            limit = self._metrics.engine_call_limit.labels(engine.engine_id, reason)
            limit.set_function(partial(self._limit_by, engine.engine_id, reason))
        self._enter_state(record, EngineState.JOINING)

    def serve_engine(self, engine_id: str, weight_version: int, *, keeps_cache: bool = False) -> bool:
        """Let an engine serve a version that was verified on it.

        Args:
            engine_id: The engine.
            weight_version: The version it serves.
            keeps_cache: Whether earlier prefixes are still in its cache (`in_place`).

        Returns:
            False when it failed meanwhile, or is draining.
        """
        record = self._records.get(engine_id)
        if record is None or record.state in (EngineState.QUARANTINED, EngineState.DRAINING):
            return False
        record.epoch += 1
        record.num_flushes += not keeps_cache
        record.weight_version, record.error, record.newcomer = weight_version, None, False
        record.progress_s = self._clock()
        self.announce_version(weight_version)
        self._enter_state(record, EngineState.EVALUATING if record.reserved else EngineState.SERVING)
        progressed()
        return True

    def reserve_engine(self, engine_id: str) -> None:
        """Reserve an engine that does not serve yet for evaluations."""
        self._records[engine_id].reserved = True

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

    def include_engine(self, engine_id: str) -> bool:
        """Let a joining engine take part in a weight update; False when it does not join any longer."""
        return self._leave_state(engine_id, EngineState.JOINING, EngineState.UPDATING)

    def rejoin_engine(self, engine_id: str) -> None:
        """Let a quarantined engine that was restarted load the current weights."""
        record = self._records[engine_id]
        record.restart_count += 1
        record.weight_version = -1
        record.strikes.clear()
        self._enter_state(record, EngineState.JOINING)

    def quarantine_engine(self, engine_id: str, error: Exception, *, wrong_weights: bool = False) -> None:
        """Give an engine no more calls until it has rejoined, and drop the calls it has.

        Args:
            engine_id: The engine.
            error: Why.
            wrong_weights: Whether an answer has shown that it samples by other weights than those published
                to it: the tokens of its calls are discarded.
        """
        record = self._records.get(engine_id)
        if record is None or record.state is EngineState.QUARANTINED:
            return
        log.warning("engine %s is quarantined at version %d: %s", engine_id, record.weight_version, error)
        record.error = error
        self._metrics.engine_quarantined_total.labels(engine_id).inc()
        self._enter_state(record, EngineState.QUARANTINED)
        kind = VersionMismatch if wrong_weights else CallLost
        self._drop_requests(record, kind, f"engine {engine_id} is quarantined: {error}")

    def _drop_requests(self, record: EngineRecord, kind: type[EngineError], why: str) -> None:
        """End the calls of an engine with errors of a kind, and the other requests that wait for it."""
        self.own.drop_calls(record.engine.engine_id, kind, why)
        for user in record.users:
            user.drop_calls(record.engine.engine_id, kind, why)
        for request in record.bounded_requests:
            request.expire()

    def record_failed_repair(self, engine_id: str, error: Exception) -> None:
        """Record why a quarantined engine could not be repaired."""
        if (record := self._records.get(engine_id)) is not None:
            self.quarantine_engine(engine_id, error)
            record.error = error

    def record_strike(self, engine_id: str, error: EngineError) -> None:
        """Implements `EngineFailureListener.record_strike`.

        After `max_strikes` of them the engine is quarantined.
        """
        record = self._records.get(engine_id)
        if record is None:
            return
        now = self._clock()
        while record.strikes and now - record.strikes[0] > _STRIKE_MEMORY_S:
            record.strikes.popleft()
        record.strikes.append(now)
        log.warning(
            "engine %s, strike %d of %d: %s", engine_id, len(record.strikes), self._max_strikes, error
        )
        if len(record.strikes) >= self._max_strikes:
            self.quarantine_engine(engine_id, error, wrong_weights=isinstance(error, VersionMismatch))

    def doubts_refusals(self, engine_id: str) -> bool:
        """Implements `EngineJudge.doubts_refusals`.

        So it is if it refuses all, or serves alone while others are updated, unless those refuse all too.
        """
        slots = self.own.slots
        if not slots[engine_id].refusals.are_suspicious and not self.own.serving.keys() <= {engine_id}:
            return False
        return any(
            name != engine_id
            and other.state in _MAY_SERVE
            and not other.reserved
            and not (name in slots and slots[name].refusals.are_suspicious)
            for name, other in self._records.items()
        )

    def record_doubted_refusals(self, engine_id: str, since_s: float, error: EngineError) -> None:
        """Implements `EngineJudge.record_doubted_refusals`: a strike once others have accepted requests."""
        others = (self.load_of(other) for other in self._records if other != engine_id)
        if engine_id in self._records and any(other.accepted_s > since_s for other in others):
            self.record_strike(engine_id, error)

    def record_payload(self, engine_id: str) -> None:
        """Implements `EngineJudge.record_payload`: requests that wait for payloads have longer."""
        if (record := self._records.get(engine_id)) is not None:
            for request in record.bounded_requests:
                request.extend()

    async def drain_engine(self, engine_id: str) -> None:
        """Give an engine no more calls because it will leave; returns when its calls have ended."""
        self._enter_state(self._records[engine_id], EngineState.DRAINING)
        with waiting("drain", engine_id):
            while (record := self._records.get(engine_id)) and (
                record.users or self.load_of(engine_id).calls
            ):
                await self.wait_for_change()

    def remove_engine(self, engine_id: str) -> None:
        """Remove an engine. The calls it still has are dropped; their sessions go on with other engines."""
        record = self._records.pop(engine_id)
        self._need_repair.pop(engine_id, None)
        self._oldest_version = None
        self.own.remove(engine_id)
        self._drop_requests(record, CallLost, f"engine {engine_id} has left")
        for gauge in (
            self._metrics.engine_up,
            self._metrics.engine_weight_version,
            self._metrics.engine_running_requests,
        ):
            gauge.remove(engine_id)
        for reason in LIMIT_REASONS:
            self._metrics.engine_call_limit.remove(engine_id, reason)
        self.share_anew()
        self.notify()

    @asynccontextmanager
    async def bounded_request(self, engine_id: str, limit_s: float) -> AsyncIterator[BoundedRequest]:
        """Bound a request to an engine that is not a call: by a time limit, and by the engine's quarantine.

        The block is a wait for an update of the engine. The limit begins again whenever a piece of a routing
        payload arrives, for which the request may wait, when a worker ends that may have received one, and
        when workers have confirmed that they send the engine nothing more: a silent worker is waited for as
        long as its grants are valid.

        Raises:
            TimeoutError: When either comes first.
            EngineError: When the engine has left.
        """
        record = self._records.get(engine_id)
        if record is None:
            raise EngineError(f"engine {engine_id} has left")
        async with (
            asyncio.timeout(None) as limit,
            waiting("engine update", engine_id, scope=limit) as wait,
        ):
            request = BoundedRequest(lambda: self.load_of(engine_id).unobserved, limit, limit_s, wait)
            record.bounded_requests.add(request)
            try:
                yield request
            finally:
                request.close()
                record.bounded_requests.discard(request)

    async def interrupt_engine(self, engine: Engine, mode: InterruptMode) -> None:
        """End an epoch of an engine that gets no more calls; afterwards no call runs under its weights.

        ```
         hold, lend, drain, quarantine ──► revoke ──► interrupt ──► the engine's confirmation
         no new calls                      no more    running calls end (abort), or pause (retract, in_place)
                                           requests   end_engine: its process ends
        ```

        Every change of an engine goes through here or, if it failed, through `end_engine`: updates, device
        phases, loans, joins, departures, repairs. The next epoch begins with `serve_engine`.

        Raises:
            InvariantError: The engine still serves.
            EngineError: It does not end its calls.
        """
        await self._revoke_grants(engine.engine_id, aborts=mode == "abort")
        await engine.interrupt(mode)

    async def end_engine(self, engine_id: str, end: Callable[[str], Awaitable[None]]) -> None:
        """End an epoch of an engine that failed, and would confirm nothing: `end` ends its process.

        Raises:
            InvariantError: The engine still serves.
        """
        await self._revoke_grants(engine_id, aborts=True)
        if engine_id in self._records:  # it has not left meanwhile
            await end(engine_id)

    def _begin_revocations(self, engine_id: str, *, aborts: bool) -> list[Revocation]:
        record = self._records.get(engine_id)
        users = list(record.users) if record is not None else []
        revocations = [each for user in users for each in user.begin_revocation(engine_id, aborts=aborts)]
        for borrower in self.borrowers:  # its evaluation has ended, or ends now
            lent = borrower._records.get(engine_id)
            if lent is not None and lent.state is EngineState.SERVING:
                error = EngineError(f"engine {engine_id} is not lent any longer")
                borrower.quarantine_engine(engine_id, error)
            revocations += borrower._begin_revocations(engine_id, aborts=aborts)
        return revocations

    async def _revoke_grants(self, engine_id: str, *, aborts: bool) -> None:
        """Wait until no rollout worker sends requests to an engine under the grants it has now."""
        record = self._records.get(engine_id)
        if record is not None and record.state is EngineState.SERVING:
            raise InvariantError(f"engine {engine_id} is interrupted, and it still gets calls: hold it first")
        revocations = self._begin_revocations(engine_id, aborts=aborts)
        with ExitStack() as suspended:
            for request in record.bounded_requests if record is not None else ():
                suspended.enter_context(request.suspended())
            await wait_for_confirmations(revocations, engine_id)

    # -- rollout workers ----------------------------------------------------------------------------------

    def add_holder(self, holder: GrantHolder) -> None:
        """Let a rollout worker have a share of the engines."""
        self.holders[holder] = None
        self.share_anew()
        if self._leveling is None:
            self._leveling = asyncio.get_running_loop().call_later(_LEVEL_S, self._level_shares)

    def remove_holder(self, holder: GrantHolder) -> None:
        """Share the engines among the others: the worker can no longer call any."""
        self.holders.pop(holder, None)
        for record in self._records.values():
            if holder in record.users:
                del record.users[holder]
                self.note_use(record.engine.engine_id)
        self.share_anew()
        self.notify()

    def share_of(self, holder: GrantHolder) -> float:
        """Return how many engines a rollout worker has, those that it shares in part."""
        return self._shares.weights.get(holder, 0.0)

    def share_anew(self) -> None:
        """Share the engines in this turn: engines or workers have come or gone, or workers are back."""
        if self._sharing is None and self.holders:
            self._sharing = asyncio.get_running_loop().call_soon(self.share_engines)

    def share_engines(self) -> None:
        """Share the engines among the workers that can call them now."""
        self._sharing = None
        shared = [engine_id for engine_id, record in self._records.items() if record.state in _SHARED]
        self._shares.update(shared, [holder for holder in self.holders if holder.may_call])
        self._apply_shares()

    def _level_shares(self) -> None:
        """Lend engines with few calls to workers whose engines have many, once a second."""
        self._leveling = None
        if not self.holders:
            return
        self._leveling = asyncio.get_running_loop().call_later(_LEVEL_S, self._level_shares)
        serving = self.engines(EngineState.SERVING)
        if self._shares.level({each.engine_id: self.load_of(each.engine_id).calls for each in serving}):
            self._apply_shares()

    def _apply_shares(self) -> None:
        """Grant what workers share, and take back what they do not."""
        mine: dict[GrantHolder, set[str]] = {holder: set() for holder in self.holders}
        for engine_id, holders in self._shares.holders_of.items():
            for holder in holders:
                mine[holder].add(engine_id)
            if self._records[engine_id].state is EngineState.SERVING:
                self._grant_engine(engine_id)
        for holder, engines in mine.items():
            for engine_id in list(holder.grants()):
                if engine_id in self._records and engine_id not in engines:
                    holder.begin_revocation(engine_id, aborts=False)  # its calls go on: the epoch does

    def _grant_engine(self, engine_id: str) -> None:
        """Let the workers that share a serving engine call it."""
        record, holders = self._records[engine_id], self._shares.holders_of.get(engine_id, ())
        grant = record.grant(
            self._max_calls, num_holders=max(1, len(holders)), has_others=len(self._records) > 1
        )
        for holder in holders:
            if holder in self.holders and holder.may_call and holder.grants().get(engine_id) != grant:
                record.users[holder] = None
                holder.grant(record.engine, grant)

    def note_use(self, engine_id: str) -> None:
        """Note that an engine has other calls than before, or fewer users."""
        if (record := self._records.get(engine_id)) is None:
            return
        for user in [user for user in record.users if user.load_of(engine_id) is None]:
            del record.users[user]
        record.idle.set_running(not self.load_of(engine_id).calls)
        if record.state is EngineState.DRAINING:
            self.notify()

    # -- queries ------------------------------------------------------------------------------------------

    def engines(self, *states: EngineState) -> Sequence[Engine]:
        """Return the engines in any of the states; all engines without an argument."""
        return [record.engine for record in self._records.values() if not states or record.state in states]

    def engine(self, engine_id: str) -> Engine:
        """Return an engine of the pool."""
        return self._records[engine_id].engine

    def load_of(self, engine_id: str) -> EngineLoad:
        """Return what all calls of an engine say about its load."""
        record = self._records.get(engine_id)
        users = record.users if record is not None else ()
        loads = [self.own.load_of(engine_id), *(user.load_of(engine_id) for user in users)]
        known = [load for load in loads if load is not None]
        callers = known[1:] or known  # the driver itself makes few calls where there are workers
        return EngineLoad(
            calls=sum(load.calls for load in known),
            tokens=sum(load.tokens for load in known),
            progress_s=max([load.progress_s for load in known], default=record.progress_s if record else 0.0),
            prefill_tokens=sum(load.prefill_tokens for load in known),
            accepted_s=max((load.accepted_s for load in known), default=-math.inf),
            unobserved=any(load.unobserved for load in known),
            max_calls=sum(load.max_calls for load in callers),
            limited_by=callers[0].limited_by if callers else "setting",
        )

    def _limit_by(self, engine_id: str, reason: LimitReason) -> float:
        """Return the most calls that an engine is given at once if that is the reason, else 0."""
        load = self.load_of(engine_id)
        return load.max_calls if load.limited_by == reason else 0.0

    def has_sent(self, engine_id: str, since_s: float, *, besides: GrantHolder) -> bool:
        """Return whether an engine has sent something since a time to others than one worker."""
        loads = [self.own.load_of(engine_id)]
        loads += [user.load_of(engine_id) for user in self._records[engine_id].users if user is not besides]
        return any(load is not None and load.heard_s > since_s for load in loads)

    def loads(self, engine_ids: Iterable[str]) -> dict[str, EngineLoad]:
        """Return the loads of several engines, by id."""
        return {engine_id: self.load_of(engine_id) for engine_id in engine_ids}

    @property
    def imbalance(self) -> float:
        """Highest load of a serving engine over the mean; 1 when all are idle."""
        loads = [self.load_of(engine.engine_id).tokens for engine in self.engines(EngineState.SERVING)]
        return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0

    @property
    def idle_share(self) -> float:
        """Share of the engines' time without any call, since the pool was created or the clock restarted."""
        elapsed = (self._clock() - self._counted_from_s) * max(1, len(self._records))
        return sum(record.idle.seconds for record in self._records.values()) / elapsed if elapsed else 0.0

    def restart_idle_clock(self) -> None:
        """Count idle time from now on: the time that engines take to start is not idle time."""
        self._counted_from_s = self._clock()
        for record in self._records.values():
            record.idle.restart()

    def has_engine(self, state: EngineState) -> bool:
        """Return whether an engine is in this state."""
        return any(record.state is state for record in self._records.values())

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._records

    def snapshot_of(self, engine_id: str) -> EngineSnapshot | None:
        """Return the state of an engine and what it serves; None when it is not in the pool."""
        record = self._records.get(engine_id)
        return record.snapshot if record is not None else None

    def version_of(self, engine_id: str) -> int:
        """Return the verified version of an engine, -1 before the first."""
        return self._records[engine_id].weight_version

    def error_of(self, engine_id: str) -> Exception | None:
        """Return the error for which an engine is quarantined."""
        return self._records[engine_id].error

    @property
    def oldest_version(self) -> int:
        """A lower bound of the version that a call made from now on samples under."""
        if self._oldest_version is None:
            sampling = (EngineState.SERVING, EngineState.UPDATING)
            slots = self._records.values()
            versions = [each.weight_version for each in slots if each.state in sampling and each.has_version]
            if not versions:  # a lent engine is not older when it is taken back
                versions = [record.weight_version for record in slots if record.lent]
            self._oldest_version = min(versions, default=0)
        return self._oldest_version

    def is_reserved(self, engine_id: str) -> bool:
        """Return whether an engine serves evaluations only."""
        return self._records[engine_id].reserved

    @property
    def most_serve(self) -> bool:
        """Whether at least half of the engines that are for rollouts serve, or will after an update."""
        for_rollouts = [record.state for record in self._records.values() if not record.reserved]
        active = sum(state in (EngineState.SERVING, EngineState.UPDATING) for state in for_rollouts)
        return 2 * active >= len(for_rollouts)

    @property
    def has_active_engine(self) -> bool:
        """Whether some engine serves, or will once its weight update or evaluation ends."""
        active = (EngineState.SERVING, EngineState.UPDATING)
        records = self._records.values()
        return any((each.state in active and each.has_version) or each.lent for each in records)

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
        record = self._records.get(engine_id)
        if record is None or record.state is not before:
            return False
        self._enter_state(record, after)
        return True

    def _enter_state(self, record: EngineRecord, state: EngineState) -> None:
        engine_id, before = record.engine.engine_id, record.state
        record.state = state
        self._oldest_version = None
        if record.needs_repair:
            self._need_repair[engine_id] = None
        else:
            self._need_repair.pop(engine_id, None)
        if state is EngineState.SERVING:
            grant = record.grant(self._max_calls, num_holders=1, has_others=len(self._records) > 1)
            slot = self.own.grant(record.engine, grant)
            slot.on_busy = lambda busy: self.note_use(engine_id)
            self.note_use(engine_id)  # calls that waited for it already run
            self._grant_engine(engine_id)
        else:
            self.own.revoke(engine_id, state)
            self.own.notify()
            for user in record.users if before is EngineState.SERVING else ():
                user.begin_revocation(engine_id, aborts=False)
        if (state in _SHARED) is not (before in _SHARED):
            self.share_anew()
        self._metrics.engine_up.labels(engine_id).set(state is not EngineState.QUARANTINED)
        self._metrics.engine_weight_version.labels(engine_id).set(record.weight_version)
        self.notify()

    def notify(self) -> None:
        """Wake all that wait for a change; later waiters get a fresh event."""
        self._changed.set()
        self._changed = asyncio.Event()
