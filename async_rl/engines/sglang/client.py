"""The client of a real SGLang server: its native HTTP API, token ids in, token ids streamed out.

```
generate ──POST /generate──► events ─► Chunk …  Chunk, Finish
interrupt("abort")  ─POST /abort_request──────► every stream ends as an abort, its tokens and rows delivered
update_weights      ─POST /update_weights_*───► flush ─► version read back and compared
```

What SGLang is asked for and what it answers was checked against 0.5.23; servers must run with
`--incremental-streaming-output` and, where routing is replayed, `--enable-return-routed-experts`.
`engines.server` starts them so, and `wait_ready` refuses others.

All requests go through aiohttp. A hand-written HTTP client saved 100 to 200 µs of CPU time per turn and 4
µs per event: a third of a turn whose reply is four tokens, a tenth of the turns that agents have, and less
than the factor of 1.3 that would have justified its 385 lines (docs/reference/performance.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
import numpy as np
import pybase64
from yarl import URL

from async_rl import routing
from async_rl.engine_protocol import (
    Chunk,
    DiskUpdate,
    DistributedUpdate,
    EngineFacts,
    EngineHealth,
    Finish,
    GenerateRequest,
    GroupInvite,
    InterruptMode,
    MemoryPart,
    RoutingPayload,
    TensorUpdate,
    WeightUpdate,
)
from async_rl.engines.sglang.generate_call import CallAccount, encode_request, parse_version
from async_rl.engines.sglang.routing_payload import PIECE_BYTES, RoutingText, RoutingWire, receiving
from async_rl.engines.sglang.sse import EventReader
from async_rl.errors import (
    AlignmentError,
    CallLost,
    ConfigError,
    EngineError,
    EngineTimeout,
    EnvironmentNotReady,
    PromptTooLong,
    RequestRefused,
    VersionMismatch,
    WeightSyncError,
)
from async_rl.types import RoutingTrace, VersionSpan

T = TypeVar("T")

_ABORT_RESEND_S: Final = 0.02
"""A request that was still on its way through the server's HTTP process misses an abort: say it again."""

_ID_WIDTH: Final = 32
"""Characters of every request id, so that none is the beginning of another."""

_FLUSH_LIMIT_S: Final = 5.0
"""How long a refused flush may be retried: what still runs after an abort is gone within one decode step."""

_PROBED_ROWS: Final = 512
"""Of a long payload that are checked for distinct experts."""

_READ_BUFFER_BYTES: Final = 1 << 17
"""A connection whose reader is slow holds twice this, and then holds the server back."""

_NO_TIMEOUT: Final = aiohttp.ClientTimeout(total=None)
"""Of a generate call: `request_timeout_s` bounds its start, and the pool of engines bounds its silence."""


class _Answer(msgspec.Struct):
    """Of a control request."""

    success: bool = True
    message: str = ""
    error: Any = None


class _RankSums(msgspec.Struct):
    checksums: dict[str, str]


class _WeightSums(msgspec.Struct):
    ranks: list[_RankSums]


class _ModelInfo(msgspec.Struct):
    model_path: str = ""
    weight_version: str | None = None


class _ServerInfo(msgspec.Struct):
    version: str = ""
    context_length: int | None = None
    enable_return_routed_experts: bool = False
    incremental_streaming_output: bool = False
    enable_hierarchical_cache: bool = False
    pp_size: int = 1
    speculative_algorithm: str | None = None
    speculative_eagle_topk: int | None = None
    moe_runner_backend: str | None = None


_encode = msgspec.json.Encoder().encode


class SGLangEngine:
    """One SGLang server, seen from here. See `protocol.Engine`.

    Invariant: no token, log-prob or routing row is delivered twice; `generate_call.CallAccount` sees to it.

    Example:
        >>> engine = SGLangEngine("engine-0", server.url, facts, api_key=server.api_key,
        ...                       admin_key=server.admin_key, routing=True, died=server.died)
        >>> await engine.wait_ready()
        >>> async for event in engine.generate(request): ...
    """

    def __init__(
        self,
        engine_id: str,
        url: str,
        facts: EngineFacts,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        routing: bool = False,
        narrow_routing: bool = False,
        request_timeout_s: float = 60.0,
        start_timeout_s: float = 600.0,
        died: Callable[[], Awaitable[str | None]] | None = None,
    ) -> None:
        """Remember where it is; connects to nothing.

        Args:
            engine_id: Name in logs, metrics and segments.
            url: `http://host:port`.
            facts: What routing payloads are checked against.
            api_key: Of the server, None when it asks for none.
            admin_key: Of its control endpoints; None takes `api_key`.
            routing: Whether calls will ask for routed experts; `wait_ready` then checks that it can.
            narrow_routing: Whether the server was started to send narrow ids (`engine.narrow_routing`).
            request_timeout_s: Longest answer to a control request, weight updates left out: their caller
                bounds them.
            start_timeout_s: Longest `wait_ready`.
            died: Last words of the server's process when it has ended, else None.
        """
        self._engine_id = engine_id
        self._facts = facts
        self._routing = routing
        self._wire = RoutingWire(facts=facts, narrow=narrow_routing)
        self._request_timeout_s = request_timeout_s
        self._start_timeout_s = start_timeout_s
        self._died = died
        self._session: aiohttp.ClientSession | None = None
        self.move_to(url, api_key, admin_key)
        self._context_length = facts.context_length
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._standing_still = False
        self.num_short_chunks = 0
        """Chunks whose tokens and log-probs differed in number and were cut to the shorter."""

    def move_to(self, url: str, api_key: str | None, admin_key: str | None) -> None:
        """The server is at another address now; connections to the old one end with their calls."""
        self._url = URL(url)
        self._headers = {"Content-Type": "application/json"} | _bearer(api_key)
        self._admin_headers = {"Content-Type": "application/json"} | _bearer(admin_key or api_key)

    @property
    def engine_id(self) -> str:
        """See `Engine.engine_id`."""
        return self._engine_id

    # -- generation ---------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk | Finish, None]:
        """See `Engine.generate`. How long it may be silent is for its caller to say, who sees all calls."""
        self._check(request)
        self._running += 1
        self._idle.clear()
        call = CallAccount(self._engine_id, request)
        finish: Finish | None = None
        response: aiohttp.ClientResponse | None = None
        reader = EventReader(lambda: RoutingText(self._wire, call.num_rows))
        gate = receiving()
        gated = False
        try:
            response = await self._post_generate(request)
            while data := await response.content.readany():
                events = reader.feed(data)
                if reader.payload is not None:
                    if not gated:
                        # Nothing more is read until this call may receive: the server is held back.
                        gated = await gate.acquire()
                    if events or reader.payload.pending >= PIECE_BYTES:
                        await asyncio.to_thread(reader.payload.narrow)
                for document, payload in events:
                    if document == b"[DONE]":
                        continue
                    chunk, finish = call.take(document, payload)
                    if chunk is not None:
                        yield chunk
            if finish is None:
                raise CallLost(f"{self._engine_id} ended the stream of {request.request_id} without a finish")
        except aiohttp.ClientConnectorError as e:
            raise EngineError(f"{self._engine_id} at {self._url} cannot be reached: {e}") from e
        except aiohttp.ClientError as e:
            raise CallLost(f"{self._engine_id} at {self._url}: connection lost: {e!r}") from e
        finally:
            if gated:
                gate.release()
            self.num_short_chunks += call.cut_short
            self._running -= 1
            if not self._running:
                self._idle.set()
            if response is not None:
                if finish is None:
                    await self._abort(request.request_id)
                response.close()  # a connection that was read to its end is back in the pool already
        yield finish

    async def _post_generate(self, request: GenerateRequest) -> aiohttp.ClientResponse:
        try:
            async with asyncio.timeout(self._request_timeout_s):
                response = await self._open().post(
                    self._url / "generate",
                    data=encode_request(request),
                    headers=self._headers,
                    timeout=_NO_TIMEOUT,
                )
                if response.status != 200:
                    async with response:
                        text = await response.read()
        except TimeoutError as e:
            raise CallLost(
                f"{self._engine_id} did not take a request within {self._request_timeout_s} s"
            ) from e
        if response.status != 200:
            message = f"{self._engine_id} answered {response.status} to a request: {text[:500]!r}"
            raise RequestRefused(message) if 400 <= response.status < 500 else CallLost(message)
        return response

    async def _abort(self, request_id: str) -> None:
        """Free the slot of a call that we have left. SGLang notices by itself too, within seconds."""
        try:
            async with asyncio.timeout(1.0):
                await self._control("abort_request", {"rid": request_id})
        except (EngineError, TimeoutError):
            return  # it is gone, or too busy to listen: then it has to notice

    def _check(self, request: GenerateRequest) -> None:
        if len(request.request_id) != _ID_WIDTH:
            raise ValueError(
                f"request id {request.request_id!r} of {len(request.request_id)} characters, expected "
                f"{_ID_WIDTH}: SGLang aborts all whose ids begin with the one it is told"
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
        """See `Engine.decode_routing`. `payload.data` is base64, or rows where they were narrowed already.

        All ids are checked to exist; to be distinct, a sample of a long payload: what makes an engine repeat
        itself does so in every row. One stray row is found by `routing.check`, which looks at each of a
        finished trajectory.
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
            raise AlignmentError(f"{self._engine_id} sent routing of no use: {e}") from e
        try:
            probe = rows[:: max(1, len(rows) // _PROBED_ROWS)]
            trace = routing.make_trace(
                probe, facts.num_experts, payload.weight_version, moe_layers=facts.moe_layers
            )
        except AlignmentError:
            _check_layers_used(rows, facts, min_rows=1)
            raise
        if facts.top_k == 1:
            _check_layers_used(rows, facts, min_rows=routing.MIN_ROWS_TO_JUDGE_LAYER)
        if not len(rows):
            return trace
        span = VersionSpan(start=0, end=len(rows), weight_version=payload.weight_version)
        return msgspec.structs.replace(trace, rows=rows, spans=(span,))

    # -- interruption -------------------------------------------------------------------------------------

    async def interrupt(self, mode: InterruptMode) -> None:
        """See `Engine.interrupt`.

        `abort` does not use /pause_generation: SGLang's takes a second. It aborts all requests and waits
        until the last stream has ended on our side, which takes one decode step.
        """
        if mode != "abort":
            self._standing_still = True
            await self._command("pause_generation", {"mode": mode})
            return
        try:
            async with asyncio.timeout(self._request_timeout_s):
                await self._command("abort_request", {"abort_all": True})
                while self._running:
                    try:
                        async with asyncio.timeout(_ABORT_RESEND_S):
                            await self._idle.wait()
                    except TimeoutError:
                        await self._command("abort_request", {"abort_all": True})
        except TimeoutError as e:
            raise EngineTimeout(
                f"{self._engine_id} still runs {self._running} calls {self._request_timeout_s} s after they "
                f"were aborted"
            ) from e

    async def resume_generation(self, mode: InterruptMode) -> None:
        """See `Engine.resume_generation`. After `abort` there is nothing to undo."""
        if mode != "abort":
            await self._command("continue_generation", {"torch_empty_cache": False})
        self._standing_still = False

    # -- weights ------------------------------------------------------------------------------------------

    async def join_weight_group(self, invite: GroupInvite) -> None:
        """See `Engine.join_weight_group`."""
        await self._update_command(
            "init_weights_update_group",
            {
                "master_address": invite.host,
                "master_port": invite.port,
                "rank_offset": invite.rank_offset,
                "world_size": invite.world_size,
                "group_name": invite.group_name,
                "backend": invite.backend,
            },
        )

    async def leave_weight_group(self, group_name: str) -> None:
        """See `Engine.leave_weight_group`."""
        await self._update_command("destroy_weights_update_group", {"group_name": group_name})

    async def update_weights(self, update: WeightUpdate, *, flush: bool) -> None:
        """See `Engine.update_weights`. Bounded in time by its caller."""
        version = str(update.weight_version)
        if isinstance(update, DiskUpdate):
            body = {"model_path": update.path, "weight_version": version, "flush_cache": flush}
            await self._load("update_weights_from_disk", body, version)
        elif isinstance(update, DistributedUpdate):
            async with self._loading():
                await self._load_distributed(update, version, flush)
        else:
            async with self._loading():
                await self._load_shared(update, version, flush)
        served = (await self.health()).weight_version
        if served != update.weight_version:
            raise VersionMismatch(
                f"{self._engine_id} serves weight version {served} after an update to {version}"
            )

    async def _load_distributed(self, update: DistributedUpdate, version: str, flush: bool) -> None:
        for number, bucket in enumerate(update.buckets, start=1):
            last = number == len(update.buckets)
            body = {
                "names": [spec.name for spec in bucket],
                "dtypes": [spec.dtype for spec in bucket],
                "shapes": [spec.shape for spec in bucket],
                "group_name": update.group_name,
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
    async def _loading(self) -> AsyncIterator[None]:
        """The server takes weights in pieces within the block."""
        await self._update_command("begin_weight_update", {})
        done = False
        try:
            yield
            done = True
        finally:
            # Also after a failure: an open session would refuse every later update. Bounded: an engine that
            # sits in a broadcast nobody sends answers to nothing.
            try:
                await self._command("end_weight_update", {})
            except EngineError:
                if done:
                    raise

    async def _load(self, endpoint: str, body: dict[str, Any], version: str) -> None:
        status, answer = await self._control(endpoint, body)
        if status == 200 and answer.success:
            return
        if "Weights were updated" not in answer.message:
            raise WeightSyncError(f"{self._engine_id} refused weight version {version}: {_words(answer)}")
        # The weights are the new ones, only the flush was refused, and the server has not counted the
        # version: finish both.
        await self._flush()
        await self._update_command(
            "update_weight_version", {"new_version": version, "abort_all_requests": False}
        )

    async def _flush(self, before: str = "has new weights but ") -> None:
        endpoint = (self._url / "flush_cache").with_query(timeout=_FLUSH_LIMIT_S)
        try:
            async with asyncio.timeout(_FLUSH_LIMIT_S + self._request_timeout_s):
                async with self._open().post(endpoint, headers=self._admin_headers) as response:
                    status, text = response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError) as e:
            raise WeightSyncError(
                f"{self._engine_id} did not answer to a flush of its prefix cache: {e!r}"
            ) from e
        if status != 200:
            raise WeightSyncError(
                f"{self._engine_id} {before}would not flush its prefix cache within {_FLUSH_LIMIT_S} s: "
                f"{text.strip()}. Interrupt it by abort or retract before an update"
            )

    async def checksums(self) -> tuple[dict[str, str], ...]:
        """See `Engine.checksums`. Bounded in time by its caller."""
        status, text = await self._post("weights_checker", {"action": "checksum"})
        if status != 200:
            raise EngineError(f"{self._engine_id} answered {status} to /weights_checker: {text[:300]!r}")
        ranks = self._parse(text, "weights_checker", _WeightSums).ranks
        return tuple(rank.checksums for rank in ranks)

    # -- memory -------------------------------------------------------------------------------------------

    async def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        """See `Engine.release_memory`. Bounded in time by its caller.

        The scheduler asserts that it is idle, and a stream that has ended here may have its last batch there
        yet. It flushes its cache only when it is idle, so a flush that goes through comes first.
        """
        await self._flush(before="")
        await self._update_command("release_memory_occupation", {"tags": list(parts)})

    async def resume_memory(self, parts: Sequence[MemoryPart]) -> None:
        """See `Engine.resume_memory`. Bounded in time by its caller."""
        await self._update_command("resume_memory_occupation", {"tags": list(parts)})

    # -- health -------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """See `Engine.health`."""
        info = await self._ask("model_info", _ModelInfo)
        version = parse_version(self._engine_id, info.weight_version)
        return EngineHealth(weight_version=version, model_path=info.model_path)

    async def wait_ready(self) -> None:
        """See `Engine.wait_ready`. Also refuses a server that was started without what we need.

        Raises:
            ConfigError: When it runs with something that routing replay cannot live with.
        """
        delay_s = 0.02
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not await self._answers():
                    last_words = await self._died() if self._died is not None else None
                    if last_words is not None:
                        raise EnvironmentNotReady(f"{self._engine_id} did not start: {last_words}")
                    # HTTP cannot tell when a server will be there: ask again, less often each time.
                    await asyncio.sleep(delay_s)
                    delay_s = min(delay_s * 1.5, 0.5)
        except TimeoutError as e:
            raise EnvironmentNotReady(
                f"{self._engine_id} at {self._url} did not answer within engine.start_timeout_s = "
                f"{self._start_timeout_s}"
            ) from e
        try:
            self._check_server(await self._ask("server_info", _ServerInfo))
            info = await self._ask("model_info", _ModelInfo)
            if not (info.weight_version or "").isdecimal():
                await self._command(
                    "update_weight_version", {"new_version": "0", "abort_all_requests": False}
                )
        except EngineError as e:
            raise EnvironmentNotReady(f"{self._engine_id} answers, but is of no use: {e}") from e

    async def _answers(self) -> bool:
        """Whether it takes calls.

        It does not while it starts, nor while it stands still: an update that was cut short, of ours or of a
        driver before us, may have left it so, and it is told to go on.
        """
        try:
            async with asyncio.timeout(self._request_timeout_s):
                async with self._open().get(self._url / "ready", headers=self._headers) as response:
                    status = response.status
        except (aiohttp.ClientError, TimeoutError):
            return False
        if status == 503:
            with suppress(EngineError):
                await self.resume_generation("retract")
        return status == 200

    def _check_server(self, info: _ServerInfo) -> None:
        who = f"{self._engine_id} at {self._url}"
        if not info.incremental_streaming_output:
            raise ConfigError(
                f"{who} repeats all it has sampled with every token: start it with "
                f"--incremental-streaming-output"
            )
        if self._routing:
            if not info.enable_return_routed_experts:
                raise ConfigError(
                    f"{who} would silently leave out the routing: start it with "
                    f"--enable-return-routed-experts, or set routing.replay=off"
                )
            holes = {
                "--enable-hierarchical-cache (rows of loaded-back prefixes are stale)": (
                    info.enable_hierarchical_cache
                ),
                f"--pp-size {info.pp_size} (rows of the stages are not gathered)": info.pp_size > 1,
                "tree speculation (the cache moves, the rows do not)": (
                    info.speculative_algorithm is not None and (info.speculative_eagle_topk or 1) > 1
                ),
                f"--moe-runner-backend {info.moe_runner_backend} (it bypasses the recorded top-k)": any(
                    name in (info.moe_runner_backend or "") for name in ("trtllm", "mxfp4")
                ),
            }
            for hole, found in holes.items():
                if found:
                    raise ConfigError(
                        f"{who} runs with {hole}, which gives wrong routing: start it without, or set "
                        f"routing.replay=off"
                    )
        if info.context_length is not None:
            self._context_length = info.context_length

    async def close(self) -> None:
        """See `Engine.close`. A server that runs on is not left standing still."""
        if self._standing_still:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_FLUSH_LIMIT_S):
                    await self.resume_generation("retract")
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- HTTP ---------------------------------------------------------------------------------------------

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                # As many connections as there are calls: the engine pool bounds those.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
                read_bufsize=_READ_BUFFER_BYTES,
            )
        return self._session

    async def _ask(self, endpoint: str, kind: type[T]) -> T:
        try:
            async with asyncio.timeout(self._request_timeout_s):
                async with self._open().get(self._url / endpoint, headers=self._headers) as response:
                    status, text = response.status, await response.read()
        except TimeoutError as e:
            raise EngineTimeout(
                f"{self._engine_id} did not answer /{endpoint} within {self._request_timeout_s} s"
            ) from e
        except aiohttp.ClientError as e:
            raise EngineError(f"{self._engine_id} at {self._url} cannot be reached: {e!r}") from e
        if status != 200:
            raise EngineError(f"{self._engine_id} answered {status} to /{endpoint}: {text[:300]!r}")
        return self._parse(text, endpoint, kind)

    async def _command(self, endpoint: str, body: dict[str, Any]) -> None:
        """A control request that must succeed, within `request_timeout_s`."""
        try:
            async with asyncio.timeout(self._request_timeout_s):
                await self._update_command(endpoint, body)
        except TimeoutError as e:
            raise EngineTimeout(
                f"{self._engine_id} did not answer /{endpoint} within {self._request_timeout_s} s"
            ) from e

    async def _update_command(self, endpoint: str, body: dict[str, Any]) -> None:
        """A control request that must succeed, in time its caller bounds."""
        status, answer = await self._control(endpoint, body)
        if status != 200 or not answer.success:
            raise WeightSyncError(f"{self._engine_id} refused /{endpoint} ({status}): {_words(answer)}")

    async def _control(self, endpoint: str, body: dict[str, Any]) -> tuple[int, _Answer]:
        status, text = await self._post(endpoint, body)
        if text in (b"", b"null"):  # the endpoints of memory have nothing to say
            return status, _Answer()
        return status, self._parse(text, endpoint, _Answer)

    async def _post(self, endpoint: str, body: dict[str, Any]) -> tuple[int, bytes]:
        try:
            async with self._open().post(
                self._url / endpoint, data=_encode(body), headers=self._admin_headers
            ) as response:
                text = await response.read()
        except aiohttp.ClientError as e:
            raise EngineError(f"{self._engine_id} at {self._url} cannot be reached: {e!r}") from e
        if response.status in (401, 403):
            raise EngineError(f"{self._engine_id} refuses our admin key for /{endpoint}")
        return response.status, text

    def _parse(self, text: bytes, endpoint: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError as e:
            raise EngineError(f"{self._engine_id} answered /{endpoint} with {text[:200]!r}: {e}") from e


def _bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _words(answer: _Answer) -> str:
    if isinstance(answer.error, dict):
        return str(answer.error.get("message", answer.error))
    return answer.message or str(answer.error)


def _check_layers_used(rows: np.ndarray, facts: EngineFacts, *, min_rows: int) -> None:
    """Refuse a MoE layer that is zero in all rows: its kernel bypassed the recorded top-k."""
    if len(rows) < min_rows:
        return
    unused = np.flatnonzero(~rows.any(axis=(0, 2)))
    if unused.size:
        layers = [facts.moe_layers[i] for i in unused.tolist()]
        raise AlignmentError(
            f"layers {layers} have experts, but all {len(rows)} rows are zero there: the server's MoE "
            f"backend does not record its choice"
        )
