"""From finished groups in the spool to a batch frame: reads, verifies, masks old tokens and packs.

It is the final check of the staleness bound: the trainer reads the batches that `Packer` writes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from async_rl.engine_protocol import EngineFacts
from async_rl.errors import AlignmentError, CorruptFrame, InvariantError
from async_rl.observability.metrics import Metrics
from async_rl.queue import batching
from async_rl.queue.spool import Spool, SpoolRef
from async_rl.routing import invalid_rows, recomputed_rows
from async_rl.staleness import StalenessPolicy, staleness
from async_rl.types import Group, Trajectory, root_of

log = logging.getLogger(__name__)


class TakenBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch for the trainer, with the figures that callers need without reading it.

    Tuples are per trajectory, in the order of the batch.
    """

    batch_id: str
    path: str
    """The path of the `TrainBatch` frame; valid until the batch is settled."""
    nbytes: int
    trainer_version: int
    group_ids: tuple[str, ...]
    trajectory_ids: tuple[str, ...]
    staleness: tuple[int, ...]
    """The staleness of the oldest trained token."""
    lengths: tuple[int, ...]
    """The number of tokens."""
    sampled_lengths: tuple[int, ...]
    """The number of tokens that the policy wrote, each counted with the one trajectory that trains it."""
    rewards: tuple[float, ...]
    interruptions: tuple[int, ...]
    resumes: tuple[int, ...]
    num_masked_tokens: int
    """Sampled tokens that are too old to be trained (`rollout.staleness_policy: mask_tokens`)."""
    routing_rows: int
    routing_rows_invalid: int
    routing_rows_recomputed: int

    @property
    def num_tokens(self) -> int:
        """The tokens of all trajectories."""
        return sum(self.lengths)

    @property
    def num_sampled_tokens(self) -> int:
        """The tokens that the policy wrote."""
        return sum(self.sampled_lengths)


class StoredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A finished group in the spool."""

    group_id: str
    ref: SpoolRef
    trajectory_ids: frozenset[str]
    """The trajectories of the frame that are still to be trained."""
    ceiling: int | None = None
    """Versions above it were undone by a restart: tokens labelled with them count as sampled by it."""


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of packing: a batch, or the groups that cannot be trained on, with the reason."""

    batch: TakenBatch | None = None
    ref: SpoolRef | None = None
    unusable: Mapping[str, str] = {}
    flaw: str = ""
    """What is wrong with the last one that is damaged."""
    too_stale: tuple[str, ...] = ()
    """Trajectories of groups in the batch that are left out: all of their tokens are too old."""


def age_counts_from(group: Group, staleness_policy: StalenessPolicy) -> int | None:
    """Return the version that the age of a finished group counts from; None when nothing was sampled.

    It is the version of the oldest token or, where old tokens are masked, that of the token with which the
    first of its trajectories would lose its last trained one.
    """
    if staleness_policy != "mask_tokens":
        return group.oldest_weight_version
    newest = (trajectory.newest_weight_version for trajectory in group.trajectories)
    return min((version for version in newest if version is not None), default=None)


class Packer:
    """Makes batches of stored groups. It has no state: any thread may pack."""

    def __init__(
        self,
        spool: Spool,
        batches: Spool,
        *,
        max_staleness: int,
        staleness_policy: StalenessPolicy,
        min_group_size: int,
        facts: EngineFacts | None,
        metrics: Metrics | None,
    ) -> None:
        """Read from one spool, write to another.

        Args:
            spool: Holds the groups.
            batches: Receives the batches.
            max_staleness: η.
            staleness_policy: Whether older tokens are masked; otherwise there are none.
            min_group_size: A group with fewer trajectories left is not trained.
            facts: The model's facts when routing is replayed, else None.
            metrics: Counts refused routing rows.
        """
        self._spool = spool
        self._batches = batches
        self._max_staleness = max_staleness
        self._staleness_policy = staleness_policy
        self._min_group_size = min_group_size
        self._facts = facts
        self._metrics = metrics

    def pack_groups(self, version: int, stored: Sequence[StoredGroup]) -> Packed:
        """Read, verify and pack groups, to be consumed at `version`.

        Raises:
            InvariantError: When a trained token would exceed the bound.
            SpoolFull: When the disk has no space for the batch.
        """
        oldest = version - self._max_staleness if self._staleness_policy == "mask_tokens" else None
        groups, unusable, too_stale, flaw = [], {}, [], ""
        for entry in stored:
            try:
                group = self._spool.read_frame(entry.ref, Group)
                self._check_model(group)
            except (CorruptFrame, AlignmentError) as error:
                log.warning("group %s cannot be trained on: %s", entry.group_id, error)
                unusable[entry.group_id], flaw = "corrupt", str(error)
                continue
            wanted = [t for t in group.trajectories if t.trajectory_id in entry.trajectory_ids]
            if entry.ceiling is not None:
                wanted = [trajectory.capped(entry.ceiling) for trajectory in wanted]
            usable = [t for t in wanted if not _is_all_older(t, oldest)]
            if _num_attempts(usable) < min(self._min_group_size, _num_attempts(wanted)):
                unusable[entry.group_id] = "too_stale"
            kept = {t.trajectory_id for t in usable}
            too_stale += [t.trajectory_id for t in wanted if t.trajectory_id not in kept]
            groups.append(msgspec.structs.replace(group, trajectories=tuple(usable)))
        if unusable:
            return Packed(unusable=unusable, flaw=flaw)
        trajectories = [t for group in groups for t in group.trajectories]
        ages = tuple(self._age(version, t, oldest) for t in trajectories)
        batch_id = f"batch-{version:08d}"
        plan = batching.plan_batch(groups, version, batch_id, self._facts)
        ref = self._batches.put_filled_frame(plan, lambda batch: batching.fill_batch(batch, groups, oldest))
        traces = [t.trace for t in trajectories if t.trace is not None]
        batch = TakenBatch(
            batch_id=batch_id,
            path=ref.path,
            nbytes=ref.nbytes,
            trainer_version=version,
            group_ids=tuple(entry.group_id for entry in stored),
            trajectory_ids=plan.trajectory_ids,
            staleness=ages,
            lengths=tuple(t.num_tokens for t in trajectories),
            sampled_lengths=tuple(t.num_sampled_tokens for t in trajectories),
            rewards=tuple(t.outcome.reward or 0.0 for t in trajectories),
            interruptions=tuple(t.outcome.num_interruptions for t in trajectories),
            resumes=tuple(t.outcome.num_resumes for t in trajectories),
            num_masked_tokens=sum(_num_older(t, oldest) for t in trajectories),
            routing_rows=sum(len(trace.rows) for trace in traces),
            routing_rows_invalid=sum(map(invalid_rows, traces)),
            routing_rows_recomputed=sum(map(recomputed_rows, traces)),
        )
        return Packed(batch=batch, ref=ref, too_stale=tuple(too_stale))

    def _check_model(self, group: Group) -> None:
        """Refuse routing rows of another model, as a damaged frame is refused."""
        if self._facts is None:
            return
        for trajectory in group.trajectories:
            try:
                batching.check_model(trajectory, self._facts)
            except AlignmentError as error:
                if self._metrics is not None:
                    self._metrics.replay_rejected_total.labels(error.reason).inc()
                raise

    def _age(self, version: int, trajectory: Trajectory, masked_below: int | None) -> int:
        """Return the staleness of the oldest trained token, which must not exceed the bound."""
        trained = (
            version_
            for version_ in _sampled_versions(trajectory)
            if masked_below is None or version_ >= masked_below
        )
        oldest = min(trained, default=version)
        age = staleness(version, oldest)
        if age > self._max_staleness:
            raise InvariantError(
                f"trajectory {trajectory.trajectory_id}, sampled by version {oldest}, would be trained at "
                f"{version}: staleness {age} exceeds rollout.max_staleness = {self._max_staleness}"
            )
        return age


def _num_attempts(trajectories: Sequence[Trajectory]) -> int:
    """Count a trajectory and its branches as one."""
    return len({root_of(trajectory.trajectory_id) for trajectory in trajectories})


def _sampled_versions(trajectory: Trajectory) -> Iterable[int]:
    return (segment.weight_version for segment in trajectory.sampled if len(segment.token_ids))


def _is_all_older(trajectory: Trajectory, oldest: int | None) -> bool:
    newest = trajectory.newest_weight_version
    return oldest is not None and newest is not None and newest < oldest


def _num_older(trajectory: Trajectory, oldest: int | None) -> int:
    if oldest is None:
        return 0
    return sum(len(segment.token_ids) for segment in trajectory.sampled if segment.weight_version < oldest)
