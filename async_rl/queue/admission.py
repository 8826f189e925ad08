"""Whether one more group may be dispatched: by the staleness bound, and by the room in the spool."""

from __future__ import annotations

from async_rl.queue.spool import Spool, slab_size
from async_rl.staleness import Backlog


class Admission:
    """Decides in constant time, and says why not.

    Example:
        >>> admission = Admission(backlog, spool, version=0)
        >>> admission.is_open
        True
    """

    def __init__(self, backlog: Backlog, spool: Spool, version: int) -> None:
        """Engines serve what the trainer consumes next."""
        self._backlog = backlog
        self._spool = spool
        self._largest = slab_size(0)
        self.served = version
        """What all engines that take requests serve at least."""
        self.next = version
        """The version that consumes the next batch."""

    def learn(self, nbytes: int) -> None:
        """A group needs so many bytes: others may."""
        self._largest = max(self._largest, slab_size(nbytes))

    @property
    def is_open(self) -> bool:
        """Whether one more group may be dispatched now."""
        return self._backlog.may_admit(lag=self.next - self.served) and self._has_room()

    @property
    def holds_all(self) -> bool:
        """Whether the spool can take what is in flight, or must because the next batch needs it."""
        return self._is_needed(self._backlog.outstanding) or self._fits(self._backlog.num_in_flight)

    def why(self) -> str:
        """What closes it, in words."""
        backlog = self._backlog
        if not backlog.may_admit(lag=self.next - self.served):
            return (
                f"{backlog.outstanding} groups are outstanding, all that a batch of "
                f"{backlog.groups_per_batch} and a staleness of {backlog.max_staleness} allow while engines "
                f"serve version {self.served}"
            )
        return f"the spool holds {self._spool.used_bytes} of {self._spool.max_bytes} bytes"

    def _has_room(self) -> bool:
        """Whether the spool can take what is in flight and one group more.

        Groups that the next batch needs are let in whatever they need: without them no room would ever come.
        """
        return self._is_needed(self._backlog.outstanding + 1) or self._fits(self._backlog.num_in_flight + 1)

    def _is_needed(self, outstanding: int) -> bool:
        return outstanding <= self._backlog.groups_per_batch

    def _fits(self, groups: int) -> bool:
        """Whether so many groups do, each as large as any so far."""
        most = self._spool.max_bytes
        return most is None or self._spool.used_bytes + groups * self._largest <= most
