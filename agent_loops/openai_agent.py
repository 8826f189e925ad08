"""Runs any agent that uses OpenAI's or Anthropic's API, as an agent loop: docs/guide/agents.md.

```
 run ──► Endpoint.open_trajectory(session) ──► agent(task, api)      async function, or a sync one in a thread
            key, URL                program               OPENAI_BASE_URL, OPENAI_API_KEY
```
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import shutil
import ssl
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self
from urllib.request import getproxies_environment

import msgspec
from msgspec import Meta

from agent_loops.agent_program import (
    NEEDS_FAILED,
    AgentProgram,
    last_error_text,
    program_name,
    without_proxy,
)
from agent_loops.base import AgentLoop
from agent_loops.parsing import load_parser, recognise
from async_rl.errors import AgentLoopError, ConfigError, EnvironmentNotReady, PromptTooLong, ToolBroken
from async_rl.openai_api.endpoint import MAX_BODY_BYTES, Endpoint, EndpointAccess
from async_rl.rollout.session.api import Session
from async_rl.runtime.addresses import is_loopback
from async_rl.runtime.loading import load_object
from async_rl.runtime.threads import call_in_thread
from async_rl.runtime.tls import load_certificate
from async_rl.types import StopReason, Task

if TYPE_CHECKING:
    import openai

log = logging.getLogger(__name__)


class AgentAPI:
    """Gives an agent function access to the policy.

    Example:
        >>> async def agent(task, api):
        ...     await api.client.chat.completions.create(model=api.model, messages=task.messages)
    """

    def __init__(self, access: EndpointAccess, certificate: str | None = None) -> None:
        self._certificate = certificate
        self.base_url = access.base_url
        """Ends in `/v1`."""
        self.root_url = access.root_url
        """The base URL of Anthropic's clients, which add `/v1` themselves."""
        self.api_key = access.api_key
        self.session_url = access.session_url
        """`base_url` with the key in it, for agents without a setting for the key."""
        self.model = access.model
        self._client: openai.AsyncOpenAI | None = None
        self._sync_client: openai.OpenAI | None = None

    @property
    def client(self) -> openai.AsyncOpenAI:
        """OpenAI's own client, for async agents.

        It has no time limit, because a weight update may take a while and `rollout.trajectory_timeout_s`
        bounds the whole trajectory.
        """
        if self._client is None:
            http = _openai().DefaultAsyncHttpxClient(**http_settings(self._certificate))
            self._client = _openai().AsyncOpenAI(
                base_url=self.base_url, api_key=self.api_key, timeout=None, http_client=http
            )
        return self._client

    @property
    def sync_client(self) -> openai.OpenAI:
        """OpenAI's own client for sync agents, which run in threads."""
        if self._sync_client is None:
            http = _openai().DefaultHttpxClient(**http_settings(self._certificate))
            self._sync_client = _openai().OpenAI(
                base_url=self.base_url, api_key=self.api_key, timeout=None, http_client=http
            )
        return self._sync_client

    async def aclose(self) -> None:
        """Close the clients' connections."""
        if self._client is not None:
            await self._client.close()
        if self._sync_client is not None:
            self._sync_client.close()


AgentFunction = Callable[[Task, AgentAPI], Any | Awaitable[Any]]


class _Serving(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How `OpenAIAgentLoop` serves its API."""

    opens_thought: bool
    model: Annotated[str, Meta(min_length=1)] = "policy"
    """The name under which the policy is served."""
    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    """Address to bind to. Agents on other hosts need one that is not loopback; `0.0.0.0` binds to all."""
    port: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    """The port; 0 takes a free one. Rollout workers of one node cannot share one."""
    public_host: Annotated[str, Meta(min_length=1)] | None = None
    """The name or address in the URLs that agents receive; by default `host`, or the node's address if that
    means all."""
    tls_certificate: str | None = None
    """PEM file of a certificate: the API is served over TLS."""
    tls_key: str | None = None
    """PEM file of its key."""
    max_body_bytes: Annotated[int, Meta(gt=0)] = MAX_BODY_BYTES
    """The largest request body."""

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both")


class OpenAIAgentLoop(AgentLoop):
    """Runs an agent that queries the policy through OpenAI's API and knows nothing about training.

    Its requests become the trajectory: each answer is a turn of the policy with recorded tokens, log-probs,
    routing and weight versions. The reward is computed on the last answer.

    Args:
        agent: Dotted path of a function `agent(task, api)` with an `AgentAPI`: async, or sync and run in a
            thread. Its result is ignored.
        command: A program instead, with its arguments. It receives OPENAI_BASE_URL, OPENAI_API_KEY and
            OPENAI_MODEL in its environment, and the same of ANTHROPIC; on its standard input the task as JSON
            (`id`, `messages`, `metadata`; not the answer). It and its child processes are killed when the
            trajectory ends.
        nonzero_exit: What follows from a program's exit code above 0: `fail` fails the attempt, `zero` scores
            what the policy wrote with 0, `score` ignores the code. A program that asked nothing, that a
            signal killed, or that ends with `NEEDS_FAILED`, always fails.
        parser: Format of tool calls: a name in `agent_loops.parsing.PARSERS`, or `module:Class`; by default
            the format that the model's chat template teaches.
        opens_thought: Whether the chat template itself opens `<think>` for each turn.
        constraints: What follows from requests that force what the policy writes (`response_format`,
            `tool_choice: required`) where that cannot be exact: `refuse`, or `ignore` what they force.
        serving: How the API is served: model, host, port, public_host, tls_certificate, tls_key and
            max_body_bytes.

    Raises:
        ConfigError: Neither or both of agent and command are given, one does not exist, or an argument has
            another type or range.
    """

    _needs_agent: ClassVar[bool] = True
    """Whether `agent` or `command` is expected; a subclass has another kind of agent."""

    _runs_here = True
    """Whether the command is a program of this host."""

    descriptors_per_trajectory = 7
    """Both ends of two connections, or one and a program's pipes; `async-rl check` adds them up."""

    def __init__(
        self,
        agent: str | None = None,
        command: Sequence[str] | None = None,
        nonzero_exit: Literal["fail", "zero", "score"] = "fail",
        parser: str | None = None,
        opens_thought: bool = False,
        constraints: Literal["refuse", "ignore"] = "refuse",
        **serving: Any,
    ) -> None:
        if self._needs_agent and (agent is None) == (command is None):
            raise ConfigError(
                "rollout.agent_loop_args: expected either agent (`module:function`) or command (a list)"
            )
        if isinstance(command, str) or (command is not None and not command):
            raise ConfigError(
                f"rollout.agent_loop_args: command is {command!r}; expected a list, the program first"
            )
        if command is not None and self._runs_here and shutil.which(command[0]) is None:
            raise ConfigError(f"rollout.agent_loop_args: command: there is no program {command[0]!r}")
        self._function: AgentFunction | None = None
        if agent is not None:
            self._function = load_object(agent, what="agent")
            if not callable(self._function):
                raise ConfigError(f"rollout.agent_loop_args: agent {agent!r} is not a function")
        self._command = tuple(command or ())
        self._nonzero_exit = nonzero_exit
        self._name = agent or (program_name(self._command) if self._command else "elsewhere")
        self._reader = None if parser is None else load_parser(parser)
        self._parser_name = parser
        self._opens_thought = opens_thought
        if constraints not in ("refuse", "ignore"):
            raise ConfigError(
                f"rollout.agent_loop_args: constraints is {constraints!r}; expected refuse or ignore"
            )
        self._ignores_constraints = constraints == "ignore"
        if nonzero_exit != "fail" and (nonzero_exit not in ("zero", "score") or command is None):
            raise ConfigError(
                f"rollout.agent_loop_args: nonzero_exit is {nonzero_exit!r}; "
                "expected fail, or for a command zero or score"
            )
        try:
            settings = msgspec.convert({"opens_thought": opens_thought, **serving}, _Serving)
        except msgspec.ValidationError as error:
            raise ConfigError(f"rollout.agent_loop_args: {error}") from error
        tls: ssl.SSLContext | None = None
        if settings.tls_certificate is not None and settings.tls_key is not None:
            tls = load_certificate(Path(settings.tls_certificate), Path(settings.tls_key))
        self.fixed_port = settings.port
        """The port that only one process of a node can serve at; 0 if it takes a free one."""
        self._certificate = settings.tls_certificate
        self._is_open = not is_loopback(settings.host)
        self.endpoint = Endpoint(
            settings.host,
            settings.port,
            public_host=settings.public_host,
            tls=tls,
            model=settings.model,
            max_body_bytes=settings.max_body_bytes,
        )
        self._serving = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Serve until the end of the run, so that late requests of a finished trajectory get an answer."""
        if self._function is not None:
            with suppress(EnvironmentNotReady):  # an agent with another client needs none
                await asyncio.to_thread(http_settings, self._certificate)
        url = await self._serving.enter_async_context(self.endpoint.serving())
        if self._function is not None and getproxies_environment():  # its own clients read them when they ask
            os.environ.update(without_proxy(os.environ, url))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._serving.aclose()

    def check(self, chat_template: str) -> list[str]:
        """Return the findings for `async-rl check`."""
        try:
            known = self._parser_name or f"{recognise(chat_template)}, recognised from the chat template"
        except ConfigError as error:
            known = f"none, agents cannot call tools: {error}"
        findings = [f"agent: {self._name}", f"tool-call parser: {known}"]
        if self._is_open:
            served = (
                "TLS"
                if self._certificate
                else "plain HTTP: prompts, answers and keys are readable on the way"
            )
            findings.append(f"other hosts reach the OpenAI API with a trajectory's key, over {served}")
        return findings

    async def run(self, task: Task, session: Session) -> StopReason | None:
        """Implements `AgentLoop.run`."""
        if not self._command:
            return await self._run_agent(task, session)

        async def make(access: EndpointAccess) -> AgentProgram:
            return AgentProgram(self._command, access, task)

        return await self._run_agent(task, session, make)

    async def _run_agent(
        self,
        task: Task,
        session: Session,
        make: Callable[[EndpointAccess], Awaitable[AgentProgram]] | None = None,
    ) -> StopReason | None:
        """Run the agent: the function, or the program that `make` returns."""
        if self._reader is None:
            with suppress(ConfigError):  # an agent without tools needs none
                self._reader = load_parser(recognise(session.chat_template))
        opened = self.endpoint.open_trajectory(
            session,
            reader=self._reader,
            opens_thought=self._opens_thought,
            ignores_constraints=self._ignores_constraints,
        )
        async with opened as access:
            program = None if make is None else await make(access)
            handler = access.handler
            reason: StopReason | None = None
            try:
                if program is None:
                    reason = await self._call(task, access, session)
                elif code := await program.run():
                    if code == NEEDS_FAILED:
                        raise ToolBroken(program.failure)
                    is_scored = code > 0 and handler.has_answered and handler.exceeded is None
                    if self._nonzero_exit == "fail" or not is_scored:
                        raise AgentLoopError(program.failure)
                    if self._nonzero_exit == "zero":
                        log.info("%s; it is scored 0 (nonzero_exit)", program.failure)
                        return "failed"
                if not handler.has_answered:
                    said = _what_happened(program, access) or "it sent none"
                    raise AgentLoopError(
                        f"agent {self._name!r} has ended, and no request of it was answered: {said}"
                    )
            except asyncio.CancelledError:  # at the time limit, whose error shows the status
                said = _what_happened(program, access)
                session.status = "; ".join(filter(None, (said, session.status)))
                raise
            except Exception as error:
                if (exceeded := handler.exceeded) is None:
                    _hide_key(error, access.api_key)
                    told = "".join(traceback.format_exception(error))
                    if access.api_key in told:  # a class may write its text from other things than `args`
                        text = f"agent {self._name!r} raised {type(error).__name__}: {error}"
                        hidden = AgentLoopError(text.replace(access.api_key, "<key>"))
                        hidden.add_note(told.replace(access.api_key, "<key>"))
                        raise hidden from None
                    raise
                # An agent that is out of budget can only give up; what was sampled counts.
                if not handler.has_answered:
                    raise exceeded from None
                return "length" if isinstance(exceeded, PromptTooLong) else "max_turns"
        return "length" if handler.is_cut else reason

    async def _call(self, task: Task, access: EndpointAccess, session: Session) -> StopReason | None:
        """Let the agent do the task; a subclass has another kind of agent, which may know why it ended."""
        function = self._function
        assert function is not None
        async with aclosing(AgentAPI(access, self._certificate)) as api:
            if inspect.iscoroutinefunction(function):
                await function(task, api)
                return None
            result = await call_in_thread(partial(function, task, api), name=f"agent {self._name}")
            if inspect.isawaitable(result):
                await result
        return None


def _what_happened(program: AgentProgram | None, access: EndpointAccess) -> str:
    return last_error_text(access) if program is None else program.failure


def _hide_key(error: BaseException, key: str) -> None:
    """Remove a key from the texts of an error, its parts and causes: they are logged, and may quote URLs."""
    found, left = set[int](), [error]
    while left:
        each = left.pop()
        if id(each) in found:
            continue
        found.add(id(each))
        with suppress(Exception):  # the class may refuse it
            each.args = tuple(arg.replace(key, "<key>") if isinstance(arg, str) else arg for arg in each.args)
        left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        left += (other for other in (each.__cause__, each.__context__) if other is not None)


@functools.cache
def http_settings(certificate: str | None = None) -> dict[str, Any]:
    """Return what the HTTP clients of all agents share.

    A client by itself reads all certificates anew, which takes 32 to 50 ms of the event loop. The endpoint is
    called directly, whatever proxy the environment names.

    Args:
        certificate: PEM file of the endpoint's own certificate, which need not come from a known authority.
    """
    _openai()
    import httpx

    verify = httpx.create_ssl_context()
    if certificate is not None:
        verify.load_verify_locations(certificate)
    return {"verify": verify, "trust_env": False}


def _openai() -> Any:
    try:
        import openai
    except ModuleNotFoundError as error:
        raise EnvironmentNotReady(
            "api.client needs the package openai: run `pip install -e '.[openai]'` in async_rl's checkout, "
            "or call api.base_url with another client"
        ) from error
    return openai
