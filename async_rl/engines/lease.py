"""One call on one engine, and what all calls of an engine say about it.

```
 placed ──► prefilling ──first chunk──► streaming ──finish──► over
              └──────────── the engine failed, or the call was dropped ───┘
```

A lease is the only way to an engine's `generate`. Its stream is passed on as it comes; on the way the engine
is timed (`EngineLoad`), what it prefilled again is counted, and what fails is held against it. A call can be
dropped from outside at any moment, whatever it waits for: so calls leave an engine that no longer answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from enum import StrEnum
from typing import Any, Literal, Protocol

import msgspec

from async_rl.engine_protocol import Chunk, Engine, Finish, GenerateRequest
from async_rl.errors import CallLost, EngineError
from async_rl.runtime.waits import waiting

Recomputed = Literal["update", "failover", "moved", "evicted"]
"""Why tokens are prefilled again; the label of `prefilled_again_tokens_total`.

update: the engine has forgotten them for new weights.  failover: their engine failed.
moved: their engine was too busy.  evicted: it had no memory for them, or keeps no cache.
"""


class EngineState(StrEnum):
    """Where an engine stands; see the diagram of `pool`."""

    JOINING = "joining"
    SERVING = "serving"
    UPDATING = "updating"
    EVALUATING = "evaluating"
    DRAINING = "draining"
    QUARANTINED = "quarantined"


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the calls of an engine tell of its health. Times are of the pool's clock."""

    calls: int
    progress_s: float
    """When anything last came from it, or when it began to have calls, or to serve."""
    decode_s: float
    """When a call that was streaming already went on."""
    prefill_tokens: int
    """Tokens it has to prefill before its calls can go on."""
    silent_since_s: float | None
    """Of the streaming call that has been silent for longest."""
    overtaken_s: float | None
    """When the oldest call without a token was overtaken by one that was sent later."""


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's state and what it serves; equal at two moments when nothing happened to it in between."""

    state: EngineState
    weight_version: int
    restart_count: int
    """Counts restarts: what an earlier life had in its prefix cache is gone."""
    epoch: int
    """Counts flushes of the prefix cache."""


class EngineSlot:
    """What the pool knows of one engine."""

    def __init__(self, engine: Engine, now: float) -> None:
        self.engine = engine
        self.state = EngineState.JOINING
        self.weight_version = -1
        self.error: Exception | None = None
        self.strikes: deque[float] = deque()
        self.newcomer = False
        """It joins a running job, and has never been brought to its weights."""
        self.reserved = False
        """It serves evaluations and nobody else."""
        self.restart_count = 0
        self.epoch = 0
        self.prefilling: dict[Lease, None] = {}
        """Calls without a token, in the order in which they were sent."""
        self.streaming: dict[Lease, None] = {}
        """Calls with tokens, the one that has been silent for longest first."""
        self.recompute_tokens = 0
        """Of calls that the engine itself starts anew (`retract`), until one of them goes on."""
        self.attended: set[asyncio.Timeout] = set()
        """Waits for the engine that are no calls: they end when it is quarantined."""
        self.empty = asyncio.Event()
        self.empty.set()
        self.progress_s = now
        self.decode_s = now
        self.idle_since: float | None = now
        self.idle_s = 0.0

    @property
    def num_calls(self) -> int:
        """Calls that are open."""
        return len(self.prefilling) + len(self.streaming)

    def calls(self) -> list[Lease]:
        """Those calls."""
        return [*self.streaming, *self.prefilling]

    @property
    def standing(self) -> EngineSnapshot:
        """Where it stands."""
        return EngineSnapshot(
            state=self.state,
            weight_version=self.weight_version,
            restart_count=self.restart_count,
            epoch=self.epoch,
        )

    @property
    def needs_repair(self) -> bool:
        """Whether it serves nobody until somebody brings it (back)."""
        return self.state is EngineState.QUARANTINED or (self.newcomer and self.state is EngineState.JOINING)

    def vitals(self, prefill_tokens: int) -> EngineLoad:
        """What the calls say now."""
        silent = next(iter(self.streaming), None)
        waiting = next(iter(self.prefilling), None)
        return EngineLoad(
            calls=self.num_calls,
            progress_s=self.progress_s,
            decode_s=self.decode_s,
            prefill_tokens=prefill_tokens + self.recompute_tokens,
            silent_since_s=silent.heard_s if silent is not None else None,
            overtaken_s=waiting.overtaken_s if waiting is not None else None,
        )


class CachedPrefix(msgspec.Struct, frozen=True):
    """Where a trajectory's last call was, and what the engine holds of it."""

    engine_id: str
    restart_count: int
    epoch: int
    tokens: int


class LeaseListener(Protocol):
    """What a lease reports to: the pool."""

    def strike(self, engine_id: str, error: EngineError) -> None:
        """An answer that cannot be right, or a call that came to nothing."""
        ...

    def quarantine(self, engine_id: str, error: Exception) -> None:
        """The engine failed."""
        ...

    def first_token(self, lease: Lease, waited_s: float) -> None:
        """The call has been prefilled."""
        ...

    def recomputed(self, tokens: int, cause: Recomputed) -> None:
        """The call prefilled tokens that had been computed before."""
        ...


class Lease:
    """The right to make one call on one engine; given back when the block of `EnginePool.lease` ends."""

    def __init__(
        self,
        desk: LeaseListener,
        clock: Callable[[], float],
        key: str,
        tokens: int,
        prompt: int,
        home: CachedPrefix | None,
    ) -> None:
        """Ask for a place; the pool calls `place` when there is one.

        Args:
            desk: Where to report.
            clock: Monotonic seconds.
            key: Trajectory id.
            tokens: Tokens the call will hold at most, prompt and answer.
            prompt: Of these, tokens of the prompt.
            home: Of the trajectory's last call.
        """
        self.key = key
        self.tokens = tokens
        self.prompt = prompt
        self.home = home
        self.prefill_tokens = 0
        self.cause: Recomputed | None = None
        """Why what the home held must be prefilled again, None while it is there."""
        self.restart_count = self.epoch = -1
        """Of the engine when the call began."""
        self.number = -1
        self.received = 0
        """Tokens that came."""
        self.asked_s = clock()
        self.heard_s = self.asked_s
        self.overtaken_s: float | None = None
        self._desk = desk
        self._clock = clock
        self._slot: EngineSlot | None = None
        self._waiter: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._cancellations = 0
        self._dropped: EngineError | None = None

    def place(self, slot: EngineSlot, number: int, prefill_tokens: int, cause: Recomputed | None) -> None:
        """It is the engine's from now on."""
        self._slot, self.number, self.prefill_tokens, self.cause = slot, number, prefill_tokens, cause
        self.restart_count, self.epoch = slot.restart_count, slot.epoch
        now = self.heard_s = self._clock()
        if not slot.num_calls:
            slot.progress_s = now  # what an idle engine did not say is no silence
        slot.prefilling[self] = None
        slot.empty.clear()

    @property
    def slot(self) -> EngineSlot:
        """Of the engine that it was placed on."""
        assert self._slot is not None, "the lease has no engine yet"
        return self._slot

    @property
    def placed(self) -> bool:
        """Whether it has an engine."""
        return self._slot is not None

    @property
    def engine(self) -> Engine:
        """The engine to call."""
        return self.slot.engine

    @property
    def weight_version(self) -> int:
        """The version the engine serves now; it can move during the call unless updates abort."""
        return self.slot.weight_version

    @property
    def interrupted(self) -> bool:
        """Whether the engine has stopped serving since the lease was given, so that an abort is ours."""
        slot = self.slot
        return slot.state is not EngineState.SERVING or (slot.restart_count, slot.epoch) != (
            self.restart_count,
            self.epoch,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk | Finish, None]:
        """Stream the call, as `Engine.generate` does.

        Raises:
            EngineError: When the call or its engine failed, or it was dropped. It has been reported: the
                caller keeps the chunks it has seen and asks for another lease.
        """
        engine_id = self.engine.engine_id
        stream: Any = self.engine.generate(request)
        wait = waiting("first chunk", engine_id)
        try:
            try:
                async with wait, aclosing(stream):
                    self._await_event()
                    async for event in stream:
                        self._waiter = None
                        if isinstance(event, Chunk):
                            self._hear(len(event.token_ids))
                            wait.renew("chunk")
                        else:
                            self._finish(len(request.input_ids), event)
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
                self._desk.strike(engine_id, error)
            raise
        except EngineError as error:
            self._desk.quarantine(engine_id, error)
            raise

    def suspicious(self, error: EngineError) -> None:
        """Report an answer that cannot be right; an engine that gives several is quarantined."""
        self._desk.strike(self.engine.engine_id, error)

    def drop(self, why: str) -> None:
        """End the call now, with what has come of it; whoever decides that has dealt with the engine."""
        if self._dropped is not None:
            return
        self._dropped = CallLost(why)
        if self._waiter is not None:
            self._cancelled = True
            self._waiter.cancel()

    # A call is dropped as `asyncio.timeout` ends a block: by a cancellation that is taken back. That class
    # itself, made anew for each chunk, would be most of what a chunk costs here.

    def _await_event(self) -> None:
        """From here to the next event, a drop cancels the task that waits for it."""
        if self._dropped is not None:
            raise self._dropped
        self._waiter = task = asyncio.current_task()
        assert task is not None
        self._cancellations = task.cancelling()

    def _is_cancelled_by_drop(self) -> bool:
        """Whether a cancellation is ours alone; it is taken back."""
        task = asyncio.current_task()
        return self._cancelled and task is not None and task.uncancel() <= self._cancellations

    def _hear(self, tokens: int) -> None:
        slot, now = self.slot, self._clock()
        self.received += tokens
        self.heard_s = slot.progress_s = now
        slot.recompute_tokens = 0
        if self in slot.streaming:
            del slot.streaming[self]  # to the end
            slot.streaming[self] = None
            slot.decode_s = now
            return
        del slot.prefilling[self]
        slot.streaming[self] = None
        oldest = next(iter(slot.prefilling), None)
        if oldest is not None and oldest.number < self.number and oldest.overtaken_s is None:
            oldest.overtaken_s = now
        self._desk.first_token(self, now - self.asked_s)

    def _finish(self, prompt: int, finish: Finish) -> None:
        self.slot.progress_s = self._clock()
        if self.home is None or (finish.reason == "abort" and not self.received):
            return  # an engine that ends a call in its queue does not say what it had of it
        again = min(prompt, self.home.tokens) - finish.cached_tokens
        if again > 0:
            self._desk.recomputed(again, self.cause or "evicted")
