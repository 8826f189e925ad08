"""Starts the ranks of a supervised run: one in this process, or several as Ray actors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from async_rl.config import Config, to_builtins
from async_rl.runtime.loading import load_object
from async_rl.runtime.threads import LastingThread, call_until_cancelled
from async_rl.runtime.waits import waiting
from async_rl.sft.schedule import SftBatch
from async_rl.trainer_protocol import Saved, StepResult, TrainerState

T = TypeVar("T")


class SftRanks(Protocol):
    """The part of `async_rl.trainer_protocol.Trainer` that supervised training uses."""

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """Start from the newest checkpoint in the folder, or from the model."""
        ...

    async def train_step(self, batch: SftBatch, step: int) -> StepResult:
        """Train on a batch, or compute its loss."""
        ...

    async def publish(self, directory: str, weight_version: int) -> None:
        """Write the model as a Hugging Face folder."""
        ...

    async def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """Start to write a checkpoint."""
        ...

    async def saved_checkpoint(self, wait: bool) -> Saved:
        """Return the state of the checkpoint that is being written."""
        ...

    async def close(self) -> None:
        """Stop the ranks."""
        ...


@asynccontextmanager
async def start_ranks(config: Config, run_dir: Path) -> AsyncIterator[SftRanks]:
    """Start `trainer.num_ranks` ranks: a single one in this process, unless the run joins a cluster."""
    if config.trainer.num_ranks == 1 and config.placement.ray_address is None:
        yield LocalRank(config)
        return
    from async_rl.placement import ray_cluster  # imports Ray, which takes a second

    async with ray_cluster(config, run_dir) as cluster:
        yield await cluster.start_trainer()


class LocalRank:
    """A rank in this process, in a thread of its own, so that signals are handled while it trains."""

    def __init__(self, config: Config) -> None:
        """Construct the worker, which builds nothing before `setup`."""
        kind = load_object(config.trainer.worker, what="trainer.worker")
        self._worker: Any = kind(to_builtins(config), 0, 1, "")
        self._thread = LastingThread("trainer")

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """Implement `SftRanks.setup`."""
        return await self._call("trainer start", lambda: self._worker.setup(checkpoint_dir))

    async def train_step(self, batch: SftBatch, step: int) -> StepResult:
        """Implement `SftRanks.train_step`."""
        return await self._call("trainer step", lambda: self._worker.train_step(batch, step))

    async def publish(self, directory: str, weight_version: int) -> None:
        """Implement `SftRanks.publish`."""
        await self._call("publish", lambda: self._worker.publish(directory, weight_version))

    async def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """Implement `SftRanks.save_checkpoint`."""
        await self._call("checkpoint", lambda: self._worker.save_checkpoint(directory, extra))

    async def saved_checkpoint(self, wait: bool) -> Saved:
        """Implement `SftRanks.saved_checkpoint`."""
        return await self._call("checkpoint", lambda: self._worker.saved_checkpoint(wait))

    async def close(self) -> None:
        """Implement `SftRanks.close`."""
        await self._call("trainer step", self._worker.close)

    async def _call(self, on: str, work: Callable[[], T]) -> T:
        with waiting(on):
            return await call_until_cancelled(work, name=on, thread=self._thread)
