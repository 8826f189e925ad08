"""How much memory tensors take while a block runs, counted by what is allocated."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations of this thread make and that somebody holds.

    Example:
        >>> with LiveBytes() as live:
        ...     a = torch.zeros(1000)
        ...     del a
        ...     b = torch.zeros(500)
        >>> live.peak
        4000
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """Most bytes at a time."""
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self._look(tree_leaves((arguments, named)), ours=False)
        result = function(*arguments, **(named or {}))
        self._look(tree_leaves(result), ours=True)
        self.peak = max(self.peak, sum(size for _, size in self._sizes.values()))
        return result

    def _look(self, values: list[Any], *, ours: bool) -> None:
        """Remember storages not seen before; what an operation is given is not new."""
        self._sizes = {key: known for key, known in self._sizes.items() if not known[0].expired()}
        for value in values:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                reference = StorageWeakRef(storage)
                size = storage.nbytes() if ours else 0
                self._sizes.setdefault(reference.cdata, (reference, size))
