"""What the OpenAI endpoint costs: memory of long conversations, reading of certificates."""

from __future__ import annotations

import gc
import json
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from agent_loops import openai_agent
from agent_loops.openai_agent import AgentAPI
from agent_loops.testing import ScriptedSession
from async_rl.openai_api.chat_completions import read_request
from async_rl.openai_api.endpoint import Endpoint, EndpointAccess
from async_rl.openai_api.history import Exchange, message_digests
from async_rl.openai_api.request_handler import RequestHandler
from async_rl.runtime.supervision import Nursery

Ask = Callable[..., Awaitable[Exchange]]


@asynccontextmanager
async def traced_conversation(session: ScriptedSession) -> AsyncIterator[Ask]:
    """Answers the requests of a trajectory and counts the bytes that are allocated meanwhile."""
    handler = RequestHandler(session, reader=None, opens_thought=False, on_ignored=lambda _: None)

    async def ask(*, retry_count: int | None = None, delivered: bool = False, **body: Any) -> Exchange:
        chat = read_request(json.dumps({"model": "policy", **body}).encode(), "policy")
        exchange = handler.submit_request(chat, message_digests(chat.messages), retry_count=retry_count)
        exchange.delivered = delivered
        while not exchange.ended:
            await exchange.changed.wait()
        return exchange

    gc.collect()
    tracemalloc.start()
    try:
        async with Nursery() as nursery:
            nursery.start_task("requests", handler.serve_requests())
            yield ask
            handler.close()
    finally:
        tracemalloc.stop()


def bytes_held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def bytes_after_turns(num_turns: int) -> int:
    """Returns what a trajectory holds after turns of 2 kB, each request with all messages so far."""
    session = ScriptedSession(*(f"{number} {'y' * 1000}" for number in range(num_turns)))
    messages: list[dict[str, Any]] = []
    async with traced_conversation(session) as ask:
        for number in range(num_turns):
            messages.append({"role": "user", "content": f"{number} {'x' * 1000}"})
            exchange = await ask(messages=messages)
            assert exchange.answer is not None
            messages.append(exchange.answer.message)
        assert sum(len(str(message["content"])) for message in session.messages) > 2000 * num_turns
        return bytes_held()


@pytest.mark.real
async def test_memory_of_a_conversation_grows_with_its_turns_when_each_request_repeats_them_all() -> None:
    await bytes_after_turns(2)  # what is held once
    few, many = await bytes_after_turns(20), await bytes_after_turns(80)
    assert many < 6 * few


async def bytes_after_failures(num_requests: int) -> int:
    """Returns what a trajectory holds after requests that are too long and have many parameters."""
    body = {
        "messages": [{"role": "user", "content": "x" * (1 << 17)}],
        "logit_bias": {str(token): 1 for token in range(200)},
        "stop": ["never"],
    }
    async with traced_conversation(ScriptedSession("Hello.")) as ask:
        for _ in range(num_requests):
            exchange = await ask(**body, retry_count=0, delivered=True)
            assert exchange.error is not None
            assert exchange.error.code == "context_length_exceeded"
        return bytes_held()


@pytest.mark.long
async def test_memory_does_not_grow_when_requests_fail() -> None:
    await bytes_after_failures(2)  # what is held once
    few, many = await bytes_after_failures(40), await bytes_after_failures(80)
    assert many < few + (32 << 10)  # 40 failures that are kept hold 80 kB


async def test_error_is_told_again_when_a_failed_request_is_repeated() -> None:
    session = ScriptedSession("Hello.")
    handler = RequestHandler(session, reader=None, opens_thought=False, on_ignored=lambda _: None)
    messages = [{"role": "user", "content": "x" * (1 << 17)}]
    chat = read_request(json.dumps({"model": "policy", "messages": messages}).encode(), "policy")
    other = read_request(
        json.dumps({"model": "policy", "messages": messages, "top_p": 0.5}).encode(), "policy"
    )
    first, again, with_another_parameter = (
        handler.submit_request(each, message_digests(each.messages), retry_count=None)
        for each in (chat, chat, other)
    )
    assert again is first
    assert with_another_parameter is not first
    handler.close()


@pytest.mark.real_time
async def test_certificates_are_read_once_when_several_agents_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[object] = []
    load = ssl.SSLContext.load_verify_locations

    def count(self: ssl.SSLContext, *args: Any, **named: Any) -> None:
        read.append(self)
        load(self, *args, **named)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", count)
    openai_agent.http_settings.cache_clear()
    endpoint = Endpoint()
    session = ScriptedSession("Hello.")
    async with endpoint.open_trajectory(session, reader=None) as access:
        for _ in range(3):
            await connect(access)
        async with aclosing(AgentAPI(access)) as api:
            answer = await api.client.chat.completions.create(
                model=api.model, messages=[{"role": "user", "content": "Hi"}]
            )
    assert answer.choices[0].message.content == "Hello."
    assert len(read) == 1


async def connect(access: EndpointAccess) -> None:
    async with aclosing(AgentAPI(access)) as api:
        assert api.client.max_retries
        assert api.sync_client.max_retries


@pytest.mark.real_time
async def test_agents_reach_the_endpoint_when_the_environment_names_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with (
        Endpoint().open_trajectory(ScriptedSession("Hello."), reader=None) as access,
        aclosing(AgentAPI(access)) as api,
    ):
        answer = await api.client.chat.completions.create(
            model=api.model, messages=[{"role": "user", "content": "Hi"}]
        )
    assert answer.choices[0].message.content == "Hello."
