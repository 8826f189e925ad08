"""Ends processes of user code that outlive what started them. A program; stdlib only.

```
 owner (driver, rollout worker) ── which scopes are over, what is held ──► reaper ── marks in /proc/*/environ
        ▲                                                                   │
        └──────────────── what was ended, of which scope ◄──────────────────┘
```

A process belongs to a scope (an attempt, the agent loops of a run) by a mark in its environment, which its
children inherit even if they fork twice or lead a session of their own. Descendants without the mark belong
to it if they were seen below a marked process, and so do processes that the owner names (`adopted`). The mark
contains a random token of the owner, so no process of another run is ever touched. When the owner has ended
for whatever reason, all its scopes are over; a pidfd shows that even after SIGKILL. The reaper leads a
session of its own, so that a signal to the owner's process group does not reach it. If it is killed together
with the owner, the file REPORT.owner is left, by which the next process of the run starts another reaper.

Usage: reaper.py OWNER_PID OWNER_START MARK GRACE_S REPORT
"""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes milliseconds to import
    from typing import Any

_ROUND_S = 0.5
"""Time between two scans once the owner has ended."""
_GIVE_UP_S = 55.0
"""A process that outlives SIGKILL by this long waits in a device driver."""
_RELEASE_S = 30.0
"""The time limit of a release command."""

Key = tuple[int, int]
"""A process: its pid and its start time in clock ticks after boot."""


class Reaper:
    """The processes of one owner."""

    def __init__(self, mark: str, grace_s: float) -> None:
        self._needle = mark.encode()
        self._grace_s = grace_s
        self._owner_runs = True
        self._live: set[int] = set()
        self._upto = 0
        self._known: dict[Key, tuple[str, str]] = {}
        """Scope and kind of all processes that belong to one."""
        self._marked: set[Key] = set()
        """Those of them whose mark was read; others inherited it from an ancestor, as before their `exec`."""
        self._ended: dict[Key, float] = {}
        """When a process was first signalled."""
        self._held: dict[int, tuple[int, str, list[str]]] = {}
        """Scope, kind and release command of resources that are not processes of this host."""
        self._released: set[int] = set()
        """Those of them whose command has been started."""
        self._releasing: list[tuple[subprocess.Popen[bytes], float]] = []

    @property
    def num_over(self) -> int:
        """The number of processes and release commands that still run although their scope is over."""
        return len(self._ended) + len(self._releasing)

    def update(self, request: "dict[str, Any]") -> None:
        """Learn which scopes are live, and what is held."""
        self._upto, self._live = request["upto"], set(request["live"])
        for pid, start in request["adopted"]:
            self._known[pid, start] = "0", "other"
            self._marked.add((pid, start))
        self._held = {number: (scope, kind, command) for number, scope, kind, command in request["held"]}
        self._released &= self._held.keys()

    def sweep(self) -> list[tuple[str, str, str]]:
        """End the processes whose scope is over; return scope, kind and name of each tree that was found.

        A process is first asked to end (SIGTERM), which lets the client of a container end the container.
        """
        running = self._scan()
        now, found = time.monotonic(), []
        over = {key for key in self._known if self._is_over(self._known[key][0], running)}
        for key in over:
            parent, name = running[key]
            if key not in self._ended and (parent not in running or parent not in over):
                found.append((*self._known[key], name))
            first = self._ended.setdefault(key, now)
            _signal(key, signal.SIGTERM if now - first < self._grace_s else signal.SIGKILL)
        found += self._release(now)
        return found

    def finish(self) -> list[tuple[str, str, str]]:
        """End everything after the owner has ended; return what `sweep` returns."""
        self._owner_runs, found, empty = False, [], 0
        deadline = time.monotonic() + _GIVE_UP_S
        while empty < 2 and time.monotonic() < deadline:  # a process may have been between fork and exec
            found += self.sweep()
            empty = 0 if self._known or self._releasing else empty + 1
            time.sleep(_ROUND_S)
        return found

    def _is_over(self, scope: str, running: dict[Key, tuple[Key, str]]) -> bool:
        if not self._owner_runs:
            return True
        pid, _, start = scope.partition("-")
        if start:  # of a process that is a scope itself
            return (int(pid), int(start)) not in running
        return int(scope) < self._upto and int(scope) not in self._live

    def _scan(self) -> dict[Key, tuple[Key, str]]:
        """Return all running processes with their parents and names, and find those of the scopes."""
        stats = dict(filter(None, map(_stat, filter(str.isdigit, os.listdir("/proc")))))
        start_of = {pid: start for pid, (start, _, _) in stats.items()}
        running = {
            (pid, start): ((parent, start_of.get(parent, 0)), name)
            for pid, (start, parent, name) in stats.items()
            if pid != os.getpid()
        }
        self._known = {key: known for key, known in self._known.items() if key in running}
        self._ended = {key: first for key, first in self._ended.items() if key in running}
        self._marked &= running.keys()
        for key in running.keys() - self._marked:
            if (mark := self._mark_of(key[0])) is not None:
                self._known[key] = mark
                self._marked.add(key)
        for key in running:
            self._inherit(key, running)
        return running

    def _inherit(self, key: Key, running: dict[Key, tuple[Key, str]]) -> None:
        """Give a process the scope of its nearest ancestor that has one."""
        line = []
        while key in running and key not in self._known:
            line.append(key)
            key = running[key][0]
        if key in self._known:
            self._known.update(dict.fromkeys(line, self._known[key]))

    def _mark_of(self, pid: int) -> tuple[str, str] | None:
        try:
            environment = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it has ended, or belongs to another user
            return None
        _, found, rest = environment.partition(b"\0" + self._needle)
        if not found:
            return None
        scope, _, kind = rest.partition(b"\0")[0].decode().partition(":")
        return scope, kind

    def _release(self, now: float) -> list[tuple[str, str, str]]:
        """Run the release commands of scopes that are over, and end those that take too long."""
        found = []
        for number, (scope, kind, command) in self._held.items():
            if number not in self._released and self._is_over(str(scope), {}):
                self._released.add(number)
                found.append((str(scope), kind, command[0]))
                try:
                    process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
                    )
                except OSError as error:
                    print(
                        f"cannot release a {kind} by {command[0]!r}: {str(error)!r}",
                        file=sys.stderr,
                        flush=True,
                    )
                else:
                    self._releasing.append((process, now))
        for process, began in list(self._releasing):
            if process.poll() is None and now - began > _RELEASE_S:
                process.kill()
                process.wait()
            if process.returncode is not None:
                self._releasing.remove((process, began))
            if process.returncode:
                text = f"the release command {process.args!r} ended with {process.returncode}"
                print(text, file=sys.stderr, flush=True)
        return found


def _stat(entry: str) -> tuple[int, tuple[int, int, str]] | None:
    """Return pid, start time, parent and name of a process; None for one that has ended."""
    try:
        text = Path(f"/proc/{entry}/stat").read_text(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")  # the name may hold anything
    fields = tail.split()
    if fields[0] in "ZX":
        return None
    return int(entry), (int(fields[19]), int(fields[1]), head.partition("(")[2])


def _signal(key: Key, number: int) -> None:
    """Signal this process, and not a later one with its pid."""
    try:
        descriptor = os.pidfd_open(key[0])
    except OSError:
        return
    try:
        stat = _stat(str(key[0]))
        if stat is not None and stat[1][0] == key[1]:
            with suppress(OSError):
                signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def _lock(path: str) -> int:
    """Wait until no other reaper of the same owner runs, where the file system has locks."""
    descriptor = -1
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor  # it is locked until this process ends


def main() -> None:
    """Serve the owner, and end everything when it has ended."""
    pid, start, mark, grace_s, report = sys.argv[1:]
    owner = int(pid), int(start)
    if report:
        _lock(report + ".owner")
    reaper = Reaper(mark, float(grace_s))
    poller, buffer = select.poll(), b""
    poller.register(0, select.POLLIN)
    try:
        descriptor = os.pidfd_open(owner[0])
        stat = _stat(pid)
        ended = stat is None or stat[1][0] != owner[1]
        poller.register(descriptor, select.POLLIN)
    except OSError:
        descriptor, ended = -1, True
    while not ended:
        ready = {ready for ready, _ in poller.poll()}
        ended = descriptor in ready
        while select.select([0], [], [], 0)[0]:
            if not (data := os.read(0, 1 << 16)):
                with suppress(KeyError):
                    poller.unregister(0)  # the owner is about to end
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                reaper.update(request)
                if not ended:
                    found = reaper.sweep() if request["sweep"] else []
                    answer = {"found": found, "num_over": reaper.num_over}
                    with suppress(OSError):
                        os.write(1, json.dumps(answer).encode() + b"\n")
    found = reaper.finish()
    if found and report:
        with suppress(OSError):
            Path(report + ".new").write_text(json.dumps([[kind, "owner_ended"] for _, kind, _ in found]))
            os.rename(report + ".new", report + ".json")
    if report:
        with suppress(OSError):
            os.unlink(report + ".owner")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
