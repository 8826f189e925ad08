"""A fast engine for planning: it knows how speed depends on load, and nothing of tokens.

All running calls of an engine decode in step, so one number, its *progress* (tokens decoded by a call that
ran all the time), tells how far each of them is. Something happens only when a call comes, ends, or is
interrupted: thousands of engines run in one process, and no event is spent on a token.

```
 generate ─► waiting ──a slot──► prefilling ──► decoding ──► its length is reached ─► Chunk, Finish
                ▲                (in order, decoding │
                │                 stands meanwhile)  │
                └──retract, or its cache is full─────┴──abort──► what it has ──────► Chunk, Finish
```

Its KV cache, if it has a limit, is filled as SGLang fills it: a call begins if what it feeds fits beside what
running calls hold and a share of what they may still sample. The share falls from step to step; where it was
too small, the calls that have sampled least are retracted.
Source: `PrefillAdder`, `NewTokenRatioTracker` and `ScheduleBatch.retract_decode` of SGLang 0.5.23.

The maker of the prompt decides the lengths (`mark`): the tokens themselves carry where a call stops, so
the scheduler that is being planned does not see it, as it would not in reality.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Literal

import msgspec
import numpy as np

from async_rl.engine_protocol import (
    Chunk,
    EngineAddress,
    EngineCapacity,
    EngineHealth,
    Finish,
    GenerateRequest,
    GroupInvite,
    InterruptMode,
    MemoryPart,
    RoutingPayload,
    WeightUpdate,
)
from async_rl.errors import AlignmentError
from async_rl.types import Int32Array, RoutingTrace, VersionSpan

MARKS = 4
"""Tokens that `mark` writes: the shortest prompt."""

_MAX_CACHED = 4096
"""Prefixes that an engine remembers; the least recently used go first."""

_MAX_RESERVED = 4096
_FIRST_SHARE, _LAST_SHARE, _SHARE_STEPS = 0.7, 0.098, 600
_RETRACT_STEPS = 20
"""Tokens that SGLang reserves at most for the rest of a call; their share, at first and in the end, and the
decode steps in which it falls; the steps that fit after a retraction."""

_DELIVERED_SHARE = 0.25
"""Of the cache, filled between two deliveries: some events for each call."""

_WHOLE = 1e-6
"""Tokens by which a sum of times may miss a whole one."""

_MOMENT_S = 1e-9
"""Seconds by which a timer may be early: what a sum of times is off by."""


_numbers = count()
"""Orders calls that end at the same progress."""


class EngineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast one engine is, in the tokens of the simulation."""

    slots: int = 128
    """Calls decoded together."""
    cache_tokens: int | None = None
    """Tokens that its KV cache holds; None: all."""
    scale: int = 1
    """Real tokens for each of the simulation."""
    decode_base_s: float = 0.012
    decode_per_call_s: float = 0.00006
    prefill_tokens_per_s: float = 30000.0
    prefill_call_s: float = 0.0
    """Time that the prefill of a call takes beside its tokens."""
    call_steps: float = 0.0
    """What a call takes beside its prefill and decode steps, in decode steps: HTTP, tokenizing and waits for
    steps that have begun. Interrupted calls have none."""
    update_s: float = 5.0
    """Pause for a weight update."""
    abort_call_s: float = 0.0
    """What it takes to abort a running call."""
    shares_prompts: bool = True
    """Whether siblings find their prompt in the prefix cache."""

    def step_s(self, running: int) -> float:
        """One decode step of `running` calls, seconds: base + slope · running."""
        return self.decode_base_s + self.decode_per_call_s * running

    def tokens_per_s(self, running: int) -> float:
        """Tokens of all `running` calls together, per second."""
        return running / self.step_s(running) if running else 0.0


class Usage(msgspec.Struct, kw_only=True):
    """Where an engine's time went, seconds since its start."""

    pause_s: float = 0.0
    """Interrupted and updated."""
    prefill_s: float = 0.0
    """Decoding waited for prefills."""
    empty_s: float = 0.0
    """Lost to slots without a call: time decoding, less what all slots would have needed for its tokens."""
    calls: int = 0
    first_token_s: float = 0.0
    """Of all calls together: from their arrival until they decode."""
    beside_s: float = 0.0
    """Of all calls together: what they take beside prefill and decode steps."""
    decode_s: float = 0.0
    """Of all calls together: how long they decode."""
    decoded_tokens: float = 0.0
    prefilled_tokens: int = 0
    retractions: int = 0
    """Calls whose memory was taken because the cache was full."""


def mark(
    length: int, *, stop_at: int, trajectory: int = 0, group: int = 0, shared: int | None = None
) -> Int32Array:
    """Return a prompt of this length, which tells an engine who asks, and at which position the answer ends.

    Args:
        length: Tokens, at least `MARKS`.
        stop_at: Tokens of the sequence when the turn is over; in a later turn more than before.
        trajectory: Above 0: whose prefix this is.
        group: Above 0: siblings have the same prompt.
        shared: Tokens of it; None: all of these.
    """
    token_ids = np.zeros(max(length, MARKS), np.int32)
    token_ids[:MARKS] = -stop_at, trajectory, group, length if shared is None else shared
    return token_ids


class _CoarseCall:
    __slots__ = (
        "begin",
        "budget",
        "changed",
        "delivered",
        "fed",
        "group",
        "has_left",
        "left_s",
        "prompt",
        "reason",
        "retractions",
        "sampled",
        "shared",
        "since",
        "spans",
        "target",
        "trajectory",
    )

    def __init__(self, request: GenerateRequest):
        ids = request.input_ids
        self.changed = asyncio.Event()
        self.reason: Literal["stop", "length", "abort"] | None = None  # why it has ended
        self.prompt = len(ids)
        self.trajectory, self.group, self.shared = (int(each) for each in ids[1:MARKS])
        stop_at = -int(ids.min())
        self.target = max(1, min(stop_at - len(ids), request.max_new_tokens))
        self.budget = request.max_new_tokens
        self.sampled = 0
        self.fed = 0  # tokens that its prefill brings into the cache, or finds there for itself
        self.since = 0.0  # the engine's progress when its decoding began
        self.retractions = 0  # since the last chunk
        self.delivered = 0
        self.has_left = False
        self.spans: list[VersionSpan] = []
        self.begin = 0.0  # the engine's progress when its decoding began, less what was sampled before
        self.left_s = 0.0  # of its prefill


class CoarseEngine:
    """See `protocol.Engine` and the module."""

    def __init__(self, engine_id: str, speed: EngineSpeed) -> None:
        """Start idle, at weight version 0, on the running loop's clock."""
        self.engine_id = engine_id
        self._speed = speed
        self._marks: list[tuple[float, int]] = [(0.0, 0)]  # progress at which a version began
        self._progress = 0.0
        self._moment = asyncio.get_running_loop().time()
        self._waiting: deque[_CoarseCall] = deque()
        self._prefilling: deque[_CoarseCall] = deque()
        self._decoding: dict[_CoarseCall, None] = {}
        self._ends: list[tuple[float, int, _CoarseCall]] = []  # heap of progress; calls that left are skipped
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._still = False
        self._slowdown = 1.0
        self.on_busy: Callable[[], None] = lambda: None
        """Called when it gets its first call, and when its last one has ended."""
        self._share = _FIRST_SHARE
        self._share_from = 0.0  # the progress at which it was that
        self._delivered_at = 0.0  # the progress at which all calls have delivered
        self._timer: asyncio.TimerHandle | None = None
        self._prefixes: OrderedDict[int, int] = OrderedDict()  # trajectory, or minus group: tokens
        self._usage = Usage()

    @property
    def capacity(self) -> EngineCapacity:
        """Implements `Engine.capacity`."""
        return EngineCapacity(cache_tokens=self._speed.cache_tokens, max_running=self._speed.slots)

    @property
    def address(self) -> EngineAddress | None:
        """Implements `Engine.address`."""
        return None

    def remote_call(self) -> AbstractContextManager[None]:
        """Implements `Engine.remote_call`. Simulated jobs make all calls in one process."""
        return nullcontext()

    def read_at_once(self) -> None:
        """Implements `Engine.read_at_once`. There is no connection."""

    @property
    def is_busy(self) -> bool:
        """Whether it has a call."""
        return self._calls > 0

    def slow_down(self, factor: float) -> None:
        """Let everything but updates take `factor` times as long from now on: others use its machine."""
        self._advance()
        self._slowdown = factor
        self._go_on()

    def usage(self) -> Usage:
        """Where its time went, until now."""
        self._advance()
        return msgspec.structs.replace(self._usage)

    # -- generation -------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk | Finish, None]:
        """See `Engine.generate`: everything sampled comes in one chunk, when the call ends.

        An engine whose cache has a limit also delivers whenever it has filled a part of it, so that who calls
        it knows how full it is.
        """
        call = _CoarseCall(request)
        self._calls += 1
        self._usage.calls += 1
        self._idle.clear()
        self._advance()
        self._waiting.append(call)
        self._go_on()
        if self._calls == 1:
            self.on_busy()
        try:
            while call.reason is None:
                await call.changed.wait()
                call.changed.clear()
                if call.reason is not None:
                    self._leave(call)
                    if call.reason != "abort":
                        step_s = self._speed.step_s(len(self._decoding)) * self._slowdown
                        self._usage.beside_s += self._speed.call_steps * step_s
                        await asyncio.sleep(self._speed.call_steps * step_s)
                if new := call.sampled - call.delivered:
                    chunk = Chunk.of([0] * new, [0.0] * new)
                    chunk = msgspec.structs.replace(chunk, num_retractions=call.retractions)
                    call.delivered, call.retractions = call.sampled, 0
                    yield chunk
        finally:
            if not call.has_left:
                self._leave(call)
        yield Finish(reason=call.reason, version_spans=tuple(call.spans))

    def decode_routing(self, payload: RoutingPayload) -> RoutingTrace:
        """See `Engine.decode_routing`: there is none."""
        raise AlignmentError(f"{self.engine_id} is a coarse engine and has no routing: replay is off here")

    # -- time -------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Bring everything up to now."""
        now = asyncio.get_running_loop().time()
        passed, self._moment = now - self._moment, now
        if passed <= 0.0:
            return
        usage, running = self._usage, len(self._decoding)
        usage.first_token_s += passed * (len(self._waiting) + len(self._prefilling))
        usage.decode_s += passed * running
        if self._still:
            usage.pause_s += passed
        elif self._prefilling:
            usage.prefill_s += passed
            self._prefilling[0].left_s -= passed / self._slowdown
        elif running:
            steps = passed / self._slowdown / self._speed.step_s(running)
            self._progress += steps
            usage.decoded_tokens += steps * running
            when_full_s = steps * running / self._speed.tokens_per_s(self._speed.slots) * self._slowdown
            usage.empty_s += passed - when_full_s
        else:
            usage.empty_s += passed

    def _go_on(self) -> None:
        """Fill the slots and set the timer to what comes next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._still:
            return
        while (
            self._waiting
            and len(self._decoding) + len(self._prefilling) < self._speed.slots
            and self._fits(self._waiting[0])
        ):
            self._begin(self._waiting.popleft())
        if self._prefilling:
            after_s = self._prefilling[0].left_s
        else:
            while self._ends and self._ends[0][2] not in self._decoding:
                heapq.heappop(self._ends)
            if not self._ends:
                return
            steps = min(self._ends[0][0] - self._progress, self._steps_until_full(), self._steps_to_deliver())
            after_s = steps * self._speed.step_s(len(self._decoding))
        after_s = max(after_s, 0.0) * self._slowdown
        self._timer = asyncio.get_running_loop().call_at(self._moment + after_s, self._on_time)

    def _on_time(self) -> None:
        self._advance()
        while self._prefilling and self._prefilling[0].left_s <= _MOMENT_S:
            self._decode(self._prefilling.popleft())
        if not self._prefilling:
            while self._ends and self._ends[0][0] <= self._progress + _WHOLE:
                _, _, call = heapq.heappop(self._ends)
                if call in self._decoding:
                    self._settle(call)
                    del self._decoding[call]
                    self._end(call, "stop")
            self._make_space()
            if self._steps_to_deliver() <= _WHOLE:
                self._deliver()
        self._go_on()

    def _begin(self, call: _CoarseCall) -> None:
        """Give a call its slot: feed what the cache does not hold."""
        tokens = call.prompt + call.sampled
        cached = max(self._prefixes.get(call.trajectory, 0), self._shared_tokens(call))
        call.fed = tokens - min(self._shared_tokens(call), tokens - 1)
        missing = max(1, tokens - cached)
        self._usage.prefilled_tokens += missing
        call.left_s = missing / self._speed.prefill_tokens_per_s + self._speed.prefill_call_s
        self._prefilling.append(call)
        if self._speed.shares_prompts:  # its later turns and what it had sampled are its own
            self._remember(-call.group, call.shared)  # those behind it begin when it is done

    def _decode(self, call: _CoarseCall) -> None:
        """Its prefill is done."""
        call.since = self._progress
        call.begin = self._progress - call.sampled
        self._decoding[call] = None
        heapq.heappush(self._ends, (call.begin + call.target, next(_numbers), call))

    def _shared_tokens(self, call: _CoarseCall) -> int:
        """Tokens of a call's prompt that are cached for its siblings."""
        return self._prefixes.get(-call.group, 0) if self._speed.shares_prompts else 0

    # -- cache ------------------------------------------------------------------------------------------

    @property
    def _free_tokens(self) -> float:
        if self._speed.cache_tokens is None:
            return math.inf
        held = sum(call.fed + self._progress - call.since for call in self._decoding)
        return self._speed.cache_tokens - held - sum(call.fed for call in self._prefilling)

    def _fits(self, call: _CoarseCall) -> bool:
        """Whether a waiting call can begin."""
        if self._speed.cache_tokens is None or not (self._decoding or self._prefilling):
            return True
        most, scale = _MAX_RESERVED / self._speed.scale, self._speed.scale
        fallen = (_FIRST_SHARE - _LAST_SHARE) * (self._progress - self._share_from) * scale / _SHARE_STEPS
        share = max(self._share - fallen, _LAST_SHARE)
        reserved = sum(
            min(max(0.0, each.budget - (self._progress - each.begin)), most) for each in self._decoding
        ) + sum(min(each.budget - each.sampled, most) for each in self._prefilling)
        tokens = call.prompt + call.sampled - self._shared_tokens(call)
        return tokens + min(call.budget, most) <= self._free_tokens - share * reserved

    def _steps_until_full(self) -> float:
        if self._speed.cache_tokens is None or len(self._decoding) < 2:
            return math.inf
        return max(0.0, self._free_tokens) / len(self._decoding)

    def _steps_to_deliver(self) -> float:
        if self._speed.cache_tokens is None or not self._decoding:
            return math.inf
        steps = max(1.0, _DELIVERED_SHARE * self._speed.cache_tokens / len(self._decoding))
        return max(0.0, self._delivered_at + steps - self._progress)

    def _deliver(self) -> None:
        """Let all calls deliver what they have sampled."""
        self._delivered_at = self._progress
        for call in self._decoding:
            self._settle(call)
            call.changed.set()

    def _make_space(self) -> None:
        """Retract calls if the cache is full, until some steps of the others fit."""
        if len(self._decoding) < 2 or self._free_tokens > _WHOLE * len(self._decoding):
            return
        steps = _RETRACT_STEPS / self._speed.scale
        while len(self._decoding) > 1 and self._free_tokens < steps * len(self._decoding):
            call = max(self._decoding, key=lambda each: each.begin)
            self._settle(call)
            del self._decoding[call]
            call.retractions += 1
            call.changed.set()
            self._usage.retractions += 1
            self._waiting.append(call)
        sampled = sum(self._progress - each.begin for each in self._decoding)
        budget = sum(each.budget for each in self._decoding)
        self._share = min(1.0, (sampled + steps * len(self._decoding)) / (budget + 1))
        self._share_from = self._progress

    def _settle(self, call: _CoarseCall) -> None:
        """Count a decoding call's tokens up to now, each under the version that sampled it."""
        if call not in self._decoding:
            return
        sampled = min(call.target, int(self._progress - call.begin + _WHOLE))
        while call.sampled < sampled:
            after = bisect_right(self._marks, (call.begin + call.sampled + _WHOLE, 1 << 60))
            end = sampled
            if after < len(self._marks):
                end = min(end, max(call.sampled + 1, int(self._marks[after][0] - call.begin + _WHOLE)))
            version, start = self._marks[after - 1][1], call.sampled
            if call.spans and call.spans[-1].weight_version == version:
                start = call.spans.pop().start
            call.spans.append(VersionSpan(start=start, end=end, weight_version=version))
            call.sampled = end

    def _end(self, call: _CoarseCall, reason: Literal["stop", "length", "abort"]) -> None:
        if call.reason is None:
            call.reason = reason
            call.changed.set()
        self._remember(call.trajectory, call.prompt + call.sampled)

    def _leave(self, call: _CoarseCall) -> None:
        """The caller has its answer, or has gone."""
        self._advance()
        call.has_left = True
        if call in self._decoding:
            del self._decoding[call]
        elif call in self._prefilling:
            self._prefilling.remove(call)
        elif call in self._waiting:
            self._waiting.remove(call)
        self._calls -= 1
        if not self._calls:
            self._idle.set()
            self.on_busy()
        self._go_on()

    def _remember(self, key: int, tokens: int) -> None:
        if key:
            self._prefixes[key] = tokens
            self._prefixes.move_to_end(key)
            if len(self._prefixes) > _MAX_CACHED:
                self._prefixes.popitem(last=False)

    # -- interruption and weights -----------------------------------------------------------------------

    async def interrupt(self, mode: InterruptMode) -> None:
        """Implements `Engine.interrupt`."""
        self._advance()
        self._still = mode != "abort"
        if mode != "in_place":
            running = [*self._decoding, *self._prefilling]
            for call in running:
                self._settle(call)
            self._decoding.clear()
            self._prefilling.clear()
            if mode == "retract":
                self._waiting.extendleft(reversed(running))
            else:
                running += self._waiting
                self._waiting.clear()
                for call in running:
                    self._end(call, "abort")
        self._go_on()
        if mode == "abort":
            await asyncio.sleep(len(running) * self._speed.abort_call_s)
            await self._idle.wait()

    async def resume_generation(self, mode: InterruptMode) -> None:
        """Implements `Engine.resume_generation`."""
        self._advance()
        self._still = False
        self._go_on()

    async def join_weight_group(self, invite: GroupInvite) -> None:
        """See `Engine.join_weight_group`. There is nothing to join."""

    async def leave_weight_group(self, group_name: str) -> None:
        """Implements `Engine.leave_weight_group`."""

    async def update_weights(self, update: WeightUpdate, *, flush: bool) -> None:
        """Implements `Engine.update_weights`."""
        self._advance()
        was_still, self._still = self._still, True
        await asyncio.sleep(self._speed.update_s)
        self._advance()
        self._still = was_still
        self._marks.append((self._progress, update.weight_version))
        if flush:
            self._prefixes.clear()

    async def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        """See `Engine.release_memory`: plans do not cover shared devices."""

    async def resume_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Implements `Engine.resume_memory`."""

    # -- health -----------------------------------------------------------------------------------------

    async def checksums(self) -> tuple[dict[str, str], ...]:
        """Implements `Engine.checksums`."""
        return ({"weights": str(self._marks[-1][1])},)

    async def health(self) -> EngineHealth:
        """Implements `Engine.health`."""
        return EngineHealth(weight_version=self._marks[-1][1])

    async def wait_ready(self) -> None:
        """Implements `Engine.wait_ready`."""

    async def close(self) -> None:
        """Implements `Engine.close`."""
