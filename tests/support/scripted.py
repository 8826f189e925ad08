"""Engines and trainers that follow a test's script, call by call."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from async_rl import routing
from async_rl.engine_protocol import (
    Chunk,
    EngineCapacity,
    EngineHealth,
    Finish,
    GenerateRequest,
    GroupInvite,
    InterruptMode,
    MemoryPart,
    RoutingPayload,
    TensorSpec,
    TensorUpdate,
    WeightBucket,
    WeightUpdate,
    group_of,
)
from async_rl.errors import EngineError, WeightSyncError
from async_rl.trainer_protocol import SendReport
from async_rl.types import RoutingTrace, VersionSpan
from async_rl.weights.checksums import CANARY_SUFFIX

NUM_EXPERTS = 8

Script = Callable[[GenerateRequest], Sequence[Chunk | Finish | Exception]]
"""Returns the events of one call; an exception among them is raised."""


def sampled(
    count: int,
    reason: str,
    version: int,
    *,
    prompt: int,
    rows: bool = True,
    first: int = 100,
    start: int = 0,
) -> list:
    """The events of a call that samples `count` tokens (ids from `first`); its rows are from `start` on."""
    events: list[Chunk | Finish] = []
    if count:
        ids = list(range(first, first + count))
        events.append(Chunk.of(ids, [-0.5] * count))
    spans = (VersionSpan(start=0, end=count, weight_version=version),) if count else ()
    payload = None
    if rows:
        num_rows = prompt + count - 1 - start
        payload = RoutingPayload(
            data=bytes([version]), num_rows=num_rows, weight_version=version, start=start
        )
    events.append(Finish(reason=reason, version_spans=spans, routing=payload))
    return events


class ScriptedEngine:
    """Answers the n-th call with the n-th script; its routing rows name the version they are of."""

    def __init__(self, engine_id: str = "engine-0", scripts: Sequence[Script] = ()) -> None:
        self.engine_id = engine_id
        self.capacity = EngineCapacity()
        self.scripts = list(scripts)
        self.requests: list[GenerateRequest] = []
        self.log: list[str] = []
        self.weight_version = 0
        self.decoded = 0
        self.fail_in: str | None = None
        self.error: Exception | None = None
        self.lie: int | None = None
        self.buckets: list[list[bytes]] = []
        self.updates: list[WeightUpdate] = []
        self.groups: set[str] = set()
        self.fused: str | None = None
        """What a parameter sums to in place of the version."""
        self.sums: dict[str, str] | None = None
        """All sums, in place of those of the version."""
        self.answers_as: int | None = None
        """The version whose log-probs it answers with, in place of its own."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk | Finish]:
        # The session's buffer keeps changing after the call.
        self.requests.append(msgspec.structs.replace(request, input_ids=request.input_ids.copy()))
        script = self._answer_canary if request.request_id.endswith(CANARY_SUFFIX) else self.scripts.pop(0)
        for event in script(request):
            if isinstance(event, Exception):
                raise event
            yield event

    def _answer_canary(self, request: GenerateRequest) -> list[Chunk | Finish]:
        """Answer the call that watches whether weights change: the log-prob tells the version."""
        self._step("canary")
        version = self.weight_version if self.answers_as is None else self.answers_as
        spans = (VersionSpan(start=0, end=1, weight_version=self.weight_version),)
        return [Chunk.of([7], [-1.0 - version]), Finish(reason="length", version_spans=spans)]

    def decode_routing(self, payload: RoutingPayload) -> RoutingTrace:
        self.decoded += 1
        return marked_trace(payload.num_rows, bytes(payload.data)[0])

    def _step(self, name: str) -> None:
        self.log.append(name)
        if self.fail_in == name and self.error is not None:
            raise self.error

    async def interrupt(self, mode: InterruptMode) -> None:
        self._step("interrupt")

    async def resume_generation(self, mode: InterruptMode) -> None:
        self._step("resume")

    async def join_weight_group(self, invite: GroupInvite) -> None:
        self._step("join")
        name = group_of(invite.group_name, invite.sender)
        if name in self.groups:
            raise WeightSyncError(f"{self.engine_id} is already in a group {name}")
        self.groups.add(name)

    async def leave_weight_group(self, group_name: str) -> None:
        self._step("leave")
        if group_name not in self.groups:
            raise EngineError(f"{self.engine_id} is in no group {group_name}")
        self.groups.remove(group_name)

    async def update_weights(self, update: WeightUpdate, *, flush: bool) -> None:
        self._step("update flush" if flush else "update")
        self.updates.append(update)
        if isinstance(update, TensorUpdate):
            self.buckets = [list(payloads) async for payloads in update.buckets()]
        self.weight_version = update.weight_version

    async def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        self._step(f"release {' '.join(parts)}")

    async def resume_memory(self, parts: Sequence[MemoryPart]) -> None:
        self._step(f"take {' '.join(parts)}")

    async def health(self) -> EngineHealth:
        self._step("health")
        return EngineHealth(weight_version=self.weight_version if self.lie is None else self.lie)

    async def checksums(self) -> tuple[dict[str, str], ...]:
        self._step("sums")
        if self.sums is not None:
            return (self.sums,)
        return ({"w": str(self.weight_version), "fused": self.fused or str(self.weight_version)},)

    async def wait_ready(self) -> None: ...

    async def close(self) -> None: ...


def marked_trace(num_rows: int, version: int) -> RoutingTrace:
    """Rows `[num_rows, 1, 2]` that name their version: experts (version, version + 1) modulo 8."""
    row = [version % NUM_EXPERTS, (version + 1) % NUM_EXPERTS]
    rows = np.tile(np.array(row, np.uint8), (num_rows, 1, 1))
    return routing.make_trace(rows, NUM_EXPERTS, version, moe_layers=(0,))


class RecordingTrainer:
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.checksum_seed: int | None = None

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            if name == "plan_buckets":
                tensors = (TensorSpec(name=name, dtype="float32", shape=(2,)) for name in ("w", "v"))
                return tuple(WeightBucket(sender, (each,)) for sender, each in enumerate(tensors))
            if name == "checksums":
                published = [arguments[1] for name, arguments in self.calls if name == "publish"]
                return {
                    "w": str(
                        self.checksum_seed if self.checksum_seed is not None else max(published, default=0)
                    )
                }
            if name == "send_weights":
                return SendReport(gather_s=0.5, send_s=0.25)
            if name == "share_bucket":
                number, _, ranks = arguments
                return [f"{number}.{copy}".encode() for copy in range(len(ranks))]
            return None

        return call
