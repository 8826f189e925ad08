"""What becomes of a group: of failed siblings, of stragglers, of groups that teach nothing. Pure decisions.

```
 siblings end ──► finished ─┐                    ┌─► train: finished ones, the rest dropped with their reasons
                  failed ───┼─► judge(policy) ───┤
                  left ─────┘                    └─► drop: all of it; with `retry` its task comes again, later
```

Siblings are compared with each other, so a group is trained together or not at all; it is never filled up
with trajectories of another time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from async_rl.config import RolloutConfig
from async_rl.errors import AsyncRLError
from async_rl.queue.journal import Entry
from async_rl.staleness import StalenessPolicy
from async_rl.types import Completion, Task, Trajectory, root_of

FailurePolicy = Literal["train_rest", "drop", "retry"]

STRAGGLER: Final = "straggler"
"""Why a sibling is dropped that the group did not wait for."""

_HOPELESS: Final = frozenset({"prompt_too_long"})
"""Reasons that are the task's own: it would fail again."""


class GroupPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The rules by which groups are judged."""

    failed_siblings: FailurePolicy = "train_rest"
    min_size: int = 2
    dynamic_filtering: bool = False

    @classmethod
    def of(cls, rollout: RolloutConfig) -> GroupPolicy:
        """As configured; a group of one has nobody to be compared with anyway."""
        return cls(
            failed_siblings=rollout.failed_siblings,
            min_size=min(rollout.min_group_size, rollout.group_size),
            dynamic_filtering=rollout.dynamic_filtering,
        )


class GroupVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a group whose siblings have all ended."""

    train: bool
    reason: str = ""
    """Why siblings that finished are dropped."""
    retry: bool = False
    """Its task should be dispatched once more."""


def judge(
    rewards: Sequence[float], dropped: Mapping[str, str], policy: GroupPolicy, *, may_retry: bool = False
) -> GroupVerdict:
    """Decide on a group.

    Args:
        rewards: Of the siblings that finished.
        dropped: The reasons of the others.
        policy: The rules.
        may_retry: Whether its task has retries left.
    """
    failures = [reason for reason in dropped.values() if reason != STRAGGLER]
    if failures and policy.failed_siblings == "drop":
        return GroupVerdict(train=False, reason="sibling_failed")
    if failures and policy.failed_siblings == "retry" and may_retry and not _HOPELESS.issuperset(failures):
        return GroupVerdict(train=False, reason="sibling_failed", retry=True)
    if len(rewards) < policy.min_size:
        return GroupVerdict(train=False, reason="too_few_siblings")
    if policy.dynamic_filtering and not has_signal(rewards):
        return GroupVerdict(train=False, reason="no_signal")
    return GroupVerdict(train=True)


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the siblings' rewards differ: where they do not, all advantages and so all gradients are zero.

    Source: dynamic sampling of DAPO, arXiv 2503.14476, section 3.2: prompts of which all or no answers are
    right are left out, and sampling goes on until the batch is full of others.
    """
    return any(reward != rewards[0] for reward in rewards)


def may_leave_stragglers(finished: int, size: int, policy: GroupPolicy) -> bool:
    """Whether so many siblings of a group of this size have finished that the clock of the others starts."""
    return finished >= max(policy.min_size, (size + 1) // 2)


class SignalWatch:
    """Ends a run that would filter for ever: counts groups in a row that carried no signal.

    Example:
        >>> watch = SignalWatch(limit=2)
        >>> watch.see(signal=False), watch.see(signal=True), watch.see(signal=False)
        (None, None, None)
    """

    def __init__(self, limit: int) -> None:
        """Allow so many."""
        self._limit = limit
        self._in_a_row = 0

    def see(self, *, signal: bool) -> None:
        """Take note of one group.

        Raises:
            AsyncRLError: When it was one too many.
        """
        self._in_a_row = 0 if signal else self._in_a_row + 1
        if self._in_a_row > self._limit:
            raise AsyncRLError(
                f"{self._in_a_row} groups in a row had siblings of equal rewards and were filtered out, "
                f"rollout.max_filtered_groups is {self._limit}: the tasks are all too easy or all too hard "
                "for the policy; take others, raise rollout.group_size, or set "
                "rollout.dynamic_filtering=false"
            )


class Unscored(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A trajectory that has finished, and whose reward comes with those of its siblings."""

    completion: Completion
    attempt: int
    reward_source: str
    """The trajectory whose completion it is."""


class GroupInFlight:
    """The siblings of a group while they are made, and what the queue asks of it (`queue.InFlight`).

    Example:
        >>> group = GroupInFlight("g", task, 7, ["a", "b"], "wait")
        >>> group.begin(Entry("a"))
        >>> group.branch(Entry("a.1", inherited=segments))
        >>> group.oldest()  # the version of the oldest token so far
    """

    def __init__(
        self,
        group_id: str,
        task: Task,
        position: int,
        trajectory_ids: Sequence[str],
        staleness_policy: StalenessPolicy,
    ) -> None:
        """Nothing is sampled yet."""
        self.group_id = group_id
        self.task = task
        self.position = position
        self.trajectory_ids = tuple(trajectory_ids)
        self._staleness_policy = staleness_policy
        self._entries: dict[str, dict[str, Entry]] = {}  # of siblings, each with its branches
        self.finished: dict[str, Trajectory] = {}
        """Siblings and their branches."""
        self.unscored: dict[str, Unscored] = {}
        """Those of the finished that have no reward yet."""
        self.dropped: dict[str, str] = {}
        """Reasons of the siblings that came to nothing."""
        self.seated, self.enough, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        """Each sibling has had a slot; stragglers may be left; all have finished or failed."""
        self.cancelled = False
        self.stop: Callable[[], None] | None = None
        """Ends what its siblings do."""

    @property
    def running(self) -> list[str]:
        """Siblings that have not ended."""
        return [
            name for name in self.trajectory_ids if name not in self.finished and name not in self.dropped
        ]

    @property
    def num_ended_well(self) -> int:
        """Siblings that have finished."""
        return sum(name in self.finished for name in self.trajectory_ids)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Those that have finished: siblings in their order, each before its branches."""
        place = {name: index for index, name in enumerate(self.trajectory_ids)}
        ordered = sorted(self.finished, key=lambda name: (place[root_of(name)], name))
        return tuple(self.finished[name] for name in ordered)

    def begin(self, entry: Entry, branches: Iterable[Entry] = ()) -> None:
        """An attempt at a sibling begins; what an earlier one sampled is gone.

        `branches` are those that an earlier process left: until the attempt comes to them they are as old.
        """
        self._entries[entry.trajectory_id] = {each.trajectory_id: each for each in (entry, *branches)}

    def branch(self, entry: Entry) -> None:
        """The attempt at a sibling branches."""
        self._entries[root_of(entry.trajectory_id)][entry.trajectory_id] = entry

    def end(self, trajectory_id: str, result: Sequence[Trajectory] | str) -> None:
        """A sibling finished, with its branches, or came to nothing for a reason."""
        if isinstance(result, str):
            self.dropped[trajectory_id] = result
        else:
            self.finished |= {trajectory.trajectory_id: trajectory for trajectory in result}
        if not self.running:
            self.enough.set()
            self.ended.set()

    def reward(self, trajectory_id: str, parts: dict[str, float]) -> Trajectory:
        """A finished trajectory has its reward; what it is now."""
        replace, trajectory = msgspec.structs.replace, self.finished[trajectory_id]
        outcome = replace(trajectory.outcome, reward=parts["reward"], reward_parts=parts)
        self.finished[trajectory_id] = trajectory = replace(trajectory, outcome=outcome)
        del self.unscored[trajectory_id]
        return trajectory

    def fail(self, root_id: str, reason: str) -> None:
        """A sibling that had finished comes to nothing after all, with its branches."""
        self.dropped[root_id] = reason
        for name in [name for name in self.finished if root_of(name) == root_id]:
            del self.finished[name]
            self.unscored.pop(name, None)

    def oldest(self) -> int | None:
        """See `queue.InFlight`."""
        mask = self._staleness_policy == "mask_tokens"
        counted = [
            t.newest_weight_version if mask else t.oldest_weight_version for t in self.finished.values()
        ]
        making = [e for name in self.running for e in self._entries.get(name, {}).values()]
        # Who samples now will have a token of the weights that are served.
        counted += [_newest_at_rest(entry) if mask else min(entry.versions, default=None) for entry in making]
        return min((version for version in counted if version is not None), default=None)

    def lengths(self) -> dict[str, int]:
        """See `queue.InFlight`."""
        entries = (entry for tree in self._entries.values() for entry in tree.values())
        lengths = {entry.trajectory_id: entry.num_sampled_tokens for entry in entries}
        return lengths | {name: t.num_sampled_tokens for name, t in self.finished.items()}

    def cancel(self) -> None:
        """See `queue.InFlight`."""
        self.cancelled = True
        if self.stop is not None:
            self.stop()


def _newest_at_rest(entry: Entry) -> int | None:
    return None if entry.in_turn else max(entry.versions, default=None)
