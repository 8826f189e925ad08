"""The engine of a real SGLang server: its native HTTP API, token ids in, token ids streamed out.

```
generate ──POST /generate──► events ─► Chunk …  Chunk, Finish
interrupt("abort")  ─POST /abort_request──────► every stream ends as an abort, its tokens and rows delivered
update_weights      ─POST /update_weights_*───► flush ─► version read back and compared
   of an adapter    ─POST /unload_lora_adapter─► load ─► flush ─► version set, read back and compared
```

Requests and replies were checked against SGLang 0.5.23. Servers must run with
`--incremental-streaming-output` and, where routing is replayed, `--enable-return-routed-experts`.
`server` starts them so, and `wait_ready` refuses others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np
import pybase64

from async_rl import routing
from async_rl.config import SGLangEngines
from async_rl.engine_protocol import (
    AdapterUpdate,
    Chunk,
    DiskUpdate,
    DistributedUpdate,
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
    RoutingPayload,
    TensorUpdate,
    WeightUpdate,
    group_of,
)
from async_rl.engines.control_requests import wait_out
from async_rl.engines.sglang.generate_call import (
    CallAccount,
    EventReader,
    EventTooLong,
    adapter_name,
    choose_stream_interval,
    encode_request,
    parse_version,
)
from async_rl.engines.sglang.group_names import join_groups
from async_rl.engines.sglang.http_client import SGLangHttpClient
from async_rl.engines.sglang.read_schedule import EventStream, ReadSchedule
from async_rl.engines.sglang.routing_payload import (
    PIECE_BYTES,
    PayloadArrival,
    PayloadGate,
    RoutingText,
    RoutingWire,
)
from async_rl.engines.sglang.server_checks import (
    ServerInfo,
    ServerNeeds,
    ServerState,
    check_preferred_sampling,
    check_server,
)
from async_rl.errors import (
    AlignmentError,
    CallLost,
    EngineError,
    EngineTimeout,
    EnvironmentNotReady,
    PromptTooLong,
    RequestRefused,
    VersionMismatch,
    WeightsNotReceived,
    WeightSyncError,
)
from async_rl.runtime.waits import progressed
from async_rl.types import RoutingTrace

ABORT_RESEND_S: Final = (0.02, 1.0)
"""A request that is still in the server's HTTP process misses an abort, so the abort is repeated: first soon,
then less and less often, because each repetition goes through all requests of a busy server."""

_ID_WIDTH: Final = 32
"""Characters of every request id that no other begins with, so that none is a prefix of another."""

_END_LIMIT_S: Final = 1.0
"""How long the end of a weight update that has failed is waited for, while the other engines are paused."""

_FLUSH_LIMIT_S: Final = 5.0
"""How long a refused flush is retried: calls that still run after an abort end within one decode step."""

_NOT_RECEIVED: Final = "Failed to receive weights"
"""How SGLang's answer begins when a broadcast fails."""

_NOT_SGLANG: Final = frozenset({401, 403, 404, 405, 501})
"""Answers to `GET /ready`, which SGLang gives to everyone, of servers that will never say 200."""

REFUSED_S: Final = 3.0
"""How long they are waited for all the same: a proxy may give them while it learns of a server."""

_DEFAULTS: Final = SGLangEngines()
_NO_NEEDS: Final = ServerNeeds()


class _RankSums(msgspec.Struct):
    checksums: dict[str, str]


class _WeightSums(msgspec.Struct):
    ranks: list[_RankSums]


class _AdapterReply(msgspec.Struct):
    """The server's reply when an adapter was to be loaded or unloaded."""

    success: bool = False
    error_message: str = ""
    loaded_adapters: dict[str, str] | None = None
    """Afterwards: by name, the folders."""


class _ModelCard(msgspec.Struct):
    id: str
    parent: str | None = None
    """The base model of an adapter."""


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


class _ModelInfo(msgspec.Struct):
    model_path: str = ""
    weight_version: str | None = None
    preferred_sampling_params: dict[str, Any] | str | None = None
    """Settings of the server for calls that do not have them; as text, JSON."""


class _RemoteCall(AbstractContextManager[None]):
    """A call of another process while the block runs; a generator would take ten times as long."""

    __slots__ = ("_engine",)

    def __init__(self, engine: SGLangEngine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine.begin_call()

    def __exit__(self, *error: object) -> None:
        self._engine.end_call()


class SGLangEngine:
    """Implements `Engine` for one SGLang server.

    Invariant: no token, log-prob or routing row is delivered twice; `generate_call.CallAccount` ensures it.
    """

    def __init__(
        self,
        engine_id: str,
        url: str,
        facts: EngineFacts,
        config: SGLangEngines = _DEFAULTS,
        needs: ServerNeeds = _NO_NEEDS,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        state: Callable[[], Awaitable[ServerState]] | None = None,
    ) -> None:
        """Remember the server's address; connect later.

        Args:
            engine_id: Name in logs, metrics and segments.
            url: `http://host:port`.
            facts: The model's dimensions, against which routing payloads are checked.
            config: Time limits, and the format of routing (`engine.narrow_routing`).
            needs: What the run needs; `wait_ready` refuses a server that lacks it.
            api_key: Key of the server, None when it asks for none.
            admin_key: Key of its control endpoints; None takes `api_key`.
            state: Returns the state of the server's processes; None for a server that others started.
        """
        self._engine_id = engine_id
        self._facts = facts
        self._config = config
        self._needs = needs
        self._wire = RoutingWire(facts=facts, narrow=config.narrow_routing)
        self._state = state
        self.http = SGLangHttpClient(engine_id, url, api_key, admin_key, timeout_s=config.request_timeout_s)
        """Sends its requests, to an address that can change."""
        self.payload_gate = PayloadGate(engine_id, config.stall_s)
        """Bounds how many payloads are read at a time."""
        self._context_length = self._longest = facts.context_length
        self._capacity = EngineCapacity()
        self._num_pieces = 0
        self._bodies: set[EventStream] = set()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._paused = False

    @property
    def engine_id(self) -> str:
        """Implements `Engine.engine_id`."""
        return self._engine_id

    @property
    def address(self) -> EngineAddress:
        """Implements `Engine.address`."""
        return EngineAddress(url=str(self.http.url), api_key=self.http.api_key)

    @property
    def capacity(self) -> EngineCapacity:
        """Implements `Engine.capacity`."""
        return self._capacity

    # -- generation ---------------------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Chunk | PayloadProgress | Finish, None]:
        """Implements `Engine.generate`. The caller, which sees all calls, bounds the engine's silence."""
        self._check_request(request)
        self.begin_call()
        call = CallAccount(self._engine_id, request, self._facts.vocab_size, self._longest)
        finish: Finish | None = None
        response: aiohttp.ClientResponse | None = None
        body: EventStream | None = None
        reader = EventReader(
            lambda: RoutingText(self._wire, call.num_rows, call.max_rows), call.max_event_bytes
        )
        permit = AsyncExitStack()
        arrival: PayloadArrival | None = None
        try:
            schedule = ReadSchedule.of_running_loop()
            interval = choose_stream_interval(schedule.num_open)
            encoded = encode_request(request, interval, adapter=self._needs.adapters is not None)
            response = await self.http.post_generate(encoded)
            body = EventStream(response, schedule)
            self._bodies.add(body)
            while data := await (body.read() if arrival is None else arrival.read_piece(body.read)):
                events = reader.feed(data)
                aborted = arrival is None and call.ends_without_rows(reader.head)
                if aborted and (head := reader.head) is not None:
                    events.append((head, None))  # the rest of it is rows that are not needed
                elif reader.payload is not None:
                    if arrival is None:
                        body.read_at_once()
                        yield PayloadProgress()
                        # Nothing more is read until this call may receive: the server is held back.
                        arrival = await permit.enter_async_context(self.payload_gate.permit())
                    if reader.payload.is_too_long:
                        raise EngineError(
                            f"{self._engine_id} sends a routing payload of more than twice the "
                            f"{call.max_rows} rows that the call {request.request_id} can have"
                        )
                    if events or reader.payload.pending >= PIECE_BYTES:
                        self._num_pieces += 1
                        await asyncio.to_thread(reader.payload.decode_pending)
                        yield PayloadProgress()
                self._num_pieces += len(events)
                failure: EngineError | RequestRefused | None = None
                try:
                    for document, payload in events:
                        if document != b"[DONE]":
                            finish = call.read_event(document, payload)
                except (EngineError, RequestRefused) as e:
                    failure = e
                if (chunk := call.take_chunk()) is not None:
                    yield chunk  # also the tokens before an event that makes no sense
                if failure is not None:
                    raise failure
                if aborted:
                    break
                if finish is not None:
                    body.read_at_once()  # to the end, which frees the connection
            if finish is None:
                raise CallLost(f"{self._engine_id} ended the stream of {request.request_id} without a finish")
        except EventTooLong as e:
            raise EngineError(f"{self._engine_id} sends {e}") from e
        except aiohttp.ClientError as e:
            raise self.http.connection_error(e) from e
        finally:
            await permit.aclose()
            self.end_call()
            if body is not None:
                self._bodies.remove(body)
                body.close()
            if response is not None:
                try:
                    if finish is None:
                        await self._abort_call(request.request_id)
                finally:  # also when the abort is cancelled
                    response.close()  # a connection that was read to its end is back in the pool already
        yield finish

    def remote_call(self) -> AbstractContextManager[None]:
        """Implements `Engine.remote_call`."""
        return _RemoteCall(self)

    def begin_call(self) -> None:
        """Count a call, which `end_call` ends."""
        self._running += 1
        self._idle.clear()

    def end_call(self) -> None:
        """Count the end of a call."""
        self._running -= 1
        if not self._running:
            self._idle.set()

    def read_at_once(self) -> None:
        """Implements `Engine.read_at_once`."""
        for body in self._bodies:
            body.read_at_once()

    async def _abort_call(self, request_id: str) -> None:
        """Free the slot of a call whose stream was closed. SGLang also notices by itself, within seconds."""
        try:
            async with asyncio.timeout(1.0):
                await self.http.request_reply("abort_request", {"rid": request_id})
        except (EngineError, TimeoutError):
            return  # the server has ended, or is too busy to answer
        except RuntimeError:
            return  # aiohttp's session is closed: the engine has left

    def _check_request(self, request: GenerateRequest) -> None:
        if len(request.request_id) < _ID_WIDTH:
            raise ValueError(
                f"request id {request.request_id!r} of {len(request.request_id)} characters, expected at "
                f"least {_ID_WIDTH}: SGLang aborts all calls whose ids begin with the id it is given"
            )
        prompt, total = len(request.input_ids), len(request.input_ids) + request.max_new_tokens
        if prompt < 1:
            raise ValueError("a request without a prompt")
        if prompt >= self._context_length or total > self._context_length:
            raise PromptTooLong(
                f"{prompt} tokens of prompt and {request.max_new_tokens} to sample do not fit the context of "
                f"{self._context_length} tokens of {self._engine_id}: shorten the prompt, lower "
                f"rollout.max_new_tokens or raise engine.context_length"
            )

    def decode_routing(self, payload: RoutingPayload) -> RoutingTrace:
        """Implements `Engine.decode_routing`. `payload.data` is base64, or rows that were already narrowed.

        All ids are checked here: they exist, and are distinct within a row.
        """
        facts, data = self._facts, payload.data
        if not facts.is_moe:
            raise AlignmentError(f"{self._engine_id} sent routing of a model that has no experts")
        try:
            if payload.fault is not None:
                raise AlignmentError(payload.fault)
            narrowed = isinstance(data, memoryview) and data.ndim == 3
            rows = np.asarray(data) if narrowed else self._wire.decode(data, payload.num_rows)
        except AlignmentError as e:
            raise AlignmentError(f"{self._engine_id} sent unusable routing: {e}") from e
        try:
            trace = routing.make_trace(
                rows, facts.num_experts, payload.weight_version, moe_layers=facts.moe_layers
            )
        except AlignmentError:
            _check_layers_used(rows, facts, min_rows=1)
            raise
        if facts.top_k == 1:
            _check_layers_used(rows, facts, min_rows=routing.MIN_ROWS_TO_JUDGE_LAYER)
        return trace

    # -- interruption -------------------------------------------------------------------------------------

    async def interrupt(self, mode: InterruptMode) -> None:
        """Implements `Engine.interrupt`.

        `abort` does not use /pause_generation, which takes a second. It aborts all requests and waits until
        the last stream has ended on our side, which takes one decode step, and longer where rows are moved.
        It waits for as long as events or megabytes of a payload arrive.
        """
        if mode != "abort":
            self._paused = True
            await self.http.send_command("pause_generation", {"mode": mode})
            return
        self.read_at_once()
        silent_s, read, (delay_s, max_delay_s) = 0.0, self._num_pieces, ABORT_RESEND_S
        await self.http.send_command("abort_request", {"abort_all": True})
        while self._running:
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._idle.wait()
                    return
            silent_s = silent_s + delay_s if read == self._num_pieces else 0.0
            if silent_s >= self._config.request_timeout_s:
                raise EngineTimeout(
                    f"{self._engine_id} still runs {self._running} calls and has sent nothing for "
                    f"{self._config.request_timeout_s} s after they were aborted"
                )
            read, delay_s = self._num_pieces, min(2 * delay_s, max_delay_s)
            await self.http.send_command("abort_request", {"abort_all": True})

    async def resume_generation(self, mode: InterruptMode) -> None:
        """Implements `Engine.resume_generation`. After `abort` there is nothing to resume."""
        if mode != "abort":
            await self.http.send_command("continue_generation", {"torch_empty_cache": False})
        self._paused = False

    # -- weights ------------------------------------------------------------------------------------------

    async def join_weight_group(self, invite: GroupInvite) -> None:
        """Implements `Engine.join_weight_group`."""
        await self.http.send_slow_command(
            "init_weights_update_group",
            {
                "master_address": invite.host,
                "master_port": invite.port,
                "rank_offset": invite.rank_offset,
                "world_size": invite.world_size,
                "group_name": group_of(invite.group_name, invite.sender),
                "backend": invite.backend,
            },
        )

    async def leave_weight_group(self, group_name: str) -> None:
        """Implements `Engine.leave_weight_group`."""
        await self.http.send_slow_command("destroy_weights_update_group", {"group_name": group_name})

    async def update_weights(self, update: WeightUpdate, *, flush: bool) -> None:
        """Implements `Engine.update_weights`. The caller bounds the time."""
        version = str(update.weight_version)
        if isinstance(update, DiskUpdate):
            body = {"model_path": update.path, "weight_version": version, "flush_cache": flush}
            await self._load("update_weights_from_disk", body, version)
        elif isinstance(update, AdapterUpdate):
            await self._load_adapter(update, version)
        elif isinstance(update, DistributedUpdate):
            async with self._update_session():
                await self._load_distributed(update, version, flush)
        else:
            async with self._update_session():
                await self._load_shared(update, version, flush)
        served = (await wait_out(self.health)).weight_version
        if served != update.weight_version:
            raise VersionMismatch(
                f"{self._engine_id} serves weight version {served} after an update to {version}"
            )

    async def _load_adapter(self, update: AdapterUpdate, version: str) -> None:
        """Load an adapter in place of all others; no call runs.

        The server keys its prefix cache by adapter, and frees nothing of an adapter that was unloaded: the
        flush does. An adapter of the same name may be there, of a trainer that has restarted since.
        """
        listed = await self.http.get_info("v1/models", _ModelList)
        for card in listed.data:
            if card.parent is not None:
                await self._change_adapters("unload_lora_adapter", {"lora_name": card.id})
        name = adapter_name(update.weight_version)
        loaded = await self._change_adapters(
            "load_lora_adapter", {"lora_name": name, "lora_path": update.path}
        )
        if loaded != {name: update.path}:
            raise WeightSyncError(
                f"{self._engine_id} holds the adapters {loaded}, expected {name} from {update.path} alone"
            )
        await self._flush_cache()
        await self.http.send_slow_command(
            "update_weight_version", {"new_version": version, "abort_all_requests": False}
        )

    async def _change_adapters(self, endpoint: str, body: dict[str, str]) -> dict[str, str]:
        """Load or unload an adapter; returns all that are loaded afterwards."""
        status, text = await self.http.post_admin(endpoint, body)
        reply = self.http.parse_reply(text, endpoint, _AdapterReply)
        if status != 200 or not reply.success:
            raise WeightSyncError(
                f"{self._engine_id} refused /{endpoint} of {body['lora_name']} ({status}): "
                f"{reply.error_message}"
            )
        return reply.loaded_adapters or {}

    async def _load_distributed(self, update: DistributedUpdate, version: str, flush: bool) -> None:
        rounds = list(update.rounds())
        for number, buckets in enumerate(rounds, start=1):
            last = number == len(rounds)
            tensors = [spec for bucket in buckets for spec in bucket.tensors]
            groups = [(group_of(update.group_name, each.sender), len(each.tensors)) for each in buckets]
            body = {
                "names": [spec.name for spec in tensors],
                "dtypes": [spec.dtype for spec in tensors],
                "shapes": [spec.shape for spec in tensors],
                "group_name": join_groups(groups) if update.is_concurrent else groups[0][0],
                "load_format": "flattened_bucket",
                "flush_cache": flush and last,
                "weight_version": version if last else None,
            }
            await self._load("update_weights_from_distributed", body, version)

    async def _load_shared(self, update: TensorUpdate, version: str, flush: bool) -> None:
        number = 0
        async with aclosing(update.buckets()) as buckets:
            async for payloads in buckets:
                number += 1
                last = number == update.num_buckets
                body = {
                    "serialized_named_tensors": [pybase64.b64encode_as_string(data) for data in payloads],
                    "load_format": "flattened_bucket",
                    "flush_cache": flush and last,
                    "weight_version": version if last else None,
                }
                await self._load("update_weights_from_tensor", body, version)

    @asynccontextmanager
    async def _update_session(self) -> AsyncIterator[None]:
        """Let the server take weights in pieces within the block."""
        await self.http.send_slow_command("begin_weight_update", {})
        done = False
        try:
            yield
            done = True
        finally:
            if done:
                await self.http.send_command("end_weight_update", {})
            else:  # an open session would refuse every later update
                with suppress(EngineError, TimeoutError):  # as when it waits in a broadcast, or is stopped
                    async with asyncio.timeout(_END_LIMIT_S):
                        await self.http.send_command("end_weight_update", {})

    async def _load(self, endpoint: str, body: dict[str, Any], version: str) -> None:
        status, reply = await self.http.request_reply(endpoint, body)
        if status == 200 and reply.success:
            return
        if reply.message.startswith(_NOT_RECEIVED):
            raise WeightsNotReceived(f"{self._engine_id}: {reply.explain()}")
        if "Weights were updated" not in reply.message:
            raise WeightSyncError(f"{self._engine_id} refused weight version {version}: {reply.explain()}")
        # The server has the new weights, but refused the flush and did not count the version: do both.
        await self._flush_cache()
        await self.http.send_slow_command(
            "update_weight_version", {"new_version": version, "abort_all_requests": False}
        )

    async def _flush_cache(self) -> None:
        try:
            async with asyncio.timeout(_FLUSH_LIMIT_S + self._config.request_timeout_s):
                status, text = await self.http.post_admin("flush_cache", timeout=_FLUSH_LIMIT_S)
        except (EngineError, TimeoutError) as e:
            raise WeightSyncError(
                f"{self._engine_id} did not answer to a flush of its prefix cache: {e!r}"
            ) from e
        if status != 200:
            raise WeightSyncError(
                f"{self._engine_id} has new weights but would not flush its prefix cache within "
                f"{_FLUSH_LIMIT_S} s: {text.decode(errors='replace').strip()}. Interrupt it by abort or "
                f"retract before an update"
            )

    async def checksums(self) -> tuple[dict[str, str], ...]:
        """Implements `Engine.checksums`. The caller bounds the time."""
        status, text = await self.http.post_admin("weights_checker", {"action": "checksum"})
        if status != 200:
            raise EngineError(f"{self._engine_id} answered {status} to /weights_checker: {text[:300]!r}")
        ranks = self.http.parse_reply(text, "weights_checker", _WeightSums).ranks
        return tuple(rank.checksums for rank in ranks)

    # -- memory -------------------------------------------------------------------------------------------

    async def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Implements `Engine.release_memory`. The caller bounds the time.

        The scheduler asserts that it is idle. `memory_gate` in the server's process ensures that it is, and
        stays so until `resume_memory` has returned the last part.
        """
        await self.http.send_slow_command("release_memory_occupation", {"tags": list(parts)})

    async def resume_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Implements `Engine.resume_memory`. The caller bounds the time."""
        await self.http.send_slow_command("resume_memory_occupation", {"tags": list(parts)})

    # -- health -------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """Implements `Engine.health`."""
        info = await self.http.get_info("model_info", _ModelInfo)
        version = parse_version(self._engine_id, info.weight_version)
        return EngineHealth(weight_version=version, model_path=info.model_path)

    async def wait_ready(self) -> None:
        """Implements `Engine.wait_ready`. Also refuses a server that was started without required options.

        Each compiler that the server starts begins `engine.start_timeout_s` anew.

        Raises:
            ConfigError: When the server runs with an option that is incompatible with routing replay.
            EnvironmentNotReady: When it ends, is no SGLang server, or does not answer in time.
        """
        delay_s, refused_s, compilers = 0.02, 0.0, frozenset[int]()
        try:
            async with asyncio.timeout(self._config.start_timeout_s) as limit:
                while (status := await self._ready_status()) != 200:
                    refused_s = refused_s + delay_s if status in _NOT_SGLANG else 0.0
                    if refused_s > REFUSED_S:
                        raise EnvironmentNotReady(
                            f"{self._engine_id} at {self.http.url} answers GET /ready with {status}, so it "
                            "is no SGLang server, or behind a proxy that refuses us: check the URL"
                        )
                    if self._state is not None:
                        state = await self._state()
                        if state.exit_reason is not None:
                            raise EnvironmentNotReady(f"{self._engine_id} did not start: {state.exit_reason}")
                        if state.compilers - compilers:  # kernels that no start of this version has compiled
                            limit.reschedule(asyncio.get_running_loop().time() + self._config.start_timeout_s)
                            progressed()
                        compilers = state.compilers
                    # HTTP has no way to wait for a server to start: ask again, less often each time.
                    await asyncio.sleep(delay_s)
                    delay_s = min(delay_s * 1.5, 0.5)
        except TimeoutError as e:
            raise EnvironmentNotReady(
                f"{self._engine_id} at {self.http.url} did not answer within engine.start_timeout_s = "
                f"{self._config.start_timeout_s}"
            ) from e
        try:
            await self._check_server()
            info = await self.http.get_info("model_info", _ModelInfo)
            check_preferred_sampling(self._server_name, info.preferred_sampling_params)
            if not (info.weight_version or "").isdecimal():
                await self.http.send_command(
                    "update_weight_version", {"new_version": "0", "abort_all_requests": False}
                )
        except EngineError as e:
            raise EnvironmentNotReady(f"{self._engine_id} answers, but cannot be used: {e}") from e

    async def _ready_status(self) -> int | None:
        """Return 200 if the server takes calls, another status if it refuses, None if it does not answer.

        It takes none while it starts or is paused. An update that was cut short, by us or by an earlier
        driver, may have left it paused, so it is resumed.
        """
        status = await self.http.get_status("ready")
        if status == 503:
            with suppress(EngineError):
                await self.resume_generation("retract")
        return status

    @property
    def _server_name(self) -> str:
        return f"{self._engine_id} at {self.http.url}"

    async def _check_server(self) -> None:
        """Refuse a server that lacks what the run needs, and store how long its calls may be."""
        info = await self.http.get_info("server_info", ServerInfo)
        check_server(self._server_name, info, self._needs, self._facts)
        if info.context_length is not None:
            self._context_length = info.context_length
        # A server with less memory than context ends sequences where its memory does.
        pool = info.max_total_num_tokens or self._context_length
        # SGLang reports the cache of one of its data-parallel schedulers, which share the running requests.
        cache = None if info.max_total_num_tokens is None else info.max_total_num_tokens * info.dp_size
        self._capacity = EngineCapacity(cache_tokens=cache, max_running=info.max_running_requests)
        self._longest = self._context_length if pool >= self._context_length else 0

    async def close(self) -> None:
        """Implements `Engine.close`. A server that runs on is not left paused."""
        if self._paused:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_FLUSH_LIMIT_S):
                    await self.resume_generation("retract")
        await self.http.close()


def _check_layers_used(rows: np.ndarray, facts: EngineFacts, *, min_rows: int) -> None:
    """Refuse rows in which a MoE layer is zero throughout: its kernel bypassed the recorded top-k."""
    if len(rows) < min_rows:
        return
    unused = np.flatnonzero(~rows.any(axis=(0, 2)))
    if unused.size:
        layers = [facts.moe_layers[i] for i in unused.tolist()]
        raise AlignmentError(
            f"layers {layers} have experts, but all {len(rows)} rows are zero there: the server's MoE "
            f"backend does not record its choice"
        )
