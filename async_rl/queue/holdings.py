"""What the queue holds of a group in each of its states: in flight, left by another process, ready, taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from async_rl.observability.records import TrajectoryCounts
from async_rl.queue.spool import SpoolRef
from async_rl.types import Trajectory


class InFlight(Protocol):
    """A group that is being made, as far as the queue must know it."""

    def oldest(self) -> int | None:
        """The version that its age counts from so far, None while it is that of what comes next.

        By `rollout.staleness_policy`: that of the oldest token, or with `mask_tokens` the smallest of the
        newest ones of its trajectories that sample no more.
        """
        ...

    def lengths(self) -> Mapping[str, int]:
        """Tokens sampled so far, by trajectory."""
        ...

    def cancel(self) -> None:
        """It is settled as dropped: stop making it, and say nothing more of it."""
        ...


class LeftGroup(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A group that an earlier process left in flight, to be made to its end."""

    group_id: str
    task_id: str
    position: int
    trajectory_ids: tuple[str, ...]
    """All that are in flight, those that have ended included."""
    ended: Mapping[str, Trajectory]
    """Those that have ended: they are not made again."""
    attempts: Mapping[str, int]
    """Which try of a trajectory it is, where it is not the first."""
    oldest: int
    """The version that its age counts from."""


class QueueStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything is. The first five are trajectories and obey the law of conservation."""

    dispatched: int
    in_flight: int
    queued: int
    trained: int
    dropped: dict[str, int]
    groups_in_flight: int
    groups_ready: int
    bytes: int
    """Of finished groups in the spool."""

    @property
    def counts(self) -> TrajectoryCounts:
        """The first five."""
        return TrajectoryCounts(
            dispatched=self.dispatched,
            trained=self.trained,
            in_flight=self.in_flight,
            queued=self.queued,
            dropped=dict(self.dropped),
        )


class ReadyGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A finished group that waits for its batch."""

    group_id: str
    ref: SpoolRef
    oldest: int
    since: float
    counted: bool
    """Whether its lengths are counted as ended; those of an earlier process are not."""


class TakenGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of a batch that the trainer has."""

    ref: SpoolRef
    groups: tuple[ReadyGroup, ...]
