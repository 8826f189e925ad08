"""What an engine is to the rest of the program, whether it is an SGLang server or a simulation.

A call to `generate` streams `Chunk`s and ends with exactly one `Finish`. An interrupted call ends like any
other, with `finish.reason == "abort"` and everything sampled so far already delivered; it never raises for
that. What raises is an engine that failed: `EngineError` and its children, after which the caller keeps the
chunks it has seen.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Literal, Protocol

import msgspec

from async_rl.types import Int32Array, RoutingTrace, VersionSpan

InterruptMode = Literal["abort", "retract", "in_place"]

MemoryPart = Literal["weights", "kv_cache", "cuda_graph"]
"""What an engine can give back of a device, by SGLang's tags."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One engine call. Token ids in, token ids out; text is never sent."""

    request_id: str
    """Fixed width (a UUIDv7 in hex): SGLang's scheduler compares ids by prefix when it aborts."""
    input_ids: Int32Array  # [P]
    max_new_tokens: int
    sampling: SamplingParams
    return_routing: bool = False
    routing_start: int = 0
    """Position of the first routing row that is wanted, at most P: earlier ones are held already."""


class RoutingPayload(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Expert ids as the engine sent them, not yet decoded: an aborted call's are often never needed.

    `data` is whatever `decode_routing` of the same engine's `RoutingCodec` understands.
    """

    data: bytes | memoryview
    num_rows: int
    """Rows that the tokens of the call ask for: prompt + sampled - 1 - start."""
    weight_version: int
    start: int = 0
    """Position of the first row, `GenerateRequest.routing_start`."""
    fault: str | None = None
    """What was wrong with it as it came; `decode_routing` raises it."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that arrived together. `token_ids` and `log_probs` have equal length, at least one."""

    token_ids: list[int]
    log_probs: list[float]


class Finish(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The end of a call."""

    reason: Literal["stop", "length", "abort"]
    version_spans: tuple[VersionSpan, ...]
    """Over the sampled tokens of this call, a partition; empty when nothing was sampled."""
    routing: RoutingPayload | None = None
    """None when it was not asked for, or when the engine had none (an abort in its queue)."""
    cached_tokens: int = 0


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What a cheap health request says."""

    weight_version: int
    model_path: str = ""


class DiskUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="disk"):
    """New weights as a folder of safetensors in Hugging Face names."""

    weight_version: int
    path: str


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Name, dtype (`float32`, `bfloat16`) and shape of one tensor to come."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class DistributedUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="distributed"):
    """New weights as a sequence of broadcasts in a process group that the engine has joined.

    Each bucket is one flattened uint8 broadcast from rank 0, its tensors one after the other without gaps.
    """

    weight_version: int
    group_name: str
    buckets: tuple[tuple[TensorSpec, ...], ...]


class TensorUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="tensor"):
    """New weights as buckets in memory that the trainer and an engine of its host share.

    `buckets` starts the sequence of `num_buckets`. Each has one payload for each of the engine's
    tensor-parallel ranks, which says where the bytes lie; they stay until the next bucket is asked for.
    """

    weight_version: int
    num_buckets: int
    buckets: Callable[[], AsyncGenerator[Sequence[bytes], None]]


WeightUpdate = DiskUpdate | DistributedUpdate | TensorUpdate


class GroupInvite(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine joins a weight-update group: `torch.distributed` rendezvous on TCP."""

    group_name: str
    backend: Literal["nccl", "gloo"]
    host: str
    port: int
    world_size: int
    rank_offset: int


class Engine(Protocol):
    """One engine.

    `interrupt` returns once no call is running any more (`abort`), or once running calls stand still
    (`retract`, `in_place`). Nothing is sent to an engine between `interrupt` and `resume_generation`; the
    pool sees to that.
    """

    @property
    def engine_id(self) -> str:
        """Name in logs, metrics and segments."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk | Finish]:
        """Stream one call; see the module's docstring. Closing the iterator aborts the call on the engine."""
        ...

    def decode_routing(self, payload: RoutingPayload) -> RoutingTrace:
        """Decode and narrow a payload. Pure CPU work that releases the GIL: call it in a thread.

        Raises:
            AlignmentError: When its size, its ids or its layers are not what the model and the tokens ask
            for.
        """
        ...

    async def interrupt(self, mode: InterruptMode) -> None:
        """Stop what runs, keeping what was sampled."""
        ...

    async def resume_generation(self, mode: InterruptMode) -> None:
        """Undo `interrupt`."""
        ...

    async def join_weight_group(self, invite: GroupInvite) -> None:
        """Join a process group for distributed updates; returns when the group stands."""
        ...

    async def leave_weight_group(self, group_name: str) -> None:
        """Leave it again."""
        ...

    async def update_weights(self, update: WeightUpdate, *, flush: bool) -> None:
        """Load new weights and, if asked, forget the prefix cache. Counts the version once.

        Raises:
            WeightSyncError: When the engine did not take them; its weights are then unknown.
        """
        ...

    async def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Give device memory back; what was in it is lost. Called by `engines.memory` alone: an engine dies
        when it is asked while anything runs, or for what it does not hold.

        Raises:
            EngineError: When it did not; what it holds is then unknown.
        """
        ...

    async def resume_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Take it again, with nothing of use in it. Likewise: an engine dies when it holds it already."""
        ...

    async def checksums(self) -> tuple[dict[str, str], ...]:
        """Of each of its ranks: a sum over every parameter, by name. Reads all weights."""
        ...

    async def health(self) -> EngineHealth:
        """Ask cheaply, without generating. Raises `EngineError` when there is no answer."""
        ...

    async def wait_ready(self) -> None:
        """Wait until it answers, and let it go on if it was left standing still.

        Raises:
            EnvironmentNotReady: With the engine's last words, when it will not answer.
        """
        ...

    async def close(self) -> None:
        """Let go of connections (and, for engines we started, of nothing else: `engines.server` stops
        those).
        """
        ...


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the client must know of the model to decode routing: all from its config.json."""

    num_layers: int
    moe_layers: tuple[int, ...]
    """Indices of the layers with experts, ascending; empty for a dense model."""
    num_experts: int
    top_k: int
    vocab_size: int
    context_length: int

    @property
    def is_moe(self) -> bool:
        """Whether there is any routing to replay."""
        return bool(self.moe_layers)


def check_partition(spans: Sequence[VersionSpan], length: int) -> bool:
    """Whether spans cover `[0, length)` in order, without gap or overlap."""
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            return False
        position = span.end
    return position == length
