"""Builders of trajectories, groups and traces with content that differs wherever it may differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from async_rl.engine_protocol import EngineFacts
from async_rl.routing import fit, make_trace
from async_rl.store.archive import Archive
from async_rl.store.ledger import Ledger
from async_rl.store.spool import SpoolFolder
from async_rl.types import (
    Context,
    Group,
    Outcome,
    RoutingTrace,
    Sampled,
    Segment,
    StoredTrajectory,
    Trajectory,
)

FACTS = EngineFacts(
    num_layers=3, moe_layers=(1, 2), num_experts=8, top_k=2, vocab_size=512, context_length=512
)


def make_rows(count: int, seed: int = 0, layers: int = 2, top_k: int = 2, experts: int = 8) -> np.ndarray:
    """`[count, layers, top_k]` ids, distinct within each row."""
    random = np.random.default_rng(seed)
    return np.argsort(random.random((count, layers, experts)), axis=-1)[..., :top_k].astype(np.int32)


def make_trajectory(
    trajectory_id: str,
    group_id: str = "group",
    *,
    prompt: int = 3,
    sampled: Sequence[tuple[int, int]] = ((4, 0),),
    routing: bool = True,
    reward: float | None = 1.0,
) -> Trajectory:
    """A trajectory of one prompt and, for each (tokens, weight version), a sampled segment."""
    seed = sum(trajectory_id.encode())
    random = np.random.default_rng(seed)
    segments: list[Segment] = [Context(token_ids=random.integers(0, 512, prompt).astype(np.int32))]
    for count, version in sampled:
        segments.append(
            Sampled(
                token_ids=random.integers(0, 512, count).astype(np.int32),
                rollout_log_probs=-random.random(count).astype(np.float32),
                weight_version=version,
                engine_id="engine-0",
                finish_reason="stop",
            )
        )
    trace: RoutingTrace | None = None
    if routing:
        fed = np.concatenate([segment.token_ids for segment in segments])[:-1]
        rows = make_rows(len(fed), seed)
        trace = make_trace(rows, 8, sampled[-1][1], moe_layers=FACTS.moe_layers, token_ids=fed)
    return Trajectory(
        trajectory_id=trajectory_id,
        group_id=group_id,
        task_id="task",
        segments=tuple(segments),
        trace=trace,
        outcome=Outcome(stop_reason="completed", reward=reward, num_interruptions=len(sampled) - 1),
    )


class MadeGroup(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A finished group before its trajectories are stored."""

    group_id: str
    task_id: str
    trajectories: tuple[Trajectory | StoredTrajectory, ...]

    def stored_in(self, spool: Path) -> Group:
        """Store the trajectories as some process of the run does, in a folder of the spool."""
        folder = spool / "000000-test"
        folder.mkdir(parents=True, exist_ok=True)
        writer = SpoolFolder(folder)
        stored = [
            each if isinstance(each, StoredTrajectory) else writer.store_tree([each])[0]
            for each in self.trajectories
        ]
        return Group(group_id=self.group_id, trajectories=tuple(stored))


def make_group(group_id: str, size: int = 2, version: int = 0, tokens: int = 4, **others: bool) -> MadeGroup:
    """Siblings named `<group>-0`, `<group>-1`, …; the i-th samples i tokens more than the first."""
    return MadeGroup(
        group_id=group_id,
        task_id="task",
        trajectories=tuple(
            make_trajectory(f"{group_id}-{i}", group_id, sampled=((tokens + i, version),), **others)
            for i in range(size)
        ),
    )


def verify(trace: RoutingTrace, token_ids: np.ndarray, moe_layers: Sequence[int]) -> None:
    """Check the trace of a finished trajectory: its text, its layers, its ids and its versions."""
    assert fit(trace, token_ids) is trace
    verify_rows(trace, len(token_ids), moe_layers)


def verify_rows(trace: RoutingTrace, num_tokens: int, moe_layers: Sequence[int]) -> None:
    """Check a trace except for its text."""
    assert len(trace.rows) == num_tokens - 1
    assert trace.moe_layers == tuple(moe_layers)
    reported = trace.rows[trace.valid]
    assert make_trace(reported, trace.num_experts, 0, moe_layers=moe_layers).rows.dtype == trace.rows.dtype
    bounds = [0, *(span.end for span in trace.spans)]
    assert [span.start for span in trace.spans] == bounds[:-1]
    assert bounds[-1] == len(trace.rows)


def archive_trajectory(archive: Archive, trajectory: Trajectory, attempt: int = 1) -> None:
    """Keep and report a trajectory that ended, as the backend and the manager do."""
    archive.inspected.keep(trajectory, attempt)
    archive.ended(StoredTrajectory.of(trajectory), attempt)


def archive_failure(archive: Archive, trajectory: Trajectory, error: Exception, attempt: int = 1) -> None:
    """Keep and report an attempt that failed."""
    archive.inspected.keep(trajectory, attempt)
    archive.failed(StoredTrajectory.of(trajectory), attempt, error)


def roll_back(ledger: Ledger, step: int) -> None:
    """Continue from the checkpoint of a step, which the ledger knows."""
    if step:
        ledger.record_trained((), step, "of-an-earlier-process")
    ledger.rollback(step)
