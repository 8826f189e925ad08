"""Pauses of the event loop by the garbage collector and by other threads."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.run.folder import run_in_folder
from async_rl.runtime.short_pauses import YoungCollector, short_pauses

pytestmark = pytest.mark.real  # each looks at all objects of a worker of tests, which takes seconds


class Node:
    other: Node


def make_cycle() -> weakref.ref[Node]:
    gc.disable()  # a collection halfway would take the first for old
    try:
        one, two = Node(), Node()
        one.other, two.other = two, one
        return weakref.ref(one)
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.collect()


def test_young_cycles_are_collected_and_survivors_are_not_looked_at_again() -> None:
    collector = YoungCollector()
    cycle, kept = make_cycle(), [Node() for _ in range(1000)]
    collector.collect()
    assert cycle() is None
    assert gc.get_freeze_count() > len(kept)
    assert not any(isinstance(o, Node) for o in gc.get_objects())


def test_young_objects_stay_few_while_objects_end_as_fast_as_others_begin() -> None:
    """CPython itself, which counts how many more there are, collects nothing then."""

    async def replace() -> tuple[int, int]:
        gc.collect()
        kept = [Node() for _ in range(20_000)]
        gc.freeze()
        most, until_s = 0, time.monotonic() + 10.0
        with short_pauses():
            for number in count():
                for place in range(100):
                    kept[(100 * number + place) % len(kept)] = Node()
                await asyncio.sleep(0)
                if number % 20 == 0:
                    young = sum(isinstance(o, Node) for o in gc.get_objects())
                    if (looked_at := young < most) or time.monotonic() > until_s:
                        break
                    most = young
        return looked_at, most

    looked_at, most = asyncio.run(replace())
    assert looked_at
    assert most > 0


def test_collections_are_rarer_the_less_there_is_to_collect() -> None:
    collections: list[float] = []

    def record(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(time.monotonic())

    async def idle() -> None:
        gc.collect()
        gc.freeze()
        with short_pauses():
            gc.callbacks.append(record)
            await asyncio.sleep(0.8)
            gc.callbacks.remove(record)

    before = gc.get_threshold()
    asyncio.run(idle())
    assert 1 <= len(collections) < 20
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_threads_that_compute_give_way_soon() -> None:
    async def switch_interval() -> float:
        with short_pauses():
            return sys.getswitchinterval()

    before = sys.getswitchinterval()
    assert asyncio.run(switch_interval()) <= 0.001
    assert sys.getswitchinterval() == before


def test_old_cycles_are_collected_once_memory_has_doubled() -> None:
    collector = YoungCollector(spare_blocks=-(10**9))  # memory has doubled at the first look
    one = Node()
    one.other = Node()
    cycle = weakref.ref(one)
    collector.collect()
    one.other.other = one  # garbage only now
    del one
    for _ in range(98):
        collector.collect()
    assert cycle() is not None  # it is exempt
    collector.collect()
    assert cycle() is None
    assert gc.get_freeze_count() > 0


def test_a_job_runs_with_short_pauses(tmp_path: Path) -> None:
    async def job(folder: Path, stop: asyncio.Event) -> int:
        await asyncio.sleep(0.1)
        return gc.get_freeze_count()

    (tmp_path / "logs").mkdir()
    counts: list[int] = []
    config: Any = SimpleNamespace(run=SimpleNamespace(log_level="INFO"))
    finish = lambda folder, count: counts.append(count) or 0  # noqa: E731
    assert run_in_folder(nullcontext(tmp_path), config, job, finish=finish) == 0
    assert counts[0] > 0
    assert gc.get_freeze_count() == 0
