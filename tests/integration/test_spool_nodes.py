"""Frames on the nodes of their workers: a node of three is lost, then the driver restarts; without models."""

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl import placement
from async_rl.runtime.supervision import Nursery
from async_rl.trainer_protocol import StepResult
from async_rl.types import TakenBatch
from tests.simulation.test_loop import assert_conserved, make_config
from tests.support.mortal_rank import PLAN, MortalRank
from tests.support.quick_server import QuickServer
from tests.support.ray_nodes import RayNodes
from tests.support.ray_runs import Lines, Steps, assert_ledger_holds, make_run_folder

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(600)]


class HeldRank(MortalRank):
    """Records where it reads its trajectories; no step ends while there is a file."""

    def __init__(self, config: dict[str, Any], rank: int, world_size: int, init_address: str) -> None:
        super().__init__(config, rank, world_size, init_address)
        self._folder = Path(config["run"]["dir"])

    def read_batch(self, batch: TakenBatch) -> dict[str, str]:
        with (self._folder / f"paths-{self._rank}").open("a") as file:
            for index in self.needed_trajectories(batch):
                file.write(f"{batch.trainer_version + 1} {batch.trajectories[index].path}\n")
        return super().read_batch(batch)

    def train_step(self, batch: TakenBatch, step: int) -> StepResult:
        result = super().train_step(batch, step)
        while (self._folder / "hold").exists():
            time.sleep(0.05)
        return result


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[RayNodes]:
    plan = tmp_path / "deaths.json"
    plan.write_text("[]")
    with RayNodes(**{PLAN: str(plan)}) as nodes:
        nodes.start(engines=1)  # the driver's
        nodes.start(workers=2, trainer=2)
        nodes.start(workers=1)
        yield nodes


async def test_what_a_lost_node_had_is_sampled_again_and_the_rest_is_trained_after_a_restart(
    nodes: RayNodes, calculator: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="async_rl")
    disks = tmp_path / "disks"
    config = make_config(
        calculator,
        tmp_path,
        "engine={kind: sglang, num_engines: 1, device: cpu}",
        f"placement.ray_address={nodes.address}",
        "placement.wait_s=200",
        "placement.resources_per_engine={engines: 1}",
        "placement.resources_per_rank={trainer: 1}",
        "placement.resources_per_rollout_worker={workers: 1}",
        "routing.replay=off",
        f"trainer.worker={__name__}:HeldRank",
        "trainer.num_ranks=2",
        "trainer.device=cpu",
        "rollout.num_workers=2",
        "run.max_steps=100000",
        "trainer.max_restarts=10",
        f"queue.spool_dir={disks}",
    )
    run_dir = make_run_folder(config)
    _, kept, lost = nodes.nodes
    stop, steps, lines = asyncio.Event(), Steps(), Lines()

    def stored_on(node: str) -> int:
        return sum(path.is_file() for path in disks.glob(f"*/{node}/*/*"))

    def paths() -> str:
        return "".join(path.read_text() for path in tmp_path.glob("paths-*"))

    async def lose_a_node() -> None:
        while "/proc/" not in paths():  # noqa: ASYNC110 - other processes write it
            await asyncio.sleep(0.05)
        (tmp_path / "hold").touch()
        before = -1
        while before != (before := stored_on(lost)) or not before:  # noqa: ASYNC110
            await asyncio.sleep(1.0)
        await asyncio.to_thread(nodes.take_away, lost)
        await lines.seen(f"node {lost} has not answered for")
        await lines.seen("trajectories with their node")
        (tmp_path / "hold").unlink()
        await steps.more(4)
        stop.set()

    log = logging.getLogger("async_rl")
    log.addHandler(lines)
    try:
        async with Nursery() as nursery:
            run = nursery.start_task("run", placement.run(config, run_dir, stop, steps, QuickServer))
            nursery.start_task("fault", lose_a_node())
        assert_conserved(run.result())
        assert f"/{kept}/" in paths()  # mapped where they are
        assert "/proc/" in paths()  # sent from the other node
        for path in tmp_path.glob("paths-*"):
            path.unlink()
        before = {path.name for path in disks.glob(f"*/{kept}/*/*")}
        assert before
        again, steps = asyncio.Event(), Steps()

        async def end_soon() -> None:
            await steps.more(3)
            nodes.kill("FrameReaderActor")  # others are started
            await steps.more(3)
            again.set()

        async with Nursery() as nursery:
            run = nursery.start_task("run", placement.run(config, run_dir, again, steps, QuickServer))
            nursery.start_task("end", end_soon())
        assert_conserved(run.result())
    finally:
        log.removeHandler(lines)
    assert any(name in paths() for name in before)  # not sampled again
    assert_ledger_holds(run_dir)
