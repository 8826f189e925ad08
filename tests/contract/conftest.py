"""What tests share because it is dear: one real SGLang server for the whole session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def sglang_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.support.sglang_world import SGLangWorld

    with SGLangWorld(tmp_path_factory.mktemp("sglang")) as world:
        yield world


@pytest.fixture
async def engine(sglang_world: Any) -> AsyncIterator[Any]:
    """A client of that server, which has weight version 0."""
    made = sglang_world.engine()
    await made.wait_ready()
    await sglang_world.load(made, 0)
    yield made
    await made.interrupt("abort")
    await made.close()
