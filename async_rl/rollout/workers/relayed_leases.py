"""The driver's side of a worker's leases: each is a lease of the pool, held for a call that the worker makes.

```
 LeaseWanted ──► pool.lease(): waits, balances, counts ──► LeaseGranted
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
from collections.abc import Callable
from itertools import count
from typing import Final

from async_rl.engine_protocol import Finish
from async_rl.engines.engine_calls import LeaseHolder
from async_rl.engines.lease import Lease
from async_rl.engines.pool import EnginePool
from async_rl.errors import CallLost, EngineBusy, EngineError, RequestRefused
from async_rl.rollout.workers.messages import (
    CallFinish,
    CallProgress,
    CallStarted,
    DropCall,
    EngineReport,
    LeaseEnded,
    LeaseGranted,
    LeasesRenewed,
    LeasesRevoked,
    LeaseWanted,
    Message,
    PrefixShared,
    RevokeLeases,
    TrajectoryForgotten,
)
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import acting, waiting

log = logging.getLogger(__name__)

_CLOCK_MARGIN_S: Final = 0.5
"""How much longer the driver waits: the clocks of two hosts differ by less in the validity of a lease."""

_SILENT_S: Final = 1.0
"""A worker that has not reported for so long says nothing about the engines it calls. Four of its ticks."""


class _RelayedLease:
    """One lease of the worker, from its request to its return."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.lease: Lease | None = None
        self.task: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class RelayedLeases(LeaseHolder):
    """The leases of one incarnation of a worker.

    Example:
        >>> async with Nursery() as nursery:
        ...     leases = RelayedLeases("rollout-worker-0", pool, link.post, nursery, lease_s=5.0, clock=clock)
        ...     leases.handle_message(message)  # for each message of the worker that concerns engines
        ...     await leases.expire()  # the worker has ended
    """

    def __init__(
        self,
        name: str,
        pool: EnginePool,
        post: Callable[[Message], None],
        nursery: Nursery,
        *,
        lease_s: float,
        clock: Callable[[], float],
        on_lease: Callable[[str, int | None], None],
    ) -> None:
        """Start without leases, and let the pool know that there may be some.

        Args:
            name: The worker.
            pool: The engines.
            post: Sends a message to the worker.
            nursery: Runs a task for each lease.
            lease_s: How long leases are valid after a heartbeat that was answered.
            clock: Monotonic seconds.
            on_lease: Called with a trajectory and the version that its call samples under, and with None when
                the call has ended.
        """
        self._name = name
        self._pool = pool
        self._post = post
        self._nursery = nursery
        self._lease_s = lease_s
        self._clock = clock
        self._on_lease = on_lease
        self._leases: dict[int, _RelayedLease] = {}
        self._newest_id = 0
        self._revocations: dict[int, asyncio.Future[None]] = {}
        self._numbers = count(1)
        self._renewed_s = -math.inf
        """When leases were renewed last: the worker's own time of it is earlier."""
        pool.lease_holders[self] = None

    # -- messages of the worker ----------------------------------------------------------------------------

    def handle_message(self, message: Message) -> None:
        """Carry out a message that concerns engines."""
        match message:
            case LeaseWanted():
                if message.lease_id <= self._newest_id:  # repeated
                    return
                self._newest_id = message.lease_id
                relayed = self._leases[message.lease_id] = _RelayedLease(message.key)
                # The task's name tells which trajectory's call it is.
                relayed.task = self._nursery.start_task(
                    f"trajectory {message.key}", self._hold_lease(message, relayed)
                )
            case CallStarted():
                self._record_progress(message.lease_id, message.received)
            case LeaseEnded():
                self._end_lease(message.lease_id, message.received, message.finish)
            case EngineReport():
                self._record_report(message)
            case PrefixShared():
                self._pool.share_cached_prefix(message.key, message.other)
            case TrajectoryForgotten():
                self._pool.forget_trajectory(message.key)
            case LeasesRevoked():
                if (answered := self._revocations.pop(message.number, None)) is not None:
                    answered.set_result(None)
            case _:
                raise AssertionError(f"{type(message).__name__} does not concern engines")

    def renew(self, number: int, calls: tuple[CallProgress, ...]) -> None:
        """Take over the progress that a heartbeat reports, and renew the leases."""
        if self.is_silent:
            for relayed in self._leases.values():
                if relayed.lease is not None:
                    relayed.lease.excuse_silence()
        for call in calls:
            self._record_progress(call.lease_id, call.received)
            reported = self._leases.get(call.lease_id)
            if call.payload_arrives and reported is not None and reported.lease is not None:
                reported.lease.record_payload()
        self._renewed_s = self._clock()
        self._post(LeasesRenewed(number=number))

    # -- the pool ------------------------------------------------------------------------------------------

    @property
    def is_silent(self) -> bool:
        """Implements `LeaseHolder.is_silent`."""
        return self._clock() - self._renewed_s > _SILENT_S

    def holds_lease_of(self, engine_id: str) -> bool:
        """Implements `LeaseHolder.holds_lease_of`."""
        held = (relayed.lease for relayed in self._leases.values())
        return any(lease is not None and lease.engine.engine_id == engine_id for lease in held)

    async def revoke_leases(self, engine_id: str) -> None:
        """Implements `LeaseHolder.revoke_leases`."""
        number, answered = next(self._numbers), asyncio.get_running_loop().create_future()
        self._revocations[number] = answered
        self._post(RevokeLeases(engine_id=engine_id, number=number))
        try:
            with waiting("leases", engine_id, why=lambda: self._name):
                while not answered.done():
                    await asyncio.wait([answered], timeout=self._valid_s)
                    if not self._valid_s:
                        self._return_leases()
                        break
        finally:
            self._revocations.pop(number, None)

    # -- the end of the worker -----------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether the worker holds no lease and never will again."""
        return self not in self._pool.lease_holders

    async def expire(self) -> None:
        """Return all leases once the worker, which is lost, can no longer use them."""
        if not self.is_closed and self._valid_s:
            with waiting("leases", self._name):
                await asyncio.sleep(self._valid_s)
        self.close()

    def close(self) -> None:
        """Return all leases now: the worker's process has ended."""
        self._pool.lease_holders.pop(self, None)
        self._return_leases()
        for answered in self._revocations.values():
            answered.set_result(None)
        self._revocations.clear()

    # -- inside --------------------------------------------------------------------------------------------

    @property
    def _valid_s(self) -> float:
        """How long the worker may still use its leases, unless they are renewed."""
        return max(0.0, self._renewed_s + self._lease_s + _CLOCK_MARGIN_S - self._clock())

    def _return_leases(self) -> None:
        """Return leases that the worker can no longer use."""
        for relayed in list(self._leases.values()):
            if relayed.lease is None and relayed.task is not None:
                relayed.task.cancel()  # it was never granted
            if not relayed.ended.done():
                relayed.ended.set_result(None)

    async def _hold_lease(self, message: LeaseWanted, relayed: _RelayedLease) -> None:
        """Hold a lease of the pool until the worker returns it."""
        try:
            with acting("trajectory", message.key):
                async with self._pool.lease(message.key, message.tokens, prompt=message.prompt) as lease:
                    relayed.lease, engine = lease, lease.engine
                    lease.holder = self
                    self._on_lease(message.key, lease.weight_version)
                    self._post(
                        LeaseGranted(
                            lease_id=message.lease_id,
                            engine_id=engine.engine_id,
                            address=engine.address,
                            weight_version=lease.weight_version,
                            restart_count=lease.restart_count,
                            epoch=lease.epoch,
                        )
                    )
                    with engine.remote_call():
                        try:
                            await lease.wait_for_call(relayed.ended)
                        except CallLost as error:
                            self._post(DropCall(lease_id=message.lease_id, why=str(error)))
                            with waiting("chunk", engine.engine_id):
                                await asyncio.wait([relayed.ended])
        finally:
            self._leases.pop(message.lease_id, None)
            self._on_lease(message.key, None)

    def _record_progress(self, lease_id: int, received: int) -> None:
        relayed = self._leases.get(lease_id)
        if relayed is not None and (lease := relayed.lease) is not None and received > lease.received:
            lease.record_chunk(received - lease.received)

    def _end_lease(self, lease_id: int, received: int, finish: CallFinish | None) -> None:
        relayed = self._leases.get(lease_id)
        if relayed is None:
            return
        self._record_progress(lease_id, received)
        if relayed.lease is None:
            assert relayed.task is not None, "it is set before the first await"
            relayed.task.cancel()
            return
        if finish is not None:
            end = Finish(
                reason="abort" if finish.aborted else "stop",
                version_spans=(),
                cached_tokens=finish.cached_tokens,
            )
            relayed.lease.record_finish(finish.prompt, end)
        if not relayed.ended.done():
            relayed.ended.set_result(None)

    def _record_report(self, report: EngineReport) -> None:
        pool, engine_id, text = self._pool, report.engine_id, report.text
        match report.kind:
            case "strike":
                pool.record_strike(engine_id, EngineError(text))
            case "failure":
                pool.quarantine_engine(engine_id, EngineError(text))
            case "busy":
                pool.record_back_pressure(engine_id, EngineBusy(text, report.retry_after_s))
            case "refused":
                pool.record_refused_request(engine_id, report.trajectory_id, RequestRefused(text))
