"""Frames in reused slabs: bounds, reuse, recovery, readers in other processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from async_rl.codec import read_frame
from async_rl.errors import CorruptFrame, SpoolFull
from async_rl.queue import batching
from async_rl.queue.spool import FrameReader, Spool, SpoolRef, slab_size
from async_rl.types import Group, TrainBatch
from tests.support.trajectories import FACTS, make_group

BIG = np.arange(50_000)  # 400 kB


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", max_bytes=8 << 20)


def test_a_frame_is_read_where_it_was_written(spool: Spool) -> None:
    ref = spool.put(make_group("g"))
    assert ref.kind == "Group"
    assert spool.read(ref, Group).group_id == "g"
    assert read_frame(ref.path, Group).group_id == "g"
    assert spool.used_bytes == os.path.getsize(ref.path)


def test_a_slab_is_used_again_when_it_was_freed(spool: Spool) -> None:
    first = spool.put([BIG])
    spool.free(first)
    assert spool.used_bytes == 0
    second = spool.put([BIG + 1])
    assert second.path == first.path
    assert spool.read(second, list)[0][0] == 1


def test_no_slab_is_shared_by_two_frames(spool: Spool) -> None:
    refs = [spool.put([BIG + i]) for i in range(5)]
    spool.free(refs.pop(2))
    refs += [spool.put([BIG + 10]), spool.put([BIG + 11])]
    assert len({ref.path for ref in refs}) == 6
    assert [spool.read(ref, list)[0][0] for ref in refs] == [0, 1, 3, 4, 10, 11]


def test_a_small_frame_gets_a_slab_of_its_size_when_only_large_ones_are_free(spool: Spool) -> None:
    spool.free(spool.put([np.zeros(4 << 20, np.uint8)]))
    ref = spool.put([1])
    assert os.path.getsize(ref.path) == 64 << 10


def test_a_reader_is_told_when_the_frame_was_freed(spool: Spool) -> None:
    ref = spool.put([BIG])
    spool.free(ref)
    with pytest.raises(CorruptFrame, match=r"slab-000000: bad magic"):
        spool.read(ref, list)
    with pytest.raises(ValueError, match="free already"):
        spool.free(ref)


def test_a_put_is_refused_and_nothing_is_lost_when_the_bound_is_reached(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=1 << 20)
    kept = [spool.put([BIG]), spool.put([BIG])]
    with pytest.raises(SpoolFull, match=r"exceed queue\.max_bytes = 1048576"):
        spool.put([BIG])
    assert [spool.read(ref, list)[0][-1] for ref in kept] == [49_999, 49_999]
    spool.free(kept[0])
    spool.put([BIG])


def test_free_slabs_make_room_when_another_size_is_needed(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=1 << 20)
    for ref in [spool.put([i]) for i in range(10)]:
        spool.free(ref)
    spool.put([np.zeros(900_000, np.uint8)])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1 << 20


def test_the_message_says_so_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, max_bytes=None)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SpoolFull, match="the disk is full"):
        spool.put([BIG])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert spool.read(spool.put([1]), list) == [1]


def test_intact_frames_are_found_and_damaged_ones_freed_when_a_folder_is_opened_again(tmp_path: Path) -> None:
    first = Spool(tmp_path, max_bytes=None)
    kept, damaged, freed = first.put(make_group("a")), first.put([BIG]), first.put([BIG])
    first.free(freed)
    with open(damaged.path, "r+b") as file:
        file.seek(damaged.nbytes - 1)
        file.write(b"\xff")
    (tmp_path / "slab-000009").touch()  # its maker was killed before it had a size

    spool = Spool(tmp_path, max_bytes=None)
    found = spool.recover()
    assert found.intact == (kept,)
    assert list(found.corrupt) == [damaged.path]
    assert "fails its checksum" in found.corrupt[damaged.path]
    assert spool.read(kept, Group).group_id == "a"
    assert spool.used_bytes == os.path.getsize(kept.path)
    assert {spool.put([BIG]).path, spool.put([BIG]).path} == {damaged.path, freed.path}


def test_a_half_written_frame_is_no_frame_when_its_writer_was_killed(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=None)
    groups = [make_group("a"), make_group("b")]
    plan = batching.plan(groups, 3, "batch", FACTS)

    def die(batch: TrainBatch) -> None:
        batching.fill(batch, groups[:1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spool.put_filled(plan, die)
    assert spool.used_bytes == 0
    again = Spool(tmp_path, max_bytes=None).recover()
    assert (again.intact, again.corrupt) == ((), {})


def test_a_frame_filled_in_place_equals_one_that_was_copied(spool: Spool) -> None:
    groups = [make_group("a"), make_group("b")]
    dirty = spool.put([np.full(60_000, 255, np.uint8)])
    spool.free(dirty)  # its old bytes must not shine through the padding
    plan = batching.plan(groups, 3, "batch", FACTS)
    placed = spool.put_filled(plan, lambda batch: batching.fill(batch, groups))
    copied = spool.put(batching.assemble(groups, 3, "batch", FACTS))
    assert placed.path == dirty.path
    assert placed.nbytes == copied.nbytes
    frames = [Path(ref.path).read_bytes()[: ref.nbytes] for ref in (placed, copied)]
    assert frames[0] == frames[1]


def test_a_reader_sees_the_new_frame_when_a_slab_was_used_again(spool: Spool) -> None:
    reader = FrameReader(max_slabs=1)
    for value in range(3):
        ref = spool.put([BIG + value])
        assert reader.read(ref.path, list)[0][0] == value
        spool.free(ref)
    with pytest.raises(CorruptFrame, match=ref.path):
        reader.read(ref.path, list)
    other = spool.put([np.zeros(2 << 20, np.uint8)])
    assert len(reader.read(other.path, list)[0]) == 2 << 20


def test_another_process_reads_a_frame_by_its_path(spool: Spool) -> None:
    ref = spool.put(make_group("from here"))
    program = (
        "import sys; from async_rl.codec import read_frame; from async_rl.types import Group; "
        "print(read_frame(sys.argv[1], Group).group_id)"
    )
    read = subprocess.run(
        [sys.executable, "-c", program, ref.path],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert read.stdout == "from here\n"


def test_frames_stay_apart_when_threads_write_and_free_at_once(spool: Spool) -> None:
    wrong = []

    def work(number: int) -> None:
        for i in range(30):
            ref: SpoolRef = spool.put([np.full(20_000, number * 1000 + i)])
            if not (spool.read(ref, list)[0] == number * 1000 + i).all():
                wrong.append((number, i))
            spool.free(ref)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert spool.used_bytes == 0


def test_slabs_are_little_larger_than_their_frames() -> None:
    for nbytes in (1, 65536, 65537, 100_000, 131_072, 131_073, 6_290_255, 100_000_000):
        size = slab_size(nbytes)
        assert nbytes <= size <= max(65536, nbytes * 1.25)
