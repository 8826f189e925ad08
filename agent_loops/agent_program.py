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

_HIDDEN_PREFIXES: Final = ("ASYNC_RL_", "RAY_", "OPENAI_")
"""Prefixes of environment variables that agents do not receive: keys of engines, of Ray and of other APIs."""
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_PIPE_BYTES: Final = 1 << 16
"""How much a pipe holds, so that one read returns all that is in it."""
_TAIL_BYTES: Final = 1 << 16
"""How much of the end of each output is kept: chained exceptions have long tracebacks."""
_HEAD_BYTES: Final = 256
"""How much of the beginning of a line is kept that is longer: it names the exception."""
_CUT: Final = b"\0"
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
    r"|Fatal Python error: |Exception in thread |Caused by: |panic: |fatal error: |thread '.*' panicked"
)
"""The line of an exception without frames, such as a SyntaxError, or one of JavaScript, Java, Go or Rust."""
_IGNORED: Final = "Exception ignored in"
"""Begins what Python says of exceptions in destructors and at its exit, which end no program."""
_RULE: Final = re.compile(r"[ |+-]*")


class AgentProgram:
    """One run of a program as an agent.

    Example:
        >>> program = AgentProgram(["python", "my_agent.py"], access)
        >>> if await program.run(task):
        ...     raise AgentLoopError(program.failure)
    """

    def __init__(self, command: Sequence[str], access: EndpointAccess) -> None:
        """Prepare to run a command that asks the endpoint."""
        self.name = program_name(command)
        self.exit_code: int | None = None
        """Minus the number of a signal that ended it; None while it runs."""
        self._command = command
        self._access = access
        self._stdout, self._stderr = bytearray(), bytearray()
        """The ends of what it has written so far."""

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
        said = last_words(bytes(self._stdout), bytes(self._stderr), self._access.api_key)
        text = f"agent {self.name!r} {how}: {said}"
        return "; ".join(filter(None, (text, last_error_text(self._access))))


def program_name(command: Sequence[str]) -> str:
    """Return the names of a program and of its script or module: `python my_agent.py`."""
    script = next((word for word in command[1:] if os.path.isfile(word)), None)
    if script is None and "-m" in command[1:-1]:
        script = command[command.index("-m", 1) + 1]
    return " ".join(Path(word).name for word in (command[0], script) if word)


def last_words(stdout: bytes, stderr: bytes, key: str) -> str:
    """Return the last exception of a program, with its last line, from the ends of its outputs."""
    errors, others = _lines(stderr, key), _lines(stdout, key)
    said = _last_exception(errors) or _last_exception(others) or (errors or others)[-_NUM_LINES:]
    shown = " ".join(said)[:_MAX_SHOWN] or "it wrote nothing"
    if errors and errors[-1].strip() not in said:
        shown += f"; its last line: {errors[-1][:_MAX_SHOWN]}"
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
    }


def _read(descriptor: int, tail: bytearray) -> bool:
    """Read some of an output into its tail; return False at its end."""
    data = os.read(descriptor, _PIPE_BYTES)
    append_output(tail, data)
    return bool(data)


def append_output(tail: bytearray, data: bytes) -> None:
    """Append output to its tail, of which the end is kept, and the beginning of a line that is cut."""
    tail += data
    if (cut := len(tail) - _TAIL_BYTES) > 0:
        begin = tail.rfind(b"\n", 0, cut) + 1
        tail[:cut] = tail[begin : min(begin + _HEAD_BYTES, cut)] + _CUT


def _lines(tail: bytes, key: str) -> list[str]:
    """Return the lines of an output that have text, without the key or parts of it where a line was cut."""
    before, cut, after = tail.decode(errors="replace").replace(key, "<key>").partition(_CUT.decode())
    if cut:
        lengths = range(len(key), 0, -1)
        before = before[: len(before) - next((n for n in lengths if before.endswith(key[:n])), 0)]
        after = after[next((n for n in lengths if after.startswith(key[-n:])), 0) :]
        before += " … " if before else ""
    lines = _ESCAPE.sub("", before + after).splitlines()
    return [line.rstrip() for line in lines if not _RULE.fullmatch(line.strip())]


def _last_exception(lines: Sequence[str]) -> list[str]:
    """Return the line of the last exception, and the lines that belong to it."""
    found, ignored, in_frames, is_ignored = None, None, False, False
    for number, line in enumerate(lines):
        plain = _GROUP_MARGIN.sub("", line)
        if plain.startswith(_IGNORED):
            is_ignored = True
        elif plain.endswith(_FRAMES_FOLLOW):
            in_frames = True
        elif (in_frames and not plain.startswith(" ")) or _EXCEPTION.match(plain):
            if is_ignored:
                ignored = number
            else:
                found = number
            in_frames = is_ignored = False
    if found is None:
        found = ignored
    if found is None:
        return []
    return [_GROUP_MARGIN.sub("", line).strip() for line in lines[found : found + _NUM_LINES]]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # a finished process's number may be reused
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
