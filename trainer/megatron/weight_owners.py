"""Divides the tensors of a model among the ranks that hold them: each has one owner, which writes it.

```
 rank     holds, once gathered from its tensor ranks       owns                            is sent by
 0, 1     stage 0, experts 0 to 3                          about half of these each        0
 2, 3     stage 1, experts 0 to 3                          …                               2, on another host
```

Names, shapes and owners do not change during a run. They are exchanged once, as msgpack.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch.distributed as dist

from async_rl.engine_protocol import TensorSpec, WeightBucket
from async_rl.weights.buckets import bytes_of, inseparable, plan_buckets
from trainer.collectives import all_gather_bytes


class WeightOwners(NamedTuple):
    """The tensors of a model under their Hugging Face names, and the rank that owns each."""

    specs: tuple[TensorSpec, ...]
    """All tensors, in the order in which all ranks together export them: by place, then by stage."""
    rank_of: Mapping[str, int]
    """The owner of each tensor, by name."""
    place_of: Mapping[str, tuple[int, int]]
    """The pipeline stage that has each tensor, and its place in the lists of the ranks there."""
    sender_of: tuple[int, ...]
    """By rank: the one that sends what it owns to engines."""

    def plan_buckets(self, bucket_bytes: int) -> tuple[WeightBucket, ...]:
        """Divide what each sender sends into buckets, and return all in the order in which engines take them.

        It is that of their last tensors in `specs`, in which ranks export. So a rank that waits until its
        bucket is taken has done its part in all buckets before it: no two ranks wait for each other.
        """
        sent_by: dict[int, list[TensorSpec]] = {}
        for spec in self.specs:
            sent_by.setdefault(self.sender_of[self.rank_of[spec.name]], []).append(spec)
        place = {spec.name: index for index, spec in enumerate(self.specs)}
        buckets = [
            WeightBucket(sender, tensors)
            for sender, specs in sent_by.items()
            for tensors in plan_buckets(specs, bucket_bytes)
        ]
        return tuple(sorted(buckets, key=lambda bucket: place[bucket.tensors[-1].name]))

    def bytes_of(self, rank: int) -> int:
        """Return the bytes of the tensors that a rank owns."""
        return bytes_of(spec for spec in self.specs if self.rank_of[spec.name] == rank)


def exchange_owners(held: Sequence[TensorSpec], stage: int, num_senders: int | None) -> WeightOwners:
    """Return the owners of all tensors. Collective.

    Args:
        held: What this rank exports without ranks of other stages and other experts, in its order. All ranks
            of a stage have lists of the same length.
        stage: This rank's pipeline stage.
        num_senders: How many ranks send; None for one on each host.
    """
    mine = msgspec.msgpack.encode((stage, tuple(held)))
    digests = all_gather_bytes(hashlib.sha256(mine).digest())
    # Ranks that differ in their data alone hold the same: the first one says what.
    is_first = digests.index(digests[dist.get_rank()]) == dist.get_rank()
    lists = [
        msgspec.msgpack.decode(each, type=tuple[int, tuple[TensorSpec, ...]]) if each else None
        for each in all_gather_bytes(mine if is_first else b"")
    ]
    held_by = [lists[digests.index(digest)] for digest in digests]
    hosts = all_gather_bytes(socket.gethostname().encode())
    senders = assign_senders(hosts, num_senders)
    return assign_owners([each for each in held_by if each is not None], senders)


def assign_senders(hosts: Sequence[bytes], num_senders: int | None) -> tuple[int, ...]:
    """Return by rank the one that sends for it.

    Args:
        hosts: By rank: the name of its host.
        num_senders: How many ranks send, for about as many ranks each; None for the first one of each host.

    Example:
        >>> assign_senders([b"a", b"a", b"b", b"b"], None), assign_senders([b"a"] * 4, 3)
        ((0, 0, 2, 2), (0, 0, 2, 3))
    """
    if num_senders is None:
        return tuple(hosts.index(host) for host in hosts)
    parts = [rank * num_senders // len(hosts) for rank in range(len(hosts))]
    return tuple(parts.index(part) for part in parts)


def assign_owners(
    held: Sequence[tuple[int, Sequence[TensorSpec]]], sender_of: tuple[int, ...]
) -> WeightOwners:
    """Give each tensor to the rank with the fewest bytes of those that hold it, the largest tensors first.

    Args:
        held: For each rank its stage, and the tensors that it holds.
        sender_of: By rank: the one that sends for it.

    Returns:
        The owners. Of tensors with the same name, as tied embeddings are, the one of the first stage counts.

    Example:
        >>> spec = TensorSpec(name="a", dtype="float32", shape=(4,))
        >>> both = (spec, msgspec.structs.replace(spec, name="b"))
        >>> assign_owners([(0, both), (0, both)], (0, 0)).rank_of
        {'a': 0, 'b': 1}
    """
    holders: dict[str, list[int]] = {}
    ordered: dict[str, TensorSpec] = {}
    place_of: dict[str, tuple[int, int]] = {}
    units: list[list[TensorSpec]] = []
    for stage in sorted({stage for stage, _ in held}):
        of_stage = [(rank, specs) for rank, (own, specs) in enumerate(held) if own == stage]
        before = set(ordered)
        for step in range(max(len(specs) for _, specs in of_stage)):
            for rank, specs in of_stage:
                spec = specs[step]
                if spec.name not in before:
                    ordered.setdefault(spec.name, spec)
                    place_of.setdefault(spec.name, (stage, step))
                    holders.setdefault(spec.name, []).append(rank)
        units += inseparable([spec for name, spec in ordered.items() if name not in before])
    loads = np.zeros(len(held), np.int64)
    rank_of = dict.fromkeys(ordered, 0)
    # Engines need some tensors in one bucket, so in the same owner's.
    for unit in sorted(units, key=bytes_of, reverse=True):
        own = holders[unit[0].name]
        rank = own[int(loads[own].argmin())]
        rank_of |= dict.fromkeys((spec.name for spec in unit), rank)
        loads[rank] += bytes_of(unit)
    # Stages take turns, as they send at the same time. What engines need together stays together.
    units.sort(key=lambda unit: place_of[unit[0].name][::-1])
    return WeightOwners(tuple(spec for unit in units for spec in unit), rank_of, place_of, sender_of)
