"""Starts, restarts and ends all processes of one run."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from async_rl.config import Config, SGLangEngines, to_builtins
from async_rl.config.urls_file import read_urls
from async_rl.engines.frozen_models import EngineProcesses
from async_rl.engines.sglang.connect import check_shares_memory, node_of
from async_rl.engines.sglang.server import SGLangServer
from async_rl.errors import EnvironmentNotReady, TrainerError
from async_rl.placement.actor_shutdown import EXIT_LIMIT_S
from async_rl.placement.actors import ActorSetup, RankActor, node_address
from async_rl.placement.frame_readers import FrameReaders
from async_rl.placement.placements import Placements, addresses_of, node_addresses
from async_rl.placement.ray_engines import RayEngines, uses_gpus
from async_rl.placement.ray_trainer import ABORTS, WEIGHTS, RayTrainer, last_line, make_worker
from async_rl.placement.rollout_worker_actor import rollout_worker
from async_rl.placement.shared_devices import Device, assign_devices, ranks_on
from async_rl.rollout.workers.messages import Link
from async_rl.rollout.workers.worker_backend import WorkerSpec
from async_rl.run.cluster import Cluster
from async_rl.run.placement_table import ranks_together
from async_rl.run.recovery import node_folder
from async_rl.runtime.addresses import NODE_ADDRESS
from async_rl.runtime.loading import IMPORT_FOLDERS
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import waiting
from async_rl.store.frame_reader import FrameReader
from async_rl.trainer_protocol import Trainer

log = logging.getLogger(__name__)


class RayCluster(RayEngines, Cluster):
    """The engines, trainer ranks and rollout workers of one run as Ray actors."""

    def __init__(self, config: Config, run_dir: Path, server: type[SGLangServer] = SGLangServer) -> None:
        """Start nothing yet.

        Args:
            config: The run's config.
            run_dir: The run's folder.
            server: The server class that an engine's actor starts.
        """
        super().__init__(config, "engine", _actor_setup(run_dir), run_dir / "logs", server)
        self._frozen: dict[str, RayEngines] = {}
        spool_dir = config.queue.spool_dir
        directory = None if spool_dir is None else node_folder(spool_dir, run_dir)
        self._frame_readers = FrameReaders(self._setup, self._logs, directory)
        self.node = os.environ[NODE_ADDRESS] = node_address()
        self._rank_actors: list[Any] = []
        self._rank_devices: list[Device] = []
        """The GPU of each rank, if ranks share those of engines."""
        self._rank_placements = self._new_rank_placements()
        self.weight_backend = "nccl" if uses_gpus(config.trainer.device) else "gloo"
        self.abortable_servers = _are_patched(config)

    def engines_of(self, model: str) -> EngineProcesses:
        """Return what starts the engines of a model in `models`."""
        if model not in self._frozen:
            of_model = self._config.of_model(model)
            self._frozen[model] = RayEngines(of_model, model, self._setup, self._logs / model, self._server)
        return self._frozen[model]

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
            left = [rank for rank, actor in enumerate(self._rank_actors) if actor not in self._processes]
            why = await self._rank_placements.why_missing(f"trainer rank {left[0]}", left[0]) if left else ""
            raise EnvironmentNotReady(
                f"the trainer's ranks did not start within trainer.start_timeout_s = {limit_s}. {why}"
            ) from error

    async def _start_ranks(self) -> Trainer:
        config, ranks = self._config, self._config.trainer.num_ranks
        if self._shares_gpus:
            self._place_beside_engines()
        await self._rank_placements.wait_ready(config.placement.wait_s)
        threads = {ABORTS: 1} | ({WEIGHTS: 1} if config.weights.overlap else {})
        actor_class = ray.remote(concurrency_groups=threads)(RankActor)  # type: ignore[call-overload]
        log_paths = [self._logs / f"trainer-{rank}.log" for rank in range(ranks)]
        actors = self._rank_actors = [
            actor_class.options(**self._rank_placements.actor_options(rank)).remote(
                config.placement.resources_per_rank.get("CPU", 0.0),
                self._rank_devices[rank].gpu if self._rank_devices else None,
            )
            for rank in range(ranks)
        ]
        async with Nursery() as nursery:
            for rank, (actor, log_path) in enumerate(zip(actors, log_paths, strict=True)):
                name = f"trainer rank {rank}"
                joining = self._join_run(name, actor, self._rank_placements, rank, log_path)
                nursery.start_task(name, joining)
        for actor, device in zip(actors, self._rank_devices, strict=False):  # there are none without sharing
            if self._processes[actor].host != device.node:
                raise EnvironmentNotReady(f"an engine has lost its node, whose {device} a rank was to share")
        nodes = await asyncio.to_thread(addresses_of, [self._processes[actor].host for actor in actors])
        trainer = RayTrainer(actors, nodes, log_paths, config, self.node, self._frame_readers.call)
        plain = to_builtins(config)
        host, port = await self.open_port(0)
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
        if self._config.weights.transport != "tensor" or trainer is None or self._rank_devices:
            return  # on shared GPUs each engine has ranks on its own node
        known = node_addresses()
        given = {name: node_of(url, self._setup.driver_node, known) for name, url in urls.items()}
        for engine, node in {**nodes, **given}.items():
            check_shares_memory(engine, node, trainer.host, known)

    @property
    def _shares_gpus(self) -> bool:
        """Whether ranks share the GPUs of engines."""
        return self._config.placement.shared and uses_gpus(self._config.trainer.device)

    def _place_beside_engines(self) -> None:
        """Give each rank a GPU of an engine, and a place in what is reserved with that engine."""
        engines = [self._devices[engine_id] for engine_id in self._engine_actors]
        all_of_them = self._config.weights.transport == "tensor"
        ranks = self._config.trainer.num_ranks
        self._rank_devices = assign_devices(engines, ranks, all_of_them=all_of_them)
        parts = [device for devices in engines for device in devices]
        per_part = len(parts) // (len(engines) * self._num_nodes)
        self._rank_placements = self._engine_placements.placements_beside(
            [parts.index(device) // per_part for device in self._rank_devices]
        )

    def _asked_beside(self) -> dict[str, float]:
        return {**self._config.placement.resources_per_rank, "GPU": 0.0}

    def _num_beside(self, num_gpus: int) -> int:
        return min(num_gpus, self._config.trainer.num_ranks) if self._shares_gpus else 0

    def ranks_beside(self, engine_id: str) -> Sequence[int]:
        """Implements `WeightRoutes.ranks_beside`."""
        return ranks_on(self._devices[engine_id], self._rank_devices) if self._rank_devices else ()

    async def open_port(self, rank: int) -> tuple[str, int]:
        """Return an address on a rank's node at which it and an engine can connect."""
        limit_s = self._config.weights.timeout_s
        call = self._rank_actors[rank].free_address
        if self._config.weights.overlap:  # the rank may be in a step, which an engine does not wait for
            call = call.options(concurrency_group=WEIGHTS)
        try:
            async with asyncio.timeout(limit_s):
                host, port = await call.remote()
        except (RayError, TimeoutError) as error:
            raise TrainerError(
                f"trainer rank {rank} gave no address within {limit_s} s: {error!r}"
            ) from error
        return host, port

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
            at_once: Kill them, whatever they do.
        """
        for frozen in self._frozen.values():
            await frozen.close(at_once=at_once)
        await super().close(at_once=at_once)
        await self._end(*self._rank_actors, grace_s=0.0 if at_once else EXIT_LIMIT_S)
        await self._frame_readers.close(at_once=at_once)

    def _new_rank_placements(self) -> Placements:
        trainer, placement = self._config.trainer, self._config.placement
        return Placements(
            "trainer rank",
            {"GPU": float(uses_gpus(trainer.device))} | placement.resources_per_rank,
            trainer.num_ranks,
            "PACK",  # ranks exchange more with each other than with anything else
            neighbours=True,
            together=ranks_together(trainer.layout),
            remedy="lower trainer.num_ranks or placement.resources_per_rank",
        )


def _actor_setup(run_dir: Path) -> ActorSetup:
    """Write the marker file, and return how actors find the files of the run."""
    marker, path = secrets.token_hex(16), run_dir / ".shared"
    path.write_text(marker)
    node = ray.get_runtime_context().get_node_id()
    return ActorSetup(os.getcwd(), str(path), marker, node, tuple(IMPORT_FOLDERS))


def _are_patched(config: Config) -> bool:
    """Whether servers are started by a launcher that patches SGLang."""
    engine = config.engine
    if not isinstance(engine, SGLangEngines) or not uses_gpus(engine.device):
        return True
    return config.routing.from_engine and engine.narrow_routing
