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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from async_rl.openai_api.endpoint import EndpointAccess
from async_rl.runtime.threads import start_in_thread
from async_rl.runtime.user_processes import marked
from async_rl.types import Task

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
        texts = [part.decode(errors="replace").replace(key, "<key>") for part in parts]
        if is_cut:
            sizes = range(len(key), 0, -1)
            texts[0] = texts[0].removesuffix(next(filter(texts[0].endswith, (key[:n] for n in sizes)), ""))
            texts[1] = texts[1].removeprefix(next(filter(texts[1].startswith, (key[-n:] for n in sizes)), ""))
        lines = _ESCAPE.sub("", " … ".join(texts)).splitlines()
        return [line.rstrip() for line in lines if not _RULE.fullmatch(line.strip())]


class AgentProgram:
    """One run of a program as an agent."""

    def __init__(self, command: Sequence[str], access: EndpointAccess) -> None:
        """Prepare to run a command that asks the endpoint."""
        self.name = program_name(command)
        self.exit_code: int | None = None
        """Minus the number of a signal that ended it; None while it runs."""
        self._command = command
        self._access = access
        self._stdout, self._stderr = OutputTail(), OutputTail()
        """What it has written so far."""

    async def run(self, task: Task) -> int:
        """Run the program, kill all its processes at the end, and return its exit code."""
        process = self._start(task)
        ended = start_in_thread(partial(self._wait_for, process), name=f"agent {self.name}")
        try:
            self.exit_code = code = await asyncio.shield(ended)
        finally:
            _kill_group(process)
            await asyncio.wait([ended])  # the outputs are complete
        return int(code)

    def _start(self, task: Task) -> subprocess.Popen[bytes]:
        """Start it; not by asyncio, which loses the process if it is cancelled during the start."""
        request = {"id": task.task_id, "messages": task.messages, "metadata": task.metadata}
        with tempfile.TemporaryFile() as stdin:
            stdin.write(msgspec.json.encode(request, enc_hook=str))
            stdin.seek(0)
            return subprocess.Popen(
                self._command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,  # apart: a buffered stdout is written after the traceback
                env=marked(_environment(os.environ, self._access), "agent_program"),
                start_new_session=True,  # its own process group, to be killed as a whole
            )

    def _wait_for(self, process: subprocess.Popen[bytes]) -> int:
        """Read the outputs until the program exits, kill its children, and return its exit code."""
        assert process.stdout is not None
        assert process.stderr is not None
        handle, polled = os.pidfd_open(process.pid), select.poll()
        outputs = {process.stdout.fileno(): self._stdout, process.stderr.fileno(): self._stderr}
        for descriptor in (*outputs, handle):
            polled.register(descriptor, select.POLLIN)
        try:
            while handle not in (ready := [descriptor for descriptor, _ in polled.poll()]):
                for descriptor in ready:
                    if not _read(descriptor, outputs[descriptor]):
                        polled.unregister(descriptor)  # it has closed this output, and runs on
            _kill_group(process)
            for descriptor, tail in outputs.items():
                os.set_blocking(descriptor, False)
                with suppress(BlockingIOError):  # not to its end: children in other sessions may hold it open
                    _read(descriptor, tail)
            return process.wait()
        finally:
            os.close(handle)
            process.stdout.close()
            process.stderr.close()

    @property
    def failure(self) -> str:
        """How it ended, or that it runs; its last exception; and the last error of the endpoint."""
        if self.exit_code is None:
            how = "was still running"
        elif self.exit_code < 0:
            how = f"was killed by signal {-self.exit_code} ({signal.strsignal(-self.exit_code)})"
        else:
            how = f"ended with {self.exit_code}"
        key = self._access.api_key
        said = last_words(self._stdout.lines(key), self._stderr.lines(key))
        text = f"agent {self.name!r} {how}: {said}"
        return "; ".join(filter(None, (text, last_error_text(self._access))))


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


def _environment(ours: Mapping[str, str], access: EndpointAccess) -> dict[str, str]:
    """Return our environment without hidden variables, with the address of the policy."""
    kept = {name: value for name, value in ours.items() if not name.startswith(_HIDDEN_PREFIXES)}
    return {
        **kept,
        **without_proxy(kept, access.base_url),
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "OPENAI_MODEL": access.model,
        "ANTHROPIC_BASE_URL": access.root_url,
        "ANTHROPIC_API_KEY": access.api_key,
        "ANTHROPIC_MODEL": access.model,
    }


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


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # a finished process's number may be reused
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
