"""Real servers take weights, while one of them is stopped or killed in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Literal

import pytest
from safetensors.torch import load_file

from tests.support.receiving_world import Ranks, world_of
from tests.support.sglang_world import SGLangWorld, in_trainer_order

pytestmark = [pytest.mark.long, pytest.mark.sglang]

BUCKET_BYTES = 64 << 10


@pytest.mark.parametrize("transport", ["distributed", "tensor"])
@pytest.mark.parametrize("fault", ["SIGSTOP", "SIGKILL"])
async def test_a_server_takes_a_version_although_another_one_fails_in_the_middle(
    tmp_path: Path, fault: str, transport: Literal["distributed", "tensor"]
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with SGLangWorld(tmp_path / "a") as first, SGLangWorld(tmp_path / "b", index=1) as second:
        tensors = in_trainer_order(load_file(first.weights[1] / "model.safetensors"))
        num_senders = 2 if transport == "distributed" else 1
        ranks, struck = Ranks(num_senders, BUCKET_BYTES, tensors), list[int]()
        engines = [first.engine(), second.engine(engine_id="engine-1")]
        world = world_of(tmp_path, ranks, engines, transport)

        def strike(number: int) -> None:
            if number > len(tensors) // 2 and not struck:
                struck.append(number)
                os.killpg(second.server.pid, getattr(signal, fault))

        await world.sync.start_from_version(0, first.weights[0])
        await world.sync.update_engines(1)
        assert world.serving() == {"engine-0": 1, "engine-1": 1}
        (loaded,) = await engines[0].checksums()
        assert loaded == ranks.exports[0].checksums()
        for tensor in tensors.values():
            tensor.mul_(0.5)
        ranks.before_tensor = strike
        async with asyncio.timeout(120):  # a guard; virtual time has how long the others wait
            await world.sync.update_engines(2)
        assert struck
        assert world.serving() == {"engine-0": 2}
        assert await engines[0].checksums() == (ranks.exports[0].checksums(),)
        await world.sync.close()
        for engine in engines:
            await engine.close()
