"""The policy behind OpenAI's API, and OpenAI's own client for requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai

from agent_loops.parsing import load_parser
from async_rl.openai_api.endpoint import Endpoint, EndpointAccess
from async_rl.types import Trajectory
from tests.support.sessions import Bench
from tests.support.talk import Script, Talker, talking


class Asked:
    """One trajectory that accepts requests."""

    def __init__(
        self, bench: Bench, talker: Talker, access: EndpointAccess, client: openai.AsyncOpenAI
    ) -> None:
        self.bench = bench
        self.talker = talker
        self.access = access
        self.client = client

    async def say(self, *messages: dict[str, Any] | str, **request: Any) -> Any:
        """Request a completion; a string is a user message."""
        asked = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        return await self.client.chat.completions.create(model="policy", messages=asked, **request)

    async def stream(self, *messages: dict[str, Any] | str, **request: Any) -> list[Any]:
        """The chunks of a streamed completion."""
        return [chunk async for chunk in await self.say(*messages, stream=True, **request)]

    async def trajectory(self) -> Trajectory:
        """Return the finished trajectory."""
        return await self.bench.session.finish_trajectory("completed", {"reward": 1.0})

    async def trajectories(self) -> list[Trajectory]:
        """Return the trajectories of all its conversations, once it is closed."""
        tree = self.bench.session.tree
        return [await session.finish_trajectory("completed", {"reward": 1.0}) for session in tree]

    def text(self, trajectory: Trajectory) -> str:
        """All tokens as text, special ones visible."""
        return str(self.bench.chat.tokenizer.decode(trajectory.token_ids, skip_special_tokens=False))


@asynccontextmanager
async def asked(
    script: Script, *, endpoint: Endpoint | None = None, max_retries: int = 0, **engine: Any
) -> AsyncIterator[Asked]:
    """Open a trajectory whose policy follows a script."""
    bench, talker = talking(script, **engine)
    opened = (endpoint or Endpoint()).open_trajectory(bench.session, reader=load_parser("hermes"))
    async with opened as access, client_of(access, max_retries=max_retries) as client:
        yield Asked(bench, talker, access, client)


@asynccontextmanager
async def client_of(
    access: EndpointAccess, *, transport: httpx.AsyncBaseTransport | None = None, **options: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client with our key, independent of the environment."""
    settings = {"base_url": access.base_url, "api_key": access.api_key, **options}
    async with (
        httpx.AsyncClient(trust_env=False, transport=transport) as http,
        openai.AsyncOpenAI(http_client=http, **settings) as client,
    ):
        yield client


def reply(response: Any) -> dict[str, Any]:
    """The assistant's message as agents put it into their history."""
    return dict(response.choices[0].message.model_dump(exclude_none=True))
