"""The live page of a run of the whole loop, on simulated engines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from tests.simulation.test_loop import make_config, run
from tests.support.local_cluster import LocalCluster

pytestmark = pytest.mark.real_time


async def test_the_page_shows_a_run_while_it_goes_on(calculator: Path, tmp_path: Path) -> None:
    config = make_config(
        calculator, tmp_path, "run.max_steps=3", "engine.decode_step_s=0.01", "engine.mean_new_tokens=24"
    )
    cluster = LocalCluster(config, step_s=0.02)
    seen: list[dict] = []
    original = cluster.trainer.train_step

    async def train_and_look(path: str, step: int):
        result = await original(path, step)
        url = (tmp_path / "sim" / "url").read_text()
        async with aiohttp.ClientSession() as client, client.get(f"{url}/api/snapshot") as answer:
            seen.append(json.loads(await answer.text()))
        return result

    cluster.trainer.train_step = train_and_look  # type: ignore[method-assign]
    async with asyncio.timeout(100):
        await run(config, cluster)
    assert [page["now"]["step"] for page in seen] == [0, 1, 2]
    assert [len(page["steps"]["recent"]) for page in seen] == [0, 1, 2]
    last = seen[-1]["now"]
    assert last["phase"] == "training"
    assert {engine["engine_id"] for engine in last["engines"]} == {"engine-0", "engine-1"}
    assert sum(engine["calls"] for engine in last["engines"]) > 0
    assert last["slowest"][0]["task_id"].startswith("calculator-")
    ages = [each["age_s"] for each in last["slowest"]]
    assert ages == sorted(ages, reverse=True)
