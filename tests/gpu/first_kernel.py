"""Imports every package that a run on a GPU needs, and runs one kernel of each that has any.

`make setup-gpu` ends with it; with `--only-imports` no kernel runs. Exit code 1: something cannot be imported
or computed; the message names it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

PACKAGES = (
    "torch",
    "transformer_engine.pytorch",
    "sglang",
    "sgl_kernel",
    "flashinfer",
    "megatron.core",
    "mbridge",
    "torch_memory_saver",
    "ray",
    "async_rl",
    "trainer.worker",
)


def import_packages(names: tuple[str, ...] = PACKAGES) -> list[str]:
    """Import packages and return what is wrong, one sentence for each that cannot be imported."""
    failures = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            failures.append(f"{name} cannot be imported: {type(error).__name__}: {error}")
    return failures


def multiply() -> None:
    """Multiply matrices of torch in bfloat16 on the GPU."""
    import torch

    ones = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    if float((ones @ ones).mean()) != 64:
        raise ArithmeticError("the product of matrices of ones is wrong")


def fused_layer() -> None:
    """Run a layer of TransformerEngine forward and backward."""
    import torch
    from transformer_engine import pytorch as fused

    layer = fused.LayerNormLinear(64, 64, params_dtype=torch.bfloat16, device="cuda")
    layer(torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
    if not torch.isfinite(layer.weight.grad).all():
        raise ArithmeticError("its gradient is not finite")


KERNELS: dict[str, Callable[[], None]] = {"torch": multiply, "transformer_engine": fused_layer}


def main() -> int:
    """Run the checks and return the exit code."""
    failures = import_packages()
    for name, kernel in {} if failures or "--only-imports" in sys.argv else KERNELS.items():
        try:
            kernel()
        except Exception as error:
            failures.append(f"{name} does not compute: {type(error).__name__}: {error}")
    for failure in failures:
        print(f"Error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
