"""Ctrl-C and SIGTERM in each phase of a run under a real Ray; without models."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from async_rl.config.reference import resolved_yaml
from async_rl.placement.local_ray import scratch_folder
from tests.simulation.test_loop import make_config
from tests.support import gated_run
from tests.support.mortal_rank import PLAN
from tests.support.ray_runs import assert_ledger_holds

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(600)]

SERVERS = "engine={kind: sglang, num_engines: 1, device: cpu}"


class GatedRun:
    """A run in a process of its own, which waits at its gate."""

    def __init__(self, config: Path, run_dir: Path, folder: Path, gate: str) -> None:
        self.run_dir, self._folder = run_dir, folder
        self.scratch = scratch_folder(run_dir)
        self.errors = folder / "stderr"
        (folder / "gate").write_text(gate)
        (folder / "deaths.json").write_text("[]")
        for name in ("at", "go"):
            os.mkfifo(folder / name)
        environment = {gated_run.GATES: str(folder), PLAN: str(folder / "deaths.json")}
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.gated_run", str(config)],
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def wait_at_gate(self) -> None:
        """Wait until the run has reached its gate."""
        at = os.open(self._folder / "at", os.O_RDWR)  # also for writing, so that opening does not wait
        ended = os.pidfd_open(self.process.pid)
        try:
            ready, _, _ = select.select([at, ended], [], [])
            assert at in ready, f"the run ended before its gate: {self.errors.read_text()}"
        finally:
            os.close(at)
            os.close(ended)

    def open_gate(self) -> None:
        """Let the run go on."""
        with (self._folder / "go").open("w"):
            pass

    def wait_for_line(self, text: str) -> None:
        """Wait until the run has printed a line with a text."""
        assert self.process.stdout is not None
        assert any(text in line for line in self.process.stdout), self.errors.read_text()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait_end(self) -> int:
        """Wait until the run has ended and closed its output; return its exit code."""
        code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def left(self) -> list[psutil.Process]:
        """Return the processes of the run that still exist."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(gated_run.GATES) == str(self._folder):
                    found.append(process)
            except psutil.Error:
                pass
        return found


@pytest.fixture
def gated(calculator: Path, tmp_path: Path) -> Iterator:
    runs: list[GatedRun] = []

    def start(gate: str, *overrides: str) -> GatedRun:
        config = make_config(
            calculator,
            tmp_path,
            "run.max_steps=1000",
            "run.drain_s=300",
            "routing.replay=off",
            "rollout.agent_loop=tests.support.gated_run:GatedLoop",
            "rollout.reward=tests.support.gated_run:length",
            "trainer.worker=tests.support.gated_run:GatedRank",
            "trainer.checkpoint_every=4",
            *overrides,
        )
        path, folder = tmp_path / "run.yaml", tmp_path / "gates"
        path.write_text(resolved_yaml(config))
        folder.mkdir()
        runs.append(GatedRun(path, tmp_path / config.run.name, folder, gate))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.wait_end()
        for process in run.left():
            process.kill()


def assert_clean(run: GatedRun) -> None:
    _, alive = psutil.wait_procs(run.left(), timeout=120)  # see STARTS_S in verification/chaos/harness.py
    assert not alive
    assert "Traceback" not in run.errors.read_text()
    assert not run.scratch.exists()


@pytest.mark.parametrize(
    ("gate", "number", "overrides"),
    [
        ("ray processes", signal.SIGTERM, []),
        ("ray connection", signal.SIGTERM, []),
        ("server", signal.SIGINT, [SERVERS]),
        ("setup", signal.SIGTERM, []),
    ],
)
def test_a_signal_ends_the_start_at_once_when_nothing_runs_yet(gated, gate, number, overrides) -> None:
    run = gated(gate, *overrides)
    run.wait_at_gate()
    run.signal(number)
    assert run.wait_end() == 128 + number  # although the gate is closed
    assert f"async-rl: {number.name} ended the start" in run.errors.read_text()
    assert_clean(run)


@pytest.mark.parametrize("gate", ["turn", "train_step 3", "publish 3", "save_checkpoint 4"])
def test_sigterm_drains_and_writes_a_checkpoint_when_the_run_is_in_any_phase(gated, gate) -> None:
    """The checkpoint has every step, and the ledger every trajectory; another SIGTERM changes nothing."""
    run = gated(gate)
    run.wait_at_gate()
    run.signal(signal.SIGTERM)
    run.wait_for_line("draining" if gate == "turn" else "SIGTERM: stopping")
    run.signal(signal.SIGTERM)
    run.open_gate()
    assert run.wait_end() == 128 + signal.SIGTERM
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["weight_versions"] >= 2
    assert json.loads((run.run_dir / "checkpoints" / "latest.json").read_text()) == summary["weight_versions"]
    assert summary["trajectories"]["trained"] == 16 * summary["weight_versions"]
    assert_ledger_holds(run.run_dir)
    assert_clean(run)
