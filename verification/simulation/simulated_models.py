"""The engines of further models, teachers and judges, in a simulation: they die, and restarts may fail."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

from async_rl.config import Config, SimulatedEngines
from async_rl.engine_protocol import Engine, EngineFacts
from async_rl.errors import EngineError, EnvironmentNotReady
from verification.simulation.breakable_engine import BreakableEngine


class WatchedProcesses:
    """Tells a watcher about engines that are killed."""

    _died: Callable[[str, EngineError], None] | None = None

    async def watch_engines(self, died: Callable[[str, EngineError], None]) -> None:
        """Implements `EngineProcesses.watch_engines` and `Cluster.watch_engines`."""
        self._died = died
        try:
            await asyncio.Future()
        finally:
            self._died = None

    def note_death(self, engine_id: str) -> None:
        """Tell the watcher, if there is one, that an engine was killed."""
        if self._died is not None:
            self._died(engine_id, EngineError(f"{engine_id} was killed"))


class SimulatedModel(WatchedProcesses):
    """Implements `async_rl.engines.frozen_models.EngineProcesses`."""

    def __init__(self, name: str, config: Config, facts: EngineFacts, *, restart_s: float = 0.0) -> None:
        """Make the engines of a model.

        Args:
            name: Its name in `models`.
            config: `Config.of_model` of it.
            facts: Its dimensions.
            restart_s: How long a start takes.
        """
        assert isinstance(config.engine, SimulatedEngines)
        self.engines = [
            BreakableEngine(f"{name}-{index}", config.engine, facts=facts, score_seed=score_seed(name))
            for index in range(config.engine.num_engines)
        ]
        self._restart_s = restart_s
        self.failing_restarts = 0
        """How many of the next restarts fail."""

    async def start_engines(self) -> list[Engine]:
        """Implements `EngineProcesses.start_engines`."""
        await asyncio.sleep(self._restart_s)
        return list(self.engines)

    async def restart_engine(self, engine_id: str) -> None:
        """Implements `EngineProcesses.restart_engine`."""
        engine = next(each for each in self.engines if each.engine_id == engine_id)
        engine.die()
        await asyncio.sleep(self._restart_s)
        if self.failing_restarts:
            self.failing_restarts -= 1
            raise EnvironmentNotReady(f"{engine_id} does not come up")
        engine.restart()

    def kill_engine(self, index: int, *, noticed: bool) -> None:
        """Kill an engine; its watcher may notice."""
        engine = self.engines[index % len(self.engines)]
        engine.die()
        if noticed:
            self.note_death(engine.engine_id)


def score_seed(name: str) -> int:
    """Return the seed of a model's scores, `engines.simulated.scored_tokens`."""
    return zlib.crc32(name.encode())
