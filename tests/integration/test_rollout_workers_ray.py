"""Rollout workers as Ray actors, one of which dies during a turn; without models."""

import asyncio
import os
import sqlite3
from pathlib import Path

import psutil
import pytest

from async_rl import placement
from async_rl.observability.records import Summary
from tests.simulation.test_loop import assert_conserved, make_config
from tests.support.fateful_loop import FATE, RELEASED
from tests.support.mortal_rank import PLAN
from tests.support.quick_server import CALLS, QuickServer, served_versions
from tests.support.ray_runs import assert_ledger_holds, make_run_folder

pytestmark = [pytest.mark.real, pytest.mark.ray, pytest.mark.timeout(900)]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def run_with_workers(
    calculator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str
) -> tuple[Summary, Path]:
    """Run with two rollout workers until all steps are done; return the summary and the run folder."""
    plan = tmp_path / "deaths.json"
    plan.write_text("[]")
    for name, value in ((PLAN, plan), (FATE, tmp_path / "fate"), (CALLS, tmp_path)):
        monkeypatch.setenv(name, str(value))
    (tmp_path / "fate").mkdir()
    config = make_config(
        calculator,
        tmp_path,
        "engine={kind: sglang, num_engines: 2, device: cpu}",
        "routing.replay=off",
        "rollout.num_workers=2",
        "rollout.max_attempts=1",
        "trainer.worker=tests.support.mortal_rank:MortalRank",
        *overrides,
    )
    run_dir = make_run_folder(config)
    summary = await placement.run(config, run_dir, asyncio.Event(), None, QuickServer)
    assert_conserved(summary)
    assert summary.trajectories.dropped == {}  # with one attempt each: no attempt failed
    return summary, run_dir


async def test_a_run_goes_on_when_a_rollout_worker_is_killed_in_a_turn(
    calculator, tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO", "async_rl")
    summary, run_dir = await run_with_workers(
        calculator,
        tmp_path,
        monkeypatch,
        "rollout.worker_stall_s=60",
        "rollout.agent_loop=tests.support.fateful_loop:FatefulLoop",
        "rollout.reward=tests.support.fateful_loop:rewarded",
        "run.max_steps=4",
    )
    assert summary.weight_versions == 4
    assert summary.trajectories.trained == 4 * 16
    fate = tmp_path / "fate"
    died = (fate / "died").read_text()
    assert f"trajectory {died} continues in another worker" in caplog.text
    assert "it is restarted, and its attempts go on in other workers" in caplog.text
    processes = {int(path.name.partition("-")[2]) for path in fate.glob("process-*")}
    assert len(processes) >= 2
    assert os.getpid() not in processes  # neither loops nor rewards run in the driver
    assert not is_running(int((fate / "daemon").read_text())), "the worker that died has left it"
    assert_ledger_holds(run_dir)
    with sqlite3.connect(run_dir / "ledger.sqlite") as database:
        assert database.execute(
            "SELECT state FROM trajectories WHERE trajectory_id = ?", (died,)
        ).fetchall() in ([("trained",)], [])  # folded into a count once a checkpoint has it
    database.close()


async def release_once_all_serve_again(tmp_path: Path) -> None:
    """End the block of a worker once each server serves a version from after it began.

    If updates waited for as long as the worker blocks, this would never come.
    """
    while not (tmp_path / "fate/blocked").exists():  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.05)
    blocked_at = served_versions(tmp_path)
    while min(served_versions(tmp_path)) <= max(blocked_at) + 1:  # noqa: ASYNC110 - likewise
        await asyncio.sleep(0.05)
    (tmp_path / "fate" / RELEASED).touch()


@pytest.mark.long
@pytest.mark.parametrize("fate", ["lives", "is replaced"])
async def test_code_that_blocks_a_worker_holds_up_engines_no_longer_than_its_grants(
    calculator, tmp_path, monkeypatch, caplog, fate
):
    caplog.set_level("INFO", "async_rl")
    async with asyncio.timeout(600), asyncio.TaskGroup() as tasks:
        if fate == "lives":
            tasks.create_task(release_once_all_serve_again(tmp_path))
        await run_with_workers(
            calculator,
            tmp_path,
            monkeypatch,
            f"rollout.worker_stall_s={600 if fate == 'lives' else 6}",
            "rollout.max_staleness=60",
            "rollout.agent_loop=tests.support.fateful_loop:BlockingLoop",
            "run.max_steps=60",
        )
    assert (tmp_path / "fate/blocked").exists()
    was_replaced = "it is restarted, and its attempts go on in other workers" in caplog.text
    assert was_replaced is (fate == "is replaced")
    assert "quarantined" not in caplog.text
