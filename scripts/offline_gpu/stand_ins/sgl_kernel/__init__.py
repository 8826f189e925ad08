"""Stands in for SGLang's AOT kernels: those that Qwen3-MoE runs, in torch, and refusals for all others.

It fits `--attention-backend triton --sampling-backend pytorch`. SGLang imports many more names than it runs,
some from submodules, and takes attributes of them: each is importable, and fails with its name when called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch


def rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """Return `input / rms(input) * weight`, computed in float32."""
    wide = input.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(input.dtype) if out is None else out.copy_(normed)


def fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, **_: Any
) -> None:
    """Add `input` to `residual` and write the norm of the sum, which is not rounded before, to `input`."""
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(rmsnorm(total, weight, eps))


def moe_sum_reduce(input: torch.Tensor, output: torch.Tensor, routed_scaling_factor: float = 1.0) -> None:
    """Write the scaled sum over experts of `[tokens, top-k, hidden]` to `output`."""
    output.copy_(input.sum(1, dtype=torch.float32) * routed_scaling_factor)


def moe_align_block_size(*arguments: Any) -> None:
    """Sort tokens by expert, in blocks, by the kernel for it that SGLang compiles itself."""
    from sglang.kernels.ops.moe import moe_align

    if len(arguments) > 8:
        raise NotImplementedError("moe_align_block_size(ignore_invalid_expert=True) is not in the stand-in")
    moe_align.moe_align_block_size(*arguments)


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor at the same memory that does not keep it allocated, as graphs of CUDA need."""
    storage = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    alike = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alike.set_(borrowed, tensor.storage_offset(), tensor.size(), tensor.stride())


def is_arch_support_pdl() -> bool:
    """Whether the GPU starts a kernel before the one that it depends on has ended."""
    return torch.cuda.get_device_capability()[0] >= 9


class _Missing:
    """A name of the real package, of which nothing is there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} is not in the stand-in: install sglang-kernel")


def __getattr__(name: str) -> _Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(f"{__name__}.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule: an empty one whose names are those of this module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        def find(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return globals().get(name) or _Missing(f"{module.__name__}.{name}")

        module.__getattr__ = find  # type: ignore[method-assign]


sys.meta_path.insert(0, _Submodules())
