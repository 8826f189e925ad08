"""What the OpenAI endpoint costs: memory of long conversations, reading of certificates."""

from __future__ import annotations

import gc
import json
import ssl
import tracemalloc
from contextlib import aclosing
from typing import Any

import pytest

from agent_loops import openai_agent
from agent_loops.openai_agent import AgentAPI
from agent_loops.testing import ScriptedSession
from async_rl.openai_api.chat_completions import read_request
from async_rl.openai_api.endpoint import Endpoint, EndpointAccess
from async_rl.openai_api.history import message_digests
from async_rl.openai_api.request_handler import RequestHandler
from async_rl.runtime.supervision import Nursery


async def bytes_held(num_turns: int) -> int:
    """Return what a trajectory holds after turns of 2 kB, each request with all messages so far."""
    session = ScriptedSession(*(f"{number} {'y' * 1000}" for number in range(num_turns)))
    handler = RequestHandler(session, reader=None, opens_thought=False, on_ignored=lambda _: None)
    messages: list[dict[str, Any]] = []
    gc.collect()
    tracemalloc.start()
    try:
        async with Nursery() as nursery:
            nursery.start_task("requests", handler.serve_requests())
            for number in range(num_turns):
                messages.append({"role": "user", "content": f"{number} {'x' * 1000}"})
                body = json.dumps({"model": "policy", "messages": messages}).encode()
                chat = read_request(body, "policy")
                exchange = handler.submit_request(chat, message_digests(chat.messages), retry_count=None)
                while not exchange.ended:
                    await exchange.changed.wait()
                assert exchange.answer is not None
                messages.append(exchange.answer.message)
            held = sum(len(str(message["content"])) for message in session.messages)
            del body, exchange
            gc.collect()
            used = tracemalloc.get_traced_memory()[0]
            handler.close()
    finally:
        tracemalloc.stop()
    assert held > 2000 * num_turns
    return used


async def test_the_memory_of_a_conversation_grows_with_its_turns_and_not_with_their_square() -> None:
    await bytes_held(2)  # what is held once
    few, many = await bytes_held(20), await bytes_held(80)
    assert many < 6 * few


async def test_certificates_are_read_once_for_all_agents(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_agents_reach_the_endpoint_whatever_proxy_the_environment_names(
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
