"""Runs shell commands in a root folder of their own, isolated from this host's files, processes and network.

```
 unshare: new user, mount, process, IPC, host name and network namespaces
   └─ pivot_root into a temporary folder: /usr of this host read-only, /proc, a few devices, writable folders
        └─ setpriv: no capabilities, none to be had ─► bash -c COMMAND
```

Files stay from one command to the next; processes end with their command. It needs what the Python sandbox
needs (`agent_loops.sandbox`), and unlike that one it lets commands start processes. It bounds time, output
and the memory of each process, but neither the number of processes nor the size of files: use it for tasks
that you trust, with policies that may err.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from async_rl.errors import AgentLoopError, EnvironmentNotReady
from async_rl.runtime.supervision import finished
from async_rl.runtime.threads import run_to_end
from async_rl.runtime.user_processes import marked

_FOLDERS: Final = ("app", "dev", "etc", "logs", "proc", "root", "tests", "tmp", "usr", ".host")
_OF_USR: Final = ("bin", "lib", "lib64", "sbin")
_PROGRAMS: Final = ("unshare", "pivot_root", "setpriv", "mount", "umount", "chroot", "bash")
_MAX_OUTPUT_BYTES: Final = 1 << 20
"""Output beyond this is dropped."""
_CLOSE_S: Final = 10.0

_SET_UP: Final = r"""
enter() {
    mount --bind "$1" "$1" && cd "$1" &&
    for each in usr $SHOWN; do
        mount --rbind /$each $each && mount -o remount,bind,ro,nosuid $each || return 1
    done &&
    for each in null zero full random urandom; do
        : > dev/$each && mount --bind /dev/$each dev/$each || return 1
    done &&
    mount -t proc proc proc && pivot_root . .host
}
enter "$1" || exit
[ -z "$MEMORY_KB" ] || ulimit -v "$MEMORY_KB"
exec chroot . /bin/sh -c '
    umount -l /.host && mkdir -p "$1" && cd "$1" || exit
    exec /usr/bin/env -u SHOWN -u MEMORY_KB setpriv --no-new-privs --inh-caps=-all --bounding-set=-all \
        /bin/bash -c "$2"
' sh "$2" "$3"
"""


class CommandResult(msgspec.Struct, frozen=True):
    """How a command has ended."""

    exit_code: int
    output: bytes
    """What it has written to both outputs."""
    timed_out: bool = False


class TaskShell(ABC):
    """Where the commands of one episode run."""

    @abstractmethod
    async def start(self) -> None:
        """Make it ready for commands."""

    @abstractmethod
    async def run_command(
        self, command: str, *, env: Mapping[str, str], limit_s: float, stdin: bytes = b""
    ) -> CommandResult:
        """Run a command of bash as root, in the working folder; it is ended at its time limit."""

    async def unpack(self, archive: bytes, folder: str) -> None:
        """Unpack a tar archive below a folder.

        Raises:
            AgentLoopError: It cannot be unpacked.
        """
        result = await self.run_command(
            f"mkdir -p {folder} && tar -x --no-same-owner -C {folder}", env={}, limit_s=60.0, stdin=archive
        )
        if result.exit_code:
            raise AgentLoopError(f"files cannot be unpacked: {result.output.decode(errors='replace')[-300:]}")

    @abstractmethod
    async def close(self) -> None:
        """End its processes, and remove its files."""


class LocalShell(TaskShell):
    """Runs commands on this host.

    Args:
        workdir: The absolute path of the working folder, inside its root.
        memory_mb: The most address space of a process; None for no limit.
    """

    def __init__(self, workdir: str = "/app", memory_mb: int | None = None) -> None:
        self._workdir = workdir
        self._memory_mb = memory_mb
        self._root: Path | None = None

    async def start(self) -> None:
        """Implements `TaskShell.start`.

        Raises:
            EnvironmentNotReady: A program is missing, or this machine refuses namespaces.
        """
        if missing := [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]:
            raise EnvironmentNotReady(
                f"the local shell needs {', '.join(missing)}: install util-linux, coreutils and bash"
            )
        self._root = await run_to_end(_new_root)
        result = await self.run_command("true", env={}, limit_s=30.0)
        if result.exit_code:
            raise EnvironmentNotReady(
                "the local shell cannot isolate commands on this machine: "
                f"{result.output.decode(errors='replace').strip()[-300:]}; expected user namespaces, as for "
                "agent_loops.sandbox"
            )

    async def run_command(
        self, command: str, *, env: Mapping[str, str], limit_s: float, stdin: bytes = b""
    ) -> CommandResult:
        """Implements `TaskShell.run_command`."""
        assert self._root is not None, "start comes first"
        names = ("--user", "--map-root-user", "--mount", "--pid", "--ipc", "--uts", "--net", "--fork")
        process = await asyncio.create_subprocess_exec(
            "unshare",
            *names,
            "--kill-child",
            *("/bin/sh", "-c", _SET_UP, "sh", str(self._root), self._workdir, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=marked({**self._environment(), **env}, "sandbox"),
            cwd="/",
            start_new_session=True,
        )
        output, timed_out = bytearray(), False
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(_feed(process, stdin), _collect(process, output))
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            await finished(_end(process), limit_s=_CLOSE_S)
        return CommandResult(process.returncode or 0, bytes(output), timed_out)

    async def close(self) -> None:
        """Implements `TaskShell.close`."""
        if (root := self._root) is not None:
            self._root = None
            await run_to_end(lambda: shutil.rmtree(root, ignore_errors=True))

    def _environment(self) -> dict[str, str]:
        memory = "" if self._memory_mb is None else str(self._memory_mb << 10)
        shown = " ".join(name for name in _OF_USR if Path("/", name).is_dir() and not _is_link(name))
        return {"PATH": _path(), "HOME": "/root", "LANG": "C.UTF-8", "SHOWN": shown, "MEMORY_KB": memory}


def _path() -> str:
    return "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _is_link(name: str) -> bool:
    return Path("/", name).is_symlink()


def _new_root() -> Path:
    """Make a root folder, in which `/bin` and the like are what they are on this host: links or folders."""
    root = Path(tempfile.mkdtemp(prefix="async-rl-shell-"))
    for name in _FOLDERS:
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    for name in _OF_USR:
        if _is_link(name):
            (root / name).symlink_to(os.readlink(f"/{name}"))
        elif Path("/", name).is_dir():
            (root / name).mkdir()
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    return root


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # it reads nothing, or has ended
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


async def _collect(process: asyncio.subprocess.Process, output: bytearray) -> None:
    assert process.stdout is not None
    while data := await process.stdout.read(1 << 16):
        output += data[: _MAX_OUTPUT_BYTES - len(output)]


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of a command: its namespace of processes ends with the first of them."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
