"""The agent loops of a run: by dotted path, or by a short name of the config."""

from __future__ import annotations

from typing import Any

from async_rl.config import NamedLoop, RolloutConfig
from async_rl.errors import ConfigError
from async_rl.loading import load_object


class AgentLoops:
    """Makes each agent loop once; `run` keeps its state in its own variables.

    Example:
        >>> loops = AgentLoops(config.rollout)
        >>> await loops.of(task.agent_loop).run(task, session)
    """

    def __init__(self, config: RolloutConfig) -> None:
        """Make the default one.

        Raises:
            ConfigError: It cannot be loaded or made.
        """
        self._config = config
        self._made: dict[str, Any] = {}
        self.of(config.agent_loop)

    def of(self, name: str | None) -> Any:
        """The agent loop of a dotted path or a name of `rollout.agent_loops`; None is the default.

        Raises:
            ConfigError: There is none of that name, or it cannot be loaded or made.
        """
        name = name or self._config.agent_loop
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Any:
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
            named = NamedLoop(loop=name, args=config.agent_loop_args if default else {})
            key = "rollout.agent_loop_args"
        kind = load_object(named.loop, what="agent loop")
        try:
            return kind(**named.args)
        except TypeError as error:
            raise ConfigError(f"{key}: {named.loop} cannot be made with {named.args}: {error}") from error
