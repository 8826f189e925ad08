"""TransformerEngine's Adam on a CPU: its own Python, and its CUDA kernel in torch.

`make setup` puts its sources beside the environment (`requirements/sources.txt`), where nothing else finds
them; an environment for GPUs has them itself.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

_SOURCES = [Path(sys.prefix) / "sources", Path(sysconfig.get_path("purelib"))]
_FILES = [folder / "transformer_engine/pytorch/optimizers/fused_adam.py" for folder in _SOURCES]
SOURCE = next((file for file in _FILES if file.exists()), _FILES[0])

Kernel = Callable[..., None]


def fused_adam(patch: pytest.MonkeyPatch, kernel: Kernel | None = None) -> Any:
    """Return the class `FusedAdam`, whose steps call `kernel`. Its imports stay until `patch` ends."""
    kernels = types.ModuleType("transformer_engine_torch")
    kernels.__dict__.update(
        dict.fromkeys(
            (
                "multi_tensor_adam_param_remainder",
                "multi_tensor_adam_fp8",
                "multi_tensor_adam_capturable",
                "multi_tensor_adam_capturable_master",
            )
        ),
        multi_tensor_adam=kernel or multi_tensor_adam,
        DType=types.SimpleNamespace(kFloat32=None),
    )
    package = "transformer_engine.pytorch"
    float8, applier = f"{package}.tensor.float8_tensor", f"{package}.optimizers.multi_tensor_apply"
    modules = {name: types.ModuleType(name) for name in (float8, applier, f"{package}.optimizers")}
    for name in ("Float8Tensor", "Float8Quantizer"):
        setattr(modules[float8], name, type(name, (), {}))
    modules[applier].__dict__["multi_tensor_applier"] = lambda function, *args: function(2048 * 32, *args)
    for name in ("transformer_engine", package, f"{package}.tensor"):
        modules[name] = types.ModuleType(name)
    for name, module in (modules | {kernels.__name__: kernels}).items():
        patch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location(f"{package}.optimizers.fused_adam", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    on_cpu = types.ModuleType("torch")
    on_cpu.__dict__.update(vars(torch))
    on_cpu.__dict__["tensor"] = lambda data, device=None, **options: torch.tensor(data, **options)
    module.__dict__["torch"] = on_cpu
    modules[f"{package}.optimizers"].__dict__["FusedAdam"] = module.FusedAdam
    return module.FusedAdam


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensors: Sequence[Sequence[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """The kernel in torch, with operations whose result for an element never depends on its position.

    Source: transformer_engine/common/multi_tensor/adam.cu, `adam_update` with decoupled weight decay.
    """
    assert mode == bias_correction == 1
    gradients, params, firsts, seconds, *mains = tensors
    for gradient, param, first, second, main in zip(
        gradients, params, firsts, seconds, mains[0] if mains else params, strict=True
    ):
        assert first.dtype == second.dtype == main.dtype == torch.float32
        first.mul_(beta1).add_(gradient * (1 - beta1))
        second.mul_(beta2).add_(gradient * gradient * (1 - beta2))
        root = (second / (1 - beta2**step)).sqrt_().add_(eps)
        update = (first / (1 - beta1**step)).div_(root).add_(main * weight_decay)
        main.sub_(update.mul_(lr))
        param.copy_(main)
