"""Runs programs of the policy in an isolated process.

```
 ours ── Interpreter ── request ──► launcher ── fork ──► process 1 of its own pid space: runs programs
              ▲                       (agent_loops.sandbox_child)          │
              └───────────── output, a marker at its end ──────────────────┘
```

docs/guide/tools.md describes what the isolation prevents. The process receives a minimal environment, two
pipes and the source of `sandbox_child`. It ends with its block and with our process. Its scratch folder is in
memory and ends with it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import marshal
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from async_rl.errors import ConfigError, EnvironmentNotReady, SandboxLost, ToolError
from async_rl.runtime.supervision import finished
from async_rl.runtime.user_processes import marked
from async_rl.types import Task

log = logging.getLogger(__name__)

_CHILD: Final = Path(__file__).with_name("sandbox_child.py")
_READY: Final = b"\n\x1eready\n"
"""What the process writes once it can run programs."""
_FIRST_USER: Final = 0x40000000
"""The first user id for programs if we are root: far from any user with files or processes here."""
START_S: Final = 30.0
"""The time limit of a start on a busy machine; a start takes about 50 ms."""
_EXIT_CODE_S: Final = 1.0
MAX_CODE_BYTES: Final = 1 << 20
MAX_LINE_BYTES: Final = 4 << 20
"""The longest question or answer between interpreters."""
_ENDS: Final = {b"done": "done", b"error": "error", b"exit": "exit", b"ask": "ask"}
Answer = Callable[[bytes], Awaitable[bytes]]
"""Answers a question, one line, that a program asks while it runs."""
_users = itertools.count(_FIRST_USER + os.getpid() % 10_000 * 10_000)


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of a program, which is one process.

    Its memory is at most `memory_mb`, `scratch_mb` and 64 MiB in the kernel.
    """

    wall_s: Annotated[float, Meta(gt=0)] = 10.0
    """The longest run, in seconds."""
    cpu_s: Annotated[int, Meta(ge=1)] = 10
    """Seconds of processor time, over all runs of an interpreter."""
    memory_mb: Annotated[int, Meta(ge=32)] = 512
    """Address space, MiB."""
    max_output_bytes: Annotated[int, Meta(ge=1)] = 65_536
    """A program that prints more is ended."""
    max_processes: Annotated[int, Meta(ge=1)] = 16
    """The most concurrent threads. A program cannot start processes: each would have its own memory."""
    scratch_mb: Annotated[int, Meta(ge=1)] = 64
    """The size of the writable folder in MiB, and of the largest file."""
    isolation: Literal["namespaces", "guarded"] = "namespaces"
    """`namespaces`: isolation by the kernel. `guarded`: for machines that refuse namespaces; the interpreter
    refuses sockets, processes and files elsewhere, but a malicious program can circumvent that."""
    import_paths: tuple[str, ...] = ()
    """Folders with packages that programs may import and read."""
    python: str = ""
    """The Python interpreter for programs; empty takes ours, without our packages."""


class ProgramResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one program."""

    output: str
    """What the program printed, with errors, up to `max_output_bytes`."""
    ended: Literal["done", "error", "exit", "time", "output", "killed"]
    """done: reached its end.  error: raised an exception.  exit: ended with an exit code.  time: exceeded
    `wall_s`.  output: printed too much.  killed: by a kernel limit (processor time, memory) or a crash."""
    seconds: float
    interpreter_ended: bool
    """Whether the interpreter has ended with the program."""


class Sandbox:
    r"""Runs each program in a new interpreter.

    Raises:
        EnvironmentNotReady: The machine does not allow the configured isolation.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        for path in self.limits.import_paths:
            if not os.path.isdir(path):
                raise ConfigError(f"sandbox: import_paths has {path!r}, which is not a folder here")
            _refuse_home(path, "import_paths")
            if os.geteuid() == 0 and os.stat(path).st_mode & 0o005 != 0o005:
                raise ConfigError(
                    f"sandbox: import_paths has {path!r}, which only its owner can read, but root's programs "
                    "run as another user: chmod o+rx it"
                )
        if sys.platform != "linux":
            raise EnvironmentNotReady(f"the sandbox needs Linux; this is {sys.platform}")
        check_isolation(self.limits)

    async def run_program(self, code: str, *, stdin: str = "", echo: bool = False) -> ProgramResult:
        """Run a program in a new interpreter.

        Args:
            code: Python code.
            stdin: Its standard input.
            echo: Print the value of its last line, as a notebook does.
        """
        async with self.interpreter() as interpreter:
            return await interpreter.run_program(code, stdin=stdin, echo=echo, is_last=True)

    @asynccontextmanager
    async def interpreter(self) -> AsyncIterator[Interpreter]:
        """Start an interpreter that keeps variables and files between programs, until the block ends."""
        interpreter = await Interpreter.start(self.limits)
        try:
            yield interpreter
        finally:
            await finished(interpreter.close(), limit_s=START_S)


class Interpreter:
    """A process that runs one program after another, until a result has `interpreter_ended`."""

    def __init__(self, process: asyncio.subprocess.Process, limits: Limits, scratch: str | None) -> None:
        self.process = process
        # Not by its process id: asyncio's `kill` may take the exit status away from asyncio's own watcher.
        self._handle: int | None = None
        with suppress(ProcessLookupError):  # it has ended already
            self._handle = os.pidfd_open(process.pid)
        self._limits = limits
        self._scratch = scratch

    @classmethod
    async def start(cls, limits: Limits, *, processes: bool = False) -> Interpreter:
        """Start the process, and wait until it can run programs; the caller must `close` it.

        A process that does not start is not mistaken for a program that fails.

        Args:
            limits: The limits of its programs.
            processes: Whether they may start processes, each with its own memory; only with namespaces.

        Raises:
            SandboxLost: The process does not start.
        """
        command, scratch = sandbox_command(limits, processes=processes)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=marked(_environment(limits), "sandbox"),
                cwd="/",
            )
        except OSError as error:
            _remove(scratch)
            raise SandboxLost(f"sandbox: an interpreter cannot be started: {error}") from error
        except BaseException:
            _remove(scratch)
            raise
        interpreter = cls(process, limits, scratch)
        try:
            await interpreter._wait_ready()
        except BaseException:
            await finished(interpreter.close(), limit_s=START_S)
            raise
        return interpreter

    async def _wait_ready(self) -> None:
        assert self.process.stdout is not None
        seen = b""
        try:
            async with asyncio.timeout(START_S):
                while seen != _READY:
                    data = await self.process.stdout.read(4096)
                    if not data:
                        code = await self.process.wait()
                        raise SandboxLost(str(_refused(seen.decode(errors="replace") or f"exit code {code}")))
                    seen += data
        except TimeoutError as error:
            raise SandboxLost(
                f"sandbox: an interpreter did not start within {START_S:g} s: the machine is overloaded"
            ) from error

    async def run_program(
        self,
        code: str,
        *,
        stdin: str = "",
        echo: bool = False,
        is_last: bool = False,
        answer: Answer | None = None,
        wall_s: float | None = None,
    ) -> ProgramResult:
        """Run a program with the variables of earlier programs.

        Args:
            code: Python code.
            stdin: Its standard input.
            echo: Print the value of its last line, as a notebook does.
            is_last: Wait for its threads and run its exit handlers, as the end of an interpreter does.
            answer: Answers the questions of a program that may ask (`agent_loops.code_test_child`).
            wall_s: Its time limit, in place of that of the limits.

        Raises:
            ToolError: The program is too long.
        """
        program = code.encode(errors="replace")
        if len(program) > MAX_CODE_BYTES:
            raise ToolError(f"the program has {len(program)} bytes; at most {MAX_CODE_BYTES} are allowed")
        mode = ("echo" if echo else "run") + ("-last" if is_last else "")
        result, _ = await self._request(mode, program, stdin, answer, wall_s or self._limits.wall_s)
        return result

    async def answer_question(self, question: bytes) -> tuple[ProgramResult, bytes]:
        """Return what the program in this interpreter answers, and with which result.

        The answer is a line that the program may have forged: any bytes, or none.
        """
        return await self._request("question", question, "", None, self._limits.wall_s)

    async def _request(
        self, mode: str, program: bytes, stdin: str, answer: Answer | None, wall_s: float
    ) -> tuple[ProgramResult, bytes]:
        input_data = stdin.encode(errors="replace")
        token = secrets.token_hex(16)
        header = f"{token} {mode} {len(program)} {len(input_data)}\n".encode()
        loop = asyncio.get_running_loop()
        begin = loop.time()
        output = _Output(token, self._limits.max_output_bytes)
        try:
            async with asyncio.timeout(wall_s):
                await asyncio.gather(self._send(header + program + input_data), self._receive(output, answer))
        except TimeoutError:
            output.ended = "time"
        if interpreter_ended := output.ended in ("time", "output", "killed"):
            if output.ended == "killed":
                with suppress(TimeoutError):  # wait for the launcher's exit code
                    async with asyncio.timeout(_EXIT_CODE_S):
                        await self.process.wait()
            await self.close()
            exit_code = self.process.returncode
            if output.ended == "killed" and exit_code is not None and 0 <= exit_code < 128:
                output.ended = "exit"  # without a marker, as by os._exit
        result = ProgramResult(
            output=output.text,
            ended=output.ended,
            seconds=loop.time() - begin,
            interpreter_ended=interpreter_ended,
        )
        return result, output.line

    async def close(self) -> None:
        """Kill the process and all processes that it has started."""
        try:
            if self._handle is not None:
                with suppress(ProcessLookupError):  # it has ended already
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)
                os.close(self._handle)
                self._handle = None
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.close()
            while await self.process.stdout.read(65_536):
                pass  # the end of a pipe is only visible once it is empty
            await self.process.wait()
        finally:
            _remove(self._scratch)

    async def _send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(data)
            await self.process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has ended; the output shows why

    async def _receive(self, output: _Output, answer: Answer | None) -> None:
        assert self.process.stdout is not None
        while output.ended is None:
            output.add_data(await self.process.stdout.read(65_536))
            if output.ended == "ask":
                if answer is None:
                    output.ended = "killed"
                    break
                output.ended = None
                reply = await answer(output.line)
                await self._send(b"%d\n" % len(reply) + reply)


class _Output:
    """The output of one program, up to the line that ends it or asks a question.

    The program can write anything, such a line too.
    """

    def __init__(self, token: str, limit: int) -> None:
        self._marker = f"\n\x1e{token} ".encode()
        self._limit = limit
        self._data = bytearray()
        self._line_at = -1
        self.ended: Any = None
        """A value of `ProgramResult.ended`, or `ask`."""
        self.line = b""
        """The rest of the last line: a question or an answer."""

    def add_data(self, data: bytes) -> None:
        """Add data; empty data means that the process has ended."""
        if not data:
            self.ended = "killed"
            return
        searched = max(0, len(self._data) - len(self._marker))
        self._data += data
        if self._line_at < 0:
            self._line_at = self._data.find(self._marker, searched)
        at = self._line_at
        if (len(self._data) - len(self._marker) if at < 0 else at) > self._limit:
            self.ended = "output"
        elif at >= 0:
            begin = at + len(self._marker)
            end = self._data.find(b"\n", max(begin, searched))
            if end >= 0:
                word, _, self.line = bytes(self._data[begin:end]).partition(b" ")
                self.ended = _ENDS.get(word, "killed")
                del self._data[at:]
                self._line_at = -1
            elif len(self._data) - begin > MAX_LINE_BYTES:
                self.ended = "output"

    @property
    def text(self) -> str:
        """The output up to the limit."""
        return self._data[: self._limit].decode(errors="replace")


class Python:
    """A tool with a new interpreter for each program: `agent_loops.sandbox:Python`, with `Limits` as args."""

    name = "python"

    def __init__(self, **limits: Any) -> None:
        self._sandbox = Sandbox(_as_limits(limits))

    async def execute(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The program. The value of its last line is shown, too. Nothing is kept between programs.
        """
        return _tool_result(await self._sandbox.run_program(code, echo=True), self._sandbox.limits)


class PythonSession:
    """A tool with one interpreter for each trajectory: `agent_loops.sandbox:PythonSession`."""

    name = "python"

    def __init__(self, **limits: Any) -> None:
        self._sandbox = Sandbox(_as_limits(limits))

    def create(self, task: Task) -> list[Interpreter]:
        """Return a list that holds the interpreter once there is one."""
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
            result = await state[0].run_program(code, echo=True)
        except asyncio.CancelledError:  # its output would be mistaken for that of the next program
            await finished(state.pop().close(), limit_s=START_S)
            raise
        if result.interpreter_ended:
            state.clear()
        lost = " Its variables are gone." if result.interpreter_ended else ""
        return _tool_result(result, self._sandbox.limits, lost=lost)

    async def release(self, state: list[Interpreter]) -> None:
        """End the interpreter."""
        while state:
            await state.pop().close()


def _tool_result(result: ProgramResult, limits: Limits, lost: str = "") -> str:
    """Return the result of a program as text for the policy.

    Raises:
        ToolError: A limit ended the program.
    """
    why = {
        "time": f"the program ran past {limits.wall_s:g} s and was ended.",
        "output": f"the program printed more than {limits.max_output_bytes} bytes and was ended.",
        "killed": f"the program crashed or used more than {limits.cpu_s} s of processor time or its memory.",
    }.get(result.ended)
    if why is not None:
        raise ToolError(f"{why}{lost}" + (f" It had printed:\n{result.output}" if result.output else ""))
    return result.output or "(no output)"


def _as_limits(given: dict[str, Any]) -> Limits:
    try:
        return msgspec.convert(given, Limits)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"sandbox: {error}; the fields are {', '.join(Limits.__struct_fields__)}"
        ) from error


def sandbox_command(limits: Limits, *, processes: bool = False) -> tuple[list[str], str | None]:
    """Return the command of the process, and its scratch folder on the host, if any."""
    isolated = limits.isolation == "namespaces"
    assert isolated or not processes, "without namespaces nothing would end the processes"
    user = next(_users) if os.geteuid() == 0 else None
    scratch = None if isolated else tempfile.mkdtemp(prefix="async-rl-sandbox-")
    if scratch is not None and user is not None:
        os.chown(scratch, user, user)
    maxima = {
        "AS": limits.memory_mb << 20,
        "CORE": 0,
        "CPU": limits.cpu_s,
        "FSIZE": limits.scratch_mb << 20,
        "NOFILE": 128,
        "SIGPENDING": 256,
    }
    if isolated or user is not None:  # else it would count all processes of this user
        maxima["NPROC"] = limits.max_processes
    python = os.path.realpath(limits.python or sys.executable)
    settings = {
        "namespaces": isolated,
        "processes": processes,
        "user": user,
        "scratch": scratch,
        "scratch_bytes": limits.scratch_mb << 20,
        "read_only": [*_files_of(python), *limits.import_paths],
        "import_paths": list(limits.import_paths),
        "limits": maxima,
    }
    source = _CHILD.read_text(encoding="utf-8")
    return [python, "-I", "-S", "-B", "-u", "-c", source, marshal.dumps(settings).hex()], scratch


@functools.cache
def _files_of(python: str) -> tuple[str, ...]:
    """Return the files that an interpreter needs to run, except those in `/usr`, which is shown anyway."""
    code = "import sys; print(*(sys.base_prefix, sys.platlibdir, *sys.path), sep='\\n')"
    try:
        ran = subprocess.run(
            [python, "-I", "-S", "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(Limits()),
            cwd="/",
            timeout=START_S,
            check=True,
        )
        prefix, libraries, *modules = os.fsdecode(ran.stdout).splitlines()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise _refused(f"{python} is no Python interpreter: {error}") from error
    shared = (str(path) for name in {"lib", libraries} for path in Path(prefix, name).glob("lib*.so*"))
    files = [path for path in modules if os.path.exists(path)]
    for path in files:
        _refuse_home(path, "python")
    return tuple(path for path in (python, *files, *sorted(shared)) if not path.startswith("/usr/"))


def _refuse_home(path: str, setting: str) -> None:
    """Refuse to show programs a folder with somebody's home folder in it.

    Raises:
        ConfigError: The folder is `/`, a home folder, or one that contains home folders.
    """
    users = (user for user in pwd.getpwall() if user.pw_uid in (0, os.getuid()) or user.pw_uid >= 1000)
    homes = {Path.home(), Path("/root"), Path("/home/anyone"), *(Path(user.pw_dir) for user in users)}
    shown = Path(path).resolve()
    for home in homes - {Path("/")}:
        if home.resolve().is_relative_to(shown):
            raise ConfigError(
                f"sandbox: {setting} has {path!r}, which contains a home folder ({home}); programs could "
                "read the keys in it. Name the folder of the packages"
            )


def _environment(limits: Limits) -> dict[str, str]:
    """Return a minimal environment without our variables."""
    home = {"HOME": "/scratch", "TMPDIR": "/scratch"} if limits.isolation == "namespaces" else {}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # else one thread for each core
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **threads, **home}


def check_isolation(limits: Limits, *, processes: bool = False) -> None:
    """Run an empty program, so that missing isolation is reported before the first trajectory.

    Raises:
        EnvironmentNotReady: The machine does not allow the configured isolation.
    """
    command, scratch = sandbox_command(limits, processes=processes)
    try:
        ran = subprocess.run(
            command,
            input=b"token run 0 0\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(limits),
            cwd="/",
            timeout=START_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentNotReady(f"sandbox: an empty program did not end within {START_S:g} s") from error
    finally:
        _remove(scratch)
    if ran.stdout != _READY + b"\n\x1etoken done \n":
        raise _refused(ran.stdout.decode(errors="replace"))


def _refused(why: str) -> EnvironmentNotReady:
    return EnvironmentNotReady(
        f"sandbox: this machine refuses the isolation ({why.strip()[-500:]}); expected "
        "Linux 5.12 or later with user namespaces (in a container: a seccomp profile that allows unshare and "
        "mount). Allow them, or choose isolation: guarded, which does not stop a malicious program"
    )


def _remove(scratch: str | None) -> None:
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
