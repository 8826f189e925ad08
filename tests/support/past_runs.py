"""Runs the real scheduler in virtual time on engines that stream tokens, and keeps the run's folder."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.config import Config, SimulatedEngines
from async_rl.config.reference import resolved_yaml
from async_rl.engines.simulated import TINY_FACTS, SimulatedEngine
from async_rl.observability.metrics import Metrics
from async_rl.planning.planned_job import PlannedCluster, SharedMachine, Sharing, TimedTrainer
from async_rl.rollout.session.api import Session
from async_rl.run.inputs import RunInputs
from async_rl.run.orchestrator import Orchestrator
from async_rl.run.plan_watch import PlanWatch
from async_rl.store.archive import Archive
from async_rl.types import Completion, Int32Array, Task
from tests.support.run_config import config_with

TOOL_S: Final = 0.4
REWARD_S: Final = 0.1
UPDATE_S: Final = 0.3
PUBLISH_S: Final = 0.2
TRAIN_S_PER_TOKEN: Final = 0.0008


def past_config(*overrides: str, **sections: dict[str, Any]) -> Config:
    """Two engines of eight slots, batches of four groups of four trajectories in two turns."""
    tree: dict[str, Any] = {
        "run": {"max_steps": 12},
        "model": {"path": "none"},
        "data": {"path": "none.jsonl", "shuffle": False},
        "engine": {
            "kind": "simulated",
            "num_engines": 2,
            "max_running_requests": 8,
            "decode_step_s": 0.04,
            "prefill_tokens_per_s": 10000.0,
        },
        "rollout": {
            "agent_loop": f"{__name__}:TwoTurns",
            "reward": f"{__name__}:slow_reward",
            "group_size": 4,
            "max_concurrent_trajectories": 16,
            "max_staleness": 2,
            "max_context_tokens": 400,
            "max_new_tokens": 120,
        },
        "routing": {"replay": "off"},
        "trainer": {"groups_per_batch": 4, "checkpoint_every": 0},
    }
    return config_with(*overrides, **(tree | sections))


class TwoTurns:
    """Writes two turns of drawn lengths, with a tool in between."""

    def __init__(self) -> None:
        self._number = 0

    async def run(self, task: Task, session: Session) -> None:
        self._number += 1
        draw = random.Random(f"{task.task_id}/{self._number}")
        session.start([{"length": 40 + int(task.task_id) % 20, "of": int(task.task_id) + 10}])
        await session.generate(max_new_tokens=draw.randint(6, 30))
        await asyncio.sleep(TOOL_S * draw.uniform(0.5, 1.5))
        session.add_messages([{"length": 12, "of": 5}])
        await session.generate(max_new_tokens=draw.randint(6, 60))


async def slow_reward(task: Task, completion: Completion) -> float:
    """Give some siblings a point, after a while."""
    await asyncio.sleep(REWARD_S)
    return float(len(completion.token_ids) % 2)


class _Chat:
    stop_token_ids: tuple[int, ...] = ()
    end_of_turn_ids = (3,)

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: Any = ()) -> Int32Array:
        return np.full(messages[0]["length"], messages[0]["of"], np.int32)

    def append_ids(self, messages: Sequence[dict[str, Any]], *, after_length: bool = False) -> Int32Array:
        return np.full(messages[0]["length"], messages[0]["of"], np.int32)

    def decode(self, token_ids: Any) -> str:
        return ""


class _Tasks(Sequence[Task]):
    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: Any) -> Any:
        return Task(task_id=str(index), messages=[])


async def record_run(
    config: Config,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    slow_from_s: float = 0.0,
    plan: PlanWatch | None = None,
    **slow: float,
) -> None:
    """Run a job in virtual time; its folder is then that of a run.

    Args:
        config: From `past_config`.
        folder: The folder to create.
        monkeypatch: Gives the archive the clock of the loop.
        slow_from_s: When engines become slow.
        plan: Compares the run with what is expected of it.
        slow: How much longer than the others an engine takes to decode, by its id.
    """
    for name in ("checkpoints", "logs"):
        (folder / name).mkdir(parents=True)
    (folder / "config.yaml").write_text(resolved_yaml(config))
    clock, ids = asyncio.get_running_loop().time, count()
    monkeypatch.setattr("async_rl.run.recovery.Archive", partial(Archive, clock=clock))
    assert isinstance(config.engine, SimulatedEngines)
    engines = [
        SimulatedEngine(
            f"engine-{i}",
            config.engine,
            seed=i,
            policy=lambda tokens, draw: draw.randrange(5, 60),
            update_s=UPDATE_S,
            chunk_tokens=2,
        )
        for i in range(config.engine.num_engines)
    ]

    def slow_down() -> None:
        for engine in engines:
            times = slow.get(engine.engine_id.replace("-", "_"), 1.0)
            assert isinstance(config.engine, SimulatedEngines)
            engine._config = replace(config.engine, decode_step_s=config.engine.decode_step_s * times)

    asyncio.get_running_loop().call_later(slow_from_s, slow_down)
    trainer = TimedTrainer(
        lambda tokens, sampled: TRAIN_S_PER_TOKEN * tokens,
        publish_s=PUBLISH_S,
        snapshot_s=0.0,
        warmup=0,
        machine=SharedMachine(Sharing()),
    )
    cluster: Any = PlannedCluster(engines, trainer)  # type: ignore[arg-type]
    facts = TINY_FACTS
    inputs = RunInputs(_Tasks(), _Chat(), facts, lambda: f"{next(ids):032x}")  # type: ignore[arg-type]
    await Orchestrator(config, folder, asyncio.Event(), cluster, Metrics(), clock, inputs, plan=plan).run()
