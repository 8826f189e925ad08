"""Where processes run: Ray actors for everything that is not the driver. The only module that imports Ray.

```
 driver ─┬─► EngineActor, one an engine   owns an SGLang server process and its GPUs; calls go by HTTP
         └─► RankActor, one a rank        owns a TrainerRank, in a placement group of the trainer's own
```

On one machine Ray is started here and stopped with the run; with `placement.ray_address` the same config runs
on a cluster. Batches are read by trainer ranks from the driver's file where they share its host, and through
Ray's object store elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import ray
from ray._private import ray_constants
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from async_rl import orchestrator
from async_rl.config import Config, SGLangEngines, parse_config, to_builtins
from async_rl.engines.facts import load_facts
from async_rl.engines.protocol import Engine, GroupInvite, TensorSpec
from async_rl.engines.server import SGLangServer
from async_rl.engines.sglang import SGLangEngine
from async_rl.engines.simulated import SimulatedEngine
from async_rl.errors import AsyncRLError, EngineError, EnvironmentNotReady, TrainerError
from async_rl.loading import load_object
from async_rl.processes import Process, die_with_parent, kill, this_process
from async_rl.records import Summary
from async_rl.report import Progress
from async_rl.supervision import Nursery
from async_rl.training import StepResult, Trainer, TrainerState

log = logging.getLogger(__name__)

_STOP_LIMIT_S: Final = 60.0
"""A server that holds a GPU is given time to free it; then its actor is killed, and the server with it."""

_KILL_LIMIT_S: Final = 30.0
"""A process that holds a GPU can take its time to go, even when it is killed."""

_OBJECT_STORE_BYTES: Final = 256 << 20
"""Of a Ray that we start: batches are files, so the store carries next to nothing."""


async def run(
    config: Config, run_dir: Path, stop: asyncio.Event, progress: Progress | None = None
) -> Summary:
    """Run a config with its processes on Ray; see `async_rl.orchestrator.run`."""
    async with ray_cluster(config, run_dir) as cluster:
        return await orchestrator.run(config, run_dir, stop, cluster, progress=progress)


@asynccontextmanager
async def ray_cluster(config: Config, run_dir: Path) -> AsyncIterator[RayCluster]:
    """Join or start Ray, and end every process of the run with the block."""
    scratch = _scratch(run_dir)
    await asyncio.to_thread(_connect, config, scratch)
    cluster = RayCluster(config, run_dir)
    try:
        yield cluster
    finally:
        try:
            await asyncio.shield(cluster.close())
        finally:
            await asyncio.to_thread(ray.shutdown)
            shutil.rmtree(scratch, ignore_errors=True)


def _scratch(run_dir: Path) -> Path:
    """A folder for the sockets and logs of a Ray that we start: Ray's own are open to every user.

    Its name is short, because paths of sockets are, and the same for each life of a run: what a killed driver
    left goes with the next.

    Raises:
        EnvironmentNotReady: When somebody else has made it.
    """
    name = hashlib.blake2s(f"{os.getuid()}:{run_dir.resolve()}".encode(), digest_size=6).hexdigest()
    scratch = Path(tempfile.gettempdir()) / f"async-rl-{name}"
    scratch.mkdir(mode=0o700, exist_ok=True)
    if scratch.is_symlink() or scratch.stat().st_uid != os.getuid():
        raise EnvironmentNotReady(f"{scratch} belongs to another user: remove it, or set TMPDIR")
    scratch.chmod(0o700)
    for left in scratch.iterdir():
        shutil.rmtree(left, ignore_errors=True)
    return scratch


def _connect(config: Config, scratch: Path) -> None:
    # Whoever reaches a port of Ray runs code as us. A Ray of one machine listens on the loopback interface
    # (the switch is private to Ray, and the only one) and asks for a token, for who else is on this machine.
    ray_constants.ENABLE_RAY_CLUSTER = config.placement.ray_address is not None
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = str(int(ray_constants.ENABLE_RAY_CLUSTER))
    if config.placement.ray_address is None:
        # Without one of ours Ray would write a token into the user's home, for ever.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Ray would otherwise set up a virtual environment of its own where the driver was started by a tool that
    # makes some.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = config.placement.ray_address
    try:
        if address is None:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                _temp_dir=str(scratch),
            )
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        where = f"join the Ray cluster at {address}" if address else "start Ray on this machine"
        raise EnvironmentNotReady(
            f"could not {where}: {error}. Check placement.ray_address and `ray status`"
        ) from error


def _cuda(device: str) -> bool:
    """Whether a part of the run that is set to `device` gets GPUs."""
    if device != "auto":
        return device == "cuda"
    return bool(ray.cluster_resources().get("GPU", 0) > 0)  # type: ignore[no-untyped-call]


# -- trainer ------------------------------------------------------------------------------------------


class _RankActor:
    """One trainer rank in a process of its own."""

    def __init__(self, log_path: str, cpus: float) -> None:
        die_with_parent()
        _redirect_output(log_path)
        # Several ranks of OpenMP threads that spin for each other stall a machine of few cores for seconds.
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(cpus)))
        self._worker: Any = None

    def process(self) -> Process:
        """Which process this is."""
        return this_process(ray.get_runtime_context().get_node_id())

    def address(self) -> tuple[str, int]:
        """A host and free port of this node."""
        return _free_address()

    def make(
        self, worker: str, config: dict[str, Any], rank: int, world_size: int, init_address: str
    ) -> None:
        """Load and make the worker class that the config names."""
        sys.path.insert(0, config["_working_dir"])
        plain = {key: value for key, value in config.items() if key != "_working_dir"}
        self._worker = load_object(worker, what="trainer worker")(plain, rank, world_size, init_address)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*arguments)

    def train_on_copy(self, frame: Any, step: int) -> Any:
        """`train_step` on a batch that travelled through the object store, because its file is on another
        host.
        """
        with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="async_rl_batch_") as file:
            file.write(frame)
            file.flush()
            return self._worker.train_step(file.name, step)


class RayTrainer(Trainer):
    """All trainer ranks; a failure of one is a `TrainerError` that names it and its log."""

    def __init__(self, actors: list[Any], nodes: list[str], log_paths: list[Path], config: Config) -> None:
        self._actors = actors
        self._log_paths = log_paths
        self._config = config
        here = ray.get_runtime_context().get_node_id()
        self._remote = [node != here for node in nodes]

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """See `TrainerRank.setup`."""
        state: TrainerState = await self._all(self._config.trainer.start_timeout_s, "setup", checkpoint_dir)
        return state

    async def train_step(self, batch_path: str, step: int) -> StepResult:
        """See `TrainerRank.train_step`."""
        frame = None
        if any(self._remote):
            frame = await asyncio.to_thread(lambda: ray.put(Path(batch_path).read_bytes()))
        result: StepResult = await self._gather(
            self._config.trainer.step_timeout_s,
            "train_step",
            [
                actor.train_on_copy.remote(frame, step)
                if remote
                else actor.call.remote("train_step", batch_path, step)
                for actor, remote in zip(self._actors, self._remote, strict=True)
            ],
        )
        return result

    async def publish(self, directory: str, weight_version: int) -> None:
        """See `TrainerRank.publish`."""
        await self._all(self._config.weights.timeout_s, "publish", directory, weight_version)

    async def open_weight_group(self, invite: GroupInvite) -> None:
        """See `TrainerRank.open_weight_group`."""
        await self._all(self._config.weights.timeout_s, "open_weight_group", invite)

    async def close_weight_group(self, group_name: str) -> None:
        """See `TrainerRank.close_weight_group`."""
        await self._all(self._config.weights.timeout_s, "close_weight_group", group_name)

    async def plan_buckets(self, bucket_bytes: int) -> tuple[tuple[TensorSpec, ...], ...]:
        """See `TrainerRank.plan_buckets`."""
        plan: tuple[tuple[TensorSpec, ...], ...] = await self._all(
            self._config.weights.timeout_s, "plan_buckets", bucket_bytes
        )
        return plan

    async def send_weights(self, group_names: list[str], bucket_bytes: int) -> None:
        """See `TrainerRank.send_weights`."""
        # The ranks bound each broadcast themselves and leave dead engines out; this is for a dead trainer.
        await self._all(2 * self._config.weights.timeout_s, "send_weights", group_names, bucket_bytes)

    async def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """See `TrainerRank.save_checkpoint`."""
        await self._all(self._config.trainer.step_timeout_s, "save_checkpoint", directory, extra)

    async def close(self) -> None:
        """Stop all ranks."""
        await self._all(self._config.weights.timeout_s, "close")

    async def _all(self, limit_s: float, method: str, *arguments: Any) -> Any:
        return await self._gather(
            limit_s, method, [actor.call.remote(method, *arguments) for actor in self._actors]
        )

    async def _gather(self, limit_s: float, method: str, references: list[Any]) -> Any:
        """Wait for all ranks; rank 0's answer. The first rank that fails fails the call."""

        async def answer(rank: int, reference: Any) -> Any:
            try:
                return await reference
            except RayActorError as error:
                raise TrainerError(
                    f"trainer rank {rank} died during {method}; its last words are in {self._log_paths[rank]}"
                ) from error
            except RayTaskError as error:
                failure = TrainerError(
                    f"trainer rank {rank} failed in {method}: {_last_line(error)}; see "
                    f"{self._log_paths[rank]}"
                )
                raise _cause(error, failure) from error

        try:
            async with asyncio.timeout(limit_s):
                async with Nursery() as ranks:
                    answers = [
                        ranks.start(f"trainer rank {rank}", answer(rank, reference))
                        for rank, reference in enumerate(references)
                    ]
        except TimeoutError as error:
            raise TrainerError(
                f"the trainer took more than {limit_s} s for {method}; see {self._log_paths[0]}"
            ) from error
        return answers[0].result()


# -- engines ------------------------------------------------------------------------------------------


class _EngineActor:
    """Owns one SGLang server process: it dies with this actor."""

    def __init__(self, config: dict[str, Any], index: int, log_dir: str, driver_node: str) -> None:
        die_with_parent()
        parsed = parse_config(config)
        assert isinstance(parsed.engine, SGLangEngines)
        elsewhere = ray.get_runtime_context().get_node_id() != driver_node
        self._server = SGLangServer(
            parsed.engine,
            parsed.model,
            routing=parsed.routing.from_engine,
            index=index,
            log_dir=Path(log_dir),
            seed=parsed.run.seed,
            advertise_host=_node_address() if elsewhere else None,
        )

    async def process(self) -> Process:
        """Which process this is."""
        return this_process(ray.get_runtime_context().get_node_id())

    async def start(self) -> tuple[str, str, str]:
        """Start (again); URL, API key and admin key."""
        await self._server.start()
        return self._server.url, self._server.api_key, self._server.admin_key

    async def wait(self) -> str:
        """Wait until the server process ends; its last words."""
        await self._server.wait()
        return self._server.last_words()

    async def died(self) -> str | None:
        """Its last words when it has ended, else None."""
        return await self._server.died()

    async def stop(self) -> None:
        """End the server process."""
        await self._server.stop()


# -- the cluster --------------------------------------------------------------------------------------


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
        self.weight_backend = "nccl" if _cuda(config.trainer.device) else "gloo"

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
                nursery.start(f"start {engine_id}", self._start_engine(engine_id))
        return list(self._engines.values())

    def connect_engine(self, engine_id: str, url: str) -> Engine:
        """See `orchestrator.Cluster`. The keys of external servers are in the environment."""
        engine = self._config.engine
        if isinstance(engine, SGLangEngines):
            api_key = os.environ.get("ASYNC_RL_ENGINE_API_KEY")
            admin_key = os.environ.get("ASYNC_RL_ENGINE_ADMIN_KEY")
            self._engines[engine_id] = self._client(engine_id, url, api_key, admin_key, died=None)
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
            raise EnvironmentNotReady(f"{engine_id} cannot be restarted: {_last_line(error)}") from error
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
            raise EnvironmentNotReady(f"the trainer's ranks did not start: {_last_line(error)}") from error
        except TimeoutError as error:
            raise EnvironmentNotReady(
                f"the trainer's ranks did not start within trainer.start_timeout_s = {limit_s}"
            ) from error

    async def _start_ranks(self) -> Trainer:
        config, placement = self._config, self._config.placement
        gpus = placement.gpus_per_rank
        if gpus is None:
            gpus = 1.0 if _cuda(config.trainer.device) else 0.0
        ranks = config.trainer.num_ranks
        if self._rank_group is None:
            self._rank_group = await _reserve(
                [{"CPU": placement.cpus_per_rank, "GPU": gpus}] * ranks,
                placement.strategy,
                config.trainer.start_timeout_s,
            )
        actor_class = ray.remote(_RankActor)
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
                    _made(actor, config.trainer.worker, plain, rank, ranks, f"{host}:{port}"),
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
        return float(engine.tp_size) if isinstance(engine, SGLangEngines) and _cuda(engine.device) else 0.0

    def _engine_actor(self, index: int) -> Any:
        actor_class = ray.remote(_EngineActor)
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
                raise _cause(error, EnvironmentNotReady(f"{engine_id} did not start: {error!r}")) from error
            if engine is None:
                engine = self._client(engine_id, url, api_key, admin_key, self._died(engine_id))
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
                return f"its actor is gone: {_last_line(error)}"
            return last_words

        return died

    def _client(
        self,
        engine_id: str,
        url: str,
        api_key: str | None,
        admin_key: str | None,
        died: Callable[[], Awaitable[str | None]] | None,
    ) -> Engine:
        engine = self._config.engine
        assert isinstance(engine, SGLangEngines)
        return SGLangEngine(
            engine_id,
            url,
            self._facts,
            api_key=api_key,
            admin_key=admin_key,
            routing=self._config.routing.from_engine,
            narrow_routing=engine.narrow_routing,
            start_timeout_s=engine.start_timeout_s,
            request_timeout_s=engine.request_timeout_s,
            died=died,
        )


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


async def _made(actor: Any, *arguments: Any) -> None:
    try:
        await actor.make.remote(*arguments)
    except RayTaskError as error:
        failure = EnvironmentNotReady(f"a trainer rank could not be made: {_last_line(error)}")
        raise _cause(error, failure) from error


def _cause(error: Exception, otherwise: AsyncRLError) -> AsyncRLError:
    """Our own error as it was raised in the actor, or one that says what happened there."""
    ours = isinstance(error, RayTaskError) and isinstance(error.cause, AsyncRLError)
    return error.cause if ours else otherwise  # type: ignore[attr-defined]


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


def _node_address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _free_address() -> tuple[str, int]:
    """This node's address and a port that is free now."""
    host = _node_address()
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]


def _redirect_output(path: str) -> None:
    """Send everything this process prints to its own log in the run folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
