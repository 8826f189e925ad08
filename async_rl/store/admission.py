"""The staleness bound and the capacity of the spool, applied to groups in flight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from async_rl.staleness import Backlog
from async_rl.store.spool import SMALLEST_GROUP, Spool


class GroupWork(Protocol):
    """A group that is being sampled, as the queue sees it."""

    def oldest_version(self) -> int | None:
        """The version that the group's age counts from so far; None while nothing fixes it.

        `rollout.staleness_policy` defines it: the version of the oldest token or, with `mask_tokens`, the
        smallest of the newest versions of the trajectories that have ended.
        """
        ...

    def sampled_lengths(self) -> Mapping[str, int]:
        """Tokens sampled so far, by trajectory."""
        ...

    def straggled_s(self) -> float:
        """How long the group has waited for its stragglers, in this process and earlier ones."""
        ...

    def cancel(self) -> None:
        """Stop sampling. The queue has dropped the group and expects no more calls for it."""
        ...


class Admission:
    """Decides in constant time whether a group may be dispatched, and keeps the deadlines of groups."""

    def __init__(self, backlog: Backlog, spool: Spool, version: int) -> None:
        """Start at the version that engines serve and that consumes the next batch."""
        self._backlog = backlog
        self._spool = spool
        self._largest_group = SMALLEST_GROUP
        self.served = version
        """The version that all engines in service have reached."""
        self.next = version
        """The version that consumes the next batch."""

    def record_size(self, nbytes: int) -> None:
        """Take the size of a finished group as what other groups may need."""
        self._largest_group = max(self._largest_group, nbytes)

    @property
    def is_open(self) -> bool:
        """Whether one more group may be dispatched now."""
        return self._backlog.may_admit(lag=self.next - self.served) and self._has_capacity()

    @property
    def holds_in_flight(self) -> bool:
        """Whether the spool can hold the groups in flight, or must because the next batch needs them."""
        return self._is_needed(self._backlog.outstanding) or self._fits(self._backlog.num_in_flight)

    def why_closed(self) -> str:
        """Describe what prevents admission."""
        backlog = self._backlog
        if not backlog.may_admit(lag=self.next - self.served):
            return (
                f"{backlog.outstanding} groups are outstanding, all that a batch of "
                f"{backlog.groups_per_batch} and a staleness of {backlog.max_staleness} allow while engines "
                f"serve version {self.served}"
            )
        return self._spool.describe()

    def why_full(self) -> str:
        """Describe what a finished group waits for that does not fit the spool."""
        return f"a step must free some of {self._spool.used_bytes} bytes in the spool"

    def why_no_batch(self) -> str:
        """Describe what the next batch waits for."""
        backlog = self._backlog
        if backlog.num_ready < backlog.groups_per_batch:
            return (
                f"{backlog.num_ready} of {backlog.groups_per_batch} groups are ready, "
                f"{backlog.num_in_flight} in flight"
            )
        due = backlog.awaited(self.next)
        return (
            f"{due or 'some'} of {backlog.num_in_flight} groups in flight must go before the "
            f"{backlog.num_ready} ready ones, or they would grow older than {backlog.max_staleness}"
        )

    def renew_deadlines(self, work: Mapping[str, GroupWork]) -> None:
        """Postpone the deadlines of groups that have sampled nothing as old as was assumed at their dispatch.

        A group whose age is not fixed yet will sample by the weights that engines serve now.

        Args:
            work: The groups that are being sampled.
        """
        backlog = self._backlog
        for group_id in backlog.in_flight(self.served + backlog.max_staleness - 1):
            if group_id in work:
                oldest = work[group_id].oldest_version()
                backlog.renew_deadline(group_id, self.served if oldest is None else oldest)

    def overdue_in_flight(self, version: int, work: Mapping[str, GroupWork]) -> list[str]:
        """Return the groups being sampled that can be in no batch from `version` on and are not waited for.

        With the policies `wait` and `mask_tokens` there are none.
        """
        if self._backlog.staleness_policy != "drop":
            return []
        late = self._backlog.in_flight(version - 1)
        # A group without an age may sample its first token by the next version.
        return [
            group_id for group_id in late if group_id in work and work[group_id].oldest_version() is not None
        ]

    def _has_capacity(self) -> bool:
        """Whether the spool can hold the groups in flight and one more.

        Groups that the next batch needs are admitted whatever they need: no space would come free otherwise.
        """
        return self._is_needed(self._backlog.outstanding + 1) or self._fits(self._backlog.num_in_flight + 1)

    def _is_needed(self, outstanding: int) -> bool:
        return outstanding <= self._backlog.groups_per_batch

    def _fits(self, groups: int) -> bool:
        """Whether the spool has space for a number of groups, each as large as the largest so far."""
        return self._spool.fits(groups * self._largest_group)
