"""Memory that is handed from one array to the next."""

from __future__ import annotations

import gc
import threading

import numpy as np

from async_rl.engines.sglang.routing_payload import SlabAllocator

MIB = 1 << 20


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_when_the_array_is_gone() -> None:
    slabs = SlabAllocator(max_idle_bytes=8 * MIB)
    first = slabs.allocate_array((MIB, 2), np.uint8)
    assert slabs.usage() == (1, 0)
    place = address(first)
    del first
    assert slabs.usage() == (0, 2 * MIB)
    second = slabs.allocate_array((MIB // 2, 2), np.uint16)
    assert address(second) == place
    assert (second.shape, second.dtype) == ((MIB // 2, 2), np.uint16)
    assert slabs.usage() == (1, 0)


def test_memory_is_not_used_again_when_a_view_is_left() -> None:
    slabs = SlabAllocator(max_idle_bytes=8 * MIB)
    rows = slabs.allocate_array((MIB,), np.uint8)
    rows[:] = 7
    views = [rows[3:5], rows.reshape(2, -1).T, np.asarray(rows.data[9:11])]
    del rows
    gc.collect()
    other = slabs.allocate_array((MIB,), np.uint8)
    other[:] = 1
    assert all((view == 7).all() for view in views)
    assert slabs.usage() == (2, 0)
    views.clear()
    assert slabs.usage() == (1, MIB)


def test_the_oldest_goes_when_too_much_lies_idle() -> None:
    slabs = SlabAllocator(max_idle_bytes=4 * MIB)
    for size in (1, 2, 3):
        slabs.allocate_array((size * MIB,), np.uint8)
        slabs.usage()
    assert slabs.usage() == (0, 3 * MIB)


def test_nothing_is_lent_twice_when_threads_take_and_drop_at_once() -> None:
    slabs = SlabAllocator(max_idle_bytes=8 * MIB)
    torn: list[int] = []

    def work(mark: int) -> None:
        for _ in range(300):
            array = slabs.allocate_array((1 << 16,), np.uint8)
            array[:] = mark
            if not (array == mark).all():
                torn.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == []
    assert slabs.usage()[0] == 0
