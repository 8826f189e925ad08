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


async def bytes_held_by_failures(num_requests: int) -> int:
    """Return what a trajectory holds after requests that are too long and have many parameters."""
    session = ScriptedSession("Hello.")
    handler = RequestHandler(session, reader=None, opens_thought=False, on_ignored=lambda _: None)
    body = json.dumps(
        {
            "model": "policy",
            "messages": [{"role": "user", "content": "x" * (1 << 17)}],
            "logit_bias": {str(token): 1 for token in range(2000)},
            "stop": ["never"],
        }
    ).encode()
    gc.collect()
    tracemalloc.start()
    try:
        async with Nursery() as nursery:
            nursery.start_task("requests", handler.serve_requests())
            for _ in range(num_requests):
                chat = read_request(body, "policy")
                exchange = handler.submit_request(chat, message_digests(chat.messages), retry_count=0)
                exchange.delivered = True
                while not exchange.ended:
                    await exchange.changed.wait()
                assert exchange.error is not None
                assert exchange.error.code == "context_length_exceeded"
            del exchange, chat
            gc.collect()
            used = tracemalloc.get_traced_memory()[0]
            handler.close()
    finally:
        tracemalloc.stop()
    return used


async def test_failed_requests_do_not_fill_the_memory() -> None:
    await bytes_held_by_failures(2)  # what is held once
    few, many = await bytes_held_by_failures(40), await bytes_held_by_failures(400)
    assert many < few + (256 << 10)


async def test_a_failed_request_is_told_its_error_again() -> None:
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
