"""The trainer's side of a distributed weight update: joins SGLang's process group and broadcasts buckets.

The engine joins through its `/init_weights_update_group` and then receives one flattened uint8 broadcast for
every `/update_weights_from_distributed` with `load_format=flattened_bucket`. Both sides must use the same
format: the rendezvous follows `sglang.srt.utils.init_custom_process_group`, and `async_rl.weights.buckets`
defines the layout of a bucket.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from async_rl.engine_protocol import GroupInvite, group_of
from async_rl.engines.group_liveness import (
    CHECK_S,
    SILENT_S,
    Broadcast,
    Connection,
    SilenceMonitor,
    blocking_waits,
    wait_until,
)
from async_rl.errors import WeightSyncError
from async_rl.trainer_protocol import SendReport

_JOIN_S: Final = 20.0
"""Longest wait for all to join: meanwhile the engines that have joined generate nothing."""

log = logging.getLogger(__name__)


def open_store(host: str, port: int, world_size: int, timeout_s: float) -> c10d.Store:
    """Open the store of a group as rank 0 of `world_size` processes, and wait for the others.

    Torch's own rendezvous would listen on all interfaces, and any process that reaches a store can write into
    it: this store listens on `host` only.

    Raises:
        RuntimeError: When the others have not joined within `timeout_s`.
        OSError: When the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        # The store closes the descriptor that it receives.
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )


class WeightGroup:
    """Rank 0 of one process group that the ranks of engines have joined."""

    def __init__(self, invite: GroupInvite, timeout_s: float) -> None:
        """Open the rendezvous and wait until all have joined.

        Args:
            invite: What the engines are told.
            timeout_s: Longest wait for the transfer of one bucket.

        Raises:
            WeightSyncError: When they have not joined within `_JOIN_S`, or `timeout_s` if that is less.
        """
        self.name = group_of(invite.group_name, invite.sender)
        self.silent: list[int] = []
        """The ranks because of which the group was aborted: their processes do not run."""
        self._is_concurrent = invite.is_concurrent
        self._is_aborted = threading.Event()
        self._pending: Broadcast | Connection | None = None
        self._is_connected = False
        self._num_sent = 0
        self._timeout_s = timeout_s
        join_s = min(_JOIN_S, timeout_s)
        try:
            store = open_store(invite.host, invite.port, invite.world_size, join_s)
            # Not init_process_group: it would create the default group, and a process can have only one.
            # SGLang prefixes the store with the name before torch's helper prefixes it again; so does this.
            with blocking_waits():
                self._group, _ = c10d._new_process_group_helper(
                    invite.world_size,
                    0,
                    [],
                    c10d.Backend(invite.backend),
                    c10d.PrefixStore(self.name, store),
                    group_name=c10d.GroupName(self.name),
                    timeout=timedelta(seconds=timeout_s),
                )
        except (RuntimeError, OSError) as e:
            raise WeightSyncError(
                f"not all engines joined the weight-update group {self.name} at "
                f"{invite.host}:{invite.port} within {join_s} s: {e}"
            ) from e
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(invite.world_size)}
        self._monitor = SilenceMonitor(self._group, invite.world_size)

    def abort(self, why: str) -> None:
        """Let all members stop waiting; any thread may call this."""
        self._is_aborted.set()
        self._monitor.abort(why)

    def start_broadcast(self, data: torch.Tensor) -> None:
        """Start sending `data` to the engines' ranks, which must receive by then; `wait` ends it.

        Raises:
            RuntimeError: When a rank has failed. The group is of no use then.
            WeightSyncError: When the group was aborted.
        """
        with self._aborted_on_failure():
            if self._is_aborted.is_set():
                raise WeightSyncError("the driver has aborted the update")
            if not self._is_connected:
                self._pending = Connection(self._group, data.device)
                self._end_pending(self._pending)
                self._is_connected = True
            self._pending = Broadcast(data, self._group, in_parts=self._is_concurrent)

    def wait(self) -> None:
        """Wait until what was started is sent.

        Raises:
            RuntimeError: When a rank has failed. The group is of no use then.
            WeightSyncError: When the group was aborted, because a rank is silent or by another thread.
        """
        if self._pending is not None:
            with self._aborted_on_failure():
                self._end_pending(self._pending)
            self._pending = None
            self._num_sent += 1

    def _end_pending(self, work: Broadcast | Connection) -> None:
        wait_until(work.is_completed, self._check, CHECK_S, self._timeout_s)
        work.wait()  # raises what it failed with

    def wait_for_receivers(self) -> None:
        """Wait until all ranks have what was sent: some pass it on to others when this one has done its part.

        Raises:
            WeightSyncError: As `wait`.
        """
        with self._aborted_on_failure():
            has_arrived = partial(self._monitor.have_received, self._num_sent)
            wait_until(has_arrived, self._check, CHECK_S, self._timeout_s)

    @contextmanager
    def _aborted_on_failure(self) -> Iterator[None]:
        """Let members that are not connected with the one that failed stop waiting, too."""
        try:
            yield
        except (RuntimeError, WeightSyncError) as error:
            self.abort(str(error))
            self._abort_communicator()
            raise

    def _abort_communicator(self) -> None:
        if dist.get_backend(self._group) == "nccl":
            self._group._get_backend(torch.device("cuda")).abort()

    def _check(self) -> None:
        self.silent = self._monitor.find_silent()
        if self.silent:
            raise WeightSyncError(f"no sign of life from ranks {self.silent} for {SILENT_S:.0f} s")
        if self._is_aborted.is_set():
            raise WeightSyncError("the driver has aborted the update")

    def close(self) -> None:
        """Leave the group. One with a broadcast that does not end is left to its timeout: to destroy it
        would wait for that.
        """
        self._abort_communicator()  # NCCL's own shutdown would wait for members that are not there any more
        if self._pending is None or self._pending.is_completed():
            dist.destroy_process_group(self._group)


def send_buckets(data: Iterable[torch.Tensor], groups: Iterable[WeightGroup]) -> SendReport:
    """Broadcast every bucket into all groups at the same time, while the next one is filled.

    `data` may overwrite a bucket when the next but one is requested. A group that fails is left out from then
    on, and the others continue: the engines' own update requests report the failure.
    """
    groups = list(groups)
    alive, fill_s, begin_s = list(groups), 0.0, time.perf_counter()
    buckets = iter(data)
    while alive:
        fill_begin_s = time.perf_counter()
        try:
            bucket = next(buckets, None)
        except Exception as error:
            for group in alive:
                group.abort(str(error))
            raise
        fill_s += time.perf_counter() - fill_begin_s
        alive = [group for group in alive if _succeeds(group, group.wait)]
        if bucket is None:
            break
        alive = [group for group in alive if _succeeds(group, partial(group.start_broadcast, bucket))]
    for group in alive:
        _succeeds(group, group.wait_for_receivers)
    return SendReport(
        silent={group.name: group.silent for group in groups if group.silent},
        gather_s=fill_s,
        send_s=time.perf_counter() - begin_s - fill_s,
    )


def _succeeds(group: WeightGroup, act: Callable[[], None]) -> bool:
    try:
        act()
    except (RuntimeError, WeightSyncError) as error:
        log.warning("sending weights into group %s failed: %s", group.name, error)
        return False
    return True
