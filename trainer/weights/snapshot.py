"""A copy of the weights that engines are given while the next step changes the trainer's own.

```
 step n ─► take: all ranks gather, rank 0 copies ─► step n+1 …
                          └► tensors: published or sent, by another thread
```

Gathering and conversion exchange in the groups that training uses too, so that they cannot run beside a step:
they are done when the copy is made. What is left for later is rank 0's alone: to write or send what it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch


class WeightSnapshot:
    """Tensors under their Hugging Face names, in buffers that are allocated once; empty on all ranks but 0.

    Nobody may read while it is taken: `async_rl.weights.weight_sync` takes one when the one before has been
    sent.

    Example:
        >>> snapshot = Snapshot(keeps=True, where="host")
        >>> snapshot.take([("weight", torch.ones(2))])
        >>> dict(snapshot.tensors())
        {'weight': tensor([1., 1.])}
    """

    def __init__(self, *, keeps: bool, where: Literal["host", "device"]) -> None:
        """Allocate nothing yet.

        Args:
            keeps: Whether this rank keeps what it gathers.
            where: `host` copies out of a GPU into pinned memory, `device` beside the weights.
        """
        self._keeps = keeps
        self._where = where
        self._tensors: dict[str, torch.Tensor] = {}

    def copy_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Go through all tensors, which is collective, and copy them; they may change when this returns."""
        for name, tensor in tensors:
            if not self._keeps:
                continue
            if name not in self._tensors:
                self._tensors[name] = self._buffer_for(tensor)
            self._tensors[name].copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What was copied, in the order in which it came."""
        yield from self._tensors.items()

    def _buffer_for(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._where == "device":
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """What the block does on a GPU goes into a stream of its own: it does not wait for a step's kernels."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
