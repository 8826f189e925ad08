"""What the OpenAI endpoint costs: memory of long conversations; repeated requests, and proxies."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from agent_loops.openai_agent import AgentAPI
from agent_loops.testing import ScriptedSession
from async_rl.openai_api.chat_completions import read_request
from async_rl.openai_api.endpoint import Endpoint
from async_rl.openai_api.history import Exchange, message_digests
from async_rl.openai_api.request_handler import RequestHandler
from async_rl.runtime.supervision import Nursery

Ask = Callable[..., Awaitable[Exchange]]


@asynccontextmanager
async def traced_conversation(session: ScriptedSession) -> AsyncIterator[Ask]:
    """Answers the requests of a trajectory and counts the bytes that are allocated meanwhile."""
    handler = RequestHandler(session, reader=None, opens_thought=False, on_ignored=lambda _: None)

    async def ask(messages: list[dict[str, Any]]) -> Exchange:
        chat = read_request(json.dumps({"model": "policy", "messages": messages}).encode(), "policy")
        exchange = handler.submit_request(chat, message_digests(chat.messages), retry_count=None)
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
    """Return what a trajectory holds after turns of 2 kB, each request with all messages so far."""
    session = ScriptedSession(*(f"{number} {'y' * 1000}" for number in range(num_turns)))
    messages: list[dict[str, Any]] = []
    async with traced_conversation(session) as ask:
        for number in range(num_turns):
            messages.append({"role": "user", "content": f"{number} {'x' * 1000}"})
            exchange = await ask(messages)
            assert exchange.answer is not None
            messages.append(exchange.answer.message)
        assert sum(len(str(message["content"])) for message in session.messages) > 2000 * num_turns
        return bytes_held()


@pytest.mark.real
async def test_memory_of_a_conversation_grows_with_its_turns_when_each_request_repeats_them_all() -> None:
    await bytes_after_turns(2)  # what is held once
    few, many = await bytes_after_turns(20), await bytes_after_turns(80)
    assert many < 6 * few


async def test_error_is_told_again_when_a_failed_request_is_repeated() -> None:
    session = ScriptedSession("Hello.")
    handler = RequestHandler(session, reader=None, opens_thought=False, on_ignored=lambda _: None)
    body = {"model": "policy", "messages": [{"role": "user", "content": "x" * (1 << 17)}]}
    chat, other = (
        read_request(json.dumps(each).encode(), "policy") for each in (body, body | {"top_p": 0.5})
    )
    first, again, with_another_parameter = (
        handler.submit_request(each, message_digests(each.messages), retry_count=None)
        for each in (chat, chat, other)
    )
    assert again is first
    assert with_another_parameter is not first
    handler.close()


@pytest.mark.real_time
async def test_agents_reach_the_endpoint_when_the_environment_names_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with (
        Endpoint().open_trajectory(ScriptedSession("Hello."), reader=None) as access,
        aclosing(AgentAPI(access)) as api,
    ):
        answer = await api.client.chat.completions.create(
            model=api.model, messages=[{"role": "user", "content": "Hi"}]
        )
    assert answer.choices[0].message.content == "Hello."
