"""The endpoint over HTTP: one server for all trajectories of a run, on loopback unless told otherwise.

A trajectory is known by its key, as the API key or in the path (`/s/<key>/v1`). Keys are made by a code that
only this process knows, so that one that was never given out (401) is told from one whose trajectory is over
(410) without remembering either. No key is ever logged.
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
from async_rl.openai_api.answers import Reader
from async_rl.openai_api.chat_completions import (
    ApiError,
    Chunks,
    ReplyHead,
    completion,
    error_event,
    models,
    read_request,
)
from async_rl.openai_api.history import Exchange
from async_rl.openai_api.request_handler import RequestHandler, closed
from async_rl.rollout.session.api import Session
from async_rl.runtime.supervision import Nursery, first_error

log = logging.getLogger(__name__)

_MAX_BODY_BYTES: Final = 64 << 20
"""A context of a million tokens as JSON is some 8 MB."""
_EDGE_S: Final = 60.0
"""Longest a client may take to send its request, or to take what it is sent."""
_HEARTBEAT_S: Final = 10.0
"""A stream says so often that it is alive, while an engine waits for weights or prefills."""
_SHUTDOWN_S: Final = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent needs to ask the policy in the name of one trajectory."""

    base_url: str
    """Ends in `/v1`; asks for the key as OpenAI's API key."""
    api_key: str
    session_url: str
    """The same with the key in it, for agents that cannot be given one; any API key will do then."""
    model: str
    desk: RequestHandler


class Endpoint:
    """An OpenAI-compatible server that runs while trajectories are open.

    Example:
        >>> endpoint = Endpoint()
        >>> async with endpoint.open(session, reader=reader) as access:
        ...     client = AsyncOpenAI(base_url=access.base_url, api_key=access.api_key)

    Args:
        host: Address to bind to.
        port: 0 takes a free one.
        model: The name under which the policy is served.
        max_body_bytes: A larger request is refused.
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
        self._desks: dict[str, RequestHandler] = {}
        self._num_keys = 0
        self._lock = asyncio.Lock()
        self._users = 0
        self._runner: web.AppRunner | None = None
        self._asked_in_vain: set[str] = set()
        self._started_s = int(time.time())

    @asynccontextmanager
    async def open(
        self, session: Session, *, reader: Reader | None, opens_thought: bool = False
    ) -> AsyncIterator[Access]:
        """Serve one trajectory while the block runs.

        Args:
            session: The trajectory.
            reader: Of the policy's tool calls; None where their format is not known.
            opens_thought: Whether the prompt of each turn ends within a thought.

        Raises:
            EnvironmentNotReady: The address cannot be bound.
            AsyncRLError: What ended a turn of the policy; the block is cancelled then.
        """
        desk = RequestHandler(session, reader=reader, opens_thought=opens_thought, noticed=self._notice)
        self._num_keys += 1
        key = self._sign(str(self._num_keys))
        async with self.serving() as url:
            self._desks[key] = desk
            try:
                async with Nursery() as nursery:
                    nursery.start_task("openai requests", desk.serve())
                    try:
                        yield Access(
                            base_url=f"{url}/v1",
                            session_url=f"{url}/s/{key}/v1",
                            api_key=key,
                            model=self._model,
                            desk=desk,
                        )
                    finally:
                        del self._desks[key]
                        desk.close()
            except BaseExceptionGroup as errors:
                raise first_error(errors) from errors

    # -- the server ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """The server's URL; it is up while somebody is in here."""
        async with self._lock:
            if self._runner is None:
                self._runner = await self._start()
            runner = self._runner
            self._users += 1
        try:
            host = f"[{self._host}]" if ":" in self._host else self._host
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            self._users -= 1
            async with self._lock:
                if not self._users and self._runner is not None:
                    self._runner = None
                    await runner.cleanup()

    async def _start(self) -> web.AppRunner:
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[_errors_as_json])
        for prefix in ("", "/s/{key}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._complete)
            app.router.add_get(f"{prefix}/v1/models", self._list_models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._show_model)
        # A handler ends with its connection: that is how an answer that nobody took is known.
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

    def _desk(self, request: web.Request) -> RequestHandler:
        """Whose key this is.

        Raises:
            ApiError: 401 for nobody's, 410 for one of a trajectory that is over.
        """
        authorization = request.headers.get("Authorization", "")
        key = request.match_info.get("key") or authorization.removeprefix("Bearer ").strip()
        name = key.removeprefix("sk-").partition("-")[0]
        if not hmac.compare_digest(key.encode(), self._sign(name).encode()):
            raise ApiError(
                401, "no such API key: use the one that the agent was given", code="invalid_api_key"
            )
        if key not in self._desks:
            raise closed()
        return self._desks[key]

    # -- requests --------------------------------------------------------------------------------------

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        desk = self._desk(request)
        try:
            async with asyncio.timeout(_EDGE_S):
                body = await request.read()
        except TimeoutError as error:
            raise ApiError(408, f"the request did not come within {_EDGE_S:g} s", retry=True) from error
        tries = request.headers.get("x-stainless-retry-count", "")
        try:
            chat = read_request(body, self._model)
            exchange = desk.ask(chat, retry_count=int(tries) if tries.isdecimal() else None)
        except ApiError:
            desk.refused()
            raise
        head = ReplyHead(id=f"chatcmpl-{secrets.token_hex(12)}", created=int(time.time()), model=self._model)
        exchange.listeners += 1
        try:
            if chat.stream:
                chunks = Chunks(head, include_usage=chat.include_usage)
                response = await _stream(request, desk, exchange, chunks, logprobs=chat.logprobs)
            else:
                while not exchange.ended:
                    await exchange.changed.wait()
                if exchange.error is not None:
                    raise exchange.error
                assert exchange.answer is not None
                response = await _send_json(
                    request, completion(exchange.answer, head, logprobs=chat.logprobs)
                )
        finally:
            exchange.listeners -= 1
        exchange.delivered = True
        return response

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        self._desk(request)
        return web.json_response(models(self._model, self._started_s))

    async def _show_model(self, request: web.Request) -> web.StreamResponse:
        self._desk(request)
        if (name := request.match_info["model"]) != self._model:
            raise ApiError(
                404, f"model {name!r} does not exist; the policy is {self._model!r}", param="model"
            )
        return web.json_response(models(self._model, self._started_s)["data"][0])

    def _notice(self, asked: dict[str, Any]) -> None:
        """Say once a parameter that it is not heeded."""
        for name in asked.keys() - self._asked_in_vain:
            self._asked_in_vain.add(name)
            log.warning(
                "the agent asks for %s = %r: not heeded, the policy is sampled as the config says "
                "(docs/guide/agents.md); said once",
                name,
                asked[name],
            )


async def _stream(
    request: web.Request, desk: RequestHandler, exchange: Exchange, chunks: Chunks, *, logprobs: bool
) -> web.StreamResponse:
    """Send an answer as it grows."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
    )
    sent_reasoning, sent_content = "", ""

    async def send(data: bytes) -> None:
        async with asyncio.timeout(_EDGE_S):
            if not response.prepared:
                await response.prepare(request)
                await response.write(chunks.delta({"role": "assistant", "content": ""}))
            await response.write(data)

    while not exchange.ended:
        changed = exchange.changed
        shown = desk.shown(exchange)
        if new := (shown.reasoning or "")[len(sent_reasoning) :]:
            sent_reasoning += new
            await send(chunks.delta({"reasoning_content": new}))
        if new := shown.content[len(sent_content) :]:
            sent_content += new
            await send(chunks.delta({"content": new}))
        try:
            async with asyncio.timeout(_HEARTBEAT_S):
                await changed.wait()
        except TimeoutError:
            await send(b": the policy is at work\n\n")
    if exchange.error is not None:
        if not response.prepared:
            raise exchange.error
        await send(error_event(exchange.error))
        await response.write_eof()
        return response
    answer = exchange.answer
    assert answer is not None
    reasoning, content = answer.reasoning or "", answer.content or ""
    if not (reasoning.startswith(sent_reasoning) and content.startswith(sent_content)):
        # An engine's answer turned out to be wrong after part of it was sent, and was sampled again.
        await send(error_event(ApiError(500, "an engine took back what it had streamed", retry=True)))
        await response.write_eof()
        return response
    if new := reasoning[len(sent_reasoning) :]:
        await send(chunks.delta({"reasoning_content": new}))
    if new := content[len(sent_content) :]:
        await send(chunks.delta({"content": new}))
    if answer.calls:
        await send(chunks.calls(answer.calls))
    await send(chunks.end(answer, logprobs=logprobs))
    await response.write_eof()
    return response


async def _send_json(
    request: web.Request, value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    """Send JSON to its end, so that the caller knows that it went out."""
    data = msgspec.json.encode(value)
    response = web.StreamResponse(
        status=status, headers={"Content-Type": "application/json", **(headers or {})}
    )
    response.content_length = len(data)
    async with asyncio.timeout(_EDGE_S):
        await response.prepare(request)
        await response.write(data)
        await response.write_eof()
    return response


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong is told in OpenAI's form."""
    try:
        return await handler(request)
    except ApiError as error:
        told = error
    except web.HTTPRequestEntityTooLarge as error:
        told = ApiError(413, f"the request is too large: {error.text}")
    except web.HTTPException as error:
        told = ApiError(
            error.status,
            f"{request.method} {request.path.rpartition('/v1')[2] or '/'} is not served; there are "
            "POST /v1/chat/completions and GET /v1/models",
        )
    return await _send_json(request, told.body, told.status, told.headers)
