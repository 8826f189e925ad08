"""Finds blocking calls on the thread of an event loop: files, directories, disk usage, SQLite."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import async_rl
from async_rl.store.ledger_tables import LedgerTables

_PACKAGE = f"{Path(async_rl.__file__).parent}/"
_LIBRARY = (sysconfig.get_path("stdlib"), "<frozen")
"""Modules of Python: what they do is done by their caller; imports are done once."""

_EVENTS = frozenset(
    {
        "open",
        "os.link",
        "os.listdir",
        "os.mkdir",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.scandir",
        "os.truncate",
        "shutil.copyfile",
        "shutil.copytree",
        "shutil.move",
        "shutil.rmtree",
        "sqlite3.connect",
    }
)

_WITHOUT_EVENTS = [
    (os, "fsync"),
    (os, "posix_fallocate"),
    (os, "statvfs"),
    (shutil, "disk_usage"),
    (LedgerTables, "flush"),
    (LedgerTables, "query_rows"),
]
"""Calls that CPython does not audit."""


class LoopBlockers:
    """The blocking calls that one thread has made, by their place in async_rl."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        self._thread: int | None = None

    def start(self) -> None:
        """Watch the calling thread until `stop`."""
        self._thread = threading.get_ident()

    def stop(self) -> None:
        """Watch no thread any more."""
        self._thread = None

    def record_call(self, what: str) -> None:
        if self._thread != threading.get_ident():
            return
        self._thread, watched = None, self._thread  # the stack itself is read from files
        try:
            frames = [f for f in traceback.extract_stack()[:-2] if not f.filename.startswith(_LIBRARY)]
            if frames and frames[-1].filename.startswith(_PACKAGE):
                place = frames[-1]
                self.places[f"{what} in {place.filename.removeprefix(_PACKAGE)}:{place.name}"] += 1
        finally:
            self._thread = watched


_watchers: list[LoopBlockers] = []


def _hook(event: str, _: tuple[Any, ...]) -> None:
    if _watchers and event in _EVENTS:
        _watchers[-1].record_call(event)


_added = False


@contextmanager
def loop_blockers() -> Iterator[LoopBlockers]:
    """Record blocking calls in the block; `start` says of which thread."""
    global _added
    if not _added:
        sys.addaudithook(_hook)  # it cannot be removed
        _added = True
    blockers = LoopBlockers()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in _WITHOUT_EVENTS:
            patch.setattr(owner, name, _recording(getattr(owner, name), name, blockers))
        _watchers.append(blockers)
        try:
            yield blockers
        finally:
            _watchers.remove(blockers)


def _recording(function: Callable[..., Any], name: str, blockers: LoopBlockers) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        blockers.record_call(name)
        return function(*args, **named)

    return call
