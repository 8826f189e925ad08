"""One call on one engine, and what a process knows of each engine from its calls.

```
 placed ──► prefilling ──first chunk──► streaming ──finish──► ended
              └──────────── the engine failed, or the call was dropped ───┘
```

All calls of `Engine.generate` go through a lease. It passes the stream on as it arrives, and meanwhile times
the engine (`EngineSlot`), counts the tokens that were prefilled again, and reports failures. The pool can
drop a call at any moment, whatever the call waits for: so calls leave an engine that no longer answers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from enum import StrEnum
from typing import Any, Literal, Protocol

import msgspec

from async_rl.engine_protocol import Chunk, Engine, Finish, GenerateRequest, PayloadProgress
from async_rl.engines.back_pressure import BackPressure
from async_rl.engines.cache_limit import CacheLimit, CallSizes, LimitReason
from async_rl.engines.request_refusals import RequestRefusals
from async_rl.errors import (
    CallLost,
    EngineBusy,
    EngineError,
    LocalShortage,
    RequestRefused,
    VersionMismatch,
)
from async_rl.runtime.waits import waiting

Recomputed = Literal["update", "failover", "moved", "evicted"]
"""Why tokens are prefilled again; the label of `prefilled_again_tokens_total`.

update: the engine flushed them for new weights.  failover: their engine failed.
moved: their engine was too busy.  evicted: it had no memory for them, or keeps no cache.
"""


class EngineState(StrEnum):
    """The state of an engine; `pool` has the diagram. A rollout worker knows three of them."""

    JOINING = "joining"
    SERVING = "serving"
    UPDATING = "updating"
    EVALUATING = "evaluating"
    DRAINING = "draining"
    QUARANTINED = "quarantined"


class EngineGrant(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The right of a process to call an engine, in one epoch of it."""

    engine_id: str
    weight_version: int
    """The version that was verified on it."""
    restart_count: int
    """Number of restarts; each empties the prefix cache."""
    epoch: int
    """How often it has begun to serve: each interruption ends an epoch."""
    num_flushes: int
    """Number of flushes of the prefix cache; an `in_place` update does not flush it."""
    num_holders: int = 1
    """How many processes may call it: each prefills its share of tokens at once."""
    has_others: bool = False
    """Whether other engines serve the same model."""
    max_calls: int | None = None
    """The most calls that all holders together give it at once; None for any number."""
    cache_tokens: int | None = None
    """Tokens of the KV cache that the calls of all holders are to fit into; None: they need not."""


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the calls of an engine say about its load. Times are of the process's clock."""

    calls: int
    tokens: int
    """The most that its calls can hold."""
    progress_s: float
    """When the engine last sent anything, got its first call after idle time, or began to serve."""
    prefill_tokens: int
    """Tokens that the engine has to prefill before its calls can continue."""
    accepted_s: float = -math.inf
    """When it last sent the first token of a call."""
    heard_s: float = -math.inf
    """When it last sent anything."""
    unobserved: bool = False
    """Whether a process that makes some of the calls is silent, so that nothing is known of them."""
    decode_s: float = -math.inf
    """When a call that was already streaming last received tokens."""
    silent_since_s: float | None = None
    """When the streaming call that has been silent longest last received tokens."""
    overtaken_s: float | None = None
    """When a later call received its first token before the oldest call without one."""
    has_answered: bool = True
    """Whether it has sent a token since it was started."""
    max_calls: float = math.inf
    """The most calls that it is given at once."""
    limited_by: LimitReason = "setting"
    """Why it is given no more."""


class EngineSlot:
    """An engine as a process that may call it knows it: its calls, and their progress."""

    def __init__(self, engine: Engine, grant: EngineGrant, sizes: CallSizes, now: float) -> None:
        self.engine = engine
        self.grant = grant
        self.cache = CacheLimit(sizes)
        """How many calls its KV cache holds."""
        self.state = EngineState.JOINING
        """Nothing is sent to it unless it serves."""
        self.on_busy: Callable[[bool], None] = lambda busy: None
        """Called when it gets its first call, and when its last one has ended."""
        self.back_pressure = BackPressure()
        self.refusals = RequestRefusals()
        self.pause: asyncio.TimerHandle | None = None
        """Ends the pause in which it gets no calls, because it asked for fewer."""
        self.has_answered = False
        """Whether it has sent a token since it was started."""
        self.prefilling: dict[Lease, None] = {}
        """Calls that have not received a token, in the order in which they were sent."""
        self.streaming: dict[Lease, None] = {}
        """Calls that have received tokens, the one that has been silent longest first."""
        self.recompute_tokens = 0
        """Tokens of the calls that the engine recomputes after a flush (`retract`), until one continues."""
        self.heard_s = -math.inf
        """When it last sent anything."""
        self.progress_s = now
        self.decode_s = now
        """When a call that was already streaming last received tokens."""

    @property
    def num_calls(self) -> int:
        """Number of open calls."""
        return len(self.prefilling) + len(self.streaming)

    @property
    def is_open(self) -> bool:
        """Whether it may be called."""
        return self.state is EngineState.SERVING

    def calls(self) -> list[Lease]:
        """Return the open calls."""
        return [*self.streaming, *self.prefilling]

    @property
    def silent_call(self) -> Lease | None:
        """The streaming call that has been silent longest, of those that receive no routing payload."""
        return next((call for call in self.streaming if not call.receives_payload), None)

    @property
    def queued_call(self) -> Lease | None:
        """The oldest call that has received nothing."""
        return next((call for call in self.prefilling if not call.receives_payload), None)


class CachedPrefix(msgspec.Struct, frozen=True):
    """The sticky engine of a trajectory, that of its last call, and the tokens it has cached."""

    engine_id: str
    restart_count: int
    num_flushes: int
    tokens: int


class EngineJudge(Protocol):
    """Is told what calls say against engines: the pool, or in a rollout worker its reports to the driver."""

    def record_strike(self, engine_id: str, error: EngineError) -> None:
        """Record an implausible answer or a lost call."""
        ...

    def quarantine_engine(self, engine_id: str, error: Exception, *, wrong_weights: bool = False) -> None:
        """Quarantine an engine that failed, or whose answer is of other weights."""
        ...

    def doubts_refusals(self, engine_id: str) -> bool:
        """Return whether an engine that refuses a request as wrong may be wrong itself."""
        ...

    def record_doubted_refusals(self, engine_id: str, since_s: float, error: EngineError) -> None:
        """Record that an engine refuses all requests, since `since_s`; others may accept theirs."""
        ...

    def record_payload(self, engine_id: str) -> None:
        """Record that a piece of a routing payload has arrived."""
        ...


class BackPressureListener(Protocol):
    """Is told why engines take no calls of this process: `GrantedEngines`."""

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

    @property
    def is_valid(self) -> bool:
        """Whether this process may call engines now: in a rollout worker, grants expire."""
        ...

    def record_first_token(self, lease: Lease, waited_s: float) -> None:
        """Record that the engine has prefilled the call."""
        ...

    def record_recomputed_tokens(self, tokens: int, cause: Recomputed) -> None:
        """Record that the call prefilled tokens which had been computed before."""
        ...


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a call needs of an engine."""

    key: str
    """The trajectory."""
    tokens: int
    """Tokens that the call will hold at most, prompt and answer."""
    prompt: int
    """Of these, tokens of the prompt."""
    cached_prefix: CachedPrefix | None
    """What the engine of the trajectory's last call has cached."""
    group: str = ""
    """Trajectories of a group have the same prompt; empty: there is none."""
    asked_s: float


class _Drop:
    """The early end of a call by an error, whatever it waits for.

    It works as `asyncio.timeout` does: by a cancellation that is then uncancelled. That class itself, created
    for each chunk, would be most of what a chunk costs here.
    """

    __slots__ = ("_cancellations", "_cancelled", "_is_waiting", "_task", "error")

    def __init__(self) -> None:
        self.error: EngineError | None = None
        self._task: asyncio.Task[Any] | None = None
        self._is_waiting = False
        self._cancelled = False
        self._cancellations = 0

    def begin(self) -> None:
        """Let the current task wait for events."""
        self._task = task = asyncio.current_task()
        assert task is not None
        self._cancellations = task.cancelling()

    def end(self, error: EngineError) -> None:
        """Raise an error where the next event is awaited; only the first counts."""
        if self.error is not None:
            return
        self.error = error
        if self._is_waiting and self._task is not None:
            self._cancelled = True
            self._task.cancel()

    def await_event(self) -> None:
        """Let `end` cancel the task until the next event arrives."""
        if self.error is not None:
            raise self.error
        self._is_waiting = True

    def end_wait(self) -> None:
        """Let `end` cancel nothing: the task does something else."""
        self._is_waiting = False

    def cause_of_cancellation(self) -> EngineError | None:
        """Return the error if it alone caused the cancellation, which is then uncancelled."""
        ours = self._cancelled and self._task is not None and self._task.uncancel() <= self._cancellations
        return self.error if ours else None


class Lease:
    """The right to make one call on one engine; returned when the block of `LeaseDispatcher.lease` ends."""

    def __init__(
        self,
        request: CallRequest,
        slot: EngineSlot,
        listener: LeaseListener,
        failures: BackPressureListener,
        judge: EngineJudge,
        clock: Callable[[], float],
        *,
        number: int,
        prefill_tokens: int,
        own_prompt: int,
        cause: Recomputed | None,
    ) -> None:
        """Assign a call to an engine.

        Args:
            request: What was asked for.
            slot: The engine, which counts the call from now on.
            listener: Notified of the call's progress.
            failures: Notified when the engine takes no call.
            judge: Notified when the call or its engine fails.
            clock: Monotonic seconds.
            number: Greater than that of all calls before.
            prefill_tokens: Tokens that the engine has to prefill before the first new one.
            own_prompt: Tokens of the prompt that the cache holds for this call alone, not for its siblings.
            cause: Why the cached prefix must be prefilled again; None while it is usable.
        """
        self.request = request
        self.slot = slot
        self.grant = slot.grant
        """The grant of the engine when the call began."""
        self.number = number
        self.prefill_tokens = prefill_tokens
        self.own_prompt = own_prompt
        self.cause = cause
        self.received = 0
        """Number of tokens received."""
        self.heard_s = now = clock()
        self._epoch = slot.grant.epoch
        """The engine's when the call last reported a retraction."""
        self.overtaken_s: float | None = None
        self.receives_payload = False
        """Whether its routing payload arrives, or waits to be read: `PayloadGate` bounds the time of both."""
        self._listener = listener
        self._failures = failures
        self._judge = judge
        self._clock = clock
        self._drop = _Drop()
        if not slot.num_calls:
            slot.progress_s = now  # an idle engine has nothing to send
        slot.prefilling[self] = None

    @property
    def engine(self) -> Engine:
        """The engine to call."""
        return self.slot.engine

    @property
    def weight_version(self) -> int:
        """The version the engine serves now; it can change during the call unless updates abort."""
        return self.slot.grant.weight_version

    @property
    def epoch_name(self) -> str:
        """The engine's restarts and epoch when the call began, for ids of requests."""
        return f"{self.grant.restart_count}.{self.grant.epoch}"

    @property
    def interrupted(self) -> bool:
        """Whether the grant has ended under which the lease was given, which explains an abort."""
        slot, began = self.slot, self.grant
        return not (
            slot.is_open
            and (slot.grant.restart_count, slot.grant.epoch) == (began.restart_count, began.epoch)
            and self._listener.is_valid  # the timer of an expiry may be late
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
                    self._drop.begin()
                    self._drop.await_event()
                    async for event in stream:
                        self._drop.end_wait()
                        if isinstance(event, Chunk):
                            if event.num_retractions:
                                self._record_retractions(event.num_retractions)
                            self.record_chunk(len(event.token_ids))
                            wait.renew("chunk")
                        elif isinstance(event, PayloadProgress):
                            self.record_payload()
                            wait.renew("chunk")
                            self._drop.await_event()
                            continue
                        else:
                            self.record_finish(len(request.input_ids), event)
                        yield event
                        self._drop.await_event()
            finally:
                self._drop.end_wait()
        except asyncio.CancelledError:
            if (error := self._drop.cause_of_cancellation()) is not None:
                raise error from None
            raise
        except CallLost as error:
            if error is not self._drop.error:
                self._judge.record_strike(engine_id, error)
            raise
        except EngineBusy as error:
            if not self.interrupted:  # a refusal of an earlier epoch says nothing about this one
                self._failures.record_back_pressure(engine_id, error)
            raise
        except RequestRefused as error:
            if self.interrupted or not self._failures.record_refused_request(
                engine_id, self.request.key, error
            ):
                raise EngineBusy(str(error)) from error
            raise
        except LocalShortage as error:
            self._failures.record_local_shortage(error)
            raise
        except EngineError as error:
            if error is not self._drop.error:
                wrong_weights = isinstance(error, VersionMismatch)
                self._judge.quarantine_engine(engine_id, error, wrong_weights=wrong_weights)
            raise

    def record_strike(self, error: EngineError) -> None:
        """Report an implausible answer; an engine that gives several is quarantined."""
        self._judge.record_strike(self.engine.engine_id, error)

    def drop(self, error: EngineError) -> None:
        """End the call now; the caller has dealt with the engine.

        Args:
            error: What the call raises. `VersionMismatch` says that its tokens are of unknown weights.
        """
        self._drop.end(error)

    def record_chunk(self, tokens: int) -> None:
        """Record that tokens of the call have arrived."""
        slot, now = self.slot, self._clock()
        self.received += tokens
        slot.cache.held_tokens += tokens
        self.heard_s = slot.heard_s = slot.progress_s = now
        slot.recompute_tokens = 0
        if self in slot.streaming:
            del slot.streaming[self]  # moves it to the end
            slot.streaming[self] = None
            slot.decode_s = now
            return
        self._record_prefilled()

    def _record_retractions(self, number: int) -> None:
        """Record that the engine has taken the memory of the call, unless a weight update has (`retract`)."""
        updates = self.slot.grant.epoch - self._epoch
        self._epoch += updates
        if number > updates and self.slot.is_open:
            self.slot.cache.record_retraction(self.own_prompt + self.received)

    def _record_prefilled(self) -> None:
        """Record that the engine has accepted the call and prefilled it."""
        slot, now = self.slot, self._clock()
        del slot.prefilling[self]
        slot.streaming[self] = None
        oldest = slot.queued_call
        if oldest is not None and oldest.number < self.number and oldest.overtaken_s is None:
            oldest.overtaken_s = now
        self._listener.record_first_token(self, now - self.request.asked_s)

    def record_payload(self) -> None:
        """Record that a piece of the call's routing payload has arrived."""
        self.receives_payload = True
        self.slot.heard_s = self.slot.progress_s = self._clock()
        self._judge.record_payload(self.engine.engine_id)

    def record_finish(self, prompt: int, finish: Finish) -> None:
        """Record the end of a call of `prompt` tokens."""
        self.slot.heard_s = self.slot.progress_s = self._clock()
        if self in self.slot.prefilling and finish.reason != "abort":
            self._record_prefilled()  # it was a call for scores or routing rows
        prefix = self.request.cached_prefix
        if prefix is None or (finish.reason == "abort" and not self.received):
            return  # an engine that ends a queued call does not report what it had cached of it
        again = min(prompt, prefix.tokens) - finish.cached_tokens
        if again > 0:
            self._listener.record_recomputed_tokens(again, self.cause or "evicted")
