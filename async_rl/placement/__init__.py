"""Where processes run: Ray actors for everything that is not the driver. The only package that imports Ray.

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
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import ray

from async_rl.config import Config
from async_rl.engines.sglang.server import SGLangServer
from async_rl.observability.console_report import RunProgress
from async_rl.observability.records import Summary
from async_rl.placement.local_ray import connect, scratch_folder
from async_rl.placement.ray_cluster import RayCluster
from async_rl.run import orchestrator


async def run(
    config: Config,
    run_dir: Path,
    stop: asyncio.Event,
    progress: RunProgress | None = None,
    server: type[SGLangServer] = SGLangServer,
) -> Summary:
    """Run a config with its processes on Ray; see `async_rl.run.orchestrator.run`.

    Args:
        config: What to run.
        run_dir: The run's folder.
        stop: Set by the first signal.
        progress: Where steps are shown.
        server: What an engine's actor starts; its module is found on every node.
    """
    async with ray_cluster(config, run_dir, server) as cluster:
        return await orchestrator.run(config, run_dir, stop, cluster, progress=progress)


@asynccontextmanager
async def ray_cluster(
    config: Config, run_dir: Path, server: type[SGLangServer] = SGLangServer
) -> AsyncIterator[RayCluster]:
    """Join or start Ray, and end every process of the run with the block."""
    scratch = scratch_folder(run_dir)
    await connect(config, scratch)
    cluster = RayCluster(config, run_dir, server)
    try:
        yield cluster
    finally:
        try:
            await asyncio.shield(cluster.close())
        finally:
            await asyncio.to_thread(ray.shutdown)
            shutil.rmtree(scratch, ignore_errors=True)
