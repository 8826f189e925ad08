"""Megatron's optimizers for GPUs on a CPU: its offload to the host, and TransformerEngine's Adam.

Both are the real ones, made to take a CPU's tensors for those of a GPU. What the trainer has to do with them
can be seen so: which tensors are where, in which types, under which names, and that checkpoints hold them.
"""

from __future__ import annotations

import inspect
import types

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer, optimizer_config
from megatron.core.optimizer.cpu_offloading import hybrid_optimizer

from tests.support.fused_adam import fused_adam
from trainer import worker


class HostTensor(torch.Tensor):
    """A tensor in pinned host memory; what is computed from it is one, too."""


def offload_to_host(patch: pytest.MonkeyPatch) -> None:
    """Make `HybridDeviceOptimizer` take the parameters of ranks for those of a GPU."""

    def on_gpu(tensor: torch.Tensor) -> bool:
        frame = inspect.currentframe()
        caller = frame.f_back if frame else None
        asked = caller is not None and caller.f_globals["__name__"] == hybrid_optimizer.__name__
        return asked and not isinstance(tensor, HostTensor)

    patch.setattr(torch.Tensor, "is_cuda", property(on_gpu), raising=False)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.as_subclass(HostTensor))
    without_pinning = types.ModuleType("torch")
    without_pinning.__dict__.update(vars(torch))
    without_pinning.__dict__["empty"] = lambda *size, pin_memory=False, **options: torch.empty(
        *size, **options
    )
    patch.setattr(hybrid_optimizer, "torch", without_pinning)
    _allow(patch)


def take_fused_adam(patch: pytest.MonkeyPatch) -> None:
    """Give Megatron TransformerEngine's `FusedAdam` as its Adam."""
    adam = fused_adam(patch)
    for where in (megatron_optimizer, distrib_optimizer):
        patch.setattr(where, "Adam", adam)
    patch.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
    _allow(patch)


def _allow(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(optimizer_config, "is_te_min_version", lambda *_: True)
    patch.setattr(megatron_optimizer, "is_te_min_version", lambda *_: True)
    patch.setattr(worker, "check_megatron_settings", lambda *_, **__: None)
