"""A run on a Ray cluster of several nodes, one of which is removed during the run; without models."""

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl import placement
from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.runtime.supervision import Nursery, first_error
from async_rl.types import TakenBatch
from tests.simulation.test_loop import assert_conserved, make_config
from tests.support.mortal_rank import PLAN, MortalRank
from tests.support.quick_server import QuickServer
from tests.support.ray_nodes import RayNodes
from tests.support.ray_runs import Lines, Steps, assert_ledger_holds, make_run_folder

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    plan = tmp_path_factory.mktemp("plan") / "deaths.json"
    plan.write_text("[]")
    with RayNodes(**{PLAN: str(plan)}) as nodes:
        nodes.start()  # the driver's
        for _ in range(2):  # capacity for one engine on each, and for all ranks
            nodes.start(engines=1, trainer=2)
        yield nodes


class DistantRank(MortalRank):
    """Records where it reads its trajectories."""

    def __init__(self, config: dict[str, Any], rank: int, world_size: int, init_address: str) -> None:
        super().__init__(config, rank, world_size, init_address)
        self._paths = Path(config["run"]["dir"]) / f"paths-{rank}"

    def read_batch(self, batch: TakenBatch) -> dict[str, str]:
        paths = {batch.trajectories[index].path for index in self.needed_trajectories(batch)}
        with self._paths.open("a") as file:
            file.writelines(f"{batch.trainer_version + 1} {path}\n" for path in sorted(paths))
        return super().read_batch(batch)


@pytest.fixture
def cluster_config(nodes: RayNodes, calculator: Path, tmp_path: Path):
    def config(*overrides: str) -> tuple[Config, Path]:
        made = make_config(
            calculator,
            tmp_path,
            "engine={kind: sglang, num_engines: 2, device: cpu, max_restarts: 100}",
            f"placement.ray_address={nodes.address}",
            "placement.wait_s=200",
            "placement.resources_per_engine={engines: 1}",
            "placement.resources_per_rank={trainer: 1}",
            "routing.replay=off",
            f"trainer.worker={__name__}:DistantRank",
            "trainer.num_ranks=2",
            "trainer.device=cpu",
            "trainer.max_restarts=100",
            *overrides,
        )
        return made, make_run_folder(made)

    return config


async def test_the_run_does_not_start_when_memory_is_to_be_shared_and_engines_are_on_several_nodes(
    cluster_config,
):
    config, run_dir = cluster_config("weights.transport=tensor")
    with pytest.raises(ExceptionGroup) as caught:
        await placement.run(config, run_dir, asyncio.Event(), None, QuickServer)
    error = first_error(caught.value)
    assert isinstance(error, ConfigError)
    assert re.search(r"is tensor, .* but engine-[01] is on 127\.0\.0\.\d+ \(node ", str(error))


async def test_a_run_goes_on_when_a_node_with_ranks_and_an_engine_is_taken_away_and_another_joins_later(
    nodes, cluster_config, tmp_path, caplog
):
    """The ranks move to the remaining node; the engine waits for a new node."""
    caplog.set_level(logging.INFO, logger="async_rl")  # events are lines of that level
    # The frames of all trajectories are on the driver's node, where no rank may be.
    config, run_dir = cluster_config(
        "run.max_steps=100000", "rollout.num_workers=0", f"queue.spool_dir={tmp_path / 'disks'}"
    )
    stop, steps = asyncio.Event(), Steps()
    lines = Lines()

    def frames_of_last_step() -> str:
        return (tmp_path / "paths-0").read_text().split()[-1]

    async def take_a_node_away() -> None:
        await steps.more(2)
        before = frames_of_last_step()
        nodes.kill("FrameReaderActor")  # where frames are, and where ranks read them
        await steps.more(3)
        assert frames_of_last_step() != before
        assert not any("continuing from step" in line for line in lines.lines), lines.lines
        reader = int(Path(frames_of_last_step()).parts[2])  # /proc/<pid>/fd/<number>
        nodes.take_away(nodes.node_of(reader))
        await lines.seen("continuing from step")
        await lines.seen("Ray has no capacity for 2 x engine")
        await steps.more(2)
        nodes.kill("quick_server")  # of the engine on the node that is left, which has its place there
        await lines.seen("engine engine-0 serves again", "engine engine-1 serves again")
        await asyncio.to_thread(nodes.start, engines=1)
        for engine in ("engine-0", "engine-1"):
            await lines.seen(f"engine {engine} serves again")
        await steps.more(2)
        stop.set()

    log = logging.getLogger("async_rl")
    log.addHandler(lines)
    try:
        async with Nursery() as nursery:
            run = nursery.start_task("run", placement.run(config, run_dir, stop, steps, QuickServer))
            nursery.start_task("fault", take_a_node_away())
    finally:
        log.removeHandler(lines)
    summary = run.result()
    assert_conserved(summary)
    assert_ledger_holds(run_dir)
    paths = [dict(map(str.split, (tmp_path / f"paths-{rank}").read_text().splitlines())) for rank in (0, 1)]
    assert paths[0] == paths[1]  # one copy a node; by step, of which the last try counts
    assert all(path.startswith("/proc/") for path in paths[0].values())
