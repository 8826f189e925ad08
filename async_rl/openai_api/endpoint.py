"""The HTTP server for agents: one for all trajectories of a process, on loopback by default.

An agent on another host needs an address that it reaches, so the server can bind to others, with TLS.

A key identifies a trajectory, as the API key or in the path (`/s/<key>/v1`). Keys are signed with a secret of
this process, which distinguishes an unknown key (401) from that of a finished trajectory (410) without a list
of old keys. Keys are never logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import reprlib
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, Final

import msgspec
from aiohttp import web

from async_rl.errors import EnvironmentNotReady
from async_rl.openai_api.answers import ToolCallReader
from async_rl.openai_api.anthropic_messages import AnthropicMessages
from async_rl.openai_api.chat_completions import ChatCompletions
from async_rl.openai_api.history import Exchange
from async_rl.openai_api.reading import with_instructions
from async_rl.openai_api.request_handler import RequestHandler, trajectory_over
from async_rl.openai_api.requests import AnswerStream, ApiError, ChatRequest, Dialect, ReplyHead
from async_rl.openai_api.responses import Responses
from async_rl.rollout.session.api import Session
from async_rl.runtime.addresses import reachable_address
from async_rl.runtime.http_listener import (
    TRANSFER_S,
    Handler,
    ServedApplication,
    in_time,
    json_response,
    send_response,
    serve_http,
)
from async_rl.runtime.listeners import ByteBudget, ConnectionLimit, RepeatFilter
from async_rl.runtime.supervision import Nursery, first_error
from async_rl.runtime.threads import LastingThread
from async_rl.runtime.tls import Handshakes

log = logging.getLogger(__name__)
log.addFilter(RepeatFilter())

MAX_BODY_BYTES: Final = 8 << 20
"""A context of a million tokens is about 8 MB of JSON."""
_BODIES_PER_KEY: Final = 4
"""The most bodies of the largest size that are read at a time for one key."""
_BODIES: Final = 32
"""The same for all keys."""
_SMALL_BODY_BYTES: Final = 1 << 16
"""Bodies up to this size are parsed in the event loop, within a millisecond."""
_KEEP_ALIVE_S: Final = 10.0
"""The interval of a stream's keep-alive comments, while an engine waits for weights or prefills."""


_COUNT_TOKENS: Final = "/v1/messages/count_tokens"
DIALECTS: Final[Sequence[Dialect]] = (ChatCompletions(), Responses(), AnthropicMessages())


class EndpointAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent needs to send requests for one trajectory."""

    root_url: str
    """The base URL of Anthropic's clients, which add `/v1` themselves."""
    api_key: str
    model: str
    handler: RequestHandler

    @property
    def base_url(self) -> str:
        """The base URL of OpenAI's clients: ends in `/v1`, expects the key as API key."""
        return f"{self.root_url}/v1"

    @property
    def session_url(self) -> str:
        """The same URL with the key in it, for agents without a setting for the key; they may send any."""
        return f"{self.root_url}/s/{self.api_key}/v1"


class _Keys:
    """The keys of trajectories, signed with a secret of this process."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._num_keys = 0
        self.handlers: dict[str, RequestHandler] = {}
        """Those of open trajectories, by key."""

    def add_handler(self, handler: RequestHandler) -> str:
        """Return a new key, under which a trajectory's handler is found."""
        self._num_keys += 1
        key = self._sign(str(self._num_keys))
        self.handlers[key] = handler
        return key

    def handler_of(self, key: str) -> RequestHandler:
        """Return the handler of a key.

        Raises:
            ApiError: 401 for an unknown key, 410 for the key of a trajectory that is over.
        """
        name = key.removeprefix("sk-").partition("-")[0]
        if not key.isascii() or not hmac.compare_digest(key, self._sign(name)):
            raise ApiError(
                401, "unknown API key: use the one that the agent received", code="invalid_api_key"
            )
        if key not in self.handlers:
            raise trajectory_over()
        return self.handlers[key]

    def _sign(self, name: str) -> str:
        code = hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()
        return f"sk-{name}-{code}"


class Endpoint:
    """An OpenAI-compatible server that runs while trajectories are open.

    Args:
        host: Address to bind to; `0.0.0.0` and `::` bind to all.
        port: The port; 0 takes a free one.
        public_host: The name or address in the URLs of agents; by default `host`, or the address
            of this node if that means all.
        tls: Encrypts the connections; None serves plain HTTP.
        model: The name under which the policy is served.
        max_body_bytes: The largest request body.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        public_host: str | None = None,
        tls: ssl.SSLContext | None = None,
        model: str = "policy",
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._host = host
        self._port = port
        self._public_host = public_host
        self._tls = tls
        self._model = model
        self._max_body_bytes = max_body_bytes
        self._keys = _Keys()
        self._lock = asyncio.Lock()
        self._num_users = 0
        self._server: AsyncExitStack | None = None
        self._served: ServedApplication | None = None
        self._url = ""
        self._limit = ConnectionLimit("the OpenAI endpoint")
        self._bodies = ByteBudget(_BODIES * max_body_bytes, _BODIES_PER_KEY * max_body_bytes)
        self._reported_parameters: set[str] = set()
        self._started_s = int(time.time())

    @asynccontextmanager
    async def open_trajectory(
        self,
        session: Session,
        *,
        reader: ToolCallReader | None,
        opens_thought: bool = False,
        ignores_constraints: bool = False,
    ) -> AsyncIterator[EndpointAccess]:
        """Serve one trajectory inside the block.

        Args:
            session: The session of the trajectory.
            reader: Reads the policy's tool calls; None if their format is not known.
            opens_thought: Whether the prompt of each turn ends inside a thought.
            ignores_constraints: Whether a request that forces what the policy writes is answered without
                that, where it cannot be exact; else it is refused.

        Raises:
            EnvironmentNotReady: The address cannot be bound.
            AsyncRLError: A turn of the policy failed, which cancels the block.
        """
        handler = RequestHandler(
            session,
            reader=reader,
            opens_thought=opens_thought,
            ignores_constraints=ignores_constraints,
            on_ignored=self._report_ignored,
        )
        async with self.serving() as url:
            key = self._keys.add_handler(handler)
            try:
                async with Nursery() as nursery:
                    nursery.start_task("openai requests", handler.serve_requests())
                    try:
                        yield EndpointAccess(root_url=url, api_key=key, model=self._model, handler=handler)
                    finally:
                        self._forget_keys(handler)
                        handler.close()
            except BaseExceptionGroup as errors:
                raise first_error(errors) from errors

    def renew_access(self, access: EndpointAccess) -> EndpointAccess:
        """Return another key of an open trajectory, for an agent that begins anew; the former one is void.

        The agent receives the earlier answers while it sends the same requests.
        """
        self._forget_keys(access.handler)
        access.handler.forget_deliveries()
        return msgspec.structs.replace(access, api_key=self._keys.add_handler(access.handler))

    def _forget_keys(self, handler: RequestHandler) -> None:
        for key in [key for key, each in self._keys.handlers.items() if each is handler]:
            del self._keys.handlers[key]
            self._limit.forget_key(key)

    # -- the server ------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether the server is up."""
        return self._server is not None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Run the server while at least one block is open, and return its URL."""
        async with self._lock:
            if self._server is None:
                self._server, self._url = await self._start_server()
            self._num_users += 1
        try:
            yield self._url
        finally:
            self._num_users -= 1
            async with self._lock:
                if not self._num_users and self._server is not None:
                    server, self._server = self._server, None
                    await server.aclose()

    @asynccontextmanager
    async def serving_at(self, listener: socket.socket) -> AsyncIterator[str]:
        """Serve also at a socket of another network namespace, without TLS, while the server runs.

        Args:
            listener: Listens there. It is closed after the block.

        Yields:
            The URL in that namespace.
        """
        assert self._served is not None
        host, port = listener.getsockname()
        async with self._served.served_at(listener):
            yield f"http://{host}:{port}"

    async def _start_server(self) -> tuple[AsyncExitStack, str]:
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._errors_as_json])
        for prefix in ("", "/s/{key}"):
            for dialect in DIALECTS:
                for path in (dialect.path, dialect.path.removeprefix("/v1")):
                    # Vercel's client adds no /v1 to ANTHROPIC_BASE_URL, Anthropic's does.
                    app.router.add_post(prefix + path, partial(self._post_request, dialect))
            app.router.add_post(prefix + _COUNT_TOKENS, self._count_tokens)
            app.router.add_get(f"{prefix}/v1/models", self._list_models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._show_model)
        server = AsyncExitStack()
        handshakes: Handshakes | None = None
        if self._tls is not None:
            handshakes = await server.enter_async_context(Handshakes(self._tls))
            server.callback(handshakes.cancel_tasks)
        try:
            self._served = await server.enter_async_context(
                serve_http(
                    app,
                    self._host,
                    self._port,
                    self._limit,
                    handshakes=handshakes,
                    # A handler is cancelled with its connection, so that undelivered answers are recognised.
                    handler_cancellation=True,
                )
            )
        except OSError as error:
            await server.aclose()
            raise EnvironmentNotReady(
                f"cannot serve the OpenAI API on {self._host}:{self._port} ({error.strerror or error}): set "
                "port in rollout.agent_loop_args to a free port, or to 0 for any"
            ) from error
        host = self._public_host
        if host is None:
            host = reachable_address() if self._host in ("0.0.0.0", "::") else self._host
        scheme = "http" if self._tls is None else "https"
        return server, f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._served.port}"

    # -- keys ------------------------------------------------------------------------------------------

    def _handler_of(self, request: web.Request) -> tuple[str, RequestHandler]:
        """Return the key of a request, and its handler.

        Raises:
            ApiError: 401 for an unknown key, 410 for the key of a trajectory that is over, 429 if it has too
                many connections.
            ConnectionError: The connection is lost.
        """
        key = _key_of(request)
        handler = self._keys.handler_of(key)
        if request.transport is None:
            raise ConnectionResetError("the connection is lost")
        if not self._limit.admit(request.transport, key):
            raise ApiError(
                429, f"this trajectory has {self._limit.max_per_key} connections already", retry=True
            )
        return key, handler

    # -- requests --------------------------------------------------------------------------------------

    async def _post_request(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        key, handler = self._handler_of(request)
        tries = request.headers.get("x-stainless-retry-count", "")
        try:
            chat, digests = await self._read_request(dialect, request, key, handler)
            exchange = handler.submit_request(chat, digests, retry_count=_count(tries))
        except ApiError:
            handler.count_refused()
            raise
        head = ReplyHead(id=exchange.id, created=int(time.time()), model=chat.model)
        exchange.listeners += 1
        agent = handler.agent_number
        try:
            if chat.stream:
                response = await _stream_answer(request, handler, exchange, dialect.stream(head, chat))
            else:
                while not exchange.ended:
                    await exchange.changed.wait()
                if exchange.error is not None:
                    raise exchange.error
                assert exchange.answer is not None
                # Sent to its end, so that it is known to be delivered.
                response = json_response(msgspec.json.encode(dialect.answer(exchange.answer, head, chat)))
                await send_response(request, response)
        finally:
            if agent == handler.agent_number:
                exchange.listeners -= 1
        if agent == handler.agent_number:
            exchange.delivered = True
        return response

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        key, handler = self._handler_of(request)
        chat, _ = await self._read_request(AnthropicMessages(), request, key, handler)
        return web.json_response({"input_tokens": await handler.count_tokens(chat)})

    async def _read_request(
        self, dialect: Dialect, request: web.Request, key: str, handler: RequestHandler
    ) -> tuple[ChatRequest, list[bytes]]:
        """Receive and check a request; a large one in a thread, so that the event loop continues."""
        if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
            raise ApiError(415, f"Content-Encoding is {encoding!r}: send the body as it is")
        length = request.content_length
        num_bytes = self._max_body_bytes if length is None else length
        if num_bytes > self._max_body_bytes:
            raise handler.too_large(num_bytes, self._max_body_bytes)
        try:
            async with asyncio.timeout(TRANSFER_S), self._bodies.hold(key, num_bytes):
                body = await request.read()
                read = partial(_read_body, dialect, body, self._model, handler.digests_of)
                if len(body) <= _SMALL_BODY_BYTES:
                    chat = read()
                else:
                    chat = await asyncio.get_running_loop().run_in_executor(_parsing_thread(), read)
        except TimeoutError as error:
            raise ApiError(408, f"the request did not come within {TRANSFER_S:g} s", retry=True) from error
        except web.HTTPRequestEntityTooLarge as error:  # it did not state its length
            raise handler.too_large(num_bytes, self._max_body_bytes) from error
        except web.RequestPayloadError as error:
            raise ApiError(400, f"the body is incomplete: {error}") from error
        if chat[0].previous is None and not chat[0].has_references:
            return chat
        whole = handler.with_history(chat[0])
        return whole, handler.digests_of(whole.messages)

    @web.middleware
    async def _errors_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return all errors in the format of the request's dialect."""
        try:
            return await handler(request)
        except ApiError as error:
            failure = error
        except web.HTTPException as error:
            failure = ApiError(
                error.status,
                f"{request.method} {_without_key(request.path)} is not supported; there are GET /v1/models, "
                f"POST {', '.join(each.path for each in DIALECTS)} and {_COUNT_TOKENS}",
            )
        if (asked := self._keys.handlers.get(_key_of(request))) is not None:
            asked.last_error = failure
        response = json_response(
            msgspec.json.encode(_dialect_of(request).error(failure)), failure.status, failure.headers
        )
        await send_response(request, response)
        return response

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        self._handler_of(request)
        return web.json_response(_models(self._model, self._started_s))

    async def _show_model(self, request: web.Request) -> web.StreamResponse:
        self._handler_of(request)
        return web.json_response(_models(request.match_info["model"], self._started_s)["data"][0])

    def _report_ignored(self, parameters: dict[str, Any]) -> None:
        """Log each ignored parameter once."""
        for name in parameters.keys() - self._reported_parameters:
            self._reported_parameters.add(name)
            log.warning(
                "the agent requests %s = %s, which is ignored: the config decides how the policy is sampled "
                "(docs/guide/agents.md); this is logged once",
                name,
                reprlib.repr(parameters[name]),
            )


def _key_of(request: web.Request) -> str:
    """Return the key in the path or the headers of a request, also of one that no route matches."""
    if request.path.startswith("/s/"):
        return request.path.split("/")[2]
    headers = request.headers
    given = headers.get("Authorization", "") or headers.get("x-api-key", "")
    return re.sub("^bearer ", "", given, flags=re.IGNORECASE).strip()


def _dialect_of(request: web.Request) -> Dialect:
    """Return the dialect in which an error is written, also for a path that is not served."""
    paths = ((each, each.path.removeprefix("/v1")) for each in DIALECTS)
    return next((each for each, path in paths if path in request.path), DIALECTS[0])


def _models(model: str, created: int) -> dict[str, Any]:
    """Return the body of `/v1/models`, with the fields that OpenAI's and Anthropic's clients read."""
    created_at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    own = {"id": model, "object": "model", "created": created, "owned_by": "async-rl"}
    theirs = {"type": "model", "display_name": model, "created_at": created_at}
    ends = {"has_more": False, "first_id": model, "last_id": model}
    return {"object": "list", "data": [own | theirs], **ends}


def _without_key(path: str) -> str:
    """Return a path for a message, without the key that it may have."""
    return re.sub("^/s/[^/]*", "/s/<key>", path)


def _read_body(
    dialect: Dialect, body: bytes, model: str, digests_of: Callable[[Sequence[dict[str, Any]]], list[bytes]]
) -> tuple[ChatRequest, list[bytes]]:
    """Return a request with the digests of its messages; none if it names an earlier answer."""
    chat = dialect.read(body, model)
    if chat.previous is not None:
        return chat, []
    if chat.instructions:
        messages = with_instructions(chat.instructions, chat.messages)
        chat = msgspec.structs.replace(chat, messages=messages)
    return chat, digests_of(chat.messages)


@cache
def _parsing_thread() -> LastingThread:
    """Return the thread that parses large requests, one after the other: parsing holds the GIL."""
    return LastingThread("parsing of large requests")


def _count(digits: str) -> int | None:
    """Return the number that a header states, or None if it states none."""
    return int(digits) if digits.isdecimal() and len(digits) < 10 else None


async def _stream_answer(
    request: web.Request, handler: RequestHandler, exchange: Exchange, events: AnswerStream
) -> web.StreamResponse:
    """Send an answer as it grows."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
    )
    turn, num_read, begun = handler.new_growing_turn(exchange), 0, events.begin()
    sent_reasoning: list[str] = []
    sent_content: list[str] = []

    async def send(data: bytes) -> None:
        async with in_time(request):
            if not response.prepared:
                await response.prepare(request)
                await response.write(begun)
            await response.write(data)

    while not exchange.ended:
        changed = exchange.changed
        text, num_read = "".join(exchange.pieces[num_read:]), len(exchange.pieces)
        reasoning, content = turn.add_text(text)
        if reasoning:
            sent_reasoning.append(reasoning)
            await send(events.add_reasoning(reasoning))
        if content:
            sent_content.append(content)
            await send(events.add_content(content))
        try:
            async with asyncio.timeout(_KEEP_ALIVE_S):
                await changed.wait()
        except TimeoutError:
            await send(events.keep_alive)
    if exchange.error is not None:
        if not response.prepared:
            raise exchange.error
        handler.last_error = exchange.error
        await send(events.fail(exchange.error))
        await response.write_eof()
        return response
    answer = exchange.answer
    assert answer is not None
    reasoning, content = answer.reasoning or "", answer.content or ""
    told_reasoning, told_content = "".join(sent_reasoning), "".join(sent_content)
    if not (reasoning.startswith(told_reasoning) and content.startswith(told_content)):
        # Part of an invalid engine answer was sent before the answer was discarded and sampled again.
        await send(events.fail(ApiError(500, "an engine withdrew what it had streamed", retry=True)))
        await response.write_eof()
        return response
    if new := reasoning[len(told_reasoning) :]:
        await send(events.add_reasoning(new))
    if new := content[len(told_content) :]:
        await send(events.add_content(new))
    await send(events.end(answer))
    await response.write_eof()
    return response
