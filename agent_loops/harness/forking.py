"""Starts Python programs by fork from a process that has imported their modules already.

```
 run begins ──► fork_server.py MODULES   imports once, 3 to 15 s for frameworks
 attempt ─────► fork, with its own environment, folder and outputs: milliseconds
 it died ─────► the next attempt starts another
```
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, Self

import msgspec

from agent_loops.agent_program import OutputTail, last_words
from agent_loops.harness.presets import ProgramSettings, filled, has_words
from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.runtime.user_processes import marked

_SERVER: Final = Path(__file__).with_name("fork_server.py")
_IMPORT_S: Final = 300.0
"""The longest time of the imports."""


class ForkServer:
    """A long-lived process, held while the run runs, and replaced when it has died."""

    def __init__(self, settings: ProgramSettings) -> None:
        """Start nothing yet.

        Raises:
            ConfigError: The program is not one of Python.
        """
        self._python, self._script = python_of(settings.command)
        self._modules = settings.imports
        self._variables = settings.environment
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._context = contextvars.copy_context()
        self.num_started = 0
        """How many processes there have been."""

    async def __aenter__(self) -> Self:
        """Start the process, and wait until its imports are done.

        Raises:
            EnvironmentNotReady: An import fails.
        """
        self._context = contextvars.copy_context()  # what replaces it belongs to the run, not to an attempt
        self._home = tempfile.TemporaryDirectory(prefix="async-rl-imports-")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed at exit
        try:
            with self._lock:
                control = self._begin()
            await asyncio.to_thread(self._wait_ready, control)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        with self._lock:
            self._end()
        self._log.close()
        self._home.cleanup()

    def start(
        self, command: Sequence[str], stdin: IO[bytes], environment: Mapping[str, str], cwd: str | None
    ) -> ForkedProcess:
        """Start a program, as `agent_program.Start` describes it; a process that has died is replaced."""
        request = {
            "command": [*self._script, *command[1:]],
            "environment": dict(environment),
            "cwd": cwd or os.getcwd(),
        }
        with tempfile.TemporaryFile() as file:
            file.write(msgspec.json.encode(request))
            file.seek(0)
            with self._lock:
                try:
                    if self._control is None:
                        raise BrokenPipeError
                    return _forked(self._control, file, stdin)
                except (BrokenPipeError, ConnectionResetError):
                    self._end()
                    control = self._context.copy().run(self._begin)
                    return _forked(control, file, stdin)

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keep = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TZ") if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [self._python, str(_SERVER), str(theirs.fileno()), *self._modules],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=marked({**keep, "HOME": self._home.name, **self._fixed_variables()}, "agent_program"),
                cwd=self._home.name,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control = ours
        self.num_started += 1
        return ours

    def _fixed_variables(self) -> dict[str, str]:
        """Return the variables that are the same for all attempts: modules read some at their import."""
        here = {"home": self._home.name, "workspace": self._home.name}
        filled_in = {name: filled(value, here) for name, value in self._variables.items()}
        return {name: value for name, value in filled_in.items() if not has_words(value)}

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()  # it kills its programs and ends
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    def _wait_ready(self, control: socket.socket) -> None:
        control.settimeout(_IMPORT_S)
        try:
            said = control.recv(16)
        except OSError:
            said = b""
        finally:
            control.settimeout(None)
        if not said:
            self._log.seek(0)
            tail = OutputTail()
            tail.add(self._log.read())
            raise EnvironmentNotReady(
                f"the imports {', '.join(self._modules)} failed in {self._python}: "
                f"{last_words([], tail.lines(''))}"
            )


class ForkedProcess:
    """A program that was forked, as `ProgramProcess` describes it."""

    def __init__(self, channel: socket.socket, stdout: int, stderr: int) -> None:
        """Own the descriptors."""
        self._channel = channel
        self.stdout, self.stderr = stdout, stderr
        self.handle = channel.fileno()

    def kill(self) -> None:
        """Implements `ProgramProcess.kill`: the fork server kills it."""
        with suppress(OSError):  # it is closed already
            self._channel.shutdown(socket.SHUT_WR)

    def wait(self) -> int:
        """Implements `ProgramProcess.wait`; a fork server that was killed takes its programs with it."""
        with suppress(ConnectionResetError):
            if status := self._channel.recv(64):
                return int(status)
        return -9

    def close(self) -> None:
        """Implements `ProgramProcess.close`."""
        self._channel.close()
        os.close(self.stdout)
        os.close(self.stderr)


def python_of(command: Sequence[str]) -> tuple[str, list[str]]:
    """Return the interpreter of a program, and the script that it runs, if the command is one.

    Raises:
        ConfigError: It is not one of Python.
    """
    path = shutil.which(command[0]) or command[0]
    if Path(path).name.startswith("python"):
        return path, []
    with suppress(OSError), open(path, "rb") as script:
        line = script.readline(4096).decode(errors="replace").strip()
        interpreter = line.removeprefix("#!").strip()
        if line.startswith("#!") and Path(interpreter).name.startswith("python"):
            return interpreter, [path]
    raise ConfigError(
        f"rollout.agent_loop_args: program: imports need a Python program, and {command[0]!r} is none; "
        "expected its script, or an interpreter: [python, -m, module]"
    )


def _forked(control: socket.socket, request: IO[bytes], stdin: IO[bytes]) -> ForkedProcess:
    ours, theirs = socket.socketpair()
    out, err = os.pipe(), os.pipe()
    try:
        with theirs:
            descriptors = [request.fileno(), stdin.fileno(), out[1], err[1], theirs.fileno()]
            socket.send_fds(control, [b"f"], descriptors)
    except BaseException:
        ours.close()
        os.close(out[0])
        os.close(err[0])
        raise
    finally:
        os.close(out[1])
        os.close(err[1])
    return ForkedProcess(ours, out[0], err[0])
