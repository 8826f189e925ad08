"""A run of the real command on simulated engines with every fault that a counter counts.

Tests of monitoring use it: the values do not matter, only that every metric has one.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from agent_loops.base import AgentLoop
from async_rl.config import Config
from async_rl.errors import TrainerError
from async_rl.rollout.session.api import Session
from async_rl.trainer_protocol import Extreme, StepResult, TrainerState
from async_rl.types import Completion, TakenBatch, Task
from tests.support.local_cluster import CheckingTrainer, LocalCluster
from verification.simulation.breakable_engine import CallFault, Fault

TROUBLE: dict[CallFault, bytes] = {
    "die": b"async_rl_engine_quarantined_total{",
    "wrong_rows": b"async_rl_replay_rejected_total{",
    "hang": b"async_rl_engine_stalls_total{",
    "busy": b"async_rl_engine_busy_total{",
    "nan": b"async_rl_answers_discarded_total{",
    "retract": b"async_rl_engine_retractions_total{",
}
"""Engine faults and the metrics that count them."""

EVALUATED = b"async_rl_evaluation_reward{"
"""The metrics of an evaluation."""

REAPED = b"async_rl_user_processes_reaped_total{"
"""The metrics of what user code leaves behind."""

WATCHED = b"async_rl_served_weights_unchanged{"
"""Reported once an engine has taken a version whose checksums are compared."""

RESTARTED = b'when="after"'
"""The label of what is compared after a restart of the trainer."""

STILL = b"async_rl_stalls_total{"
"""The metrics that count stalls."""


def settings(calculator: Path, folder: Path) -> dict[str, Any]:
    """Return the tree of a config; `calculator` is the fixture."""
    return {
        "run": {"name": "troubled", "dir": str(folder / "runs"), "max_steps": 10_000, "drain_s": 0.2},
        "model": {"path": str(calculator / "model"), "dtype": "float32"},
        "data": {
            "path": str(_tasks(calculator, folder)),
            "keys": {"reward": "reward"},
            "validation": [{"path": str(_validation(calculator, folder))}],
            "curriculum": {"warm_up": 0},
        },
        "engine": {
            "kind": "simulated",
            "num_engines": 3,
            "decode_step_s": 0.005,
            "mean_new_tokens": 12,
            "max_restarts": 100,
            "stall_s": 0.5,
        },
        "rollout": {
            "agent_loop": f"{__name__}:TroubledLoop",
            "rewards": {
                "luck": {"function": f"{__name__}:reward", "max_retries": 1},
                "graded": {"kind": "judge", "judge": "teacher", "template": "{response}", "score": "[0-9]"},
            },
            "reward": "luck",
            "group_size": 4,
            "max_concurrent_trajectories": 24,
            "max_staleness": 2,
            "max_context_tokens": 256,
            "max_new_tokens": 48,
            "max_failed_share": 1.0,
            "trajectory_timeout_s": 1.0,
            "dynamic_filtering": True,
            "failed_siblings": "retry",
        },
        "models": {"teacher": {"path": str(calculator / "model")}},
        "trainer": {
            "groups_per_batch": 4,
            "checkpoint_every": 2,
            "max_restarts": 100,
            "loss": {"teacher": {"model": "teacher"}},
        },
        "routing": {"flip_sample": 1.0},
        # The engines keep no weights: whole files are sent.
        "weights": {"transport": "delta"},
        "evaluation": {"every": 4, "at_start": True},
        "metrics": {"trackers": [f"{__name__}:BrokenTracker"]},
        "doctor": {"stall_s": 0.3},
    }


def _tasks(calculator: Path, folder: Path) -> Path:
    """Return the tasks; every fourth has a judge."""
    path = folder / "tasks.jsonl"
    rows = [json.loads(line) for line in (calculator / "data" / "tasks.jsonl").read_text().splitlines()]
    for row in rows[::4]:
        row["reward"] = "graded"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _validation(calculator: Path, folder: Path) -> Path:
    """Return some of the tasks."""
    path = folder / "validation.jsonl"
    lines = (calculator / "data" / "tasks.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:8]))
    return path


class TroubledLoop(AgentLoop):
    """Two turns and a tool call. Some calls fail, some attempts raise or hang.

    One blocks the event loop and leaves a process behind.
    """

    blocked = False

    async def run(self, task: Task, session: Session) -> None:
        """Implements `AgentLoop.run`."""
        session.start(task.messages)
        turn = await session.generate()
        luck = zlib.crc32(f"{session.trajectory_id} {turn.text}".encode()) % 32
        if luck == 0:
            raise RuntimeError("an agent loop with a bug")
        if luck == 1:
            await asyncio.Future()
        if not TroubledLoop.blocked:
            TroubledLoop.blocked = True
            time.sleep(0.5)  # noqa: ASYNC251 - blocks the event loop, on purpose
            subprocess.run(["sh", "-c", "sleep 300 >/dev/null 2>&1 &"], check=True)  # noqa: ASYNC221
        session.record_tool_call(error=luck < 16)
        session.record_request("answered", ["temperature"])
        session.add_messages([{"role": "tool", "content": "17"}])
        await session.generate()


def reward(task: Task, completion: Completion) -> float:
    """Raise for some trajectories; gives many groups equal rewards."""
    luck = zlib.crc32(completion.text.encode()) % 32
    if luck == 0:
        raise ConnectionError("the reward's server is gone")
    return float(luck % 2)


class BrokenTracker:
    """Rejects every step."""

    def __init__(self, config: Config, run_dir: Path) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Implements `Tracker.log`."""
        raise ConnectionError("no such host")

    def close(self) -> None:
        """Implements `Tracker.close`."""


class TroubledTrainer(CheckingTrainer):
    """Starts once the run is scraped, fails once, stalls until a scrape shows it; measures all figures."""

    def __init__(self, config: Config, cluster: TroubledCluster) -> None:
        super().__init__(config, step_s=0.1)
        self._cluster = cluster
        self._failed = False

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """Implements `Trainer.setup`."""
        await self._cluster.watched.wait()
        return await super().setup(checkpoint_dir)

    async def train_step(self, batch: TakenBatch, step: int) -> StepResult:
        """Implements `Trainer.train_step`."""
        self._cluster.make_trouble(step)
        if step == 4 and not self._failed:
            self._failed = True
            raise TrainerError("the trainer broke")
        if step == 3:
            await self._cluster.found_still.wait()
        elif "hang" in self._cluster.to_come:
            await asyncio.sleep(1.0)  # an update would end the call
        result = await super().train_step(batch, step)
        odd = Extreme(trajectory_id="a", position=3, token_id=7, lag=0, rollout_log_prob=-1.0, log_prob=-3.0)
        return StepResult(
            step=step, metrics=result.metrics | {"routing_rows_invalid": step % 2}, extremes=(odd,)
        )


class TroubledCluster(LocalCluster):
    """Engines that die, stop sending and report wrong versions until every fault has been counted."""

    def __init__(self, config: Config) -> None:
        # They stay silent for longer than the run's limit.
        patient = msgspec.structs.replace(config.engine, stall_s=60.0)
        super().__init__(msgspec.structs.replace(config, engine=patient))
        self.to_come = dict(TROUBLE)
        self.missing: list[bytes] = []
        """Expected metrics that the last scrape did not hold."""
        self.watched, self.found_still = asyncio.Event(), asyncio.Event()
        self.trainer: TroubledTrainer = TroubledTrainer(config, self)

    def scraped(self, text: bytes) -> bool:
        """Take each scrape; return whether it holds every expected metric."""
        self.watched.set()
        self.to_come = {kind: name for kind, name in self.to_come.items() if name not in text}
        if STILL in text:
            self.found_still.set()
        self.missing = [name for name in (EVALUATED, REAPED, WATCHED, STILL, RESTARTED) if name not in text]
        self.missing += self.to_come.values()
        return not self.missing

    def make_trouble(self, step: int) -> None:
        """Inject a fault into each engine, of the remaining kinds in turn, and one into the teacher's."""
        if step == 2:
            self.models["teacher"].engines[0].faults.append(Fault("busy"))
        kinds = list(self.to_come)
        for index, engine in enumerate(self.engines, start=step):
            if kinds and not engine.faults:
                engine.faults.append(Fault(kinds[index % len(kinds)]))
