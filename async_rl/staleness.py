"""The arithmetic of staleness: which groups may be dispatched, and which make the next batch.

The trainer consumes one batch of B groups at weight version v and then holds v+1. A group is dispatched at a
moment when every engine serves at least version `oldest`, so nothing in it is sampled by older weights: it
may be consumed at any version up to its *deadline*, `oldest + η`, where η is `max_staleness`. Call a group
outstanding from its dispatch until it is consumed or dropped, and the outstanding groups *feasible* at the
next version v to be consumed when

    F(v):   for every d >= v,  #{outstanding with deadline <= d} <= B (d - v + 1),  and none has deadline < v:

no version's quota is overbooked, so serving them in the order of their deadlines meets all of them. This
reserves capacity for stragglers: quick answers make a batch only as far as the slow ones dispatched before
them keep the places that they will need.

**The bound is never violated, and there is no deadlock** (policy `wait`):

1. Admission keeps F. Let s be the version that the engines serve and `lag = v - s`. A new group has the
   deadline s + η = v + η - lag. It is admitted only while fewer than B (η + 1 - lag) groups are outstanding,
   so with it the total is at most B (η + 1 - lag): the quota up to its deadline, and no more than that of any
   later d. Earlier d do not count it.
2. A batch keeps F. `batch_is_safe` takes the B ready groups with the earliest deadlines, and only if F(v+1)
   holds for what remains. So every group with deadline v is in the batch: no deadline passes. Taking the
   earliest lowers each count as far as possible: if it does not keep F(v+1), no batch does.
3. Finishing can only raise a deadline (the oldest version really sampled is no older than the bound), and so
   can the check of what a group in flight has sampled so far (`renew_deadline`); dropping only removes a
   group: all keep F.
4. No deadlock. Let all outstanding groups be ready, at least B. By F(v), #{deadline <= d} - B <= B (d - v),
   and none of the others has the deadline v, so F(v+1) holds after the batch: it can be taken. So `None`
   always waits for a group in flight or, with fewer than B outstanding and lag <= η, for admission, which is
   open.

**`drop`** asks the same of a batch, except for the groups in flight whose deadline is v: it drops them
instead of waiting. F(v+1) holds for the others as before, so exactly the groups that take longer than η
versions are dropped: no finished one is ever displaced.

**`mask_tokens`** has another deadline. Tokens older than the bound are left out of the loss, so a trajectory
becomes useless only with its *newest* token, and a group's deadline is η after the oldest of its finished
trajectories' newest versions. While none has finished, whatever is sampled next is of the served version s at
least: the deadline is s + η and moves with s. It never falls, so 1 to 4 hold unchanged: batches wait for
less, nothing is dropped, and no token above the bound is trained.

Where a premise is violated (an engine answers with weights older than it said), the queue does not wait where
waiting cannot help, and groups past their deadline are dropped, or masked: the bound still holds and the run
does not stall.

While a batch is being trained, the next version to be consumed is v+1 and engines serve v: the lag is 1, and
the slots of that batch open when the engines serve v+1. No group is stale at its dispatch. Where v is still
being sent to the engines while it trains (`weights.overlap`), they serve v-1: the lag is 2, and 1 to 4 hold
as for any other. With η = 0 nothing is admitted then, and the wait ends when v has arrived, which needs no
batch.

Where engines take only every k-th version (`weights.every`), the lag grows to k - 1 while the next batch is
awaited, and to k while the last one before an update is trained. 1 to 3 hold for any lag, and 4 for lag <= η:
k may be at most η + 1. Groups that are dispatched just before an update have k - 1 versions less until their
deadline than those just after one.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, islice
from typing import Literal

StalenessPolicy = Literal["wait", "drop", "mask_tokens"]


def may_admit(outstanding: int, groups_per_batch: int, max_staleness: int, lag: int = 0) -> bool:
    """Return whether one more group may be dispatched.

    Args:
        outstanding: The number of groups in flight and queued, without those of a batch that was taken.
        groups_per_batch: B.
        max_staleness: η.
        lag: The version that consumes the next batch minus the version that all engines serve.
    """
    return outstanding < groups_per_batch * (max_staleness + 1 - lag)


def batch_is_safe(
    ready: Mapping[int, int],
    in_flight: Mapping[int, int],
    version: int,
    groups_per_batch: int,
    staleness_policy: StalenessPolicy = "wait",
) -> bool:
    """Return whether the B ready groups with the earliest deadlines may be consumed at `version`.

    Args:
        ready: The number of finished groups by deadline.
        in_flight: The number of unfinished groups by deadline.
        version: The trainer's weight version.
        groups_per_batch: B.
        staleness_policy: What happens to groups that miss their deadline: `drop` drops unfinished groups that
            are due now, `mask_tokens` can still use finished groups that are late.

    Returns:
        True when there are B of them and the rest can still meet all deadlines from `version + 1` on, or
        could not even if all of it were ready.
    """
    wanted, remaining, unfinished = groups_per_batch, 0, 0
    for deadline in sorted(ready.keys() | in_flight.keys()):
        here, coming = ready.get(deadline, 0), in_flight.get(deadline, 0)
        if deadline < version:  # waiting cannot help
            if staleness_policy != "mask_tokens":
                continue
            coming = 0
        elif deadline == version and staleness_policy == "drop":
            coming = 0
        taken = here if here < wanted else wanted
        wanted -= taken
        remaining += here - taken + coming
        unfinished += coming
        if unfinished and remaining > groups_per_batch * max(0, deadline - version):
            return False
    return wanted == 0


class Backlog:
    """The outstanding groups by deadline: a state machine that decides, and owns nothing else.

    Decisions take O(η), not O(groups).

    Example:
        >>> backlog = Backlog(groups_per_batch=2, max_staleness=1, staleness_policy="wait")
        >>> for name in "abc":
        ...     backlog.add_group(name, oldest=0)
        >>> backlog.finish_group("a"), backlog.finish_group("c"), backlog.select_batch(version=0)
        (None, None, ['a', 'c'])
    """

    def __init__(
        self, groups_per_batch: int, max_staleness: int, staleness_policy: StalenessPolicy, version: int = 0
    ) -> None:
        """Start without groups, at the version that engines serve and that consumes the next batch."""
        self.served_version = version
        """The version that all engines in service have reached."""
        self.next_version = version
        """The version that consumes the next batch."""
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self.staleness_policy: StalenessPolicy = staleness_policy
        self._in_flight: dict[str, int] = {}
        self._in_flight_counts: dict[int, int] = {}
        self._ready: dict[int, dict[str, None]] = {}  # by deadline, in the order in which they finished
        self._ready_counts: dict[int, int] = {}
        self._deadlines: dict[str, int] = {}  # deadlines of the ready groups

    @property
    def num_in_flight(self) -> int:
        """The number of groups dispatched and not finished."""
        return len(self._in_flight)

    @property
    def num_ready(self) -> int:
        """The number of groups finished and not taken."""
        return len(self._deadlines)

    @property
    def outstanding(self) -> int:
        """The number of groups in flight and ready."""
        return len(self._in_flight) + len(self._deadlines)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._in_flight or group_id in self._deadlines

    def may_admit(self) -> bool:
        """Return whether one more group may be dispatched."""
        lag = self.next_version - self.served_version
        return may_admit(self.outstanding, self.groups_per_batch, self.max_staleness, lag)

    def oldest_version(self, group_id: str) -> int:
        """Return the version that the age of an outstanding group counts from."""
        deadline = self._in_flight.get(group_id)
        return (self._deadlines[group_id] if deadline is None else deadline) - self.max_staleness

    def add_group(self, group_id: str, oldest: int) -> None:
        """Add a group in flight; nothing in it will be sampled by weights older than `oldest`."""
        if group_id in self:
            raise ValueError(f"group {group_id} is outstanding already")
        deadline = oldest + self.max_staleness
        self._in_flight[group_id] = deadline
        _add(self._in_flight_counts, deadline, 1)

    def renew_deadline(self, group_id: str, oldest: int) -> None:
        """Postpone the deadline of a group in flight that holds nothing older than `oldest`."""
        before, deadline = self._in_flight[group_id], oldest + self.max_staleness
        if deadline > before:
            self._in_flight[group_id] = deadline
            _add(self._in_flight_counts, before, -1)
            _add(self._in_flight_counts, deadline, 1)

    def finish_group(self, group_id: str, oldest: int | None = None) -> None:
        """Make a group in flight ready; `oldest` is the version that its age counts from, where known."""
        deadline = self._in_flight.pop(group_id)
        _add(self._in_flight_counts, deadline, -1)
        if oldest is not None:
            deadline = oldest + self.max_staleness
        self._ready.setdefault(deadline, {})[group_id] = None
        self._deadlines[group_id] = deadline
        _add(self._ready_counts, deadline, 1)

    def remove_group(self, group_id: str) -> None:
        """Remove a group that was taken or dropped."""
        deadline = self._in_flight.pop(group_id, None)
        if deadline is not None:
            _add(self._in_flight_counts, deadline, -1)
            return
        deadline = self._deadlines.pop(group_id)
        del self._ready[deadline][group_id]
        if not self._ready[deadline]:
            del self._ready[deadline]
        _add(self._ready_counts, deadline, -1)

    def overdue(self, version: int) -> list[str]:
        """Return the ready groups whose deadline has passed: they must be dropped, unless tokens are masked.

        There are none unless a premise was violated (see the module).
        """
        if self.staleness_policy == "mask_tokens":
            return []
        late = (groups for deadline, groups in self._ready.items() if deadline < version)
        return list(chain.from_iterable(late))

    def select_batch(self, version: int) -> list[str] | None:
        """Return the groups to consume at `version`, earliest deadline first; None when it must wait."""
        safe = batch_is_safe(
            self._ready_counts, self._in_flight_counts, version, self.groups_per_batch, self.staleness_policy
        )
        if not safe:
            return None
        usable = sorted(d for d in self._ready if d >= version or self.staleness_policy == "mask_tokens")
        groups = chain.from_iterable(self._ready[deadline] for deadline in usable)
        return list(islice(groups, self.groups_per_batch))

    def in_flight(self, due: int | None = None) -> list[str]:
        """Return the groups in flight, or only those whose deadline is no later than `due`."""
        if due is None:
            return list(self._in_flight)
        if not any(deadline <= due for deadline in self._in_flight_counts):
            return []
        return [group for group, deadline in self._in_flight.items() if deadline <= due]

    def awaited(self, version: int) -> int:
        """Return the number of groups in flight that must finish at this version, which is their deadline."""
        return self._in_flight_counts.get(version, 0)


def _add(counts: dict[int, int], deadline: int, change: int) -> None:
    counts[deadline] = counts.get(deadline, 0) + change
    if not counts[deadline]:
        del counts[deadline]
