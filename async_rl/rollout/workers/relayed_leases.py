"""The driver's side of a worker's leases: each is a lease of the pool, held for a call that the worker makes.

```
 LeaseWanted ──► dispatcher: waits, balances, counts ──► LeaseGranted
 CallStarted, progress ──► what the pool knows of the engine
 a drop (quarantine, health) ──► DropCall
 LeaseEnded, or the worker's end and `lease_s` ──► the lease is returned
```

So balancing, health, quarantine, loans and device phases work as for calls of the driver itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import Any, Final

from async_rl.engine_protocol import Finish
from async_rl.engines.lease import Lease
from async_rl.engines.pool import EnginePool
from async_rl.engines.revocation import LeaseHolder, Revocation
from async_rl.errors import EngineBusy, EngineError, RequestRefused, VersionMismatch, WorkerLost
from async_rl.rollout.workers.engine_checks import EngineChecks
from async_rl.rollout.workers.messages import (
    CallStarted,
    DropCall,
    EngineReport,
    Heartbeat,
    LeaseEnded,
    LeaseGranted,
    LeasesRenewed,
    LeasesRevoked,
    LeaseWanted,
    Message,
    PrefixShared,
    RevokeLeases,
)
from async_rl.runtime.waits import acting, waiting
from async_rl.types import root_of

log = logging.getLogger(__name__)

_CLOCK_MARGIN_S: Final = 0.5
"""How much longer the driver waits: the clocks of two hosts differ by less in the validity of a lease."""

_SILENT_S: Final = 1.0
"""A worker that has not reported for longer says nothing about the engines it calls. Four of its ticks."""

_DEAF_S: Final = 2.0
"""A worker that has not handled a message of the driver for longer may not be making its calls."""


class _RelayedLease:
    """One lease of the worker, from its request to its return. It has no task: messages are its events."""

    __slots__ = ("actor", "call", "lease", "wait", "wanted")

    def __init__(self, wanted: LeaseWanted) -> None:
        self.wanted = wanted
        self.lease: Lease | None = None
        """The lease of the pool, once that has been asked for it."""
        self.actor = acting("trajectory", wanted.key).begin()
        self.wait: waiting | None = None
        """What the trajectory waits for."""
        self.call: AbstractContextManager[None] | None = None
        """The call as its engine counts it, once it may begin."""

    def begin_wait(self, wait: waiting) -> None:
        """Let the trajectory wait for something else than before."""
        if self.wait is not None:
            self.wait.end(succeeded=False)
        self.wait = wait.begin(self.actor)

    @property
    def placed(self) -> Lease | None:
        """The lease if it has an engine."""
        return self.lease if self.call is not None else None


class RelayedLeases(LeaseHolder):
    """The leases of one incarnation of a worker."""

    def __init__(
        self,
        name: str,
        pools: Mapping[str, EnginePool],
        post: Callable[[Message], None],
        *,
        lease_s: float,
        clock: Callable[[], float],
        on_lease: Callable[[str, int | None], None],
        probe_timeout_s: float,
        worker_stall_s: float,
    ) -> None:
        """Start without leases, and let the pool know that there may be some.

        Args:
            name: The worker.
            pools: The engines of each model by its name; those of the policy have an empty one.
            post: Sends a message to the worker.
            lease_s: How long leases are valid after a heartbeat that was answered.
            clock: Monotonic seconds.
            on_lease: Called with a trajectory and the version that its call samples under, and with None when
                the call has ended. Calls of other models than the policy sample nothing of it.
            probe_timeout_s: How long an engine that the worker cannot reach may take to answer the driver.
            worker_stall_s: A worker that reaches no engine for longer is ended.
        """
        self._name = name
        self._pools = pools
        self._post = post
        self._lease_s = lease_s
        self._clock = clock
        self._on_lease = on_lease
        self._leases: dict[int, _RelayedLease] = {}
        self._newest_id = 0
        self._num_placed = Counter[str]()
        """The number of its leases that have an engine, by engine."""
        self._to_revoke: dict[str, bool] = {}
        """Engines whose leases the next message revokes, and whether they abort their calls."""
        self._next_revocation: Revocation
        self._revocations: dict[int, Revocation] = {}
        """Those that are not confirmed, by number."""
        self._revoked: set[int] = set()
        """Revoked leases whose calls the worker may still hold open, even if it has confirmed that."""
        self._watches_expiry = False
        self._withdrawn: list[_RelayedLease] = []
        """Requests for which the pool is asked again once the worker has reported."""
        self._withdrawn_limit_s = worker_stall_s + probe_timeout_s
        """A worker that gets no leases for longer is ended: its last probe may end after `worker_stall_s`."""
        self._numbers = count(1)
        self.checks = EngineChecks(
            name,
            pools,
            self._withdraw_requests,
            self._ask_again,
            probe_timeout_s=probe_timeout_s,
            limit_s=worker_stall_s,
        )
        """Of engines that the worker cannot reach."""
        self._renewed_s = -math.inf
        """When leases were renewed last: the worker's own time of it is earlier."""
        self._heard_s = -math.inf
        """When it last reported that it handles messages."""
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            LeaseWanted: self._request_lease,
            CallStarted: self._record_start,
            LeaseEnded: self._end_lease,
            EngineReport: self._record_report,
            PrefixShared: self._share_cached_prefix,
            LeasesRevoked: self._end_revocation,
        }
        for pool in pools.values():
            pool.lease_holders[self] = None

    # -- messages of the worker ----------------------------------------------------------------------------

    def handle_message(self, message: Message) -> bool:
        """Carry out a message if it concerns engines; return whether it does.

        Raises:
            WorkerLost: The message asks for what this run does not have.
        """
        handler = self._handlers.get(type(message))
        if handler is None:
            return False
        handler(message)
        return True

    def renew(self, heartbeat: Heartbeat, *, hears: bool = True) -> None:
        """Take over what a heartbeat reports of calls, and renew the leases.

        Args:
            heartbeat: The worker's.
            hears: Whether it shows that the worker handles the driver's messages.
        """
        if self.is_silent:
            for relayed in self._leases.values():
                if relayed.placed is not None:
                    relayed.placed.excuse_silence()
        for call in heartbeat.calls:
            self._record_progress(call.lease_id, call.received)
            reported = self._leases.get(call.lease_id)
            if call.payload_arrives and reported is not None and reported.placed is not None:
                self.checks.record_answer()
                reported.placed.record_payload()
        self.num_reports += 1
        for key in heartbeat.forgotten:
            for pool in self._pools.values():
                pool.dispatcher.forget_trajectory(key)
        self._renewed_s = self._clock()
        if hears:
            self._heard_s = self._renewed_s
        self._post(LeasesRenewed(number=heartbeat.number))
        self._ask_again()  # after that message: until then the worker may use no lease

    # -- the pool ------------------------------------------------------------------------------------------

    @property
    def has_asked(self) -> bool:
        """Whether the worker has ever asked for an engine."""
        return self._newest_id > 0

    @property
    def is_silent(self) -> bool:
        """Implements `LeaseHolder.is_silent`."""
        now = self._clock()
        return now - self._renewed_s > _SILENT_S or now - self._heard_s > _DEAF_S

    def begin_revocation(self, engine_id: str, *, aborts: bool) -> Sequence[Revocation]:
        """Implements `LeaseHolder.begin_revocation`, by one message for all engines of a turn."""
        if not self._num_placed[engine_id]:
            return ()
        if not self._to_revoke:
            number, self._next_revocation = next(self._numbers), Revocation(self._name)
            self._revocations[number] = self._next_revocation
            asyncio.get_running_loop().call_soon(self._post_revocation, number)
        self._to_revoke[engine_id] = aborts or self._to_revoke.get(engine_id, False)
        return (self._next_revocation,)

    def _post_revocation(self, number: int) -> None:
        engines, self._to_revoke = self._to_revoke, {}
        self._revoked.update(
            lease_id
            for lease_id, relayed in self._leases.items()
            if (lease := relayed.placed) is not None and lease.engine.engine_id in engines
        )
        newest = self._pools[""].dispatcher.newest_version
        self._post(RevokeLeases(engines=engines, newest_version=newest, number=number))
        if not self._watches_expiry:
            self._watch_expiry()

    def _watch_expiry(self) -> None:
        """Wait no longer for a worker that can no longer use its leases; look again when that may be so.

        If it is only late, it is granted the leases that it waits for once it has reported.
        """
        self._revoked &= self._leases.keys()
        self._watches_expiry = bool(self._revoked or self._revocations)
        if not self._watches_expiry:
            return
        if valid_s := self._valid_s:
            asyncio.get_running_loop().call_later(valid_s, self._watch_expiry)
            return
        self._watches_expiry = False
        self._withdraw_requests()
        self._return_leases([lease_id for lease_id, relayed in self._leases.items() if relayed.placed])
        self._confirm_revocations()

    # -- the end of the worker -----------------------------------------------------------------------------

    @property
    def callers(self) -> Set[str]:
        """The trajectories (the roots of branches) that wait for an engine or its tokens."""
        return {root_of(relayed.wanted.key) for relayed in self._leases.values()}

    @property
    def is_closed(self) -> bool:
        """Whether the worker holds no lease and never will again."""
        return not any(self in pool.lease_holders for pool in self._pools.values())

    async def expire(self) -> None:
        """Return all leases once the worker, which is lost, can no longer use them; later if cancelled."""
        if not self.is_closed and self._valid_s:
            try:
                with waiting("leases", self._name):
                    await asyncio.sleep(self._valid_s)
            except asyncio.CancelledError:
                asyncio.get_running_loop().call_later(self._valid_s, self.close)
                raise
        self.close()

    def close(self) -> None:
        """Return all leases now: the worker's process has ended."""
        for pool in self._pools.values():
            pool.lease_holders.pop(self, None)
        self._withdraw_requests()
        self._return_leases(list(self._leases))
        self._confirm_revocations()

    # -- inside --------------------------------------------------------------------------------------------

    @property
    def _valid_s(self) -> float:
        """How long the worker may still use its leases, unless they are renewed."""
        return max(0.0, self._renewed_s + self._lease_s + _CLOCK_MARGIN_S - self._clock())

    def _withdraw_requests(self) -> None:
        """Ask the pool for nothing more: an engine would wait for the calls of a worker that is not there."""
        for relayed in self._leases.values():
            if relayed.lease is not None and relayed.placed is None:
                self._pools[relayed.wanted.model].dispatcher.return_lease(relayed.lease)
                relayed.lease = None
                self._withdraw(relayed)

    def _withdraw(self, relayed: _RelayedLease) -> None:
        """Ask the pool for the lease later, when the worker can use it."""
        self._withdrawn.append(relayed)
        relayed.begin_wait(waiting("rollout worker calls", self._name, limit_s=self._withdrawn_limit_s))

    def _ask_again(self) -> None:
        """Ask the pool for the leases that the worker still waits for, if it may use them."""
        if self.checks.is_paused or not self._valid_s:
            return
        withdrawn, self._withdrawn = self._withdrawn, []
        for relayed in withdrawn:
            if relayed.wanted.lease_id in self._leases:
                self._ask_pool(relayed)

    def _return_leases(self, lease_ids: Iterable[int]) -> None:
        """Return leases that the worker can no longer use. Their engines may have served it until now."""
        for lease_id in lease_ids:
            if (lease := self._leases[lease_id].placed) is not None:
                lease.abandon()
            self._return_lease(lease_id)

    def _request_lease(self, message: LeaseWanted) -> None:
        """Ask the pool for a lease, which the worker is granted at once if an engine has capacity."""
        if message.lease_id <= self._newest_id:  # repeated
            return
        if message.model not in self._pools:
            raise WorkerLost(
                f"it sent LeaseWanted for the model {message.model}, which this run does not have"
            )
        self._newest_id = message.lease_id
        self._leases[message.lease_id] = relayed = _RelayedLease(message)
        if self.checks.is_paused:
            self._withdraw(relayed)
        else:
            self._ask_pool(relayed)

    def _ask_pool(self, relayed: _RelayedLease) -> None:
        wanted = relayed.wanted
        pool = self._pools[wanted.model]
        relayed.lease = pool.dispatcher.request_lease(
            wanted.key, wanted.tokens, prompt=wanted.prompt, on_placed=partial(self._grant_lease, relayed)
        )
        if relayed.call is None:
            relayed.begin_wait(waiting("engine", why=pool.dispatcher.describe_states))

    def _grant_lease(self, relayed: _RelayedLease, lease: Lease) -> None:
        """Let the worker call the engine that the pool has given to its lease."""
        if relayed.wait is not None:
            relayed.wait.end()
        engine, lease_id = lease.engine, relayed.wanted.lease_id
        relayed.wait = lease.wait = waiting("first chunk", engine.engine_id).begin(relayed.actor)
        relayed.call = engine.remote_call()
        relayed.call.__enter__()
        self._num_placed[engine.engine_id] += 1
        lease.holder = self
        lease.on_drop = partial(self._drop_call, lease_id)
        if not relayed.wanted.model:
            self._on_lease(lease.key, lease.weight_version)
        self._post(
            LeaseGranted(
                lease_id=lease_id,
                engine_id=engine.engine_id,
                address=engine.address,
                weight_version=lease.weight_version,
                restart_count=lease.restart_count,
                epoch=lease.epoch,
                doubted=self._pools[relayed.wanted.model].doubts_refusals(engine.engine_id),
            )
        )

    def _drop_call(self, lease_id: int, error: EngineError) -> None:
        wrong_weights = isinstance(error, VersionMismatch)
        self._post(DropCall(lease_id=lease_id, why=str(error), wrong_weights=wrong_weights))

    def _return_lease(self, lease_id: int) -> None:
        """Return a lease to the pool, or withdraw the request for it."""
        relayed = self._leases.pop(lease_id)
        wanted = relayed.wanted
        if relayed.wait is not None:
            relayed.wait.end(succeeded=relayed.call is not None)
        relayed.actor.end()
        if not wanted.model:
            self._on_lease(wanted.key, None)
        if relayed.lease is None:  # withdrawn
            return
        if relayed.call is not None:
            relayed.call.__exit__(None, None, None)
            self._num_placed[relayed.lease.engine.engine_id] -= 1
        self._pools[wanted.model].dispatcher.return_lease(relayed.lease)  # others may be granted at once

    def _record_progress(self, lease_id: int, received: int) -> None:
        relayed = self._leases.get(lease_id)
        if relayed is not None and (lease := relayed.placed) is not None and received > lease.received:
            self.checks.record_answer()
            lease.record_chunk(received - lease.received)

    def _record_start(self, message: CallStarted) -> None:
        self._record_progress(message.lease_id, message.received)

    def _end_lease(self, message: LeaseEnded) -> None:
        lease_id, finish = message.lease_id, message.finish
        if (relayed := self._leases.get(lease_id)) is None:
            return
        self._record_progress(lease_id, message.received)
        if (lease := relayed.placed) is not None:
            if lease.receives_payload:
                lease.record_payload()  # of the last piece no heartbeat tells
            if finish is not None:
                self.checks.record_answer()
                end = Finish(
                    reason="abort" if finish.aborted else "stop",
                    version_spans=(),
                    cached_tokens=finish.cached_tokens,
                )
                lease.record_finish(finish.prompt, end)
        self._return_lease(lease_id)

    def _share_cached_prefix(self, message: PrefixShared) -> None:
        for pool in self._pools.values():
            pool.dispatcher.share_cached_prefix(message.key, message.other)

    def _end_revocation(self, message: LeasesRevoked) -> None:
        self._confirm_revocation(message.number)

    def _confirm_revocation(self, number: int) -> None:
        if (revocation := self._revocations.pop(number, None)) is not None:
            revocation.confirm()

    def _confirm_revocations(self) -> None:
        for number in list(self._revocations):
            self._confirm_revocation(number)

    def _record_report(self, report: EngineReport) -> None:
        engine_id, text = report.engine_id, report.text
        by_call = report.kind != "strike" or report.wrong_weights
        if by_call and not self._num_placed[engine_id]:
            return  # of a call that ended with its lease: the engine may have been restarted since
        pool = next((pool for pool in self._pools.values() if engine_id in pool), None)
        if pool is None:  # it has left
            return
        error = (VersionMismatch if report.wrong_weights else EngineError)(text)
        match report.kind:
            case "strike":
                pool.record_strike(engine_id, error)
            case "connection":
                self.checks.report_lost_connection(engine_id, text)
            case "failure":
                pool.quarantine_engine(engine_id, error, wrong_weights=report.wrong_weights)
            case "busy":
                self.checks.record_answer()
                pool.record_back_pressure(engine_id, EngineBusy(text, report.retry_after_s))
            case "refused":
                self.checks.record_answer()
                pool.record_refused_request(engine_id, report.trajectory_id, RequestRefused(text))
