"""The interface of an engine, implemented by SGLang servers and by simulated engines.

A call to `generate` streams `Chunk`s and ends with exactly one `Finish`. An interrupted call ends like any
other, with `finish.reason == "abort"` and all sampled tokens delivered; it does not raise. Only a failed
engine raises (`EngineError` and its subclasses), and the caller keeps the chunks it has received.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final, Literal, Protocol

import msgspec
import numpy as np

from async_rl.types import Float32Array, Int32Array, RoutingTrace, SamplingMask, SamplingSettings, VersionSpan

InterruptMode = Literal["abort", "retract", "in_place"]

MemoryPart = Literal["weights", "kv_cache", "cuda_graph"]
"""Parts of device memory that an engine can release, by SGLang's tags."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    constraint: str | None = None
    """A grammar, xgrammar's structural tag in JSON, that all tokens of the call follow. It begins with the
    first one: a call that continues a turn cannot have it."""

    @property
    def settings(self) -> SamplingSettings:
        """What is recorded with the tokens that are sampled so."""
        return SamplingSettings(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p
        )

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled, however likely they are."""
        return self.top_p < 1 or self.top_k != -1 or self.min_p > 0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One engine call: token ids in, token ids out; text is never sent."""

    request_id: str
    """Begins with an id of `runtime.ids`, all of one length, as SGLang's scheduler compares ids by prefix
    when it aborts. The rest says how often the engine had been restarted and interrupted when the lease was
    given."""
    input_ids: Int32Array  # [P]
    max_new_tokens: int
    sampling: SamplingParams
    return_mask: bool = False
    """Whether each token comes with those that truncated sampling kept at its position, and with its log-prob
    among them."""
    score_from: int | None = None
    """The position, at least 1, of the first token of `input_ids` whose log-prob is asked for. None: of none.
    Such a call samples nothing (`max_new_tokens` is 0)."""
    return_routing: bool = False
    routing_start: int = 0
    """Position of the first requested routing row, at most P: the session has the earlier rows."""
    rows_if_aborted: bool = True
    """Whether the rows are needed also if the call is aborted. If not, no engine should send them: those of
    thousands of long calls, aborted together, are gigabytes."""
    stream_interval: int | None = None
    """Number of tokens after which an engine sends an event, beside the first token and the end. None lets
    the client choose it by its load; 1 is for those who look at each token as it comes."""
    weight_version: int | None = None
    """The version that the engine serves, as the lease says: engines that serve adapters choose one by it."""


class RoutingPayload(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Expert ids as the engine sent them, not decoded yet: those of an aborted call are often not needed.

    `Engine.decode_routing` of the same engine decodes `data`.
    """

    data: bytes | memoryview
    num_rows: int
    """Number of rows for the tokens of the call: prompt + sampled - 1 - start."""
    weight_version: int
    start: int = 0
    """Position of the first row, `GenerateRequest.routing_start`."""
    fault: str | None = None
    """The error that was found on arrival; `decode_routing` raises it."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Tokens that arrived together. `token_ids` and `log_probs` have equal length, at least one."""

    token_ids: Int32Array  # [n]
    log_probs: Float32Array  # [n], nats
    mask: SamplingMask | None = None
    """Of its n tokens, if the request asks for it."""
    num_retractions: int = 0
    """How often the engine has retracted the call since the chunk before: see `Retraction`."""

    @classmethod
    def of(
        cls, token_ids: Sequence[int], log_probs: Sequence[float | None], mask: SamplingMask | None = None
    ) -> Chunk:
        """Return a chunk of these tokens; a log-prob that is None becomes NaN."""
        return cls(
            token_ids=np.array(token_ids, np.int32), log_probs=np.array(log_probs, np.float32), mask=mask
        )

    def first(self, length: int) -> Chunk:
        """Return a chunk of the first tokens."""
        mask = None if self.mask is None else self.mask[:length]
        return msgspec.structs.replace(
            self, token_ids=self.token_ids[:length], log_probs=self.log_probs[:length], mask=mask
        )


class PayloadProgress(msgspec.Struct, frozen=True):
    """The routing payload of a call begins to arrive, or a further large piece of it has arrived.

    Leases count it as progress of the engine, and do not pass it on.
    """


class Retraction(msgspec.Struct, frozen=True, kw_only=True):
    """An engine took the KV cache of a running call away, and prefilled all tokens of the call again later.

    With n tokens sampled by then, the rows before that of the n-th are not those that sampled: they were
    recomputed. Engines report n only as the range `[at_least, at_most]`, the tokens between two events.

    Example:
        An event has 5 tokens, the next one has 13 and reports a retraction: `at_least=5, at_most=12`, because
        the 13th was sampled after it.
    """

    at_least: int
    at_most: int
    count: int = 1
    """How many retractions there were between the two events."""


class Finish(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The end of a call."""

    reason: Literal["stop", "length", "abort"]
    version_spans: tuple[VersionSpan, ...]
    """A partition of the sampled tokens of this call. Empty when no token was sampled, or when the call was
    aborted before the engine reported them: then the version of the lease counts."""
    routing: RoutingPayload | None = None
    """None when it was not requested, when the engine had none (an abort in its queue), or when the call was
    aborted without `rows_if_aborted`."""
    scores: Float32Array | None = None
    """`[P - score_from]`, nats, of the model's distribution at temperature 1: the log-prob of each token of
    the prompt from `score_from` on, given those before it. None where it was not asked for, or an abort came
    first."""
    cached_tokens: int = 0
    retractions: tuple[Retraction, ...] = ()
    """For lack of memory, and by `interrupt("retract")`, in order."""


class EngineAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine takes calls."""

    url: str
    api_key: str | None = None


class EngineCapacity(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How many calls an engine runs at once; None: unknown."""

    cache_tokens: int | None = None
    """Tokens that its KV cache holds."""
    max_running: int | None = None
    """Calls that it decodes together."""


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a cheap health request."""

    weight_version: int
    model_path: str = ""


class DiskUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="disk"):
    """New weights as a folder of safetensors with Hugging Face names."""

    weight_version: int
    path: str


class AdapterUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="adapter"):
    """A new adapter for the weights that the engine keeps, as a folder that PEFT reads."""

    weight_version: int
    path: str


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Name, dtype (`float32`, `bfloat16`) and shape of one tensor in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size. The names of torch's types have their bits first: `bfloat16`, `float8_e4m3fn`, `bool`."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(bits.group()) // 8 if bits else 1)


GLOO_PARTS: Final = 8
"""Parts in which a bucket passes through Gloo's tree, where engines can receive them."""


class WeightBucket(msgspec.Struct, frozen=True):
    """Tensors that a trainer rank sends at once: flattened to uint8 and concatenated without gaps."""

    sender: int
    """The rank."""
    tensors: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return sum(spec.num_bytes for spec in self.tensors)


class DistributedUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="distributed"):
    """New weights as a sequence of broadcasts, one per bucket, in groups that the engine has joined."""

    weight_version: int
    group_name: str
    """What the names of the groups, one per sender, begin with: see `group_of`."""
    buckets: tuple[WeightBucket, ...]
    is_concurrent: bool = False
    """Whether the engine receives consecutive buckets of different senders at the same time, in parts."""

    def rounds(self) -> Iterator[list[WeightBucket]]:
        """Yield the buckets that are received at the same time, in order."""
        together: list[WeightBucket] = []
        for bucket in self.buckets:
            if together and (not self.is_concurrent or bucket.sender in [each.sender for each in together]):
                yield together
                together = []
            together.append(bucket)
        yield together


class TensorUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="tensor"):
    """New weights as buckets in memory that the trainer and an engine of its host share.

    `buckets` starts the sequence of `num_buckets`. Each bucket has one payload for each of the engine's
    tensor-parallel ranks, which refers to the bytes; they stay until the next bucket is requested.
    """

    weight_version: int
    num_buckets: int
    buckets: Callable[[], AsyncGenerator[Sequence[bytes], None]]


WeightUpdate = DiskUpdate | AdapterUpdate | DistributedUpdate | TensorUpdate


def group_of(group_name: str, sender: int) -> str:
    """Return the name of the process group that a sender's buckets pass through."""
    return f"{group_name}-{sender}"


class GroupInvite(msgspec.Struct, frozen=True, kw_only=True):
    """The TCP rendezvous (`torch.distributed`) at which an engine and a sender join their group."""

    group_name: str
    """That of all senders together."""
    sender: int = 0
    """The trainer rank that is rank 0 of the group."""
    is_concurrent: bool = False
    """As `DistributedUpdate.is_concurrent`, of all its engines."""
    backend: Literal["nccl", "gloo"]
    host: str
    port: int
    world_size: int
    rank_offset: int


class Engine(Protocol):
    """One engine.

    `interrupt` returns once no call runs (`abort`), or once running calls are paused (`retract`, `in_place`).
    The pool ensures that an engine gets no calls between `interrupt` and `resume_generation`.
    """

    @property
    def engine_id(self) -> str:
        """Name in logs, metrics and segments."""
        ...

    @property
    def capacity(self) -> EngineCapacity:
        """What it holds, known once it is ready."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk | PayloadProgress | Finish]:
        """Stream one call as the module describes. Closing the iterator aborts the call on the engine."""
        ...

    @property
    def address(self) -> EngineAddress | None:
        """Where other processes reach it; None for one that exists in this process only."""
        ...

    def remote_call(self) -> AbstractContextManager[None]:
        """Count the calls of another process, until the block ends: `interrupt` waits for them."""
        ...

    def read_at_once(self) -> None:
        """Read open streams as their events arrive: their calls are about to be aborted."""
        ...

    def decode_routing(self, payload: RoutingPayload) -> RoutingTrace:
        """Decode and narrow a payload. CPU work that releases the GIL: call it in a thread.

        Raises:
            AlignmentError: When its size, ids or layers do not fit the model and the tokens.
        """
        ...

    async def interrupt(self, mode: InterruptMode) -> None:
        """Stop running calls; sampled tokens are kept."""
        ...

    async def resume_generation(self, mode: InterruptMode) -> None:
        """Continue after `interrupt`."""
        ...

    async def join_weight_group(self, invite: GroupInvite) -> None:
        """Join a process group for distributed updates; return when the group is complete."""
        ...

    async def leave_weight_group(self, group_name: str) -> None:
        """Leave the group with one sender, named as `group_of` does."""
        ...

    async def update_weights(self, update: WeightUpdate, *, flush: bool) -> None:
        """Load new weights and, with `flush`, flush the prefix cache.

        Raises:
            WeightSyncError: When the engine did not take them; its weights are then unknown.
        """
        ...

    async def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Release device memory. Its content is lost, except weights of an engine that keeps them in host
        memory. Only `engines.device_memory` calls this.

        Calls are ended first, and refused until all memory has been resumed. An engine dies when it does not
        hold the memory.

        Raises:
            EngineError: When the request failed; what the engine holds is then unknown.
        """
        ...

    async def resume_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Take device memory, with undefined content but for weights that the engine keeps. Only
        `engines.device_memory` calls this.

        An engine dies when it holds the memory already.
        """
        ...

    async def checksums(self) -> tuple[dict[str, str], ...]:
        """Return for each of its ranks a sum over every parameter, by name. Reads all weights."""
        ...

    async def health(self) -> EngineHealth:
        """Ask for its health, without generating. Raises `EngineError` when there is no answer."""
        ...

    async def wait_ready(self) -> None:
        """Wait until it answers, and resume it if it was left paused.

        Raises:
            EnvironmentNotReady: When it does not answer, with its exit reason.
        """
        ...

    async def close(self) -> None:
        """Close connections. It does not stop a server: `engines.sglang.server` stops those we started."""
        ...


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The dimensions of a model, from its config.json, that engines and their clients need."""

    num_layers: int
    moe_layers: tuple[int, ...]
    """Indices of the layers with experts, ascending; empty for a dense model."""
    num_experts: int
    top_k: int
    vocab_size: int
    context_length: int
    latent_attention: bool = False

    @property
    def is_moe(self) -> bool:
        """Whether the model has experts, so that there is routing to replay."""
        return bool(self.moe_layers)


def check_partition(spans: Sequence[VersionSpan], length: int) -> bool:
    """Whether spans cover `[0, length)` in order, without gap or overlap."""
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            return False
        position = span.end
    return position == length
