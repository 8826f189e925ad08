"""Environments of Gymnasium, played as text.

**Source**: `gymnasium.Env` (Gymnasium 1.4): `reset(seed, options)` gives an observation, `step(action)` gives
observation, reward, terminated and truncated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from agent_loops.environment.base import Environment, Observation, import_package
from async_rl.errors import ConfigError
from async_rl.runtime.loading import load_object
from async_rl.runtime.threads import call_in_thread
from async_rl.types import Task

VERSION: Final = ">=1.0"
_THREAD: Final = "gymnasium"
_HIGHLIGHT: Final = re.compile(r"\x1b\[[0-9;]*m(.+?)\x1b\[0m", re.DOTALL)
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class GymnasiumEnvironment(Environment):
    """One episode of an environment that Gymnasium has registered.

    The seed is the task's `seed`, and the options of the reset are its `options`, if it has them. Calls run
    in threads. An action that cannot be read is answered with what was expected, and does not move the
    environment.

    Args:
        id: The environment, such as `FrozenLake-v1`, or `module:FrozenLake-v1` to import a module first.
        make: Other arguments of `gymnasium.make`. With `render_mode: ansi` the policy reads what `render`
            draws; marked characters are put into brackets.
        actions: Names of discrete actions, in their order: the policy may write them instead of numbers.
        observation: `module:function`, which returns the text of `(observation, env)`.
        action: `module:function`, which returns the action of `(text, env)`, or raises ValueError with what
            the policy shall read.
        invalid_reward: The reward of an action that cannot be read.

    Raises:
        ConfigError: A function does not exist.
        EnvironmentNotReady: Gymnasium is not installed.
    """

    def __init__(
        self,
        id: str,
        make: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        observation: str | None = None,
        action: str | None = None,
        invalid_reward: float = 0.0,
    ) -> None:
        self._gymnasium = import_package("gymnasium", VERSION)
        self._make = partial(self._gymnasium.make, id, **(make or {}))
        self._text_of: Callable[[Any, Any], str] = observation_text
        if observation is not None:
            self._text_of = load_object(observation, what="observation")
        self._action_of: Callable[[str, Any], Any] = partial(read_action, names=tuple(actions))
        if action is not None:
            self._action_of = load_object(action, what="action")
        if actions and action is not None:
            raise ConfigError("rollout.agent_loop_args: expected either actions or action")
        self._invalid_reward = invalid_reward
        self._env: Any = None

    async def reset(self, task: Task) -> Observation:
        """Implements `Environment.reset`."""

        def begin() -> str:
            self._env = self._make()
            metadata = task.metadata
            seen, _ = self._env.reset(seed=metadata.get("seed"), options=metadata.get("options"))
            return self._text_of(seen, self._env)

        return Observation(text=await call_in_thread(begin, name=_THREAD))

    async def step(self, action: str) -> Observation:
        """Implements `Environment.step`."""

        def act() -> Observation:
            try:
                chosen = self._action_of(action, self._env)
            except ValueError as error:
                return Observation(
                    text=f"Invalid action: {error}", reward=self._invalid_reward, is_invalid=True
                )
            seen, reward, terminated, truncated, _ = self._env.step(chosen)
            return Observation(
                text=self._text_of(seen, self._env),
                reward=float(reward),
                terminated=bool(terminated),
                truncated=bool(truncated),
            )

        seen: Observation = await call_in_thread(act, name=_THREAD)
        return seen

    async def close(self) -> None:
        """Implements `Environment.close`."""
        if self._env is not None:
            await call_in_thread(self._env.close, name=_THREAD)


def observation_text(observation: Any, env: Any) -> str:
    r"""Return what the policy reads: what the environment draws as text, or the observation.

    Arrays become lists. Terminal colours that mark characters become brackets.

    Example:
        >>> class Drawing:
        ...     render_mode = "ansi"
        ...
        ...     def render(self):
        ...         return "\x1b[41mS\x1b[0mFFG"
        >>> observation_text(0, Drawing())
        '[S]FFG'
    """
    if env.render_mode == "ansi":
        return _ESCAPE.sub("", _HIGHLIGHT.sub(r"[\1]", env.render())).strip()
    return observation if isinstance(observation, str) else json.dumps(observation, default=_plain)


def read_action(text: str, env: Any, names: Sequence[str] = ()) -> Any:
    """Return the action that a text names, without thoughts: the last name, number or list of it.

    Args:
        text: The turn of the policy.
        env: Its `action_space` says what an action is.
        names: Names of discrete actions, in their order.

    Raises:
        ValueError: It names none that the environment knows.
    """
    answer, space = text.rpartition("</think>")[2], env.action_space
    kind = type(space).__name__
    if kind == "Text":
        action: Any = answer.strip()
    elif kind == "Discrete":
        words = [*map(re.escape, sorted(names, key=len, reverse=True)), r"-?\d+"]
        found = re.findall(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)", answer, re.IGNORECASE)
        known = {name.lower(): int(space.start) + number for number, name in enumerate(names)}
        action = known.get(found[-1].lower(), found[-1]) if found else None
        action = int(action) if action is not None and len(str(action)) < 20 else None
    else:
        action = _last_list(answer, space)
    if action is None or not space.contains(action):
        expected = f"one of {', '.join(names)}" if names else f"an action of {space}"
        raise ValueError(f"expected {expected}")
    return action


def _last_list(text: str, space: Any) -> Any:
    """Return the last list of numbers in a text, in the type of the space, or None."""
    import numpy as np

    for found in reversed(re.findall(r"\[[-+\d.,eE\s\[\]]*\]|-?\d+(?:\.\d+)?", text)):
        try:
            return np.array(json.loads(found), dtype=space.dtype).reshape(space.shape)
        except (ValueError, TypeError):
            continue
    return None


def _plain(value: Any) -> Any:
    """Return an array or a scalar of NumPy as JSON has it."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
