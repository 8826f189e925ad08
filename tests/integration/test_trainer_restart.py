"""Trainer ranks that are killed or stopped under Ray; with simulated engines and without models."""

import asyncio
import json
from contextlib import suppress

import psutil
import pytest

from async_rl import placement
from tests.simulation.test_loop import assert_conserved, make_config
from tests.support.mortal_rank import PLAN
from tests.support.ray_runs import assert_ledger_holds, make_run_folder

pytestmark = [pytest.mark.real, pytest.mark.ray, pytest.mark.timeout(900)]


async def test_ranks_come_back_when_one_is_killed_and_one_hangs(calculator, tmp_path, monkeypatch, caplog):
    plan = tmp_path / "deaths.json"
    plan.write_text(json.dumps([(1, 3, "SIGKILL"), (0, 5, "SIGSTOP")]))
    monkeypatch.setenv(PLAN, str(plan))
    worker = "tests.support.mortal_rank:MortalRank"
    config = make_config(
        calculator,
        tmp_path,
        f"trainer.worker={worker}",
        "trainer.num_ranks=2",
        "trainer.step_timeout_s=20",  # a busy machine does not take that long to tell of a rank's death
        "trainer.max_restarts=100",
    )
    run_dir = make_run_folder(config)
    summary = await placement.run(config, run_dir, asyncio.Event())
    assert sorted(path.name for path in tmp_path.glob("*-SIG*")) == ["0-5-SIGSTOP", "1-3-SIGKILL"]
    assert "trainer rank 1 died during train_step; see the end of" in caplog.text
    assert str(run_dir / "logs" / "trainer-1.log") in caplog.text
    assert "the trainer took more than 20.0 s for train_step" in caplog.text
    assert summary.weight_versions == 6
    assert summary.trajectories.trained == 6 * 16
    assert_conserved(summary)
    left = []
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error):  # one of another test ends
            if "RankActor" in process.info["name"] and process.environ().get(PLAN) == str(plan):
                left.append(process)
    assert left == []  # the stopped one is gone too
    assert_ledger_holds(run_dir)
