"""Fixtures of the GPU cases: skipping without a GPU, a clean device, and recorded figures."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.proof import check_idle

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases, and skip those that need more GPUs than this machine has."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.gpu)
        # Warnings of GPU kernels and drivers are not caused by this project.
        item.add_marker(pytest.mark.filterwarnings("default"))
        mark = item.get_closest_marker("gpus")
        needed = mark.args[0] if mark is not None else 1
        if needed > there:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, torch sees {there}"))


@pytest.fixture(autouse=True)
def _own_memory() -> Iterator[None]:
    """Free the device after each case."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


Measure = Callable[[str, float, str], None]


@pytest.fixture
def measure(record_property: Callable[[str, object], None]) -> Measure:
    """Records a measurement: its name, the figure and the unit."""

    def say(what: str, figure: float, unit: str) -> None:
        record_property(what, f"{figure:.4g} {unit}")

    return say


@pytest.fixture
def used_gib() -> Callable[[], float]:
    """Return the memory of the device in use, GiB: of this process and those that the case starts."""

    def used() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    check_idle(used(), torch.cuda.memory_reserved())
    return lambda: used() / 2**30
