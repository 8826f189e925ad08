"""All processes of one run: starts them, brings them back, ends them in whatever state they are."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from async_rl import orchestrator
from async_rl.config import Config, SGLangEngines, to_builtins
from async_rl.engines.connect import external_keys, sglang_client
from async_rl.engines.facts import load_facts
from async_rl.engines.protocol import Engine
from async_rl.engines.sglang import SGLangEngine
from async_rl.engines.simulated import SimulatedEngine
from async_rl.errors import EngineError, EnvironmentNotReady, TrainerError
from async_rl.placement.actors import EngineActor, RankActor
from async_rl.placement.ray_trainer import RayTrainer, cause_of, last_line, made
from async_rl.processes import Process, kill
from async_rl.supervision import Nursery
from async_rl.training import Trainer
from async_rl.waits import waiting

log = logging.getLogger(__name__)

_STOP_LIMIT_S: Final = 60.0
"""A server that holds a GPU is given time to free it; then its actor is killed, and the server with it."""


_KILL_LIMIT_S: Final = 30.0
"""A process that holds a GPU can take its time to go, even when it is killed."""


class RayCluster(orchestrator.Cluster):
    """Engines and trainer of one run as Ray actors."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config = config
        self._dir = run_dir
        self._logs = run_dir / "logs"
        self._engine_actors: dict[str, Any] = {}
        self._engine_group: Any = None
        self._engines: dict[str, Engine] = {}
        self._rank_actors: list[Any] = []
        self._rank_group: Any = None
        self._processes: dict[Any, Process] = {}  # of the actors
        self._restarted: dict[str, asyncio.Event] = {}
        self._facts = load_facts(config.model.path)
        self.weight_backend = "nccl" if uses_gpus(config.trainer.device) else "gloo"

    async def start_engines(self) -> list[Engine]:
        """Start all engines of the config and wait until they answer."""
        engine = self._config.engine
        if engine.urls_file is not None:
            return []  # they join
        if not isinstance(engine, SGLangEngines):
            return [self.connect_engine(f"engine-{index}", "") for index in range(engine.num_engines)]
        if engine.urls:
            for index, url in enumerate(engine.urls):
                self.connect_engine(f"engine-{index}", url)
        else:
            self._engine_group = await _reserve(
                [{"CPU": self._config.placement.cpus_per_engine, "GPU": self._gpus_per_engine}]
                * engine.num_engines,
                self._config.placement.strategy,
                engine.start_timeout_s,
            )
            for index in range(engine.num_engines):
                self._engine_actors[f"engine-{index}"] = self._engine_actor(index)
        async with Nursery() as nursery:
            for engine_id in self._engine_actors or self._engines:
                self._restarted[engine_id] = asyncio.Event()
                nursery.start(f"start {engine_id}", self._first_start(engine_id))
        return list(self._engines.values())

    def connect_engine(self, engine_id: str, url: str) -> Engine:
        """See `orchestrator.Cluster`. The keys of external servers are in the environment."""
        engine = self._config.engine
        if isinstance(engine, SGLangEngines):
            self._engines[engine_id] = self._client(engine_id, url, external_keys(), died=None)
        else:
            seed = self._config.run.seed + len(self._engines)
            self._engines[engine_id] = SimulatedEngine(engine_id, engine, seed=seed, facts=self._facts)
        self._restarted[engine_id] = asyncio.Event()
        return self._engines[engine_id]

    async def disconnect_engine(self, engine_id: str) -> None:
        """See `orchestrator.Cluster`."""
        await self._engines.pop(engine_id).close()

    async def restart_engine(self, engine_id: str) -> None:
        """Stop the server process and start it anew; an external server is only waited for."""
        engine = self._engines[engine_id]
        try:
            if isinstance(engine, SimulatedEngine):
                engine.restart()
            else:
                if engine_id in self._engine_actors and not await self._stop_server(engine_id):
                    await self._end(self._engine_actors[engine_id])
                    index = list(self._engine_actors).index(engine_id)
                    self._engine_actors[engine_id] = self._engine_actor(index)
                await self._start_engine(engine_id)
        except RayError as error:
            raise EnvironmentNotReady(f"{engine_id} cannot be restarted: {last_line(error)}") from error
        self._restarted[engine_id].set()

    async def watch_engines(self, died: Callable[[str, EngineError], None]) -> None:
        """Report servers whose process ends."""

        async def watch(engine_id: str) -> None:
            while True:
                try:
                    last_words = await self._engine_actors[engine_id].wait.remote()
                except RayError as error:
                    last_words = str(error)
                self._restarted[engine_id].clear()
                died(engine_id, EngineError(f"engine {engine_id} ended: {last_words}"))
                await self._restarted[engine_id].wait()

        async with Nursery() as nursery:
            for engine_id in self._engine_actors:
                nursery.start(f"watch {engine_id}", watch(engine_id))
            await asyncio.Future()

    async def start_trainer(self) -> Trainer:
        """Start all ranks, which meet in `setup`; ranks of an earlier life are killed first."""
        limit_s = self._config.trainer.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._end(*self._rank_actors)
                return await self._start_ranks()
        except RayError as error:
            raise EnvironmentNotReady(f"the trainer's ranks did not start: {last_line(error)}") from error
        except TimeoutError as error:
            raise EnvironmentNotReady(
                f"the trainer's ranks did not start within trainer.start_timeout_s = {limit_s}"
            ) from error

    async def _start_ranks(self) -> Trainer:
        config, placement = self._config, self._config.placement
        gpus = placement.gpus_per_rank
        if gpus is None:
            gpus = 1.0 if uses_gpus(config.trainer.device) else 0.0
        ranks = config.trainer.num_ranks
        if self._rank_group is None:
            self._rank_group = await _reserve(
                [{"CPU": placement.cpus_per_rank, "GPU": gpus}] * ranks,
                placement.strategy,
                config.trainer.start_timeout_s,
            )
        actor_class = ray.remote(RankActor)
        log_paths = [self._logs / f"trainer-{rank}.log" for rank in range(ranks)]
        actors = self._rank_actors = [
            actor_class.options(
                num_cpus=placement.cpus_per_rank,
                num_gpus=gpus,
                scheduling_strategy=_in_group(self._rank_group, rank),
            ).remote(str(log_paths[rank]), placement.cpus_per_rank)
            for rank in range(ranks)
        ]
        for actor in actors:
            self._processes[actor] = await actor.process.remote()
        trainer = RayTrainer(actors, [self._processes[actor].host for actor in actors], log_paths, config)
        plain = {**to_builtins(config), "_working_dir": os.getcwd()}
        host, port = await self.open_port()
        async with Nursery() as nursery:
            for rank, actor in enumerate(actors):
                nursery.start(
                    f"make trainer rank {rank}",
                    made(actor, config.trainer.worker, plain, rank, ranks, f"{host}:{port}"),
                )
        return trainer

    async def open_port(self) -> tuple[str, int]:
        """Where rank 0 of the trainer and an engine can meet: on rank 0's node."""
        limit_s = self._config.weights.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                host, port = await self._rank_actors[0].address.remote()
        except (RayError, TimeoutError) as error:
            raise TrainerError(f"trainer rank 0 gave no address within {limit_s} s: {error!r}") from error
        return host, port

    async def close(self) -> None:
        """End all servers and ranks."""
        for engine in self._engines.values():
            await engine.close()
        async with Nursery() as nursery:
            for engine_id in self._engine_actors:
                nursery.start(f"stop {engine_id}", self._stop_server(engine_id))
        await self._end(*self._engine_actors.values(), *self._rank_actors)

    # -- helpers ---------------------------------------------------------------------------------------

    @property
    def _gpus_per_engine(self) -> float:
        engine, gpus = self._config.engine, self._config.placement.gpus_per_engine
        if gpus is not None:
            return gpus
        return (
            float(engine.tp_size) if isinstance(engine, SGLangEngines) and uses_gpus(engine.device) else 0.0
        )

    def _engine_actor(self, index: int) -> Any:
        actor_class = ray.remote(EngineActor)
        return actor_class.options(
            num_cpus=self._config.placement.cpus_per_engine,
            num_gpus=self._gpus_per_engine,
            max_concurrency=8,
            scheduling_strategy=_in_group(self._engine_group, index),
        ).remote(to_builtins(self._config), index, str(self._logs), ray.get_runtime_context().get_node_id())

    async def _stop_server(self, engine_id: str) -> bool:
        """End a server in order; False when its actor is gone, or does not answer."""
        try:
            async with asyncio.timeout(_STOP_LIMIT_S):
                await self._engine_actors[engine_id].stop.remote()
        except (RayError, TimeoutError) as error:
            log.warning("engine %s could not be stopped in order: %r", engine_id, error)
            return False
        return True

    async def _end(self, *actors: Any) -> None:
        """End actors that may be well, dead, stopped or hung, and wait until their processes are gone."""
        here = ray.get_runtime_context().get_node_id()

        async def end(process: Process) -> None:
            gone = False
            try:
                if process.host == here:
                    gone = await asyncio.to_thread(kill, process, _KILL_LIMIT_S)
                else:
                    there = NodeAffinitySchedulingStrategy(process.host, soft=False)
                    remote = ray.remote(kill).options(scheduling_strategy=there, num_cpus=0)
                    async with asyncio.timeout(2 * _KILL_LIMIT_S):
                        gone = await remote.remote(process, _KILL_LIMIT_S)
            except (RayError, TimeoutError) as error:
                log.warning("cannot reach node %s: %r", process.host, error)
            if not gone:
                log.warning("process %d of node %s may still run", process.pid, process.host)

        for actor in actors:
            ray.kill(actor)
        async with Nursery() as nursery:
            for actor in actors:
                process = self._processes.pop(actor, None)
                if process is not None:
                    nursery.start(f"kill process {process.pid}", end(process))

    async def _first_start(self, engine_id: str) -> None:
        with waiting("engine start", engine_id):
            await self._start_engine(engine_id)

    async def _start_engine(self, engine_id: str) -> None:
        engine = self._engines.get(engine_id)
        actor = self._engine_actors.get(engine_id)
        if actor is not None:
            config = self._config.engine
            assert isinstance(config, SGLangEngines), "only a real engine is an actor"
            try:
                async with asyncio.timeout(config.start_timeout_s):
                    if actor not in self._processes:
                        self._processes[actor] = await actor.process.remote()
                    url, api_key, admin_key = await actor.start.remote()
            except (RayError, TimeoutError) as error:
                raise cause_of(error, EnvironmentNotReady(f"{engine_id} did not start: {error!r}")) from error
            if engine is None:
                engine = self._client(engine_id, url, (api_key, admin_key), self._died(engine_id))
                self._engines[engine_id] = engine
            elif isinstance(engine, SGLangEngine):
                engine.move_to(url, api_key, admin_key)
        assert engine is not None, "an engine is an actor of ours or was given by its URL"
        await engine.wait_ready()

    def _died(self, engine_id: str) -> Callable[[], Awaitable[str | None]]:
        """Asks whichever actor the engine has."""

        async def died() -> str | None:
            try:
                last_words: str | None = await self._engine_actors[engine_id].died.remote()
            except RayError as error:
                return f"its actor is gone: {last_line(error)}"
            return last_words

        return died

    def _client(
        self,
        engine_id: str,
        url: str,
        keys: tuple[str | None, str | None],
        died: Callable[[], Awaitable[str | None]] | None,
    ) -> Engine:
        return sglang_client(self._config, engine_id, url, self._facts, keys, died)


def uses_gpus(device: str) -> bool:
    """Whether a part of the run that is set to `device` gets GPUs."""
    if device != "auto":
        return device == "cuda"
    return bool(ray.cluster_resources().get("GPU", 0) > 0)  # type: ignore[no-untyped-call]


async def _reserve(bundles: list[dict[str, float]], strategy: str, limit_s: float) -> Any:
    """Reserve resources together; None when nothing is asked for (a CPU machine that shares its cores).

    Raises:
        EnvironmentNotReady: When the cluster does not have them.
    """
    bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    if not all(bundles):
        return None
    group = placement_group(bundles, strategy=strategy)
    try:
        async with asyncio.timeout(limit_s):
            await group.ready()
    except TimeoutError as error:
        there = ray.cluster_resources()  # type: ignore[no-untyped-call]
        raise EnvironmentNotReady(
            f"Ray could not reserve {bundles} within {limit_s} s; the cluster has {there}: lower "
            "engine.num_engines, trainer.num_ranks or placement.*, or add nodes"
        ) from error
    return group


def _in_group(group: Any, index: int) -> Any:
    if group is None:
        return "DEFAULT"
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
