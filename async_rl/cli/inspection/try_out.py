"""`async-rl rollout CONFIG`: runs an agent loop, its tools and its reward on an engine, without a trainer.

```
 first tasks ──► RolloutManager ──► sessions ──► one engine: started here, `engine.urls`, or simulated
                      └─ observer: each trajectory is shown as it ends
```

Manager, sessions, queue, engines and rollout workers are those of a run, so that results carry over. A
trajectory that fails is not retried, but shown with the traceback.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from async_rl.cli.inspection.show import show_summary, show_trajectory, terminal
from async_rl.cli.inspection.trajectory_view import TrajectoryView, decoder, view_trajectory
from async_rl.config import (
    Config,
    FrozenModelConfig,
    JudgeReward,
    SGLangEngines,
    TeacherConfig,
    load_config,
)
from async_rl.config.urls_file import read_urls
from async_rl.data.chat_format import load_chat_format
from async_rl.data.dataset import load_run_tasks, order_of
from async_rl.data.feeder import Feeder
from async_rl.engine_protocol import Engine
from async_rl.engines.frozen_models import check_served_model
from async_rl.engines.model_facts import load_facts
from async_rl.engines.model_files import check_weights
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.engines.sglang.connect import external_keys, sglang_client
from async_rl.engines.sglang.server import SGLangServer
from async_rl.engines.simulated import SimulatedEngine
from async_rl.errors import AsyncRLError, ConfigError, CorruptFrame, EnvironmentNotReady
from async_rl.observability.metrics import Metrics
from async_rl.observability.text_console import TextConsole
from async_rl.placement import rollout_workers
from async_rl.rollout.attempt import user_frames
from async_rl.rollout.manager import RolloutManager
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.workers.backend_choice import choose_backend
from async_rl.run.preflight import check_config
from async_rl.runtime.ids import new_id
from async_rl.runtime.printable import print_text
from async_rl.runtime.supervision import first_error, services
from async_rl.staleness import Backlog
from async_rl.store.archive import ArchivedTrajectory, ArchiveEvent, InspectedTrajectories, Observer
from async_rl.store.ledger import Ledger
from async_rl.store.outstanding import OutstandingGroups
from async_rl.store.spool import Spool
from async_rl.store.trajectory_queue import TrajectoryQueue
from async_rl.types import Outcome, StoredTrajectory, Task, Trajectory

OpenEngines = Callable[..., AbstractAsyncContextManager[list[Engine]]]
"""Opens engines; gets the config and a folder for their logs."""

ON_THIS_MACHINE: Final = (
    "placement.ray_address=null",
    "placement.resources_per_rollout_worker={}",
)
"""Settings under which rollout workers are on this machine, whatever the nodes of a cluster have."""

_OVERRIDES: Final = (
    "rollout.max_attempts=1",
    "rollout.min_group_size=1",
    "rollout.dynamic_filtering=false",
    "rollout.straggler_wait_s=null",
    "rollout.max_failed_share=1.0",
    "trainer.loss.advantages=reinforce++",
    "trainer.loss.advantages_args={}",
    "trainer.critic={}",
    "trainer.keep_best=null",
    "evaluation.every=0",
    "evaluation.at_start=false",
    *ON_THIS_MACHINE,
    "queue.spool_dir=null",
)
"""Settings under which every trajectory is kept, independent of its siblings, and all processes are here."""


def rollout(
    path: Path,
    overrides: Sequence[str],
    *,
    number: int,
    task_id: str | None = None,
    special: bool = False,
    as_json: bool = False,
    save: Path | None = None,
    console: TextConsole | None = None,
    open_engines: OpenEngines | None = None,
) -> int:
    """Try a config's agent loop, and show the trajectories.

    Args:
        path: The config's YAML file.
        overrides: `dotted.key=value` changes to it.
        number: Number of trajectories: of the first tasks in the order of a run, or siblings of one task.
        task_id: That one task.
        special: Whether special tokens are shown.
        as_json: Print a line of JSON for each trajectory instead.
        save: Write these lines into a file.
        console: Where to print; None takes stdout.
        open_engines: Opens the engines; None opens those of the config.

    Returns:
        The exit code: 1 when a trajectory failed.

    Raises:
        ConfigError: The config cannot work or has no such task, or `save` cannot be written.
        EnvironmentNotReady: The engine did not start.
    """
    if number < 1:
        raise ConfigError(f"--n is {number}; expected at least 1")
    group_size = 1 if task_id is None else number
    config = load_config(path, [*overrides, *_OVERRIDES, f"rollout.group_size={group_size}"])
    limit = min(number, config.rollout.max_concurrent_trajectories)
    config = replace(config, rollout=replace(config.rollout, max_concurrent_trajectories=limit))
    check_config(config)
    models = models_asked(config)
    trainer = replace(config.trainer, loss=replace(config.trainer.loss, teacher=TeacherConfig()))
    config = replace(config, trainer=trainer, models=models)  # nothing is trained
    tasks = choose_tasks(config, number, task_id)
    if save is not None:
        try:
            save.open("ab").close()
        except OSError as error:
            raise ConfigError(
                f"--save: {save} cannot be written: {error.strerror}; expected a file in a folder that exists"
            ) from error
    console = console or terminal()
    decode = decoder(load_chat_format(config.model.path), special=special)
    views: list[TrajectoryView] = []

    def ended(trajectory: ArchivedTrajectory) -> None:
        now = ArchiveEvent(unix_s=time.time(), what="ended")
        views.append(view_trajectory(trajectory, decode, history=[] if not as_json else [now]))
        if as_json:
            print_text(msgspec.json.encode(views[-1]).decode(), flush=True)
        else:
            show_trajectory(console, views[-1])

    with tempfile.TemporaryDirectory(prefix="async-rl-rollout-") as folder:
        try:
            asyncio.run(try_out(config, tasks, ended, Path(folder), open_engines or engines_from))
        except ExceptionGroup as group:
            cause = first_error(group)
            if not isinstance(cause, AsyncRLError):
                raise
            raise cause from group
    if save is not None:
        save.write_bytes(b"".join(msgspec.json.encode(view) + b"\n" for view in views))
    if not as_json:
        show_summary(console, views)
    failed = [view.error for view in views if view.error is not None]
    if failed:
        why = failed[-1].splitlines()[0]
        print_text(
            f"async-rl: {len(failed)} of {len(views)} trajectories failed; the last one: {why}",
            file=sys.stderr,
        )
    return int(bool(failed))


def choose_tasks(config: Config, number: int, task_id: str | None) -> list[Task]:
    """Return the tasks of the trajectories, in the order of a run.

    Raises:
        ConfigError: There is no such task.
    """
    tasks = load_run_tasks(config)
    if task_id is None:
        order = order_of(tasks, config.run.seed, config.data.shuffle)
        return [tasks[order.task_at(position)] for position in range(number)]
    found = [task for task in tasks if task.task_id == task_id]
    if not found:
        raise ConfigError(f"--task: the data has no task {task_id!r}; its first is {tasks[0].task_id!r}")
    return found


async def try_out(
    config: Config,
    tasks: Sequence[Task],
    ended: Callable[[ArchivedTrajectory], None],
    folder: Path,
    open_engines: OpenEngines,
) -> None:
    """Generate a group for each task, to the end.

    Args:
        config: Configures engines, agent loop and reward.
        tasks: One per group.
        ended: Called with each trajectory when it ends, or fails with its outcome's error.
        folder: Temporary folder for this call.
        open_engines: Opens the engines.
    """
    clock, metrics, facts = time.monotonic, Metrics(), load_facts(config.model.path)
    spool = Spool(folder / "spool", config.queue.max_bytes)
    inspected = InspectedTrajectories(folder / "trajectories")
    # More groups than tasks, so that admission stays open until the tasks are exhausted.
    backlog = Backlog(groups_per_batch=len(tasks) + 1, max_staleness=0, staleness_policy="wait")
    ledger = Ledger(folder / "ledger.sqlite")
    queue = TrajectoryQueue(OutstandingGroups(ledger, spool, backlog, metrics, clock=clock))
    pool = EnginePool(metrics, clock, max_calls=config.engine.max_calls)
    models = {name: EnginePool(metrics, clock, max_calls=config.engine.max_calls) for name in config.models}
    chat = load_chat_format(config.model.path, config.model.trusted_roles)
    context = SessionContext(
        chat=chat,
        config=config,
        metrics=metrics,
        clock=clock,
        serving_clock=pool.own.serving_clock,
        calls=pool.dispatcher,
        facts=facts,
        new_id=new_id,
        models={name: model.dispatcher for name, model in models.items()},
    )

    async def watch() -> None:
        """End the command when an engine fails, because nothing repairs it."""
        failed = await pool.wait_for_repair()
        raise EnvironmentNotReady(f"engine {failed} failed: {pool.error_of(failed)}")

    try:
        async with (
            rollout_workers(config, folder) as open_worker,
            open_models(config, folder / "logs", open_engines, models),
            open_engines(config, folder / "logs") as engines,
        ):
            manager = RolloutManager(
                context,
                feeder=Feeder(tasks, order_of(tasks, seed=0, shuffle=False), epochs=1),
                pool=pool,
                queue=queue,
                backend=choose_backend(context, pool, spool, open_worker, inspected=inspected, models=models),
                observer=_TrajectoryReporter(inspected, ended),
            )
            await serve_engines(engines, config, pool)
            assert pool.engines(EngineState.SERVING), "there is at least one engine"
            async with services(rollouts=manager.run, watch=watch):
                await manager.drained.wait()
    finally:
        queue.close()


class _TrajectoryReporter(Observer):
    """Reports every trajectory once, and failed ones with the traceback of the user's code."""

    def __init__(self, inspected: InspectedTrajectories, ended: Callable[[ArchivedTrajectory], None]) -> None:
        self._inspected = inspected
        self._ended = ended

    def ended(self, trajectory: StoredTrajectory, attempt: int) -> None:
        """Implement `Observer.ended`."""
        kept = self._kept(trajectory, attempt, None)
        self._ended(kept.with_reward(trajectory.reward, trajectory.reward_parts))

    def failed(self, trajectory: StoredTrajectory, attempt: int, error: Exception) -> None:
        """Implement `Observer.failed`."""
        kept = self._kept(trajectory, attempt, f"{type(error).__name__}: {error}")
        told = "\n".join([str(kept.trajectory.outcome.error), *filter(None, [user_frames(error)])])
        outcome = replace(kept.trajectory.outcome, error=told)
        self._ended(replace(kept, trajectory=replace(kept.trajectory, outcome=outcome)))

    def _kept(self, trajectory: StoredTrajectory, attempt: int, error: str | None) -> ArchivedTrajectory:
        """Return what was kept of an attempt: without tokens if its process died before it wrote the file."""
        try:
            return self._inspected.read_file(trajectory.trajectory_id, attempt)
        except (CorruptFrame, FileNotFoundError):
            outcome = Outcome(
                stop_reason=trajectory.stop_reason,
                error=error,
                num_turns=trajectory.num_turns,
                finished_s=trajectory.duration_s,
            )
            known = Trajectory(
                trajectory_id=trajectory.trajectory_id,
                group_id=trajectory.group_id,
                task_id=trajectory.task_id,
                segments=(),
                trace=None,
                outcome=outcome,
            )
            return ArchivedTrajectory(trajectory=known, routing=None)


def models_asked(config: Config) -> dict[str, FrozenModelConfig]:
    """Return the models that rewards, agent loops and tools may ask: all but one that is only a teacher."""
    judges = {reward.judge for reward in config.rollout.rewards.values() if isinstance(reward, JudgeReward)}
    teacher = config.trainer.loss.teacher.model
    return {name: model for name, model in config.models.items() if name != teacher or name in judges}


@asynccontextmanager
async def open_models(
    config: Config, log_dir: Path, open_engines: OpenEngines, pools: Mapping[str, EnginePool]
) -> AsyncIterator[None]:
    """Open an engine of each model in `models`, and let it serve in the model's pool."""
    async with AsyncExitStack() as stack:
        for name, pool in pools.items():
            its = config.of_model(name)
            engines = await stack.enter_async_context(open_engines(its, log_dir / name, name))
            await serve_engines(engines, its, pool, key=f"models.{name}")
        yield


async def serve_engines(
    engines: Sequence[Engine], config: Config, pool: EnginePool, *, key: str = "model"
) -> set[int]:
    """Let engines of a config's model serve in a pool, and return their weight versions.

    Raises:
        ConfigError: An engine serves another model than the config's section `key` names.
    """
    versions = set()
    for engine in engines:
        health = await engine.health()
        check_served_model(config, engine.engine_id, health.model_path, key=key)
        versions.add(health.weight_version)
        pool.add_engine(engine)
        pool.serve_engine(engine.engine_id, health.weight_version)
    return versions


@asynccontextmanager
async def engines_from(config: Config, log_dir: Path, name: str = "engine") -> AsyncIterator[list[Engine]]:
    """Open the engines that a config names; start only one. Their names begin with `name`.

    Raises:
        ConfigError: The file of URLs has none.
        EnvironmentNotReady: An engine did not start.
    """
    # There is no adapter to load, and no trainer to share a device with.
    placement = replace(config.placement, shared=False)
    config = replace(config, trainer=replace(config.trainer, lora=None), placement=placement)
    engine, facts = config.engine, load_facts(config.model.path)
    if not isinstance(engine, SGLangEngines):
        yield [SimulatedEngine(f"{name}-0", engine, seed=config.run.seed, facts=facts)]
        return
    urls = list(engine.urls)
    if engine.urls_file is not None:
        urls = list(read_urls(Path(engine.urls_file)))
        if not urls:
            raise ConfigError(f"engine.urls_file: {engine.urls_file} has no URL")
    if urls:
        clients: list[Engine] = [
            sglang_client(config, f"{name}-{index}", url, facts, external_keys(url), None)
            for index, url in enumerate(urls)
        ]
        try:
            for client, url in zip(clients, urls, strict=True):
                print_text(
                    f"waiting for the server at {url}, for up to engine.start_timeout_s = "
                    f"{engine.start_timeout_s:g} s",
                    file=sys.stderr,
                    flush=True,
                )
                await client.wait_ready()
            yield clients
        finally:
            for client in clients:
                await client.close()
        return
    check_weights(config.model.path, facts)
    server = SGLangServer(config, index=0, log_dir=log_dir)
    print_text(f"starting an SGLang server for {config.model.path}", file=sys.stderr, flush=True)
    try:
        await server.start()
        keys = (server.api_key, server.admin_key)
        started = sglang_client(config, f"{name}-0", server.url, facts, keys, server.state)
        try:
            await started.wait_ready()
            yield [started]
        finally:
            await started.close()
    finally:
        await server.stop()
