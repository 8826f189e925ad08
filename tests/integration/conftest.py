"""What a file of trainer tests leaves behind is freed before the next one."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def freed() -> Iterator[None]:
    """Process groups lie in reference cycles with their models: three threads each, thousands in all."""
    yield
    gc.collect()
