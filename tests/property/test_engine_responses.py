"""Whatever an engine sends becomes tokens that can be true or a documented error."""

from __future__ import annotations

import random
import time

import pytest

from async_rl.engines.sglang.generate_call import EventReader, EventTooLong
from async_rl.engines.sglang.routing_payload import RoutingText
from tests.support.engine_responses import VALID, read_stream

PARTS = [b'"', b"\n\n", b"data: ", b'"routed_experts":"', b"-1", b"[" * 2000, b"\xff", b"9" * 5000, b"null"]
PARTS += [b"{", b"}", b"0", b"1e400", b'"completion_tokens":', b'"output_ids":', b"\\ud800", b'"version":"']


def mutate(stream: bytes, rng: random.Random) -> bytes:
    """Insert, remove, repeat and replace a few parts."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(stream) + 1)
        end = min(len(stream), at + rng.choice([0, 1, 2, 20, 200]))
        part = rng.choice([rng.choice(PARTS), rng.randbytes(2), stream[at:end] * 2])
        stream = stream[:at] + part + stream[end:]
    return stream


@pytest.mark.real
@pytest.mark.parametrize("seed", range(8))
def test_only_documented_errors_come_of_responses_that_were_changed_anywhere(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        read_stream(mutate(rng.choice(VALID), rng), rng.choice([7, 100, 5000, 1 << 17]))


def test_valid_responses_deliver_their_tokens() -> None:
    assert [read_stream(stream, size) for stream in VALID for size in (7, 1 << 17)] == [
        *(3, 3),
        *(1, 1),
        *(0, 0),
        *(1, 1),
        *(3, 3),
        *(0, 1),  # 20 times the rows that it can have; in one read, they come with its token
    ]


class Discarded(RoutingText):
    """A payload that keeps nothing."""

    def __init__(self) -> None:
        """Keep no rows."""

    def append_text(self, piece: bytes | memoryview) -> None:
        """Drop a piece."""


@pytest.mark.parametrize(
    "begin", [b'data: {"text":"', b": ", b'data: {"a":1}\n\ndata: {"routed_experts":"","x":"']
)
def test_a_line_without_end_costs_what_its_bytes_do(begin: bytes) -> None:
    """Searched and copied once: 32 MiB of it took 37 s of the event loop."""
    piece = b"x" * (1 << 16)
    reader = EventReader(Discarded, max_event_bytes=32 << 20)
    reader.feed(begin)
    begin_s = time.thread_time()
    for _ in range(511):
        reader.feed(piece)
    assert time.thread_time() - begin_s < 5.0
    with pytest.raises(EventTooLong, match="more than 33554432 bytes"):
        reader.feed(2 * piece)
