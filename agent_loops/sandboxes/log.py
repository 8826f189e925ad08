"""The names of the sandboxes that one process may have, in a file that survives the process.

```
 {"boot": …, "pid": …, "started": …, "backend": {…}}   the owner, and how to reach the backend: without keys
 {"begin": "async-rl-…", "expires_s": …}                before it is created, flushed to disk
 {"end": "async-rl-…"}                                  after it has ended
```

A name without an end is what another process must end if the owner has ended. A restart of the host shows by
another `boot`. The file is written anew when most of its lines are of sandboxes that have ended.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Final

import msgspec

from async_rl.runtime.files import replace_file
from async_rl.runtime.processes import start_time, this_process

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_SPARE_LINES: Final = 1000
"""How many lines of ended sandboxes a file may have, beyond as many as there are live ones."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The process that has the sandboxes of a log, and where it has them."""

    boot: str
    pid: int
    started: str
    backend: dict[str, Any]
    """The settings of the backend, as in the config."""

    @property
    def is_of_this_boot(self) -> bool:
        """Whether it ran on this host since its last start."""
        return self.boot == _BOOT.read_text().strip()

    @property
    def runs(self) -> bool:
        """Whether it runs, if it is of this boot."""
        try:
            return start_time(self.pid) == self.started
        except OSError:
            return False


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox or snapshot that may exist."""

    begin: str
    expires_s: float
    """When its time to live is over: seconds since 1970."""
    is_snapshot: bool = False


class SandboxLog:
    """Writes the log of this process. Its methods block, and may be called from any thread."""

    def __init__(self, path: Path, backend: dict[str, Any]) -> None:
        """Begin a file.

        Args:
            path: The file, in an existing folder.
            backend: The settings of the backend, without keys.
        """
        process = this_process("")
        self.path = path
        owner = Owner(
            boot=_BOOT.read_text().strip(), pid=process.pid, started=process.started, backend=backend
        )
        self._head = msgspec.json.encode(owner)
        self._lock = threading.Lock()
        self._live: dict[str, bytes] = {}
        self._rewrite()

    def begin(self, record: Record) -> None:
        """Record durably what is about to be created."""
        line = msgspec.json.encode(record)
        with self._lock:
            self._live[record.begin] = line
            self._append(line)
            os.fsync(self._file.fileno())

    def end(self, name: str) -> None:
        """Record that something has ended."""
        with self._lock:
            if self._live.pop(name, None) is None:
                return
            self._append(msgspec.json.encode({"end": name}))
            if self._num_lines > 2 * len(self._live) + _SPARE_LINES:
                self._file.close()
                self._rewrite()

    @property
    def num_live(self) -> int:
        """How many have not ended."""
        return len(self._live)

    def touch(self) -> None:
        """Show that the owner still runs to those that cannot see its process."""
        os.utime(self.path)

    def close(self) -> None:
        """Close the file, and remove it if everything has ended."""
        with self._lock:
            self._file.close()
            if not self._live:
                self.path.unlink(missing_ok=True)

    def _append(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._num_lines += 1

    def _rewrite(self) -> None:
        lines = [self._head, *self._live.values()]
        replace_file(self.path, b"".join(line + b"\n" for line in lines), durable=True)
        self._file = self.path.open("ab", buffering=0)
        self._num_lines = len(lines)


def read_log(path: Path) -> tuple[Owner, list[Record]]:
    """Return the owner of a log and what has not ended.

    A line that was cut short by a kill or a full disk was of nothing that was created.

    Raises:
        OSError: It cannot be read, or another process has removed it.
        msgspec.DecodeError: It is no log.
    """
    head, *lines = path.read_bytes().split(b"\n")
    owner = msgspec.json.decode(head, type=Owner)
    live: dict[str, Record] = {}
    for line in lines[:-1]:  # what follows the last line feed was cut short
        fields = msgspec.json.decode(line)
        if "end" in fields:
            live.pop(fields["end"], None)
        else:
            record = msgspec.convert(fields, Record)
            live[record.begin] = record
    return owner, list(live.values())
