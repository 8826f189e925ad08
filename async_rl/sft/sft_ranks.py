"""The ranks of a supervised run: one in this process, or several as Ray actors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from async_rl.config import Config, to_builtins
from async_rl.runtime.loading import load_object
from async_rl.runtime.waits import waiting
from async_rl.trainer_protocol import Saved, StepResult, TrainerState

T = TypeVar("T")


class Ranks(Protocol):
    """What is asked of a trainer here: a part of `async_rl.trainer_protocol.Trainer`."""

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """See `TrainerRank.setup`."""
        ...

    async def train_step(self, batch_path: str, step: int) -> StepResult:
        """See `TrainerRank.train_step`."""
        ...

    async def publish(self, directory: str, weight_version: int) -> None:
        """See `TrainerRank.publish`."""
        ...

    async def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """See `TrainerRank.save_checkpoint`."""
        ...

    async def saved_checkpoint(self, wait: bool) -> Saved:
        """See `TrainerRank.saved_checkpoint`."""
        ...

    async def close(self) -> None:
        """See `TrainerRank.close`."""
        ...


@asynccontextmanager
async def ranks_of(config: Config, run_dir: Path) -> AsyncIterator[Ranks]:
    """Start `trainer.num_ranks` ranks: one that is alone in this process, unless Ray runs already."""
    if config.trainer.num_ranks == 1 and config.placement.ray_address is None:
        yield OwnRank(config)
        return
    from async_rl.placement import ray_cluster  # imports Ray: a second that a single rank need not pay

    async with ray_cluster(config, run_dir) as cluster:
        yield await cluster.start_trainer()


class OwnRank:
    """A rank in this process, in one thread of its own, so that a signal is heard while it trains."""

    def __init__(self, config: Config) -> None:
        """Make the worker; it builds nothing before `setup`."""
        kind = load_object(config.trainer.worker, what="trainer.worker")
        self._worker: Any = kind(to_builtins(config), 0, 1, "")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """See `TrainerRank.setup`."""
        return await self._call("trainer start", lambda: self._worker.setup(checkpoint_dir))

    async def train_step(self, batch_path: str, step: int) -> StepResult:
        """See `TrainerRank.train_step`."""
        return await self._call("trainer step", lambda: self._worker.train_step(batch_path, step))

    async def publish(self, directory: str, weight_version: int) -> None:
        """See `TrainerRank.publish`."""
        await self._call("publish", lambda: self._worker.publish(directory, weight_version))

    async def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """See `TrainerRank.save_checkpoint`."""
        await self._call("checkpoint", lambda: self._worker.save_checkpoint(directory, extra))

    async def saved_checkpoint(self, wait: bool) -> Saved:
        """See `TrainerRank.saved_checkpoint`."""
        return await self._call("checkpoint", lambda: self._worker.saved_checkpoint(wait))

    async def close(self) -> None:
        """See `TrainerRank.close`."""
        await self._call("trainer step", self._worker.close)
        self._thread.shutdown()

    async def _call(self, on: str, work: Callable[[], T]) -> T:
        with waiting(on):
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
