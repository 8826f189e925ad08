"""Ends one server process, and all processes it started, when their parent ends. A program; stdlib only.

```
driver or Ray actor ── starts ──► guard ── starts ──► server ──► its schedulers, detokenizers …
        └── pidfd watched by ──────┘ └── pidfd of ─────┘
```

The guard leads a session of its own, so all these processes share its process group. It ends the group when
the server ends, on SIGTERM, or when its parent has ended for whatever reason: a pidfd becomes readable even
after SIGKILL, and unlike PR_SET_PDEATHSIG it refers to the process, not to the thread that started the guard.
The guard also removes the group's scratch folder and its shared memory: files in /dev/shm that the group maps
shared and writable, that appeared after the guard's start, and that no other process has mapped. Others stay,
such as weights that the server reads there and buckets of the trainer.

Usage: guard.py PARENT_PID SCRATCH_DIR GRACE_S COMMAND…
"""

import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_SCAN_S = 5
"""How often the shared memory that the server has mapped is recorded."""


def main() -> int:
    """Run the command; return its exit code."""
    parent, scratch, grace_s, command = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:]
    # Other than `rglob`, this leaves out folders that are deleted meanwhile.
    before = {Path(folder, name) for folder, _, names in os.walk("/dev/shm") for name in names}
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    signal.signal(signal.SIGTERM, lambda *_: None)  # a handler, not SIG_IGN, which the server would inherit
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    server_fd = os.pidfd_open(server.pid)
    poller = select.poll()
    poller.register(server_fd, select.POLLIN)
    poller.register(told, select.POLLIN)
    try:
        poller.register(os.pidfd_open(parent), select.POLLIN)
        orphaned = os.getppid() != parent
    except ProcessLookupError:
        orphaned = True
    shared: set[Path] = set()
    while not orphaned and not poller.poll(_SCAN_S * 1000):
        # When a server ends by itself, its mappings are gone, so they are recorded while it runs.
        shared |= _shared_memory(members(os.getpgrp()))
    if server.poll() is None and grace_s > 0:
        shared |= _shared_memory(members(os.getpgrp()))
        server.terminate()
        ended = select.poll()
        ended.register(server_fd, select.POLLIN)
        ended.poll(grace_s * 1000)
    _end_group(shared, before)
    shutil.rmtree(scratch, ignore_errors=True)
    code = server.wait()
    return code if code >= 0 else 128 - code  # of a signal, as shells report it


def _end_group(shared: set[Path], before: set[Path]) -> None:
    """Kill all other processes of our group, and unlink the shared memory that they left.

    Args:
        shared: What they had mapped while they ran.
        before: The files in /dev/shm when the guard started.
    """
    leftovers = set(shared)
    while running := members(os.getpgrp()):
        leftovers |= _shared_memory(running)  # of all before any is killed: the death of one can end others
        for process in running:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    leftovers -= before
    if leftovers:
        leftovers -= _shared_memory([int(entry) for entry in os.listdir("/proc") if entry.isdigit()])
    for path in leftovers:
        path.unlink(missing_ok=True)


def _shared_memory(processes: list[int]) -> set[Path]:
    """Return the files in /dev/shm that these processes have mapped shared and writable, and that have a
    name.

    A server maps what it only reads without the permission to write, or privately.
    """
    found: set[Path] = set()
    for process in processes:
        with suppress(ProcessLookupError, FileNotFoundError, PermissionError):
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                _, permissions, _, _, _, *name = line.split(maxsplit=5)
                if name and name[0].startswith("/dev/shm/") and permissions[1:4:2] == "ws":
                    found.add(Path(name[0]))
    return {path for path in found if path.exists()}  # others end in " (deleted)"


def members(group: int) -> list[int]:
    """Return the running processes of a process group, other than this one."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            # After the name in parentheses, which may hold anything: state, parent, group.
            state, _, member_of = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:3]
        except (ProcessLookupError, FileNotFoundError):
            continue
        if int(member_of) == group and state not in "ZX":
            found.append(int(entry))
    return found


if __name__ == "__main__":
    sys.exit(main())
