"""Which errors say that this process lacked a descriptor or space on its disk, and waiting for one."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from pathlib import Path

import pytest

from async_rl.errors import AgentLoopError, AsyncRLError
from async_rl.runtime.shortages import MAX_SHORTAGE_S, is_shortage, wait_for_files, wait_out_shortage


def caused_by(cause: BaseException) -> AgentLoopError:
    error = AgentLoopError("agent loop mine:Loop raised")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (sqlite3.OperationalError("database or disk is full"), True),
        (sqlite3.OperationalError("database is locked"), False),
        (caused_by(OSError(errno.EMFILE, "Too many open files")), True),
        (caused_by(ExceptionGroup("two", [ValueError("no"), OSError(errno.ENFILE, "files")])), True),
        (caused_by(ExceptionGroup("two", [ValueError("no"), KeyError("x")])), False),
        (ValueError("no"), False),
    ],
)
def test_a_shortage_is_found_among_the_causes(error: BaseException, expected: bool) -> None:
    assert is_shortage(error) == expected


def test_an_error_that_is_raised_from_its_own_group_is_no_endless_chain() -> None:
    error = ValueError("no")
    error.__cause__ = ExceptionGroup("one", [error])
    assert not is_shortage(error)


async def test_a_start_ends_with_a_sentence_when_the_disk_takes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, data: bytes) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(AsyncRLError, match=r"spool cannot be written: Input/output error; make the disk"):
        await wait_for_files(tmp_path / "spool")


async def test_what_waits_for_space_looks_for_it_about_once_per_second() -> None:
    """Thousands of trajectories may wait to be stored on one full disk."""
    attempts: list[float] = []

    async def store() -> None:
        attempts.append(asyncio.get_running_loop().time())
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        await wait_out_shortage(store)
    assert attempts[1] - attempts[0] < 0.5
    assert attempts[-1] - attempts[0] >= MAX_SHORTAGE_S
    assert len(attempts) < 1.1 * MAX_SHORTAGE_S
