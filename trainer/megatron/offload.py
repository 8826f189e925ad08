"""Moves the state of a rank off its device between two steps and back, so that engines can use the memory.

```
                                                emptied storages        regions of torch-memory-saver
 gradients                                      dropped                 dropped
 main parameters, moments, all of a critic      copied to the host      backed up on the host by pages
 weights: parameters and buffers of the policy  copied to the host      backed up on the host by pages
 after reload                                   at other addresses      at the same addresses
```

Weights can stay longer than the rest: engines take them from the device while it has memory for both.

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
from collections.abc import Container, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel

from async_rl.errors import EnvironmentNotReady, TrainerError
from trainer.megatron.model import MegatronModel

_WEIGHTS: Final = "trainer weights"
_STATE: Final = "trainer state"
_GRADIENTS: Final = "trainer gradients"
"""Tags of the regions."""


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


class _Region:
    """Storages that leave the device together and come back together."""

    def __init__(self, tag: str, *, backed_up: bool, saver: MemorySaver | None) -> None:
        """Have no storages yet; without `backed_up` they come back as zeros."""
        self._tag = tag
        self._backed_up = backed_up
        self._saver = saver
        self._settled: set[int] = set()
        """Addresses of the storages that are inside the region."""
        self._moved: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        """Those that leave for the first time, with their content on the host."""
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        """The same without a backup, with their sizes."""
        self._zeroed: list[torch.UntypedStorage] = []
        self.is_away = False
        self.num_bytes = 0
        """Bytes that are to come back to the device."""

    def release(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Release the memory of all storages, by address."""
        self.is_away = True
        self.num_bytes = sum(storage.nbytes() for storage in storages.values())
        new = [storage for place, storage in storages.items() if place not in self._settled]
        if self._backed_up:
            self._moved = [(storage, _bytes(storage).to("cpu", copy=True)) for storage in new]
        else:
            self._dropped = [(storage, storage.nbytes()) for storage in new]
            self._zeroed = list(storages.values())
        for storage in new:
            storage.resize_(0)
        if self._saver is not None:
            self._saver.pause(self._tag)

    def take_back(self) -> None:
        """Give all storages their memory and content again."""
        if self._saver is not None:
            self._saver.resume(self._tag)
        with self._allocating():
            for storage, host in self._moved:
                storage.resize_(len(host))
                _bytes(storage).copy_(host)
            for storage, size in self._dropped:
                storage.resize_(size)
        for storage in self._zeroed:
            _bytes(storage).zero_()
        if self._saver is not None:
            self._settled |= {storage.data_ptr() for storage, _ in (*self._moved, *self._dropped)}

    def forget_copies(self) -> None:
        """Drop the copies on the host, which the device has finished reading."""
        self._moved, self._dropped, self._zeroed = [], [], []
        self.num_bytes, self.is_away = 0, False

    def _allocating(self) -> AbstractContextManager[None]:
        if self._saver is None:
            return contextlib.nullcontext()
        return self._saver.region(self._tag, enable_cpu_backup=self._backed_up)


class TrainerOffload:
    """Offloads the state of a rank's models between steps, as the module describes."""

    def __init__(self, *models: MegatronModel, saver: MemorySaver | None = None) -> None:
        """Move nothing yet.

        Args:
            models: The models whose state is moved, on one device; engines get the weights of the first.
            saver: Keeps addresses and backs up pages; None empties the storages at each offload.
        """
        self._models, self._device = models, models[0].device
        self._gradients = _Region(_GRADIENTS, backed_up=False, saver=saver)
        self._state = _Region(_STATE, backed_up=True, saver=saver)
        self._weights = _Region(_WEIGHTS, backed_up=True, saver=saver)

    @property
    def num_bytes(self) -> int:
        """Size of the state that is on the host now."""
        return self._state.num_bytes + self._weights.num_bytes

    def offload_state(self, *, keep_weights: bool = False) -> None:
        """Move the state to the host; what is there already stays there.

        Args:
            keep_weights: Whether weights stay on the device. Another call moves them.
        """
        if self._state.is_away and (keep_weights or self._weights.is_away):
            return
        self._synchronize()
        for region, storages in self._storages(with_weights=not keep_weights).items():
            region.release(storages)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the allocator otherwise keeps the memory from other processes

    def reload_state(self) -> None:
        """Move the state back to the device; do nothing when it is there already.

        Raises:
            TrainerError: When the device has too little free memory; nothing was changed.
        """
        away = [region for region in (self._weights, self._state, self._gradients) if region.is_away]
        if not away:
            return
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            check_free_memory(sum(region.num_bytes for region in away), free, total)
        for region in away:
            region.take_back()
        self._synchronize()
        for region in away:
            region.forget_copies()

    def _storages(self, *, with_weights: bool) -> dict[_Region, dict[int, torch.UntypedStorage]]:
        """Return the storages that are on the device, by region and address, with the weights or without.

        Gradients and state leave together, so both are there or neither is.
        """
        gradients = self._by_address(self._gradient_tensors())
        weights = self._by_address(self._weight_tensors(), but=gradients)
        found = {self._weights: weights} if with_weights and not self._weights.is_away else {}
        if not self._state.is_away:
            found[self._state] = self._by_address(self._state_tensors(), but={**gradients, **weights})
            found[self._gradients] = gradients
        return found

    def _chunks(self) -> Iterator[DistributedDataParallel]:
        for model in self._models:
            yield from model.chunks

    def _optimizers(self) -> Iterator[torch.optim.Optimizer]:
        for model in self._models:
            yield from model.inner_optimizers

    def _weight_tensors(self) -> Iterator[torch.Tensor]:
        """Yield what engines get, and what only the policy's modules hold."""
        for chunk in self._models[0].chunks:
            yield from chunk.module.parameters()
            yield from chunk.module.buffers()

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that a step needs from the previous one, some of the weights among them."""
        for chunk in self._chunks():
            yield from chunk.module.parameters()
            yield from chunk.module.buffers()
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                yield from group["params"]
            for values in optimizer.state.values():
                yield from _tensors(values)

    def _gradient_tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self._chunks():
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data
            for parameter in chunk.module.parameters():
                yield from _tensors(parameter.grad)
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield from _tensors(parameter.grad)

    def _by_address(
        self, tensors: Iterator[torch.Tensor], *, but: Container[int] = ()
    ) -> dict[int, torch.UntypedStorage]:
        """Return the non-empty storages on the device, by address; several tensors can be views of one.

        An optimizer's counters are on the host and stay there.
        """
        found = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and tensor.device.type == self._device.type:
                found[storage.data_ptr()] = storage
        return {place: storage for place, storage in found.items() if place not in but}

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
