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
def world(sglang_world: Any) -> Any:
    """The server that `engine` is a client of; files whose models are others have their own."""
    return sglang_world


@pytest.fixture
async def engine(world: Any) -> AsyncIterator[Any]:
    """A client of a server, which has weight version 0."""
    made = world.engine()
    await made.wait_ready()
    await world.load(made, 0)
    yield made
    await made.interrupt("abort")
    await made.close()
