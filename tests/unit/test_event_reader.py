"""Cutting a stream into events, wherever the network cuts it."""

from __future__ import annotations

import json

import pytest

from async_rl.engines.sglang.generate_call import EventReader
from async_rl.engines.sglang.routing_payload import RoutingText

PAYLOAD = "QUJD" * 30_000


class Text(RoutingText):
    """A payload that keeps its text."""

    def __init__(self) -> None:
        """Start empty."""
        self.text = bytearray()

    def append_text(self, piece: bytes | memoryview) -> None:
        """Keep a piece."""
        self.text += piece


def stream() -> bytes:
    documents = [
        {"a": 1},
        {"meta": {"x": [1, 2], "routed_experts": PAYLOAD, "after": "}"}, "z": '"quoted"'},
        {"b": 2},
    ]
    lines = [f"data: {json.dumps(d, separators=(',', ':'))}\n\n" for d in documents]
    return "".join([lines[0], ": a comment\n\n", *lines[1:], "data: [DONE]\n\n"]).encode()


@pytest.mark.parametrize("size", [100, 977, 70_000, 1 << 20])
def test_events_and_the_payload_are_whole_when_reads_are_cut_anywhere(size: int) -> None:
    reader, data, events = EventReader(Text, 1 << 20), stream(), []
    for begin in range(0, len(data), size):
        events += reader.feed(data[begin : begin + size])
    documents = [document for document, _ in events]
    assert json.loads(documents[0]) == {"a": 1}
    assert json.loads(documents[2]) == {"b": 2}
    assert documents[3] == b"[DONE]"
    last = json.loads(documents[1])
    inside, outside = last["meta"].pop("routed_experts"), events[1][1]
    assert (outside.text.decode() if isinstance(outside, Text) else inside) == PAYLOAD
    assert last == {"meta": {"x": [1, 2], "after": "}"}, "z": '"quoted"'}
    assert [taken is None for _, taken in events] == [True, size == 1 << 20, True, True]


@pytest.mark.parametrize("where", range(-3, 4))
def test_the_payload_is_whole_when_a_read_ends_around_its_last_quote(where: int) -> None:
    data = stream()
    end = data.index(b'"', data.index(b'"routed_experts":"') + 18)
    reader = EventReader(Text, 1 << 20)
    events = reader.feed(data[: end + where]) + reader.feed(data[end + where :])
    assert isinstance(events[1][1], Text)
    assert events[1][1].text == PAYLOAD.encode()
    assert json.loads(events[1][0])["z"] == '"quoted"'
