"""An engine without a model: the contract of `protocol.Engine` on nothing but asyncio's clock.

It queues, prefills, decodes, is interrupted and updated as a server would be, in real time or, on a loop
whose clock jumps, in none. Everything it says is a function of its seed, so that a run can be repeated, and
marked, so that a test can tell where a row came from: `routing_rows` is what position, token and weight
version make of a row. Faults are handed in one by one (`engine.faults.append(Fault("die"))`).
"""

from __future__ import annotations

import asyncio
import math
import random
import zlib
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Literal, NoReturn, get_args

import msgspec
import numpy as np

from async_rl import routing
from async_rl.config import SimulatedEngines
from async_rl.engine_protocol import (
    Chunk,
    EngineFacts,
    EngineHealth,
    Finish,
    GenerateRequest,
    GroupInvite,
    InterruptMode,
    MemoryPart,
    RoutingPayload,
    WeightUpdate,
)
from async_rl.errors import (
    AlignmentError,
    EngineError,
    EngineTimeout,
    EnvironmentNotReady,
    PromptTooLong,
    RequestRefused,
    WeightSyncError,
)
from async_rl.types import ExpertIdArray, Int32Array, RoutingTrace, VersionSpan

Policy = Callable[[Sequence[int], random.Random], int | None]
"""The next token after a prefix; None stands for the stop token of the request. The generator is seeded anew
for every token, so a policy that draws from it repeats itself with the run."""

_PAGE = 16
"""Tokens of a prefix-cache page: prefixes are found again in whole pages."""

_MAX_PAGES = 1 << 16
"""Pages kept; the least recently used go first."""

_EOS = 2
"""Stops a call that named no stop token of its own."""

CallFault = Literal["die", "hang", "wrong_rows", "nan", "lose", "repeat"]
UpdateFault = Literal["refuse_flush", "partial_update"]
MemoryFault = Literal["refuse_memory", "hang_memory"]
_CALL_FAULTS = frozenset(get_args(CallFault))
_UPDATE_FAULTS = frozenset(get_args(UpdateFault))
_MEMORY_FAULTS = frozenset(get_args(MemoryFault))


class Fault(msgspec.Struct, frozen=True):
    """Something that goes wrong once, in the next call or update that it can happen to.

    die: the connection is lost and the engine with it; only `restart` brings it back.
    hang: the call goes silent, and ends in a timeout after `stall_s`.
    wrong_rows: the routing has one row too many.
    nan: a log-prob is not a number.
    lose: a chunk is never delivered, and what comes after it does not fit the engine's count.
    repeat: a chunk comes twice, and once too often for the engine's count.
    refuse_flush: an update loads the weights and is refused the flush at first.
    partial_update: an update fails halfway; the engine still reports the old version.
    refuse_memory: device memory is given back or taken, and the answer is an error.
    hang_memory: the same, and there is no answer.
    """

    kind: CallFault | UpdateFault | MemoryFault
    after_tokens: int = 1
    """Tokens of the call that are delivered before it happens."""


def routing_rows(
    tokens: Int32Array, versions: Int32Array, facts: EngineFacts, *, start: int = 0
) -> ExpertIdArray:
    """The experts of each fed token, in a row from one that version, position and token decide.

    Args:
        tokens: `[R] int32`, the tokens that were fed.
        versions: `[R] int32`, the weights each was fed under.
        facts: E, K and the number of layers with experts.
        start: Position of the first of them.

    Returns:
        `[R, L_moe, K]`, uint8 or uint16.
    """
    first = 7 * versions.astype(np.int64) + 3 * np.arange(start, start + len(tokens)) + 5 * tokens
    layer = 11 * np.arange(len(facts.moe_layers))
    ids = first[:, None, None] + layer[None, :, None] + np.arange(facts.top_k)[None, None, :]
    return (ids % facts.num_experts).astype(routing.id_dtype(facts.num_experts))


class _SimulatedCall:
    """One call on the engine: queued, running, or retracted back into the queue."""

    def __init__(self, request: GenerateRequest, fault: Fault | None) -> None:
        self.request = request
        self.fault = fault
        self.tokens: list[int] = request.input_ids.tolist()
        self.digest = zlib.crc32(request.input_ids.astype(np.int64).tobytes())
        self.fault_done = False
        self.sampled_versions: list[int] = []
        self.row_versions: list[int] = []
        self.cached_tokens = 0
        self.has_slot = False
        self.retractions = 0
        self.aborted = False
        self.dead = False
        self.finish: Finish | None = None
        self.changed = asyncio.Event()

    @property
    def num_sampled(self) -> int:
        return len(self.sampled_versions)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.digest = zlib.crc32(token.to_bytes(8, "little"), self.digest)

    async def until(self, ready: Callable[[], bool]) -> bool:
        """Wait for a condition; False when the call was aborted first."""
        while not self.aborted:
            self.check_alive()
            if ready():
                return True
            self.changed.clear()
            await self.changed.wait()
        return False

    async def sleep(self, seconds: float) -> bool:
        """Work for some time; False when the call was aborted or retracted in between."""
        retractions = self.retractions
        try:
            async with asyncio.timeout(seconds):
                while not (self.aborted or self.dead or self.retractions > retractions):
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return self.retractions == retractions
        self.check_alive()
        return False

    def check_alive(self) -> None:
        if self.dead:
            raise EngineError(f"connection lost in the call {self.request.request_id}")


class SimulatedEngine:
    """See `protocol.Engine`.

    At temperature 0 a token is a function of seed, prefix and weight version; above, of the request's id as
    well, so that siblings differ.

    Example:
        >>> engine = SimulatedEngine("engine-0", SimulatedEngines(), seed=0, policy=lambda prefix, rng: 7)
        >>> async for event in engine.generate(request): ...
    """

    def __init__(
        self,
        engine_id: str,
        config: SimulatedEngines,
        *,
        seed: int = 0,
        policy: Policy | None = None,
        context_length: int = 1 << 20,
        update_s: float = 0.0,
        facts: EngineFacts | None = None,
    ) -> None:
        """Start idle, at weight version 0.

        Args:
            engine_id: Name in logs, metrics and segments.
            config: Speeds and sizes.
            seed: What it says is a function of this; engines with equal seeds agree.
            policy: Chooses tokens; None draws them evenly, with answers of `config.mean_new_tokens`.
            context_length: Longest call, prompt and answer.
            update_s: How long a weight update takes.
            facts: The model it stands for, for the shape of its routing; None takes the config's.
        """
        self._engine_id = engine_id
        self._config = config
        self._seed = seed
        self._policy = policy or _uniform_policy(config)
        self._update_s = update_s
        self.facts = facts or EngineFacts(
            num_layers=config.num_layers,
            moe_layers=tuple(range(config.num_layers)),
            num_experts=config.num_experts,
            top_k=config.top_k,
            vocab_size=config.vocab_size,
            context_length=context_length,
        )
        self.faults: list[Fault] = []
        """Faults to come, in order."""
        self._random = random.Random()
        self._version = 0
        self._pages: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._queue: deque[_SimulatedCall] = deque()
        self._running: list[_SimulatedCall] = []
        self.missing: set[MemoryPart] = set()
        """Of the device memory: what it has given back."""
        self._calls: dict[_SimulatedCall, None] = {}  # ordered, so that a run can be repeated
        self._idle = asyncio.Event()
        self._idle.set()
        self._standing_still = False
        self._dead = False
        self._deaths = 0

    @property
    def engine_id(self) -> str:
        """See `Engine.engine_id`."""
        return self._engine_id

    # -- generation ---------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk | Finish, None]:
        """See `Engine.generate`."""
        self._check_alive()
        total = len(request.input_ids) + request.max_new_tokens
        if len(request.input_ids) >= self.facts.context_length or total > self.facts.context_length:
            raise PromptTooLong(
                f"{len(request.input_ids)} tokens of prompt and {request.max_new_tokens} to sample do not "
                f"fit the context of {self.facts.context_length} tokens of {self._engine_id}"
            )
        if request.return_routing and not 0 <= request.routing_start <= len(request.input_ids):
            raise RequestRefused(
                f"{self._engine_id} refused the call {request.request_id}: routing from position "
                f"{request.routing_start} of a prompt of {len(request.input_ids)} tokens"
            )
        if self.missing:
            self._die_of(f"a call, without {self.missing}")
        call = _SimulatedCall(request, self._next_fault(_CALL_FAULTS))
        self._calls[call] = None
        self._idle.clear()
        self._queue.append(call)
        self._fill_slots()
        try:
            async for chunk in self._decode(call):
                yield chunk
            finish = self._end(call)
        finally:
            self._leave(call)
        yield finish

    async def _decode(self, call: _SimulatedCall) -> AsyncGenerator[Chunk, None]:
        """Prefill and sample, from the prefill again after a retraction, until the call is over."""
        while not self._is_over(call) or not call.row_versions:
            if not await self._prefill(call):
                return
            retractions = call.retractions  # it may have a slot again before anybody has looked
            while call.retractions == retractions and not self._is_over(call):
                if not await call.until(lambda: not self._standing_still or not call.has_slot):
                    return
                if call.retractions > retractions:
                    break
                if not await call.sleep(self._config.decode_step_s) or self._standing_still:
                    if call.aborted:
                        return
                    continue
                chunks = await self._deliver(call, self._sample(call))
                if self._is_over(call):
                    self._end(call)  # not when the last chunk has been fetched: an update may come before
                for chunk in chunks:
                    yield chunk

    def _end(self, call: _SimulatedCall) -> Finish:
        """The call is over; it leaves its slot with what is known now."""
        if call.finish is None:
            call.finish = Finish(
                reason=self._reason(call),
                version_spans=_spans(call.sampled_versions),
                routing=self._payload(call),
                cached_tokens=call.cached_tokens,
            )
            self._leave(call)
        return call.finish

    async def _deliver(self, call: _SimulatedCall, chunk: Chunk) -> tuple[Chunk, ...]:
        """What becomes of a chunk on its way, once the call's fault is due.

        The client counts along, as that of a server does: it takes nothing twice, and nothing after a gap.
        """
        if call.fault_done and call.fault is not None and call.fault.kind == "lose":
            raise EngineError(
                f"{self._engine_id} counts {call.num_sampled} tokens of the call {call.request.request_id}, "
                f"but {call.num_sampled - 2} were delivered and one came"
            )
        if call.fault is None or call.num_sampled <= call.fault.after_tokens or call.fault_done:
            return (chunk,)
        call.fault_done = True
        match call.fault.kind:
            case "die":
                self.die()
                call.check_alive()
            case "hang":
                if await call.sleep(self._config.stall_s):
                    raise EngineTimeout(
                        f"{self._engine_id} was silent for {self._config.stall_s} s in the call "
                        f"{call.request.request_id} after {call.num_sampled - 1} tokens"
                    )
            case "nan":
                return (Chunk(token_ids=chunk.token_ids, log_probs=[math.nan]),)
            case "repeat":
                return (chunk,)
            case "lose":
                return ()
        return (chunk,)

    async def _prefill(self, call: _SimulatedCall) -> bool:
        """Wait for a slot and feed all tokens so far; False when the call was aborted before the end."""
        while await call.until(lambda: call.has_slot and not self._standing_still):
            call.row_versions = []
            hashes = _page_hashes(call.tokens)
            found: tuple[int, ...] = ()
            for number, key in enumerate(hashes, start=1):
                if key not in self._pages or number * _PAGE >= len(call.tokens):
                    break
                found += self._pages[key]
                self._pages.move_to_end(key)
            call.cached_tokens = len(found)
            missing = len(call.tokens) - len(found)
            if await call.sleep(missing / self._config.prefill_tokens_per_s):
                call.row_versions = [*found, *([self._version] * missing)]
                return True
        return False

    def _sample(self, call: _SimulatedCall) -> Chunk:
        """Draw the next token, which makes a row of the token before it where there is none yet."""
        call.row_versions += [self._version] * (len(call.tokens) - len(call.row_versions))
        request = call.request
        nonce = request.request_id if request.sampling.temperature > 0 else ""
        self._random.seed(zlib.crc32(f"{self._seed}/{self._version}/{nonce}".encode(), call.digest))
        log_prob = -3.0 * self._random.random()
        token = self._policy(call.tokens, self._random)
        if token is None:
            token = request.sampling.stop_token_ids[0] if request.sampling.stop_token_ids else _EOS
        call.append(token)
        call.sampled_versions.append(self._version)
        return Chunk(token_ids=[token], log_probs=[log_prob])

    def _is_over(self, call: _SimulatedCall) -> bool:
        return call.num_sampled >= call.request.max_new_tokens or self._has_stopped(call)

    def _has_stopped(self, call: _SimulatedCall) -> bool:
        stops = call.request.sampling.stop_token_ids or (_EOS,)
        return call.num_sampled > 0 and call.tokens[-1] in stops

    def _reason(self, call: _SimulatedCall) -> Literal["stop", "length", "abort"]:
        if self._has_stopped(call):
            return "stop"
        return "length" if call.num_sampled >= call.request.max_new_tokens and not call.aborted else "abort"

    def _payload(self, call: _SimulatedCall) -> RoutingPayload | None:
        """Rows, unless none were asked for, or the call ended in the queue or during its prefill."""
        if not call.request.return_routing or not call.has_slot or not call.row_versions:
            return None
        start, end = call.request.routing_start, len(call.tokens) - 1
        fed = np.array([call.tokens[start:end], call.row_versions[start:end]], np.int32)
        num_rows = fed.shape[1]
        if call.fault is not None and call.fault.kind == "wrong_rows":
            fed = np.concatenate([fed, fed[:, -1:]], axis=1)
        return RoutingPayload(
            data=fed.tobytes(), num_rows=num_rows, weight_version=self._version, start=start
        )

    def decode_routing(self, payload: RoutingPayload) -> RoutingTrace:
        """See `Engine.decode_routing`. `payload.data` is tokens, then versions, int32."""
        fed = np.frombuffer(payload.data, np.int32).reshape(2, -1)
        if fed.shape[1] != payload.num_rows:
            raise AlignmentError(
                f"{self._engine_id} sent {fed.shape[1]} routing rows, expected {payload.num_rows}"
            )
        rows = routing_rows(fed[0], fed[1], self.facts, start=payload.start)
        return routing.make_trace(
            rows,
            self.facts.num_experts,
            payload.weight_version,
            moe_layers=self.facts.moe_layers,
            row_versions=fed[1],
        )

    # -- slots --------------------------------------------------------------------------------------------

    def _fill_slots(self) -> None:
        while self._queue and len(self._running) < self._config.max_running_requests:
            call = self._queue.popleft()
            call.has_slot = True
            call.changed.set()
            self._running.append(call)

    def _leave(self, call: _SimulatedCall) -> None:
        """The call has ended, however it did; what it fed stays in the prefix cache."""
        if call not in self._calls:
            return  # it has left before, or died with the process
        if call.has_slot:
            self._running.remove(call)
            for number, key in enumerate(_page_hashes(call.tokens[: len(call.row_versions)])):
                page = tuple(call.row_versions[number * _PAGE : (number + 1) * _PAGE])
                self._pages.setdefault(key, page)
            while len(self._pages) > _MAX_PAGES:
                self._pages.popitem(last=False)
        elif call in self._queue:
            self._queue.remove(call)
        del self._calls[call]
        if not self._calls:
            self._idle.set()
        self._fill_slots()

    # -- interruption and weights -------------------------------------------------------------------------

    async def interrupt(self, mode: InterruptMode) -> None:
        """See `Engine.interrupt`."""
        self._check_alive()
        if mode == "abort":
            for call in self._calls:
                call.aborted = True
                call.changed.set()
            deaths = self._deaths
            await self._idle.wait()
            self._check_alive(deaths)
            return
        self._standing_still = True
        if mode == "retract":
            for call in reversed(self._running):
                call.has_slot = False
                call.retractions += 1
                call.changed.set()
                self._queue.appendleft(call)
            self._running.clear()

    async def resume_generation(self, mode: InterruptMode) -> None:
        """See `Engine.resume_generation`."""
        self._check_alive()
        self._standing_still = False
        self._fill_slots()
        for call in self._calls:
            call.changed.set()

    async def join_weight_group(self, invite: GroupInvite) -> None:
        """See `Engine.join_weight_group`. There is nothing to join."""
        self._check_alive()

    async def leave_weight_group(self, group_name: str) -> None:
        """See `Engine.leave_weight_group`."""
        self._check_alive()

    async def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        """See `Engine.release_memory`. It dies of a wrong one, as a server does."""
        self._check_alive()
        if self._calls or self.missing.intersection(parts):
            self._die_of(f"giving {parts} back, with {len(self._calls)} calls and without {self.missing}")
        if "kv_cache" in parts:
            self._pages.clear()
        await self._may_change_memory()
        self.missing.update(parts)

    async def resume_memory(self, parts: Sequence[MemoryPart]) -> None:
        """See `Engine.resume_memory`."""
        self._check_alive()
        if not self.missing.issuperset(parts):
            self._die_of(f"taking {parts}, without {self.missing}")
        self.missing.difference_update(parts)  # also when it fails: of the two what the other side minds
        if "weights" in parts:
            self._version = -1  # there is nothing of use in it yet
        await self._may_change_memory()

    def _die_of(self, what: str) -> NoReturn:
        """It was asked what no server survives."""
        self.die()
        raise EngineError(f"{self._engine_id} died of {what}")

    async def _may_change_memory(self) -> None:
        """The time that a change of memory takes, and the fault that it meets."""
        fault, deaths = self._next_fault(_MEMORY_FAULTS), self._deaths
        await asyncio.sleep(self._update_s / 4)
        self._check_alive(deaths)
        if fault is not None and fault.kind == "hang_memory":
            await asyncio.Future()
        if fault is not None:
            raise WeightSyncError(f"{self._engine_id} refused to change what it holds")

    async def update_weights(self, update: WeightUpdate, *, flush: bool) -> None:
        """See `Engine.update_weights`. Waits for running calls unless they stand still, as SGLang does."""
        self._check_alive()
        if "weights" in self.missing:
            self._die_of("weights, without memory for them")
        deaths = self._deaths
        if not self._standing_still:
            await self._idle.wait()
        fault = self._next_fault(_UPDATE_FAULTS)
        await asyncio.sleep(self._update_s)
        self._check_alive(deaths)
        if fault is not None and fault.kind == "partial_update":
            raise WeightSyncError(f"{self._engine_id} failed halfway to version {update.weight_version}")
        self._version = update.weight_version
        if fault is not None and flush:
            await asyncio.sleep(self._config.decode_step_s)  # refused once; the second time it goes through
        if flush and self._running:
            raise WeightSyncError(
                f"{self._engine_id} has new weights but would not flush its prefix cache: "
                f"{len(self._running)} calls run"
            )
        if flush:
            self._pages.clear()

    async def checksums(self) -> tuple[dict[str, str], ...]:
        """See `Engine.checksums`."""
        self._check_alive()
        return ({"weights": str(self._version)},)

    # -- health -------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """See `Engine.health`."""
        self._check_alive()
        return EngineHealth(weight_version=self._version)

    async def wait_ready(self) -> None:
        """See `Engine.wait_ready`."""
        if self._dead:
            raise EnvironmentNotReady(f"{self._engine_id} is dead; `restart` it")
        await self.resume_generation("retract")

    def die(self) -> None:
        """As if the process were killed: every call fails, and every later one until `restart`."""
        self._dead = True
        self._deaths += 1
        for call in self._calls:
            call.dead = True
            call.changed.set()
        self._calls.clear()
        self._running.clear()
        self._queue.clear()
        self._idle.set()

    def restart(self) -> None:
        """As if the process were ended and started anew: version 0, an empty cache."""
        self.die()
        self._dead = self._standing_still = False
        self._version = 0
        self._pages.clear()
        self.missing.clear()

    async def close(self) -> None:
        """See `Engine.close`."""

    def _check_alive(self, deaths: int | None = None) -> None:
        """Raise when the process is gone, or is another one than when so many had died."""
        if self._dead or deaths not in (None, self._deaths):
            raise EngineError(f"{self._engine_id} cannot be reached")

    def _next_fault(self, kinds: frozenset[str]) -> Fault | None:
        for index, fault in enumerate(self.faults):
            if fault.kind in kinds:
                return self.faults.pop(index)
        return None


def _uniform_policy(config: SimulatedEngines) -> Policy:
    """Tokens drawn evenly, answers of a geometric length. Ids below 4 are left to special tokens."""

    def choose(prefix: Sequence[int], rng: random.Random) -> int | None:
        if rng.random() * config.mean_new_tokens < 1.0:
            return None
        return 3 + int(rng.random() * (config.vocab_size - 3))

    return choose


def _page_hashes(tokens: Sequence[int]) -> list[int]:
    """One hash for each whole page, of everything up to its end."""
    data, hashes, value = np.array(tokens, np.int32).tobytes(), [], 0
    for end in range(4 * _PAGE, len(data) + 1, 4 * _PAGE):
        value = hash((value, data[end - 4 * _PAGE : end]))
        hashes.append(value)
    return hashes


def _spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Runs of equal versions."""
    spans: list[VersionSpan] = []
    start = 0
    for index in range(1, len(versions) + 1):
        if index == len(versions) or versions[index] != versions[start]:
            spans.append(VersionSpan(start=start, end=index, weight_version=versions[start]))
            start = index
    return tuple(spans)
