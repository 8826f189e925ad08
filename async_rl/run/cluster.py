"""What a run asks of whoever runs its processes: `async_rl.placement`, and in tests `async_rl.simulation`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from async_rl.engine_protocol import Engine
from async_rl.errors import EngineError
from async_rl.rollout.workers.messages import Link
from async_rl.trainer_protocol import Trainer
from async_rl.weights.delta_delivery import HostFolder


class Cluster(Protocol):
    """Processes of a run: who starts engines and trainer, and where."""

    weight_backend: str
    """`gloo` or `nccl`, for distributed weight updates."""

    async def start_engines(self) -> list[Engine]:
        """Start all engines and wait until they answer."""
        ...

    async def start_trainer(self) -> Trainer:
        """Start all trainer ranks. Called again, it first ends those that there were, whatever their state.

        Raises:
            EnvironmentNotReady: When they do not come up.
        """
        ...

    def connect_engine(self, engine_id: str, url: str) -> Engine:
        """A client of a server that runs already; it connects to nothing yet."""
        ...

    async def disconnect_engine(self, engine_id: str) -> None:
        """Let go of a server that has left the job; it runs on."""
        ...

    async def stop_engine(self, engine_id: str) -> None:
        """End a failed engine, whatever its state, so that what it held of a device is free."""
        ...

    async def restart_engine(self, engine_id: str) -> None:
        """Bring a failed engine back to where it answers again."""
        ...

    async def watch_engines(self, died: Callable[[str, EngineError], None]) -> None:
        """Report engines whose process ends; never returns."""
        ...

    async def open_port(self) -> tuple[str, int]:
        """Host and free port on the trainer's rank 0."""
        ...

    def local_folder(self, engine_id: str) -> HostFolder | None:
        """Where the host of an engine keeps weights; None for one that we did not start."""
        ...

    def rollout_worker(self, name: str) -> AbstractAsyncContextManager[Link]:
        """Start a rollout worker and yield the driver's end of its link; it ends with the block.

        Raises:
            EnvironmentNotReady: When it does not come up.
        """
        ...
