"""What a sandbox can do, whoever runs it: start, exec, files, snapshot, end.

```
 Sandboxes ─► ShellSandbox (a handle with a name) ─► SandboxBackend: local, containers, services, yours
```

Names are chosen here and recorded before a sandbox is created, so a backend finds by the name also what it
has created for a caller that never learnt of it.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from async_rl.errors import SandboxLost, ToolError

MAX_COMMAND_BYTES: Final = 100_000
"""Linux allows 128 KiB per argument of a program."""
MAX_FILE_BYTES: Final = 16 << 20
"""The largest file that is read or written at once; it is in memory meanwhile."""
GRACE_S: Final = 15.0
"""How long a backend may take to answer beyond the time limit of a command; then the sandbox is lost."""
_KILLED: Final = 137
"""The exit code of a shell for a command that SIGKILL has ended."""


class SandboxRefused(SandboxLost):
    """A backend refuses to start a sandbox, for example for lack of its image: repeating would not help."""


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a command: any exit code, and a time limit too, is a result and no failure."""

    exit_code: int
    stdout: str
    """What it wrote, up to `max_output_bytes`; so does `stderr`."""
    stderr: str
    timed_out: bool = False
    truncated: bool = False
    """Whether it wrote more."""


class SandboxBackend(AbstractAsyncContextManager[Any, None], Protocol):
    """Runs sandboxes inside its block, which holds connections but ends no sandbox.

    Every method may raise `SandboxLost`: the backend does not answer, or the sandbox is gone. To enter the
    block raises `EnvironmentNotReady` if the backend cannot be reached.
    """

    async def start(self, name: str, image: str, ttl_s: float) -> None:
        """Create a sandbox that can run commands, and that ends by itself after `ttl_s` where it can.

        Args:
            name: Its name, unique and new.
            image: An image of the backend or the id of a snapshot; empty is the default of the settings.
            ttl_s: Its time to live, seconds.

        Raises:
            SandboxRefused: A repetition would not help.
        """
        ...

    async def exec(
        self, name: str, command: str, *, timeout_s: float, stdin: bytes, max_output_bytes: int
    ) -> ExecResult:
        """Run a command by the sandbox's shell, and kill it after `timeout_s`."""
        ...

    async def read_file(self, name: str, path: str) -> bytes:
        """Return a file of at most `MAX_FILE_BYTES`.

        Raises:
            OSError: There is no such file, or it is too large.
        """
        ...

    async def write_file(self, name: str, path: str, data: bytes) -> None:
        """Write a file, and make its folder.

        Raises:
            OSError: It cannot be written.
        """
        ...

    async def end_processes(self, name: str) -> None:
        """End all processes that commands have started, however they hide.

        Raises:
            NotImplementedError: The backend cannot.
        """
        ...

    async def snapshot(self, name: str, snapshot: str) -> str:
        """Keep the files of a sandbox, and return the image that starts others with them.

        Args:
            name: The sandbox.
            snapshot: A new name for the snapshot, of letters and digits.

        Raises:
            NotImplementedError: The backend cannot.
        """
        ...

    async def end(self, name: str) -> None:
        """End a sandbox whether it runs, is half created, or never was."""
        ...

    async def end_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot, by the name that `snapshot` received, if there is one."""
        ...


@runtime_checkable
class BuildingBackend(SandboxBackend, Protocol):
    """A backend that makes images."""

    async def build_image(self, image: str, context: bytes) -> None:
        """Build an image, unless there is one of that name. It stays when the run has ended.

        Args:
            image: Its name, which says what is in it.
            context: A tar archive with a Dockerfile and the files that it copies.

        Raises:
            SandboxRefused: The Dockerfile fails.
        """
        ...


@runtime_checkable
class AgentBackend(SandboxBackend, Protocol):
    """A backend whose sandboxes run whole agents, several commands at a time."""

    async def listen(self, name: str) -> socket.socket | None:
        """Return a socket of this process that listens inside the sandbox, where nothing else is reachable.

        None says that programs have a network, and reach what this host serves by its address.

        Raises:
            SandboxRefused: This process cannot open one there.
        """
        ...


class ShellSandbox:
    """One sandbox of an agent loop, inside the block of `Sandboxes.open`."""

    def __init__(
        self,
        backend: SandboxBackend,
        name: str,
        *,
        max_output_bytes: int,
        take_snapshot: Callable[[str], Awaitable[str]],
    ) -> None:
        """Describe a sandbox that runs.

        Args:
            backend: Runs it.
            name: Its name.
            max_output_bytes: How much is kept of each output of a command.
            take_snapshot: Records a snapshot of a sandbox by name, and takes it.
        """
        self.name = name
        self._backend = backend
        self._max_output_bytes = max_output_bytes
        self._take_snapshot = take_snapshot

    async def exec(self, command: str, *, timeout_s: float = 30.0, stdin: str | bytes = b"") -> ExecResult:
        """Run a command by `sh -c`.

        Args:
            command: The command.
            timeout_s: Its time limit, rounded up to whole seconds where the sandbox is not local.
            stdin: Its standard input.

        Raises:
            ToolError: The command is too long, or has a NUL.
            SandboxLost: The sandbox is gone, or does not answer.
        """
        if len(command.encode(errors="replace")) > MAX_COMMAND_BYTES or "\0" in command:
            raise ToolError(
                f"the command has {len(command)} characters; it may have {MAX_COMMAND_BYTES} bytes, no NUL: "
                "write a longer one to a file"
            )
        data = stdin.encode(errors="replace") if isinstance(stdin, str) else stdin
        with _understood():
            return await self._backend.exec(
                self.name, command, timeout_s=timeout_s, stdin=data, max_output_bytes=self._max_output_bytes
            )

    async def read_file(self, path: str) -> bytes:
        """Return a file of at most 16 MiB, by its absolute path.

        Raises:
            OSError: There is no such file, or it is too large.
            SandboxLost: The sandbox is gone, or does not answer.
        """
        with _understood():
            return await self._backend.read_file(self.name, path)

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Write a file at an absolute path, and make its folder.

        Raises:
            OSError: It cannot be written, or it is too large.
            SandboxLost: The sandbox is gone, or does not answer.
        """
        data = data.encode() if isinstance(data, str) else data
        if len(data) > MAX_FILE_BYTES:
            raise OSError(f"{path} has {len(data)} bytes; at most {MAX_FILE_BYTES} can be written at once")
        with _understood():
            await self._backend.write_file(self.name, path, data)

    async def end_processes(self) -> None:
        """End all that commands have started.

        Raises:
            NotImplementedError: The backend cannot.
            SandboxLost: The sandbox is gone, or its processes do not end.
        """
        with _understood():
            await self._backend.end_processes(self.name)

    async def listen(self) -> socket.socket | None:
        """Return a socket that listens inside of it, as `AgentBackend.listen` does."""
        assert isinstance(self._backend, AgentBackend)
        with _understood():
            return await self._backend.listen(self.name)

    async def snapshot(self) -> str:
        """Keep its files until the run ends; return the image with which `Sandboxes.open` starts others.

        Raises:
            NotImplementedError: The backend cannot.
            SandboxLost: The sandbox is gone, or does not answer.
        """
        return await self._take_snapshot(self.name)


@contextmanager
def _understood() -> Iterator[None]:
    """Turn an answer of a backend that is unlike what its API describes into `SandboxLost`."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise SandboxLost(f"an answer was not understood: {type(error).__name__}: {error}") from error


class Output:
    """The beginnings of both outputs of a command; the rest is counted only."""

    def __init__(self, limit: int) -> None:
        """Keep at most `limit` bytes of each."""
        self._limit = limit
        self._kept = {1: bytearray(), 2: bytearray()}
        self.truncated = False
        """Whether there was more."""

    def add(self, descriptor: int, data: bytes) -> None:
        """Add what the command has written to 1 (stdout) or 2 (stderr)."""
        kept = self._kept[descriptor]
        self.truncated |= len(kept) + len(data) > self._limit
        kept += data[: self._limit - len(kept)]

    def data(self, descriptor: int) -> bytes:
        """Return what was kept of 1 or 2."""
        return bytes(self._kept[descriptor])

    def result(self, exit_code: int, *, timed_out: bool) -> ExecResult:
        """Return the result of the command."""
        return ExecResult(
            exit_code=exit_code,
            stdout=self._kept[1].decode(errors="replace"),
            stderr=self._kept[2].decode(errors="replace"),
            timed_out=timed_out,
            truncated=self.truncated,
        )


def limited_command(command: str, timeout_s: float, stdin_path: str = "/dev/null") -> list[str]:
    """Return the program and arguments that run a command with a time limit inside a sandbox.

    The images need `sh`, `timeout` and `rm`, as those with coreutils or busybox have.
    """
    script = (
        'exec <"$3"; [ "$3" = /dev/null ] || rm -f "$3" 2>/dev/null; exec timeout -s KILL "$1" sh -c "$2"'
    )
    return ["sh", "-c", script, "sh", str(math.ceil(timeout_s)), command, stdin_path]


def ran_too_long(exit_code: int, seconds: float, timeout_s: float) -> bool:
    """Return whether `timeout` has killed a command: others that are killed have run for less time."""
    return exit_code == _KILLED and seconds >= timeout_s
