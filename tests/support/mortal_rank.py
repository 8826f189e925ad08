"""A trainer rank without a model, which checks its batches and receives signals at planned steps."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from async_rl.observability.records import FIGURES
from async_rl.store.frames import find_flaws, read_trajectories
from async_rl.trainer_protocol import Saved, StepResult, TrainerState
from async_rl.types import TakenBatch

PLAN = "ASYNC_RL_TEST_DEATHS"
"""Environment variable with the path of a JSON list of [rank, step, signal name], each sent once."""


class MortalRank:
    """Implements a rank of `async_rl.trainer_protocol.Trainer`."""

    def __init__(self, config: dict[str, Any], rank: int, world_size: int, init_address: str) -> None:
        self._rank, self._world_size = rank, world_size
        self._step = 0

    def setup(self, checkpoint_dir: str | None) -> TrainerState:
        assert checkpoint_dir is not None
        latest = Path(checkpoint_dir) / "latest.json"
        self._step = json.loads(latest.read_text()) if latest.exists() else 0
        return TrainerState(step=self._step)

    def needed_trajectories(self, batch: TakenBatch) -> tuple[int, ...]:
        return tuple(range(self._rank, len(batch.trajectories), self._world_size))

    def read_batch(self, batch: TakenBatch) -> dict[str, str]:
        own = self.needed_trajectories(batch)
        if flaws := find_flaws(batch.trajectories[index] for index in own):
            return flaws
        self._tokens = read_trajectories(batch, own)
        return {}

    def train_step(self, batch: TakenBatch, step: int) -> StepResult:
        tokens = self._tokens
        assert tokens.trajectory_ids == batch.trajectory_ids
        assert batch.trainer_version == self._step == step - 1
        self._meet_fate(step)
        self._step = step
        counts = {"tokens": batch.num_tokens, "trained_tokens": int(tokens.loss_mask.sum())}
        rows = {"routing_rows": 0, "routing_rows_invalid": 0, "step_s": 0.0}
        return StepResult(step=step, metrics=dict.fromkeys(FIGURES, 0.0) | counts | rows)

    def _meet_fate(self, step: int) -> None:
        plan = Path(os.environ[PLAN])
        for death in json.loads(plan.read_text()):
            once = plan.with_name("-".join(map(str, death)))
            if death[:2] == [self._rank, step] and not once.exists():
                once.touch()
                os.kill(os.getpid(), getattr(signal, death[2]))

    def publish(self, directory: str, weight_version: int) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)

    def checksums(self) -> dict[str, str]:
        return {"weights": str(self._step)}

    def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        if self._rank == 0:
            (Path(directory) / "latest.json").write_text(json.dumps(self._step))

    def saved_checkpoint(self, wait: bool) -> Saved:
        return Saved()

    def close(self) -> None: ...
