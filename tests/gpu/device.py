"""Where the cases run: on a GPU, or in a rehearsal on the CPU. What differs between the two is here.

A rehearsal runs the code of a case with smaller shapes, Megatron's own layers, Gloo and SGLang's server for a
CPU, so that a wrong call is found before minutes of a GPU are spent. What only a GPU shows comes last in a
case, behind `end_rehearsal`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch

from async_rl.config import parse_config
from benchmarks.logits_memory import PeakBytes
from tests.gpu.proof import check_idle
from tests.gpu.session import NOT_REHEARSED, REHEARSED
from tests.support.fused_adam import fused_adam as emulated_adam
from tests.support.memory_saver import FakeMemorySaver
from tests.support.trainers import take_layers_of_transformer_engine
from trainer import passthrough
from trainer.megatron.offload import MemorySaver, memory_saver

T = TypeVar("T")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BACKEND = "nccl" if ON_GPU else "gloo"

_OF_A_GPU = ("GiB", "GiB/s", "s", "ms", "tokens/s", "%", "(ratio of memory)", "(ratio of time)")
"""Units of figures that a rehearsal does not have."""

_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Products in bfloat16 per second, by what a GPU's name contains; of the SXM modules."""

_TWO_RANKS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0"}
"""What lets NCCL have two ranks on one GPU, from 2.30 on."""


def sized(on_gpu: T, on_cpu: T) -> T:
    """Return a shape for this device."""
    return on_gpu if ON_GPU else on_cpu


def end_rehearsal() -> None:
    """End a case here, unless it runs on a GPU."""
    if not ON_GPU:
        pytest.skip(REHEARSED)


def cannot_rehearse(why: str) -> None:
    """Leave a case out, unless it runs on a GPU."""
    if not ON_GPU:
        pytest.skip(f"{NOT_REHEARSED}: {why}")


def figure_of(figure: float, unit: str) -> str:
    """Return how a figure is recorded."""
    return f"{figure:.4g} {unit}".strip() if ON_GPU or unit not in _OF_A_GPU else "not run"


# -- the trainer


def take_layers(patch: pytest.MonkeyPatch, fused: bool) -> bool:
    """Build bfloat16 models from TransformerEngine's layers or Megatron's; return whether they are fused."""
    if ON_GPU and importlib.util.find_spec("transformer_engine") is None:
        pytest.fail("TransformerEngine is not installed: see requirements/gpu.txt")
    take_layers_of_transformer_engine(patch, fused and ON_GPU)
    return fused and ON_GPU


def fitted(config: dict[str, Any]) -> dict[str, Any]:
    """Return a run's config for this device: on a CPU without what only a GPU has, which is checked first."""
    if ON_GPU:
        return config
    passthrough.check_megatron_settings(parse_config(config), on_gpu=True)
    passed = config["trainer"].get("megatron", {}).items()
    passed = {name: value for name, value in passed if name not in passthrough.GPU_FIELDS}
    if modules := passed.get("recompute_modules"):
        passed["recompute_modules"] = [each for each in modules if each != "moe_act"]
    found = config | {"trainer": config["trainer"] | {"megatron": passed, "device": DEVICE}}
    return found | {"engine": config.get("engine", {}) | {"device": DEVICE}}


def fused_adam(patch: pytest.MonkeyPatch) -> Any:
    """Return TransformerEngine's Adam, on a CPU with its kernel in torch."""
    if not ON_GPU:
        return emulated_adam(patch)
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam


def saver(patch: pytest.MonkeyPatch) -> MemorySaver:
    """Return what moves pages of memory."""
    if ON_GPU:
        return memory_saver()
    fake = FakeMemorySaver()
    fake.watch(patch)
    return fake


# -- memory and speed


def used_bytes() -> int:
    """Return the memory of the device in use, by this process and those that the case has started."""
    if not ON_GPU:
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def check_is_idle() -> None:
    """Check that no other process uses the device."""
    if ON_GPU:
        check_idle(used_bytes(), torch.cuda.memory_reserved())


def total_gib() -> float:
    """Return the size of the device's memory."""
    return torch.cuda.mem_get_info()[1] / 2**30 if ON_GPU else 0.0


def free_unused() -> None:
    """Give back what no tensor uses."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def peak_bytes() -> Iterator[Callable[[], int]]:
    """Count tensors of the block; yield what returns the most bytes of them at a time so far."""
    free_unused()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.max_memory_allocated() - before
    else:
        with PeakBytes() as counter:
            yield lambda: counter.peak


def share_of_peak(flops_per_s: float) -> float:
    """Return which part of this GPU's products a speed is, %; NaN for one whose speed is not known here."""
    name = torch.cuda.get_device_name() if ON_GPU else ""
    peaks = [peak for part, peak in _PEAK_FLOPS.items() if part in name]
    return 100 * flops_per_s / peaks[0] if peaks else float("nan")


# -- several ranks


def allow_two_ranks(patch: pytest.MonkeyPatch) -> None:
    """Let processes that are started from here on be two ranks on the one device."""
    if ON_GPU and (version := torch.cuda.nccl.version()) < (2, 30):
        pytest.skip(f"two ranks on one GPU need NCCL 2.30, torch has {'.'.join(map(str, version))}")
    for name, value in _TWO_RANKS.items():
        patch.setenv(name, value)
