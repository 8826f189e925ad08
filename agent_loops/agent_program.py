"""A program that is an agent: how it is started and ended, and what is said of it when it fails.

```
 task ─JSON─► stdin │ program │ stdout, stderr ─► the ends of both ─► its last exception
                    └─ OPENAI_BASE_URL, OPENAI_API_KEY ─► the endpoint ─► the last error that it sent
```
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from async_rl.openai_api.endpoint import EndpointAccess
from async_rl.runtime.serving_clock import serving_timeout
from async_rl.runtime.threads import start_in_thread
from async_rl.runtime.user_processes import marked
from async_rl.types import Task

NEEDS_FAILED: Final = os.EX_TEMPFAIL
"""The exit code 75, by which a program says that something it needs did not work."""
_HIDDEN_PREFIXES: Final = ("ASYNC_RL_", "RAY_", "OPENAI_", "ANTHROPIC_")
"""Prefixes of environment variables that agents do not receive: keys of engines, of Ray and of other APIs."""
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_PIPE_BYTES: Final = 1 << 16
"""How much a pipe holds, so that one read returns all that is in it."""
_TAIL_BYTES: Final = 1 << 16
"""How much of the end of each output is kept: chained exceptions have long tracebacks."""
_HEAD_BYTES: Final = 256
"""How much is kept of the beginning of a longer line: it names the exception."""
_MAX_SHOWN: Final = 500
"""The most characters of an output that a message shows."""
_NUM_LINES: Final = 4
"""The most lines of an exception: those after the first say what pydantic refuses, or where JavaScript is."""

_GROUP_MARGIN: Final = re.compile(r"^ +[|+] ?")
"""What Python writes before each line of an exception group."""
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_FRAMES_FOLLOW: Final = "Traceback (most recent call last):"
_EXCEPTION: Final = re.compile(
    r"[\w.]*(?:Error|Exception|ExceptionGroup|Interrupt|Exit)(?:: |:?$)"
    r"|Fatal Python error: |Exception in thread \"|Caused by: |panic: |fatal error: |thread '.*' panicked"
)
"""The line of an exception without frames, such as a SyntaxError, or one of JavaScript, Java, Go or Rust."""
_FRAMES: Final = r"(?:\n(?:Traceback \(|[ \t]).*)*\n.*"
_IGNORED: Final = re.compile(
    rf"^Exception ignored .*{_FRAMES}(?:\n(?:During handling|The above exception) .*{_FRAMES})*", re.MULTILINE
)
"""What Python says of exceptions in destructors and at its exit: they end no program, and hide what did."""
_RULE: Final = re.compile(r"[ |+-]*")


class OutputTail:
    """The end of an output, and the beginning of the line in which it begins.

    Example:
        >>> tail = OutputTail()
        >>> tail.add(b"ValueError: ...")
        >>> tail.lines("sk-1-abc")
        ['ValueError: ...']
    """

    def __init__(self) -> None:
        """Begin with no output."""
        self._begin = b""
        """What the line has before `_end`, up to `_HEAD_BYTES`."""
        self._end = bytearray()

    def add(self, data: bytes) -> None:
        """Append some output."""
        self._end += data
        if (excess := len(self._end) - _TAIL_BYTES) > 0:
            _, newline, line = self._end[:excess].rpartition(b"\n")
            self._begin = bytes(line if newline else self._begin + line)[:_HEAD_BYTES]
            del self._end[:excess]

    def lines(self, key: str) -> list[str]:
        """Return the lines that have text, without the key, also where one is cut inside it."""
        is_cut = len(self._begin) == _HEAD_BYTES
        parts = (self._begin, self._end) if is_cut else (self._begin + self._end,)
        texts = [part.decode(errors="replace") for part in parts]
        if key:
            texts = [text.replace(key, "<key>") for text in texts]
        if is_cut:
            sizes = range(len(key), 0, -1)
            texts[0] = texts[0].removesuffix(next(filter(texts[0].endswith, (key[:n] for n in sizes)), ""))
            texts[1] = texts[1].removeprefix(next(filter(texts[1].startswith, (key[-n:] for n in sizes)), ""))
        lines = _ESCAPE.sub("", " … ".join(texts)).splitlines()
        return [line.rstrip() for line in lines if not _RULE.fullmatch(line.strip())]


class ProgramProcess(Protocol):
    """A process that runs a program, as `ChildProcess` is one."""

    stdout: int
    """The descriptor from which its output is read."""
    stderr: int
    handle: int
    """A descriptor that becomes readable when the program has ended."""

    def kill(self) -> None:
        """Kill it with its process group; nothing happens after its end."""
        ...

    def wait(self) -> int:
        """Return its exit code, minus the number of a signal, once `handle` is readable."""
        ...

    def close(self) -> None:
        """Close the descriptors."""
        ...


class ChildProcess:
    """A program that was started for one run; not by asyncio, which loses it if it is cancelled meanwhile."""

    def __init__(
        self, command: Sequence[str], stdin: IO[bytes], environment: Mapping[str, str], cwd: str | None
    ) -> None:
        """Start it in a process group of its own, to be killed as a whole."""
        self._process = process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # apart: a buffered stdout is written after the traceback
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        self.stdout, self.stderr = process.stdout.fileno(), process.stderr.fileno()
        self.handle = os.pidfd_open(process.pid)

    def kill(self) -> None:
        """Implements `ProgramProcess.kill`."""
        if self._process.returncode is None:  # a finished process's number may be reused
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Implements `ProgramProcess.wait`."""
        return self._process.wait()

    def close(self) -> None:
        """Implements `ProgramProcess.close`."""
        os.close(self.handle)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()


Start = Callable[[Sequence[str], IO[bytes], Mapping[str, str], str | None], ProgramProcess]
"""Starts a program with its standard input, environment and folder."""


class Program:
    """One run of a program: bounded in time, with the ends of its outputs."""

    _key = ""
    """What its outputs are shown without."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        limit_s: float | None = None,
        start: Start = ChildProcess,
    ) -> None:
        """Start nothing yet.

        Args:
            command: The program and its arguments.
            environment: All that it receives, but for the mark of its attempt.
            stdin: Its standard input.
            cwd: The folder that it starts in.
            limit_s: Ends it after this time, in which engines served.
            start: How it is started.
        """
        self.name = program_name(command)
        self.exit_code: int | None = None
        """Minus the number of a signal that ended it; None if it runs, or if a limit has ended it."""
        self.ended_by = ""
        """The limit that has ended it."""
        self._command, self._environment, self._cwd = command, environment, cwd
        self._stdin, self._limit_s, self._start = stdin, limit_s, start
        self._stdout, self._stderr = OutputTail(), OutputTail()
        """What it has written so far."""
        self._process: ProgramProcess | None = None

    async def run(self) -> int:
        """Run the program, kill all its processes at the end, and return its exit code; 0 after a limit."""
        with tempfile.TemporaryFile() as stdin:
            stdin.write(self._stdin)
            stdin.seek(0)
            environment = marked(self._environment, "agent_program")
            self._process = process = self._start(self._command, stdin, environment, self._cwd)
        ended = start_in_thread(partial(self._wait_for, process), name=f"agent {self.name}")
        try:
            if self._limit_s is None:
                code = await asyncio.shield(ended)
            else:
                async with serving_timeout(self._limit_s):
                    code = await asyncio.shield(ended)
        except TimeoutError:
            self.ended_by = "time"
        finally:
            process.kill()
            await asyncio.wait([ended])  # the outputs are complete
        if self.ended_by:
            return 0
        self.exit_code = code
        return int(code)

    def end(self, limit: str) -> None:
        """End the program because of a limit."""
        if self._process is not None:
            self.ended_by = self.ended_by or limit
            self._process.kill()

    def _wait_for(self, process: ProgramProcess) -> int:
        """Read the outputs until the program exits, kill its children, and return its exit code."""
        polled = select.poll()
        outputs = {process.stdout: self._stdout, process.stderr: self._stderr}
        for descriptor in (*outputs, process.handle):
            polled.register(descriptor, select.POLLIN)
        try:
            while process.handle not in (ready := [descriptor for descriptor, _ in polled.poll()]):
                for descriptor in ready:
                    if not _read(descriptor, outputs[descriptor]):
                        polled.unregister(descriptor)  # it has closed this output, and runs on
            process.kill()
            for descriptor, tail in outputs.items():
                os.set_blocking(descriptor, False)
                with suppress(BlockingIOError):  # not to its end: children in other sessions may hold it open
                    _read(descriptor, tail)
            return process.wait()
        finally:
            process.close()

    def output(self) -> tuple[list[str], list[str]]:
        """Return the last lines of its two outputs, without the key of an endpoint."""
        return self._stdout.lines(self._key), self._stderr.lines(self._key)

    @property
    def failure(self) -> str:
        """How it ended, or that it runs; and its last exception."""
        if self.ended_by:
            how = f"was ended by its limit of {self.ended_by}"
        elif self.exit_code is None:
            how = "was still running"
        elif self.exit_code < 0:
            how = f"was killed by signal {-self.exit_code} ({signal.strsignal(-self.exit_code)})"
        else:
            how = f"ended with {self.exit_code}"
        return f"{self.name!r} {how}: {last_words(*self.output())}"


class AgentProgram(Program):
    """A program that is an agent: it asks the endpoint of a trajectory."""

    def __init__(
        self,
        command: Sequence[str],
        access: EndpointAccess,
        task: Task,
        *,
        environment: Mapping[str, str] | None = None,
        **how: Any,
    ) -> None:
        """Prepare to run a command that asks the endpoint.

        Args:
            command: The program and its arguments.
            access: The endpoint.
            task: The task, which is JSON on its standard input, unless `how` has another.
            environment: All that it receives; by default our environment, with the address of the policy.
            how: Further arguments of `Program`.
        """
        if environment is None:
            environment = {**_environment(os.environ), **endpoint_variables(os.environ, access)}
        request = {"id": task.task_id, "messages": task.messages, "metadata": task.metadata}
        how.setdefault("stdin", msgspec.json.encode(request, enc_hook=str))
        super().__init__(command, environment, **how)
        self._access, self._key = access, access.api_key

    @property
    def failure(self) -> str:
        """How it ended, or that it runs; its last exception; and the last error of the endpoint."""
        said = f"agent {super().failure}"
        return "; ".join(filter(None, (said, last_error_text(self._access))))


def program_name(command: Sequence[str]) -> str:
    """Return the names of a program and of its script or module: `python my_agent.py`."""
    script = next((word for word in command[1:] if os.path.isfile(word)), None)
    if script is None and "-m" in command[1:-1]:
        script = command[command.index("-m", 1) + 1]
    return " ".join(Path(word).name for word in (command[0], script) if word)


def last_words(stdout: Sequence[str], stderr: Sequence[str]) -> str:
    """Return the last exception of a program, with its last line, from the last lines of its outputs."""
    errors, others = ([*filter(None, _IGNORED.sub("", "\n".join(o)).split("\n"))] for o in (stderr, stdout))
    found = _last_exception(errors) or _last_exception(others) or _last_exception(stderr)
    said = found or (errors or others)[-_NUM_LINES:]
    shown = " ".join(said)[:_MAX_SHOWN] or "it wrote nothing"
    if errors and (last := _GROUP_MARGIN.sub("", errors[-1]).strip()) not in said:
        shown += f"; its last line: {last[:_MAX_SHOWN]}"
    return shown


def last_error_text(access: EndpointAccess) -> str:
    """Return a clause about the last error that the endpoint sent to an agent, if it sent one."""
    if (error := access.handler.last_error) is None:
        return ""
    message = error.message.replace(access.api_key, "<key>")  # of a path, for example
    return f"the endpoint's last error: {error.status}, {message}"


def without_proxy(environment: Mapping[str, str], url: str) -> dict[str, str]:
    """Return `no_proxy` and `NO_PROXY` for an environment, extended by loopback and the host of a URL.

    Programs read one or the other. Names that either has stay exempt.
    """
    named = [host for name in ("no_proxy", "NO_PROXY") for host in environment.get(name, "").split(",")]
    hosts = [*map(str.strip, named), *_LOOPBACK, urlsplit(url).hostname or ""]
    exempt = "*" if "*" in hosts else ",".join(dict.fromkeys(filter(None, hosts)))
    return {"no_proxy": exempt, "NO_PROXY": exempt}


def endpoint_variables(environment: Mapping[str, str], access: EndpointAccess) -> dict[str, str]:
    """Return the variables by which clients find the endpoint, and ask it directly in an environment."""
    return {
        **without_proxy(environment, access.base_url),
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "OPENAI_MODEL": access.model,
        "ANTHROPIC_BASE_URL": access.root_url,
        "ANTHROPIC_API_KEY": access.api_key,
        "ANTHROPIC_MODEL": access.model,
    }


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return our environment without hidden variables."""
    return {name: value for name, value in ours.items() if not name.startswith(_HIDDEN_PREFIXES)}


def _read(descriptor: int, tail: OutputTail) -> bool:
    """Read some of an output into its tail; return False at its end."""
    data = os.read(descriptor, _PIPE_BYTES)
    tail.add(data)
    return bool(data)


def _last_exception(lines: Sequence[str]) -> list[str]:
    """Return the line of the last exception, and the lines that belong to it."""
    found, in_frames = None, False
    for number, line in enumerate(lines):
        plain = _GROUP_MARGIN.sub("", line)
        if plain.endswith(_FRAMES_FOLLOW):
            in_frames = True
        elif (in_frames and not plain.startswith(" ")) or _EXCEPTION.match(plain):
            found, in_frames = number, False
    if found is None:
        return []
    return [_GROUP_MARGIN.sub("", line).strip() for line in lines[found : found + _NUM_LINES]]
