"""One call on one engine, and what the pool knows of each engine from its calls.

```
 placed ──► prefilling ──first chunk──► streaming ──finish──► ended
              └──────────── the engine failed, or the call was dropped ───┘
```

All calls of `Engine.generate` go through a lease. It passes the stream on as it arrives, and meanwhile times
the engine (`EngineLoad`), counts the tokens that were prefilled again, and reports failures. The pool can
drop a call at any moment, whatever the call waits for: so calls leave an engine that no longer answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Set
from contextlib import aclosing, contextmanager
from enum import StrEnum
from typing import Any, Final, Literal, Protocol

import msgspec

from async_rl.engine_protocol import Chunk, Engine, Finish, GenerateRequest, PayloadProgress
from async_rl.engines.back_pressure import BackPressure
from async_rl.engines.request_refusals import RequestRefusals
from async_rl.engines.revocation import LeaseHolder
from async_rl.errors import (
    CallLost,
    EngineBusy,
    EngineError,
    LocalShortage,
    RequestRefused,
    VersionMismatch,
)
from async_rl.runtime.waits import waiting

_LOOK_AGAIN_S: Final = 0.25
"""Between two looks at whether other processes have reported: as often as they do."""

Recomputed = Literal["update", "failover", "moved", "evicted"]
"""Why tokens are prefilled again; the label of `prefilled_again_tokens_total`.

update: the engine flushed them for new weights.  failover: their engine failed.
moved: their engine was too busy.  evicted: it had no memory for them, or keeps no cache.
"""


class EngineState(StrEnum):
    """The state of an engine; `pool` has the diagram."""

    JOINING = "joining"
    SERVING = "serving"
    UPDATING = "updating"
    EVALUATING = "evaluating"
    DRAINING = "draining"
    QUARANTINED = "quarantined"


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of an engine and the progress of its calls. Times are of the pool's clock."""

    calls: int
    progress_s: float
    """When the engine last sent anything, got its first call after idle time, or began to serve."""
    decode_s: float
    """When a call that was already streaming last received tokens."""
    prefill_tokens: int
    """Tokens that the engine has to prefill before its calls can continue."""
    silent_since_s: float | None
    """When the streaming call that has been silent longest last received tokens."""
    overtaken_s: float | None
    """When a later call received its first token before the oldest call without one."""
    unobserved: bool = False
    """Whether a process that makes some of the calls is silent, so that nothing is known of them."""
    has_answered: bool = True
    """Whether it has sent a token since it was started."""


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's state and what it serves; equal at two moments if nothing happened to it in between."""

    state: EngineState
    weight_version: int
    restart_count: int
    """Number of restarts; each empties the prefix cache."""
    epoch: int
    """How often it has begun to serve: each interruption ends an epoch."""


class EngineSlot:
    """The pool's record of one engine: its state, its calls, and their progress."""

    def __init__(self, engine: Engine, now: float) -> None:
        self.engine = engine
        self.state = EngineState.JOINING
        self.weight_version = -1
        self.error: Exception | None = None
        self.strikes: deque[float] = deque()
        self.back_pressure = BackPressure()
        self.refusals = RequestRefusals()
        self.pause: asyncio.TimerHandle | None = None
        """Ends the pause in which it gets no calls, because it asked for fewer."""
        self.newcomer = False
        """Whether it joins a running job and has not yet loaded its weights."""
        self.reserved = False
        """Whether it serves evaluations only."""
        self.restart_count = 0
        self.has_answered = False
        """Whether it has sent a token since it was started."""
        self.epoch = 0
        self.num_flushes = 0
        """Number of flushes of the prefix cache; an `in_place` update does not flush it."""
        self.prefilling: dict[Lease, None] = {}
        """Calls that have not received a token, in the order in which they were sent."""
        self.streaming: dict[Lease, None] = {}
        """Calls that have received tokens, the one that has been silent longest first."""
        self.recompute_tokens = 0
        """Tokens of the calls that the engine recomputes after a flush (`retract`), until one continues."""
        self.bounded_requests: set[BoundedRequest] = set()
        """Requests that are not calls: they expire when the engine is quarantined."""
        self.empty = asyncio.Event()
        self.empty.set()
        self.progress_s = now
        self.decode_s = now
        self.idle_since: float | None = now
        self.idle_s = 0.0

    @property
    def num_calls(self) -> int:
        """Number of open calls."""
        return len(self.prefilling) + len(self.streaming)

    def calls(self) -> list[Lease]:
        """Return the open calls."""
        return [*self.streaming, *self.prefilling]

    @property
    def snapshot(self) -> EngineSnapshot:
        """Its state and what it serves."""
        return EngineSnapshot(
            state=self.state,
            weight_version=self.weight_version,
            restart_count=self.restart_count,
            epoch=self.epoch,
        )

    @property
    def needs_repair(self) -> bool:
        """Whether only `repair` can make it serve (again)."""
        return self.state is EngineState.QUARANTINED or (self.newcomer and self.state is EngineState.JOINING)

    @property
    def lent(self) -> bool:
        """Whether it is lent to an evaluation and serves rollouts again afterwards."""
        return self.state is EngineState.EVALUATING and not self.reserved

    def drop_requests(self, kind: type[EngineError], why: str) -> None:
        """End its calls with errors of a kind, and the other requests that wait for it."""
        for call in self.calls():
            call.drop(kind(why))  # an error of its own: raised, it holds the frames of its call
        for request in self.bounded_requests:
            request.expire()

    @property
    def silent_call(self) -> Lease | None:
        """The streaming call that has been silent longest, of those that receive no routing payload."""
        return next((call for call in self.streaming if call.is_judged), None)

    @property
    def queued_call(self) -> Lease | None:
        """The oldest call that has received nothing."""
        return next((call for call in self.prefilling if call.is_judged), None)

    def end_idle_time(self, now: float) -> None:
        """Count the time without calls, if there was any, as idle."""
        if self.idle_since is not None:
            self.idle_s += now - self.idle_since
            self.idle_since = None

    def load(self, prefill_tokens: int, silent_holders: Set[LeaseHolder]) -> EngineLoad:
        """Return its load.

        Args:
            prefill_tokens: Tokens that wait there for their call's first token.
            silent_holders: The processes whose `LeaseHolder.is_silent` is true.
        """
        silent, queued = self.silent_call, self.queued_call
        return EngineLoad(
            calls=self.num_calls,
            progress_s=self.progress_s,
            decode_s=self.decode_s,
            prefill_tokens=prefill_tokens + self.recompute_tokens,
            silent_since_s=silent.heard_s if silent is not None else None,
            overtaken_s=queued.overtaken_s if queued is not None else None,
            unobserved=bool(silent_holders) and any(call.holder in silent_holders for call in self.calls()),
            has_answered=self.has_answered,
        )


class BoundedRequest:
    """A request to an engine that is not a call, and its time limit.

    The engine may have to send a routing payload first, or to end calls. What it has sent to another process
    is known once that has reported, so the limit waits for these reports.
    """

    def __init__(self, slot: EngineSlot, limit: asyncio.Timeout, limit_s: float, wait: waiting) -> None:
        """Begin with a limit that begins now.

        Args:
            slot: The engine.
            limit: Ends the request.
            limit_s: How long it may take.
            wait: The wait for it.
        """
        self._slot = slot
        self._limit = limit
        self._limit_s = limit_s
        self._wait = wait
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._begin_limit()

    @property
    def due_s(self) -> float | None:
        """When the limit is over, by the event loop's clock; None while it is suspended."""
        return None if self._timer is None else self._timer.when()

    def expire(self) -> None:
        """End the request now, as if it were over its limit."""
        is_over = self._is_over or self._limit.expired()  # the stall doctor may have ended it
        self.close()
        if not is_over:
            self._limit.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """End the limit: the request has ended."""
        self._is_over = True
        self._stop_timer()

    def extend(self) -> None:
        """Let the limit begin again, unless it is suspended or over."""
        if self._timer is not None:
            self._begin_limit()
            self._wait.renew()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the limit, unless it is over, while the request waits for others than the engine."""
        if self._timer is None:
            yield
            return
        self._stop_timer()
        try:
            yield
        finally:
            if not self._is_over:
                self._begin_limit()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin_limit(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._end_limit, {})

    def _end_limit(self, reported: Mapping[LeaseHolder, int]) -> None:
        """Expire, once all processes that receive payloads of the engine, or are silent, have reported since.

        Args:
            reported: The number of their reports when it was over; empty at that moment.
        """
        waited = [call for call in self._slot.calls() if call.receives_payload or call.is_unobserved]
        holders = {call.holder for call in waited if call.holder is not None}
        reported = reported or {holder: holder.num_reports for holder in holders}
        if any(reported.get(holder) == holder.num_reports for holder in holders):
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._end_limit, reported)
            self._wait.renew()
        else:
            self.expire()


class CachedPrefix(msgspec.Struct, frozen=True):
    """The sticky engine of a trajectory, that of its last call, and the tokens it has cached."""

    engine_id: str
    restart_count: int
    num_flushes: int
    tokens: int


class EngineFailureListener(Protocol):
    """Is notified of engines and calls that fail: the pool."""

    def record_strike(self, engine_id: str, error: EngineError) -> None:
        """Record an implausible answer or a lost call."""
        ...

    def quarantine_engine(self, engine_id: str, error: Exception, *, wrong_weights: bool = False) -> None:
        """Quarantine an engine that failed, or whose answer is of other weights."""
        ...

    def record_back_pressure(self, engine_id: str, error: EngineBusy) -> None:
        """Record that an engine asked for fewer calls."""
        ...

    def record_refused_request(self, engine_id: str, trajectory_id: str, error: RequestRefused) -> bool:
        """Record that an engine refused a request as wrong; return whether any other would refuse it too."""
        ...

    def record_local_shortage(self, error: LocalShortage) -> None:
        """Record that this process could not make a call."""
        ...


class LeaseListener(Protocol):
    """Is notified of the progress of a call: the dispatcher."""

    def record_first_token(self, lease: Lease, waited_s: float) -> None:
        """Record that the engine has prefilled the call."""
        ...

    def record_recomputed_tokens(self, tokens: int, cause: Recomputed) -> None:
        """Record that the call prefilled tokens which had been computed before."""
        ...


class Lease:
    """The right to make one call on one engine; returned when the block of `EngineCalls.lease` ends."""

    slot: EngineSlot
    """The pool's record of the engine that the call was assigned to; not there before."""

    def __init__(
        self,
        listener: LeaseListener,
        failures: EngineFailureListener,
        clock: Callable[[], float],
        key: str,
        tokens: int,
        prompt: int,
        cached_prefix: CachedPrefix | None,
    ) -> None:
        """Describe the call; the dispatcher calls `place` when an engine has capacity.

        Args:
            listener: Notified of the call's progress.
            failures: Notified when the call or its engine fails.
            clock: Monotonic seconds.
            key: Trajectory id.
            tokens: Tokens the call will hold at most, prompt and answer.
            prompt: Of these, tokens of the prompt.
            cached_prefix: What the engine of the trajectory's last call has cached.
        """
        self.key = key
        self.tokens = tokens
        self.prompt = prompt
        self.cached_prefix = cached_prefix
        self.prefill_tokens = 0
        self.cause: Recomputed | None = None
        """Why the cached prefix must be prefilled again, None while it is usable."""
        self.restart_count = self.epoch = self.num_flushes = -1
        """Counters of the engine when the call began."""
        self.number = -1
        self.received = 0
        """Number of tokens received."""
        self.asked_s = clock()
        self.heard_s = self.asked_s
        self.overtaken_s: float | None = None
        self.receives_payload = False
        """Whether its routing payload arrives, or waits to be read: `PayloadGate` bounds the time of both."""
        self.placed = False
        """Whether the call has an engine."""
        self.withdrawn = False
        """Whether the call is not wanted any more, and has no engine yet."""
        self.holder: LeaseHolder | None = None
        """The other process that makes the call."""
        self.wait: waiting | None = None
        """The wait for its call."""
        self.on_drop: Callable[[EngineError], None] | None = None
        """Called when its call is dropped, with the error."""
        self._listener = listener
        self._failures = failures
        self._clock = clock
        self._waiter: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._cancellations = 0
        self._dropped: EngineError | None = None

    def place(self, slot: EngineSlot, number: int, prefill_tokens: int, cause: Recomputed | None) -> None:
        """Assign the call to an engine."""
        self.slot, self.number, self.prefill_tokens, self.cause = slot, number, prefill_tokens, cause
        self.placed = True
        self.restart_count, self.epoch = slot.restart_count, slot.epoch
        self.num_flushes = slot.num_flushes
        now = self.heard_s = self._clock()
        if not slot.num_calls:
            slot.progress_s = now  # an idle engine has nothing to send
        slot.prefilling[self] = None
        slot.empty.clear()

    @property
    def engine(self) -> Engine:
        """The engine to call."""
        return self.slot.engine

    @property
    def weight_version(self) -> int:
        """The version the engine serves now; it can change during the call unless updates abort."""
        return self.slot.weight_version

    @property
    def is_unobserved(self) -> bool:
        """Whether the process that makes the call is silent."""
        return self.holder is not None and self.holder.is_silent

    @property
    def is_judged(self) -> bool:
        """Whether its silence says something about the engine."""
        return not (self.receives_payload or self.is_unobserved)

    @property
    def interrupted(self) -> bool:
        """Whether the engine stopped serving after the lease was given, which explains an abort."""
        slot = self.slot
        return slot.state is not EngineState.SERVING or (slot.restart_count, slot.epoch) != (
            self.restart_count,
            self.epoch,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk | Finish, None]:
        """Stream the tokens and the end of the call, as `Engine.generate` does.

        Raises:
            EngineError: When the call or its engine failed, or the call was dropped. The failure has been
                reported: the caller keeps the chunks it received and asks for another lease.
            VersionMismatch: An `EngineError` after which the caller discards the chunks: they are of unknown
                weights.
            EngineBusy: An `EngineError`: the engine takes no call now, or refuses the request as wrong and is
                not believed.
            RequestRefused: When the engine refuses the request as wrong.
        """
        if self.interrupted:  # nothing is sent under a lease whose engine has stopped serving
            yield Finish(reason="abort", version_spans=())
            return
        engine_id = self.engine.engine_id
        request = msgspec.structs.replace(request, weight_version=self.weight_version)
        stream: Any = self.engine.generate(request)
        wait = waiting("first chunk", engine_id)
        try:
            try:
                async with wait, aclosing(stream):
                    self._await_event()
                    async for event in stream:
                        self._waiter = None
                        if isinstance(event, Chunk):
                            self.record_chunk(len(event.token_ids))
                            wait.renew("chunk")
                        elif isinstance(event, PayloadProgress):
                            self.record_payload()
                            wait.renew("chunk")
                            self._await_event()
                            continue
                        else:
                            self.record_finish(len(request.input_ids), event)
                        yield event
                        self._await_event()
            finally:
                self._waiter = None
        except asyncio.CancelledError:
            if self._is_cancelled_by_drop():
                assert self._dropped is not None
                raise self._dropped from None
            raise
        except CallLost as error:
            if error is not self._dropped:
                self._failures.record_strike(engine_id, error)
            raise
        except EngineBusy as error:
            if not self.interrupted:  # a refusal of an earlier epoch says nothing about this one
                self._failures.record_back_pressure(engine_id, error)
            raise
        except RequestRefused as error:
            if self.interrupted or not self._failures.record_refused_request(engine_id, self.key, error):
                raise EngineBusy(str(error)) from error
            raise
        except LocalShortage as error:
            self._failures.record_local_shortage(error)
            raise
        except EngineError as error:
            if error is not self._dropped:
                wrong_weights = isinstance(error, VersionMismatch)
                self._failures.quarantine_engine(engine_id, error, wrong_weights=wrong_weights)
            raise

    def excuse_silence(self) -> None:
        """Judge the call's silence from now on: the process that makes it was silent itself."""
        slot = self.slot
        self.heard_s = slot.progress_s = self._clock()
        self.overtaken_s = None

    def abandon(self) -> None:
        """Judge the engine from now on: the process that makes the call can no longer do that."""
        self.excuse_silence()
        for request in self.slot.bounded_requests:
            request.extend()

    def record_strike(self, error: EngineError) -> None:
        """Report an implausible answer; an engine that gives several is quarantined."""
        self._failures.record_strike(self.engine.engine_id, error)

    def drop(self, error: EngineError) -> None:
        """End the call now; the caller has dealt with the engine.

        Args:
            error: What the call raises. `VersionMismatch` says that its tokens are of unknown weights.
        """
        if self._dropped is not None:
            return
        self._dropped = error
        if self.on_drop is not None:
            self.on_drop(error)
        if self._waiter is not None:
            self._cancelled = True
            self._waiter.cancel()

    # A call is dropped as `asyncio.timeout` ends a block: by a cancellation that is then uncancelled. That
    # class itself, created for each chunk, would be most of what a chunk costs here.

    def _await_event(self) -> None:
        """Let a drop cancel the current task until the next event arrives."""
        if self._dropped is not None:
            raise self._dropped
        self._waiter = task = asyncio.current_task()
        assert task is not None
        self._cancellations = task.cancelling()

    def _is_cancelled_by_drop(self) -> bool:
        """Whether a drop alone caused the cancellation, which is then uncancelled."""
        task = asyncio.current_task()
        return self._cancelled and task is not None and task.uncancel() <= self._cancellations

    def record_chunk(self, tokens: int) -> None:
        """Record that tokens of the call have arrived."""
        slot, now = self.slot, self._clock()
        if self.wait is not None:
            self.wait.renew("chunk")
        self.received += tokens
        self.heard_s = slot.progress_s = now
        slot.recompute_tokens = 0
        if self in slot.streaming:
            del slot.streaming[self]  # moves it to the end
            slot.streaming[self] = None
            slot.decode_s = now
            return
        self._record_prefilled()

    def _record_prefilled(self) -> None:
        """Record that the engine has accepted the call and prefilled it."""
        slot, now = self.slot, self._clock()
        del slot.prefilling[self]
        slot.streaming[self] = None
        oldest = slot.queued_call
        if oldest is not None and oldest.number < self.number and oldest.overtaken_s is None:
            oldest.overtaken_s = now
        self._listener.record_first_token(self, now - self.asked_s)

    def record_payload(self) -> None:
        """Record that a piece of the call's routing payload has arrived."""
        self.receives_payload = True
        self.slot.progress_s = self._clock()
        for request in self.slot.bounded_requests:
            request.extend()

    def record_finish(self, prompt: int, finish: Finish) -> None:
        """Record the end of a call of `prompt` tokens."""
        self.slot.progress_s = self._clock()
        if self in self.slot.prefilling and finish.reason != "abort":
            self._record_prefilled()  # it was a call for scores or routing rows
        if self.cached_prefix is None or (finish.reason == "abort" and not self.received):
            return  # an engine that ends a queued call does not report what it had cached of it
        again = min(prompt, self.cached_prefix.tokens) - finish.cached_tokens
        if again > 0:
            self._listener.record_recomputed_tokens(again, self.cause or "evicted")
