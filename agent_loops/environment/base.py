"""The interface of environments, and how `rollout.agent_loop_args` names one."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from types import ModuleType
from typing import Any, ClassVar, Final

import msgspec

from async_rl.errors import EnvironmentNotReady
from async_rl.types import Task

ADAPTERS: Final = {
    "gymnasium": "agent_loops.environment.gymnasium:GymnasiumEnvironment",
    "harbor": "agent_loops.environment.harbor:HarborEnvironment",
    "openenv": "agent_loops.environment.openenv:OpenEnvEnvironment",
    "verifiers": "agent_loops.environment.verifiers:VerifiersLoop",
}
"""The environments that have a short name."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment answers to a reset or an action."""

    text: str = ""
    """What the policy reads next."""
    reward: float = 0.0
    """The reward of the action."""
    terminated: bool = False
    """The episode has reached its end."""
    truncated: bool = False
    """The environment ends the episode before that, at a limit of its own."""
    is_invalid: bool = False
    """The action could not be read or was refused; the text says why."""
    parts: dict[str, float] = {}
    """Values that are recorded beside the reward. Later observations replace those of the same names."""

    @property
    def has_ended(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


class Environment(ABC):
    """One episode of an environment.

    `EnvironmentLoop` makes one for each trajectory, with the arguments of the config, and closes it in any
    case. It also makes one when the run starts, only to check the arguments, so a constructor opens nothing.

    An error of the environment fails the attempt, which is repeated; it is never a reward of 0. What the
    policy did wrong is no error: answer it with an observation that `is_invalid`.

    Example:
        >>> class Guess(Environment):
        ...     async def reset(self, task):
        ...         return Observation(text="Guess a digit.")
        ...
        ...     async def step(self, action):
        ...         return Observation(reward=float("7" in action), terminated=True)
        >>> (await Guess().step("I say 7.")).reward
        1.0
    """

    bounds_steps: ClassVar[bool] = False
    """Whether its methods keep to time limits themselves; otherwise each has `timeout_s`."""

    timeout_s: float = 30.0
    """The longest reset or step: `rollout.tool_timeout_s`, which the loop sets before `reset`."""

    shared: Any = None
    """What `make_shared` has returned for the run, which the loop sets before `reset`."""

    def make_shared(self) -> AbstractAsyncContextManager[Any] | None:
        """Return what all episodes of a process share; the loop enters it as long as the run lasts."""
        return None

    @abstractmethod
    async def reset(self, task: Task) -> Observation:
        """Begin the episode of a task, and return what is appended to the task's messages."""

    @abstractmethod
    async def step(self, action: str) -> Observation:
        """Act as the policy wrote."""

    async def finish(self) -> Observation:
        """Return the outcome of an episode that ends before the environment's end: the policy's budget is
        used up. Its text is not read.
        """
        return Observation()

    async def close(self) -> None:
        """Release what the episode holds. It is called once, also after errors and cancellations."""
        return


def import_package(name: str, version: str) -> ModuleType:
    """Import the package of an adapter.

    Raises:
        EnvironmentNotReady: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name != package:
            raise
        raise EnvironmentNotReady(
            f"the environment needs the package {package}: run `pip install '{package}{version}'` in the "
            "environment of async-rl"
        ) from error
