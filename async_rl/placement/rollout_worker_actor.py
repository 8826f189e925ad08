"""A rollout worker as a Ray actor: Ray starts the process and says where, messages go over a link of ours."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
from ray.exceptions import RayError

from async_rl.config import Config, parse_config, to_builtins
from async_rl.data.chat_format import load_chat_format
from async_rl.errors import EnvironmentNotReady
from async_rl.observability.loop_watchdog import LoopWatchdog
from async_rl.observability.metrics import Metrics
from async_rl.placement.actors import ActorHome, NodeActor, node_address
from async_rl.placement.ending import EXIT_LIMIT_S, end
from async_rl.placement.ray_trainer import cause_of, last_line
from async_rl.rollout.workers.link import LinkListener, connect_link, listen
from async_rl.rollout.workers.messages import Link
from async_rl.rollout.workers.worker import RolloutWorker
from async_rl.runtime.processes import Process, die_with_parent
from async_rl.runtime.supervision import Nursery, first_error

log = logging.getLogger(__name__)

_LEAVE_S: Final = 10.0
"""Once the link is closed, loops and tools have so long to let go of what they hold elsewhere."""


class RolloutWorkerActor(NodeActor):
    """The process of a rollout worker."""

    def __init__(self) -> None:
        die_with_parent()
        os.environ["OMP_NUM_THREADS"] = "1"

    def run(self, config: dict[str, Any], host: str, port: int, key: bytes) -> None:
        """Play for the driver at an address until the link is lost; in the main thread of the process."""
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
        sys.path.insert(0, os.getcwd())
        asyncio.run(_play(parse_config(config), host, port, key))


@asynccontextmanager
async def rollout_worker(config: Config, name: str, home: ActorHome, log_path: Path) -> AsyncIterator[Link]:
    """Start a rollout worker; it ends with the block, whatever state it is in.

    Raises:
        EnvironmentNotReady: It does not come up.
        ConfigError: It cannot load what the config names.
    """
    limit_s = config.rollout.worker_start_timeout_s
    options = {"num_cpus": config.placement.cpus_per_rollout_worker, "scheduling_strategy": "SPREAD"}
    actor: Any = ray.remote(RolloutWorkerActor).options(**options).remote()
    process: Process | None = None
    well = False
    try:
        try:
            async with asyncio.timeout(limit_s), listen(node_address()) as listener:
                process = await actor.arrive.remote(home, str(log_path))
                address = node_address(), listener.port, listener.key
                playing = actor.run.remote(to_builtins(shared_out(config)), *address)
                link = await _first(listener, playing)
        except (RayError, TimeoutError) as error:
            why = last_line(error) if isinstance(error, RayError) else "it was not there in time"
            failure = f"{name} did not start within rollout.worker_start_timeout_s = {limit_s}: {why}"
            raise cause_of(error, EnvironmentNotReady(failure)) from error
        log.info("%s is process %d of node %s", name, process.pid, process.host)
        try:
            yield link
        finally:
            link.close()
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await playing
                    well = True
    finally:
        await end(actor, process, grace_s=EXIT_LIMIT_S if well else 0.0)


def shared_out(config: Config) -> Config:
    """What one worker is given of a config: limits of the whole run are parted among the workers."""
    replace, workers = msgspec.structs.replace, config.rollout.num_workers
    rewards = {
        name: replace(
            reward, max_concurrent=reward.max_concurrent and max(1, reward.max_concurrent // workers)
        )
        for name, reward in config.rollout.rewards.items()
    }
    return replace(config, rollout=replace(config.rollout, rewards=rewards))


async def _first(listener: LinkListener, playing: Awaitable[None]) -> Link:
    """The worker's link, or what ended it before it had one."""

    async def watch() -> None:
        await playing
        raise EnvironmentNotReady("its process ended before it was there: see its log")

    try:
        async with Nursery() as nursery:
            nursery.start_task("start of a rollout worker", watch())
            link = await listener.accept_link()
            nursery.cancel_tasks()
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return link


async def _play(config: Config, host: str, port: int, key: bytes) -> None:
    metrics = Metrics()
    chat = load_chat_format(config.model.path)
    worker = RolloutWorker(config, chat=chat, metrics=metrics, clock=time.monotonic)
    with LoopWatchdog(metrics, config.doctor.blocked_s):
        await worker.run(await connect_link(host, port, key))
