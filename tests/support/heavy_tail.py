"""Long and short answers in virtual time: the real manager, queue and pool on engines that only count tokens.

The trainer here takes, waits, settles and brings engines to the next version, in the orchestrator's order.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np

from async_rl.config import Config, parse_config
from async_rl.data.chat_format import ChatFormat
from async_rl.data.feeder import Feeder, TaskRetries
from async_rl.data.order import TaskOrder
from async_rl.engine_protocol import DiskUpdate, EngineFacts
from async_rl.engines.pool import EnginePool
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import TrajectoryCounts
from async_rl.planning.coarse_engine import CoarseEngine, EngineSpeed, mark
from async_rl.rollout.backend import LocalBackend
from async_rl.rollout.manager import RolloutManager
from async_rl.rollout.session.api import Session
from async_rl.rollout.session.context import SessionContext
from async_rl.run import recovery
from async_rl.runtime.supervision import services
from async_rl.staleness import Backlog
from async_rl.store.batching import read_trajectories
from async_rl.store.ledger import Ledger
from async_rl.store.lengths import LengthDrift
from async_rl.store.outstanding import OutstandingGroups
from async_rl.store.spool import Spool
from async_rl.store.trajectory_queue import TrajectoryQueue
from async_rl.types import Completion, TakenBatch, Task
from tests.support.ledgers import audit_ledger
from tests.support.trajectories import roll_back

PROMPT, ENGINES = 8, 2
MEDIAN = 100.0
"""Tokens of the answers whose length is drawn."""
_FACTS = EngineFacts(
    num_layers=1, moe_layers=(), num_experts=0, top_k=0, vocab_size=512, context_length=1 << 30
)


class _Chat:
    """Prompts that tell a coarse engine how long the answer will be."""

    stop_token_ids = (2,)
    end_of_turn_ids = (104,)

    def prompt_ids(self, messages: Any, tools: Any = ()) -> np.ndarray:
        length, number = messages[0]["content"].split()
        return mark(PROMPT, stop_at=PROMPT + int(length), trajectory=int(number))

    def decode(self, token_ids: Any) -> str:
        return ""


class OneAnswer:
    """An agent loop of one turn, with the length that its task sets, or else with a drawn length."""

    def __init__(self, sigma: float, most: int) -> None:
        self._sigma, self._most = sigma, most
        self._random, self._numbers = random.Random(0), count(1)

    async def run(self, task: Task, session: Session) -> None:
        length = task.metadata.get("tokens")
        if length is None:
            length = round(self._random.lognormvariate(math.log(MEDIAN), self._sigma))
        length = max(1, min(length, self._most))
        session.start([{"role": "user", "content": f"{length} {next(self._numbers)}"}])
        await session.generate()


async def fair(task: Task, completion: Completion) -> float:
    """The task's own reward, or one that no two siblings share."""
    return float(task.metadata.get("reward", next(_rewards)))


_rewards = count()


class _RecordingLengths(LengthDrift):
    """Also records the lengths of all trajectories that ended."""

    def __init__(self, ended: list[int]) -> None:
        super().__init__()
        self._recorded = ended

    def add_ended(self, length: int) -> None:
        self._recorded.append(length)
        super().add_ended(length)


class _RecordingGroups(OutstandingGroups):
    """Also records the positions of the groups that were dispatched in this incarnation."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.positions: dict[str, int] = {}

    def dispatch_group(self, group_id: str, task_id: str, position: int, *others: Any) -> None:
        self.positions[group_id] = position
        super().dispatch_group(group_id, task_id, position, *others)


class World:
    """One incarnation of a run, see `train`. Weight updates abort calls, so that what they sampled is known.

    Time is counted in tokens: one call alone on an engine samples one a second.
    """

    def __init__(
        self,
        folder: Path,
        *,
        staleness_policy: str = "wait",
        max_staleness: int = 4,
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
        self.config: Config = parse_config(
            {
                "model": {"path": "model"},
                "data": {"path": "data", "shuffle": False},
                "engine": {"kind": "simulated", "num_engines": ENGINES, "max_running_requests": slots},
                "routing": {"replay": "off"},
                "rollout": {
                    "agent_loop": f"{__name__}:OneAnswer",
                    "agent_loop_args": {"sigma": sigma, "most": most},
                    "reward": f"{__name__}:fair",
                    "group_size": group_size,
                    "max_concurrent_trajectories": ENGINES * slots,
                    "max_staleness": max_staleness,
                    "staleness_policy": staleness_policy,
                    "max_context_tokens": PROMPT + 2 * most,
                    "max_new_tokens": 2 * most,
                    "trajectory_timeout_s": 1e9,
                    **rollout,
                },
                "trainer": {"groups_per_batch": groups_per_batch},
            }
        )
        self.tasks = tasks or [Task(task_id=f"task-{i}", messages=[]) for i in range(16)]
        self.version = step
        # Nine tenths of the time that full engines need for a batch of median answers.
        self.step_s = 0.9 * groups_per_batch * group_size * MEDIAN / (ENGINES * slots)
        loop = asyncio.get_running_loop()
        clock, self.metrics = loop.time, Metrics()
        self.pool = EnginePool(self.metrics, clock)
        speed = EngineSpeed(
            slots=slots, decode_base_s=1.0, decode_per_call_s=0.0, prefill_tokens_per_s=1e4, update_s=1.0
        )
        self.engines = [CoarseEngine(f"engine-{i}", speed) for i in range(ENGINES)]
        self.ledger = Ledger(folder / "ledger.sqlite")
        roll_back(self.ledger, step)
        retries = TaskRetries(
            max_retries=recovery.MAX_TASK_RETRIES,
            retry_after=groups_per_batch,
            metrics=self.metrics,
        )
        self.ended: list[int] = []
        """Tokens of all answers that ended."""
        spool = Spool(folder / "spool", None)
        self.groups = _RecordingGroups(
            self.ledger,
            spool,
            Backlog(groups_per_batch, max_staleness, self.config.rollout.staleness_policy, step),
            metrics=self.metrics,
            retry_task=retries.retry_task,
            lengths=_RecordingLengths(self.ended),
            clock=clock,
        )
        self.queue = TrajectoryQueue(self.groups, min_group_size=min(2, group_size))
        self.groups.restore_groups()
        self.position = self.ledger.data_position()
        chat = cast(ChatFormat, _Chat())
        context = SessionContext(
            config=self.config,
            chat=chat,
            metrics=self.metrics,
            clock=clock,
            serving_clock=self.pool.serving_clock,
            calls=self.pool.dispatcher,
            facts=_FACTS,
            new_id=(f"{step:04d}-{n:010d}" for n in count()).__next__,
        )
        self.manager = RolloutManager(
            context,
            feeder=Feeder(
                self.tasks,
                TaskOrder(len(self.tasks), seed=0, shuffle=False),
                epochs,
                start=self.position.cursor,
                pending=self.position.pending,
                retries=retries,
            ),
            pool=self.pool,
            queue=self.queue,
            backend=LocalBackend(context, spool),
        )
        self.batches: list[TakenBatch] = []

    async def train(self, steps: int, *, kill_after_s: float | None = None) -> None:
        """Make so many steps, or fewer when the data ends; `kill_after_s` leaves everything as it then is."""
        try:
            async with asyncio.timeout(kill_after_s):
                async with services(rollouts=self.manager.run):
                    for engine in self.engines:
                        if engine.engine_id not in self.pool:
                            self.pool.add_engine(engine)
                        await self._update(engine)
                    for _ in range(steps):
                        if not await self._step():
                            break
        except TimeoutError:
            if kill_after_s is None:
                raise

    async def _step(self) -> bool:
        batch = await self.queue.next_batch(self.version)
        if batch is None:
            return False
        self.check(batch)
        self.batches.append(batch)
        await asyncio.sleep(self.step_s)
        self.version += 1
        await self.queue.settle_batch(batch, self.version)
        for engine in self.engines:
            self.pool.hold_engine(engine.engine_id)
        for engine in self.engines:
            await engine.interrupt("abort")
            await self._update(engine)
            await engine.resume_generation("abort")
        self.queue.advance_version(self.version)
        return True

    async def _update(self, engine: CoarseEngine) -> None:
        await engine.update_weights(DiskUpdate(weight_version=self.version, path=""), flush=True)
        self.pool.serve_engine(engine.engine_id, self.version)

    def check(self, batch: TakenBatch) -> None:
        """What no policy may break, from the arrays that a trainer reads."""
        packed = read_trajectories(batch)
        trained = packed.weight_versions[packed.loss_mask]
        assert packed.trainer_version - trained.min() == max(batch.staleness)
        assert max(batch.staleness) <= self.config.rollout.max_staleness
        assert batch.num_sampled_tokens - batch.num_masked_tokens == packed.loss_mask.sum()
        assert np.add.reduceat(packed.loss_mask, packed.offsets[:-1]).all(), "every trajectory trains tokens"

    @property
    def trained(self) -> list[int]:
        """Tokens of all answers that were trained."""
        return [length for batch in self.batches for length in batch.sampled_lengths]

    @property
    def positions_trained(self) -> list[int]:
        """Positions of trained tasks, with repetitions, sorted."""
        return sorted(self.groups.positions[g] for batch in self.batches for g in batch.group_ids)

    def close(self) -> TrajectoryCounts:
        """End; what the ledger holds is audited."""
        audit_ledger(self.ledger)
        counts = self.queue.groups.ledger.counts()
        self.queue.close()
        return counts


def distance(one: Sequence[int], other: Sequence[int]) -> float:
    """The two-sample Kolmogorov-Smirnov distance, exactly."""
    points = np.unique(np.concatenate([one, other]))
    shares = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())
