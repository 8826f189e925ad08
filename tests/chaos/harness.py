"""Runs the real loop as a user would, kills or stops its processes by a plan, and restarts a killed driver.

The run is observed from outside only: its processes by the environment that they inherit, its progress by the
trainer's diary, its ledger by reading the file.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from async_rl.config import Config, parse_config
from async_rl.engines.sglang.server import free_port
from tests.chaos.audit import Finding, audit
from tests.chaos.diary import DIARY, Trained, read
from tests.chaos.evidence import LedgerWatch, Processes
from tests.chaos.exposure import Exposure
from tests.chaos.plan import Blow, last

ROOT = Path(__file__).parents[2]
STUCK_S = 400.0
"""A run without a step for this time hangs: every limit in its config is far shorter. Only a busy machine
makes a start slow."""
GONE_S = 20.0
"""All processes must be gone within this time after a kill of the driver."""


class Violation(AssertionError):
    """The run failed before the audit."""


def make_config(
    folder: Path, model: Path, data: Path, seed: int, *, num_engines: int, num_ranks: int
) -> dict:
    """Returns the config of a run with small limits, so that hangs are detected in seconds."""
    rng = random.Random(seed)
    interrupt, merge = rng.choice([("abort", "replace"), ("abort", "splice"), ("retract", "replace")])
    return {
        "run": {"name": "run", "dir": str(folder), "max_steps": 1_000_000, "drain_s": 60, "seed": seed},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(data)},
        "engine": {
            "num_engines": num_engines,
            "device": "cpu",
            "max_running_requests": 8,
            "max_total_tokens": 16384,
            "context_length": 512,
            "stall_s": 15,
            "request_timeout_s": 15,
            "max_restarts": 1000,
        },
        "rollout": {
            "agent_loop": "agent_loops.tool_loop:ToolLoop",
            "agent_loop_args": {"tools": ["agent_loops.calculator:calculator"]},
            "reward": "tests.chaos.reward:share_of_digits",
            "group_size": 4,
            "max_concurrent_trajectories": 24,
            "max_staleness": 3,
            "max_context_tokens": 256,
            "max_new_tokens": 96,
        },
        "routing": {"merge": merge},
        "metrics": {"port": free_port("127.0.0.1")},
        "weights": {
            "transport": rng.choice(["disk", "distributed"]),
            "interrupt": interrupt,
            "bucket_bytes": 262144,
            "timeout_s": 40,
        },
        "trainer": {
            "worker": "tests.chaos.worker:DiaryWorker",
            "device": "cpu",
            "num_ranks": num_ranks,
            "layout": {"ep": num_ranks},
            "groups_per_batch": 3,
            "checkpoint_every": 2,
            "step_timeout_s": 20,
            "max_restarts": 1000,
            "optimizer": {"lr": 1e-3},
        },
    }


class Chaos:
    """One run, from its first start to its last step."""

    def __init__(self, folder: Path, tree: dict[str, Any], tell: Callable[[str], None]) -> None:
        """Writes the config; starts nothing.

        Args:
            folder: Empty; the run's folder is `run` in it.
            tree: The config.
            tell: Receives each line of the timeline.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._tree = tree
        self._tell = tell
        self._begin = self._next_look = time.monotonic()
        self._config_path = folder / "chaos.yaml"
        self._output = folder / "output.txt"
        self._diary = folder / "diary.jsonl"
        self._run_dir = folder / tree["run"]["name"]
        self._driver: subprocess.Popen[bytes] | None = None
        self._expected: int | None = None  # the exit code of a driver that the plan killed
        self.processes = Processes(self._diary)
        self.ledger = LedgerWatch(self._run_dir / "ledger.sqlite")
        self.exposure = Exposure()

    def run(self, plan: Iterable[Blow], seed: int, more_steps: int = 3) -> list[Finding]:
        """Starts the run, executes the plan, kills the driver, lets the run complete, and audits it.

        Raises:
            Violation: When the driver exits by itself, or the run hangs.
        """
        try:
            self.start()
            self._wait_for_step("start")
            for blow in plan:
                self.strike(blow)
            final = last(seed)
            self.strike(final, start_again=False)
            self._tree["run"]["max_steps"] = self._steps() + more_steps
            self._note(f"the last start is to reach step {self._steps() + more_steps}")
            self.start()
            self._until(lambda: self._ended() is not None, STUCK_S, "the end of the run")
            if self._ended() != 0:
                raise Violation(f"the driver ended with code {self._ended()}: {self._end_of_log()}")
            self._note("the run has ended")
            self._look()
            return audit(self.config, self._diary, self.ledger, self.processes, self.exposure)
        finally:
            self._clean_up()

    @property
    def config(self) -> Config:
        """As it is now."""
        return parse_config(json.loads(json.dumps(self._tree)))

    def start(self) -> None:
        """Starts the driver, with the same command each time."""
        self._config_path.write_text(json.dumps(self._tree, indent=1))  # JSON is YAML
        with self._output.open("ab") as output:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "async_rl.cli", "train", str(self._config_path)],
                cwd=ROOT,
                env=os.environ | {DIARY: str(self._diary), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._expected = None
        self._note(f"driver {self._driver.pid} is started")

    def strike(self, blow: Blow, *, start_again: bool = True) -> None:
        """Waits for the moment of a blow, executes it, and observes the result."""
        if blow.after_step:
            self._wait_for_step("a step before the next blow")
        self._until(lambda: False, blow.delay_s, "", must=False)
        victims = self.processes.look().get(blow.victim, [])
        if not victims:
            self._note(f"no {blow.victim} to strike: it is being started")
            return
        victim = sorted(victims, key=lambda process: process.pid)[int(blow.pick * len(victims))]
        number = getattr(signal, blow.how)
        self._note(f"{blow.how} to {blow.victim} {victim.pid} ({victim.name()}), after step {self._steps()}")
        if blow.victim == "driver" and blow.how == "SIGKILL":
            self._expected = -signal.SIGKILL
            before = self.processes.look()
            victim.send_signal(number)
            self._until(lambda: self._ended() is not None, 10, "the driver's end")
            if start_again:
                self.start()
            self._wait_until_gone([p for role in before.values() for p in role])
        elif blow.victim == "driver":
            victim.send_signal(number)
            self._until(lambda: False, blow.lasts_s, "", must=False)
            victim.send_signal(signal.SIGCONT)
            self._note(f"driver {victim.pid} goes on after {blow.lasts_s:.1f} s")
        else:
            try:
                victim.send_signal(number)
            except psutil.NoSuchProcess:
                self._note("it was gone already")

    # -- waiting ---------------------------------------------------------------------------------------

    def _wait_for_step(self, what: str) -> None:
        port = self._tree["metrics"]["port"]
        before, begin = self._num_trained(), time.monotonic()
        self._until(lambda: self._num_trained() > before, STUCK_S, f"a step ({what})")
        self._note(f"step {self._steps()} is done, {time.monotonic() - begin:.1f} s later")
        self.exposure.look(self.processes, self._run_dir, self._output, port)

    def _wait_until_gone(self, processes: list[psutil.Process]) -> None:
        begin = time.monotonic()
        self._until(
            lambda: not any(_is_alive(p) for p in processes), GONE_S, "the end of the driver's processes"
        )
        self._note(f"its {len(processes)} processes were gone within {time.monotonic() - begin:.1f} s")

    def _until(self, happened: Callable[[], bool], limit_s: float, what: str, *, must: bool = True) -> None:
        """Polls a condition, because files and other processes raise no event."""
        deadline = time.monotonic() + limit_s
        while not happened():
            if self._ended() not in (None, self._expected, 0):
                raise Violation(f"the driver ended with code {self._ended()}: {self._end_of_log()}")
            if time.monotonic() >= deadline:
                if must:
                    raise Violation(f"waited {limit_s:.0f} s for {what}; {self._end_of_log()}")
                return
            if time.monotonic() >= self._next_look:
                self._look()
            time.sleep(0.2)

    # -- observation ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Expensive on few cores, so not in each iteration; rows of the ledger are compacted more slowly."""
        self.processes.look()
        self.ledger.look()
        self._next_look = time.monotonic() + 2.0

    def _ended(self) -> int | None:
        return self._driver.poll() if self._driver is not None else None

    def _num_trained(self) -> int:
        return sum(isinstance(entry, Trained) for entry in read(self._diary))

    def _steps(self) -> int:
        """The last completed step."""
        return next((entry.step for entry in reversed(read(self._diary))), 0)

    def _end_of_log(self) -> str:
        log = self._run_dir / "logs" / "driver.log"
        tails = [path.read_text(errors="replace")[-1500:] for path in (self._output, log) if path.exists()]
        return "\n---\n".join(tails)

    def _note(self, text: str) -> None:
        self._tell(f"{time.monotonic() - self._begin:7.1f} s  {text}")

    def _clean_up(self) -> None:
        """Removes everything of the run from this machine, also after a failure."""
        if self._driver is not None and self._driver.poll() is None:
            self._driver.kill()
            self._driver.wait()
        for role in self.processes.look().values():
            for process in role:
                process.kill()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
