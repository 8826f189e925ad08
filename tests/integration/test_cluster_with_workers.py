"""The real loop on a Ray cluster of three nodes: engines, rollout workers and trainer ranks on one each."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from agent_loops.tool_loop import ToolLoop
from async_rl import placement
from async_rl.config import Config
from async_rl.observability.evaluation_record import FILE, evaluation_record_log
from async_rl.observability.records import step_record_log
from async_rl.rollout.session.api import Session
from async_rl.rollout.workers.worker_backend import WorkerSpec
from async_rl.runtime.supervision import Nursery
from async_rl.store.journal import Journal
from async_rl.types import Completion, Context, StopReason, TakenBatch, Task
from tests.support.quick_server import QuickServer
from tests.support.ray_nodes import RayNodes
from tests.support.ray_runs import GROUP_SIZE, assert_ledger_holds, make_run_folder, real_config
from tests.support.recording_worker import FOLDER, RecordingWorker

pytestmark = [
    pytest.mark.long,
    pytest.mark.sglang,
    pytest.mark.megatron,
    pytest.mark.ray,
    pytest.mark.timeout(1800),
]

PLACES = "ASYNC_RL_TEST_PLACES"
"""Environment variable with a folder: processes note there where they run."""

STEPS = 3


def note_place(what: str) -> None:
    """Note the address of this process's node."""
    place = ray.util.get_node_ip_address()
    (Path(os.environ[PLACES]) / f"{what} {place} {os.getpid()}").touch()


def places(folder: Path, what: str) -> set[str]:
    """Return the nodes of the processes that noted something."""
    return {path.name.split()[1] for path in folder.iterdir() if path.name.split()[0] == what}


class PlacedLoop(ToolLoop):
    """Notes where sessions run."""

    async def run(self, task: Task, session: Session) -> StopReason | None:
        note_place("evaluated" if task.task_id.startswith("held-out") else "sampled")
        return await super().run(task, session)


def placed_reward(task: Task, completion: Completion) -> float:
    note_place("rewarded")
    return sum(c.isdigit() for c in completion.text) / max(1, len(completion.text))


class PlacedRank(RecordingWorker):
    """Notes where ranks run."""

    def train_step(self, batch: TakenBatch, step: int) -> Any:
        note_place("trained")
        return super().train_step(batch, step)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    folder = tmp_path_factory.mktemp("places")
    with RayNodes(**{PLACES: str(folder), FOLDER: str(folder / "seen")}) as nodes:
        nodes.start(engines=2)  # the driver's
        nodes.start(workers=4)
        nodes.start(trainer=2)
        yield nodes


def make_config(nodes: RayNodes, calculator: Path, tmp_path: Path, *overrides: str) -> tuple[Config, Path]:
    held_out = tmp_path / "held_out.jsonl"
    rows = (calculator / "data" / "tasks.jsonl").read_text().splitlines()[:2]
    held_out.write_text("".join(row.replace('"id": "', '"id": "held-out-') + "\n" for row in rows))
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": "apart", "max_steps": STEPS},
        "data": {"validation": [{"path": str(held_out)}]},
        "engine": {"num_engines": 2},
        "rollout": {"agent_loop": f"{__name__}:PlacedLoop", "reward": f"{__name__}:placed_reward"},
        "trainer": {"worker": f"{__name__}:PlacedRank", "num_ranks": 2, "layout": {"ep": 2}},
        "evaluation": {"at_start": True, "samples": 2},
        "placement": {
            "ray_address": nodes.address,
            "wait_s": 200,
            "resources_per_engine": {"engines": 1},
            "resources_per_rank": {"trainer": 1},
            "resources_per_rollout_worker": {"workers": 1},
        },
    }
    config = real_config(calculator, tmp_path, *overrides, sections=sections)
    return config, make_run_folder(config)


async def test_workers_are_spread_over_the_nodes_and_start_where_their_journals_are(
    nodes: RayNodes, calculator: Path, tmp_path: Path
) -> None:
    config, run_dir = make_config(
        nodes, calculator, tmp_path, "rollout.num_workers=3", "placement.resources_per_rollout_worker={}"
    )
    async with placement.ray_cluster(config, run_dir, QuickServer) as cluster, AsyncExitStack() as stack:

        async def start_worker(name: str, node: str | None = None) -> str:
            folder = run_dir / "spool" / name
            spec = WorkerSpec(name=name, config=config, folder=folder, frames=None, inspected=None, node=node)
            link = await stack.enter_async_context(cluster.rollout_worker(spec))
            return link.peer_node

        found = {await start_worker(f"worker-{index}") for index in range(3)}
        assert found == set(nodes.nodes)
        for node in found:
            assert await start_worker(f"worker at {node}", node) == node
        assert set(cluster.other_nodes()) == set(nodes.nodes) - {cluster.node}
        base, name = tmp_path / "journals", "a" * 32
        for node in cluster.other_nodes():
            journal = Journal(base / "000001-worker-0-1")
            journal.open_entry(name).segments.append(Context(token_ids=np.arange(5, dtype=np.int32)))
            journal.write_entries()
            journal.close()
            reader = cluster.open_frame_reader(node)
            ((folder, (trees, damaged)),) = reader.begin_read_journals(str(base), [name], {})().items()
            assert (folder, trees[name][name].progress.num_tokens, damaged) == ("000001-worker-0-1", 5, 0)
            there, gone = str(base / folder), str(base / "gone")
            assert reader.begin_find_missing([there, gone])() == [gone]
            reader.begin_delete_journals([there])()
            assert not list(base.iterdir())


async def test_a_run_loses_nothing_when_engines_workers_and_ranks_are_on_separate_nodes(
    nodes: RayNodes, calculator: Path, tmp_path: Path
) -> None:
    """`rollout.num_workers` is `auto`: on a cluster there is a worker."""
    config, run_dir = make_config(nodes, calculator, tmp_path)
    assert config.num_workers == 1
    noted, seen = Path(nodes.environment[PLACES]), Path(nodes.environment[FOLDER])
    seen.mkdir(exist_ok=True)
    serving = set[str]()

    async def watch() -> None:
        while True:
            serving.update(await asyncio.to_thread(nodes.nodes_with, "cpu_launcher"))
            await asyncio.sleep(1.0)

    async with Nursery() as nursery:
        nursery.start_task("watch", watch())
        summary = await placement.run(config, run_dir, asyncio.Event())
        nursery.cancel_tasks()
    ours, workers, ranks = nodes.nodes
    assert serving == {ours}
    assert places(noted, "sampled") == places(noted, "evaluated") == places(noted, "rewarded") == {workers}
    assert places(noted, "trained") == {ranks}
    assert summary.weight_versions == STEPS
    assert summary.trajectories.unaccounted == 0
    assert summary.trajectories.dropped == {}
    assert summary.trajectories.trained == STEPS * 2 * GROUP_SIZE
    assert [r.step for r in step_record_log(run_dir / "metrics.jsonl").read()] == list(range(1, STEPS + 1))
    (record,) = evaluation_record_log(run_dir / FILE).read()
    assert (record.status, record.asked, record.dropped) == ("done", 4, {})
    assert_ledger_holds(run_dir)
