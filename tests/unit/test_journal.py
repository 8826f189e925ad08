"""The journal's file: when it is rewritten, and what a full disk and a late thread do to it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import SpoolFull
from async_rl.observability.metrics import Metrics, value_of
from async_rl.store import journal as journal_module
from async_rl.store.journal import Journal, JournalEntry
from async_rl.store.journal_file import read_journal
from tests.support.journals import sampled


def grow(entry: JournalEntry, *lengths: int) -> None:
    entry.segments += [sampled(length) for length in lengths]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tokens(folder: Path, name: str) -> int:
    return read_journal(folder)[0][name].num_tokens


def test_the_file_stays_within_a_multiple_of_what_is_alive(tmp_path: Path) -> None:
    metrics = Metrics()
    journal = Journal(tmp_path, metrics)
    for number in range(60):
        name = f"t{number}"
        grow(journal.open_entry(name), 4000, 4000)
        journal.write_entries()
        journal.remove_entries([f"t{number - 2}"])
        assert journal.nbytes < 1.3 * max(1 << 20, 4 * 3 * 8 * 8000)
        assert tokens(tmp_path, name) == 8000
    written = value_of(metrics.journal_written_bytes_total)
    assert 60 * 64_000 < written < 1.4 * 60 * 64_000
    assert len(names(tmp_path)) == 1
    journal.close()


@pytest.mark.parametrize(
    ("number", "cause"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "Read-only file system"), (errno.EIO, "Input/output")],
)
def test_the_file_ends_with_its_last_whole_record_when_the_disk_takes_no_more(
    number: int, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    entry = journal.open_entry("t")
    grow(entry, 50)
    journal.write_entries()
    size, write = journal.nbytes, os.write

    def write_some(file: int, data: Any) -> int:
        if len(data) < 100:
            raise OSError(number, os.strerror(number))
        return write(file, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", write_some)
    grow(entry, 70)
    with pytest.raises(SpoolFull, match=f"has {size} bytes and no space for another .*{cause}"):
        journal.write_entries()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == size
    monkeypatch.undo()
    grow(entry, 1)
    journal.write_entries()  # what was refused comes first
    assert tokens(tmp_path, "t") == 121
    journal.close()


@pytest.mark.parametrize("syncs", [True, False])
def test_a_write_counts_when_the_disk_has_it_where_other_nodes_read_the_journal(
    syncs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, syncs=syncs)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda file: synced.append(os.fstat(file).st_size))
    entry = journal.open_entry("t")
    for _ in range(3):
        grow(entry, 50)
        journal.write_entries()
    assert len(synced) == (3 if syncs else 0)
    assert not syncs or synced[-1] == journal.nbytes
    size = journal.nbytes

    def fail(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # as servers of network file systems say it

    monkeypatch.setattr(os, "fdatasync", fail)
    grow(entry, 50)
    if syncs:
        with pytest.raises(SpoolFull):
            journal.write_entries()
        assert journal.nbytes == size
    monkeypatch.undo()
    journal.write_entries()
    assert tokens(tmp_path, "t") == 200
    journal.close()


def test_nothing_is_written_when_a_thread_comes_after_the_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    entry = journal.open_entry("t")
    grow(entry, 50)
    journal.write_entries()
    grow(entry, 50)
    journal._begin_pass(compact=False)
    journal._visit_entries()  # a tick whose thread has not begun
    journal.close()
    journal._append()
    assert tokens(tmp_path, "t") == 50


def test_only_the_user_may_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal = Journal(folder)
    grow(journal.open_entry("a"), 10)
    journal.write_entries()
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    journal.close()


@pytest.mark.parametrize("compact", [False, True])
async def test_each_turn_of_the_loop_does_little_when_much_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compact: bool
) -> None:
    journal = Journal(tmp_path)
    for number in range(1000):
        grow(journal.open_entry(f"t{number}"), 101)
    monkeypatch.setattr(journal_module, "_COMPACT_BYTES", 1000 if compact else 1 << 30)
    encoded: list[int] = []
    encode = journal_module.encode_records
    monkeypatch.setattr(
        journal_module, "encode_records", lambda part: encoded.append(len(part)) or encode(part)
    )
    await journal.write_in_thread()
    assert max(encoded) <= 64  # visited between two awaits
    assert sum(encoded) == 1000 * (2 if compact else 1)
    assert {state.num_tokens for state in read_journal(tmp_path)[0].values()} == {101}
    journal.close()


async def test_a_compaction_is_complete_when_the_disk_is_too_full_to_delete_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    entries = [journal.open_entry(f"t{number}") for number in range(100)]
    for entry in entries:
        grow(entry, 4)
    await journal.write_in_thread()
    monkeypatch.setattr(journal_module, "_COMPACT_BYTES", 1000)
    unlink = Path.unlink

    def fail_once(path: Path, missing_ok: bool = False) -> None:
        monkeypatch.setattr(Path, "unlink", unlink)
        raise OSError(errno.ENOSPC, "No space left on device")  # as file systems that copy on write say it

    monkeypatch.setattr(Path, "unlink", fail_once)
    await journal.write_in_thread()
    assert names(tmp_path) == ["journal-000001", "journal-000002"]
    for entry in entries:
        grow(entry, *[1] * 10)
    await journal.write_in_thread()
    assert names(tmp_path) == ["journal-000003"]
    states = read_journal(tmp_path)[0]
    assert [state.num_tokens for state in states.values()] == [14] * 100
    journal.close()
