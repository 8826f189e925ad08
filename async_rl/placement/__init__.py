"""Starts the processes of a run as Ray actors. No other package imports Ray.

```
 driver ─┬─► EngineActor, per engine            owns an SGLang server process and its GPUs; calls use HTTP
         ├─► RankActor, per trainer rank        owns a `trainer.worker`, in the trainer's placement group
         ├─► RolloutWorkerActor, per worker     runs agent loops; messages use a TCP link
         └─► FrameReaderActor, per node         verifies, deletes, sends and receives frames
```

On one machine the run starts Ray and stops it at its end; with `placement.ray_address` the same config runs
on a cluster. Trainer ranks map frames that are on their node; others come through Ray's object store.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from async_rl.config import Config
from async_rl.engines.sglang.server import SGLangServer
from async_rl.observability.console_report import RunProgress
from async_rl.observability.page.feed import DescribeSteps, no_description
from async_rl.observability.records import Summary
from async_rl.placement.local_ray import connect_ray, disconnect_ray, scratch_folder
from async_rl.placement.ray_cluster import RayCluster
from async_rl.rollout.workers.messages import Link
from async_rl.rollout.workers.worker_backend import OpenWorker, WorkerSpec
from async_rl.run import entry
from async_rl.runtime.supervision import cut_by, was_stopped_at_start
from async_rl.runtime.user_processes import end_leftovers, write_reports


async def run(
    config: Config,
    run_dir: Path,
    stop: asyncio.Event,
    progress: RunProgress | None = None,
    server: type[SGLangServer] = SGLangServer,
    describe_updates: DescribeSteps = no_description,
) -> Summary:
    """Run a config with its processes on Ray, by `async_rl.run.entry.run`.

    Args:
        config: The run's config.
        run_dir: The run's folder.
        stop: Set by the first signal.
        progress: Shows phases and steps on the terminal; None shows nothing.
        server: The server class that an engine's actor starts; every node must be able to import it.
        describe_updates: As for `async_rl.observability.page.feed.Feed`.
    """
    end_leftovers(run_dir)
    write_reports(run_dir)
    async with AsyncExitStack() as stack:
        async with cut_by(stop):
            cluster = await stack.enter_async_context(ray_cluster(config, run_dir, server))
        return await entry.run(
            config, run_dir, stop, cluster, progress=progress, describe_updates=describe_updates
        )


@asynccontextmanager
async def ray_cluster(
    config: Config, run_dir: Path, server: type[SGLangServer] = SGLangServer
) -> AsyncIterator[RayCluster]:
    """Join or start Ray, and end every process of the run with the block: at once if it was stopped while it
    was starting.
    """
    scratch = scratch_folder(run_dir)
    try:
        await connect_ray(config, scratch)
        at_once = False
        try:
            cluster = RayCluster(config, run_dir, server)
            try:
                yield cluster
            except BaseException as error:
                at_once = was_stopped_at_start(error)
                raise
            finally:
                await asyncio.shield(cluster.close(at_once=at_once))
        finally:
            await disconnect_ray()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@asynccontextmanager
async def rollout_workers(config: Config, folder: Path) -> AsyncIterator[OpenWorker]:
    """Yield what starts rollout workers for a command without a run; start Ray if the config has workers.

    Args:
        config: The settings of the command.
        folder: Its folder; workers write their logs into `logs` of it.
    """

    def refuse(spec: WorkerSpec) -> AbstractAsyncContextManager[Link]:
        raise AssertionError(f"{spec.name} is started, and the config has no rollout workers")

    if not config.num_workers:
        yield refuse
        return
    (folder / "logs").mkdir(exist_ok=True)
    async with ray_cluster(config, folder) as cluster:
        yield cluster.rollout_worker
