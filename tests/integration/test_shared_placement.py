"""Ranks that share the GPUs of engines (`placement.shared`), on a Ray that only counts GPUs; no models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl import placement
from async_rl.errors import EnvironmentNotReady
from async_rl.placement.placements import alive_nodes
from tests.simulation.test_loop import make_config
from tests.support.quick_server import QuickServer
from tests.support.ray_nodes import RayNodes
from tests.support.ray_runs import make_run_folder

pytestmark = [pytest.mark.real, pytest.mark.ray, pytest.mark.timeout(300)]

CPUS, GPUS = 6, 2


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes(CUDA_VISIBLE_DEVICES=",".join(map(str, range(GPUS)))) as nodes:
        for _ in range(2):
            nodes.start(cpus=CPUS, gpus=GPUS)
        yield nodes


async def free_cpus_of_a_run(nodes: RayNodes, calculator: Path, folder: Path, *overrides: str) -> list[float]:
    """Start an engine on all GPUs of each node and a rank on each, and return the CPUs that are left."""
    count = len(nodes.nodes)
    config = make_config(
        calculator,
        folder,
        f"engine={{kind: sglang, num_engines: {count}, tp_size: {GPUS}, device: cuda}}",
        "trainer={device: cuda, worker: tests.support.mortal_rank:MortalRank, start_timeout_s: 30}",
        f"trainer.num_ranks={count * GPUS}",
        f"placement={{ray_address: '{nodes.address}', shared: true, wait_s: 10}}",
        "weights.interrupt=abort",
        "routing.replay=off",
        *overrides,
    )
    async with placement.ray_cluster(config, make_run_folder(config), QuickServer) as cluster:
        engines = await cluster.start_engines()
        await cluster.start_trainer()
        beside = [rank for engine in engines for rank in cluster.ranks_beside(engine.engine_id)]
        assert sorted(beside) == list(range(count * GPUS))
        return [node.free.get("CPU", 0) for node in alive_nodes()]


async def test_cpus_of_ranks_are_reserved_once_where_the_engines_are(
    nodes: RayNodes, calculator: Path, tmp_path: Path
) -> None:
    """Twice would be 8 of 6 CPUs."""
    free = await free_cpus_of_a_run(nodes, calculator, tmp_path, "placement.resources_per_rank={CPU: 2}")
    assert free == [pytest.approx(CPUS - 2 * GPUS, abs=0.1)] * len(nodes.nodes)


async def test_nothing_starts_where_an_engines_ranks_do_not_fit_beside_it(
    nodes: RayNodes, calculator: Path, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentNotReady, match=r"x engine \(8.001 CPU, 2 GPU each on one node"):
        await free_cpus_of_a_run(nodes, calculator, tmp_path, "placement.resources_per_rank={CPU: 4}")
