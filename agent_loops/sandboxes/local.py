"""Sandboxes on this machine: processes in namespaces of their own, as `agent_loops.sandbox` makes them.

Unlike a Python program there, a command may start processes. Each has its own memory, so a sandbox uses up to
`max_processes` times `memory_mb`. A command may make folders anywhere but in those of this machine that it
sees.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from typing import Annotated, Any, Final, Self

import msgspec
from msgspec import Meta

from agent_loops.sandbox import START_S, Interpreter, Limits, check_isolation
from agent_loops.sandboxes.protocol import GRACE_S, MAX_FILE_BYTES, ExecResult, SandboxRefused
from async_rl.errors import EnvironmentNotReady, SandboxLost
from async_rl.runtime.supervision import finished

_MAX_ANSWER_BYTES: Final = 2 * MAX_FILE_BYTES
"""What an answer of `_INSIDE` may have: a file in base64."""

_CHUNK_BYTES: Final = 512 << 10
"""How much of a file fits into a program that writes it."""

_INSIDE: Final = """
import base64, json, os, select, signal, subprocess, time

os.remove("program.py")
os.chdir("/usr")  # where the interpreter cannot write its programs

def run_command(command, timeout_s, limit, stdin):
    began = time.monotonic()
    source = open(stdin, "rb")
    if stdin != "/dev/null":
        os.remove(stdin)
    try:
        with source:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command], stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                cwd="/scratch", start_new_session=True,
            )
    except OSError as error:  # too many processes that earlier commands have left
        print(json.dumps([126, "", base64.b64encode(str(error).encode()).decode(), False, False]))
        return
    kept, truncated, timed_out = {}, False, False
    handle, poll = os.pidfd_open(process.pid), select.poll()
    for stream in (process.stdout, process.stderr):
        os.set_blocking(stream.fileno(), False)
        kept[stream.fileno()] = bytearray()
        poll.register(stream.fileno(), select.POLLIN)
    poll.register(handle, select.POLLIN)

    def read(descriptor):
        nonlocal truncated
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        room = limit - len(kept[descriptor])
        truncated |= len(data) > room
        kept[descriptor] += data[:room]
        return bool(data)

    while True:
        left_s = began + timeout_s - time.monotonic()
        ready = [descriptor for descriptor, _ in poll.poll(max(0, 1000 * left_s))]
        for descriptor in ready:
            if descriptor != handle and not read(descriptor):
                poll.unregister(descriptor)
        if handle in ready:
            break
        if left_s <= 0:
            timed_out = True
            break
    try:
        os.killpg(process.pid, signal.SIGKILL) if timed_out else None
    except ProcessLookupError:
        pass
    code = process.wait()
    for descriptor in kept:
        read(descriptor)  # not to its end: what the command has left running may write on
    process.stdout.close()
    process.stderr.close()
    os.close(handle)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:  # orphans, whose parent this process is
            pass
    except ChildProcessError:
        pass
    out, err = (base64.b64encode(bytes(part)).decode() for part in kept.values())
    print(json.dumps([code if code >= 0 else 128 - code, out, err, timed_out, truncated]))

def read_file(path, limit):
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise OSError(27, "File too large", path)
        print(json.dumps([base64.b64encode(data).decode(), 0, ""]))
    except OSError as error:
        print(json.dumps(["", error.errno, error.strerror]))

def write_file(path, mode, data):
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, mode) as file:
            file.write(base64.b64decode(data))
        print(json.dumps([0, ""]))
    except OSError as error:
        print(json.dumps([error.errno, error.strerror]))

def end_processes():
    try:
        os.kill(-1, signal.SIGKILL)
        while os.waitpid(-1, 0)[0]:
            pass
    except (ChildProcessError, ProcessLookupError):
        print(0)
"""
"""Runs in the first process of a sandbox, which no process there can signal or trace."""


class LocalSettings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="local", tag_field="kind"
):
    """Limits of sandboxes on this machine."""

    memory_mb: Annotated[int, Meta(ge=64)] = 256
    """Address space of each process, MiB."""
    max_processes: Annotated[int, Meta(ge=4)] = 32
    """The most concurrent processes and threads."""
    cpu_s: Annotated[int, Meta(ge=1)] = 600
    """Seconds of processor time of each process."""
    scratch_mb: Annotated[int, Meta(ge=1)] = 64
    """The size of all files together, in memory."""

    def open_backend(self, run: str) -> LocalSandboxBackend:
        """Return what runs the sandboxes; `run` is not used.

        Raises:
            EnvironmentNotReady: The machine does not allow the isolation.
        """
        return LocalSandboxBackend(self)


class LocalSandboxBackend:
    """Runs each sandbox as an interpreter whose programs start the commands."""

    def __init__(self, settings: LocalSettings) -> None:
        """Check the isolation, so that `async-rl check` reports what is missing."""
        self._limits = Limits(
            memory_mb=settings.memory_mb,
            max_processes=settings.max_processes,
            cpu_s=settings.cpu_s,
            scratch_mb=settings.scratch_mb,
            max_output_bytes=_MAX_ANSWER_BYTES,
        )
        self._interpreters: dict[str, Interpreter] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        check_isolation(self._limits, processes=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None

    async def start(self, name: str, image: str, ttl_s: float) -> None:
        """Implements `SandboxBackend.start`. It ends with this process at the latest, by the reaper."""
        if image:
            raise SandboxRefused(f"local sandboxes have no images; found {image!r}")
        try:
            interpreter = await Interpreter.start(self._limits, processes=True)
        except (OSError, EnvironmentNotReady) as error:
            raise SandboxLost(f"a local sandbox did not start: {error}") from error
        self._interpreters[name], self._locks[name] = interpreter, asyncio.Lock()
        await self._run(name, _INSIDE + "print(0)", START_S)

    async def exec(
        self, name: str, command: str, *, timeout_s: float, stdin: bytes, max_output_bytes: int
    ) -> ExecResult:
        """Implements `SandboxBackend.exec`."""
        source = "/dev/null"
        if stdin:
            source = f"/scratch/.{secrets.token_hex(8)}.in"
            await self.write_file(name, source, stdin)
        call = f"run_command({command!r}, {timeout_s!r}, {max_output_bytes}, {source!r})"
        code, out, err, timed_out, truncated = await self._run(name, call, timeout_s + GRACE_S)
        stdout, stderr = (base64.b64decode(part).decode(errors="replace") for part in (out, err))
        return ExecResult(
            exit_code=code, stdout=stdout, stderr=stderr, timed_out=timed_out, truncated=truncated
        )

    async def read_file(self, name: str, path: str) -> bytes:
        """Implements `SandboxBackend.read_file`."""
        data, number, problem = await self._run(name, f"read_file({path!r}, {MAX_FILE_BYTES})", START_S)
        if number:
            raise OSError(number, problem, path)
        return base64.b64decode(data)

    async def write_file(self, name: str, path: str, data: bytes) -> None:
        """Implements `SandboxBackend.write_file`."""
        for begin in range(0, max(1, len(data)), _CHUNK_BYTES):
            part = base64.b64encode(data[begin : begin + _CHUNK_BYTES]).decode()
            call = f"write_file({path!r}, {'ab' if begin else 'wb'!r}, {part!r})"
            number, problem = await self._run(name, call, START_S)
            if number:
                raise OSError(number, problem, path)

    async def end_processes(self, name: str) -> None:
        """Implements `SandboxBackend.end_processes`."""
        await self._run(name, "end_processes()", START_S)

    async def snapshot(self, name: str, snapshot: str) -> str:
        """Implements `SandboxBackend.snapshot`."""
        raise NotImplementedError("local sandboxes have no snapshots: their files are in memory")

    async def end(self, name: str) -> None:
        """Implements `SandboxBackend.end`; those of other processes end with them, by their reaper."""
        self._locks.pop(name, None)
        if (interpreter := self._interpreters.pop(name, None)) is not None:
            await finished(interpreter.close(), limit_s=START_S)

    async def end_snapshot(self, snapshot: str) -> None:
        """Implements `SandboxBackend.end_snapshot`."""

    async def _run(self, name: str, code: str, limit_s: float) -> Any:
        """Return what a program prints as JSON; programs of a sandbox run one after the other.

        A program that is cancelled takes the sandbox with it: its output would be mistaken for the next's.
        """
        lock = self._locks.get(name)
        if lock is None:
            raise SandboxLost(f"sandbox {name} has ended")
        async with lock:
            if (interpreter := self._interpreters.get(name)) is None:
                raise SandboxLost(f"sandbox {name} has ended")
            try:
                result = await interpreter.run_program(code, wall_s=limit_s)
                if result.ended == "done":
                    return msgspec.json.decode(result.output)
            except msgspec.DecodeError:
                pass
            except BaseException:
                await self.end(name)
                raise
        await self.end(name)
        raise SandboxLost(f"sandbox {name} ended ({result.ended}): {result.output[-500:]}")
