"""Runs a config to its end: the orchestrator, with metrics, live page and trackers around it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from async_rl.config import Config
from async_rl.observability.console_report import RunProgress
from async_rl.observability.discovery import URL_FILE, announced
from async_rl.observability.endpoints import serve
from async_rl.observability.metrics import Metrics
from async_rl.observability.page.feed import DescribeSteps, Feed, no_description
from async_rl.observability.page.routes import page_routes
from async_rl.observability.records import Summary
from async_rl.observability.trackers.choice import tracking
from async_rl.run.cluster import Cluster
from async_rl.run.doctor import recording_waits
from async_rl.run.inputs import RunInputs
from async_rl.run.orchestrator import Orchestrator
from async_rl.run.plan_watch import PlanWatch
from async_rl.runtime.ids import new_id
from async_rl.runtime.supervision import cut_by, observer, services
from async_rl.runtime.threads import call_until_cancelled


async def run(
    config: Config,
    run_dir: Path,
    stop: asyncio.Event,
    cluster: Cluster,
    *,
    progress: RunProgress | None = None,
    clock: Callable[[], float] = time.monotonic,
    new_id: Callable[[], str] = new_id,
    describe_updates: DescribeSteps = no_description,
) -> Summary:
    """Run a config to its end, or until `stop` is set and the running trajectories have drained.

    Args:
        config: The run's config.
        run_dir: The run's folder. An earlier incarnation of the run is continued from it.
        stop: Set by the first signal.
        cluster: Starts the processes of the run.
        progress: Shows phases and steps on the terminal; None shows nothing.
        clock: Monotonic seconds.
        new_id: Returns fixed-width unique ids.
        describe_updates: As for `Feed`.

    Raises:
        AsyncRLError: The error of the service that failed, inside an exception group.
    """
    async with cut_by(stop):
        inputs = await call_until_cancelled(lambda: RunInputs.load(config, new_id), name="inputs")
    metrics = Metrics()
    async with tracking(config, run_dir, metrics) as trackers:
        orchestrator = Orchestrator(
            config,
            run_dir,
            stop,
            cluster,
            metrics,
            clock,
            inputs,
            progress=progress,
            trackers=trackers,
            plan=PlanWatch(config, run_dir, clock),
        )
        status, run_log, host = orchestrator.live_status, orchestrator.run_log, config.metrics.host
        page = Feed(
            config,
            status.now,
            lambda: run_log.records,
            lambda: run_log.evaluations,
            describe_updates=describe_updates,
        )
        async with (
            recording_waits(orchestrator.waits, metrics),
            serve(metrics, host, config.metrics.port, status.health, page_routes(page)) as url,
            services(page=observer(page.run)),
        ):
            (run_dir / URL_FILE).write_text(url)
            targets = Path(config.metrics.targets_dir or run_dir.parent / ".prometheus")
            if progress is not None:
                progress.start(config, run_dir, url)
            try:
                with announced(url, config.run.name, targets):
                    return await orchestrator.run()
            finally:
                if progress is not None:
                    progress.stop()
