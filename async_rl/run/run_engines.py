"""The engines of a run, those of further models included: starts them, and keeps them in service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from async_rl.config import Config
from async_rl.engines.frozen_models import FrozenModel
from async_rl.engines.health import HealthWatch
from async_rl.engines.membership import EngineMembership
from async_rl.engines.pool import EnginePool
from async_rl.engines.repair import EngineRepair
from async_rl.observability.metrics import Metrics
from async_rl.run.cluster import Cluster
from async_rl.run.device_sharing import Devices, SharedDevices
from async_rl.runtime.waits import waiting


class RunEngines:
    """Owns the pool of a run's engines and what watches, repairs, adds and removes them."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        catch_up: Callable[[str], Awaitable[None]],
        forget: Callable[[str], Awaitable[None]],
    ) -> None:
        """Build the pool, without engines.

        Args:
            config: The run's config.
            cluster: Starts the processes of engines.
            metrics: The metrics of the run.
            clock: Monotonic seconds.
            catch_up: Brings an engine to the current trainer's weights.
            forget: Ends weight updates of an engine that has left.
        """
        self._config = config
        self._cluster = cluster
        self._forget = forget
        pool = self.pool = EnginePool(metrics, clock, max_calls=config.engine.max_calls)
        self._health = HealthWatch(pool, config.engine, metrics, clock)
        self.devices = Devices()
        if config.placement.shared:
            self.devices = SharedDevices(
                pool,
                cluster.stop_engine,
                metrics,
                clock,
                timeout_s=config.weights.timeout_s,
                keep_weights=config.adapters is not None,
            )
        self.repair = EngineRepair(
            pool,
            cluster.restart_engine,
            catch_up,
            config.engine,
            metrics,
            clock,
            seed=config.run.seed,
            phases=self.devices.phases,
        )
        self.frozen = [
            FrozenModel(name, config.of_model(name), cluster.engines_of(name), metrics, clock)
            for name in config.models
        ]
        """Further models."""
        self._membership: EngineMembership | None = None

    async def start_engines(self) -> None:
        """Start the engines of the trained model, and add them to the pool."""
        with waiting("engine start"):
            for engine in await self._cluster.start_engines():
                self.pool.add_engine(engine)

    def reserve_for_evaluation(self) -> None:
        """Reserve the engines that `evaluation.engines` asks for."""
        if isinstance(number := self._config.evaluation.engines, int):
            for engine in self.pool.engines()[-number:]:
                self.pool.reserve_engine(engine.engine_id)

    @property
    def services(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """The loops that must run as services of an incarnation, without `repair`."""
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "watch": lambda: self._cluster.watch_engines(self.pool.quarantine_engine),
            "health": self._health.watch_engines,
        }
        for frozen in self.frozen:
            loops |= frozen.services
        engine = self._config.engine
        if engine.urls_file is not None:
            self._membership = self._membership or EngineMembership(
                Path(engine.urls_file),
                self.pool,
                self._cluster.connect_engine,
                self._depart,
            )
            loops["members"] = self._membership.follow_file
        return loops

    async def _depart(self, engine_id: str) -> None:
        """Release an engine that has left the pool."""
        await self._forget(engine_id)
        await self._cluster.disconnect_engine(engine_id)
