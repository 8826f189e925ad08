"""Divides the tensors of a model among the ranks that hold them: each has one owner, which writes it.

```
 rank     holds, once gathered from its tensor ranks       owns
 0, 1     stage 0, experts 0 to 3                          about half of these each
 2, 3     stage 1, experts 0 to 3                          …
```

Names, shapes and owners do not change during a run. They are exchanged once, as msgpack.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch.distributed as dist

from async_rl.engine_protocol import TensorSpec
from async_rl.weights.buckets import size_of
from trainer.collectives import all_gather_bytes


class WeightOwners(NamedTuple):
    """The tensors of a model under their Hugging Face names, and the rank that owns each."""

    specs: tuple[TensorSpec, ...]
    """All tensors, in the order in which all ranks together export them."""
    rank_of: Mapping[str, int]
    """The owner of each tensor, by name."""
    place_of: Mapping[str, tuple[int, int]]
    """The pipeline stage that has each tensor, and its place in the lists of the ranks there."""

    def bytes_of(self, rank: int) -> int:
        """Return the bytes of the tensors that a rank owns."""
        return sum(size_of(spec) for spec in self.specs if self.rank_of[spec.name] == rank)


def exchange_owners(held: Sequence[TensorSpec], stage: int) -> WeightOwners:
    """Return the owners of all tensors. Collective.

    Args:
        held: What this rank exports without ranks of other stages and other experts, in its order. All ranks
            of a stage have lists of the same length.
        stage: This rank's pipeline stage.
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
    return assign_owners([each for each in held_by if each is not None])


def assign_owners(held: Sequence[tuple[int, Sequence[TensorSpec]]]) -> WeightOwners:
    """Give each tensor to the rank with the fewest bytes of those that hold it, the largest tensors first.

    Args:
        held: For each rank its stage, and the tensors that it holds.

    Returns:
        The owners. Of tensors with the same name, as tied embeddings are, the one of the first stage counts.

    Example:
        >>> spec = TensorSpec(name="a", dtype="float32", shape=(4,))
        >>> both = (spec, msgspec.structs.replace(spec, name="b"))
        >>> assign_owners([(0, both), (0, both)]).rank_of
        {'a': 0, 'b': 1}
    """
    holders: dict[str, list[int]] = {}
    ordered: dict[str, TensorSpec] = {}
    place_of: dict[str, tuple[int, int]] = {}
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
    loads = np.zeros(len(held), np.int64)
    rank_of = dict.fromkeys(ordered, 0)
    for spec in sorted(ordered.values(), key=size_of, reverse=True):
        own = holders[spec.name]
        rank_of[spec.name] = rank = own[int(loads[own].argmin())]
        loads[rank] += size_of(spec)
    return WeightOwners(tuple(ordered.values()), rank_of, place_of)
