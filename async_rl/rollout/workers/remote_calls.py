"""A worker's side of leases: it asks the driver for each, calls the engine itself, and reports the end.

```
 Transcript ─lease()─► RemoteCalls ── LeaseWanted ──► driver: its LeaseDispatcher chooses the engine
                           ▲        ◄─ LeaseGranted ─
                           │ generate(): HTTP to the engine, while the leases are valid
                           └─────── ── LeaseEnded ──►
```

Leases are valid for `lease_s` from the moment at which the last heartbeat was sent that the driver has
answered, on this process's monotonic clock. When they expire, their streams are closed and nothing more is
sent: so the driver knows, without an answer from here, when the last request was made.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from typing import Final, Literal

from async_rl.engine_protocol import Engine, EngineAddress, Finish
from async_rl.engines.engine_calls import EngineCalls
from async_rl.engines.lease import (
    EngineFailureListener,
    EngineSlot,
    EngineState,
    Lease,
    LeaseListener,
    Recomputed,
)
from async_rl.errors import (
    CallLost,
    ConnectionLost,
    EngineBusy,
    EngineError,
    EngineUnreachable,
    LocalShortage,
    RequestRefused,
    VersionMismatch,
)
from async_rl.observability.metrics import Metrics
from async_rl.rollout.workers.messages import (
    CallFinish,
    CallProgress,
    CallStarted,
    DropCall,
    EngineReport,
    LeaseEnded,
    LeaseGranted,
    LeasesRevoked,
    LeaseWanted,
    Message,
    PrefixShared,
    RevokeLeases,
)
from async_rl.runtime.waits import waiting

log = logging.getLogger(__name__)

ConnectEngine = Callable[[str, EngineAddress | None], Engine]
"""Makes the client of an engine, from its id and address."""

_MIN_TIMER_S: Final = 0.001
"""The resolution of timers."""

_SHORTAGE_PAUSE_S: Final = 1.0
"""How long this worker asks for no leases when it has no descriptor for a connection."""


class RemoteLease(Lease):
    """A lease in a worker. The driver has counted and placed the call; here it is only made."""

    lease_id: int
    model: str
    """Of `models`; empty: the policy."""
    calls: RemoteCalls
    granted: asyncio.Future[None]
    finish: CallFinish | None = None
    reported = 0
    """The number of received tokens that the driver knows of."""
    reported_s = -math.inf
    """When they were reported."""
    num_pieces = reported_pieces = 0
    """The number of pieces of its routing payload, and how many of them the driver knows of."""

    @property
    def interrupted(self) -> bool:
        """Whether nothing may be sent any more. The timer of the expiry may be late: the clock counts."""
        return super().interrupted or not self.calls.is_valid

    def record_payload(self) -> None:
        """Count a piece of the payload."""
        super().record_payload()
        self.num_pieces += 1

    def record_finish(self, prompt: int, finish: Finish) -> None:
        """Keep what the driver needs of the end of the call."""
        self.finish = CallFinish(
            prompt=prompt, aborted=finish.reason == "abort", cached_tokens=finish.cached_tokens
        )


class RemoteCalls(EngineCalls, LeaseListener, EngineFailureListener):
    """Implements `EngineCalls` for the sessions of a worker."""

    def __init__(
        self,
        post: Callable[[Message], None],
        connect: ConnectEngine,
        *,
        lease_s: float,
        report_s: float = 0.0,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        """Start without leases.

        Args:
            post: Sends a message to the driver.
            connect: Makes the client of an engine.
            lease_s: How long leases are valid after a heartbeat.
            report_s: Shortest time between two progress reports of a call.
            metrics: Counts shortages of descriptors.
            clock: Monotonic seconds.
        """
        self._post = post
        self._connect = connect
        self._lease_s = lease_s
        self._report_s = report_s
        self._metrics = metrics
        self._clock = clock
        self._leases: dict[int, RemoteLease] = {}
        self._numbers = count(1)
        self._slots: dict[str, EngineSlot] = {}
        self._clients: dict[str, tuple[EngineAddress | None, Engine]] = {}
        self._doubted: set[str] = set()
        """Engines that are not believed when they refuse a request as wrong."""
        self._forgotten: list[str] = []
        self._newest_versions: dict[str, int] = {}
        """By model; "" is the policy."""
        self._valid_until_s = -math.inf
        self._expiry: asyncio.TimerHandle | None = None
        self._resumes_s = -math.inf

    # -- for sessions --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, key: str, tokens: int, *, prompt: int = 0, model: str = "") -> AsyncIterator[Lease]:
        """Implements `EngineCalls.lease`, also for the engines of a model in `models`."""
        if (pause_s := self._resumes_s - self._clock()) > 0:
            with waiting("engine", why=lambda: "this worker had no descriptor for a connection"):
                await asyncio.sleep(pause_s)
        lease = RemoteLease(self, self, self._clock, key, tokens, prompt, None)
        lease.lease_id, lease.model, lease.calls = next(self._numbers), model, self
        lease.granted = asyncio.get_running_loop().create_future()
        self._leases[lease.lease_id] = lease
        self._post(LeaseWanted(lease_id=lease.lease_id, key=key, tokens=tokens, prompt=prompt, model=model))
        try:
            with waiting("engine"):
                await lease.granted
            yield lease
        finally:
            del self._leases[lease.lease_id]
            if lease.placed:
                slot = lease.slot
                del (slot.streaming if lease in slot.streaming else slot.prefilling)[lease]
            self._post(LeaseEnded(lease_id=lease.lease_id, received=lease.received, finish=lease.finish))

    @property
    def newest_version(self) -> int:
        """Implements `EngineCalls.newest_version`. The driver tells it before an update begins."""
        return self.newest_version_of("")

    def newest_version_of(self, model: str) -> int:
        """Return the newest version that a call to a model in `models` can have sampled under."""
        return self._newest_versions.get(model, -1)

    def _announce_version(self, weight_version: int, model: str = "") -> None:
        newest = self.newest_version_of(model)
        self._newest_versions[model] = max(newest, weight_version)

    def share_cached_prefix(self, key: str, other: str) -> None:
        """Implements `EngineCalls.share_cached_prefix`."""
        self._post(PrefixShared(key=key, other=other))

    def forget_trajectory(self, key: str) -> None:
        """Implements `EngineCalls.forget_trajectory`, with the next heartbeat."""
        self._forgotten.append(key)

    def pop_forgotten(self) -> tuple[str, ...]:
        """Return the trajectories that make no more calls, each once."""
        forgotten, self._forgotten = self._forgotten, []
        return tuple(forgotten)

    # -- from the driver -----------------------------------------------------------------------------------

    def grant(self, message: LeaseGranted) -> None:
        """Give a call its engine, once; a call that is not wanted any more has been returned already."""
        lease = self._leases.get(message.lease_id)
        if lease is None or lease.placed:  # placed again, it would be valid after it was revoked
            return
        engine_id, slot = message.engine_id, self._slots.get(message.engine_id)
        address, client = self._clients.get(engine_id, (None, None))
        if client is None or address != message.address:
            client = self._connect(engine_id, message.address)
            self._clients[engine_id] = message.address, client
        if slot is None or slot.engine is not client:
            slot = self._slots[engine_id] = EngineSlot(client, self._clock())
        (self._doubted.add if message.doubted else self._doubted.discard)(engine_id)
        slot.weight_version = message.weight_version
        self._announce_version(message.weight_version, lease.model)
        slot.restart_count, slot.epoch = message.restart_count, message.epoch
        slot.state = EngineState.SERVING if self.is_valid else EngineState.QUARANTINED
        lease.place(slot, message.lease_id, lease.prompt, None)
        if not lease.granted.done():
            lease.granted.set_result(None)

    def drop_call(self, message: DropCall) -> None:
        """End a call; its session continues with the tokens received, unless they are of unknown weights."""
        if (lease := self._leases.get(message.lease_id)) is not None:
            lease.drop((VersionMismatch if message.wrong_weights else CallLost)(message.why))

    def revoke(self, message: RevokeLeases) -> None:
        """Send nothing more to engines under the leases granted so far, and confirm that."""
        self._announce_version(message.newest_version)
        for engine_id, aborts in message.engines.items():
            if (slot := self._slots.pop(engine_id, None)) is not None:  # later leases get another one
                slot.state = EngineState.UPDATING
            if aborts and engine_id in self._clients:
                self._clients[engine_id][1].read_at_once()
        self._post(LeasesRevoked(number=message.number))

    def renew(self, sent_s: float) -> None:
        """Prolong all leases: the driver has answered a heartbeat that was sent at this time."""
        self._valid_until_s = max(self._valid_until_s, sent_s + self._lease_s)
        self._begin_expiry()

    def close(self) -> None:
        """End all calls: the link is lost."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._valid_until_s = -math.inf
        self._end_calls("the link to the driver is lost")

    async def close_clients(self) -> None:
        """Close the connections to engines, once all calls have ended."""
        for _, client in self._clients.values():
            await client.close()
        self._clients.clear()

    # -- reports -------------------------------------------------------------------------------------------

    def progress(self) -> tuple[CallProgress, ...]:
        """Return how far calls are that have received something since their last report.

        Pieces of routing payloads are reported at once: updates wait for as long as they arrive.
        """
        changed = []
        now = self._clock()
        for lease in self._leases.values():
            pieces = lease.num_pieces - lease.reported_pieces
            if not pieces and now < lease.reported_s + self._report_s:
                continue
            if lease.received > lease.reported or pieces:
                lease.reported, lease.reported_pieces = lease.received, lease.num_pieces
                lease.reported_s = now
                changed.append(
                    CallProgress(
                        lease_id=lease.lease_id,
                        received=lease.received,
                        payload_arrives=pieces > 0,
                    )
                )
        return tuple(changed)

    def record_first_token(self, lease: Lease, waited_s: float) -> None:
        """Implements `LeaseListener.record_first_token`."""
        assert isinstance(lease, RemoteLease), "all leases of a worker are"
        lease.reported, lease.reported_s = lease.received, self._clock()
        self._post(CallStarted(lease_id=lease.lease_id, received=lease.received))

    def record_recomputed_tokens(self, tokens: int, cause: Recomputed) -> None:
        """Implements `LeaseListener.record_recomputed_tokens`. The driver counts them."""

    def record_strike(self, engine_id: str, error: EngineError) -> None:
        """Implements `EngineFailureListener.record_strike`."""
        kind: Literal["connection", "strike"] = (
            "connection" if isinstance(error, ConnectionLost) else "strike"
        )
        wrong_weights = isinstance(error, VersionMismatch)
        self._post(EngineReport(engine_id=engine_id, kind=kind, text=str(error), wrong_weights=wrong_weights))

    def quarantine_engine(self, engine_id: str, error: Exception, *, wrong_weights: bool = False) -> None:
        """Implements `EngineFailureListener.quarantine_engine`: the driver does that."""
        kind: Literal["connection", "failure"] = (
            "connection" if isinstance(error, EngineUnreachable) else "failure"
        )
        self._post(EngineReport(engine_id=engine_id, kind=kind, text=str(error), wrong_weights=wrong_weights))

    def record_back_pressure(self, engine_id: str, error: EngineBusy) -> None:
        """Implements `EngineFailureListener.record_back_pressure`."""
        self._post(
            EngineReport(engine_id=engine_id, kind="busy", text=str(error), retry_after_s=error.retry_after_s)
        )

    def record_refused_request(self, engine_id: str, trajectory_id: str, error: RequestRefused) -> bool:
        """Implements `EngineFailureListener.record_refused_request`, by what the driver knew at the grant."""
        self._post(
            EngineReport(engine_id=engine_id, kind="refused", text=str(error), trajectory_id=trajectory_id)
        )
        return engine_id not in self._doubted

    def record_local_shortage(self, error: LocalShortage) -> None:
        """Implements `EngineFailureListener.record_local_shortage`: this worker alone makes no calls."""
        self._metrics.local_shortages_total.inc()
        if self._resumes_s <= self._clock():
            log.error("no calls of this worker for %.0f s: %s", _SHORTAGE_PAUSE_S, error)
        self._resumes_s = self._clock() + _SHORTAGE_PAUSE_S

    # -- expiry --------------------------------------------------------------------------------------------

    @property
    def is_valid(self) -> bool:
        """Whether leases may be used now."""
        return self._clock() < self._valid_until_s

    def _begin_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        left_s = self._valid_until_s - self._clock()
        self._expiry = asyncio.get_running_loop().call_later(max(_MIN_TIMER_S, left_s), self._expire)

    def _expire(self) -> None:
        if self.is_valid:  # timers are up to a millisecond early in uvloop
            self._begin_expiry()
            return
        self._end_calls(f"its lease has expired: the driver has not renewed it for {self._lease_s} s")

    def _end_calls(self, why: str) -> None:
        """Send nothing more, and close all streams."""
        for slot in self._slots.values():
            slot.state = EngineState.QUARANTINED
        self._slots.clear()
        for lease in list(self._leases.values()):
            if lease.placed:
                lease.drop(CallLost(why))


class ModelCalls(EngineCalls):
    """Implements `EngineCalls` in a worker for the engines of a model in `models`."""

    def __init__(self, calls: RemoteCalls, model: str) -> None:
        """Make calls through those of the worker."""
        self._calls = calls
        self._model = model

    def lease(self, key: str, tokens: int, *, prompt: int = 0) -> AbstractAsyncContextManager[Lease]:
        """Implements `EngineCalls.lease`."""
        return self._calls.lease(key, tokens, prompt=prompt, model=self._model)

    @property
    def newest_version(self) -> int:
        """Implements `EngineCalls.newest_version`."""
        return self._calls.newest_version_of(self._model)

    def share_cached_prefix(self, key: str, other: str) -> None:
        """Implements `EngineCalls.share_cached_prefix`."""
        self._calls.share_cached_prefix(key, other)

    def forget_trajectory(self, key: str) -> None:
        """Implements `EngineCalls.forget_trajectory`."""
        self._calls.forget_trajectory(key)
