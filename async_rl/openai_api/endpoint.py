"""The OpenAI-compatible HTTP server: one for all trajectories of a run, on loopback by default.

A key identifies a trajectory, as the API key or in the path (`/s/<key>/v1`). Keys are signed with a secret of
this process, which distinguishes an unknown key (401) from that of a finished trajectory (410) without a list
of old keys. Keys are never logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from aiohttp import web

from async_rl.errors import EnvironmentNotReady
from async_rl.openai_api.answers import ToolCallReader
from async_rl.openai_api.chat_completions import (
    ApiError,
    ChunkEncoder,
    ReplyHead,
    completion_body,
    error_event,
    models_body,
    read_request,
)
from async_rl.openai_api.history import Exchange
from async_rl.openai_api.request_handler import RequestHandler, trajectory_over
from async_rl.rollout.session.api import Session
from async_rl.runtime.supervision import Nursery, first_error

log = logging.getLogger(__name__)

_MAX_BODY_BYTES: Final = 64 << 20
"""A context of a million tokens is about 8 MB of JSON."""
_TRANSFER_S: Final = 60.0
"""The longest a client may take to send its request, or to receive data."""
_KEEP_ALIVE_S: Final = 10.0
"""The interval of a stream's keep-alive comments, while an engine waits for weights or prefills."""
_SHUTDOWN_S: Final = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EndpointAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent needs to send requests for one trajectory."""

    base_url: str
    """Ends in `/v1`; expects the key as OpenAI's API key."""
    api_key: str
    session_url: str
    """The same URL with the key in it, for agents without a setting for the key; they may send any."""
    model: str
    handler: RequestHandler


class Endpoint:
    """An OpenAI-compatible server that runs while trajectories are open.

    Example:
        >>> endpoint = Endpoint()
        >>> async with endpoint.open_trajectory(session, reader=reader) as access:
        ...     client = AsyncOpenAI(base_url=access.base_url, api_key=access.api_key)

    Args:
        host: Address to bind to.
        port: The port; 0 takes a free one.
        model: The name under which the policy is served.
        max_body_bytes: The largest request body.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        model: str = "policy",
        max_body_bytes: int = _MAX_BODY_BYTES,
    ) -> None:
        self._host = host
        self._port = port
        self._model = model
        self._max_body_bytes = max_body_bytes
        self._secret = secrets.token_bytes(32)
        self._handlers: dict[str, RequestHandler] = {}
        self._num_keys = 0
        self._lock = asyncio.Lock()
        self._num_users = 0
        self._runner: web.AppRunner | None = None
        self._reported_parameters: set[str] = set()
        self._started_s = int(time.time())

    @asynccontextmanager
    async def open_trajectory(
        self, session: Session, *, reader: ToolCallReader | None, opens_thought: bool = False
    ) -> AsyncIterator[EndpointAccess]:
        """Serve one trajectory inside the block.

        Args:
            session: The session of the trajectory.
            reader: Reads the policy's tool calls; None if their format is not known.
            opens_thought: Whether the prompt of each turn ends inside a thought.

        Raises:
            EnvironmentNotReady: The address cannot be bound.
            AsyncRLError: A turn of the policy failed, which cancels the block.
        """
        handler = RequestHandler(
            session, reader=reader, opens_thought=opens_thought, on_ignored=self._report_ignored
        )
        self._num_keys += 1
        key = self._sign(str(self._num_keys))
        async with self.serving() as url:
            self._handlers[key] = handler
            try:
                async with Nursery() as nursery:
                    nursery.start_task("openai requests", handler.serve_requests())
                    try:
                        yield EndpointAccess(
                            base_url=f"{url}/v1",
                            session_url=f"{url}/s/{key}/v1",
                            api_key=key,
                            model=self._model,
                            handler=handler,
                        )
                    finally:
                        del self._handlers[key]
                        handler.close()
            except BaseExceptionGroup as errors:
                raise first_error(errors) from errors

    # -- the server ------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether the server is up."""
        return self._runner is not None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Run the server while at least one block is open, and return its URL."""
        async with self._lock:
            if self._runner is None:
                self._runner = await self._start_server()
            runner = self._runner
            self._num_users += 1
        try:
            host = f"[{self._host}]" if ":" in self._host else self._host
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            self._num_users -= 1
            async with self._lock:
                if not self._num_users and self._runner is not None:
                    self._runner = None
                    await runner.cleanup()

    async def _start_server(self) -> web.AppRunner:
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[_errors_as_json])
        for prefix in ("", "/s/{key}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._post_completion)
            app.router.add_get(f"{prefix}/v1/models", self._list_models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._show_model)
        # A handler is cancelled with its connection, so that undelivered answers are recognised.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError as error:
            await runner.cleanup()
            raise EnvironmentNotReady(
                f"cannot serve the OpenAI API on {self._host}:{self._port} ({error.strerror or error}): set "
                "port in rollout.agent_loop_args to a free port, or to 0 for any"
            ) from error
        return runner

    # -- keys ------------------------------------------------------------------------------------------

    def _sign(self, name: str) -> str:
        code = hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()
        return f"sk-{name}-{code}"

    def _handler_of(self, request: web.Request) -> RequestHandler:
        """Return the handler of a request's key.

        Raises:
            ApiError: 401 for an unknown key, 410 for the key of a trajectory that is over.
        """
        authorization = request.headers.get("Authorization", "")
        key = request.match_info.get("key") or authorization.removeprefix("Bearer ").strip()
        name = key.removeprefix("sk-").partition("-")[0]
        if not hmac.compare_digest(key.encode(), self._sign(name).encode()):
            raise ApiError(
                401, "unknown API key: use the one that the agent received", code="invalid_api_key"
            )
        if key not in self._handlers:
            raise trajectory_over()
        return self._handlers[key]

    # -- requests --------------------------------------------------------------------------------------

    async def _post_completion(self, request: web.Request) -> web.StreamResponse:
        handler = self._handler_of(request)
        try:
            async with asyncio.timeout(_TRANSFER_S):
                body = await request.read()
        except TimeoutError as error:
            raise ApiError(408, f"the request did not come within {_TRANSFER_S:g} s", retry=True) from error
        tries = request.headers.get("x-stainless-retry-count", "")
        try:
            chat = read_request(body, self._model)
            exchange = handler.submit_request(chat, retry_count=int(tries) if tries.isdecimal() else None)
        except ApiError:
            handler.count_refused()
            raise
        head = ReplyHead(id=f"chatcmpl-{secrets.token_hex(12)}", created=int(time.time()), model=self._model)
        exchange.listeners += 1
        try:
            if chat.stream:
                chunks = ChunkEncoder(head, include_usage=chat.include_usage)
                response = await _stream_answer(request, handler, exchange, chunks, logprobs=chat.logprobs)
            else:
                while not exchange.ended:
                    await exchange.changed.wait()
                if exchange.error is not None:
                    raise exchange.error
                assert exchange.answer is not None
                response = await _send_json(
                    request, completion_body(exchange.answer, head, logprobs=chat.logprobs)
                )
        finally:
            exchange.listeners -= 1
        exchange.delivered = True
        return response

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        self._handler_of(request)
        return web.json_response(models_body(self._model, self._started_s))

    async def _show_model(self, request: web.Request) -> web.StreamResponse:
        self._handler_of(request)
        if (name := request.match_info["model"]) != self._model:
            raise ApiError(
                404, f"model {name!r} does not exist; the policy is {self._model!r}", param="model"
            )
        return web.json_response(models_body(self._model, self._started_s)["data"][0])

    def _report_ignored(self, parameters: dict[str, Any]) -> None:
        """Log each ignored parameter once."""
        for name in parameters.keys() - self._reported_parameters:
            self._reported_parameters.add(name)
            log.warning(
                "the agent requests %s = %r, which is ignored: the config decides how the policy is sampled "
                "(docs/guide/agents.md); this is logged once",
                name,
                parameters[name],
            )


async def _stream_answer(
    request: web.Request, handler: RequestHandler, exchange: Exchange, chunks: ChunkEncoder, *, logprobs: bool
) -> web.StreamResponse:
    """Send an answer as it grows."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
    )
    turn, num_read = handler.new_growing_turn(exchange), 0
    sent_reasoning: list[str] = []
    sent_content: list[str] = []

    async def send(data: bytes) -> None:
        async with asyncio.timeout(_TRANSFER_S):
            if not response.prepared:
                await response.prepare(request)
                await response.write(chunks.encode_delta({"role": "assistant", "content": ""}))
            await response.write(data)

    while not exchange.ended:
        changed = exchange.changed
        text, num_read = "".join(exchange.pieces[num_read:]), len(exchange.pieces)
        reasoning, content = turn.add_text(text)
        if reasoning:
            sent_reasoning.append(reasoning)
            await send(chunks.encode_delta({"reasoning_content": reasoning}))
        if content:
            sent_content.append(content)
            await send(chunks.encode_delta({"content": content}))
        try:
            async with asyncio.timeout(_KEEP_ALIVE_S):
                await changed.wait()
        except TimeoutError:
            await send(b": the policy is generating\n\n")
    if exchange.error is not None:
        if not response.prepared:
            raise exchange.error
        await send(error_event(exchange.error))
        await response.write_eof()
        return response
    answer = exchange.answer
    assert answer is not None
    reasoning, content = answer.reasoning or "", answer.content or ""
    told_reasoning, told_content = "".join(sent_reasoning), "".join(sent_content)
    if not (reasoning.startswith(told_reasoning) and content.startswith(told_content)):
        # Part of an invalid engine answer was sent before the answer was discarded and sampled again.
        await send(error_event(ApiError(500, "an engine withdrew what it had streamed", retry=True)))
        await response.write_eof()
        return response
    if new := reasoning[len(told_reasoning) :]:
        await send(chunks.encode_delta({"reasoning_content": new}))
    if new := content[len(told_content) :]:
        await send(chunks.encode_delta({"content": new}))
    if answer.calls:
        await send(chunks.encode_calls(answer.calls))
    await send(chunks.encode_end(answer, logprobs=logprobs))
    await response.write_eof()
    return response


async def _send_json(
    request: web.Request, value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    """Send JSON completely, so that the caller knows that it was delivered."""
    data = msgspec.json.encode(value)
    response = web.StreamResponse(
        status=status, headers={"Content-Type": "application/json", **(headers or {})}
    )
    response.content_length = len(data)
    async with asyncio.timeout(_TRANSFER_S):
        await response.prepare(request)
        await response.write(data)
        await response.write_eof()
    return response


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return all errors in OpenAI's format."""
    try:
        return await handler(request)
    except ApiError as error:
        failure = error
    except web.HTTPRequestEntityTooLarge as error:
        failure = ApiError(413, f"the request is too large: {error.text}")
    except web.HTTPException as error:
        failure = ApiError(
            error.status,
            f"{request.method} {request.path.rpartition('/v1')[2] or '/'} is not supported; there are "
            "POST /v1/chat/completions and GET /v1/models",
        )
    return await _send_json(request, failure.body, failure.status, failure.headers)
