"""Programs that a policy wrote, run in a process with walls around it.

```
 ours ── Interpreter ── request ──► launcher ── fork ──► process 1 of its own pid space: runs programs
              ▲                       (agent_loops.sandbox_child)          │
              └───────────── output, a marker at its end ──────────────────┘
```

docs/guide/tools.md says what the walls keep out. The process gets an environment made from
nothing, two pipes and the source of `sandbox_child`; it ends with the block that it was made for, and with
our process. Its scratch folder is memory, and goes with it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import marshal
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from async_rl.errors import ConfigError, EnvironmentNotReady, ToolError
from async_rl.runtime.supervision import finished
from async_rl.types import Task

log = logging.getLogger(__name__)

_CHILD: Final = Path(__file__).with_name("sandbox_child.py")
_SETUP_FAILED: Final = 97
_FIRST_USER: Final = 0x40000000
"""Of the users that programs run as where we are root: far from any that has files or processes here."""
_START_S: Final = 30.0
"""For a start on a machine that is busy; one takes about 50 ms."""
_LAST_WORD_S: Final = 1.0
_MAX_CODE_BYTES: Final = 1 << 20
_users = itertools.count(_FIRST_USER + os.getpid() % 10_000 * 10_000)


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a program may use.

    Memory is of each process: all processes together may use `max_processes` times as much.
    """

    wall_s: Annotated[float, Meta(gt=0)] = 10.0
    """Seconds a run may take."""
    cpu_s: Annotated[int, Meta(ge=1)] = 10
    """Seconds of processor time, of each process, over all runs of an interpreter."""
    memory_mb: Annotated[int, Meta(ge=32)] = 512
    """Address space of each process, MiB."""
    max_output_bytes: Annotated[int, Meta(ge=1)] = 65_536
    """What is printed beyond it ends the program."""
    max_processes: Annotated[int, Meta(ge=1)] = 16
    """Processes and threads at a time."""
    scratch_mb: Annotated[int, Meta(ge=1)] = 64
    """The folder that can be written, MiB; also the largest file."""
    isolation: Literal["namespaces", "guarded"] = "namespaces"
    """`namespaces`: walls of the kernel. `guarded`: for machines that refuse those; the interpreter refuses
    sockets, processes and files elsewhere, which a program that is set on it gets around."""
    import_paths: tuple[str, ...] = ()
    """Folders with packages that programs may import; they can be read, too."""
    python: str = ""
    """The interpreter that runs them; ours, without our packages, where it is empty."""


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one program."""

    output: str
    """What it printed, errors included, as far as `max_output_bytes`."""
    ended: Literal["done", "error", "exit", "time", "output", "killed"]
    """done: to its end.  error: by an exception.  exit: by an exit code.  time: it ran past `wall_s`.
    output: it printed too much.  killed: by a limit of the kernel (processor time, memory) or a crash."""
    seconds: float
    is_over: bool
    """Whether its interpreter has ended with it."""


class Sandbox:
    r"""Runs each program in an interpreter of its own.

    Example:
        >>> sandbox = Sandbox(Limits(wall_s=2))
        >>> (await sandbox.run("print(int(input()) * 2)", stdin="21")).output
        '42\\n'

    Raises:
        EnvironmentNotReady: The machine does not allow the isolation that is asked for.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        for path in self.limits.import_paths:
            if not os.path.isdir(path):
                raise ConfigError(f"sandbox: import_paths has {path!r}, which is no folder here")
            if os.geteuid() == 0 and os.stat(path).st_mode & 0o005 != 0o005:
                raise ConfigError(
                    f"sandbox: import_paths has {path!r}, which only its owner can read, but root's programs "
                    "run as another user: chmod o+rx it"
                )
        if sys.platform != "linux":
            raise EnvironmentNotReady(f"the sandbox needs Linux; this is {sys.platform}")
        _try_out(self.limits)

    async def run(self, code: str, *, stdin: str = "", echo: bool = False) -> Ran:
        """Run a program to its end.

        Args:
            code: Python.
            stdin: What it may read.
            echo: Show the value of its last line, as a notebook does.
        """
        async with self.interpreter() as interpreter:
            return await interpreter.run(code, stdin=stdin, echo=echo)

    @asynccontextmanager
    async def interpreter(self) -> AsyncIterator[Interpreter]:
        """One whose variables and files last from run to run, until the block ends."""
        interpreter = await Interpreter.start(self.limits)
        try:
            yield interpreter
        finally:
            await finished(interpreter.close(), limit_s=_START_S)


class Interpreter:
    """A process that runs one program after the other. Once one `is_over` it is gone."""

    def __init__(self, process: asyncio.subprocess.Process, limits: Limits, scratch: str | None) -> None:
        self._process = process
        # Not by its number: asyncio's `kill` may take the exit status away from asyncio's own watcher.
        self._handle: int | None = os.pidfd_open(process.pid)
        self._limits = limits
        self._scratch = scratch

    @classmethod
    async def start(cls, limits: Limits) -> Interpreter:
        """Start the process; `close` it whatever happens."""
        command, scratch = _command(limits)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(limits),
                cwd="/",
            )
        except BaseException:
            _remove(scratch)
            raise
        return cls(process, limits, scratch)

    async def run(self, code: str, *, stdin: str = "", echo: bool = False) -> Ran:
        """Run a program in the variables that earlier ones left.

        Raises:
            EnvironmentNotReady: The walls could not be built.
            ToolError: The program is too long.
        """
        program, given = code.encode(errors="replace"), stdin.encode(errors="replace")
        if len(program) > _MAX_CODE_BYTES:
            raise ToolError(f"the program has {len(program)} bytes; at most {_MAX_CODE_BYTES} are allowed")
        token = secrets.token_hex(16)
        header = f"{token} {echo:d} {len(program)} {len(given)}\n".encode()
        loop = asyncio.get_running_loop()
        begin = loop.time()
        output = _Output(token, self._limits.max_output_bytes)
        try:
            async with asyncio.timeout(self._limits.wall_s):
                await asyncio.gather(self._send(header + program + given), self._receive(output))
        except TimeoutError:
            output.ended = "time"
        if is_over := output.ended in ("time", "output", "killed"):
            if output.ended == "killed":
                with suppress(TimeoutError):  # its launcher has yet to say how it ended
                    async with asyncio.timeout(_LAST_WORD_S):
                        await self._process.wait()
            await self.close()
            exit_code = self._process.returncode
            if output.ended == "killed" and exit_code == _SETUP_FAILED:
                raise _refused(output.text)
            if output.ended == "killed" and exit_code is not None and 0 <= exit_code < 128:
                output.ended = "exit"  # without saying so, as by os._exit
        return Ran(output=output.text, ended=output.ended, seconds=loop.time() - begin, is_over=is_over)

    async def close(self) -> None:
        """Kill what is left of it, with all processes it has started."""
        try:
            if self._handle is not None:
                with suppress(ProcessLookupError):  # it went by itself
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)
                os.close(self._handle)
                self._handle = None
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            while await self._process.stdout.read(65_536):
                pass  # a pipe that nobody empties is not seen to end
            await self._process.wait()
        finally:
            _remove(self._scratch)

    async def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has ended: what it said of it comes with the output

    async def _receive(self, output: _Output) -> None:
        assert self._process.stdout is not None
        while output.ended is None:
            output.take(await self._process.stdout.read(65_536))


class _Output:
    """What one program prints, up to the marker at its end."""

    def __init__(self, token: str, limit: int) -> None:
        self._marker = f"\n\x1e{token} ".encode()
        self._limit = limit
        self._data = bytearray()
        self.ended: Any = None

    def take(self, data: bytes) -> None:
        """A piece; an empty one is the end of the process."""
        if not data:
            self.ended = "killed"
            return
        searched = max(0, len(self._data) - len(self._marker) - 8)
        self._data += data
        at = self._data.find(self._marker, searched)
        if at >= 0 and self._data.endswith(b"\n", at + len(self._marker)):
            self.ended = self._data[at + len(self._marker) : -1].decode()
            del self._data[at:]
        if len(self._data) > self._limit + (0 if self.ended else len(self._marker) + 8):
            self.ended = "output"

    @property
    def text(self) -> str:
        """As far as the limit."""
        return self._data[: self._limit].decode(errors="replace")


class Python:
    """A tool that runs each program by itself: `agent_loops.sandbox:Python`, with `Limits` as its `args`."""

    name = "python"

    def __init__(self, **limits: Any) -> None:
        self._sandbox = Sandbox(_as_limits(limits))

    async def execute(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The program. The value of its last line is shown, too. Nothing is kept between programs.
        """
        return _say(await self._sandbox.run(code, echo=True), self._sandbox.limits)


class PythonSession:
    """A tool with one interpreter for each trajectory: `agent_loops.sandbox:PythonSession`."""

    name = "python"

    def __init__(self, **limits: Any) -> None:
        self._sandbox = Sandbox(_as_limits(limits))

    def create(self, task: Task) -> list[Interpreter]:
        """The interpreter, once there is one."""
        return []

    async def execute(self, state: list[Interpreter], code: str) -> str:
        """Run Python code and return what it prints.

        Args:
            state: The trajectory's interpreter.
            code: The code. The value of its last line is shown, too. Variables are kept for the next call.
        """
        if not state:
            state.append(await Interpreter.start(self._sandbox.limits))
        try:
            ran = await state[0].run(code, echo=True)
        except asyncio.CancelledError:  # what comes of it would be taken for the next one's output
            await finished(state.pop().close(), limit_s=_START_S)
            raise
        if ran.is_over:
            state.clear()
        return _say(ran, self._sandbox.limits, lost=" Its variables are gone." if ran.is_over else "")

    async def release(self, state: list[Interpreter]) -> None:
        """End the interpreter."""
        while state:
            await state.pop().close()


def _say(ran: Ran, limits: Limits, lost: str = "") -> str:
    """What the policy reads.

    Raises:
        ToolError: The program was ended by a limit.
    """
    why = {
        "time": f"the program ran past {limits.wall_s:g} s and was ended.",
        "output": f"the program printed more than {limits.max_output_bytes} bytes and was ended.",
        "killed": f"the program crashed or used more than {limits.cpu_s} s of processor time or its memory.",
    }.get(ran.ended)
    if why is not None:
        raise ToolError(f"{why}{lost}" + (f" It had printed:\n{ran.output}" if ran.output else ""))
    return ran.output or "(no output)"


def _as_limits(given: dict[str, Any]) -> Limits:
    try:
        return msgspec.convert(given, Limits)
    except msgspec.ValidationError as error:
        raise ConfigError(f"sandbox: {error}; there are {', '.join(Limits.__struct_fields__)}") from error


def _command(limits: Limits) -> tuple[list[str], str | None]:
    """How the process is started, and its scratch folder on the host where it has one."""
    walls = limits.isolation == "namespaces"
    user = next(_users) if os.geteuid() == 0 else None
    scratch = None if walls else tempfile.mkdtemp(prefix="async-rl-sandbox-")
    if scratch is not None and user is not None:
        os.chown(scratch, user, user)
    maxima = {
        "AS": limits.memory_mb << 20,
        "CORE": 0,
        "CPU": limits.cpu_s,
        "FSIZE": limits.scratch_mb << 20,
        "NOFILE": 128,
    }
    if walls or user is not None:  # else it would count what else this user runs
        maxima["NPROC"] = limits.max_processes
    python = os.path.realpath(limits.python or sys.executable)
    settings = {
        "namespaces": walls,
        "user": user,
        "scratch": scratch,
        "scratch_bytes": limits.scratch_mb << 20,
        "read_only": [str(Path(python).parents[1]), *limits.import_paths],
        "import_paths": list(limits.import_paths),
        "limits": maxima,
    }
    source = _CHILD.read_text(encoding="utf-8")
    return [python, "-I", "-S", "-B", "-u", "-c", source, marshal.dumps(settings).hex()], scratch


def _environment(limits: Limits) -> dict[str, str]:
    """Nothing of ours."""
    home = {"HOME": "/scratch", "TMPDIR": "/scratch"} if limits.isolation == "namespaces" else {}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # else a thread a core, of few
    return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **threads, **home}


def _try_out(limits: Limits) -> None:
    """Run an empty program, so that a machine without the isolation is known before the first trajectory."""
    command, scratch = _command(limits)
    try:
        ran = subprocess.run(
            command,
            input=b"token 0 0 0\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(limits),
            cwd="/",
            timeout=_START_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentNotReady(f"sandbox: an empty program did not end within {_START_S:g} s") from error
    finally:
        _remove(scratch)
    if ran.stdout != b"\n\x1etoken done\n":
        raise _refused(ran.stdout.decode(errors="replace"))


def _refused(why: str) -> EnvironmentNotReady:
    return EnvironmentNotReady(
        f"sandbox: this machine does not let us build its walls ({why.strip()[-500:]}); expected "
        "Linux 5.12 or later with user namespaces (in a container: a seccomp profile that allows unshare and "
        "mount). Allow them, or choose isolation: guarded, which is no wall against a program that means harm"
    )


def _remove(scratch: str | None) -> None:
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
