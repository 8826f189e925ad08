"""One rank's part in bringing weights to the engines: Hugging Face tensors in, buckets out.

```
export (all ranks gather, tensor by tensor) ─► fill a bucket ─► broadcast | shared memory     rank 0
                                            ├► compare with the version before ─► delta       rank 0
                                            └► dropped                                        the others
```

Gathering is collective: every method is called on all ranks, and all of them go through the same tensors,
also those that nobody will send any more. At no time is more held than two buckets and what one parameter
gathers.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from async_rl.engine_protocol import GroupInvite, TensorSpec
from async_rl.weights.broadcast import WeightGroup, send_buckets
from async_rl.weights.buckets import fill_buckets, largest_of, plan_buckets, spec_of
from async_rl.weights.delta import DeltaWriter, Raw
from async_rl.weights.relay import BUFFERS
from async_rl.weights.shared_memory import payload_for, shared_buffer
from trainer.weights.checksums import sum_up

Export = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""Starts a pass over all tensors under their Hugging Face names, in the same order each time."""


class WeightExport:
    """The weights of one trainer, as its engines get them."""

    def __init__(
        self,
        export: Export,
        rank: int,
        device: torch.device,
        *,
        check: Callable[[Sequence[TensorSpec]], None],
        group_timeout_s: float,
    ) -> None:
        """Export nothing yet.

        Args:
            export: Passes over the tensors; gathers them from all ranks.
            rank: Of the trainer; 0 sends.
            device: Where broadcasts are made from.
            check: Raises when engines would not know what to do with such tensors; called on rank 0.
            group_timeout_s: Longest wait for an engine in a weight-update group.
        """
        self._export = export
        self._rank = rank
        self._device = device
        self._check = check
        self._group_timeout_s = group_timeout_s
        self._groups: dict[str, WeightGroup] = {}
        self._specs: list[TensorSpec] = []
        self._buffers: list[torch.Tensor] = []
        self._sharing: Iterator[torch.Tensor | None] = iter(())
        self._deltas = DeltaWriter()

    def plan(self, bucket_bytes: int) -> tuple[tuple[TensorSpec, ...], ...]:
        """Implements `TrainerRank.plan_buckets`."""
        return plan_buckets(self.specs(), bucket_bytes)

    def specs(self) -> Sequence[TensorSpec]:
        """What is exported, in its order; found out, and checked, once.

        Raises:
            WeightSyncError: On rank 0, when the engines' model is made of something else.
        """
        if not self._specs:
            specs = [spec_of(name, tensor) for name, tensor in self._export()]
            if self._rank == 0:
                self._check(specs)
            self._specs = specs
        return self._specs

    def checksums(self) -> dict[str, str]:
        """Implements `TrainerRank.checksums`."""
        tensors = self._export()
        try:
            # An engine on a GPU sums there, in another way.
            return sum_up(tensors) if self._rank == 0 and self._device.type == "cpu" else {}
        finally:
            collections.deque(tensors, maxlen=0)

    # -- broadcast

    def open_group(self, invite: GroupInvite) -> None:
        """Implements `TrainerRank.open_weight_group`."""
        if self._rank == 0:
            self._groups[invite.group_name] = WeightGroup(invite, self._group_timeout_s)

    def close_group(self, group_name: str) -> None:
        """Implements `TrainerRank.close_weight_group`; a group that is not open is left alone."""
        group = self._groups.pop(group_name, None)
        if group is not None:
            group.close()

    def send(self, group_names: list[str], bucket_bytes: int) -> None:
        """Implements `TrainerRank.send_weights`."""
        buckets = self.plan(bucket_bytes)
        tensors = self._export()
        try:
            if self._rank == 0:
                groups = {name: self._groups[name] for name in group_names if name in self._groups}
                buffer = torch.empty(largest_of(buckets), dtype=torch.uint8, device=self._device)
                send_buckets(fill_buckets(tensors, buckets, [buffer]), groups)
        finally:
            collections.deque(tensors, maxlen=0)

    # -- shared memory

    def share(self, number: int, bucket_bytes: int, copies: int) -> list[bytes]:
        """Implements `TrainerRank.share_bucket`."""
        buckets = self.plan(bucket_bytes)
        if number == 0:
            self._sharing = self._share_all(buckets)
        data = next(self._sharing)
        return [] if data is None else [payload_for(data, buckets[number]) for _ in range(copies)]

    def _share_all(self, buckets: tuple[tuple[TensorSpec, ...], ...]) -> Iterator[torch.Tensor | None]:
        """The buckets in shared memory on rank 0; on the others as many times nothing."""
        tensors = self._export()
        for number, bucket in enumerate(buckets):
            of_bucket, data = itertools.islice(tensors, len(bucket)), None
            try:
                self.make_room(buckets)
                if self._rank == 0:
                    (data,) = fill_buckets(of_bucket, [bucket], [self._buffers[number % BUFFERS]])
            finally:
                collections.deque(of_bucket, maxlen=0)
            yield data

    def make_room(self, buckets: Sequence[Sequence[TensorSpec]]) -> None:
        """Allocate what `share` fills, on rank 0.

        The buffers are kept from update to update: fresh pages cost more than to copy into old ones.

        Raises:
            WeightSyncError: When there is not enough shared memory.
        """
        num_bytes = largest_of(buckets)
        if self._rank == 0 and (not self._buffers or len(self._buffers[0]) < num_bytes):
            self._buffers.clear()
            self._buffers += [shared_buffer(num_bytes) for _ in range(BUFFERS)]

    # -- a delta

    def write_delta(self, path: Path, base: int | None, version: int) -> bool:
        """Implements `TrainerRank.publish_delta`."""
        tensors = self._export()
        try:
            if self._rank != 0:
                return False
            raw = ((name, tensor.element_size(), raw_of(tensor)) for name, tensor in tensors)
            return self._deltas.write_delta(raw, path, base, version)
        finally:
            collections.deque(tensors, maxlen=0)

    # -- the end

    def close(self) -> None:
        """Leave all groups and give the memory back."""
        for name in list(self._groups):
            self.close_group(name)
        self._buffers = []
        self._sharing = iter(())
        self._deltas = DeltaWriter()


def raw_of(tensor: torch.Tensor) -> Raw:
    """The bytes of a tensor, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
