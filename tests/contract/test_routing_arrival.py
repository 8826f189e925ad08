"""Long payloads that arrive together: what they cost the event loop and the memory, over real HTTP."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pybase64
import pytest

from async_rl.engine_protocol import Finish
from async_rl.engines.sglang import routing_payload
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.routing_payload import RoutingText
from tests.support.engine_calls import request
from tests.support.payload_server import PeakMemory, facts_of_long_calls, make_ids, payload_server

pytestmark = pytest.mark.real  # of a gigabyte, over real HTTP

TOKENS, LAYERS, TOP_K, EXPERTS = 32768, 48, 8, 128
ROWS = TOKENS - 1
ROW_BYTES = LAYERS * TOP_K
FACTS = facts_of_long_calls(TOKENS)
PROMPT = np.zeros(ROWS, np.int32).tolist()
MIB = 1 << 20


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with payload_server(ROWS, LAYERS, TOP_K, EXPERTS) as address:
        yield address


@pytest.fixture
async def engine(url: str):
    gc.collect()
    engine = SGLangEngine("engine-0", url, FACTS)
    yield engine
    await engine.close()


async def take(engine: SGLangEngine) -> np.ndarray:
    """One call, its routing decoded as a session does."""
    stream = engine.generate(request(PROMPT, 1))
    finish = [event async for event in stream][-1]
    assert isinstance(finish, Finish)
    return (await asyncio.to_thread(engine.decode_routing, finish.routing)).rows


def num_texts() -> int:
    """Return the number of payloads that are held, with the rows that were decoded of them."""
    gc.collect()
    return sum(type(each) is RoutingText for each in gc.get_objects())


@pytest.mark.case(29)
@pytest.mark.timeout(600)
async def test_the_loop_and_the_memory_are_spared_when_64_long_payloads_arrive_at_once(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: Counter[bool] = Counter()
    decode, loop_thread = pybase64.b64decode, threading.get_ident()

    def count(text, **options):
        decoded[threading.get_ident() == loop_thread] += len(text)
        return decode(text, **options)

    monkeypatch.setattr(routing_payload.pybase64, "b64decode", count)
    expected = make_ids(ROWS, LAYERS, TOP_K, EXPERTS)
    growth = PeakMemory()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(take(engine)) for _ in range(64)]
    peak = growth.stop()
    rows = [task.result() for task in tasks]
    assert all(np.array_equal(one[::997], expected[::997]) for one in rows)
    # The rows, and for each connection what is on its way: far less than the 67 MB that each was sent.
    budget = 64 * (ROWS * ROW_BYTES + 2 * MIB)
    assert peak < 1.1 * budget
    # What is decoded on the event loop is next to nothing.
    assert decoded[False] > 64 * ROWS * ROW_BYTES * 5
    assert decoded[True] < 0.01 * decoded[False]
    # What was spooled is dropped: nothing holds its memory.
    held = [weakref.ref(one) for one in rows]
    del rows, tasks
    assert num_texts() == 0
    assert not any(one() is not None for one in held)


@pytest.mark.case(29)
async def test_nothing_is_left_behind_when_consumers_are_killed_in_the_middle(engine: SGLangEngine) -> None:
    gate = engine.payload_gate

    async def kill_in_the_middle() -> int:
        first = asyncio.Event()

        async def consume() -> None:
            await take(engine)
            first.set()

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(consume()) for _ in range(16)]
            await first.wait()
            for task in tasks:
                task.cancel()
        return sum(task.cancelled() for task in tasks)

    assert await kill_in_the_middle() >= 8
    assert not gate.is_full
    assert num_texts() == 0
    assert (await take(engine)).shape == (ROWS, LAYERS, TOP_K)
