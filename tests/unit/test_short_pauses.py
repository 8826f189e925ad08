"""Pauses of the event loop by the garbage collector and by other threads."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.run.folder import run_in_folder
from async_rl.runtime.short_pauses import YoungCollector

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
    config: Any = SimpleNamespace()
    finish = lambda folder, count: counts.append(count) or 0  # noqa: E731
    before = gc.get_threshold(), sys.getswitchinterval()
    assert run_in_folder(nullcontext(tmp_path), config, job, finish=finish) == 0
    assert counts[0] > 0
    assert (gc.get_threshold(), sys.getswitchinterval()) == before
    assert gc.get_freeze_count() == 0
