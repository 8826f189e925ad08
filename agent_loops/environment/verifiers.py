r"""Environments of verifiers, unmodified: they ask the policy through our OpenAI endpoint.

```
 this process                                                   the environment's process, for all episodes
 run ─► Endpoint.open_trajectory(session) ── task, URL, key ──► environment.run_rollout(input, client, …)
              ▲ POST /chat/completions ◄──────────────────────   its turns
 report ◄──── reward, and each reward function's by name ─────   its rubric
```

Its dataset becomes tasks by `python -m agent_loops.environment.verifiers CONFIG FILE`.

**Source**: `verifiers/legacy/envs/environment.py` (`Environment.run_rollout`) of verifiers 0.3.1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import msgspec

from agent_loops.agent_program import OutputTail, last_words
from agent_loops.openai_agent import OpenAIAgentLoop
from async_rl.errors import AgentLoopError, AsyncRLError, ConfigError, EnvironmentNotReady, PromptTooLong
from async_rl.openai_api.endpoint import EndpointAccess
from async_rl.rollout.session.api import Session
from async_rl.runtime import yaml12
from async_rl.runtime.loading import IMPORT_FOLDERS, add_import_folder
from async_rl.runtime.printable import print_text
from async_rl.runtime.supervision import finished
from async_rl.runtime.threads import start_in_thread
from async_rl.runtime.user_processes import marked
from async_rl.types import StopReason, Task

PACKAGE: Final = "verifiers>=0.1.14,<0.4"
"""The versions with these environments: those of 0.4 are programs, tasks and containers."""
_PROGRAM: Final = Path(__file__).with_name("verifiers_child.py")
START_S: Final = 600.0
"""The longest time to load an environment, which may download its data."""
_HIDDEN_PREFIXES: Final = ("ASYNC_RL_", "RAY_")
"""Prefixes of environment variables that the environment does not receive. Its judges may need other keys."""
_END_S: Final = 15.0
"""How long a process may take to end: the 10 s that it gives its environment, and some."""
_OURS: Final = ("reward", "turn_rewards", "reward_function")


class VerifiersProcess:
    """The process of one environment.

    Raises:
        ConfigError: There is no such interpreter.
    """

    def __init__(
        self, name: str, args: Mapping[str, Any], python: str | None, start_s: float = START_S
    ) -> None:
        self._python = python or sys.executable
        if shutil.which(self._python) is None:
            raise ConfigError(f"rollout.agent_loop_args: python: there is no program {self._python!r}")
        settings = {"id": name, "args": args, "folders": IMPORT_FOLDERS}
        self._settings = msgspec.json.encode(settings).decode()
        self._name = name
        self._start_s = start_s
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_requests = 0
        self.popen: subprocess.Popen[bytes] | None = None
        self._input: asyncio.WriteTransport | None = None
        self._errors = OutputTail()
        self._ended: asyncio.Future[None] | None = None
        self._has_failed = False
        """Whether all requests were told that it has ended; its thread goes on for a moment."""

    async def start(self, environment: Mapping[str, str]) -> None:
        """Start the process, and wait until it has loaded the environment, which may download its data.

        Raises:
            ConfigError: It cannot be loaded.
            EnvironmentNotReady: The interpreter has no verifiers, or it took too long.
        """
        loop = asyncio.get_running_loop()
        # Not by a path: its folder holds modules with the names of packages.
        command = [self._python, "-c", _PROGRAM.read_text(encoding="utf-8"), self._settings]
        self.popen = process = subprocess.Popen(  # noqa: ASYNC220  # a cancelled start of asyncio loses it
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,  # a group to be killed as a whole, which Ctrl-C does not reach
        )
        ready = self._answers[0] = loop.create_future()
        self._ended = start_in_thread(lambda: self._attend(process, loop), name=f"verifiers {self._name}")
        transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        self._input = transport
        try:
            async with asyncio.timeout(self._start_s):
                answer = await ready
        except TimeoutError as error:
            raise EnvironmentNotReady(
                f"the environment {self._name!r} of verifiers was not loaded within {self._start_s:g} s: "
                "raise rollout.agent_loop_args.start_timeout_s"
            ) from error
        if answer.get("is_missing"):
            raise EnvironmentNotReady(
                f"the environment needs the package verifiers, which {self._python} does not have: run "
                f"`pip install '{PACKAGE}'` in an environment of its own, and name its interpreter as "
                "rollout.agent_loop_args.python"
            )
        if "fault" in answer:
            raise ConfigError(
                f"rollout.agent_loop_args: the environment {self._name!r} of verifiers cannot be loaded by "
                f"{self._python}: {answer['fault']}"
            )

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, so that requests would not be answered."""
        return self._has_failed or self._ended is None or self._ended.done()

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer; a cancelled caller cancels what it asked for.

        Raises:
            AgentLoopError: The environment raised, or its process has ended.
        """
        self._num_requests += 1
        number = self._num_requests
        answered = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send({"number": number, **request})
        try:
            answer = await answered
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            self._answers.pop(number, None)
        if "fault" in answer:
            raise AgentLoopError(f"the environment {self._name!r} of verifiers: {answer['fault']}")
        return dict(answer)

    async def close(self) -> None:
        """End the process: it tears down its environment, or is killed."""
        if self.popen is None or self._ended is None:
            return
        if self._input is not None:
            self._input.close()
        try:
            async with asyncio.timeout(_END_S):
                await asyncio.shield(self._ended)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            await self._ended

    def _send(self, request: Mapping[str, Any]) -> None:
        if self._input is not None and not self._input.is_closing():
            self._input.write(msgspec.json.encode(request, enc_hook=str) + b"\n")

    def _attend(self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        """Read what the process says until it exits, and end its children."""
        assert process.stdout is not None
        assert process.stderr is not None
        stdout, stderr = process.stdout, process.stderr

        def read_answers() -> None:
            with stdout:
                for line in stdout:
                    loop.call_soon_threadsafe(self._settle, msgspec.json.decode(line))

        def read_errors() -> None:
            with stderr:
                while data := os.read(stderr.fileno(), 1 << 16):
                    self._errors.add(data)

        readers = [threading.Thread(target=read, daemon=True) for read in (read_answers, read_errors)]
        for reader in readers:
            reader.start()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its number is not reused yet
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        for reader in readers:
            reader.join(timeout=1.0)  # children in other sessions may hold them open
        said = last_words([], self._errors.lines("\0"))  # no key has a NUL
        loop.call_soon_threadsafe(self._fail, f"its process ended with {code}: {said}")

    def _settle(self, answer: dict[str, Any]) -> None:
        waiting = self._answers.get(answer.get("number", 0))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _fail(self, fault: str) -> None:
        self._has_failed = True
        for number in list(self._answers):
            self._settle({"number": number, "fault": fault})


class VerifiersLoop(OpenAIAgentLoop):
    """Plays episodes of an environment of verifiers, such as `SingleTurnEnv`, `MultiTurnEnv` or `ToolEnv`.

    The environment asks for turns, and its rubric scores the episode. Its reward is reported for
    `environment_reward`, with each reward function's value and metric by name.

    Args:
        id: The name of an installed environment, or `module:Class`.
        args: Its arguments.
        python: The interpreter that has the environment's packages; by default this one.
        sampling_args: Fields of its requests, such as `stop`; they replace the environment's own.
        start_timeout_s: The longest time to load it, in each rollout worker.
        agent: Arguments of `OpenAIAgentLoop`, such as `parser` and `opens_thought`.

    Raises:
        ConfigError: The interpreter does not exist, or an argument is wrong.
    """

    _needs_agent: ClassVar[bool] = False

    def __init__(
        self,
        id: str,
        args: Mapping[str, Any] | None = None,
        python: str | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        start_timeout_s: float = START_S,
        **agent: Any,
    ) -> None:
        for taken in ("agent", "command", "nonzero_exit", "tls_certificate", "tls_key"):
            if taken in agent:
                raise ConfigError(f"rollout.agent_loop_args: {taken} does not go with an environment")
        super().__init__(**agent)
        self._name = f"verifiers {id}"
        self._described = (id, args or {}, python, start_timeout_s)
        self.process = VerifiersProcess(*self._described)
        self._sampling_args = sampling_args or {}
        self._environment: dict[str, str] = {}
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Serve the endpoint, and start the environment's process."""
        await super().__aenter__()
        # A later start belongs to the run, too, not to the attempt that notices the need of one.
        self._environment = environment_of_child()
        try:
            await self.process.start(self._environment)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        """End the process, and the endpoint."""
        try:
            await finished(self.process.close(), limit_s=2 * _END_S)
        finally:
            await super().__aexit__(*error)

    async def run(self, task: Task, session: Session) -> StopReason | None:
        """Implements `AgentLoop.run`."""
        if not isinstance(task.metadata.get("verifiers"), dict):
            raise AgentLoopError(
                f"task {task.task_id} has no data of verifiers; expected an example that `python -m "
                "agent_loops.environment.verifiers CONFIG FILE` has written"
            )
        return await super().run(task, session)

    async def _call(self, task: Task, access: EndpointAccess, session: Session) -> StopReason | None:
        process = await self._running_process()
        answer = await process.ask(
            {
                "episode": {
                    "input": {**task.metadata["verifiers"], "prompt": task.messages},
                    "url": access.base_url,
                    "key": access.api_key,
                    "model": access.model,
                    "sampling_args": self._sampling_args,
                }
            }
        )
        exceeded = access.handler.exceeded
        if answer["error"] is not None and exceeded is None:
            raise AgentLoopError(f"the environment of verifiers: {answer['error']}")
        parts = {
            f"verifiers_{name}" if name in _OURS else name: value for name, value in answer["parts"].items()
        }
        session.report(**parts, reward=answer["reward"])
        if exceeded is not None:  # an environment without budget can only give up; what was sampled counts
            return "length" if isinstance(exceeded, PromptTooLong) else "max_turns"
        return "max_turns" if answer["is_cut"] else None

    async def _running_process(self) -> VerifiersProcess:
        """Return the process, started again if it has ended."""
        async with self._starting:
            if self.process.has_ended:
                process = VerifiersProcess(*self._described)
                try:
                    await process.start(self._environment)
                except BaseException:
                    await finished(process.close(), limit_s=2 * _END_S)
                    raise
                self.process = process
            return self.process


def environment_of_child() -> dict[str, str]:
    """Return the variables of an environment's process, which ends with what starts it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_HIDDEN_PREFIXES)}
    return marked(kept, "agent_program")


async def list_tasks(args: Mapping[str, Any], number: int, evaluation: bool) -> list[dict[str, Any]]:
    """Return the first tasks of an environment, as examples of a dataset.

    Args:
        args: `rollout.agent_loop_args`.
        number: The most tasks.
        evaluation: Whether they come from its dataset for evaluations.
    """
    process = VerifiersProcess(args["id"], args.get("args", {}), args.get("python"))
    try:
        await process.start(environment_of_child())
        rows = (await process.ask({"tasks": number, "evaluation": evaluation}))["tasks"]
    finally:
        await process.close()
    return [
        {"id": f"{args['id']}-{row['example_id']}", "messages": row.pop("prompt"), "verifiers": row}
        for row in rows
    ]


def main() -> None:
    """Write the tasks of the environment that a run's config names, as a dataset."""
    parser = argparse.ArgumentParser(
        prog="python -m agent_loops.environment.verifiers", description=main.__doc__
    )
    parser.add_argument("config", type=Path, help="the run's YAML file; rollout.agent_loop_args is read")
    parser.add_argument("tasks", type=Path, help="the .jsonl file to write")
    parser.add_argument("--n", type=int, default=1000, help="the most tasks (%(default)s)")
    parser.add_argument("--evaluation", action="store_true", help="take the environment's evaluation dataset")
    given = parser.parse_args()
    add_import_folder(given.config.parent)
    args = yaml12.load(given.config.read_text(encoding="utf-8"))["rollout"]["agent_loop_args"]
    try:
        tasks = asyncio.run(list_tasks(args, given.n, given.evaluation))
    except AsyncRLError as error:
        parser.exit(2, f"{error}\n")
    given.tasks.parent.mkdir(parents=True, exist_ok=True)
    given.tasks.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    print_text(f"{given.tasks}: {len(tasks)} tasks")


if __name__ == "__main__":
    main()
