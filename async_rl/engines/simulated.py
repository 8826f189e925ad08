"""An engine without a model: implements `Engine` on asyncio's clock alone.

It queues, prefills, decodes, is interrupted and updated as a server would be, in real time or in virtual
time. All its output is a function of its seed, so that a run can be repeated, and marked, so that a test can
tell where a row came from: `routing_rows` derives a row from position, token and weight version.
"""

from __future__ import annotations

import asyncio
import math
import random
import struct
import zlib
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal, NoReturn

import numpy as np
from msgspec.structs import replace

from async_rl import routing
from async_rl.config import SimulatedEngines
from async_rl.engine_protocol import (
    AdapterUpdate,
    Chunk,
    EngineAddress,
    EngineCapacity,
    EngineFacts,
    EngineHealth,
    Finish,
    GenerateRequest,
    GroupInvite,
    InterruptMode,
    MemoryPart,
    PayloadProgress,
    Retraction,
    RoutingPayload,
    WeightUpdate,
    group_of,
)
from async_rl.errors import (
    AlignmentError,
    EngineBusy,
    EngineError,
    EngineUnreachable,
    EnvironmentNotReady,
    PromptTooLong,
    RequestRefused,
    WeightSyncError,
)
from async_rl.types import ExpertIdArray, Float32Array, Int32Array, RoutingTrace, SamplingMask, VersionSpan

Policy = Callable[[Sequence[int], random.Random], int | None]
"""Returns the next token after a prefix; None stands for the stop token of the request. The generator is
seeded for every token, so a policy that draws from it is repeatable."""

_PAGE = 16
"""Tokens of a prefix-cache page: only whole pages are cached."""

_MAX_PAGES = 1 << 16
"""Pages kept; the least recently used are evicted first."""

_EOS = 2
"""Stops a call whose request has no stop token."""

TINY_FACTS: Final = EngineFacts(
    num_layers=2, moe_layers=(0, 1), num_experts=8, top_k=2, vocab_size=512, context_length=1 << 20
)
"""The dimensions of an engine that is given no model."""


def routing_rows(
    tokens: Int32Array, versions: Int32Array, facts: EngineFacts, *, start: int = 0
) -> ExpertIdArray:
    """Return the experts of each fed token: consecutive ids from one that version, position and token give.

    Args:
        tokens: `[R] int32`, the tokens that were fed.
        versions: `[R] int32`, the weights each was fed under.
        facts: E, K and the number of layers with experts.
        start: Position of the first token.

    Returns:
        `[R, L_moe, K]`, uint8 or uint16.
    """
    first = 7 * versions.astype(np.int64) + 3 * np.arange(start, start + len(tokens)) + 5 * tokens
    layer = 11 * np.arange(len(facts.moe_layers))
    ids = first[:, None, None] + layer[None, :, None] + np.arange(facts.top_k)[None, None, :]
    return (ids % facts.num_experts).astype(routing.id_dtype(facts.num_experts))


def kept_tokens(token: int, log_prob: float, top_k: int) -> list[int]:
    """Return the tokens that truncated sampling kept, which its result gives: up to four, it among them."""
    draw = zlib.crc32(struct.pack("<if", token, log_prob))
    return sorted({token, *((token + draw % 7 + 3 * i) % 256 for i in range(draw % min(top_k, 4)))})


def scored_tokens(tokens: Sequence[int], start: int, seed: int) -> Float32Array:
    """Return the log-probs that engines of a seed give to the tokens from a position on.

    Each is a function of the seed and of all tokens up to its own, so a test can tell whose score it is.
    """
    digest, scores = zlib.crc32(str(seed).encode()), []
    for token in tokens:
        digest = zlib.crc32(int(token).to_bytes(8, "little"), digest)
        scores.append(-(digest % 4096) / 1024)
    return np.array(scores[start:], np.float32)


class SimulatedCall:
    """One call on a simulated engine: queued, running, or retracted back into the queue."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.tokens: list[int] = request.input_ids.tolist()
        self.digest = zlib.crc32(request.input_ids.astype(np.int64).tobytes())
        self.sampled_versions: list[int] = []
        self.row_versions: list[int] = []
        self.cached_tokens = 0
        self.has_slot = False
        self.retractions: list[Retraction] = []
        self.reported_retractions = 0
        """Those that a chunk has reported."""
        self.aborted = False
        self.dead = False
        self.finish: Finish | None = None
        self.changed = asyncio.Event()

    @property
    def num_sampled(self) -> int:
        """Number of tokens sampled so far."""
        return len(self.sampled_versions)

    def append_token(self, token: int) -> None:
        """Append a sampled token."""
        self.tokens.append(token)
        self.digest = zlib.crc32(token.to_bytes(8, "little"), self.digest)

    async def until(self, ready: Callable[[], bool]) -> bool:
        """Wait for a condition; returns False when the call was aborted first."""
        while not self.aborted:
            self.check_alive()
            if ready():
                return True
            self.changed.clear()
            await self.changed.wait()
        return False

    async def sleep(self, seconds: float) -> bool:
        """Work for some time; returns False when the call was aborted or retracted meanwhile."""
        retractions = len(self.retractions)
        try:
            async with asyncio.timeout(seconds):
                while not (self.aborted or self.dead or len(self.retractions) > retractions):
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return len(self.retractions) == retractions
        self.check_alive()
        return False

    def lose_memory(self) -> None:
        """Forget what was computed: it is prefilled again when it gets a slot."""
        self.has_slot = False
        self.row_versions = []  # its memory is free: nothing of it may reach the prefix cache
        self.retractions.append(Retraction(at_least=self.num_sampled, at_most=self.num_sampled))
        self.changed.set()

    @property
    def is_over(self) -> bool:
        """Whether it has sampled all its tokens."""
        return self.num_sampled >= self.request.max_new_tokens or self._has_stopped

    @property
    def finish_reason(self) -> Literal["stop", "length", "abort"]:
        """Why it ends, if it ends now."""
        if self._has_stopped:
            return "stop"
        return "length" if self.num_sampled >= self.request.max_new_tokens and not self.aborted else "abort"

    @property
    def _has_stopped(self) -> bool:
        sampling = self.request.sampling
        if not self.num_sampled:
            return False
        if self.tokens[-1] in (sampling.stop_token_ids or (_EOS,)):
            return True
        # The text of a token is its number; a call does not see what an earlier one has sampled.
        text = " ".join(map(str, self.tokens[-self.num_sampled :])) if sampling.stop else ""
        return any(stop in text for stop in sampling.stop)

    def routing_payload(self, weight_version: int) -> RoutingPayload | None:
        """Return its rows; None if they are not needed, or it ended in the queue or its prefill."""
        if not self.request.return_routing or not self.has_slot or not self.row_versions:
            return None
        cut = self.finish_reason == "abort" and self.num_sampled < self.request.max_new_tokens
        if cut and not self.request.rows_if_aborted:
            return None
        start, end = self.request.routing_start, len(self.tokens) - 1
        fed = np.array([self.tokens[start:end], self.row_versions[start:end]], np.int32)
        return RoutingPayload(
            data=fed.tobytes(), num_rows=fed.shape[1], weight_version=weight_version, start=start
        )

    def check_alive(self) -> None:
        """Raise when the engine has died."""
        if self.dead:
            raise EngineError(f"connection lost in the call {self.request.request_id}")


class _PrefixCache:
    """The weight version of each cached token, by prefix, in whole pages."""

    def __init__(self) -> None:
        self._pages: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def find_versions(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the versions of the longest cached prefix, which is shorter than `tokens`."""
        found: tuple[int, ...] = ()
        for number, key in enumerate(_page_hashes(tokens), start=1):
            if key not in self._pages or number * _PAGE >= len(tokens):
                break
            found += self._pages[key]
            self._pages.move_to_end(key)
        return found

    def store_versions(self, tokens: Sequence[int], versions: Sequence[int]) -> None:
        """Cache the tokens that were fed, `len(versions)` of them."""
        for number, key in enumerate(_page_hashes(tokens[: len(versions)])):
            page = tuple(versions[number * _PAGE : (number + 1) * _PAGE])
            self._pages.setdefault(key, page)
        while len(self._pages) > _MAX_PAGES:
            self._pages.popitem(last=False)

    def __len__(self) -> int:
        return len(self._pages)

    def clear(self) -> None:
        """Forget all prefixes."""
        self._pages.clear()


class SimulatedEngine:
    """Implements `Engine` without a model.

    At temperature 0 a token is a function of seed, prefix and weight version; above 0, of the request's id as
    well, so that sibling trajectories differ.
    """

    def __init__(
        self,
        engine_id: str,
        config: SimulatedEngines,
        *,
        seed: int = 0,
        policy: Policy | None = None,
        update_s: float = 0.0,
        facts: EngineFacts = TINY_FACTS,
        chunk_tokens: int = 1,
        score_seed: int = 0,
        keeps_weights: bool = False,
    ) -> None:
        """Start idle, at weight version 0.

        Args:
            engine_id: Name in logs, metrics and segments.
            config: Speeds and sizes.
            seed: Determines all output; engines with equal seeds agree.
            policy: Chooses tokens; None draws them evenly, with answers of `config.mean_new_tokens`.
            update_s: How long a weight update takes.
            facts: The model's dimensions, for its vocabulary, the shape of its routing and its context.
            chunk_tokens: Tokens of a chunk, like the `stream_interval` of SGLang.
            score_seed: Determines the log-probs of prompts, `scored_tokens`: equal for engines of one model.
            keeps_weights: Whether it keeps its weights while it lacks the memory for them.
        """
        self._score_seed = score_seed
        self._engine_id = engine_id
        self._config = config
        self._seed = seed
        self.facts = facts
        self._policy = policy or _uniform_policy(config.mean_new_tokens, self.facts.vocab_size)
        self._update_s = update_s
        self._chunk_tokens = chunk_tokens
        self._random = random.Random()
        self._version = 0
        self._model_version = 0
        """The last version of whole weights, onto which adapters are loaded; -1: they are undefined."""
        self.keeps_weights = keeps_weights
        """Whether they survive the release of their memory."""
        self._prefix_cache = _PrefixCache()
        self._queue: deque[SimulatedCall] = deque()
        self._running: list[SimulatedCall] = []
        self.missing: set[MemoryPart] = set()
        """The parts of its device memory that it has released."""
        self.weight_groups: set[str] = set()
        """The groups that it has joined and not left; its process knows them by name."""
        self._releases = 0
        self._calls: dict[SimulatedCall, None] = {}  # ordered, so that a run can be repeated
        self._idle = asyncio.Event()
        self._idle.set()
        self._paused = False
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._dead = False
        self._deaths = 0

    @property
    def engine_id(self) -> str:
        """Implements `Engine.engine_id`."""
        return self._engine_id

    @property
    def address(self) -> EngineAddress | None:
        """Implements `Engine.address`. No other process reaches it."""
        return None

    def remote_call(self) -> AbstractContextManager[None]:
        """Implements `Engine.remote_call`. Other processes cannot reach it."""
        return nullcontext()

    def read_at_once(self) -> None:
        """Implements `Engine.read_at_once`. There is no connection."""

    @property
    def capacity(self) -> EngineCapacity:
        """Implements `Engine.capacity`."""
        return EngineCapacity(
            cache_tokens=self._config.max_total_tokens, max_running=self._config.max_running_requests
        )

    @property
    def _computed_version(self) -> int:
        """The version that it computes with: of an adapter on undefined weights nothing is left."""
        return self._version if self._model_version >= 0 else -1

    @property
    def num_cached_pages(self) -> int:
        """Pages in the prefix cache."""
        return len(self._prefix_cache)

    # -- generation ---------------------------------------------------------------------------------------

    async def wait_until_resumed(self) -> None:
        """Wait while generation is paused: a request that arrives meanwhile is not looked at before.

        Source: `TokenizerManager.generate_request` of SGLang, which waits for `is_pause` to end.
        """
        await self._resumed.wait()

    def check_open(self) -> None:
        """Refuse a call while memory is released, as `engines.sglang.memory_gate` does.

        Raises:
            EngineBusy: Some memory is released, or about to be.
        """
        if self.missing or self._releases:
            raise EngineBusy(f"{self._engine_id} has released its device memory, or is about to do so", 5.0)

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Chunk | PayloadProgress | Finish, None]:
        """Implements `Engine.generate`."""
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
        self.check_open()
        call = self._new_call(request)
        self._calls[call] = None
        self._idle.clear()
        self._queue.append(call)
        self._fill_slots()
        try:
            async for chunk in self._decode(call):
                yield chunk
            finish = self._finish_call(call)
        finally:
            self._free_slot(call)
        yield self._deliver_finish(call, finish)

    async def _decode(self, call: SimulatedCall) -> AsyncGenerator[Chunk, None]:
        """Prefill and sample until the call is over; a retraction starts again with the prefill."""
        while not call.is_over or not call.row_versions:
            if not await self._prefill(call):
                return
            retractions = len(call.retractions)  # it may have a slot again by the time of the check
            while len(call.retractions) == retractions and not call.is_over:
                if not await call.until(lambda: not self._paused or not call.has_slot):
                    return
                if len(call.retractions) > retractions:
                    break
                if not await call.sleep(self._chunk_tokens * self._config.decode_step_s) or self._paused:
                    if call.aborted:
                        return
                    continue
                chunks = await self._deliver(call, self._sample_chunk(call))
                if call.is_over:
                    self._finish_call(call)  # before the last chunk is fetched: an update may come in between
                for chunk in chunks:
                    yield chunk

    def _finish_call(self, call: SimulatedCall) -> Finish:
        """End a call: free its slot and record its finish."""
        if call.finish is None:
            call.finish = Finish(
                reason=call.finish_reason,
                version_spans=_spans(call.sampled_versions),
                routing=call.routing_payload(self._version),
                scores=self._scores(call),
                cached_tokens=call.cached_tokens,
                retractions=tuple(call.retractions),
            )
            self._free_slot(call)
        return call.finish

    def _scores(self, call: SimulatedCall) -> Float32Array | None:
        begin = call.request.score_from
        if begin is None or call.aborted or not call.row_versions:
            return None
        return scored_tokens(call.tokens, begin, self._score_seed)

    def _new_call(self, request: GenerateRequest) -> SimulatedCall:
        """Return the call of a request that is taken."""
        return SimulatedCall(request)

    async def _deliver(self, call: SimulatedCall, chunk: Chunk) -> tuple[Chunk, ...]:
        """Return what arrives of a chunk."""
        return (chunk,)

    def _deliver_finish(self, call: SimulatedCall, finish: Finish) -> Finish:
        """Return what arrives of the end of a call."""
        return finish

    async def _prefill(self, call: SimulatedCall) -> bool:
        """Wait for a slot and feed all tokens so far; returns False when the call was aborted meanwhile."""
        while await call.until(lambda: call.has_slot and not self._paused):
            call.row_versions = []
            found = self._prefix_cache.find_versions(call.tokens)
            call.cached_tokens = len(found)
            missing = len(call.tokens) - len(found)
            if await call.sleep(missing / self._config.prefill_tokens_per_s):
                call.row_versions = [*found, *([self._computed_version] * missing)]
                return True
        return False

    def _sample_chunk(self, call: SimulatedCall) -> Chunk:
        """Draw the tokens of the next chunk, which ends with the call."""
        sampled = [self._sample(call)]
        while len(sampled) < self._chunk_tokens and not call.is_over:
            sampled.append(self._sample(call))
        mask = None
        if call.request.return_mask:
            mask = SamplingMask.of(
                [kept_tokens(token, log_prob, call.request.sampling.top_k) for token, log_prob in sampled]
            )
        chunk = Chunk.of([token for token, _ in sampled], [log_prob for _, log_prob in sampled], mask)
        reported, call.reported_retractions = call.reported_retractions, len(call.retractions)
        self._make_space()
        return replace(chunk, num_retractions=call.reported_retractions - reported)

    def _sample(self, call: SimulatedCall) -> tuple[int, float]:
        """Draw the next token and its log-prob; the token before it is fed, which gives it a row."""
        call.row_versions += [self._computed_version] * (len(call.tokens) - len(call.row_versions))
        request = call.request
        # Without the engine's epoch: the same calls draw the same tokens, whatever happened to the engine.
        nonce = request.request_id.partition("-")[0] if request.sampling.temperature > 0 else ""
        self._random.seed(zlib.crc32(f"{self._seed}/{self._version}/{nonce}".encode(), call.digest))
        log_prob = -3.0 * self._random.random()
        token = self._policy(call.tokens, self._random)
        if token is None:
            token = request.sampling.stop_token_ids[0] if request.sampling.stop_token_ids else _EOS
        call.append_token(token)
        call.sampled_versions.append(self._version)
        return token, log_prob

    def decode_routing(self, payload: RoutingPayload) -> RoutingTrace:
        """Implements `Engine.decode_routing`. `payload.data` is tokens, then versions, int32."""
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
            if self._running and self._free_tokens < len(self._queue[0].tokens):
                return
            call = self._queue.popleft()
            call.has_slot = True
            call.changed.set()
            self._running.append(call)

    @property
    def _free_tokens(self) -> float:
        """Tokens of its cache that no running call holds; prompts that calls share are counted for each."""
        if self._config.max_total_tokens is None:
            return math.inf
        return self._config.max_total_tokens - sum(len(call.tokens) for call in self._running)

    def _make_space(self) -> None:
        """Retract the calls that have sampled least until the others fit; the last one goes on.

        Source: `ScheduleBatch.retract_decode` of SGLang.
        """
        while self._free_tokens < 0 and len(self._running) > 1:
            call = min(reversed(self._running), key=lambda each: each.num_sampled)
            call.lose_memory()
            self._running.remove(call)
            self._queue.append(call)

    def _free_slot(self, call: SimulatedCall) -> None:
        """Free the slot of a call that has ended; the tokens it fed stay in the prefix cache."""
        if call not in self._calls:
            return  # it was freed before, or died with the process
        if call.has_slot:
            self._running.remove(call)
            self._prefix_cache.store_versions(call.tokens, call.row_versions)
        elif call in self._queue:
            self._queue.remove(call)
        del self._calls[call]
        if not self._calls:
            self._idle.set()
        self._fill_slots()

    # -- interruption and weights -------------------------------------------------------------------------

    async def interrupt(self, mode: InterruptMode) -> None:
        """Implements `Engine.interrupt`."""
        self._check_alive()
        if mode == "abort":
            await self._abort_calls()
            return
        self._paused = True
        self._resumed.clear()
        if mode == "retract":
            for call in reversed(self._running):
                call.lose_memory()
                self._queue.appendleft(call)
            self._running.clear()

    async def _abort_calls(self) -> None:
        """End all calls with what they have."""
        for call in self._calls:
            call.aborted = True
            call.changed.set()
        deaths = self._deaths
        await self._idle.wait()
        self._check_alive(deaths)

    async def resume_generation(self, mode: InterruptMode) -> None:
        """Implements `Engine.resume_generation`."""
        self._check_alive()
        self._paused = False
        self._resumed.set()
        self._fill_slots()
        for call in self._calls:
            call.changed.set()

    async def join_weight_group(self, invite: GroupInvite) -> None:
        """Implements `Engine.join_weight_group`. As in torch, a name that is in use is refused."""
        self._check_alive()
        name = group_of(invite.group_name, invite.sender)
        if name in self.weight_groups:
            raise WeightSyncError(f"{self._engine_id} is already in a group {name}")
        self.weight_groups.add(name)

    async def leave_weight_group(self, group_name: str) -> None:
        """Implements `Engine.leave_weight_group`."""
        self._check_alive()
        self.weight_groups.discard(group_name)

    async def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Implements `Engine.release_memory`. An invalid request kills it, as it kills a server."""
        self._check_alive()
        if self.missing.intersection(parts):
            self._die_with(f"releasing {parts}, without {self.missing}")
        self._releases += 1
        try:
            await self._abort_calls()
            if "kv_cache" in parts:
                self._prefix_cache.clear()
            await self._change_memory()
            self.missing.update(parts)
        finally:
            self._releases -= 1

    async def resume_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Implements `Engine.resume_memory`."""
        self._check_alive()
        if not self.missing.issuperset(parts):
            self._die_with(f"taking {parts}, without {self.missing}")
        self.missing.difference_update(parts)  # also when it fails: the worse case for the other side
        if "weights" in parts and not self.keeps_weights:
            self._version = self._model_version = -1  # the content is undefined
        await self._change_memory()

    def _die_with(self, what: str) -> NoReturn:
        """Die of a request that a server does not survive."""
        self.die()
        raise EngineError(f"{self._engine_id} died of {what}")

    async def _change_memory(self) -> None:
        """Take the time that a change of memory takes."""
        deaths = self._deaths
        await asyncio.sleep(self._update_s / 4)
        self._check_alive(deaths)

    async def update_weights(self, update: WeightUpdate, *, flush: bool) -> None:
        """Implements `Engine.update_weights`. Waits for running calls unless they are paused, like SGLang."""
        self._check_alive()
        if "weights" in self.missing:
            self._die_with("weights, without memory for them")
        deaths = self._deaths
        if not self._paused:
            await self._idle.wait()
        await self._load_weights(update, flush=flush, deaths=deaths)
        if flush and self._running:
            raise WeightSyncError(
                f"{self._engine_id} has new weights but would not flush its prefix cache: "
                f"{len(self._running)} calls run"
            )
        if flush:
            self._prefix_cache.clear()

    async def _load_weights(self, update: WeightUpdate, *, flush: bool, deaths: int) -> None:
        """Load weights, unless the process has died `deaths` times and dies once more."""
        await asyncio.sleep(self._update_s)
        self._check_alive(deaths)
        self._version = update.weight_version
        if not isinstance(update, AdapterUpdate):
            self._model_version = update.weight_version

    async def checksums(self) -> tuple[dict[str, str], ...]:
        """Implements `Engine.checksums`. They leave out adapters, as those of a server do."""
        self._check_alive()
        return ({"weights": str(self._model_version)},)

    # -- health -------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """Implements `Engine.health`."""
        self._check_alive()
        return EngineHealth(weight_version=self._version)

    async def wait_ready(self) -> None:
        """Implements `Engine.wait_ready`."""
        if self._dead:
            raise EnvironmentNotReady(f"{self._engine_id} is dead; `restart` it")
        await self.resume_generation("retract")

    def die(self) -> None:
        """Behave as if the process were killed: all calls fail until `restart`."""
        self._dead = True
        self._deaths += 1
        for call in self._calls:
            call.dead = True
            call.changed.set()
        self._calls.clear()
        self._running.clear()
        self._queue.clear()
        self._idle.set()
        self._resumed.set()

    def restart(self) -> None:
        """Behave as if the process were restarted: version 0, an empty cache."""
        self.die()
        self._dead = self._paused = False
        self._version = self._model_version = 0
        self._prefix_cache.clear()
        self.missing.clear()
        self.weight_groups.clear()

    async def close(self) -> None:
        """Implements `Engine.close`."""

    def _check_alive(self, deaths: int | None = None) -> None:
        """Raise when the process is dead, or was restarted since it had died `deaths` times."""
        if self._dead or deaths not in (None, self._deaths):
            raise EngineUnreachable(f"{self._engine_id} cannot be reached")


def _uniform_policy(mean_new_tokens: float, vocab_size: int) -> Policy:
    """Return a policy that draws tokens evenly and answers of geometric length; ids below 4 are special."""

    def choose(prefix: Sequence[int], rng: random.Random) -> int | None:
        if rng.random() * mean_new_tokens < 1.0:
            return None
        return 3 + int(rng.random() * (vocab_size - 3))

    return choose


def _page_hashes(tokens: Sequence[int]) -> list[int]:
    """Return one hash for each whole page, over all tokens up to its end."""
    data, hashes, value = np.array(tokens, np.int32).tobytes(), [], 0
    for end in range(4 * _PAGE, len(data) + 1, 4 * _PAGE):
        value = hash((value, data[end - 4 * _PAGE : end]))
        hashes.append(value)
    return hashes


def _spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Return the spans of equal versions."""
    spans: list[VersionSpan] = []
    start = 0
    for index in range(1, len(versions) + 1):
        if index == len(versions) or versions[index] != versions[start]:
            spans.append(VersionSpan(start=start, end=index, weight_version=versions[start]))
            start = index
    return tuple(spans)
