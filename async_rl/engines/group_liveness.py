"""How the members of a weight-update group know of each other, through the group's store.

```
 engine rank   a thread: alive/RANK += 1, twice a second
 sender        while it waits: is a rank silent for 9 s?  or does the driver end the group?  ──► aborted ← why
 engine rank   while it waits: is it aborted?  ──► it stops waiting, and answers its update request
```

A collective of torch cannot tell a slow member from a stopped one, and waits for either without a limit that
would fit both. A process that is stopped, or has ended, does not count on.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from async_rl.engine_protocol import GLOO_PARTS
from async_rl.errors import ABORTED, WeightSyncError

SILENT_S: Final = 9.0
"""Time after which a rank that does not count is cut out."""

CHECK_S: Final = 0.5
"""Interval in which a sender that waits looks whether the others count."""

_BEAT_S: Final = 0.5
_BLOCKING_WAIT: Final = "TORCH_NCCL_BLOCKING_WAIT"
_ABORTED: Final = "aborted"
_RECEIVED: Final = "received"
_LONGEST_PAUSE_S: Final = 0.005
"""Between two looks at an operation: short beside the transfer of a bucket."""


def store_of(group: dist.ProcessGroup) -> c10d.Store:
    """Return the store through which a group was made; all members see the same keys."""
    return c10d._world.pg_map[group][1]


class Connection:
    """The communicator of an NCCL group, created by a thread.

    The first broadcast would create it, and wait without a limit when a member has ended since it joined:
    neither a time limit nor `abort` of the group reaches a communicator that is not complete, not even in
    NCCL's non-blocking mode (docs/design/weight-updates.md). So a thread waits, and may be left behind.
    Members that create theirs in their first broadcast fit in.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Begin to create it, for collectives on a device; with Gloo there is nothing to do."""
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._connect, args=(group, device), name="weight group connection", daemon=True
        )
        if dist.get_backend(group) == "nccl":
            self._thread.start()

    def _connect(self, group: dist.ProcessGroup, device: torch.device) -> None:
        try:
            group._get_backend(torch.device("cuda")).eager_connect_single_device(device)
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        """Return whether it has been created, or creating it has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Raise what creating it has failed with; it is completed.

        Raises:
            RuntimeError: When it was not created.
        """
        if self._error is not None:
            raise self._error


class Broadcast:
    """A broadcast from rank 0 that has begun.

    A rank of Gloo's tree passes a tensor on when it has received all of it (gloo/broadcast.cc). In parts that
    follow each other, the ranks of a path receive and send at the same time.
    """

    def __init__(self, data: torch.Tensor, group: dist.ProcessGroup, *, in_parts: bool) -> None:
        """Begin to send `data`, or to fill it; all members must do it in parts, or none."""
        parts = data.tensor_split(GLOO_PARTS if in_parts and dist.get_backend(group) == "gloo" else 1)
        self._works = [dist.broadcast(part, src=0, group=group, async_op=True) for part in parts if len(part)]

    def is_completed(self) -> bool:
        """Return whether it has ended, or failed."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            RuntimeError: When another member has failed.
        """
        for work in self._works:
            work.wait()


def wait_until(
    is_done: Callable[[], bool], check: Callable[[], None], check_every_s: float, limit_s: float = math.inf
) -> None:
    """Wait until something is done, which raises no event.

    Args:
        is_done: Asked again and again.
        check: Called in intervals; raises when it is waited for no longer.
        check_every_s: The interval, seconds.
        limit_s: Longest wait: torch applies none to an operation that is not waited for by `Work.wait`.

    Raises:
        WeightSyncError: When it takes longer.
    """
    begin_s = time.monotonic()
    pause_s, next_check_s = 0.0001, begin_s + check_every_s
    while not is_done():
        now = time.monotonic()
        if now - begin_s > limit_s:
            raise WeightSyncError(f"a broadcast took more than {limit_s} s")
        if now >= next_check_s:
            check()
            next_check_s = now + check_every_s
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)


@contextmanager
def blocking_waits() -> Iterator[None]:
    """Make `wait()` of NCCL groups that are created within the block raise when a peer fails, as Gloo's.

    By default it returns at once, and torch's watchdog ends the whole process when the peer stays away. With
    this variable a group has no watchdog: `wait()` blocks, and aborts the group before it raises. Torch reads
    it when a group is created (`ProcessGroupNCCL.cpp`, the constructor and `synchronizeInternal`), so the
    groups of training keep their watchdogs.
    """
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before


class GroupHeartbeat:
    """Counts in the store while its process lives, by a thread of its own."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        """Begin to count."""
        self._store, self._key, self._stopped = store_of(group), f"alive/{rank}", threading.Event()
        self._store.add(self._key, 1)
        threading.Thread(target=self._beat, name="weight group heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while not self._stopped.wait(_BEAT_S):
            try:
                self._store.add(self._key, 1)
            except RuntimeError:  # the sender, which has the store, has closed the group or ended
                return

    def count_received(self) -> None:
        """Tell the sender that this rank has received a broadcast."""
        self._store.add(_RECEIVED, 1)

    def check_aborted(self) -> None:
        """Do nothing unless the sender has aborted the group, or ended.

        Raises:
            WeightSyncError: When it has.
        """
        try:
            why = self._store.get(_ABORTED).decode() if self._store.check([_ABORTED]) else ""
        except RuntimeError as error:
            raise WeightSyncError(f"the sender has closed the group: {error}") from error
        if why:
            raise WeightSyncError(f"{ABORTED}{why}")

    def stop(self) -> None:
        """Stop counting."""
        self._stopped.set()


class SilenceMonitor:
    """The sender's view of the other ranks: which of them have stopped counting."""

    def __init__(self, group: dist.ProcessGroup, world_size: int) -> None:
        """Know nothing of any rank yet."""
        self._store = store_of(group)
        self._counts = dict.fromkeys(range(1, world_size), 0)
        self._num_silent = Counter[int]()
        """By rank: the checks in a row in which it had not counted. Not a time: when this process was stopped
        itself, the ranks could not count either."""

    def find_silent(self) -> list[int]:
        """Return the ranks that have counted before and not for `SILENT_S`; called every `CHECK_S`.

        Ranks that never count are servers that this module is not part of.
        """
        for rank, before in self._counts.items():
            count = self._counts[rank] = self._store.add(f"alive/{rank}", 0)
            self._num_silent[rank] = self._num_silent[rank] + 1 if count == before and count else 0
        return [rank for rank, number in self._num_silent.items() if number * CHECK_S >= SILENT_S]

    def have_received(self, number: int) -> bool:
        """Return whether all ranks have received so many broadcasts since the group was opened.

        Of ranks that never count nothing is known.
        """
        if not all(self._store.add(f"alive/{rank}", 0) for rank in self._counts):
            return True
        return self._store.add(_RECEIVED, 0) >= number * len(self._counts)

    def abort(self, why: str) -> None:
        """Let all ranks that count stop waiting."""
        self._store.set(_ABORTED, why)
