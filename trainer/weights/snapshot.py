"""A copy of the weights that is sent to engines while the next step changes the trainer's own weights.

```
 step n ─► copy_tensors: all ranks gather, rank 0 copies ─► step n+1 …
                          └► tensors: published or sent, by another thread
```

Gathering and conversion use the process groups of training and cannot run beside a step, so they happen when
the copy is made. Writing or sending the copy afterwards involves rank 0 only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Literal

import torch

_SLAB_BYTES: Final = 1 << 30
"""Host memory is allocated in pieces of this size: torch rounds pinned memory up to a power of two, each
tensor's by half of it on average, and leaves what is larger as it is (`prepare_rank_environment`)."""

_ALIGNMENT: Final = 512
"""Where a tensor may begin in such a piece, as in torch's memory on devices."""


class WeightSnapshot:
    """Tensors under their Hugging Face names, in buffers that are allocated once; empty on all ranks but 0.

    The snapshot must not be read while it is copied: `async_rl.weights` takes one after the previous one was
    sent.

    Example:
        >>> snapshot = WeightSnapshot(keeps=True, where="host")
        >>> snapshot.copy_tensors([("weight", torch.ones(2))])
        >>> dict(snapshot.tensors())
        {'weight': tensor([1., 1.])}
    """

    def __init__(self, *, keeps: bool, where: Literal["host", "device"]) -> None:
        """Create an empty snapshot.

        Args:
            keeps: Whether this rank keeps the tensors that it gathers.
            where: `host` copies to pinned host memory, `device` to the device of the weights.
        """
        self._keeps = keeps
        self._where = where
        self._tensors: dict[str, torch.Tensor] = {}
        self._slab = torch.empty(0, dtype=torch.uint8)
        """What is free of the piece of host memory that was allocated last."""

    def copy_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy all tensors, which is collective; the originals may change once this returns."""
        for name, tensor in tensors:
            if not self._keeps:
                continue
            if name not in self._tensors:
                self._tensors[name] = self._buffer_for(tensor)
            self._tensors[name].copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the copied tensors in their original order."""
        yield from self._tensors.items()

    def _buffer_for(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._where == "device":
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > _SLAB_BYTES:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        else:
            if size > len(self._slab):
                self._slab = torch.empty(_SLAB_BYTES, dtype=torch.uint8, pin_memory=tensor.is_cuda)
            memory, self._slab = self._slab[:size], self._slab[size:]
        return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run the block's GPU work in a separate stream, so that it does not wait for the kernels of a step."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
