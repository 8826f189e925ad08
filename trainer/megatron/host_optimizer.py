"""Builds Megatron's optimizer on the host (`optimizer_cpu_offload`) once instead of twice.

Megatron-Core 0.16.1 builds a `HybridDeviceOptimizer` for all parameters of a rank. `DistributedOptimizer`
reads only its groups, and builds another one for the rank's part of them. The copies of the first one would
stay in torch's cache of pinned memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

from megatron.core import optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


class _ParameterGroups(HybridDeviceOptimizer):  # type: ignore[misc]
    """The groups and the settings of a `HybridDeviceOptimizer`, without its copies."""

    def _init_sub_optimizers(self) -> None: ...


@contextlib.contextmanager
def built_once(*, distributed: bool) -> Iterator[None]:
    """Let Megatron make an optimizer in the block; `distributed` says whether it replaces a first one."""
    with (
        patch.object(optimizer, "HybridDeviceOptimizer", _ParameterGroups)
        if distributed
        else contextlib.nullcontext()
    ):
        yield
