"""Opens a socket that listens inside a container without a network, and belongs to this process.

```
 this process                          network namespace of a container: loopback and nothing else
 child ── enters the container's ────► 127.0.0.1:PORT, listening
   └───── sends the socket back ─────► accepted here, whatever else the container may not reach
```

A socket stays in the namespace in which it was made. To enter that of a container takes the rights over it:
those of root, or of the user whose rootless engine runs it.

Also a program, the child: namespaces of users are entered only by processes of one thread.

**Source**: setns(2), user_namespaces(7), unix(7).
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from typing import Final

_LIMIT_S: Final = 30.0
_NEW_USER: Final = 0x10000000
_NEW_NETWORK: Final = 0x40000000


def listening_inside(pid: int, mark: str) -> socket.socket:
    """Return a socket that listens on a free port of the loopback device of a process's network.

    Args:
        pid: The process.
        mark: One of its arguments, which shows that it is the right one: engines may count processes of
            another machine.

    Raises:
        OSError: It cannot be entered, or it is another process.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(pid), mark, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={},
                pass_fds=[theirs.fileno()],
            )
        ours.settimeout(_LIMIT_S)
        try:
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        finally:
            child.kill()  # it has sent the socket, or does not answer
            _, told = child.communicate()
    if not descriptors:
        raise OSError(told.decode(errors="replace").strip()[-500:] or "no socket was sent")
    listener = socket.socket(fileno=descriptors[0])
    listener.setblocking(False)
    return listener


def main() -> None:
    """Enter the namespaces of the process that the arguments name, and send a socket."""
    pid, mark, channel = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    try:
        process = os.pidfd_open(pid)
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if mark.encode() not in file.read().split(b"\0"):
                raise OSError(f"process {pid} of this host is not that of the container")
        kinds = _NEW_NETWORK
        if os.stat(f"/proc/{pid}/ns/user").st_ino != os.stat("/proc/self/ns/user").st_ino:
            kinds |= _NEW_USER
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(process, kinds):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(fileno=channel) as ours:
            socket.send_fds(ours, [b"s"], [listener.fileno()])
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
