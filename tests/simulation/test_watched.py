"""The live page of a run of the whole loop, on simulated engines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from async_rl.observability.metrics import Metrics
from async_rl.observability.records import step_record_log
from async_rl.run.orchestrator import Orchestrator, RunInputs
from tests.simulation.test_loop import make_config, run
from tests.support.finished_run import records
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
    assert seen[-1]["run"] == "sim"
    assert last["phase"] == "training"
    assert last["elapsed_s"] > 0
    assert {engine["engine_id"] for engine in last["engines"]} == {"engine-0", "engine-1"}
    assert sum(engine["calls"] for engine in last["engines"]) > 0
    assert last["stages"]
    assert last["slowest"]
    oldest, *others = last["slowest"]
    assert oldest["task_id"].startswith("calculator-")
    assert oldest["tokens"] > 0
    assert all(oldest["age_s"] >= other["age_s"] for other in others)
    waits = {trajectory["waits_for"].split(" of ")[0] for trajectory in last["slowest"]}
    assert waits & {"a chunk", "the first chunk", "agent loop", "an engine that serves"}


async def test_the_page_shows_earlier_incarnations_before_the_trainer_is_up(
    calculator: Path, tmp_path: Path
) -> None:
    config = make_config(calculator, tmp_path)
    folder = tmp_path / "sim"
    folder.mkdir()
    for record in records(4):
        step_record_log(folder / "metrics.jsonl").append(record)
    clock, inputs = asyncio.get_running_loop().time, RunInputs.load(config, lambda: "")
    orchestrator = Orchestrator(
        config, folder, asyncio.Event(), LocalCluster(config), Metrics(), clock, inputs
    )
    now = orchestrator.live_status.now()
    assert [record.step for record in orchestrator.run_log.records] == [1, 2, 3, 4]
    assert (now.step, now.phase, now.engines, now.slowest) == (4, "starting", [], [])
