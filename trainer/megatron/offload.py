"""Moves what a rank keeps between two steps off its device and back, so that engines can have the memory.

```
                                                  emptied storages        regions of torch-memory-saver
 parameters, main parameters, moments, buffers    copied to the host      backed up on the host by pages
 gradients                                        dropped                 dropped
 back                                             at other addresses      at the same addresses
```

Both work on storages, not on tensors. A tensor is a view of a storage, and Megatron has many of one
(`main_grad`, the shards of main parameters, parameters as views of a distributed optimizer's buffer): all of
them are whole again without being known here. What there is to move is looked up each time, because
optimizers make their moments in their first step.

A storage leaves its device for the first time by being emptied in its place. Where there is a memory saver,
it is given its bytes again inside a region, and stays there: from then on its pages are taken away under it
and put back (`pause` and `resume`), and it keeps its address. So whoever allocated it, and when, does not
matter, and no code of Megatron has to run inside a region.

Gradients are not kept: `MegatronModel.run` sets them to zero before it adds to them, and a turn ends after
the optimizer's step, never between the two.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch

from async_rl.errors import EnvironmentNotReady, TrainerError
from trainer.megatron.model import MegatronModel

_STATE: Final = "trainer state"
_GRADIENTS: Final = "trainer gradients"
"""Tags of the two regions."""


class MemorySaver(Protocol):
    """The part of `torch_memory_saver` that is used here."""

    def region(self, tag: str, enable_cpu_backup: bool) -> AbstractContextManager[None]:
        """What this thread allocates in the block can be paused; with a backup its content comes back."""
        ...

    def pause(self, tag: str) -> None:
        """Give the memory of a tag's allocations back; they keep their addresses."""
        ...

    def resume(self, tag: str) -> None:
        """Take memory for them again."""
        ...


@functools.cache
def memory_saver() -> MemorySaver:
    """That of this process, which hooks into torch's own allocator: no library has to be preloaded for it.

    It ends the process where it fails, so what can be known is looked at before it is loaded.

    Raises:
        EnvironmentNotReady: When it is not installed, or torch's allocator is set up against it.
    """
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise EnvironmentNotReady(
                f"placement.shared: {name} is {os.environ[name]!r}, but torch-memory-saver cannot take pages "
                "away from expandable segments: leave expandable_segments out of it"
            )
    try:
        from torch_memory_saver import torch_memory_saver as saver
    except ImportError as error:
        raise EnvironmentNotReady(
            "placement.shared: the trainer gives device memory back by torch-memory-saver, which is not "
            "installed here: `pip install torch-memory-saver`"
        ) from error
    saver.hook_mode = "torch"
    saver.retain_cpu_backup = (
        True  # to pin host memory takes longer than to copy; this also loads the library
    )
    found: MemorySaver = saver
    return found


class TrainerOffload:
    """See the module.

    Example:
        >>> offload = Offload(model)
        >>> offload.offload()
        >>> offload.reload()
    """

    def __init__(self, model: MegatronModel, saver: MemorySaver | None = None) -> None:
        """Everything is where it was made; without a saver storages are emptied each time."""
        self._model = model
        self._saver = saver
        self._settled: set[int] = set()
        """Addresses of the storages that are in a region."""
        self._moved: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        self._gradients_away: list[torch.UntypedStorage] = []
        self.is_offloaded = False
        self.num_bytes = 0
        """Kept on the host now."""

    def offload_state(self) -> None:
        """Move everything to the host; once more it changes nothing."""
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
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()  # other processes see only what the allocator gives back

    def reload_state(self) -> None:
        """Bring it back; once more it changes nothing.

        Raises:
            TrainerError: When the device has too little memory for it; nothing was changed.
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
        """Whether a storage is still where somebody else allocated it."""
        return place not in self._settled

    def _region(self, tag: str, *, backed_up: bool) -> AbstractContextManager[None]:
        if self._saver is None:
            return contextlib.nullcontext()
        return self._saver.region(tag, enable_cpu_backup=backed_up)

    def _check_free_memory(self) -> None:
        if self._model.device.type != "cuda":
            return
        dropped = sum(size for _, size in self._dropped)
        settled = sum(s.nbytes() for s in self._gradients_away)
        free, total = torch.cuda.mem_get_info(self._model.device)
        check_free_memory(self.num_bytes + dropped + settled, free, total)

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

    def _storages(self, tensors: Iterator[torch.Tensor]) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Those that hold anything of the device, by address; several tensors can be views of one.

        An optimizer's counters are on the host, and stay there.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and tensor.device.type == self._model.device.type:
                yield storage.data_ptr(), storage

    def _synchronize(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)


def check_free_memory(needed: int, free: int, total: int) -> None:
    """Refuse to come back to a device that is not empty enough; all in bytes.

    Raises:
        TrainerError: With the remedy.
    """
    if needed > free:
        raise TrainerError(
            f"the trainer's memory does not fit back on its device: it needs {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free after the engines' turn: something else "
            "holds memory there (see nvidia-smi)"
        )


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in an optimizer's state of one parameter."""
    if torch.is_tensor(values):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage as `[n] uint8`, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
