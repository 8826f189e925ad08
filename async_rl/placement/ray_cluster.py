"""Starts, restarts and ends all processes of one run."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError, RayTaskError

from async_rl.config import Config, SGLangEngines, to_builtins
from async_rl.config.urls_file import read_urls
from async_rl.engine_protocol import Engine
from async_rl.engines.frozen_models import EngineProcesses
from async_rl.engines.model_facts import load_facts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.connect import check_shares_memory, external_keys, node_of, sglang_client
from async_rl.engines.sglang.server import SGLangServer
from async_rl.engines.simulated import SimulatedEngine
from async_rl.errors import EngineError, EnvironmentNotReady, TrainerError, WeightSyncError
from async_rl.placement.actor_shutdown import EXIT_LIMIT_S, end_actor
from async_rl.placement.actors import ActorSetup, EngineActor, RankActor, node_address
from async_rl.placement.frame_readers import FrameReaders
from async_rl.placement.placements import LOG_AFTER_S, Placements, addresses_of, node_addresses
from async_rl.placement.ray_trainer import WEIGHTS, RayTrainer, cause_of, last_line, make_worker
from async_rl.placement.rollout_worker_actor import rollout_worker
from async_rl.placement.shared_devices import Device, assign_devices, options_beside
from async_rl.rollout.workers.messages import Link
from async_rl.rollout.workers.worker_backend import WorkerSpec
from async_rl.run.cluster import Cluster
from async_rl.run.placement_table import ranks_together
from async_rl.run.recovery import node_folder
from async_rl.runtime.addresses import NODE_ADDRESS
from async_rl.runtime.loading import IMPORT_FOLDERS
from async_rl.runtime.processes import Process
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import waiting
from async_rl.store.frame_reader import FrameReader
from async_rl.trainer_protocol import Trainer
from async_rl.weights.delta_delivery import HostFolder

log = logging.getLogger(__name__)

_STOP_LIMIT_S: Final = 60.0
"""Time for a server to free its GPU; after it the actor is killed, and the server with it."""


class RayCluster(Cluster):
    """The engines, trainer ranks and rollout workers of one run as Ray actors."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        server: type[SGLangServer] = SGLangServer,
        *,
        frozen: tuple[str, ActorSetup] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            config: The run's config, or `Config.of_model` of it.
            run_dir: The run's folder.
            server: The server class that an engine's actor starts.
            frozen: Name and set-up of a model in `models`, whose engines are all that this one starts.
        """
        self._config = config
        self._run_dir = run_dir
        self._name, self._setup = ("engine", _actor_setup(run_dir)) if frozen is None else frozen
        self._logs = run_dir / "logs" / ("" if frozen is None else self._name)
        self._server = server
        self._frozen: dict[str, RayCluster] = {}
        spool_dir = config.queue.spool_dir
        directory = None if spool_dir is None else node_folder(spool_dir, run_dir)
        self._frame_readers = FrameReaders(self._setup, self._logs, directory)
        self.node = os.environ[NODE_ADDRESS] = node_address()
        self._engine_actors: dict[str, list[Any]] = {}  # of each engine one per node
        self._engine_placements = self._new_engine_placements()
        self._engines: dict[str, Engine] = {}
        self._urls: dict[str, str] = {}  # of external servers, by engine
        self._rank_actors: list[Any] = []
        self._rank_placements = self._new_rank_placements()
        self._processes: dict[Any, Process] = {}  # of actors that have joined
        self._restarted: dict[str, asyncio.Event] = {}
        self._facts = load_facts(config.model.path)
        self.weight_backend = "nccl" if uses_gpus(config.trainer.device) else "gloo"

    async def start_engines(self) -> list[Engine]:
        """Start all engines of the config and wait until they answer."""
        engine = self._config.engine
        if engine.urls_file is not None:
            return []  # `Membership` adds them
        if not isinstance(engine, SGLangEngines):
            return [self.connect_engine(f"{self._name}-{index}", "") for index in range(engine.num_engines)]
        if engine.urls:
            for index, url in enumerate(engine.urls):
                self.connect_engine(f"{self._name}-{index}", url)
        else:
            with waiting("engine start", "placements"):
                await self._engine_placements.wait_ready(self._config.placement.wait_s)
            for index in range(engine.num_engines):
                parts = [self._engine_actor(index, part) for part in range(engine.num_nodes)]
                self._engine_actors[f"{self._name}-{index}"] = parts
        numbered = list(self._engine_actors or self._engines)
        async with Nursery() as nursery:
            for engine_id in numbered:
                self._restarted[engine_id] = asyncio.Event()
                nursery.start_task(f"start {engine_id}", self._first_start(engine_id))
        return [self._engines[engine_id] for engine_id in numbered]  # in order of their numbers

    def engines_of(self, model: str) -> EngineProcesses:
        """Return what starts the engines of a model in `models`."""
        if model not in self._frozen:
            self._frozen[model] = RayCluster(
                self._config.of_model(model), self._run_dir, self._server, frozen=(model, self._setup)
            )
        return self._frozen[model]

    def connect_engine(self, engine_id: str, url: str) -> Engine:
        """Return a client of a running server; keys of external servers come from the environment."""
        engine = self._config.engine
        if isinstance(engine, SGLangEngines):
            self._check_memory_is_shared({}, {engine_id: url})
            self._engines[engine_id] = self._client(engine_id, url, external_keys(url), died=None)
            self._urls[engine_id] = url
        else:
            seed = self._config.run.seed + len(self._engines)
            self._engines[engine_id] = SimulatedEngine(engine_id, engine, seed=seed, facts=self._facts)
        self._restarted[engine_id] = asyncio.Event()
        return self._engines[engine_id]

    async def disconnect_engine(self, engine_id: str) -> None:
        """Close the client of a server that has left the job."""
        self._urls.pop(engine_id, None)
        if (
            engine := self._engines.pop(engine_id, None)
        ) is not None:  # a call before may have been cancelled
            await engine.close()

    async def stop_engine(self, engine_id: str) -> None:
        """Stop a server process, and replace its actor if that fails. An external server keeps running."""
        parts = self._engine_actors.get(engine_id, [])
        index = list(self._engine_actors).index(engine_id) if parts else 0

        async def stop(part: int) -> None:
            if not await self._stop_server(engine_id, parts[part]):
                await self._end(parts[part])
                parts[part] = self._engine_actor(index, part)

        async with Nursery() as nursery:  # the first part ends the others, which would wait for it
            for part in range(len(parts)):
                nursery.start_task(f"stop node {part} of {engine_id}", stop(part))

    async def restart_engine(self, engine_id: str) -> None:
        """Restart the server process; for an external server only wait until it answers."""
        engine = self._engines[engine_id]
        try:
            if isinstance(engine, SimulatedEngine):
                engine.restart()
            else:
                await self.stop_engine(engine_id)
                await self._wait_for_placement(engine_id)
                await self._start_engine(engine_id)
        except RayError as error:
            raise EnvironmentNotReady(f"{engine_id} cannot be restarted: {last_line(error)}") from error
        self._restarted[engine_id].set()

    async def watch_engines(self, died: Callable[[str, EngineError], None]) -> None:
        """Report each server that loses a process; never returns."""

        async def watch(engine_id: str, part: int) -> None:
            while True:
                try:
                    exit_reason = await self._engine_actors[engine_id][part].wait_exit.remote()
                except RayError as error:
                    exit_reason = str(error)
                self._restarted[engine_id].clear()
                died(engine_id, EngineError(f"engine {engine_id} ended: {exit_reason}"))
                await self._restarted[engine_id].wait()

        async with Nursery() as nursery:
            for engine_id, parts in self._engine_actors.items():
                for part in range(len(parts)):
                    nursery.start_task(f"watch node {part} of {engine_id}", watch(engine_id, part))
            await asyncio.Future()

    async def place_trainer(self) -> None:
        """Reserve places for the trainer's ranks, before engines take any."""
        with waiting("trainer start", "placements"):
            await self._rank_placements.wait_ready(self._config.placement.wait_s)

    async def start_trainer(self) -> Trainer:
        """Start all ranks, which connect to each other in `setup`; kill the previous ranks first."""
        limit_s = self._config.trainer.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                urls = await self._external_urls()
                await self._end(*self._rank_actors)
                trainer = await self._start_ranks()
                known, actors = self._processes, self._engine_actors.items()
                there = {name: known[parts[0]].host for name, parts in actors if parts[0] in known}
                self._check_memory_is_shared(there, urls)
                return trainer
        except RayError as error:
            raise EnvironmentNotReady(f"the trainer's ranks did not start: {last_line(error)}") from error
        except TimeoutError as error:
            raise EnvironmentNotReady(
                f"the trainer's ranks did not start within trainer.start_timeout_s = {limit_s}"
            ) from error

    async def _start_ranks(self) -> Trainer:
        config, ranks = self._config, self._config.trainer.num_ranks
        await self._rank_placements.wait_ready(config.placement.wait_s)
        threads = {WEIGHTS: 1} if config.weights.overlap else {}
        actor_class = ray.remote(concurrency_groups=threads)(RankActor)  # type: ignore[call-overload]
        log_paths = [self._logs / f"trainer-{rank}.log" for rank in range(ranks)]
        devices = await self._shared_devices(ranks)
        actors = self._rank_actors = [
            actor_class.options(**self._rank_placements.actor_options(rank) | options_beside(device)).remote(
                config.placement.cpus_per_rank, device and device.gpu
            )
            for rank, device in enumerate(devices)
        ]
        async with Nursery() as nursery:
            for rank, (actor, log_path) in enumerate(zip(actors, log_paths, strict=True)):
                name = f"trainer rank {rank}"
                nursery.start_task(name, self._join_run(name, actor, self._rank_placements, log_path))
        nodes = await asyncio.to_thread(addresses_of, [self._processes[actor].host for actor in actors])
        trainer = RayTrainer(actors, nodes, log_paths, config, self.node, self._frame_readers.call)
        plain = to_builtins(config)
        host, port = await self.open_port()
        async with Nursery() as nursery:
            for rank, actor in enumerate(actors):
                nursery.start_task(
                    f"make trainer rank {rank}",
                    make_worker(actor, config.trainer.worker, plain, rank, ranks, f"{host}:{port}"),
                )
        return trainer

    async def _external_urls(self) -> dict[str, str]:
        """Return external servers; before the first trainer also those that will join right after it."""
        engine = self._config.engine
        if self._rank_actors or engine.urls_file is None or not isinstance(engine, SGLangEngines):
            return dict(self._urls)
        return {url: url for url in await asyncio.to_thread(read_urls, Path(engine.urls_file))}

    def _check_memory_is_shared(self, nodes: Mapping[str, str], urls: Mapping[str, str]) -> None:
        """Check that engines are on the node of trainer rank 0 if `weights.transport` is `tensor`.

        Called when an engine has started and when the trainer has, because they start at the same time.

        Args:
            nodes: Nodes of the engines that this run started, by name.
            urls: URLs of external servers, by name.

        Raises:
            ConfigError: An engine is on another node.
        """
        trainer = self._processes.get(self._rank_actors[0]) if self._rank_actors else None
        if self._config.weights.transport != "tensor" or trainer is None:
            return
        known = node_addresses()
        given = {name: node_of(url, self._setup.driver_node, known) for name, url in urls.items()}
        for engine, node in {**nodes, **given}.items():
            check_shares_memory(engine, node, trainer.host, known)

    async def _shared_devices(self, ranks: int) -> list[Device | None]:
        """Return the GPU that each rank shares with an engine; None if it shares none."""
        if not (self._config.placement.shared and uses_gpus(self._config.trainer.device)):
            return [None] * ranks
        asked = [actor.devices.remote() for parts in self._engine_actors.values() for actor in parts]
        return list(assign_devices([await devices for devices in asked], ranks))

    async def open_port(self) -> tuple[str, int]:
        """Return an address on rank 0's node at which rank 0 and an engine can connect."""
        limit_s = self._config.weights.timeout_s
        call = self._rank_actors[0].free_address
        if self._config.weights.overlap:  # the rank may be in a step, which an engine does not wait for
            call = call.options(concurrency_group=WEIGHTS)
        try:
            async with asyncio.timeout(limit_s):
                host, port = await call.remote()
        except (RayError, TimeoutError) as error:
            raise TrainerError(f"trainer rank 0 gave no address within {limit_s} s: {error!r}") from error
        return host, port

    def local_folder(self, engine_id: str) -> HostFolder | None:
        """Return the folder of weights on an engine's hosts; None for an external server."""
        parts = self._engine_actors.get(engine_id)
        if parts is None:
            return None
        return RayFolder({self._processes[actor].host: actor for actor in parts if actor in self._processes})

    def other_nodes(self) -> Collection[str]:
        """Return the addresses of the other nodes that are alive; blocks."""
        return set(node_addresses().values()) - {self.node}

    def open_frame_reader(self, node: str) -> FrameReader:
        """Start the reader of frames on another node, if there is none."""
        return self._frame_readers.open_reader(node)

    def rollout_worker(self, spec: WorkerSpec) -> AbstractAsyncContextManager[Link]:
        """Start a rollout worker, and yield the driver's end of its link."""
        return rollout_worker(spec, self._setup, self._logs / f"{spec.name}.log")

    async def close(self, *, at_once: bool = False) -> None:
        """End all servers and ranks.

        Args:
            at_once: Kill them, whatever they do: their guards end the servers.
        """
        for frozen in self._frozen.values():
            await frozen.close(at_once=at_once)
        for engine in self._engines.values():
            await engine.close()
        if not at_once:
            async with Nursery() as nursery:
                for engine_id, parts in self._engine_actors.items():
                    for actor in parts:
                        nursery.start_task(f"stop {engine_id}", self._stop_server(engine_id, actor))
        grace_s = 0.0 if at_once else EXIT_LIMIT_S
        owners = [actor for parts in self._engine_actors.values() for actor in parts]
        await self._end(*owners, *self._rank_actors, grace_s=grace_s)
        await self._frame_readers.close(at_once=at_once)

    # -- helpers ---------------------------------------------------------------------------------------

    def _engine_actor(self, index: int, part: int) -> Any:
        placement = self._engine_placements.actor_options(index * self._num_nodes + part)
        return (
            ray.remote(EngineActor)
            .options(max_concurrency=8, **placement)
            .remote(self._server, to_builtins(self._config), index, str(self._logs), part)
        )

    @property
    def _num_nodes(self) -> int:
        """The nodes of one engine."""
        engine = self._config.engine
        return engine.num_nodes if isinstance(engine, SGLangEngines) else 1

    def _new_engine_placements(self) -> Placements:
        engine, placement = self._config.engine, self._config.placement
        gpus = placement.gpus_per_engine
        if gpus is None:
            real = isinstance(engine, SGLangEngines) and uses_gpus(engine.device)
            gpus = engine.tp_size / engine.num_nodes if real and isinstance(engine, SGLangEngines) else 0.0
        return Placements(
            "engine" if self._num_nodes == 1 else "node of an engine",
            {"CPU": placement.cpus_per_engine, "GPU": gpus, **placement.resources_per_engine},
            engine.num_engines * self._num_nodes,
            placement.engine_strategy,
            remedy="lower engine.num_engines, engine.tp_size or placement.*_per_engine",
        )

    def _new_rank_placements(self) -> Placements:
        trainer, placement = self._config.trainer, self._config.placement
        packed = placement.trainer_strategy in ("PACK", "STRICT_PACK")
        gpus = placement.gpus_per_rank
        if gpus is None:
            gpus = 1.0 if uses_gpus(trainer.device) and not placement.shared else 0.0
        return Placements(
            "trainer rank",
            {"CPU": placement.cpus_per_rank, "GPU": gpus, **placement.resources_per_rank},
            trainer.num_ranks,
            placement.trainer_strategy,
            neighbours=True,
            together=ranks_together(trainer.layout) if packed else 1,
            remedy="lower trainer.num_ranks or placement.*_per_rank",
        )

    async def _wait_for_placement(self, engine_id: str) -> None:
        """Wait until an engine has a placement again, without a limit: other engines keep serving."""
        while engine_id in self._engine_actors:
            number = list(self._engine_actors).index(engine_id)
            try:
                for part in range(self._num_nodes):
                    await self._engine_placements.wait_ready_again(
                        number * self._num_nodes + part, self._config.placement.wait_s
                    )
                return
            except EnvironmentNotReady as error:
                log.warning("engine %s waits for a node: %s", engine_id, error)

    async def _join_run(self, name: str, actor: Any, placements: Placements, log_path: Path | None) -> None:
        """Wait until an actor has joined the run, and store its process.

        Raises:
            EnvironmentNotReady: Its node does not see the files of the run.
        """
        if actor in self._processes:
            return
        arrives = actor.join_run.remote(self._setup, None if log_path is None else str(log_path))
        try:
            try:
                async with asyncio.timeout(LOG_AFTER_S):
                    self._processes[actor] = await arrives
            except TimeoutError:
                log.warning("%s", await placements.why_missing(name))
                self._processes[actor] = await arrives
        except RayTaskError as error:
            failure = EnvironmentNotReady(f"{name} cannot work on its node: {last_line(error)}")
            raise cause_of(error, failure) from error

    async def _stop_server(self, engine_id: str, actor: Any) -> bool:
        """Stop a server gracefully; return False if its actor is gone or does not answer."""
        try:
            async with asyncio.timeout(_STOP_LIMIT_S):
                await actor.stop_server.remote()
        except (RayError, TimeoutError) as error:
            log.warning("engine %s could not be stopped gracefully: %s", engine_id, last_line(error))
            return False
        return True

    async def _end(self, *actors: Any, grace_s: float = 0.0) -> None:
        """End actors and wait until their processes are gone."""
        async with Nursery() as nursery:
            for actor in actors:
                ending = end_actor(actor, self._processes.pop(actor, None), grace_s=grace_s)
                nursery.start_task("end an actor", ending)

    async def _first_start(self, engine_id: str) -> None:
        with waiting("engine start", engine_id):
            await self._start_engine(engine_id)

    async def _start_engine(self, engine_id: str) -> None:
        engine = self._engines.get(engine_id)
        parts = self._engine_actors.get(engine_id)
        if parts is not None:
            config = self._config.engine
            assert isinstance(config, SGLangEngines), "only a real engine is an actor"
            try:
                async with asyncio.timeout(config.start_timeout_s):
                    for actor in parts:
                        await self._join_run(engine_id, actor, self._engine_placements, None)
                    self._check_memory_is_shared({engine_id: self._processes[parts[0]].host}, {})
                    rendezvous = await parts[0].rendezvous.remote() if len(parts) > 1 else None
                    started = [actor.start_server.remote(rendezvous) for actor in parts]
                    # The first part is the server, and the others have no API.
                    (url, api_key, admin_key), *_ = [await each for each in started]
            except (RayError, TimeoutError) as error:
                raise cause_of(error, EnvironmentNotReady(f"{engine_id} did not start: {error!r}")) from error
            if engine is None:
                engine = self._client(engine_id, url, (api_key, admin_key), self._exit_reason_of(engine_id))
                self._engines[engine_id] = engine
            elif isinstance(engine, SGLangEngine):
                engine.http.move_to(url, api_key, admin_key)
        assert engine is not None, "an engine has an actor or a URL"
        await engine.wait_ready()

    def _exit_reason_of(self, engine_id: str) -> Callable[[], Awaitable[str | None]]:
        """Return a function that asks the engine's current actors for the exit reason of its server."""

        async def exit_reason_of() -> str | None:
            try:
                for asked in [actor.exit_reason.remote() for actor in self._engine_actors[engine_id]]:
                    exit_reason: str | None = await asked
                    if exit_reason is not None:
                        return exit_reason
            except RayError as error:
                return f"its actor is gone: {last_line(error)}"
            return None

        return exit_reason_of

    def _client(
        self,
        engine_id: str,
        url: str,
        keys: tuple[str | None, str | None],
        died: Callable[[], Awaitable[str | None]] | None,
    ) -> Engine:
        return sglang_client(self._config, engine_id, url, self._facts, keys, died)


def uses_gpus(device: str) -> bool:
    """Whether a component whose device is `device` uses GPUs."""
    if device != "auto":
        return device == "cuda"
    return bool(ray.cluster_resources().get("GPU", 0) > 0)  # type: ignore[no-untyped-call]


def _actor_setup(run_dir: Path) -> ActorSetup:
    """Write the marker file, and return how actors find the files of the run."""
    marker, path = secrets.token_hex(16), run_dir / ".shared"
    path.write_text(marker)
    node = ray.get_runtime_context().get_node_id()
    return ActorSetup(os.getcwd(), str(path), marker, node, tuple(IMPORT_FOLDERS))


class RayFolder(HostFolder):
    """The folder of weights on each host of an engine, kept by an actor there; their paths are equal."""

    def __init__(self, actors: Mapping[str, Any]) -> None:
        """Take the actor of each host."""
        self._actors = list(actors.values())

    async def copy_version(self, path: str, version: int) -> str:
        """Copy full weights into the folder, and return its path."""
        return await self._answer([actor.copy_version.remote(path, version) for actor in self._actors])

    async def apply_delta(self, path: str) -> str:
        """Apply a delta to the copy, and return its path."""
        return await self._answer([actor.apply_delta.remote(path) for actor in self._actors])

    async def _answer(self, references: list[Any]) -> str:
        try:
            folders: list[str] = [await each for each in references]
        except RayError as error:
            raise cause_of(error, WeightSyncError(last_line(error))) from error
        return folders[0]
