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
from async_rl.queue.spool import Spool, SpoolRef, slab_size
from async_rl.types import Group, TrainBatch
from tests.support.trajectories import FACTS, make_group

BIG = np.arange(50_000)  # 400 kB


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", max_bytes=8 << 20)


def test_a_frame_is_read_where_it_was_written(spool: Spool) -> None:
    ref = spool.put_frame(make_group("g"))
    assert ref.kind == "Group"
    assert spool.read_frame(ref, Group).group_id == "g"
    assert read_frame(ref.path, Group).group_id == "g"
    assert spool.used_bytes == os.path.getsize(ref.path)


def test_a_slab_is_used_again_when_it_was_freed(spool: Spool) -> None:
    first = spool.put_frame([BIG])
    spool.free_frame(first)
    assert spool.used_bytes == 0
    second = spool.put_frame([BIG + 1])
    assert second.path == first.path
    assert spool.read_frame(second, list)[0][0] == 1


def test_no_slab_is_shared_by_two_frames(spool: Spool) -> None:
    refs = [spool.put_frame([BIG + i]) for i in range(5)]
    spool.free_frame(refs.pop(2))
    refs += [spool.put_frame([BIG + 10]), spool.put_frame([BIG + 11])]
    assert len({ref.path for ref in refs}) == 6
    assert [spool.read_frame(ref, list)[0][0] for ref in refs] == [0, 1, 3, 4, 10, 11]


def test_a_small_frame_gets_a_slab_of_its_size_when_only_large_ones_are_free(spool: Spool) -> None:
    spool.free_frame(spool.put_frame([np.zeros(4 << 20, np.uint8)]))
    ref = spool.put_frame([1])
    assert os.path.getsize(ref.path) == 64 << 10


def test_a_reader_is_told_when_the_frame_was_freed(spool: Spool) -> None:
    ref = spool.put_frame([BIG])
    spool.free_frame(ref)
    with pytest.raises(CorruptFrame, match=r"slab-000000: bad magic"):
        spool.read_frame(ref, list)
    with pytest.raises(ValueError, match="free already"):
        spool.free_frame(ref)


def test_a_put_is_refused_and_nothing_is_lost_when_the_bound_is_reached(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=1 << 20)
    kept = [spool.put_frame([BIG]), spool.put_frame([BIG])]
    with pytest.raises(SpoolFull, match=r"exceed queue\.max_bytes = 1048576"):
        spool.put_frame([BIG])
    assert [spool.read_frame(ref, list)[0][-1] for ref in kept] == [49_999, 49_999]
    spool.free_frame(kept[0])
    spool.put_frame([BIG])


def test_free_slabs_are_replaced_when_another_size_is_needed(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=1 << 20)
    for ref in [spool.put_frame([i]) for i in range(10)]:
        spool.free_frame(ref)
    spool.put_frame([np.zeros(900_000, np.uint8)])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1 << 20


def test_the_message_says_so_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, max_bytes=None)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SpoolFull, match="the disk is full"):
        spool.put_frame([BIG])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert spool.read_frame(spool.put_frame([1]), list) == [1]


def test_intact_frames_are_found_and_damaged_ones_freed_when_a_folder_is_opened_again(tmp_path: Path) -> None:
    first = Spool(tmp_path, max_bytes=None)
    kept, damaged, freed = first.put_frame(make_group("a")), first.put_frame([BIG]), first.put_frame([BIG])
    first.free_frame(freed)
    with open(damaged.path, "r+b") as file:
        file.seek(damaged.nbytes - 1)
        file.write(b"\xff")
    (tmp_path / "slab-000009").touch()  # its maker was killed before it had a size

    spool = Spool(tmp_path, max_bytes=None)
    found = spool.recover_frames()
    assert found.intact == (kept,)
    assert list(found.corrupt) == [damaged.path]
    assert "fails its checksum" in found.corrupt[damaged.path]
    assert spool.read_frame(kept, Group).group_id == "a"
    assert spool.used_bytes == os.path.getsize(kept.path)
    assert {spool.put_frame([BIG]).path, spool.put_frame([BIG]).path} == {damaged.path, freed.path}


def test_a_half_written_frame_is_no_frame_when_its_writer_was_killed(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=None)
    groups = [make_group("a"), make_group("b")]
    plan = batching.plan_batch(groups, 3, "batch", FACTS)

    def die(batch: TrainBatch) -> None:
        batching.fill_batch(batch, groups[:1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spool.put_filled_frame(plan, die)
    assert spool.used_bytes == 0
    again = Spool(tmp_path, max_bytes=None).recover_frames()
    assert (again.intact, again.corrupt) == ((), {})


def test_a_frame_filled_in_place_equals_one_that_was_copied(spool: Spool) -> None:
    groups = [make_group("a"), make_group("b")]
    dirty = spool.put_frame([np.full(60_000, 255, np.uint8)])
    spool.free_frame(dirty)  # its old bytes must not shine through the padding
    plan = batching.plan_batch(groups, 3, "batch", FACTS)
    placed = spool.put_filled_frame(plan, lambda batch: batching.fill_batch(batch, groups))
    copied = spool.put_frame(batching.assemble_batch(groups, 3, "batch", FACTS))
    assert placed.path == dirty.path
    assert placed.nbytes == copied.nbytes
    frames = [Path(ref.path).read_bytes()[: ref.nbytes] for ref in (placed, copied)]
    assert frames[0] == frames[1]


def test_another_process_reads_a_frame_by_its_path(spool: Spool) -> None:
    ref = spool.put_frame(make_group("from here"))
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
            ref: SpoolRef = spool.put_frame([np.full(20_000, number * 1000 + i)])
            if not (spool.read_frame(ref, list)[0] == number * 1000 + i).all():
                wrong.append((number, i))
            spool.free_frame(ref)

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


def test_free_slabs_do_not_pile_up_when_each_batch_is_larger_than_the_last(tmp_path: Path) -> None:
    batches, groups = Spool(tmp_path / "a", None, keep_free=False), Spool(tmp_path / "b", None)
    nbytes = 100_000
    for _ in range(200):
        for spool in (batches, groups):
            spool.free_frame(spool.put_frame([np.zeros(nbytes, np.uint8)]))
        nbytes = round(nbytes * 1.02)
    sizes = [path.stat().st_size for path in (tmp_path / "a").iterdir()]
    assert sum(sizes) <= 1.25 * nbytes
    assert len(sizes) == 1
    assert len(list((tmp_path / "b").iterdir())) > 10  # groups of all sizes come again


def test_a_batch_reuses_a_slab_when_sizes_vary_a_little(tmp_path: Path) -> None:
    spool = Spool(tmp_path, None, keep_free=False)
    paths = set()
    for nbytes in (400_000, 350_000, 390_000, 300_000, 400_000):
        ref = spool.put_frame([np.zeros(nbytes, np.uint8)])
        paths.add(ref.path)
        spool.free_frame(ref)
    assert len(paths) == 1


def test_free_slabs_are_released_before_the_disk_is_reported_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, other = Spool(tmp_path / "a", None), Spool(tmp_path / "b", None)
    spool.make_space = lambda: spool.release_free_slabs() + other.release_free_slabs()
    other.free_frame(other.put_frame([BIG]))
    kept = spool.put_frame([BIG])
    spool.free_frame(spool.put_frame([BIG]))
    fallocate = os.posix_fallocate
    disk_bytes = sum(path.stat().st_size for path in tmp_path.rglob("slab-*"))

    def limited(file: int, offset: int, length: int) -> None:
        used = sum(path.stat().st_size for path in tmp_path.rglob("slab-*"))
        if used + length > disk_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fallocate(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    large = spool.put_frame(
        [np.concatenate([BIG, BIG])[:90_000]]
    )  # fits only in the place of both free slabs
    assert spool.read_frame(large, list)[0][0].tolist() == 0
    assert spool.read_frame(kept, list)[0][1] == 1
    with pytest.raises(SpoolFull, match="the disk is full"):
        spool.put_frame([BIG])
    assert [path.name for path in (tmp_path / "b").iterdir()] == []
