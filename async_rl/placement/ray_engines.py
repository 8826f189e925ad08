"""Starts, restarts and ends the engines of one model as Ray actors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from math import ceil
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError, RayTaskError

from async_rl.config import Config, SGLangEngines, to_builtins
from async_rl.engine_protocol import Engine
from async_rl.engines.frozen_models import EngineProcesses
from async_rl.engines.model_facts import load_facts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.connect import external_keys, sglang_client
from async_rl.engines.sglang.server import SGLangServer
from async_rl.engines.sglang.server_checks import ServerState
from async_rl.engines.simulated import SimulatedEngine
from async_rl.errors import EngineError, EnvironmentNotReady, WeightSyncError
from async_rl.placement.actor_shutdown import EXIT_LIMIT_S, end_actor
from async_rl.placement.actors import ActorSetup, EngineActor
from async_rl.placement.placements import LOG_AFTER_S, Placements
from async_rl.placement.ray_trainer import cause_of, last_line
from async_rl.placement.shared_devices import Device
from async_rl.runtime.processes import Process
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import waiting
from async_rl.weights.delta_delivery import HostFolder

log = logging.getLogger(__name__)

_STOP_LIMIT_S: Final = 60.0
"""Time for a server to free its GPU; after it the actor is killed, and the server with it."""


class RayEngines(EngineProcesses):
    """The engines of the policy, or of a model in `models`."""

    def __init__(
        self, config: Config, name: str, setup: ActorSetup, logs: Path, server: type[SGLangServer]
    ) -> None:
        """Start nothing yet.

        Args:
            config: The run's config, or `Config.of_model` of it.
            name: The names of engines begin with it.
            setup: How an actor finds the files of the run.
            logs: The folder of the servers' logs.
            server: The server class that an engine's actor starts.
        """
        self._config = config
        self._name = name
        self._setup = setup
        self._logs = logs
        self._server = server
        self._facts = load_facts(config.model.path)
        self._engine_actors: dict[str, list[Any]] = {}  # of each engine one per node
        self._devices: dict[str, list[Device]] = {}  # of started engines, in the order of their ranks
        self._engine_placements = self._new_engine_placements()
        self._engines: dict[str, Engine] = {}
        self._urls: dict[str, str] = {}  # of external servers, by engine
        self._processes: dict[Any, Process] = {}  # of actors that have joined
        self._restarted: dict[str, asyncio.Event] = {}

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

    def connect_engine(self, engine_id: str, url: str) -> Engine:
        """Return a client of a running server; keys of external servers come from the environment."""
        engine = self._config.engine
        if isinstance(engine, SGLangEngines):
            self._check_memory_is_shared({}, {engine_id: url})
            self._engines[engine_id] = sglang_client(
                self._config, engine_id, url, self._facts, external_keys(url), None
            )
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

    def local_folder(self, engine_id: str) -> HostFolder | None:
        """Return the folder of weights on an engine's hosts; None for an external server."""
        parts = self._engine_actors.get(engine_id)
        if parts is None:
            return None
        return RayFolder({self._processes[actor].host: actor for actor in parts if actor in self._processes})

    async def close(self, *, at_once: bool = False) -> None:
        """End all servers.

        Args:
            at_once: Kill them, whatever they do: their guards end the servers.
        """
        for engine in self._engines.values():
            await engine.close()
        if not at_once:
            async with Nursery() as nursery:
                for engine_id, parts in self._engine_actors.items():
                    for actor in parts:
                        nursery.start_task(f"stop {engine_id}", self._stop_server(engine_id, actor))
        owners = [actor for parts in self._engine_actors.values() for actor in parts]
        await self._end(*owners, grace_s=0.0 if at_once else EXIT_LIMIT_S)

    # -- helpers ---------------------------------------------------------------------------------------

    def _check_memory_is_shared(self, nodes: Mapping[str, str], urls: Mapping[str, str]) -> None:
        """Check the places of engines: only those of the policy receive weights from the trainer."""

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
        engine, gpus = self._config.engine, 0.0
        if isinstance(engine, SGLangEngines) and uses_gpus(engine.device):
            gpus = engine.tp_size / engine.num_nodes
        asked = {"GPU": gpus} | self._config.placement.resources_per_engine
        return Placements(
            "engine" if self._num_nodes == 1 else "node of an engine",
            asked,
            engine.num_engines * self._num_nodes,
            "SPREAD",  # so that each has the network of its node to itself
            asked_beside=self._asked_beside(),
            num_beside=self._num_beside(ceil(asked["GPU"])),
            remedy="lower engine.num_engines, engine.tp_size or placement.resources_per_*",
        )

    def _asked_beside(self) -> dict[str, float]:
        """Return what a process asks for that shares a GPU of an engine."""
        return {}

    def _num_beside(self, num_gpus: int) -> int:
        """Return how many processes share the GPUs of a node of an engine."""
        return 0

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

    async def _join_run(
        self, name: str, actor: Any, placements: Placements, number: int, log_path: Path | None
    ) -> None:
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
                why = await placements.why_missing(name, number)
                log.warning("no start after %g s: %s", LOG_AFTER_S, why)
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
                    first = list(self._engine_actors).index(engine_id) * len(parts)
                    for number, actor in enumerate(parts, first):
                        await self._join_run(engine_id, actor, self._engine_placements, number, None)
                    of_parts = [await actor.devices.remote() for actor in parts]
                    self._devices[engine_id] = [device for of_part in of_parts for device in of_part]
                    self._check_memory_is_shared({engine_id: self._processes[parts[0]].host}, {})
                    rendezvous = await parts[0].rendezvous.remote() if len(parts) > 1 else None
                    started = [actor.start_server.remote(rendezvous) for actor in parts]
                    # The first part is the server, and the others have no API.
                    (url, api_key, admin_key), *_ = [await each for each in started]
            except (RayError, TimeoutError) as error:
                raise cause_of(error, EnvironmentNotReady(f"{engine_id} did not start: {error!r}")) from error
            if engine is None:
                state = self._state_of(engine_id)
                engine = sglang_client(self._config, engine_id, url, self._facts, (api_key, admin_key), state)
                self._engines[engine_id] = engine
            elif isinstance(engine, SGLangEngine):
                engine.http.move_to(url, api_key, admin_key)
        assert engine is not None, "an engine has an actor or a URL"
        await engine.wait_ready()

    def _state_of(self, engine_id: str) -> Callable[[], Awaitable[ServerState]]:
        """Return a function that asks the engine's current actors for the state of its server."""

        async def state_of() -> ServerState:
            compilers = frozenset[int]()
            try:
                for asked in [actor.server_state.remote() for actor in self._engine_actors[engine_id]]:
                    state: ServerState = await asked
                    if state.exit_reason is not None:
                        return state
                    compilers |= state.compilers
            except RayError as error:
                return ServerState(f"its actor is gone: {last_line(error)}")
            return ServerState(compilers=compilers)

        return state_of


def uses_gpus(device: str) -> bool:
    """Whether a component whose device is `device` uses GPUs."""
    if device != "auto":
        return device == "cuda"
    return bool(ray.cluster_resources().get("GPU", 0) > 0)  # type: ignore[no-untyped-call]


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
