"""The journal's file: when it is rewritten, and what a full disk and a late thread do to it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.errors import SpoolFull
from async_rl.observability.metrics import Metrics
from async_rl.queue.journal import Journal, JournalEntry
from async_rl.queue.journal_file import read_journal
from async_rl.types import Sampled


def sampled(count: int) -> Sampled:
    return Sampled(
        token_ids=np.arange(count, dtype=np.int32),
        rollout_log_probs=np.zeros(count, np.float32),
        weight_version=0,
        engine_id="engine-0",
        finish_reason="abort",
    )


def open_journal(folder: Path, metrics: Metrics | None = None) -> Journal:
    journal = Journal(folder, metrics)
    journal.restore((), newest_version=0)
    return journal


def grow(entry: JournalEntry, *lengths: int) -> None:
    entry.segments += [sampled(length) for length in lengths]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tokens(folder: Path, name: str) -> int:
    return read_journal(folder)[0][name].num_tokens


def test_the_file_stays_within_a_multiple_of_what_is_alive(tmp_path: Path) -> None:
    metrics = Metrics()
    journal = open_journal(tmp_path, metrics)
    for number in range(60):
        name = f"t{number}"
        grow(journal.open_entry(name), 4000, 4000)
        journal.write_entries()
        journal.remove_entries([f"t{number - 2}"])
        assert journal.nbytes < 1.3 * max(1 << 20, 4 * 3 * 8 * 8000)
        assert tokens(tmp_path, name) == 8000
    written = metrics.registry.get_sample_value("async_rl_journal_written_bytes_total")
    assert written is not None
    assert 60 * 64_000 < written < 1.4 * 60 * 64_000
    assert metrics.registry.get_sample_value("async_rl_journal_bytes") == journal.nbytes
    assert len(names(tmp_path)) == 1
    journal.close()


def test_the_file_is_not_rewritten_every_tick_when_all_of_it_is_alive_in_small_pieces(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    entries = [journal.open_entry(f"t{number}") for number in range(100)]
    files = set()
    for _ in range(10):
        for entry in entries:
            grow(entry, *[1] * 10)
        journal.write_entries()
        files.update(names(tmp_path))
    assert journal.nbytes > 2 << 20
    assert len(files) <= 2
    journal.close()


def test_the_file_ends_with_its_last_whole_record_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal(tmp_path)
    entry = journal.open_entry("t")
    grow(entry, 50)
    journal.write_entries()
    size, write = journal.nbytes, os.write

    def write_some(file: int, data: Any) -> int:
        if len(data) < 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", write_some)
    grow(entry, 70)
    with pytest.raises(SpoolFull, match=f"has {size} bytes and no space for another .* the disk is full"):
        journal.write_entries()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == size
    monkeypatch.undo()
    grow(entry, 1)
    journal.write_entries()  # what was refused comes first
    assert tokens(tmp_path, "t") == 121
    journal.close()


def test_nothing_is_written_when_a_thread_comes_after_the_end(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    entry = journal.open_entry("t")
    grow(entry, 50)
    journal.write_entries()
    grow(entry, 50)
    journal._gather()  # a tick whose thread has not begun
    journal.close()
    journal._append()
    assert tokens(tmp_path, "t") == 50


def test_only_the_user_may_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal = open_journal(folder)
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    journal.close()
