"""Imports modules once and forks a Python program from itself for each attempt. A program; stdlib only.

```
 ForkServer ── request, stdin, stdout, stderr, channel ──► fork server (imports done) ── fork ──► program
      ▲                                                        │ waits
      └───────────────── channel: exit status ─────────────────┘   channel closed: the program is killed
```

A request is a file with JSON: `command` (a script, or `-m` and a module, and arguments), `environment`,
`cwd`. The program has a session, an environment and descriptors of its own; memory is shared until written.

Usage: fork_server.py DESCRIPTOR MODULE...
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_NUM_DESCRIPTORS = 5


def serve(control: socket.socket, parent: int) -> tuple[int, list[int]]:
    """Fork programs until the other side is gone; return the request in the child."""
    channels: dict[int, int] = {}  # process ids, until they are to be killed
    children: dict[int, tuple[int, int]] = {}  # process id and channel, by pidfd
    polled = select.poll()
    polled.register(control, select.POLLIN)
    control.send(b"ready")
    while True:
        for ready, _ in polled.poll():  # the control comes first, so that no number below is reused
            if ready == control.fileno():
                _, descriptors, _, _ = socket.recv_fds(control, 1, _NUM_DESCRIPTORS)
                if len(descriptors) < _NUM_DESCRIPTORS:
                    for pid in channels.values():
                        kill(pid)
                    sys.exit(0)
                request, *outputs, channel = descriptors
                if (pid := os.fork()) == 0:
                    die_with(parent)
                    return request, outputs
                handle = os.pidfd_open(pid)
                channels[channel], children[handle] = pid, (pid, channel)
                for descriptor in (request, *outputs):
                    os.close(descriptor)
                polled.register(channel, select.POLLIN)
                polled.register(handle, select.POLLIN)
            elif ready in children:
                pid, channel = children.pop(ready)
                kill(pid)  # the rest of its group, before its number can be reused
                _, status = os.waitpid(pid, 0)
                if channels.pop(channel, None) is not None:
                    polled.unregister(channel)
                polled.unregister(ready)
                with suppress(OSError):  # nobody waits for it
                    os.write(channel, b"%d\n" % os.waitstatus_to_exitcode(status))
                os.close(channel)
                os.close(ready)
            elif ready in channels:
                kill(channels.pop(ready))
                polled.unregister(ready)  # its descriptor is closed when the program has ended


def kill(pid: int) -> None:
    """Kill a program with its process group, or the program alone before it leads one."""
    for send in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            send(pid, signal.SIGKILL)
            return


def die_with(parent: int) -> None:
    """Let this process end when the fork server ends, for whatever reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become(request: int, outputs: list[int]) -> list[str]:
    """Take the environment, folder and outputs of a request, and return its command."""
    os.setsid()
    with open(request, "rb") as file:
        wanted = json.load(file)
    for number, descriptor in enumerate(outputs):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    random.seed()
    tempfile.tempdir = None  # the one of this environment
    return list(wanted["command"])


def main() -> None:
    """Serve, and run the program in each child."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    if threading.active_count() > 1:
        print("imports have started threads, which programs will not have", file=sys.stderr, flush=True)
    request, outputs = serve(control, os.getpid())
    control.detach()
    command = become(request, outputs)
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
