"""Frames of trajectories in a folder: bounds, names, deletion, recovery, readers in other processes."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from async_rl.errors import AsyncRLError, CorruptFrame, SpoolFull
from async_rl.store import frame_reader
from async_rl.store.frames import encode_trajectory, read_columns, verify_frame
from async_rl.store.spool import Spool, SpoolFolder
from tests.support.trajectories import make_group, make_trajectory


def names(spool: Spool) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in spool.directory.glob("*/*-*"))


def test_only_groups_that_have_ended_count_against_the_bound(tmp_path: Path) -> None:
    one, two, three = make_group("g", size=3, tokens=2000).trajectories
    spool = Spool(tmp_path, max_bytes=5 * encode_trajectory(three).nbytes)
    (early,) = spool.store_tree([one])
    assert (spool.used_bytes, names(spool)) == (0, ["g-0"])
    stored = (early, *spool.store_tree([two, three]))
    spool.use_group(stored)
    assert spool.used_bytes == sum(entry.nbytes for entry in stored)
    others = spool.store_tree(make_group("h", size=3, tokens=2000).trajectories)
    with pytest.raises(SpoolFull, match=r"exceed queue\.max_bytes"):
        spool.use_group(others)
    assert spool.used_bytes == sum(entry.nbytes for entry in stored)
    spool.discard(stored)
    spool.use_group(others)


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.ENOSPC, "the disk is full; free some"),
        (errno.EROFS, "Read-only file system; make the disk writable"),
        (errno.EIO, "Input/output error; make the disk writable"),
    ],
)
def test_a_tree_is_written_whole_or_not_at_all(
    number: int, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, max_bytes=1 << 20)
    written = os.write

    def fill_up(file: int, data: Any) -> int:
        if "g-1-" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(number, os.strerror(number))
        return written(file, data)

    spool.store_tree([make_trajectory("g-2")])
    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(SpoolFull, match=cause):
        spool.store_tree(make_group("g").trajectories)
    assert names(spool) == ["g-2"]
    monkeypatch.undo()
    assert len(spool.store_tree(make_group("g").trajectories)) == 2


def test_a_file_is_deleted_when_what_must_come_before_is_done(tmp_path: Path) -> None:
    spool = Spool(tmp_path, None)
    one, other = spool.store_tree(make_group("g").trajectories)
    spool.use_group([one, other])
    mapped = read_columns(one)["token_ids"]
    spool.discard([one])
    assert spool.used_bytes == other.nbytes

    def fail() -> None:
        raise AsyncRLError("the ledger cannot be written")

    with pytest.raises(AsyncRLError):
        spool.delete_discarded(before=fail)
    verify_frame(one)
    spool.delete_discarded()
    with pytest.raises(CorruptFrame, match="does not exist"):
        verify_frame(one)
    assert mapped[0] >= 0  # what a reader has mapped stays
    spool.discard([one])  # the second time is nothing
    assert spool.used_bytes == other.nbytes


def test_a_new_frame_never_has_the_name_of_one_that_will_be_deleted(tmp_path: Path) -> None:
    spool = Spool(tmp_path, None)
    (first,) = spool.store_tree([make_trajectory("t")])
    spool.discard([first])
    (again,) = spool.store_tree([make_trajectory("t")])
    (third,) = spool.store_tree([make_trajectory("t")])
    assert len({first.path, again.path, third.path}) == 3
    spool.delete_discarded()
    verify_frame(again)
    verify_frame(third)


def test_only_the_frames_that_the_ledger_names_survive_a_restart(tmp_path: Path) -> None:
    first = Spool(tmp_path, None)
    worker = SpoolFolder(first.new_folder("rollout-worker-0"))
    early, orphan = worker.store_tree([make_trajectory("early"), make_trajectory("orphan")])
    used = first.store_tree(make_group("g").trajectories)
    (tmp_path / "half.part").write_bytes(b"half")
    Path(f"{early.path}.part").write_bytes(b"half")
    again = Spool(tmp_path, None)
    again.recover_frames([early], [used])
    assert names(again) == ["early", "g-0", "g-1"]
    assert again.used_bytes == sum(entry.nbytes for entry in used)
    with pytest.raises(CorruptFrame):
        verify_frame(orphan)


def test_no_folder_and_no_number_is_given_twice(tmp_path: Path) -> None:
    """A process of an earlier driver may still run, and write into the folder that it was given."""
    first = Spool(tmp_path, None)
    late = SpoolFolder(first.new_folder("rollout-worker-0"))
    first.end_folder(ended := first.new_folder("rollout-worker-1"))
    assert not ended.exists()
    again = Spool(tmp_path, None)
    again.recover_frames([], [])
    assert again.new_folder("rollout-worker-0").name == "000005-rollout-worker-0"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000004-driver", "000005-rollout-worker-0"]
    with pytest.raises(FileNotFoundError):
        late.store_tree([make_trajectory("t")])


def test_frames_that_were_never_reported_are_deleted_when_their_process_has_ended(tmp_path: Path) -> None:
    spool = Spool(tmp_path, None)
    worker = SpoolFolder(spool.new_folder("rollout-worker-0"))
    early, _, used, discarded, refused = worker.store_tree([make_trajectory(name) for name in "abcde"])
    spool.hold([early, used, discarded])
    spool.use_group([used])
    spool.discard([discarded])
    spool.refuse([refused, used])  # a second answer with a frame that is held changes nothing
    spool.end_folder(worker.directory)
    assert names(spool) == ["a", "c", "d", "e"]
    spool.delete_discarded()
    assert names(spool) == ["a", "c"]
    spool.discard([early, used])
    spool.delete_discarded()
    assert not worker.directory.exists()


def test_a_folder_that_cannot_be_read_now_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path, None)
    worker = SpoolFolder(spool.new_folder("rollout-worker-0"))
    held, _ = worker.store_tree([make_trajectory("held"), make_trajectory("unreported")])
    spool.hold([held])
    with monkeypatch.context() as shortage:
        error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        shortage.setattr(frame_reader.os, "scandir", Mock(side_effect=error))
        spool.end_folder(worker.directory)
    assert f"{worker.directory} is deleted later" in caplog.text
    assert names(spool) == ["held", "unreported"]
    spool.discard([held])
    spool.delete_discarded()
    assert not worker.directory.exists()


def test_frames_stay_apart_when_threads_write_and_discard_at_once(tmp_path: Path) -> None:
    spool = Spool(tmp_path, None)
    failures: list[str] = []

    def work(number: int) -> None:
        for i in range(20):
            trajectory = make_trajectory(f"{number}", sampled=((100 + i, 0),))
            (stored,) = spool.store_tree([trajectory])
            if not np.array_equal(read_columns(stored)["token_ids"], trajectory.token_ids):
                failures.append(f"{number}: {i}")
            spool.discard([stored])
            spool.delete_discarded()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert names(spool) == []
