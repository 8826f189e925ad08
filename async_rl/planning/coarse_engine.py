"""A fast engine for planning: it knows how speed depends on load, and nothing of tokens.

All running calls of an engine decode in step, so one number, its *progress* (tokens decoded by a call that
ran all the time), tells how far each of them is. Something happens only when a call comes, ends, or is
interrupted: thousands of engines run in one process, and no event is spent on a token.

```
 generate ─► waiting ──a slot──► prefilling ──► decoding ──► its length is reached ─► Chunk, Finish
                ▲                (in order, decoding │
                │                 stands meanwhile)  │
                └───────────retract──────────────────┴──abort──► what it has ──────► Chunk, Finish
```

The maker of the prompt decides the lengths (`mark`): the tokens themselves carry where a call stops, so
the scheduler that is being planned does not see it, as it would not in reality.
"""

from __future__ import annotations

import asyncio
import heapq
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

MARKS = 3
"""Tokens that `mark` writes: the shortest prompt."""

_MAX_CACHED = 4096
"""Prefixes that an engine remembers; the least recently used go first."""

_WHOLE = 1e-6
"""Tokens by which a sum of times may miss a whole one."""


_numbers = count()
"""Orders calls that end at the same progress."""


class EngineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast one engine is, in the tokens of the simulation."""

    slots: int = 128
    """Calls decoded together."""
    decode_base_s: float = 0.012
    decode_per_call_s: float = 0.00006
    prefill_tokens_per_s: float = 30000.0
    prefill_base_s: float = 0.0
    """Time that a pass over waiting prompts takes beside their tokens; all that wait share it."""
    call_s: float = 0.0
    """Time of a call that its engine does nothing for: HTTP and tokenizing. Interrupted calls have none."""
    update_s: float = 5.0
    """Pause for a weight update."""
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
    decode_s: float = 0.0
    """Of all calls together: how long they decode."""
    decoded_tokens: float = 0.0
    prefilled_tokens: int = 0


def mark(length: int, *, stop_at: int, trajectory: int = 0, group: int = 0) -> Int32Array:
    """Return a prompt of this length, which tells an engine who asks, and at which position the answer ends.

    Args:
        length: Tokens, at least `MARKS`.
        stop_at: Tokens of the sequence when the turn is over; in a later turn more than before.
        trajectory: Above 0: whose prefix this is.
        group: Above 0: siblings have the same prompt.
    """
    token_ids = np.zeros(max(length, MARKS), np.int32)
    token_ids[:MARKS] = -stop_at, trajectory, group
    return token_ids


class _CoarseCall:
    __slots__ = ("begin", "ended", "group", "left_s", "prompt", "sampled", "spans", "target", "trajectory")

    def __init__(self, request: GenerateRequest, ended: asyncio.Future[Literal["stop", "length", "abort"]]):
        ids = request.input_ids
        self.ended = ended
        self.prompt = len(ids)
        self.trajectory, self.group = int(ids[1]), int(ids[2])
        stop_at = -int(ids.min())
        self.target = max(1, min(stop_at - len(ids), request.max_new_tokens))
        self.sampled = 0
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
        self._timer: asyncio.TimerHandle | None = None
        self._prefixes: OrderedDict[int, int] = OrderedDict()  # trajectory, or minus group: tokens
        self._usage = Usage()

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
        """See `Engine.generate`: everything sampled comes in one chunk, when the call ends."""
        call = _CoarseCall(request, asyncio.get_running_loop().create_future())
        self._calls += 1
        self._usage.calls += 1
        self._idle.clear()
        self._advance()
        self._waiting.append(call)
        self._go_on()
        if self._calls == 1:
            self.on_busy()
        try:
            reason = await call.ended
        finally:
            self._leave(call)
        if reason != "abort":
            await asyncio.sleep(self._speed.call_s)
        if call.sampled:
            yield Chunk.of([0] * call.sampled, [0.0] * call.sampled)
        yield Finish(reason=reason, version_spans=tuple(call.spans))

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
        while self._waiting and len(self._decoding) + len(self._prefilling) < self._speed.slots:
            self._begin(self._waiting.popleft())
        if self._prefilling:
            after_s = self._prefilling[0].left_s
        else:
            while self._ends and self._ends[0][2] not in self._decoding:
                heapq.heappop(self._ends)
            if not self._ends:
                return
            after_s = (self._ends[0][0] - self._progress) * self._speed.step_s(len(self._decoding))
        after_s = max(after_s, 0.0) * self._slowdown
        self._timer = asyncio.get_running_loop().call_at(self._moment + after_s, self._on_time)

    def _on_time(self) -> None:
        self._advance()
        while self._prefilling and self._prefilling[0].left_s <= _WHOLE / self._speed.prefill_tokens_per_s:
            self._decode(self._prefilling.popleft())
        if not self._prefilling:
            while self._ends and self._ends[0][0] <= self._progress + _WHOLE:
                _, _, call = heapq.heappop(self._ends)
                if call in self._decoding:
                    self._settle(call)
                    del self._decoding[call]
                    self._end(call, "stop")
        self._go_on()

    def _begin(self, call: _CoarseCall) -> None:
        """Give a call its slot: feed what the cache does not hold."""
        tokens = call.prompt + call.sampled
        cached = self._prefixes.get(call.trajectory, 0)
        if self._speed.shares_prompts:
            cached = max(cached, self._prefixes.get(-call.group, 0))
        missing = max(1, tokens - cached)
        self._usage.prefilled_tokens += missing
        call.left_s = missing / self._speed.prefill_tokens_per_s
        if not self._prefilling:
            call.left_s += self._speed.prefill_base_s
        self._prefilling.append(call)

    def _decode(self, call: _CoarseCall) -> None:
        """Its prefill is done."""
        call.begin = self._progress - call.sampled
        self._decoding[call] = None
        heapq.heappush(self._ends, (call.begin + call.target, next(_numbers), call))
        if self._speed.shares_prompts and not call.sampled:
            self._remember(-call.group, call.prompt)

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
        if not call.ended.done():
            call.ended.set_result(reason)
        self._remember(call.trajectory, call.prompt + call.sampled)

    def _leave(self, call: _CoarseCall) -> None:
        """The caller has its answer, or has gone."""
        self._advance()
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
