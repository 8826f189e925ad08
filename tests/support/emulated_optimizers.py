"""Megatron's optimizers for GPUs on a CPU: its offload to the host, and TransformerEngine's Adam.

Neither library runs without a GPU here. What the trainer has to do with them can be seen all the same: which
tensors are where, in which types, under which names, and that checkpoints hold them.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer, optimizer_config
from megatron.core.optimizer.cpu_offloading import hybrid_optimizer

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
    """Give Megatron `FusedAdam` as its Adam."""
    module: Any = types.ModuleType("transformer_engine.pytorch.optimizers")
    module.FusedAdam = FusedAdam
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        patch.setitem(sys.modules, name, types.ModuleType(name))
    patch.setitem(sys.modules, module.__name__, module)
    for where in (megatron_optimizer, distrib_optimizer):
        patch.setattr(where, "Adam", FusedAdam)
    patch.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
    _allow(patch)


def _allow(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(optimizer_config, "is_te_min_version", lambda *_: True)
    patch.setattr(megatron_optimizer, "is_te_min_version", lambda *_: True)
    patch.setattr(worker, "check_megatron_settings", lambda *_, **__: None)


class FusedAdam(torch.optim.Optimizer):
    """TransformerEngine's Adam in torch: its arguments, states and types; no scales, no remainders.

    Source: transformer_engine/pytorch/optimizers/fused_adam.py of version 2.11.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert adam_w_mode
        assert not store_param_remainders
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self._master, self._decoupled = master_weights, use_decoupled_grad

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        assert not store_param_remainders
        for name, dtype in self._dtypes.items():
            self.state[param][name] = torch.zeros_like(param, dtype=dtype)
        if self._master:
            self.state[param]["master_param"] = param.detach().clone().float()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), step = group["betas"], group["step"]
            for param in group["params"]:
                gradient = param.decoupled_grad if self._decoupled else param.grad
                if gradient is None:
                    continue
                if not self.state[param]:
                    self.initialize_state(param, False)
                state = self.state[param]
                first = state["exp_avg"].float().mul_(beta1).add_(gradient, alpha=1 - beta1)
                second = state["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                main = state.get("master_param", param)
                main.mul_(1 - group["lr"] * group["weight_decay"])
                root = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
                main.addcdiv_(first, root, value=-group["lr"] / (1 - beta1**step))
                state["exp_avg"].copy_(first)
                state["exp_avg_sq"].copy_(second)
                param.copy_(main)
