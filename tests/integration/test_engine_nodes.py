"""The real loop with one engine on two nodes of a Ray cluster, and placements of ranks on such nodes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from async_rl import placement
from async_rl.config import Config
from async_rl.observability.records import step_record_log
from async_rl.placement.placements import Placements
from async_rl.placement.ray_trainer import RayTrainer
from async_rl.runtime.supervision import Nursery
from tests.support.ray_nodes import RayNodes
from tests.support.ray_runs import GROUP_SIZE, assert_ledger_holds, make_run_folder, real_config

pytestmark = [
    pytest.mark.long,
    pytest.mark.sglang,
    pytest.mark.megatron,
    pytest.mark.ray,
    pytest.mark.timeout(900),
]

STEPS = 4


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes() as nodes:
        nodes.start(engines=1)  # the driver's
        nodes.start(engines=1, trainer=3)
        nodes.start(trainer=3)
        yield nodes


def make_config(nodes: RayNodes, calculator: Path, folder: Path) -> tuple[Config, Path]:
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": "wide", "max_steps": STEPS},
        "engine": {
            "tp_size": 2,
            "num_nodes": 2,
            "max_running_requests": 8,
            "max_outage_s": 3600,  # the only engine, whose parts may take long to start again
        },
        "weights": {"transport": "distributed"},
        "rollout": {"reward": "agent_loops.rewards:last_number", "num_workers": 0},
        "placement": {
            "ray_address": nodes.address,
            "wait_s": 200,
            "resources_per_engine": {"engines": 1},
            "resources_per_rank": {"trainer": 1},
        },
    }
    config = real_config(calculator, folder, sections=sections)
    return config, make_run_folder(config)


async def test_a_run_loses_nothing_when_its_engine_spans_nodes_and_one_part_is_killed(
    nodes: RayNodes, calculator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run_dir = make_config(nodes, calculator, tmp_path)
    log = step_record_log(run_dir / "metrics.jsonl")
    serving: dict[str, set[str]] = {}
    begins, killed = asyncio.Event(), asyncio.Event()
    train_step = RayTrainer.train_step

    async def train_after_the_kill(trainer: RayTrainer, batch: Any, step: int) -> Any:
        if step > 1:
            begins.set()
            await killed.wait()
        return await train_step(trainer, batch, step)

    monkeypatch.setattr(RayTrainer, "train_step", train_after_the_kill)

    async def kill_second_part() -> None:
        await begins.wait()
        for rank in (0, 1):
            part = f"--node-rank={rank}"
            serving[part] = await asyncio.to_thread(nodes.nodes_with, part)
        nodes.kill("--node-rank=1")
        killed.set()

    async with Nursery() as nursery:
        nursery.start_task("kill the second part", kill_second_part())
        summary = await placement.run(config, run_dir, asyncio.Event())
    assert len(serving["--node-rank=0"]) == len(serving["--node-rank=1"]) == 1
    assert serving["--node-rank=0"] | serving["--node-rank=1"] == set(list(nodes.nodes)[:2])
    assert summary.weight_versions == STEPS
    assert summary.trajectories.unaccounted == 0
    assert summary.trajectories.trained == STEPS * 2 * GROUP_SIZE
    records = list(log.read())
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    # Both parts have every version: at equal versions they agree with the trainer, by their routes.
    assert [r.step for r in records if r.rollout_kl_lag0 is not None and abs(r.rollout_kl_lag0) > 1e-5] == []
    assert records[0].rollout_kl_lag0 is not None
    assert not any(nodes.nodes_with("--node-rank"))
    assert_ledger_holds(run_dir)


@pytest.mark.parametrize(("together", "sizes"), [(2, [2, 2]), (3, [3, 3]), (1, [3, 1])])
async def test_groups_of_ranks_stay_on_one_node_where_they_fit(
    nodes: RayNodes, calculator: Path, tmp_path: Path, together: int, sizes: list[int]
) -> None:
    """Two nodes with three places each: two pairs need both, which packing one by one would not use."""
    count = max(4, 2 * together)
    config, run_dir = make_config(nodes, calculator, tmp_path)
    async with placement.ray_cluster(config, run_dir):
        placements = Placements(
            "rank", {"trainer": 1}, count, "PACK", neighbours=True, together=together, remedy="none"
        )
        await placements.wait_ready(60)

        @ray.remote
        def place() -> str:
            return str(ray.util.get_node_ip_address())

        asked = [place.options(**placements.actor_options(number)).remote() for number in range(count)]
        found = [await each for each in asked]
        groups = [set(found[start : start + together]) for start in range(0, count, together)]
        assert all(len(group) == 1 for group in groups)
        assert sorted((found.count(node) for node in set(found)), reverse=True) == sizes
