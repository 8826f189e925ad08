"""Gives tasks to agents that run elsewhere, over HTTP: docs/guide/agents-elsewhere.md.

```
 trajectory ──► ClaimLoop ──offer──► ClaimBoard (driver) ◄──POST /v1/claims──── agent, anywhere
                   │ URL, key of the session              ──► task, URL, key ──►  │
                   ▼                                                              │
                endpoint (driver or rollout worker) ◄────── chat, Responses, Messages
                                     ClaimBoard ◄──POST /v1/claims/ID/renew──── every third of the lease
                   reward ◄───────── ClaimBoard ◄──POST /v1/claims/ID/end ─────  reward, or failure
```

A claim belongs to the agent that received it until its lease ends. Who does not renew it loses it: its key is
void, and the task is given to another agent once more, which receives the earlier answers while it sends the
same requests. After that the attempt fails, and is retried as others are.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Annotated, Any, Final, Self

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Meta

from agent_loops.openai_agent import OpenAIAgentLoop
from async_rl.errors import AgentLoopError, ConfigError, EnvironmentNotReady
from async_rl.openai_api.endpoint import EndpointAccess
from async_rl.rollout.session.api import Session
from async_rl.runtime.addresses import is_loopback, reachable_address
from async_rl.runtime.http_listener import (
    Handler,
    json_response,
    send_response,
    send_whole_responses,
    serve_http,
)
from async_rl.runtime.listeners import ConnectionLimit
from async_rl.runtime.reward_values import MAX_REWARD
from async_rl.types import Completion, StopReason, Task

log = logging.getLogger(__name__)

_MAX_BODY_BYTES: Final = 1 << 20
_LONGEST_WAIT_S: Final = 30.0
"""The longest that a request waits for a task or an end, below the limits of proxies."""
_TIMES_GIVEN: Final = 2
"""How often a task is given to an agent in one attempt."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A task, and where the policy answers for it; what an agent receives, with the id of its claim."""

    task: dict[str, Any]
    """`id`, `messages`, `metadata`."""
    base_url: str
    root_url: str
    api_key: str
    model: str


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent ended its claim."""

    reward: Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)] | None = None
    """None leaves the reward to the config's reward function."""
    parts: dict[str, Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]] = {}
    """Parts that are recorded beside it."""
    failure: str | None = None
    """Why the agent could not do the task: the attempt fails, and is retried."""
    expired: bool = False
    """Whether the agent stopped renewing it. Only the board says so."""


class _Claim:
    """One offer, which an agent may hold."""

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self.holder: str | None = None
        """The id of the claim while an agent holds it."""
        self.end: End | None = None
        self.changed = asyncio.Event()


class ClaimBoard:
    """The offers of a run, and the claims of agents.

    Args:
        lease_s: How long a claim lasts without being renewed.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._open: deque[_Claim] = deque()
        self._claims: dict[str, _Claim] = {}
        """Those of agents, by id, and those that have just ended."""
        self._offered = asyncio.Event()

    async def offer(self, offer: Offer) -> End:
        """Offer a task until an agent has ended it, or stopped renewing its claim.

        Cancelling withdraws the offer.
        """
        claim = _Claim(offer)
        self._open.append(claim)
        self._offered.set()
        try:
            while claim.end is None:
                claim.changed.clear()
                try:
                    async with asyncio.timeout(None if claim.holder is None else self.lease_s):
                        await claim.changed.wait()
                except TimeoutError:
                    if not claim.changed.is_set():
                        claim.end = End(expired=True)
            return claim.end
        finally:
            if claim.holder is None:
                self._open.remove(claim)
            else:
                del self._claims[claim.holder]

    async def claim(self, wait_s: float) -> tuple[str, Offer] | None:
        """Return the oldest offer, with the id of its claim; None if there is none within the time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._open:
                    self._offered.clear()
                    await self._offered.wait()
        if not self._open:
            return None
        claim = self._open.popleft()
        claim.holder = claim_id = secrets.token_hex(16)
        self._claims[claim_id] = claim
        claim.changed.set()
        return claim_id, claim.offer

    def take_back(self, claim_id: str) -> None:
        """Offer a task again that did not reach its agent."""
        if (claim := self._claims.get(claim_id)) is None or claim.end is not None:
            return
        del self._claims[claim_id]
        claim.holder = None
        self._open.appendleft(claim)
        claim.changed.set()
        self._offered.set()

    def renew(self, claim_id: str) -> bool:
        """Renew a claim; return whether it still belongs to its agent."""
        if (claim := self._claims.get(claim_id)) is None or claim.end is not None:
            return False
        claim.changed.set()
        return True

    def end(self, claim_id: str, end: End) -> bool:
        """End a claim; return whether it still belonged to its agent, or has just ended in the same way."""
        if (claim := self._claims.get(claim_id)) is None:
            return False
        if claim.end is None:
            claim.end = end
            claim.changed.set()
        return claim.end == end


class _Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    """Address to bind to; `0.0.0.0` binds to all."""
    port: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    """The port; 0 takes a free one."""
    lease_s: Annotated[float, Meta(gt=0)] = 60.0
    """How long a claim lasts without being renewed."""
    key_env: Annotated[str, Meta(min_length=1)] = "ASYNC_RL_CLAIMS_KEY"
    """The environment variable with the key that agents and rollout workers present."""
    board: str | None = None
    """The URL of the driver's board; set by the driver for its rollout workers."""


class ClaimServer:
    """Serves a board over HTTP: to agents, and to rollout workers that offer tasks."""

    def __init__(self, board: ClaimBoard, key: str) -> None:
        self._board = board
        self._key = key
        self._limit = ConnectionLimit("the claims API")

    @asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[str]:
        """Serve inside the block, and return the URL.

        Raises:
            EnvironmentNotReady: The address cannot be bound.
        """
        app = web.Application(
            client_max_size=_MAX_BODY_BYTES, middlewares=[send_whole_responses, self._with_key]
        )
        app.router.add_post("/v1/claims", self._post_claim)
        app.router.add_post("/v1/claims/{id}/renew", self._post_renew)
        app.router.add_post("/v1/claims/{id}/end", self._post_end)
        app.router.add_post("/v1/offers", self._post_offer)
        async with AsyncExitStack() as server:
            try:
                served = await server.enter_async_context(
                    serve_http(app, host, port, self._limit, handler_cancellation=True)
                )
            except OSError as error:
                raise EnvironmentNotReady(
                    f"cannot serve the claims API on {host}:{port} ({error.strerror or error}): set port in "
                    "rollout.agent_loop_args.claims to a free port, or to 0 for any"
                ) from error
            named = reachable_address() if host in ("0.0.0.0", "::") else host
            yield f"http://{f'[{named}]' if ':' in named else named}:{served.port}"

    @web.middleware
    async def _with_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not given.isascii() or not hmac.compare_digest(given, self._key):
            return _problem(401, "unknown key: send that of the run as `Authorization: Bearer KEY`")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _problem(error.status, error.reason)
        except msgspec.DecodeError as error:
            return _problem(400, str(error))

    async def _post_claim(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read() or b"{}", type=_Wait)
        found = await self._board.claim(min(asked.wait_s, _LONGEST_WAIT_S))
        if found is None:
            return web.Response(status=204)
        claim_id, offer = found
        body = {"id": claim_id, "lease_s": self._board.lease_s, **msgspec.structs.asdict(offer)}
        response = json_response(msgspec.json.encode(body))
        try:
            await send_response(request, response)
        except BaseException:
            self._board.take_back(claim_id)
            raise
        return response

    async def _post_renew(self, request: web.Request) -> web.StreamResponse:
        if not self._board.renew(request.match_info["id"]):
            return _problem(410, "the claim is over: give the task up")
        return json_response(msgspec.json.encode({"lease_s": self._board.lease_s}))

    async def _post_end(self, request: web.Request) -> web.StreamResponse:
        end = msgspec.json.decode(await request.read() or b"{}", type=End)
        if end.expired:
            return _problem(400, "expired is not for agents: send reward or failure")
        if not self._board.end(request.match_info["id"], end):
            return _problem(410, "the claim is over: what it says is not used")
        return json_response(b"{}")

    async def _post_offer(self, request: web.Request) -> web.StreamResponse:
        """Hold a worker's request until its offer has ended; its end withdraws the offer."""
        offer = msgspec.json.decode(await request.read(), type=Offer)
        return json_response(msgspec.json.encode(await self._board.offer(offer)))


def _problem(status: int, message: str) -> web.Response:
    return json_response(msgspec.json.encode({"error": {"message": message}}), status)


class _Wait(msgspec.Struct, frozen=True):
    wait_s: Annotated[float, Meta(ge=0)] = _LONGEST_WAIT_S


class _DriversBoard:
    """The board of the driver, as a rollout worker reaches it."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._key = key

    async def offer(self, offer: Offer) -> End:
        """Implements `ClaimBoard.offer`."""
        headers = {"Authorization": f"Bearer {self._key}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)  # the trajectory's limit bounds it
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as client,
            client.post(f"{self._url}/v1/offers", data=msgspec.json.encode(offer)) as response,
        ):
            response.raise_for_status()
            return msgspec.json.decode(await response.read(), type=End)


class ClaimLoop(OpenAIAgentLoop):
    """Offers each task to agents that run elsewhere, and serves the policy to those that claim it.

    Args:
        claims: How tasks are handed out: host, port, lease_s and key_env.
        arguments: Those of `OpenAIAgentLoop` but agent and command: parser, opens_thought, constraints, host,
            port, public_host, …

    Raises:
        ConfigError: An argument has another type or range, or the key is not set.
    """

    _needs_agent = False

    def __init__(self, claims: dict[str, Any] | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        try:
            self._claims = settings = msgspec.convert(claims or {}, _Settings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"rollout.agent_loop_args.claims: {error}") from error
        key = os.environ.get(settings.key_env, "")
        if len(key) < 16 or not key.isascii():
            raise ConfigError(
                f"rollout.agent_loop_args.claims: the environment variable {settings.key_env} has no key of "
                "at least 16 ASCII characters: set it for the run and for the agents, for example by "
                f"`export {settings.key_env}=$(openssl rand -hex 24)`"
            )
        self._key = key
        self._board: ClaimBoard | _DriversBoard
        if settings.board is None:
            self._board = ClaimBoard(settings.lease_s)
        else:
            self._board = _DriversBoard(settings.board, key)
        self._open = AsyncExitStack()
        self.claims_url = settings.board or ""
        """Where agents claim tasks, once the loop has been entered."""

    @asynccontextmanager
    async def serve_workers(self) -> AsyncIterator[dict[str, Any]]:
        """Hand out claims in the driver, for the rollout workers that serve the sessions.

        Yields:
            The loop's arguments in the workers.
        """
        settings = msgspec.structs.asdict(self._claims)
        async with self._serving_board(ClaimBoard(self._claims.lease_s)) as url:
            yield {"claims": {**settings, "board": url}}

    @asynccontextmanager
    async def _serving_board(self, board: ClaimBoard) -> AsyncIterator[str]:
        async with ClaimServer(board, self._key).serving(self._claims.host, self._claims.port) as url:
            log.info("agents claim tasks at %s/v1/claims, with the key in %s", url, self._claims.key_env)
            yield url

    async def __aenter__(self) -> Self:
        """Hand out claims until the end of the run."""
        await super().__aenter__()
        if isinstance(self._board, ClaimBoard):
            self.claims_url = await self._open.enter_async_context(self._serving_board(self._board))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._open.aclose()
        await super().__aexit__(*error)

    def check(self, chat_template: str) -> list[str]:
        """Return the findings for `async-rl check`."""
        findings = super().check(chat_template)[1:]
        if not is_loopback(self._claims.host):
            findings.append("other hosts can claim tasks with the run's key, over plain HTTP")
        return [f"agents claim tasks on {self._claims.host}", *findings]

    async def _call(self, task: Task, access: EndpointAccess, session: Session) -> StopReason | None:
        """Implements `OpenAIAgentLoop._call`: offer the task until an agent has ended its claim."""
        shown = {"id": task.task_id, "messages": task.messages, "metadata": task.metadata}
        data = msgspec.json.decode(msgspec.json.encode(shown, enc_hook=str))
        for number in range(_TIMES_GIVEN):
            if number:
                access = self.endpoint.renew_access(access)
            ended = await self._board.offer(
                Offer(
                    task=data,
                    base_url=access.base_url,
                    root_url=access.root_url,
                    api_key=access.api_key,
                    model=access.model,
                )
            )
            if not ended.expired:
                break
            log.warning("an agent stopped renewing its claim of task %s", task.task_id)
        else:
            raise AgentLoopError(
                f"{_TIMES_GIVEN} agents claimed the task and did not renew it within claims.lease_s = "
                f"{self._claims.lease_s:g} s"
            )
        if ended.failure is not None:
            raise AgentLoopError(f"the agent that claimed the task failed: {ended.failure[:500]}")
        if ended.reward is not None:
            session.report(**{**ended.parts, "reward": ended.reward})
        return None


def claimed_reward(task: Task, completion: Completion) -> dict[str, float]:
    """Return the reward that the agent posted, with its parts: `rollout.reward`.

    Raises:
        ValueError: It posted none.
    """
    if "reward" not in completion.reported:
        raise ValueError("the agent ended its claim without a reward")
    return completion.reported
