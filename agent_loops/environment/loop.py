"""The agent loop that plays environments, and the reward that they give."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Self

from agent_loops.base import AgentLoop
from agent_loops.environment.base import ADAPTERS, Environment, Observation
from async_rl.errors import AgentLoopError, AsyncRLError, ConfigError, OutOfTurns, PromptTooLong
from async_rl.rollout.session.api import Session
from async_rl.runtime.loading import load_object
from async_rl.runtime.serving_clock import serving_timeout
from async_rl.runtime.supervision import finished
from async_rl.runtime.waits import waiting
from async_rl.types import Completion, StopReason, Task

CLOSE_S: Final = 20.0
"""How long an environment may release what it holds: less than the 30 s that a cancelled loop has."""
_MAX_TURNS: Final = 32


class EnvironmentLoop(AgentLoop):
    """Plays one episode of an environment: each turn of the policy is an action.

    The first observation is appended to the task's messages; each later one is a user message. Rewards before
    the end of the episode are those of their turns. The reward of the last action is reported, for
    `environment_reward`, with `return` (the sum of all rewards), `steps` and `invalid_actions`.

    Args:
        environment: A name in `agent_loops.environment.base.ADAPTERS`, or `module:Class` of an `Environment`
            or of an agent loop that drives the policy itself.
        max_turns: The most actions.
        stop: Strings that end an action, such as `</action>`.
        args: Arguments of the environment.

    Raises:
        ConfigError: There is no such environment, or it refuses its arguments.
        EnvironmentNotReady: Its package is not installed.
    """

    descriptors_per_trajectory = 8
    """Of an environment of HTTP or with processes; `async-rl check` adds them up."""

    def __init__(
        self, environment: str, max_turns: int = _MAX_TURNS, stop: Sequence[str] = (), **args: Any
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"rollout.agent_loop_args: max_turns is {max_turns}; expected at least 1")
        if environment not in ADAPTERS and ":" not in environment:
            raise ConfigError(
                f"rollout.agent_loop_args: environment is {environment!r}; expected one of "
                f"{', '.join(ADAPTERS)}, or `module:Class`"
            )
        self._name = environment
        self._max_turns = max_turns
        self._stop = tuple(stop)
        self._args = args
        self._kind = load_object(ADAPTERS.get(environment, environment), what="environment")
        made = self._made()
        if not isinstance(made, AgentLoop | Environment):
            raise ConfigError(
                f"rollout.agent_loop_args: environment {environment!r} is a {type(made).__name__}; expected "
                "an Environment or an AgentLoop"
            )
        self._driver = made if isinstance(made, AgentLoop) else None
        """The loop of an environment that drives the policy."""
        self._shared = made.make_shared() if isinstance(made, Environment) else made
        self.fixed_port = getattr(self._driver, "fixed_port", 0)
        if self._driver is not None and (max_turns != _MAX_TURNS or stop):
            raise ConfigError(
                f"rollout.agent_loop_args: max_turns and stop do not go with environment {environment!r}, "
                "which asks for its turns itself; see rollout.max_turns"
            )

    async def __aenter__(self) -> Self:
        """Enter what episodes share, or the loop of an environment that drives the policy."""
        if isinstance(self._shared, AbstractAsyncContextManager):
            await self._shared.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        if isinstance(self._shared, AbstractAsyncContextManager):
            await self._shared.__aexit__(*error)

    def check(self, chat_template: str) -> list[str]:
        """Return the findings for `async-rl check`."""
        if self._driver is not None:
            check = getattr(self._driver, "check", None)
            return list(check(chat_template)) if check is not None else []
        return [f"environment: {self._name}, at most {self._max_turns} turns"]

    async def run(self, task: Task, session: Session) -> StopReason | None:
        """Implements `AgentLoop.run`."""
        if self._driver is not None:
            return await self._driver.run(task, session)
        environment = self._made()
        environment.shared = self._shared
        episode = _Episode(self._name, environment, session)
        try:
            return await self._play(episode, task, session)
        finally:
            await finished(episode.environment.close(), limit_s=CLOSE_S)

    async def _play(self, episode: _Episode, task: Task, session: Session) -> StopReason:
        first = await episode.answer("reset", episode.environment.reset(task))
        if first.has_ended:
            raise AgentLoopError(f"environment {self._name} has ended before the first action")
        session.start(_with_observation(task.messages, first.text))
        try:
            for turns_left in reversed(range(self._max_turns)):
                turn = await session.generate(stop=self._stop)
                if turn.finish_reason == "length":
                    return await episode.finish("length")
                seen = await episode.act(turn.text)
                if seen.has_ended:
                    return "completed" if seen.terminated else "max_turns"
                if turns_left:
                    session.add_messages([{"role": "user", "content": seen.text}])
        except (PromptTooLong, OutOfTurns) as error:
            if not session.num_turns:
                raise
            return await episode.finish("length" if isinstance(error, PromptTooLong) else "max_turns")
        return await episode.finish("max_turns")

    def _made(self) -> Any:
        """Return a new environment, or the loop of one.

        Raises:
            ConfigError: It refuses its arguments.
        """
        try:
            return self._kind(**self._args)
        except AsyncRLError:
            raise
        except Exception as error:  # a user's constructor may raise anything
            raise ConfigError(
                f"rollout.agent_loop_args: environment {self._name!r} cannot be made with {self._args}: "
                f"{type(error).__name__}: {error}"
            ) from error


class _Episode:
    """One episode, and what has been counted of it."""

    def __init__(self, name: str, environment: Environment, session: Session) -> None:
        self.environment = environment
        environment.timeout_s = session.tool_timeout_s
        self._name = name
        self._session = session
        self._steps = self._invalid = 0
        self._return = 0.0

    async def act(self, action: str) -> Observation:
        """Take a step, reward its turn or the whole episode, and return the observation."""
        begin = time.monotonic()
        seen = await self.answer("step", self.environment.step(action))
        self._steps += 1
        self._invalid += seen.is_invalid
        self._session.record_tool_call(
            error=seen.is_invalid, tool=f"environment {self._name}", seconds=time.monotonic() - begin
        )
        if not seen.has_ended:
            self._session.reward_turn(seen.reward)
        self._report(seen, outcome=seen.reward if seen.has_ended else 0.0)
        return seen

    async def finish(self, why: StopReason) -> StopReason:
        """End an episode that the environment has not ended."""
        seen = await self.answer("finish", self.environment.finish())
        self._report(seen, outcome=seen.reward)
        return why

    def _report(self, seen: Observation, *, outcome: float) -> None:
        """Report the outcome; the reward of an action that does not end the episode is that of its turn."""
        self._return += seen.reward
        counts = {"return": self._return, "steps": self._steps, "invalid_actions": self._invalid}
        self._session.report(**{**seen.parts, **counts, "reward": outcome})

    async def answer(self, what: str, call: Coroutine[Any, Any, Observation]) -> Observation:
        """Return what the environment answers.

        Raises:
            AgentLoopError: It raised, took too long, or answered something else.
        """
        name, limit_s = f"environment {self._name}", self.environment.timeout_s
        limit = asyncio.timeout(None) if self.environment.bounds_steps else serving_timeout(limit_s)
        try:
            async with limit as scope, waiting("tool", name, scope=scope):
                seen = await call
        except TimeoutError as error:
            why = f"raised TimeoutError: {error}"
            if scope.expired():
                why = f"took longer than rollout.tool_timeout_s = {limit_s:g}"
            raise AgentLoopError(f"{name}: {what} {why}") from error
        except AsyncRLError:
            raise
        except Exception as error:
            raise AgentLoopError(f"{name}: {what} raised {type(error).__name__}: {error}") from error
        if not isinstance(seen, Observation):
            raise AgentLoopError(f"{name}: {what} returned a {type(seen).__name__}; expected an Observation")
        return seen


def environment_reward(task: Task, completion: Completion) -> dict[str, float]:
    """Return what the environment gave for its last action, with all that it reported.

    Raises:
        ValueError: The agent loop reported no reward, so that any would be wrong.
    """
    if "reward" not in completion.reported:
        raise ValueError(
            "the agent loop has reported no reward: environment_reward belongs to "
            "agent_loops.environment:EnvironmentLoop, or to a loop that calls session.report(reward=…)"
        )
    return dict(completion.reported)


def _with_observation(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the prompt: chat templates refuse two messages of the user in a row, so they are joined."""
    *before, last = messages
    if not text:
        return list(messages)
    if last["role"] == "user" and isinstance(last["content"], str):
        return [*before, {**last, "content": f"{last['content']}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]
