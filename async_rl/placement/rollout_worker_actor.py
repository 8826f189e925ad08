"""Runs a rollout worker in a Ray actor. Ray only starts the process; messages use a TCP link."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_rl.config import Config, parse_config, to_builtins
from async_rl.data.chat_format import load_chat_format
from async_rl.engine_protocol import Engine, EngineAddress
from async_rl.engines.model_facts import load_facts
from async_rl.engines.sglang.connect import sglang_client
from async_rl.errors import EnvironmentNotReady
from async_rl.observability.loop_watchdog import LoopWatchdog
from async_rl.observability.metrics import Metrics
from async_rl.placement.actor_shutdown import EXIT_LIMIT_S, end_actor
from async_rl.placement.actors import ActorSetup, NodeActor, node_address
from async_rl.placement.placements import MIN_CPUS, addresses_of, node_addresses
from async_rl.placement.ray_trainer import cause_of, last_line
from async_rl.rollout.workers.link import LinkListener, connect_link, listen
from async_rl.rollout.workers.messages import Link
from async_rl.rollout.workers.worker import START_TIMEOUT_S, RolloutWorker, WorkerFiles
from async_rl.rollout.workers.worker_backend import WorkerSpec
from async_rl.runtime.descriptors import raise_descriptor_limit
from async_rl.runtime.ids import new_id
from async_rl.runtime.printable import PrintableFormatter
from async_rl.runtime.processes import Process, die_with_parent
from async_rl.runtime.short_pauses import short_pauses
from async_rl.runtime.supervision import Nursery, first_error
from async_rl.runtime.user_processes import end_leftovers, mark_all_children, write_reports
from async_rl.store.archive import InspectedTrajectories
from async_rl.store.spool import AnswerFolder, FrameStore, SpoolFolder, folder_on_node

log = logging.getLogger(__name__)

_CLOSE_LIMIT_S: Final = 10.0
"""Time for loops and tools to release external resources after the link is closed, seconds."""


class RolloutWorkerActor(NodeActor):
    """The process of a rollout worker."""

    def __init__(self) -> None:
        die_with_parent()
        raise_descriptor_limit()  # a Ray cluster of others may have started us with the usual 1024
        os.environ["OMP_NUM_THREADS"] = "1"

    def run_worker(
        self,
        config: dict[str, Any],
        folder: str,
        frames: str | None,
        inspected: str | None,
        host: str,
        port: int,
        key: bytes,
    ) -> None:
        """Run the worker for the driver at an address until the link is lost; in the main thread.

        Completions go into its own `folder`, frames of finished trajectories into `frames`, copies for
        inspection into `inspected`.
        """
        handler = logging.StreamHandler()
        handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(handlers=[handler], level=logging.INFO)
        parsed = parse_config(config)
        run_dir = Path(parsed.run.dir) / parsed.run.name
        end_leftovers(run_dir)
        write_reports(run_dir)
        mark_all_children()
        asyncio.run(
            _run_worker(
                parsed,
                _frame_store(Path(folder), None if frames is None else Path(frames), parsed),
                None if inspected is None else InspectedTrajectories(Path(inspected)),
                await_link=lambda: connect_link(host, port, key),
            )
        )


@asynccontextmanager
async def rollout_worker(spec: WorkerSpec, setup: ActorSetup, log_path: Path) -> AsyncIterator[Link]:
    """Start a rollout worker, yield the link to it, and end it with the block, whatever its state.

    Raises:
        EnvironmentNotReady: The worker does not start.
        ConfigError: The worker cannot load an object that the config names.
    """
    name, config = spec.name, spec.config
    resources = {k: amount for k, amount in config.placement.resources_per_rollout_worker.items() if amount}
    cpus, gpus = resources.pop("CPU", MIN_CPUS), resources.pop("GPU", 0.0)
    strategy: Any = "SPREAD"
    try:
        if spec.node:
            alive = await asyncio.to_thread(node_addresses)
            if ids := [node_id for node_id, address in alive.items() if address == spec.node]:
                strategy = NodeAffinitySchedulingStrategy(ids[0], soft=True)
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "resources": resources,
            "scheduling_strategy": strategy,
        }
        actor: Any = ray.remote(RolloutWorkerActor).options(**options).remote()
    except RayError as error:
        raise EnvironmentNotReady(f"Ray cannot start {name}: {last_line(error)}") from error
    process: Process | None = None
    link: Link | None = None
    graceful = False
    try:
        try:
            async with asyncio.timeout(START_TIMEOUT_S), listen(node_address()) as listener:
                process = await actor.join_run.remote(setup, str(log_path))
                address = node_address(), listener.port, listener.key
                given = to_builtins(config_per_worker(config))
                places = (spec.folder, spec.frames, spec.inspected)
                folders = [None if path is None else str(path) for path in places]
                running = actor.run_worker.remote(given, *folders, *address)
                link = await _accept_link(listener, running)
                (link.peer_node,) = await asyncio.to_thread(addresses_of, [process.host])
        except (RayError, OSError) as error:  # TimeoutError is an OSError
            slow = f"it took too long, or no node has enough of {resources | {'CPU': cpus}}"
            why = slow if isinstance(error, TimeoutError) else last_line(error)
            failure = f"{name} did not start within {START_TIMEOUT_S} s: {why}"
            raise cause_of(error, EnvironmentNotReady(failure)) from error
        log.info("%s is process %d of node %s", name, process.pid, process.host)
        try:
            yield link
        finally:
            link.close()
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    await running
                    graceful = True
    finally:
        gone = await end_actor(actor, process, grace_s=EXIT_LIMIT_S if graceful else 0.0)
        if link is not None:
            link.peer_has_ended = gone


def _frame_store(folder: Path, frames: Path | None, config: Config) -> FrameStore:
    if frames is None:
        return AnswerFolder(folder)
    if config.queue.spool_dir is None:
        return SpoolFolder(folder)
    node = node_address()
    return SpoolFolder(folder, node, frames=folder_on_node(frames, node))


def config_per_worker(config: Config) -> Config:
    """Return the config of one worker: limits of the whole run are divided by the number of workers."""
    replace, workers = msgspec.structs.replace, config.num_workers
    rewards = {
        name: replace(
            reward, max_concurrent=reward.max_concurrent and max(1, reward.max_concurrent // workers)
        )
        for name, reward in config.rollout.rewards.items()
    }
    return replace(config, rollout=replace(config.rollout, rewards=rewards))


async def _accept_link(listener: LinkListener, running: Awaitable[None]) -> Link:
    """Wait for the link of the worker, or raise the error that ended it before."""

    async def watch() -> None:
        await running
        raise EnvironmentNotReady("its process ended during the start: see its log")

    try:
        async with Nursery() as nursery:
            nursery.start_task("start of a rollout worker", watch())
            link = await listener.accept_link()
            nursery.cancel_tasks()
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return link


async def _run_worker(
    config: Config,
    frames: FrameStore,
    inspected: InspectedTrajectories | None,
    await_link: Callable[[], Awaitable[Link]],
) -> None:
    metrics = Metrics()
    chat = load_chat_format(config.model.path, config.model.trusted_roles)
    facts = load_facts(config.model.path)

    def connect(engine_id: str, address: EngineAddress | None) -> Engine:
        assert address is not None, "engines of a run with rollout workers are SGLang servers"
        model = engine_id.rpartition("-")[0]
        of_model = config.of_model(model) if model in config.models else config
        its_facts = load_facts(of_model.model.path) if of_model is not config else facts
        return sglang_client(of_model, engine_id, address.url, its_facts, (address.api_key, None), None)

    worker = RolloutWorker(
        config,
        chat=chat,
        facts=facts,
        connect=connect,
        new_id=new_id,
        metrics=metrics,
        clock=time.monotonic,
        files=WorkerFiles(frames, inspected, syncs_journal=True),
    )
    with short_pauses(), LoopWatchdog(metrics):
        try:
            await worker.run(await await_link())
        finally:
            worker.write_and_close()
