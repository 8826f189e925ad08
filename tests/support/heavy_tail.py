"""Long and short answers in virtual time: the real orchestrator on engines that only count tokens."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from async_rl.config import Config, parse_config
from async_rl.engine_protocol import EngineFacts
from async_rl.observability.metrics import Metrics
from async_rl.planning.coarse_engine import CoarseEngine, EngineSpeed
from async_rl.planning.planned_job import PlannedCluster, SharedMachine, Sharing, TimedTrainer
from async_rl.planning.workload import PlannedChat
from async_rl.rollout.session.api import Session
from async_rl.run.inputs import RunInputs
from async_rl.run.orchestrator import Orchestrator
from async_rl.store.frames import read_trajectories
from async_rl.store.ledger import Ledger
from async_rl.trainer_protocol import StepResult, TrainerState
from async_rl.types import Completion, TakenBatch, Task
from tests.support.ledgers import audit_ledger

PROMPT, ENGINES = 8, 2
MEDIAN = 100.0
"""Tokens of the answers whose length is drawn."""
TOKEN_S = 0.01
"""The time in which a call alone on an engine samples a token."""
_EVER_S = 1e9
_FACTS = EngineFacts(
    num_layers=1, moe_layers=(), num_experts=0, top_k=0, vocab_size=512, context_length=1 << 30
)


class OneAnswer:
    """An agent loop of one turn, with the length that its task sets, or else with a drawn length."""

    ended: ClassVar[list[int]] = []
    """Tokens of all answers of a world that ended."""

    def __init__(self, sigma: float, most: int) -> None:
        self._sigma, self._most = sigma, most
        self._random, self._numbers = random.Random(0), count(1)

    async def run(self, task: Task, session: Session) -> None:
        length = task.metadata.get("tokens")
        if length is None:
            length = round(self._random.lognormvariate(math.log(MEDIAN), self._sigma))
        length = max(1, min(length, self._most))
        number = next(self._numbers)
        session.start([{"length": PROMPT, "stop_at": PROMPT + length, "trajectory": number}])
        await session.generate()
        self.ended.append(length)


async def fair(task: Task, completion: Completion) -> float:
    """The task's own reward, or one that no two siblings share."""
    return float(task.metadata.get("reward", next(_rewards)))


_rewards = count()


class _CheckingTrainer(TimedTrainer):
    """Checks each batch, and keeps it."""

    def __init__(self, step: int, step_s: float, max_staleness: int) -> None:
        machine = SharedMachine(Sharing())
        super().__init__(
            lambda tokens, sampled: step_s, publish_s=0.0, snapshot_s=0.0, warmup=0, machine=machine
        )
        self.step, self._max_staleness = step, max_staleness
        self.batches: list[TakenBatch] = []

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        return TrainerState(step=self.step)

    async def train_step(self, batch: TakenBatch, step: int) -> StepResult:
        self._check(batch)
        self.batches.append(batch)
        result = await super().train_step(batch, step)
        self.step = step
        return result

    def _check(self, batch: TakenBatch) -> None:
        """What no policy may break, from the arrays that a trainer reads."""
        packed = read_trajectories(batch)
        trained = packed.weight_versions[packed.loss_mask]
        assert packed.trainer_version - trained.min() == max(batch.staleness)
        assert max(batch.staleness) <= self._max_staleness
        assert batch.num_sampled_tokens - batch.num_masked_tokens == packed.loss_mask.sum()
        assert np.add.reduceat(packed.loss_mask, packed.offsets[:-1]).all(), "every trajectory trains tokens"


class World:
    """One incarnation of a run. Weight updates abort calls, so that what they sampled is known."""

    def __init__(
        self,
        folder: Path,
        *,
        groups_per_batch: int = 8,
        group_size: int = 8,
        slots: int = 32,
        sigma: float = 0.8,
        most: int = 1000,
        tasks: Sequence[Task] | None = None,
        epochs: int | None = None,
        step: int = 0,
        **rollout: Any,
    ) -> None:
        """Take up what is in the folder."""
        self._folder = folder
        self._settings: dict[str, Any] = {
            "model": {"path": "model"},
            "data": {"path": "data", "shuffle": False, "epochs": epochs},
            "engine": {
                "kind": "simulated",
                "num_engines": ENGINES,
                "max_running_requests": slots,
                "stall_s": _EVER_S,
            },
            "routing": {"replay": "off"},
            "weights": {"interrupt": "abort"},
            "doctor": {"stall_s": _EVER_S},
            "queue": {"journal_s": None},
            "rollout": {
                "agent_loop": f"{__name__}:OneAnswer",
                "agent_loop_args": {"sigma": sigma, "most": most},
                "reward": f"{__name__}:fair",
                "group_size": group_size,
                "max_concurrent_trajectories": ENGINES * slots,
                "max_context_tokens": PROMPT + 2 * most,
                "max_new_tokens": 2 * most,
                "trajectory_timeout_s": _EVER_S,
                **rollout,
            },
            "trainer": {"groups_per_batch": groups_per_batch, "checkpoint_every": 0},
        }
        self.config = self._config(1)
        self.tasks = tasks or [Task(task_id=f"task-{i}", messages=[]) for i in range(16)]
        self.metrics = Metrics()
        # Nine tenths of the time that full engines need for a batch of median answers.
        step_s = 0.9 * groups_per_batch * group_size * MEDIAN * TOKEN_S / (ENGINES * slots)
        self.trainer = _CheckingTrainer(step, step_s, self.config.rollout.max_staleness)
        self.batches = self.trainer.batches
        self._id = (f"{step:04d}-{n:028d}" for n in count()).__next__

    def _config(self, steps: int) -> Config:
        return parse_config({**self._settings, "run": {"max_steps": steps}})

    async def train(self, steps: int, *, kill_after_s: float | None = None) -> None:
        """Train up to this step, or until the data ends; `kill_after_s` leaves everything as it then is.

        The ledger is audited at the end.
        """
        slots = self.config.engine.max_running_requests
        speed = EngineSpeed(
            slots=slots,
            decode_base_s=TOKEN_S,
            decode_per_call_s=0.0,
            prefill_tokens_per_s=1e4 / TOKEN_S,
            update_s=TOKEN_S,
        )
        engines = [CoarseEngine(f"engine-{i}", speed) for i in range(ENGINES)]
        for name in ("checkpoints", "logs"):
            (self._folder / name).mkdir(exist_ok=True)
        OneAnswer.ended.clear()
        orchestrator = Orchestrator(
            self._config(steps),
            self._folder,
            asyncio.Event(),
            PlannedCluster(engines, self.trainer),
            self.metrics,
            asyncio.get_running_loop().time,
            RunInputs(self.tasks, PlannedChat(), _FACTS, self._id),
        )
        try:
            async with asyncio.timeout(kill_after_s):
                await orchestrator.run()
        except TimeoutError:
            if kill_after_s is None:
                raise
        assert orchestrator.queue is not None
        self.lengths = orchestrator.queue.groups.lengths
        ledger = Ledger(self._folder / "ledger.sqlite")
        audit_ledger(ledger)
        self.counts, self.pending = ledger.counts(), ledger.data_position().pending
        ledger.close()

    @property
    def trained(self) -> list[int]:
        """Tokens of all answers that were trained."""
        return [length for batch in self.batches for length in batch.sampled_lengths]

    @property
    def tasks_trained(self) -> list[str]:
        """Ids of the tasks of trained groups, with repetitions, sorted."""
        groups = (
            batch.trajectories[batch.group_index.index(i)]
            for batch in self.batches
            for i in range(len(batch.group_ids))
        )
        return sorted(each.task_id for each in groups)


def distance(one: Sequence[int], other: Sequence[int]) -> float:
    """The two-sample Kolmogorov-Smirnov distance, exactly."""
    points = np.unique(np.concatenate([one, other]))
    shares = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())
