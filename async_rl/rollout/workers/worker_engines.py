"""A worker's side of grants: the engines that it may call, until when, and what it reports of them.

```
 GrantEngines ──► GrantedEngines: the dispatcher places calls, as in the driver
 RevokeEngines ─► nothing more is sent ──► EnginesReleased, and again when the last call has ended
 Heartbeat ◄──── load, and what calls say against engines
```

Grants are valid for `GRANT_S` from the moment at which the last heartbeat was sent that the driver has
answered, on this process's monotonic clock. When they expire, their streams are closed and nothing more is
sent: so the driver knows, without an answer from here, when the last request was made.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, Literal

from async_rl.engine_protocol import Engine, EngineAddress
from async_rl.engines.granted_engines import GrantedEngines
from async_rl.engines.lease import EngineJudge, EngineSlot, EngineState
from async_rl.errors import (
    CallLost,
    ConnectionLost,
    EngineError,
    EngineTimeout,
    EngineUnreachable,
    VersionMismatch,
)
from async_rl.observability.metrics import Metrics
from async_rl.rollout.workers.messages import (
    GRANT_S,
    AttemptProgress,
    EngineReport,
    EnginesReleased,
    EngineUse,
    GrantedEngine,
    GrantEngines,
    Message,
    RevokeEngines,
)

log = logging.getLogger(__name__)

ConnectEngine = Callable[[str, EngineAddress | None], Engine]
"""Makes the client of an engine, from its id and address."""

_MIN_TIMER_S: Final = 0.001
"""The resolution of timers."""

_FAILURE_PAUSE_S: Final = 0.25
"""Time without calls for an engine that failed here, until the driver has judged it; twice as long each time
in a row, up to a limit."""

_MAX_FAILURE_PAUSE_S: Final = 8.0


class WorkerEngines(EngineJudge):
    """The engines that the sessions of a worker may call."""

    def __init__(
        self,
        post: Callable[[Message], None],
        connect: ConnectEngine,
        metrics: Mapping[str, Metrics],
        *,
        clock: Callable[[], float],
    ) -> None:
        """Start without engines.

        Args:
            post: Sends a message to the driver.
            connect: Makes the client of an engine.
            metrics: What calls to each model count; "" is the policy.
            clock: Monotonic seconds.
        """
        self._post = post
        self._connect = connect
        self._clock = clock
        self.models = {name: GrantedEngines(self, each, clock) for name, each in metrics.items()}
        """The engines of each model; "" is the policy."""
        for engines in self.models.values():
            engines.dispatcher.valid_until_s = -math.inf
            engines.notify()
        self.has_news = asyncio.Event()
        """Whether a heartbeat is to be sent at once."""
        self._granted: dict[str, GrantedEngine] = {}
        """The grants that were not revoked, by engine."""
        self._clients: dict[str, tuple[EngineAddress | None, Engine]] = {}
        self._model_of: dict[str, GrantedEngines] = {}
        self._releases: dict[str, int] = {}
        """The revocations of engines whose calls have not all ended, by engine."""
        self._reports: list[EngineReport] = []
        self._payloads: set[str] = set()
        """Engines of which a piece of a routing payload has arrived."""
        self._pauses: dict[str, tuple[float, float]] = {}
        """The last pause of engines that failed: how long it was, and when it began."""
        self._expiry: asyncio.TimerHandle | None = None

    # -- from the driver -----------------------------------------------------------------------------------

    def grant(self, message: GrantEngines) -> None:
        """Let sessions call engines.

        Raises:
            KeyError: This run does not have a model.
        """
        for granted in message.engines:
            engine_id = granted.grant.engine_id
            self._granted[engine_id] = granted
            self._releases.pop(engine_id, None)
            if self.is_valid:
                self._open(granted)

    def _open(self, granted: GrantedEngine) -> None:
        grant, engines = granted.grant, self.models[granted.model]
        address, client = self._clients.get(grant.engine_id, (None, None))
        if client is None or address != granted.address:
            client = self._connect(grant.engine_id, granted.address)
            self._clients[grant.engine_id] = granted.address, client
        self._model_of[grant.engine_id] = engines
        slot = engines.grant(client, grant)
        slot.on_busy = partial(self._note_use, slot)

    def revoke(self, message: RevokeEngines, progress: Iterable[AttemptProgress] = ()) -> None:
        """Send nothing more to engines under the grants so far, and confirm that.

        Args:
            message: The engines.
            progress: How far all trajectories are.
        """
        self.models[""].announce_version(message.newest_version)
        ended = []
        for engine_id, revoked in message.engines.items():
            self._granted.pop(engine_id, None)
            if (engines := self._model_of.get(engine_id)) is None:
                ended.append(engine_id)
                continue
            engines.revoke(engine_id, EngineState.QUARANTINED if revoked.failure else EngineState.UPDATING)
            if revoked.failure:
                kind = VersionMismatch if revoked.wrong_weights else CallLost
                engines.drop_calls(engine_id, kind, revoked.failure)
            if revoked.aborts:
                self._clients[engine_id][1].read_at_once()
            if engines.slots[engine_id].num_calls:
                self._releases[engine_id] = message.number
            else:
                ended.append(engine_id)
        self._post(EnginesReleased(number=message.number, ended=tuple(ended), progress=tuple(progress)))

    def _note_use(self, slot: EngineSlot, busy: bool) -> None:
        engine_id = slot.grant.engine_id
        if not busy and (number := self._releases.pop(engine_id, None)) is not None:
            self._post(EnginesReleased(number=number, ended=(engine_id,)))

    def renew(self, sent_s: float) -> None:
        """Prolong all grants: the driver has answered a heartbeat that was sent at this time."""
        was_valid = self.is_valid
        until_s = sent_s + GRANT_S
        for engines in self.models.values():
            engines.dispatcher.valid_until_s = max(engines.dispatcher.valid_until_s, until_s)
        self._begin_expiry()
        if not was_valid and self.is_valid:
            for granted in self._granted.values():
                self._open(granted)
            for engines in self.models.values():  # whose slots are open if the timer of the expiry was late
                engines.notify()

    def close(self) -> None:
        """End all calls: the link is lost."""
        if self._expiry is not None:
            self._expiry.cancel()
        for engines in self.models.values():
            engines.dispatcher.valid_until_s = -math.inf
        self._end_calls("the link to the driver is lost")

    async def close_clients(self) -> None:
        """Close the connections to engines, once all calls have ended."""
        for _, client in self._clients.values():
            await client.close()
        self._clients.clear()

    # -- reports -------------------------------------------------------------------------------------------

    def pop_reports(self) -> tuple[EngineReport, ...]:
        """Return what calls have said against engines since the last call."""
        reports, self._reports = self._reports, []
        self.has_news.clear()
        return tuple(reports)

    def uses(self) -> tuple[EngineUse, ...]:
        """Return the load of all engines that may be called, or still have calls."""
        now, uses = self._clock(), []
        for engine_id in {**self._granted, **self._releases}:
            engines = self._model_of.get(engine_id)
            if engines is None or (load := engines.load_of(engine_id)) is None:
                continue
            uses.append(
                EngineUse(
                    engine_id=engine_id,
                    calls=load.calls,
                    tokens=load.tokens,
                    prefill_tokens=load.prefill_tokens,
                    quiet_s=now - load.progress_s,
                    accepted_s=_age(load.accepted_s, now),
                    heard_s=_age(load.heard_s, now),
                    payload_arrives=engine_id in self._payloads,
                    max_calls=load.max_calls,
                    limited_by=load.limited_by,
                )
            )
        self._payloads.clear()
        return tuple(uses)

    def record_strike(self, engine_id: str, error: EngineError) -> None:
        """Implements `EngineJudge.record_strike`: the driver does that."""
        self._report(engine_id, "connection" if isinstance(error, ConnectionLost) else "strike", error)
        self._pause(engine_id)

    def quarantine_engine(self, engine_id: str, error: Exception, *, wrong_weights: bool = False) -> None:
        """Implements `EngineJudge.quarantine_engine`: the driver does that."""
        if isinstance(error, EngineTimeout):
            silent_s = self._clock() - self._model_of[engine_id].slots[engine_id].progress_s
            self._report(engine_id, "silent", error, since_s=silent_s)
        else:
            unreached = isinstance(error, EngineUnreachable)
            self._report(
                engine_id, "connection" if unreached else "failure", error, wrong_weights=wrong_weights
            )
        self._pause(engine_id)

    def doubts_refusals(self, engine_id: str) -> bool:
        """Implements `EngineJudge.doubts_refusals`: others serve, and not all of those here refuse all."""
        slots = self._model_of[engine_id].slots
        others = [slot for name, slot in slots.items() if name != engine_id]
        return (
            slots[engine_id].refusals.are_suspicious
            and slots[engine_id].grant.has_others
            and not (others and all(slot.refusals.are_suspicious for slot in others))
        )

    def record_doubted_refusals(self, engine_id: str, since_s: float, error: EngineError) -> None:
        """Implements `EngineJudge.record_doubted_refusals`: the driver knows other engines."""
        self._report(engine_id, "refusals", error, since_s=self._clock() - since_s)

    def record_payload(self, engine_id: str) -> None:
        """Implements `EngineJudge.record_payload`, with the next heartbeat."""
        self._payloads.add(engine_id)

    def _report(
        self,
        engine_id: str,
        kind: Literal["strike", "connection", "failure", "silent", "refusals"],
        error: Exception,
        *,
        wrong_weights: bool = False,
        since_s: float = 0.0,
    ) -> None:
        grant = self._model_of[engine_id].slots[engine_id].grant
        self._reports.append(
            EngineReport(
                engine_id=engine_id,
                restart_count=grant.restart_count,
                epoch=grant.epoch,
                kind=kind,
                text=str(error),
                wrong_weights=wrong_weights or isinstance(error, VersionMismatch),
                since_s=since_s,
            )
        )
        self.has_news.set()

    def _pause(self, engine_id: str) -> None:
        """Give an engine no calls for a while: sessions would give up before the driver has judged it."""
        engines, now = self._model_of[engine_id], self._clock()
        slot = engines.slots[engine_id]
        if not slot.is_open or slot.pause is not None:
            return
        last_s, began_s = self._pauses.get(engine_id, (0.0, -math.inf))
        in_a_row = slot.heard_s < began_s
        pause_s = min(2 * last_s, _MAX_FAILURE_PAUSE_S) if in_a_row else _FAILURE_PAUSE_S
        self._pauses[engine_id] = pause_s, now
        engines.pause_engine(engine_id, pause_s)

    # -- expiry --------------------------------------------------------------------------------------------

    @property
    def is_valid(self) -> bool:
        """Whether grants may be used now."""
        return self.models[""].dispatcher.is_valid

    def _begin_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        left_s = self.models[""].dispatcher.valid_until_s - self._clock()
        self._expiry = asyncio.get_running_loop().call_later(max(_MIN_TIMER_S, left_s), self._expire)

    def _expire(self) -> None:
        if self.is_valid:  # timers are up to a millisecond early in uvloop
            self._begin_expiry()
            return
        self._end_calls(f"its grant has expired: the driver has not renewed it for {GRANT_S} s")

    def _end_calls(self, why: str) -> None:
        """Send nothing more, and close all streams."""
        for engines in self.models.values():
            for engine_id in engines.slots:
                engines.revoke(engine_id)
                engines.drop_calls(engine_id, CallLost, why)


def _age(then_s: float, now: float) -> float | None:
    return None if then_s == -math.inf else now - then_s
