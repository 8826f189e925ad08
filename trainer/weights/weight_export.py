"""One rank's part in sending weights to engines: it turns Hugging Face tensors into buckets.

```
export of what a sender sends ─► fill a bucket ─► broadcast, while the next one is filled     senders
export (gathered)             ─► fill a bucket ─► shared memory                                rank 0
                              ├► fill a bucket ─► a handle of it                 ranks on engines' GPUs
                              └► dropped                                                  other ranks
export of what a rank owns    ─► compare with the version before ─► file of a delta         each rank
```

Gathering is collective: every method must be called on all ranks, and all ranks iterate over the same tensors
to the end, even after a failure. Memory is bounded by two buckets and one gathered parameter.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from async_rl.engine_protocol import GroupInvite, TensorSpec, WeightBucket
from async_rl.trainer_protocol import SendReport
from async_rl.weights.broadcast import WeightGroup, send_buckets
from async_rl.weights.buckets import fill_buckets, largest_of
from async_rl.weights.delta import DeltaWriter, Raw
from async_rl.weights.relay import BUFFERS
from async_rl.weights.shared_memory import free_closed_handles, payload_for, shared_buffer
from trainer.megatron.weight_owners import WeightOwners
from trainer.weights.checksums import checksum_parameters, sum_tensors

Export = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""Iterates over all tensors under their Hugging Face names, in the same order each time."""


class WeightExport:
    """Exports the weights of one trainer to its engines: by broadcast, in memory, or as delta files."""

    def __init__(
        self,
        export: Export,
        export_sent: Export,
        export_owned: Export,
        rank: int,
        device: torch.device,
        *,
        owners: Callable[[], WeightOwners],
        group_timeout_s: float,
        shares_device: bool = False,
    ) -> None:
        """Create an export; nothing is gathered yet.

        Args:
            export: Iterates over all tensors, gathered from all ranks.
            export_sent: Iterates over those that this rank's sender broadcasts.
            export_owned: Iterates over those that this rank owns.
            rank: This rank of the trainer.
            device: The device from which tensors are broadcast.
            owners: Returns what `export` iterates over, with owners and senders, or raises when the engines'
                model does not match it.
            group_timeout_s: Longest wait for an engine in a weight-update group.
            shares_device: Whether each rank is on the GPU of an engine's rank, which reads buckets there.
        """
        self._export = export
        self._export_sent = export_sent
        self._export_owned = export_owned
        self._rank = rank
        self._device = device
        self._find_owners = owners
        self._owners: WeightOwners | None = None
        self._group_timeout_s = group_timeout_s
        self._groups: dict[str, WeightGroup] = {}
        self.shares_device = shares_device
        self._fills_buckets = shares_device or rank == 0
        self.shared_buffers: list[torch.Tensor] = []
        self._sharing: Iterator[torch.Tensor | None] = iter(())
        self._deltas = DeltaWriter()

    def plan_buckets(self, bucket_bytes: int) -> tuple[WeightBucket, ...]:
        """Implements `Trainer.plan_buckets`."""
        return self.owners().plan_buckets(bucket_bytes)

    def owners(self) -> WeightOwners:
        """Return the exported tensors with their owners; the first call determines and checks them.

        Raises:
            WeightSyncError: On rank 0, when the tensors do not match the engines' model.
        """
        if self._owners is None:
            self._owners = self._find_owners()
        return self._owners

    def checksums(self) -> dict[str, str]:
        """Implements `Trainer.checksums`."""
        tensors = self._export()
        try:
            if self._rank != 0:
                return {}
            # An engine on a GPU computes its checksums there, by another algorithm, and so does the trainer.
            return checksum_parameters(tensors) if self._device.type == "cpu" else sum_tensors(tensors)
        finally:
            collections.deque(tensors, maxlen=0)

    # -- broadcast

    def open_group(self, invite: GroupInvite) -> None:
        """Implements `Trainer.open_weight_group`."""
        if self._rank == invite.sender:
            self._groups[invite.group_name] = WeightGroup(invite, self._group_timeout_s)

    def close_group(self, group_name: str) -> None:
        """Implements `Trainer.close_weight_group`; does nothing for a group that is not open."""
        group = self._groups.pop(group_name, None)
        if group is not None:
            group.close()

    def abort_group(self, group_name: str) -> None:
        """Implements `Trainer.abort_weight_group`, in another thread."""
        group = self._groups.get(group_name)
        if group is not None:
            group.abort("the driver has aborted the update")

    def send_weights(self, group_names: list[str], bucket_bytes: int) -> SendReport:
        """Implements `Trainer.send_weights`."""
        buckets = [each.tensors for each in self.plan_buckets(bucket_bytes) if each.sender == self._rank]
        tensors = self._export_sent()
        groups = [self._groups[name] for name in group_names if name in self._groups]
        try:
            if not buckets:
                return SendReport()
            size = largest_of(buckets)
            buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]
            return send_buckets(fill_buckets(tensors, buckets, buffers), groups)
        finally:
            collections.deque(tensors, maxlen=0)

    # -- memory that engines open

    def share_bucket(self, number: int, bucket_bytes: int, ranks: list[int]) -> list[bytes]:
        """Implements `Trainer.share_bucket`."""
        buckets = [each.tensors for each in self.plan_buckets(bucket_bytes)]
        if number == 0:
            self._sharing = self._share_all(buckets)
        data = next(self._sharing)
        num_readers = ranks.count(self._rank)
        return [] if data is None else [payload_for(data, buckets[number]) for _ in range(num_readers)]

    def _share_all(self, buckets: Sequence[Sequence[TensorSpec]]) -> Iterator[torch.Tensor | None]:
        """Yield the buckets in memory that engines open; None for each one on a rank without readers."""
        tensors = self._export()
        for number, bucket in enumerate(buckets):
            of_bucket, data = itertools.islice(tensors, len(bucket)), None
            try:
                self.allocate_buffers(buckets)
                if self._fills_buckets:
                    buffer = self.shared_buffers[number % len(self.shared_buffers)]
                    (data,) = fill_buckets(of_bucket, [bucket], [buffer])
            finally:
                collections.deque(of_bucket, maxlen=0)
            yield data

    def allocate_buffers(self, buckets: Sequence[Sequence[TensorSpec]]) -> None:
        """Allocate the buffers that `share_bucket` fills, on ranks that have readers.

        Those in shared memory are reused for later updates: allocating new pages costs more than copying into
        old ones. Those on a GPU are one more, because the ranks of an engine copy out of them after the first
        one has answered. Each has finished before it takes the next bucket: torch waits for the copies when
        it closes a handle.

        Raises:
            WeightSyncError: When there is not enough shared memory.
        """
        num_bytes = largest_of(buckets)
        if self._fills_buckets and (not self.shared_buffers or len(self.shared_buffers[0]) < num_bytes):
            self.shared_buffers.clear()
            if self.shares_device:
                for _ in range(BUFFERS + 1):
                    self.shared_buffers.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
            else:
                self.shared_buffers += [shared_buffer(num_bytes) for _ in range(BUFFERS)]

    def release_device(self) -> None:
        """Release what the last update has left on the device: a gathered parameter, and buckets there."""
        self._sharing = iter(())
        if self.shares_device:
            self.shared_buffers.clear()
            free_closed_handles()

    # -- a delta

    def write_delta(self, path: Path, base: int | None, version: int, num_files: int = 1) -> bool:
        """Write this rank's file of `Trainer.publish_delta`, one of `num_files`."""
        tensors = self._export_owned()
        try:
            raw = ((name, tensor.element_size(), raw_of(tensor)) for name, tensor in tensors)
            file = path / f"{self._rank}.delta"
            return self._deltas.write_delta(raw, file, base, version, num_files=num_files)
        finally:
            collections.deque(tensors, maxlen=0)

    # -- shutdown

    def close(self) -> None:
        """Leave all groups and releases the memory."""
        for name in list(self._groups):
            self.close_group(name)
        self.shared_buffers = []
        self._sharing = iter(())
        self._deltas = DeltaWriter()


def raw_of(tensor: torch.Tensor) -> Raw:
    """Return the bytes of a tensor, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
