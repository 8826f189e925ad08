"""The agent loops of a run: by dotted path, or by a short name of the config."""

from __future__ import annotations

import asyncio
import inspect
import logging
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

from async_rl.config import NamedLoop, RolloutConfig
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.observability.metrics import Metrics
from async_rl.runtime.loading import call_problem, load_object
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.user_processes import ProcessScope, settle
from async_rl.runtime.waits import waiting

log = logging.getLogger(__name__)


class AgentLoops:
    """Makes each agent loop once, and enters those that are async context managers.

    A loop's `run` keeps the state of a trajectory in local variables. A loop whose trajectories share
    something (connections, a pool of processes) is an async context manager: a task of its own enters it
    before its first trajectory, and exits it when the block of `AgentLoops` ends. An error on entry ends the
    run.
    """

    def __init__(self, config: RolloutConfig, metrics: Metrics | None = None) -> None:
        """Make the default agent loop.

        Args:
            config: The settings of rollouts.
            metrics: Counts the processes that loops leave behind.

        Raises:
            ConfigError: The loop cannot be loaded or made.
        """
        self._config = config
        self._made: dict[str, Any] = {}
        self._ready: dict[str, asyncio.Event] = {}
        self._keepers = Nursery()
        self._metrics = metrics or Metrics()
        self._processes = ProcessScope("the agent loops of the run", self.count_reaped)
        self._swallowing: set[str] = set()
        """Loops that were reported because they swallow cancellations."""
        self.get_loop(config.agent_loop)

    def get_loop(self, name: str | None) -> Any:
        """Return the agent loop of a dotted path or a name of `rollout.agent_loops`; None is the default.

        Raises:
            ConfigError: The name is unknown or not declared, or the loop cannot be loaded or made.
        """
        name = name or self._config.agent_loop
        if name not in self._made:
            self._made[name] = self._make_loop(name)
        return self._made[name]

    async def entered_loop(self, name: str | None) -> Any:
        """Return the same loop as `get_loop`, once it is entered."""
        loop = self.get_loop(name)
        if not isinstance(loop, AbstractAsyncContextManager):
            return loop
        name = name or self._config.agent_loop
        if name not in self._ready:
            self._ready[name] = asyncio.Event()
            with self._processes.active():
                self._keepers.start_task(f"agent loop {name}", self._keep_loop_open(loop, self._ready[name]))
        if not self._ready[name].is_set():
            with waiting("agent loop", name):
                await self._ready[name].wait()
        return loop

    def count_reaped(self, kind: str, reason: str) -> None:
        """Count processes that a loop or an attempt has left behind."""
        self._metrics.user_processes_reaped_total.labels(kind, reason).inc()

    def report_swallowed_cancellation(self, name: str) -> None:
        """Tell the author of a loop, once, that it did not end when it was cancelled."""
        if name in self._swallowing:
            return
        self._swallowing.add(name)
        log.warning(
            "agent loop %s does not end when it is cancelled, so what it returns then is discarded: let "
            "asyncio.CancelledError pass (write `except Exception` in place of `except:` and `except "
            "BaseException`, and `asyncio.timeout` in place of `asyncio.wait_for`); this is logged once",
            name,
        )

    async def __aenter__(self) -> Self:
        await self._keepers.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._keepers.cancel_tasks()
        try:
            await self._keepers.__aexit__(*error)
        finally:
            self._processes.end("run_ended")
            await settle()

    async def _keep_loop_open(self, loop: Any, ready: asyncio.Event) -> None:
        """Enter a loop, and exit it when the block ends."""
        async with loop:
            ready.set()
            with waiting("idle"):
                await asyncio.Event().wait()

    def _make_loop(self, name: str) -> Any:
        config = self._config
        key, named = f"rollout.agent_loops.{name}.args", config.agent_loops.get(name)
        if named is None and ":" not in name:
            known = ", ".join(sorted(config.agent_loops)) or "none"
            raise ConfigError(
                f"agent loop {name!r} is neither a dotted path nor a name of rollout.agent_loops (there: "
                f"{known}); write `module:Class`, or add rollout.agent_loops.{name}: {{loop: module:Class}}"
            )
        if named is None:
            default = name == config.agent_loop
            if not (default or config.trust_examples):
                raise ConfigError(
                    f"an example names the agent loop {name}, which the config does not declare: add "
                    f"rollout.agent_loops: {{mine: {{loop: {name}}}}} and write `mine` in the example. Or "
                    f"set rollout.trust_examples: true, which lets the dataset run any code with your rights"
                )
            named = NamedLoop(loop=name, args=config.agent_loop_args if default else {})
            key = "rollout.agent_loop_args"
        kind = load_object(named.loop, what="agent loop")
        try:
            loop = kind(**named.args)
        except AsyncRLError:
            raise
        except TypeError as error:
            raise ConfigError(f"{key}: {named.loop} cannot be made with {named.args}: {error}") from error
        except Exception as error:  # the user's constructor may raise anything
            raise ConfigError(
                f"agent loop {named.loop} cannot be made: {type(error).__name__}: {error}"
            ) from error
        _check_run(loop, named.loop)
        return loop


def _check_run(loop: Any, name: str) -> None:
    """Check that a loop has a method `async def run(self, task, session)`.

    Raises:
        ConfigError: It has none that can be called like that.
    """
    run, expected = getattr(loop, "run", None), "expected `async def run(self, task, session)`"
    if run is None:
        raise ConfigError(f"agent loop {name} has no method `run`; {expected}")
    if not inspect.iscoroutinefunction(inspect.unwrap(run)):
        raise ConfigError(f"agent loop {name}: its `run` is not async; {expected}")
    if (problem := call_problem(run, "task", "session")) is not None:
        raise ConfigError(f"agent loop {name}: its `run` cannot be called: {problem}; {expected}")
