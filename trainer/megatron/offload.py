"""Moves the state of a rank off its device between two steps and back, so that engines can use the memory.

```
                                                  emptied storages        regions of torch-memory-saver
 parameters, main parameters, moments, buffers    copied to the host      backed up on the host by pages
 gradients                                        dropped                 dropped
 after reload                                     at other addresses      at the same addresses
```

Both work on storages, not on tensors. Megatron has many tensors that are views of one storage (`main_grad`,
the shards of main parameters, parameters as views of a distributed optimizer's buffer). All of them are
restored without being listed here. The storages are looked up each time, because optimizers allocate their
moments in the first step.

The first offload of a storage empties it in place. With a memory saver, its bytes are then allocated inside a
region, where they remain: later offloads release and restore the pages (`pause` and `resume`), and the
address stays the same. It therefore does not matter which code allocated the storage or when, and no code of
Megatron must run inside a region.

Gradients are not kept: `MegatronModel.run_schedule` sets them to zero before it accumulates, and a
time-sharing phase ends after the optimizer's step, never between the two.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel

from async_rl.errors import EnvironmentNotReady, TrainerError
from trainer.megatron.model import MegatronModel

_STATE: Final = "trainer state"
_GRADIENTS: Final = "trainer gradients"
"""Tags of the two regions."""


class MemorySaver(Protocol):
    """The part of `torch_memory_saver` that is used here."""

    def region(self, tag: str, enable_cpu_backup: bool) -> AbstractContextManager[None]:
        """Make this thread's allocations in the block pausable; with a backup, their content is restored."""
        ...

    def pause(self, tag: str) -> None:
        """Release the memory of a tag's allocations, which keep their addresses."""
        ...

    def resume(self, tag: str) -> None:
        """Allocate memory for a tag's allocations again."""
        ...


@functools.cache
def memory_saver() -> MemorySaver:
    """Return the memory saver of this process, which hooks into torch's allocator without a preloaded
    library.

    The library terminates the process on failure, so known conflicts are checked before it is loaded.

    Raises:
        EnvironmentNotReady: When it is not installed, or the configuration of torch's allocator conflicts
        with it.
    """
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise EnvironmentNotReady(
                f"placement.shared: {name} is {os.environ[name]!r}, but torch-memory-saver cannot take pages "
                "away from expandable segments: remove expandable_segments from it"
            )
    try:
        from torch_memory_saver import torch_memory_saver as saver
    except ImportError as error:
        raise EnvironmentNotReady(
            "placement.shared: the trainer releases device memory with torch-memory-saver, which is not "
            "installed here: `pip install torch-memory-saver`"
        ) from error
    saver.hook_mode = "torch"
    saver.retain_cpu_backup = (
        True  # pinning host memory takes longer than copying; this also loads the library
    )
    found: MemorySaver = saver
    return found


class TrainerOffload:
    """Offloads the state of a rank's models between steps, as the module describes."""

    def __init__(self, *models: MegatronModel, saver: MemorySaver | None = None) -> None:
        """Move nothing yet.

        Args:
            models: The models whose state is moved, on one device.
            saver: Keeps addresses and backs up pages; None empties the storages at each offload.
        """
        self._models, self._device = models, models[0].device
        self._saver = saver
        self._settled: set[int] = set()
        """Addresses of the storages that are inside a region."""
        self._moved: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        self._gradients_away: list[torch.UntypedStorage] = []
        self.is_offloaded = False
        self.num_bytes = 0
        """Size of the state that is on the host now."""

    def offload_state(self) -> None:
        """Move the state to the host; do nothing when it is there already."""
        if self.is_offloaded:
            return
        self.is_offloaded = True
        gradients = dict(self._storages(self._gradients()))
        kept = {place: s for place, s in self._storages(self._state()) if place not in gradients}
        self.num_bytes = sum(storage.nbytes() for storage in kept.values())
        self._gradients_away = list(gradients.values())
        self._synchronize()
        self._moved = [
            (s, _bytes(s).to("cpu", copy=True)) for place, s in kept.items() if self._is_new(place)
        ]
        self._dropped = [(s, s.nbytes()) for place, s in gradients.items() if self._is_new(place)]
        for storage, _ in (*self._moved, *self._dropped):
            storage.resize_(0)
        if self._saver is not None:
            self._saver.pause(_STATE)
            self._saver.pause(_GRADIENTS)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the allocator otherwise keeps the memory from other processes

    def reload_state(self) -> None:
        """Move the state back to the device; do nothing when it is there already.

        Raises:
            TrainerError: When the device has too little free memory; nothing was changed.
        """
        if not self.is_offloaded:
            return
        self._check_free_memory()
        if self._saver is not None:
            self._saver.resume(_STATE)
            self._saver.resume(_GRADIENTS)
        with self._region(_STATE, backed_up=True):
            for storage, host in self._moved:
                storage.resize_(len(host))
                _bytes(storage).copy_(host)
        with self._region(_GRADIENTS, backed_up=False):
            for storage, size in self._dropped:
                storage.resize_(size)
        for storage in self._gradients_away:
            _bytes(storage).zero_()
        self._synchronize()
        if self._saver is not None:
            self._settled |= {storage.data_ptr() for storage, _ in (*self._moved, *self._dropped)}
        self._moved, self._dropped, self._gradients_away = [], [], []
        self.num_bytes, self.is_offloaded = 0, False

    def _is_new(self, place: int) -> bool:
        """Whether a storage is still at its original allocation, outside a region."""
        return place not in self._settled

    def _region(self, tag: str, *, backed_up: bool) -> AbstractContextManager[None]:
        if self._saver is None:
            return contextlib.nullcontext()
        return self._saver.region(tag, enable_cpu_backup=backed_up)

    def _check_free_memory(self) -> None:
        if self._device.type != "cuda":
            return
        dropped = sum(size for _, size in self._dropped)
        settled = sum(s.nbytes() for s in self._gradients_away)
        free, total = torch.cuda.mem_get_info(self._device)
        check_free_memory(self.num_bytes + dropped + settled, free, total)

    def _chunks(self) -> Iterator[DistributedDataParallel]:
        for model in self._models:
            yield from model.chunks

    def _optimizers(self) -> Iterator[torch.optim.Optimizer]:
        for model in self._models:
            yield from model.inner_optimizers

    def _state(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that a step needs from the previous one."""
        for chunk in self._chunks():
            yield from chunk.module.parameters()
            yield from chunk.module.buffers()
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                yield from group["params"]
            for values in optimizer.state.values():
                yield from _tensors(values)

    def _gradients(self) -> Iterator[torch.Tensor]:
        for chunk in self._chunks():
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data
            for parameter in chunk.module.parameters():
                yield from _tensors(parameter.grad)
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield from _tensors(parameter.grad)

    def _storages(self, tensors: Iterator[torch.Tensor]) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Yield the non-empty storages on the device, by address; several tensors can be views of one.

        An optimizer's counters are on the host and stay there.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and tensor.device.type == self._device.type:
                yield storage.data_ptr(), storage

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def check_free_memory(needed: int, free: int, total: int) -> None:
    """Check that the state fits back on the device; all arguments in bytes.

    Raises:
        TrainerError: When it does not fit.
    """
    if needed > free:
        raise TrainerError(
            f"the trainer's memory does not fit back on its device: it needs {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free after the engines released theirs: "
            "something else holds memory there (see nvidia-smi)"
        )


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an optimizer's state of one parameter."""
    if torch.is_tensor(values):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the whole storage as `[n] uint8`, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
