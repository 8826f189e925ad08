"""Trajectory queues for tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from async_rl.engine_protocol import EngineFacts
from async_rl.observability.metrics import Metrics
from async_rl.staleness import Backlog, StalenessPolicy
from async_rl.store.ledger import Ledger
from async_rl.store.outstanding import OutstandingGroups
from async_rl.store.spool import Spool
from async_rl.store.trajectory_queue import TrajectoryQueue
from async_rl.types import TakenBatch


async def _read_nothing(batch: TakenBatch) -> Mapping[str, str]:
    return {}


def make_queue(
    ledger: Ledger,
    spool: Spool,
    *,
    groups_per_batch: int,
    max_staleness: int,
    staleness_policy: StalenessPolicy = "wait",
    version: int = 0,
    min_group_size: int = 1,
    facts: EngineFacts | None = None,
    read_batch: Callable[[TakenBatch], Awaitable[Mapping[str, str]]] = _read_nothing,
    metrics: Metrics | None = None,
    **of_groups: Any,
) -> TrajectoryQueue:
    """A queue with its outstanding groups, whose other settings are `of_groups`."""
    backlog = Backlog(groups_per_batch, max_staleness, staleness_policy, version)
    return TrajectoryQueue(
        OutstandingGroups(ledger, spool, backlog, metrics or Metrics(), **of_groups),
        min_group_size=min_group_size,
        facts=facts,
        read_batch=read_batch,
    )
