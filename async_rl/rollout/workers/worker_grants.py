"""The driver's side of a worker's grants: what it may call, what it reports of engines, and its expiry.

```
 pool: grant, begin_revocation, drop_calls ──► GrantEngines | RevokeEngines, one message for all of a turn
 EnginesReleased, or the worker's end, or `GRANT_S` of silence ──► the revocation is confirmed
 Heartbeat ──► load and health of engines; Renewed
```
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Final

import msgspec

from async_rl.engine_protocol import Engine
from async_rl.engines.grant_holders import GrantHolder, Revocation
from async_rl.engines.lease import EngineGrant, EngineLoad
from async_rl.engines.pool import EnginePool
from async_rl.errors import CallLost, EngineError, VersionMismatch
from async_rl.rollout.workers.engine_checks import EngineChecks
from async_rl.rollout.workers.messages import (
    GRANT_S,
    EngineReport,
    EnginesReleased,
    EngineUse,
    GrantedEngine,
    GrantEngines,
    Heartbeat,
    Message,
    Renewed,
    Revoked,
    RevokeEngines,
)
from async_rl.runtime.waits import heard_of, waiting

log = logging.getLogger(__name__)

_CLOCK_MARGIN_S: Final = 0.5
"""How much longer the driver waits: the clocks of two hosts differ by less in the validity of a grant."""

_SILENT_S: Final = 1.0
"""A worker that has not reported for longer says nothing about the engines it calls. Four of its ticks."""

_DEAF_S: Final = 2.0
"""A worker that has not handled a message of the driver for longer may not be making its calls."""


class _Turn(msgspec.Struct):
    """What the next messages, one for all of a turn of the event loop, grant and revoke."""

    revocation: Revocation
    to_grant: dict[str, GrantedEngine] = {}
    to_revoke: dict[str, Revoked] = {}
    """Both by engine."""
    oldest_version: float = math.inf
    """Of the policy's engines that are revoked."""


class WorkerGrants(GrantHolder):
    """The grants of one incarnation of a worker."""

    def __init__(
        self,
        name: str,
        pools: Mapping[str, EnginePool],
        post: Callable[[Message], None],
        *,
        clock: Callable[[], float],
        on_revoke: Callable[[int], None],
        worker_stall_s: float,
    ) -> None:
        """Start without grants: the pools give some once the worker has sent a heartbeat.

        Args:
            name: The worker.
            pools: The engines of each model by its name; those of the policy have an empty one.
            post: Sends a message to the worker.
            clock: Monotonic seconds.
            on_revoke: Called with the oldest version of the policy's engines that are revoked: until the
                worker has confirmed, any of its trajectories may sample under it.
            worker_stall_s: A worker that reaches no engine for longer is ended.
        """
        self._name = name
        self._pools = pools
        self._post = post
        self._clock = clock
        self._on_revoke = on_revoke
        self.checks = EngineChecks(pools, clock, limit_s=worker_stall_s)
        """Of engines that the worker cannot reach."""
        self._grants: dict[str, EngineGrant] = {}
        self._turn = _Turn(Revocation(name))
        self._numbers = count(1)
        self._revocations: dict[int, Revocation] = {}
        """Those that are not confirmed, by number."""
        self._used: dict[str, int] = {}
        """The engines that the worker may call or have calls of, and the revocation that was last sent."""
        self._loads: dict[str, EngineLoad] = {}
        self._aborting: dict[str, AbstractContextManager[None]] = {}
        """Lets engines wait for the ends of calls that they abort."""
        self._renewed_s = self._heard_s = -math.inf
        """When it last reported, and when it last showed that it handles messages."""
        for pool in pools.values():
            pool.add_holder(self)

    # -- messages of the worker ----------------------------------------------------------------------------

    def renew(self, heartbeat: Heartbeat, *, hears: bool = True) -> None:
        """Take over what a heartbeat reports of engines, and renew the grants.

        Args:
            heartbeat: The worker's.
            hears: Whether it shows that the worker handles the driver's messages.
        """
        now, could_call = self._clock(), self.may_call
        for use in heartbeat.engines:
            self._record_use(use, now)
        for report in heartbeat.reports:
            self._record_report(report)
        self._renewed_s = now
        if hears:
            self._heard_s = now
        self._post(Renewed(number=heartbeat.number))
        if not could_call:  # after that message: until then the worker may use no grant
            self._watch_expiry()
            for pool in self._pools.values():
                pool.share_anew()

    def record_release(self, message: EnginesReleased) -> None:
        """Take over that the worker sends nothing more to engines, and which of its calls have ended."""
        self._confirm_revocation(message.number)
        for engine_id in message.ended:
            if self._used.get(engine_id) == message.number and engine_id not in self._grants:
                self._end_use(engine_id)

    def _record_use(self, use: EngineUse, now: float) -> None:
        engine_id = use.engine_id
        if engine_id not in self._used or (pool := self._pool_of(engine_id)) is None:
            return
        before = self._loads.get(engine_id)
        self._loads[engine_id] = load = EngineLoad(
            calls=use.calls,
            tokens=use.tokens,
            progress_s=now - use.quiet_s,
            prefill_tokens=use.prefill_tokens,
            accepted_s=-math.inf if use.accepted_s is None else now - use.accepted_s,
            heard_s=-math.inf if use.heard_s is None else now - use.heard_s,
            max_calls=use.max_calls,
            limited_by=use.limited_by,
        )
        if use.payload_arrives:
            pool.record_payload(engine_id)
        if load.heard_s > self._renewed_s:
            self.checks.record_answer()
            heard_of(engine_id)
        if (before.calls if before is not None else 0) != use.calls:
            pool.note_use(engine_id)

    def _record_report(self, report: EngineReport) -> None:
        engine_id, text = report.engine_id, report.text
        pool = self._pool_of(engine_id)
        snapshot = pool.snapshot_of(engine_id) if pool is not None else None
        if pool is None or snapshot is None:  # it has left
            return
        if (snapshot.restart_count, snapshot.epoch) != (report.restart_count, report.epoch):
            return  # it was updated or restarted since
        error = (VersionMismatch if report.wrong_weights else EngineError)(text)
        match report.kind:
            case "strike":
                pool.record_strike(engine_id, error)
            case "connection":
                self.checks.report_lost_connection(engine_id, text)
            case "failure":
                pool.quarantine_engine(engine_id, error, wrong_weights=report.wrong_weights)
            case "silent" if pool.has_sent(engine_id, self._clock() - report.since_s, besides=self):
                self.drop_calls(engine_id, CallLost, f"engine {engine_id} goes on with calls of others only")
                pool.share_anew()
            case "silent":
                pool.quarantine_engine(engine_id, error)
            case "refusals":
                pool.record_doubted_refusals(engine_id, self._clock() - report.since_s, error)

    # -- the pool ------------------------------------------------------------------------------------------

    @property
    def may_call(self) -> bool:
        """Implements `GrantHolder.may_call`."""
        return self._valid_s > 0

    @property
    def is_silent(self) -> bool:
        """Implements `GrantHolder.is_silent`."""
        now = self._clock()
        return now - self._renewed_s > _SILENT_S or now - self._heard_s > _DEAF_S

    def grants(self) -> Mapping[str, EngineGrant]:
        """Implements `GrantHolder.grants`."""
        return self._grants

    def grant(self, engine: Engine, grant: EngineGrant) -> None:
        """Implements `GrantHolder.grant`, by one message for all engines of a turn."""
        model = next(name for name, pool in self._pools.items() if grant.engine_id in pool)
        self._post_soon()
        self._grants[grant.engine_id] = grant
        self._used.setdefault(grant.engine_id, 0)
        self._turn.to_grant[grant.engine_id] = GrantedEngine(grant=grant, address=engine.address, model=model)

    def begin_revocation(self, engine_id: str, *, aborts: bool) -> Sequence[Revocation]:
        """Implements `GrantHolder.begin_revocation`, by one message for all engines of a turn."""
        if engine_id not in self._used:
            return ()
        pool = self._pool_of(engine_id)
        if aborts and engine_id not in self._aborting and pool is not None:
            self._aborting[engine_id] = aborting = pool.engine(engine_id).remote_call()
            aborting.__enter__()
        return (self._revoke(engine_id, Revoked(aborts=aborts)),)

    def drop_calls(self, engine_id: str, kind: type[EngineError], why: str) -> None:
        """Implements `GrantHolder.drop_calls`."""
        if engine_id in self._used:
            self._revoke(engine_id, Revoked(failure=why, wrong_weights=issubclass(kind, VersionMismatch)))

    def load_of(self, engine_id: str) -> EngineLoad | None:
        """Implements `GrantHolder.load_of`."""
        if engine_id not in self._used:
            return None
        load = self._loads.get(engine_id, _NO_LOAD)
        return msgspec.structs.replace(load, unobserved=True) if self.is_silent else load

    # -- the end of the worker -----------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether the worker has no grant and never will again."""
        return not any(self in pool.holders for pool in self._pools.values())

    async def expire(self) -> None:
        """Take back all grants once the worker, which is lost, can no longer use them; later if cancelled."""
        if not self.is_closed and self._valid_s:
            try:
                with waiting("grants", self._name):
                    await asyncio.sleep(self._valid_s)
            except asyncio.CancelledError:
                asyncio.get_running_loop().call_later(self._valid_s, self.close)
                raise
        self.close()

    def close(self) -> None:
        """Take back all grants now: the worker's process has ended."""
        self._renewed_s = -math.inf
        self._end_all()
        for pool in self._pools.values():
            pool.remove_holder(self)

    # -- inside --------------------------------------------------------------------------------------------

    def _pool_of(self, engine_id: str) -> EnginePool | None:
        return next((pool for pool in self._pools.values() if engine_id in pool), None)

    @property
    def _valid_s(self) -> float:
        """How long the worker may still use its grants, unless they are renewed."""
        return max(0.0, self._renewed_s + GRANT_S + _CLOCK_MARGIN_S - self._clock())

    def _watch_expiry(self) -> None:
        """Take back all grants when the worker can no longer use them: it is silent, and may come back."""
        if valid_s := self._valid_s:
            asyncio.get_running_loop().call_later(valid_s, self._watch_expiry)
            return
        for engine_id in list(self._grants):
            self._revoke(engine_id, Revoked())  # it hears of that before grants are renewed
        self._end_all()
        for pool in self._pools.values():
            pool.share_anew()

    def _end_all(self) -> None:
        """Wait for the worker no longer: it can call no engine."""
        self._post_changes()
        self._grants.clear()
        for engine_id in list(self._used):
            if (pool := self._pool_of(engine_id)) is not None:
                pool.record_payload(engine_id)  # it may have received one, and its calls end only now
            self._end_use(engine_id)
        for number in list(self._revocations):
            self._confirm_revocation(number)

    def _end_use(self, engine_id: str) -> None:
        """Note that the worker has no call of an engine."""
        del self._used[engine_id]
        self._loads.pop(engine_id, None)
        if (aborting := self._aborting.pop(engine_id, None)) is not None:
            aborting.__exit__(None, None, None)
        if (pool := self._pool_of(engine_id)) is not None:
            pool.note_use(engine_id)

    def _revoke(self, engine_id: str, revoked: Revoked) -> Revocation:
        self._post_soon()
        self._turn.to_grant.pop(engine_id, None)
        grant = self._grants.pop(engine_id, None)
        if grant is not None and engine_id in self._pools[""]:
            self._turn.oldest_version = min(self._turn.oldest_version, grant.weight_version)
        if (other := self._turn.to_revoke.get(engine_id)) is not None:
            revoked = Revoked(
                aborts=revoked.aborts or other.aborts,
                failure=revoked.failure or other.failure,
                wrong_weights=revoked.wrong_weights or other.wrong_weights,
            )
        self._turn.to_revoke[engine_id] = revoked
        return self._turn.revocation

    def _post_soon(self) -> None:
        """Post what is granted and revoked in this turn."""
        if not (self._turn.to_grant or self._turn.to_revoke):
            asyncio.get_running_loop().call_soon(self._post_changes)

    def _post_changes(self) -> None:
        turn, self._turn = self._turn, _Turn(Revocation(self._name))
        if turn.to_revoke:
            number = next(self._numbers)
            self._revocations[number] = turn.revocation
            if turn.oldest_version < math.inf:
                self._on_revoke(int(turn.oldest_version))
            self._used |= dict.fromkeys(turn.to_revoke.keys() & self._used.keys(), number)
            newest = self._pools[""].dispatcher.newest_version
            self._post(RevokeEngines(engines=turn.to_revoke, newest_version=newest, number=number))
        if turn.to_grant:
            self._post(GrantEngines(engines=tuple(turn.to_grant.values())))

    def _confirm_revocation(self, number: int) -> None:
        if (revocation := self._revocations.pop(number, None)) is not None:
            revocation.confirmed.set()


_NO_LOAD: Final = EngineLoad(calls=0, tokens=0, progress_s=-math.inf, prefill_tokens=0)
"""Of an engine of which the worker has reported nothing yet."""
