"""A fake of `torch_memory_saver` for machines without a GPU, which overwrites paused memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

GARBAGE = 0xAB
"""The value of bytes that were resumed without a backup."""


@dataclass
class Allocation:
    """A storage that was allocated inside a region."""

    storage: torch.UntypedStorage
    tag: str
    backed_up: bool
    content: torch.Tensor | None = None
    """The backup, `[n] uint8`, while the storage is paused."""


@dataclass
class FakeMemorySaver:
    """Overwrites the content of allocations in its regions while they are paused, and keeps their addresses.

    Pausing a paused allocation, or resuming an active one, raises an `AssertionError`, where the real one
    ends the process.
    """

    hook_mode: str = "preload"
    retain_cpu_backup: bool = False
    allocations: list[Allocation] = field(default_factory=list)
    _region: tuple[str, bool] | None = None

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool) -> Iterator[None]:
        self._region = tag, enable_cpu_backup
        try:
            yield
        finally:
            self._region = None

    def pause(self, tag: str) -> None:
        for allocation in self._of(tag):
            assert allocation.content is None, "Cannot pause allocation that is not active"
            pages = as_bytes(allocation.storage)
            allocation.content = pages.clone() if allocation.backed_up else torch.full_like(pages, GARBAGE)
            pages.fill_(GARBAGE)

    def resume(self, tag: str) -> None:
        for allocation in self._of(tag):
            assert allocation.content is not None, "Cannot resume allocation that is not paused"
            as_bytes(allocation.storage).copy_(allocation.content)
            allocation.content = None

    @property
    def paused_bytes(self) -> int:
        """Bytes of paused allocations."""
        return sum(a.storage.nbytes() for a in self.allocations if a.content is not None)

    def _of(self, tag: str) -> list[Allocation]:
        return [allocation for allocation in self.allocations if allocation.tag == tag]

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Records the allocations from now on."""
        resize = torch.UntypedStorage.resize_

        def seen(storage: torch.UntypedStorage, size: int) -> object:
            found = resize(storage, size)
            if self._region is not None:
                self.allocations.append(Allocation(storage, *self._region))
            return found

        patch.setattr(torch.UntypedStorage, "resize_", seen)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the storage itself as `[n] uint8`."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)
