"""Further models of a run, on engines that are never updated: teachers and judges.

```
 models: {NAME: ...} ─► processes ─► EnginePool ◄── HealthWatch, EngineRepair     one of each for each model
                                         ▲
                     calls of sessions and rewards, in the driver or in rollout workers
```

The classes are those of the policy's engines, so calls are balanced, fail over, and wait out a restart in the
same way. A weight update never sees these engines: it knows the policy's pool only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol

from async_rl.config import Config, SGLangEngines
from async_rl.engine_protocol import Engine
from async_rl.engines.health import HealthWatch
from async_rl.engines.pool import EnginePool
from async_rl.engines.repair import EngineRepair
from async_rl.errors import ConfigError, EngineError, VersionMismatch
from async_rl.observability.metrics import Metrics

MODEL_METRICS: Final = (
    "engine_up",
    "engine_running_requests",
    "engine_call_limit",
    "engine_quarantined_total",
    "engine_busy_total",
    "engine_restarts_total",
    "engine_stalls_total",
    "local_shortages_total",
)
"""Metrics about the machine, or with a label for the engine, whose name begins with that of its model. The
others, such as the time to the first token, are about rollouts."""


class EngineProcesses(Protocol):
    """Starts and restarts the engines of one model."""

    async def start_engines(self) -> list[Engine]:
        """Start all engines and wait until they answer."""
        ...

    async def restart_engine(self, engine_id: str) -> None:
        """Restart a failed engine and wait until it answers."""
        ...

    async def watch_engines(self, died: Callable[[str, EngineError], None]) -> None:
        """Report engines whose process ends; never returns."""
        ...


class FrozenModel:
    """The engines of one model."""

    def __init__(
        self,
        name: str,
        config: Config,
        processes: EngineProcesses,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        """Wire the parts; start nothing.

        Args:
            name: Its name in `models`.
            config: `Config.of_model` of it.
            processes: Its engines' processes.
            metrics: The metrics of the run.
            clock: Monotonic seconds.
        """
        own = Metrics().share(metrics, MODEL_METRICS)
        self.name = name
        self._config = config
        self._processes = processes
        self.pool = EnginePool(own, clock, max_calls=config.engine.max_calls, shares_all=True)
        self._health = HealthWatch(self.pool, config.engine, own, clock)
        self._repair = EngineRepair(
            self.pool,
            processes.restart_engine,
            self._verify_engine,
            config.engine,
            own,
            clock,
            seed=config.run.seed,
        )
        self._version: int | None = None

    async def start_engines(self) -> None:
        """Start the engines, and let them serve.

        Raises:
            ConfigError: A server has another model.
            EngineError: One does not answer, or serves another version of the weights than the others.
        """
        for engine in await self._processes.start_engines():
            self.pool.add_engine(engine)
            await self._verify_engine(engine.engine_id)

    @property
    def services(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """What runs beside rollouts: health checks and repairs."""
        return {
            f"watch {self.name}": lambda: self._processes.watch_engines(self.pool.quarantine_engine),
            f"health {self.name}": self._health.watch_engines,
            f"repair {self.name}": self._repair.repair_engines,
        }

    async def _verify_engine(self, engine_id: str) -> None:
        """Let an engine serve if it has the model, and the same weights as before and as the others."""
        engine = self.pool.engine(engine_id)
        health = await engine.health()
        check_served_model(self._config, engine_id, health.model_path, key=f"models.{self.name}")
        if self._version is None:
            self._version = health.weight_version
        if health.weight_version != self._version:
            raise VersionMismatch(
                f"engine {engine_id} serves weight version {health.weight_version} of the model "
                f"{self.name!r}, and it was {self._version} before: its weights must not change in a run"
            )
        self.pool.serve_engine(engine_id, self._version)


def check_served_model(config: Config, engine_id: str, serves: str, *, key: str = "model") -> None:
    """Check that an external server serves the model of the config.

    Args:
        config: The config of the engines.
        engine_id: The engine.
        serves: The path that the server reports; empty if it reports none.
        key: The setting that has the model.

    Raises:
        ConfigError: It serves another one.
    """
    external = isinstance(config.engine, SGLangEngines) and (config.engine.urls or config.engine.urls_file)
    if external and serves and Path(serves).resolve() != Path(config.model.path).resolve():
        raise ConfigError(
            f"engine {engine_id} serves {serves}, but {key}.path is {config.model.path}: start it with that "
            "model, or leave out the URLs, so that one is started here"
        )
