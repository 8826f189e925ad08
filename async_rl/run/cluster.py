"""The interface by which a run starts its processes: `async_rl.placement`, and simulated ones in tests."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from async_rl.engine_protocol import Engine
from async_rl.engines.frozen_models import EngineProcesses
from async_rl.rollout.workers.messages import Link
from async_rl.rollout.workers.worker_backend import WorkerSpec
from async_rl.store.frame_reader import FrameReader
from async_rl.trainer_protocol import Trainer
from async_rl.weights.delta_delivery import WeightRoutes


class Cluster(EngineProcesses, WeightRoutes, Protocol):
    """Starts, restarts and ends the processes of a run; itself those of the policy's engines."""

    node: str
    """The address of the driver's node; empty where there is only one."""

    def engines_of(self, model: str) -> EngineProcesses:
        """Return what starts the engines of a model in `models`."""
        ...

    async def place_trainer(self) -> None:
        """Reserve places for the trainer's ranks; called before engines start that do not share devices.

        Raises:
            EnvironmentNotReady: There is no capacity for them.
        """

    async def start_trainer(self) -> Trainer:
        """Start all trainer ranks; called again, first end the previous ones, whatever their state.

        Raises:
            EnvironmentNotReady: The ranks do not start.
        """
        ...

    def connect_engine(self, engine_id: str, url: str) -> Engine:
        """Return a client of a running server; it opens no connection yet."""
        ...

    async def disconnect_engine(self, engine_id: str) -> None:
        """Close the client of a server that has left the job; the server keeps running."""
        ...

    async def stop_engine(self, engine_id: str) -> None:
        """End a failed engine, whatever its state, so that the device memory it held is free."""
        ...

    def other_nodes(self) -> Collection[str]:
        """Return the addresses of the nodes that are there, without the driver's; blocking."""
        ...

    def open_frame_reader(self, node: str) -> FrameReader:
        """Return what reads the frames on another node; blocking, from any thread.

        Raises:
            NodeUnreachable: The node is not part of the cluster now.
        """
        ...

    def rollout_worker(self, spec: WorkerSpec) -> AbstractAsyncContextManager[Link]:
        """Start a rollout worker and yield the driver's end of its link; it ends with the block.

        Raises:
            EnvironmentNotReady: The worker does not start.
        """
        ...
