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
from async_rl.runtime.short_pauses import SurvivorFreezer, short_pauses


class Node:
    other: Node


def make_cycle() -> weakref.ref[Node]:
    one, two = Node(), Node()
    one.other, two.other = two, one
    return weakref.ref(one)


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.collect()


def test_a_full_collection_looks_at_no_object_that_has_survived_before() -> None:
    with short_pauses():
        kept = [Node() for _ in range(1000)]
        gc.collect(1)
        assert gc.get_freeze_count() > 1000
        assert not any(isinstance(o, Node) for o in gc.get_objects())
        assert len(kept) == 1000
    assert gc.get_freeze_count() == 0


def test_young_cycles_are_collected() -> None:
    with short_pauses():
        cycle = make_cycle()
        gc.collect(1)
        assert cycle() is None


def test_young_objects_are_collected_seldom() -> None:
    before = gc.get_threshold()
    collections: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    with short_pauses():
        gc.collect()
        gc.callbacks.append(count)
        kept = [Node() for _ in range(25_000)]
        gc.callbacks.remove(count)
    assert len(kept) == 25_000
    assert 1 in collections
    assert len(collections) < 10  # by CPython's thresholds more than 30
    assert gc.get_threshold() == before


def test_threads_that_compute_give_way_soon() -> None:
    before = sys.getswitchinterval()
    with short_pauses():
        assert sys.getswitchinterval() <= 0.001
    assert sys.getswitchinterval() == before


def test_old_cycles_are_collected_once_memory_has_doubled() -> None:
    freezer = SurvivorFreezer(spare_blocks=-(10**9))  # memory has doubled at the first look
    gc.callbacks.append(freezer.end_collection)
    try:
        one = Node()
        one.other = Node()
        cycle = weakref.ref(one)
        gc.collect(1)
        one.other.other = one  # garbage only now
        del one
        for _ in range(99):
            gc.collect(1)
        assert cycle() is not None  # it is exempt
        gc.collect(1)
        gc.collect()
        assert cycle() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.callbacks.remove(freezer.end_collection)


def test_a_job_runs_with_short_pauses(tmp_path: Path) -> None:
    async def job(folder: Path, stop: asyncio.Event) -> int:
        gc.collect(1)
        return gc.get_freeze_count()

    (tmp_path / "logs").mkdir()
    counts: list[int] = []
    config: Any = SimpleNamespace(run=SimpleNamespace(log_level="INFO"))
    finish = lambda folder, count: counts.append(count) or 0  # noqa: E731
    assert run_in_folder(nullcontext(tmp_path), config, job, finish=finish) == 0
    assert counts[0] > 0
    assert gc.get_freeze_count() == 0
