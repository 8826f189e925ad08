"""What files of trainer tests share, and what is freed after each."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

FOREIGN_WARNINGS = ("ignore:::megatron", "ignore::DeprecationWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let Megatron-Core, and torch where it is called by it, use what is deprecated."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("megatron"):
            for warning in FOREIGN_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True, scope="module")
def freed() -> Iterator[None]:
    """Process groups lie in reference cycles with their models: three threads each, thousands in all."""
    yield
    gc.collect()


def _layers(tmp_path_factory: pytest.TempPathFactory, number: int) -> Path:
    from tests.support.tiny_model import build_tiny_qwen3_moe  # tests without the trainer need no torch

    return build_tiny_qwen3_moe(tmp_path_factory.mktemp("models") / f"{number} layers", num_layers=number)


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of one layer with experts, which no test changes."""
    return _layers(tmp_path_factory, 1)


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of two layers with experts, which no test changes."""
    return _layers(tmp_path_factory, 2)
