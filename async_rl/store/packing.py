"""From finished groups to a batch: checks ages, and leaves out what is too old.

It is the final check of the staleness bound: the trainer reads the batches that `pack_groups` makes.
Everything is decided by the summaries of the trajectories. The ranks that read the frames verify them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from async_rl.engine_protocol import EngineFacts
from async_rl.errors import DataError, InvariantError
from async_rl.runtime.reward_values import MAX_REWARD, reward_value
from async_rl.staleness import Backlog, StalenessPolicy
from async_rl.types import StoredTrajectory, TakenBatch, root_of

log = logging.getLogger(__name__)


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of packing: a batch, or the groups that cannot be trained on, with the reason."""

    batch: TakenBatch | None = None
    unusable: Mapping[str, str] = {}
    flaw: str = ""
    """What is wrong with the last one that is damaged."""
    node: str = ""
    """The node that has it; empty: the run's folder has it."""
    missing: Mapping[str, Collection[str]] = {}
    """Trajectories whose nodes have no frames of them any more, by group."""
    too_stale: tuple[str, ...] = ()
    """Trajectories of groups in the batch that are left out: all of their tokens are too old."""


def age_counts_from(
    trajectories: Iterable[StoredTrajectory], staleness_policy: StalenessPolicy
) -> int | None:
    """Return the version that the age of a finished group counts from; None when nothing was sampled.

    It is the version of the oldest token or, where old tokens are masked, that of the token with which the
    first of its trajectories would lose its last trained one.
    """
    mask = staleness_policy == "mask_tokens"
    versions = (t.newest_weight_version if mask else t.oldest_weight_version for t in trajectories)
    return min((version for version in versions if version is not None), default=None)


def pack_groups(
    version: int,
    stored: Mapping[str, Sequence[StoredTrajectory]],
    backlog: Backlog,
    min_group_size: int,
    facts: EngineFacts | None,
) -> Packed:
    """Make a batch of groups, to be consumed at `version`. From any thread.

    Args:
        version: The trainer's version.
        stored: The trajectories of each group, in the order of the batch.
        backlog: Its bound and policy say whether older tokens are masked; otherwise there are none.
        min_group_size: A group with fewer trajectories left is not trained.
        facts: The model's facts when routing is replayed, else None.

    Raises:
        InvariantError: When a trained token would exceed the bound.
    """
    oldest = version - backlog.max_staleness if backlog.staleness_policy == "mask_tokens" else None
    unusable, flaw = {}, ""
    trajectories: list[StoredTrajectory] = []
    group_index: list[int] = []
    too_stale: list[str] = []
    for index, (group_id, group) in enumerate(stored.items()):
        try:
            for trajectory in group:
                _check_versions(trajectory, version)
                _check_values(trajectory)
        except DataError as error:
            log.warning("group %s cannot be trained on: %s", group_id, error)
            unusable[group_id], flaw = "corrupt", str(error)
            continue
        usable = tuple(group)
        if oldest is not None:
            usable = tuple(t for t in group if not _is_all_older(t, oldest))
        if len(usable) < len(group):
            if _num_attempts(usable) < min(min_group_size, _num_attempts(group)):
                unusable[group_id] = "too_stale"
            kept = {t.trajectory_id for t in usable}
            too_stale += [t.trajectory_id for t in group if t.trajectory_id not in kept]
        trajectories += usable
        group_index += [index] * len(usable)
    if unusable:
        return Packed(unusable=unusable, flaw=flaw)
    batch = TakenBatch(
        batch_id=f"batch-{version:08d}",
        trainer_version=version,
        group_ids=tuple(stored),
        group_index=tuple(group_index),
        trajectories=tuple(trajectories),
        masked_below=oldest,
        num_experts=0 if facts is None else facts.num_experts,
        moe_layers=() if facts is None else facts.moe_layers,
        top_k=0 if facts is None else facts.top_k,
    )
    _check_ages(batch, backlog.max_staleness)
    return Packed(batch=batch, too_stale=tuple(too_stale))


def _check_ages(batch: TakenBatch, max_staleness: int) -> None:
    for trajectory, age in zip(batch.trajectories, batch.staleness, strict=True):
        if age > max_staleness:
            raise InvariantError(
                f"trajectory {trajectory.trajectory_id}, sampled by version "
                f"{batch.trainer_version - age}, would be trained at {batch.trainer_version}: staleness "
                f"{age} exceeds rollout.max_staleness = {max_staleness}"
            )


def _check_values(trajectory: StoredTrajectory) -> None:
    """Refuse what a trainer could not compute with; a stored group would stop every start of the run.

    Raises:
        DataError: It has no tokens or no reward, or a reward that is not finite in float32.
    """
    name = f"trajectory {trajectory.trajectory_id}"
    if not trajectory.num_tokens:
        raise DataError(f"{name} has no tokens")
    for reward in (trajectory.reward, *(each.reward for each in trajectory.turn_rewards)):
        if reward_value(reward) is None:
            raise DataError(
                f"{name} has the reward {reward!r}, expected a finite number, at most {MAX_REWARD:g}"
            )


def _check_versions(trajectory: StoredTrajectory, trainer_version: int) -> None:
    """Refuse tokens of versions that the trainer has not reached: it would train on them as fresher than any.

    Sessions refuse them when an answer ends; these come from elsewhere, such as an edited run folder.
    """
    newest = trajectory.newest_weight_version
    if newest is not None and newest > trainer_version:
        raise DataError(
            f"trajectory {trajectory.trajectory_id} has tokens of weight version {newest}; the trainer is at "
            f"{trainer_version}"
        )


def _num_attempts(trajectories: Iterable[StoredTrajectory]) -> int:
    """Count a trajectory and its branches as one."""
    return len({root_of(trajectory.trajectory_id) for trajectory in trajectories})


def _is_all_older(trajectory: StoredTrajectory, oldest: int) -> bool:
    newest = trajectory.newest_weight_version
    return newest is not None and newest < oldest
