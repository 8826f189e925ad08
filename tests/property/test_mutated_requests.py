"""Requests of agent frameworks, changed at random: answered or refused, without failing the trajectory."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loops.parsing import load_parser
from async_rl.openai_api.endpoint import Endpoint
from tests.support.agent_requests import REQUESTS, path_of
from tests.support.talk import talking

HOSTILE = st.one_of(
    st.sampled_from(
        [
            True,
            1 << 70,
            10**4000,
            float("nan"),
            float("inf"),
            "",
            "none",
            "\ud800",
            "\0",
            "x" * 100_000,
            '{"a": "\ud800"}',
            '{"a": NaN}',
            "[" * 500 + "]" * 500,
            ["x"],
            {"type": "function"},
            {"text": []},
            {"role": []},
        ]
    ),
    st.recursive(st.none() | st.integers(), lambda each: st.lists(each) | st.dictionaries(st.text(), each)),
    st.integers(50, 600).map(lambda depth: json.loads("[" * depth + "]" * depth)),
)
HEADERS = st.sampled_from(
    [
        {},
        {"x-stainless-retry-count": b"9" * 5000},
        {"x-stainless-retry-count": "\u00b2\u0663".encode()},
        {"x-stainless-retry-count": b"-1"},
        {"content-encoding": b"nonsense"},
        {"content-type": b"text/plain; charset=nonsense"},
        {"authorization": b"Bearer \xff\xfe\xed\xa0\x80"},
        {"authorization": b"Bearer sk-\xff-0"},
        {"authorization": b"Basic x"},
        {"expect": b"nonsense"},
    ]
)
OTHERS = [*map(path_of, REQUESTS), "/v1/messages/count_tokens"]
ODD = ["/s/%ff/v1/chat/completions", "/s/%ED%A0%80/v1/chat/completions", "/s/a%2Fb/v1/models", "/%00"]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a JSON value up to a depth, the root included."""
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict | list) and len(path) < 12:
        inner = value.items() if isinstance(value, dict) else enumerate(value)
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A request, mostly to its own path: with up to three changed values, or with changed bytes."""
    name = draw(st.sampled_from([*REQUESTS]))
    path = draw(st.sampled_from([path_of(name)] * 9 + OTHERS + ODD))
    body: Any = {"body": copy.deepcopy(REQUESTS[name])}
    for _ in range(draw(st.integers(0, 3))):
        *inner, last = ("body", *draw(st.sampled_from(places(body["body"]))))
        holder = body
        for key in inner:
            holder = holder[key]
        what = draw(st.sampled_from(["replace", "replace", "delete", "repeat"]))
        if what == "replace" or last == "body":
            holder[last] = copy.deepcopy(draw(HOSTILE))  # a later change must not change what is drawn
        elif what == "delete":
            del holder[last]
        elif isinstance(holder, list):
            holder *= draw(st.integers(2, 50))
    data = bytearray(json.dumps(body["body"]).encode())
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 5]))):
        data.insert(draw(st.integers(0, len(data))), draw(st.integers(0, 255)))
    return path, bytes(data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 9)) == 0 else data)


@pytest.mark.real
@settings(max_examples=100)
@given(requests(), HEADERS)
def test_a_changed_request_is_answered_or_refused_and_its_trajectory_goes_on(
    request: tuple[str, bytes], headers: dict[str, bytes]
) -> None:
    path, body = request
    asyncio.run(check(body, headers, path))


async def check(body: bytes, headers: dict[str, bytes], path: str) -> None:
    """Send a request, then one that is valid."""
    bench, _ = talking(lambda prompt: "Hello.", max_branches=2)
    opened = Endpoint().open_trajectory(bench.session, reader=load_parser("hermes"))
    async with opened as access, httpx.AsyncClient(trust_env=False, verify=False, timeout=60) as client:
        root = access.base_url.removesuffix("/v1")
        key = {"authorization": f"Bearer {access.api_key}".encode()}
        sent = {**key, **headers}
        answer = await client.post(root + path, content=body, headers=list(sent.items()))  # type: ignore[arg-type]
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text[:500]
        if answer.status_code != 200 and "expect" not in headers:
            error = answer.json()["error"]
            fields = {"message", "type"} if "/messages" in path else {"message", "type", "param", "code"}
            assert error.keys() == fields
            assert error["message"]
            assert len(error["message"]) < 1100
        assert b"server_error" not in answer.content
        valid = {"model": "policy", "messages": [{"role": "user", "content": "Still there?"}]}
        again = await client.post(f"{root}/v1/chat/completions", json=valid, headers=list(key.items()))  # type: ignore[arg-type]
        assert again.status_code == 200, again.text[:500]
        assert again.json()["choices"][0]["message"]["content"] == "Hello."
    await bench.session.finish_trajectory("completed", {"reward": 1.0})
