"""Fixtures of the GPU cases: skipping without a GPU, a clean device, and recorded figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu import device
from tests.gpu.session import MORE_GPUS, case_of

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Limit the time of the cases, and skip those that need more GPUs than this machine has."""
    there = torch.cuda.device_count() if device.ON_GPU else 0
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        case = case_of(item)
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(case.longest_s))
        # Warnings of GPU kernels and drivers are not caused by this project.
        item.add_marker(pytest.mark.filterwarnings("default"))
        needed = 2 if "two-gpus" in case.needs else 1
        if needed > there and not config.getoption("--rehearse", False):
            item.add_marker(pytest.mark.skip(reason=f"{MORE_GPUS}: {needed}, torch sees {there}"))


@pytest.fixture(autouse=True)
def _own_memory() -> Iterator[None]:
    """Free the device after each case."""
    yield
    device.free_unused()


Measure = Callable[[str, float, str], None]


@pytest.fixture
def measure(record_property: Callable[[str, object], None]) -> Measure:
    """Records a measurement: its name, the figure and the unit."""
    return lambda what, figure, unit: record_property(what, device.figure_of(figure, unit))


@pytest.fixture
def used_gib() -> Callable[[], float]:
    """Return the memory of the device in use, GiB: of this process and those that the case starts."""
    device.check_is_idle()
    return lambda: device.used_bytes() / 2**30
