"""Moves what a rank keeps between two steps off its device and back, so that engines can have the memory.

```
 parameters, main parameters, moments, buffers   storage ─► host (pinned) ─► storage, bit for bit
 gradients                                       storage ─► nothing       ─► zeros
```

It works on storages, not on tensors: each is emptied in its place and later given its bytes again. A tensor
is a view of a storage, and Megatron has many of one (`main_grad`, the shards of main parameters, parameters
as views of a distributed optimizer's buffer): all of them are whole again without being known here. What
there is to move is looked up each time, because optimizers make their moments in their first step.

Gradients are not kept: `MegatronModel.run` sets them to zero before it adds to them, and a turn ends after
the optimizer's step, never between the two.

Storages get other addresses when they come back. Nothing here may hold a raw pointer across a turn: no CUDA
graph of the trainer, no registered communication buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trainer.megatron.model import MegatronModel


class Offload:
    """See the module.

    Example:
        >>> offload = Offload(model)
        >>> offload.offload()
        >>> offload.reload()
    """

    def __init__(self, model: MegatronModel) -> None:
        """Everything is where it was made."""
        self._model = model
        self._kept: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []
        self._host: dict[int, list[torch.Tensor]] = {}
        """Host memory by size, kept from turn to turn: to pin it takes longer than to copy."""
        self.is_away = False
        self.num_bytes = 0
        """Kept on the host now."""

    def offload(self) -> None:
        """Move everything to the host; once more it changes nothing."""
        if self.is_away:
            return
        self.is_away = True
        gradients = dict(_storages(self._gradients()))
        kept = {pointer: s for pointer, s in _storages(self._state()) if pointer not in gradients}
        for storage in kept.values():
            host = self._host_memory(storage.nbytes())
            host.copy_(_bytes(storage), non_blocking=True)
            self._kept.append((storage, host))
            self.num_bytes += storage.nbytes()
        self._synchronize()
        self._emptied = [(storage, storage.nbytes()) for storage in gradients.values()]
        for storage in (*kept.values(), *gradients.values()):
            storage.resize_(0)
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()  # other processes see only what the allocator gives back

    def reload(self) -> None:
        """Bring it back; once more it changes nothing."""
        if not self.is_away:
            return
        for storage, host in self._kept:
            storage.resize_(len(host))
            _bytes(storage).copy_(host, non_blocking=True)
        for storage, size in self._emptied:
            storage.resize_(size)
            _bytes(storage).zero_()
        self._synchronize()
        for _, host in self._kept:
            self._host.setdefault(len(host), []).append(host)
        self._kept, self._emptied, self.num_bytes, self.is_away = [], [], 0, False

    def _state(self) -> Iterator[torch.Tensor]:
        """All that a step needs of the one before."""
        for chunk in self._model.chunks:
            yield from chunk.module.parameters()
            yield from chunk.module.buffers()
        for optimizer in self._model.inner_optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
            for values in optimizer.state.values():
                yield from _tensors(values)

    def _gradients(self) -> Iterator[torch.Tensor]:
        for chunk in self._model.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data
            for parameter in chunk.module.parameters():
                yield from _tensors(parameter.grad)
        for optimizer in self._model.inner_optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield from _tensors(parameter.grad)

    def _host_memory(self, size: int) -> torch.Tensor:
        """`[size] uint8`."""
        if self._host.get(size):
            return self._host[size].pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._model.device.type == "cuda")

    def _synchronize(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()


def _storages(tensors: Iterator[torch.Tensor]) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """Those that hold anything, by address; several tensors can be views of one."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            yield storage.data_ptr(), storage


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in an optimizer's state of one parameter; counters on the host stay there."""
    if torch.is_tensor(values):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage as `[n] uint8`, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
