"""Where sessions run: in this process, or in rollout workers. Training, evaluations and commands ask here."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.engines.pool import EnginePool
from async_rl.rollout.attempt import LocalBackend, RolloutBackend
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.workers.worker_backend import OpenWorker, WorkerBackend
from async_rl.store.archive import InspectedTrajectories
from async_rl.store.journal import Journal
from async_rl.store.journal_folders import JournalFolders
from async_rl.store.spool import AnswerSpool, Spool


def choose_backend(
    context: SessionContext,
    pool: EnginePool,
    spool: Spool | AnswerSpool,
    open_worker: OpenWorker,
    *,
    inspected: InspectedTrajectories | None = None,
    journal: Journal | None = None,
    journals: JournalFolders | None = None,
    models: Mapping[str, EnginePool] | None = None,
    name: str = "rollout-worker",
) -> RolloutBackend:
    """Return the backend that the config asks for.

    Args:
        context: What sessions in this process share; `num_workers` of its config says where they run.
        pool: The engines that sessions call.
        spool: Stores finished trajectories.
        open_worker: Starts a rollout worker.
        inspected: Keeps a copy of each trajectory for inspection.
        journal: The journal of sessions in this process; None: they have none.
        journals: The journals of workers; None: they have none.
        models: The engines of further models, which `context` has too, by the model's name.
        name: The name of a worker begins with it.

    Raises:
        ConfigError: Agent loop or reward cannot be loaded in this process.
    """
    if context.config.num_workers:
        return WorkerBackend(
            context.config,
            open_worker,
            context.metrics,
            {"": pool, **(models or {})},
            context.clock,
            spool,
            journals,
            inspected=inspected,
            name=name,
        )
    backend = LocalBackend(context, spool, inspected)
    backend.journal = journal
    return backend
