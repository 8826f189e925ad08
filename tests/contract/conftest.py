"""What tests share because it is dear: one real SGLang server for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def sglang_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    from tests.support.sglang_world import SGLangWorld

    world = SGLangWorld(tmp_path_factory.mktemp("sglang"))
    world.start()
    try:
        yield world
    finally:
        world.stop()
