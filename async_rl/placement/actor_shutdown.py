"""Shuts actors down: gracefully at the end of a run, by force when they have failed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_rl.runtime.processes import Process, kill

log = logging.getLogger(__name__)

EXIT_LIMIT_S: Final = 10.0
"""Time for a working actor to exit by itself; Ray reports actors that it must kill as failures."""

_KILL_LIMIT_S: Final = 30.0
"""A process that holds a GPU can take this long to exit even when it is killed."""


async def end_actor(actor: Any, process: Process | None, *, grace_s: float = 0.0) -> bool:
    """End an actor that may be running, dead, stopped or hung, and wait until its process is gone.

    Args:
        actor: The actor.
        process: Its process; None if the actor has never reported it.
        grace_s: Seconds for the actor to exit by itself before it is killed.

    Returns:
        Whether its process has certainly ended.
    """
    if process is None or not grace_s:
        ray.kill(actor)
    else:
        actor.__ray_terminate__.remote()
    if process is None:
        return False
    gone = False
    try:
        if process.host == ray.get_runtime_context().get_node_id():
            gone = await asyncio.to_thread(kill, process, _KILL_LIMIT_S, grace_s)
        elif process.host in await asyncio.to_thread(_alive):
            there = NodeAffinitySchedulingStrategy(process.host, soft=False)
            remote: Any = ray.remote(kill).options(scheduling_strategy=there, num_cpus=0)
            async with asyncio.timeout(2 * _KILL_LIMIT_S + grace_s):
                gone = await remote.remote(process, _KILL_LIMIT_S, grace_s)
        else:
            log.warning("process %d is lost with its node %s", process.pid, process.host)
            return False
    except (RayError, TimeoutError) as error:
        log.warning("cannot reach node %s: %s: %s", process.host, type(error).__name__, error)
    if not gone:
        log.warning("process %d of node %s may still run", process.pid, process.host)
    return gone


def _alive() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
