"""Decides on groups: on failed siblings, on stragglers, and on groups without a learning signal. Pure.

```
 siblings end ──► finished ──┐                        ┌─► train the finished ones, drop the rest with reasons
                  failed ────┼─► decide_group(policy) ┤
                  straggler ─┘                        └─► drop the group; with `retry` its task comes again
```

Advantages compare siblings with each other, so a group is trained together or not at all. It is never filled
up with trajectories of another time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Final

import msgspec

from async_rl.config import LossConfig, RolloutConfig
from async_rl.errors import AsyncRLError
from async_rl.observability.records import MANY_WITHOUT_SIGNAL, no_signal
from async_rl.runtime.stopwatch import Stopwatch
from async_rl.staleness import StalenessPolicy
from async_rl.store.progress import TrajectoryProgress
from async_rl.types import StoredCompletion, StoredTrajectory, TakenBatch, Task, root_of

log = logging.getLogger(__name__)

STRAGGLER: Final = "straggler"
"""The reason under which a sibling is dropped that the group did not wait for."""

NODE_LOST: Final = "node_lost"
"""The reason under which a group is dropped that its reward function cannot score together any more."""

_HOPELESS: Final = frozenset({"prompt_too_long"})
"""Reasons that lie in the task itself, which would fail again."""

_GROUP_BASELINES: Final = ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")
"""The `trainer.loss.advantages` that are 0 in a group of equal rewards, whatever other groups have."""


class GroupDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with a group whose siblings have all ended."""

    train: bool
    reason: str = ""
    """Why finished siblings are dropped, if they are."""
    retry: bool = False
    """Whether the task should be dispatched once more."""


def decide_group(
    rewards: Mapping[str, Hashable],
    dropped: Mapping[str, str],
    policy: RolloutConfig,
    *,
    may_retry: bool = False,
    is_scored: bool = True,
) -> GroupDecision:
    """Decide whether a group is trained, dropped, or dropped and retried.

    Args:
        rewards: What the advantages of finished siblings and their branches depend on, by trajectory.
        dropped: The reasons of the other siblings.
        policy: The rules; `min_siblings` leaves out branches, because those of one attempt are alike.
        may_retry: Whether the task has retries left.
        is_scored: Whether all finished siblings have rewards (`GroupInFlight.can_be_scored`).
    """
    if not is_scored:
        return GroupDecision(train=False, reason=NODE_LOST, retry=True)
    failures = [reason for reason in dropped.values() if reason != STRAGGLER]
    if failures and policy.failed_siblings == "drop":
        return GroupDecision(train=False, reason="sibling_failed")
    if failures and policy.failed_siblings == "retry" and may_retry and not _HOPELESS.issuperset(failures):
        return GroupDecision(train=False, reason="sibling_failed", retry=True)
    if len({root_of(name) for name in rewards}) < policy.min_siblings:
        return GroupDecision(train=False, reason="too_few_siblings")
    if policy.dynamic_filtering and not has_signal(list(rewards.values())):
        return GroupDecision(train=False, reason="no_signal")
    return GroupDecision(train=True)


def has_signal(rewards: Sequence[Hashable]) -> bool:
    """Return whether the siblings' rewards differ; if not, all advantages and thus all gradients are zero.

    Source: dynamic sampling of DAPO, arXiv 2503.14476, section 3.2: prompts with all or no answers correct
    are skipped, and sampling continues until the batch is full.
    """
    return any(reward != rewards[0] for reward in rewards)


def advantage_basis(trajectory: StoredTrajectory, loss: LossConfig) -> Hashable:
    """Return what the advantages of a scored trajectory depend on."""
    if loss.turn_discount is None:
        return trajectory.reward
    return trajectory.reward, trajectory.num_turns, trajectory.turn_rewards


def count_groups_without_signal(batch: TakenBatch, loss: LossConfig) -> int:
    """Return how many groups of a batch teach the policy nothing because the rewards compared are equal.

    None counts where something besides the rewards gives a signal: a teacher, a critic, or the length.
    """
    if loss.teacher.model is not None or loss.overlong_buffer_tokens or loss.advantages == "gae":
        return 0
    compared: dict[int, list[Hashable]] = {}
    for group, trajectory in zip(batch.group_index, batch.trajectories, strict=True):
        compared.setdefault(group, []).append(advantage_basis(trajectory, loss))
    if loss.advantages not in _GROUP_BASELINES:
        return 0 if has_signal(list(chain.from_iterable(compared.values()))) else len(compared)
    return sum(not has_signal(rewards) for rewards in compared.values())


def can_drop_stragglers(finished: int, size: int, policy: RolloutConfig) -> bool:
    """Return whether enough siblings of a group of `size` have finished to start the others' time limit."""
    return finished >= max(policy.min_siblings, (size + 1) // 2)


class UntrainedGroups:
    """Ends a run that would train nothing: counts the groups in a row that were filtered out or failed."""

    def __init__(self, limit: int, warn: Callable[[str], None] = log.warning) -> None:
        """Allow `limit` of them, and warn when many were filtered out."""
        self._limit = limit
        self._warn = warn
        self._reasons: Counter[str] = Counter()

    def record_group(
        self, decision: GroupDecision, dropped: Mapping[str, str], last_error: AsyncRLError | None
    ) -> None:
        """Count one group; one that is trained begins the count again, one that lost stragglers is ignored.

        Args:
            decision: What becomes of the group.
            dropped: The reasons of its siblings that did not finish.
            last_error: How the last attempt failed, for the message.

        Raises:
            AsyncRLError: The limit is exceeded.
        """
        if decision.train:
            self._reasons.clear()
            return
        if decision.reason != "no_signal" and not set(dropped.values()) - {STRAGGLER}:
            return
        self._reasons[decision.reason] += 1
        count = self._reasons.total()
        if count == MANY_WITHOUT_SIGNAL and set(self._reasons) == {"no_signal"}:
            self._warn(no_signal(count))
        if count <= self._limit:
            return
        if set(self._reasons) == {"no_signal"}:
            raise AsyncRLError(
                f"{count} groups in a row had siblings of equal rewards and were filtered out, "
                f"rollout.max_filtered_groups is {self._limit}: the tasks are all too easy or all too hard "
                "for the policy; use other tasks, raise rollout.group_size, or set "
                "rollout.dynamic_filtering=false"
            )
        reasons = ", ".join(f"{reason}: {number}" for reason, number in self._reasons.most_common())
        raise AsyncRLError(
            f"{count} groups in a row were not trained ({reasons}), rollout.max_filtered_groups is "
            f"{self._limit}: remedy what fails, or train the rest with "
            "rollout.failed_siblings=train_rest and a lower rollout.min_group_size; the last failure: "
            f"{last_error}"
        ) from last_error


class UnscoredTrajectory(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What is needed to score a finished trajectory once its siblings have finished too."""

    trajectory_id: str
    attempt: int
    completion: StoredCompletion
    """What the group's reward function will receive for it."""
    reward_source: str
    """The trajectory that the completion is of."""


class GroupInFlight:
    """The state of a group's siblings until the group is settled; implements the store's `GroupWork`."""

    def __init__(
        self,
        group_id: str,
        task: Task,
        position: int,
        trajectory_ids: Sequence[str],
        staleness_policy: StalenessPolicy,
        *,
        straggled_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start a group that has no sampled token yet.

        Args:
            group_id: The id of the group.
            task: Its task.
            position: The position of the task in the sequence of tasks.
            trajectory_ids: Its siblings.
            staleness_policy: Decides what the group's age counts from.
            straggled_s: How long it waited for its stragglers in earlier processes.
            clock: Returns seconds on the serving clock.
        """
        self.group_id = group_id
        self.task = task
        self.position = position
        self.trajectory_ids = tuple(trajectory_ids)
        self._staleness_policy = staleness_policy
        self._straggling = Stopwatch(clock, straggled_s)
        self._progress: dict[str, Mapping[str, TrajectoryProgress]] = {}  # of siblings, with their branches
        self.finished: dict[str, StoredTrajectory] = {}
        """Finished trajectories: siblings and their branches."""
        self.unscored: dict[str, UnscoredTrajectory] = {}
        """Finished trajectories without a reward."""
        self.dropped: dict[str, str] = {}
        """Reasons of the siblings that failed."""
        self.all_have_slots = asyncio.Event()
        """Set when each sibling has had a slot."""
        self.enough_finished = asyncio.Event()
        """Set when the other siblings count as stragglers."""
        self.all_ended = asyncio.Event()
        """Set when all siblings have finished or failed."""
        self.cancelled = False
        self.stop: Callable[[], None] | None = None
        """Cancels the tasks of the siblings."""

    @property
    def running(self) -> list[str]:
        """Siblings that have neither finished nor failed."""
        return [
            name for name in self.trajectory_ids if name not in self.finished and name not in self.dropped
        ]

    @property
    def num_finished_siblings(self) -> int:
        """The number of siblings that have finished."""
        return len(self.finished.keys() & self.trajectory_ids)

    @property
    def trajectories(self) -> tuple[StoredTrajectory, ...]:
        """Finished trajectories: siblings in their order, each before its branches."""
        place = {name: index for index, name in enumerate(self.trajectory_ids)}
        ordered = sorted(self.finished, key=lambda name: (place[root_of(name)], name))
        return tuple(self.finished[name] for name in ordered)

    def begin_attempt(self, trajectory_id: str, progress: Mapping[str, TrajectoryProgress]) -> None:
        """Record a new attempt of a sibling, which replaces an earlier one.

        Args:
            trajectory_id: The sibling.
            progress: How far it and its branches are, by id; it changes with the attempt.
        """
        self._progress[trajectory_id] = progress

    def end_sibling(self, trajectory_id: str, result: Sequence[StoredTrajectory] | str) -> None:
        """Record that a sibling finished, with its trajectories, or failed, with a reason."""
        if isinstance(result, str):
            self.dropped[trajectory_id] = result
        else:
            self.finished |= {trajectory.trajectory_id: trajectory for trajectory in result}
        if not self.running:
            self.enough_finished.set()
            self.all_ended.set()

    @property
    def can_be_scored(self) -> bool:
        """Whether one call can score the group: none was scored before frames of others were lost."""
        return self.unscored.keys() == self.finished.keys()

    def set_reward(self, trajectory_id: str, parts: dict[str, float]) -> StoredTrajectory:
        """Set the reward of a finished trajectory, and return its new reference."""
        self.finished[trajectory_id] = trajectory = self.finished[trajectory_id].with_reward(parts)
        del self.unscored[trajectory_id]
        return trajectory

    def drop_finished(self, root_id: str, reason: str) -> None:
        """Drop a sibling that had finished, with its branches."""
        self.dropped[root_id] = reason
        for name in [name for name in self.finished if root_of(name) == root_id]:
            del self.finished[name]
            self.unscored.pop(name, None)

    def oldest_version(self) -> int | None:
        """Implements the store's `GroupWork`."""
        mask = self._staleness_policy == "mask_tokens"
        counted = [
            t.newest_weight_version if mask else t.oldest_weight_version for t in self.finished.values()
        ]
        making = [each for name in self.running for each in self._progress.get(name, {}).values()]
        # A trajectory that is sampling will have a token of the weights that are served now.
        counted += [_newest_between_turns(each) if mask else each.oldest_version for each in making]
        return min((version for version in counted if version is not None), default=None)

    def sampled_lengths(self) -> dict[str, int]:
        """Implements the store's `GroupWork`."""
        lengths = {
            name: each.num_sampled_tokens
            for progress in self._progress.values()
            for name, each in progress.items()
        }
        return lengths | {name: t.num_sampled_tokens for name, t in self.finished.items()}

    def straggled_s(self) -> float:
        """Implements the store's `GroupWork`."""
        return self._straggling.seconds

    def waiting_for_stragglers(self) -> AbstractContextManager[None]:
        """Count the time in the block as spent waiting for stragglers."""
        return self._straggling.running()

    def cancel(self) -> None:
        """Implements the store's `GroupWork`."""
        self.cancelled = True
        if self.stop is not None:
            self.stop()


def _newest_between_turns(progress: TrajectoryProgress) -> int | None:
    return None if progress.in_turn else progress.newest_version
