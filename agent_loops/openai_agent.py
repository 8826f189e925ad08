"""Any agent that speaks OpenAI's API, as an agent loop: docs/guide/agents.md.

```
 run ──► Endpoint.open(session) ──► agent(task, api)      async function, or a sync one in a thread
            key, URL                program               OPENAI_BASE_URL, OPENAI_API_KEY
```
"""

from __future__ import annotations

import inspect
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from agent_loops.base import AgentLoop
from agent_loops.parsing import MalformedCall, ToolParser, load_parser, recognise
from async_rl.errors import AgentLoopError, ConfigError, EnvironmentNotReady, PromptTooLong
from async_rl.openai_api.endpoint import Access, Endpoint
from async_rl.rollout.session.api import Session
from async_rl.runtime.loading import load_object
from async_rl.runtime.threads import call_in_thread
from async_rl.types import StopReason, Task

if TYPE_CHECKING:
    import openai

_OURS: Final = ("ASYNC_RL_", "RAY_", "OPENAI_")
"""Beginnings of environment variables that are not an agent's: keys of engines and of Ray, and of others."""
_TAIL_BYTES: Final = 4096
"""Of a program's output, for the message when it fails."""
_DIE_WITH_DRIVER: Final = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Sets PR_SET_PDEATHSIG in a process of its own: between fork and exec of one with threads it could hang."""


class AgentAPI:
    """What an agent function is given to talk to the policy.

    Example:
        >>> async def agent(task, api):
        ...     await api.client.chat.completions.create(model=api.model, messages=task.messages)
    """

    def __init__(self, access: Access) -> None:
        self.base_url = access.base_url
        """Ends in `/v1`."""
        self.api_key = access.api_key
        self.session_url = access.session_url
        """As `base_url`, with the key in it: for agents that cannot be given a key."""
        self.model = access.model
        self._client: openai.AsyncOpenAI | None = None
        self._sync_client: openai.OpenAI | None = None

    @property
    def client(self) -> openai.AsyncOpenAI:
        """OpenAI's own client, ready; for async agents. No time limit: a weight update may take a while, and
        `rollout.trajectory_timeout_s` bounds all of it.
        """
        if self._client is None:
            self._client = _openai().AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, timeout=None)
        return self._client

    @property
    def sync_client(self) -> openai.OpenAI:
        """The same for sync agents, which run in threads."""
        if self._sync_client is None:
            self._sync_client = _openai().OpenAI(base_url=self.base_url, api_key=self.api_key, timeout=None)
        return self._sync_client

    async def aclose(self) -> None:
        """Let go of connections."""
        if self._client is not None:
            await self._client.close()
        if self._sync_client is not None:
            self._sync_client.close()


AgentFunction = Callable[[Task, AgentAPI], Any | Awaitable[Any]]


class OpenAIAgentLoop(AgentLoop):
    """Runs an agent that asks the policy through OpenAI's API, and knows nothing of training.

    Its requests become the trajectory: each answer is a turn of the policy, tokens, log-probs, routing and
    weight versions recorded. The last answer of the policy is what the reward is computed on.

    Args:
        agent: Dotted path of a function `agent(task, api)`, async, or sync and run in a thread of its own;
            see `AgentAPI`. What it returns is not used.
        command: A program instead, with its arguments: it has OPENAI_BASE_URL, OPENAI_API_KEY and
            OPENAI_MODEL in its environment and the task as JSON on its standard input (`id`, `messages`,
            `metadata`; not the answer). It is killed with all it started when the trajectory ends.
        parser: Format of tool calls: a name in `agent_loops.parsing.PARSERS`, or `module:Class`; by default
            what the model's chat template teaches.
        opens_thought: Whether the chat template itself opens `<think>` for each turn.
        model: The name under which the policy is served.
        host: Address to bind to.
        port: 0 takes a free one.
        max_body_bytes: A larger request is refused.

    Raises:
        ConfigError: Neither or both of agent and command, or one that does not exist.
    """

    def __init__(
        self,
        agent: str | None = None,
        command: Sequence[str] | None = None,
        parser: str | None = None,
        opens_thought: bool = False,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        max_body_bytes: int = 64 << 20,
    ) -> None:
        if (agent is None) == (command is None):
            raise ConfigError(
                "rollout.agent_loop_args: expected either agent (`module:function`) or command (a list)"
            )
        if isinstance(command, str) or (command is not None and not command):
            raise ConfigError(
                f"rollout.agent_loop_args: command is {command!r}; expected a list, the program first"
            )
        if command is not None and shutil.which(command[0]) is None:
            raise ConfigError(f"rollout.agent_loop_args: command: there is no program {command[0]!r}")
        self._function: AgentFunction | None = None
        if agent is not None:
            self._function = load_object(agent, what="agent")
            if not callable(self._function):
                raise ConfigError(f"rollout.agent_loop_args: agent {agent!r} is no function")
        self._command = tuple(command or ())
        self._name = agent or self._command[0]
        self._reader = None if parser is None else CallReader(load_parser(parser))
        self._parser_name = parser
        self._opens_thought = opens_thought
        self._endpoint = Endpoint(host, port, model=model, max_body_bytes=max_body_bytes)
        self._serving = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Serve for the length of a run, so that whoever calls after its trajectory's end is told so."""
        await self._serving.enter_async_context(self._endpoint.serving())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._serving.aclose()

    def check(self, chat_template: str) -> list[str]:
        """What `async-rl check` says of it."""
        try:
            known = self._parser_name or f"{recognise(chat_template)}, recognised from the chat template"
        except ConfigError as error:
            known = f"none, agents cannot call tools: {error}"
        return [f"agent: {self._name}", f"tool-call parser: {known}"]

    async def run(self, task: Task, session: Session) -> StopReason | None:
        """See `AgentLoop.run`."""
        if self._reader is None:
            with suppress(ConfigError):  # an agent without tools needs none
                self._reader = CallReader(load_parser(recognise(session.chat_template)))
        opened = self._endpoint.open(session, reader=self._reader, opens_thought=self._opens_thought)
        async with opened as access:
            try:
                if self._function is None:
                    await _run_program(self._command, task, access)
                else:
                    await self._call(self._function, task, access)
            except Exception:
                if (over := access.desk.over) is None:
                    raise
                # Agents have no better answer than to give up; what was sampled counts.
                if not access.desk.has_answered:
                    raise over from None
                return "length" if isinstance(over, PromptTooLong) else "max_turns"
        return None

    async def _call(self, function: AgentFunction, task: Task, access: Access) -> None:
        async with aclosing(AgentAPI(access)) as api:
            if inspect.iscoroutinefunction(function):
                await function(task, api)
                return
            result = await call_in_thread(partial(function, task, api), name=f"agent {self._name}")
            if inspect.isawaitable(result):
                await result


class CallReader:
    """A parser as the endpoint wants it; see `async_rl.openai_api.answers.Reader`."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    def content_so_far(self, text: str) -> int:
        """See `Reader`."""
        return self._parser.content_so_far(text)

    def read(
        self, text: str, tools: Sequence[dict[str, Any]]
    ) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """See `Reader`; a call that cannot be read leaves all of the text as it is."""
        parsed = self._parser.parse(text, tools)
        calls: list[tuple[str, dict[str, Any]]] = []
        for call in parsed.calls:
            if isinstance(call, MalformedCall):
                return text, []
            calls.append((call.name, call.arguments))
        return parsed.content, calls


async def _run_program(command: Sequence[str], task: Task, access: Access) -> None:
    """Run an agent that is a program, and end it with all it started, however it ends.

    Raises:
        AgentLoopError: It fails; with the end of what it wrote.
    """
    process = _start_program(command, task, access)
    try:
        code, tail = await call_in_thread(partial(_see_through, process), name=f"agent {command[0]}")
    finally:
        _kill_group(process)
    if code:
        said = tail.decode(errors="replace").replace(access.api_key, "<key>").strip()
        raise AgentLoopError(f"agent {command[0]!r} ended with {code}: {said or 'it wrote nothing'}")


def _start_program(command: Sequence[str], task: Task, access: Access) -> subprocess.Popen[bytes]:
    """Not by asyncio, which gives no handle to a process when it is cancelled while it starts one."""
    told = {"id": task.task_id, "messages": task.messages, "metadata": task.metadata}
    with tempfile.TemporaryFile() as stdin:
        stdin.write(msgspec.json.encode(told, enc_hook=str))
        stdin.seek(0)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _DIE_WITH_DRIVER, *command],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(os.environ, access),
            start_new_session=True,  # a group of its own, to be killed as one
        )


def _see_through(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    """Read what a program writes until it ends, and end what it left behind; its exit code and last words."""
    assert process.stdout is not None
    output, handle, tail, polled = process.stdout.fileno(), os.pidfd_open(process.pid), b"", select.poll()
    polled.register(output, select.POLLIN)
    polled.register(handle, select.POLLIN)
    try:
        while True:
            ready = {descriptor for descriptor, _ in polled.poll()}
            if handle in ready:
                polled.unregister(handle)
                _kill_group(process)  # what still holds the pipe open
            if output in ready:
                if not (data := os.read(output, 1 << 16)):
                    return process.wait(), tail
                tail = (tail + data)[-_TAIL_BYTES:]
    finally:
        os.close(handle)
        process.stdout.close()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # else its number may be another's by now
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _environment(ours: Mapping[str, str], access: Access) -> dict[str, str]:
    """Ours without what is not an agent's, and where the policy is to be found."""
    kept = {name: value for name, value in ours.items() if not name.startswith(_OURS)}
    return kept | {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "OPENAI_MODEL": access.model,
    }


def _openai() -> Any:
    try:
        import openai
    except ModuleNotFoundError as error:
        raise EnvironmentNotReady(
            "api.client needs the package openai: pip install 'async-rl[openai]', or call api.base_url with "
            "another client"
        ) from error
    return openai
