"""What runs in the processes that Ray starts: a trainer rank, and the owner of an SGLang server."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray

from async_rl.config import SGLangEngines, parse_config
from async_rl.engines.server import SGLangServer
from async_rl.loading import load_object
from async_rl.processes import Process, die_with_parent, this_process


class RankActor:
    """One trainer rank in a process of its own."""

    def __init__(self, log_path: str, cpus: float) -> None:
        die_with_parent()
        redirect_output(log_path)
        # Several ranks of OpenMP threads that spin for each other stall a machine of few cores for seconds.
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(cpus)))
        self._worker: Any = None

    def process(self) -> Process:
        """Which process this is."""
        return this_process(ray.get_runtime_context().get_node_id())

    def address(self) -> tuple[str, int]:
        """A host and free port of this node."""
        return free_address()

    def make(
        self, worker: str, config: dict[str, Any], rank: int, world_size: int, init_address: str
    ) -> None:
        """Load and make the worker class that the config names."""
        sys.path.insert(0, config["_working_dir"])
        plain = {key: value for key, value in config.items() if key != "_working_dir"}
        self._worker = load_object(worker, what="trainer worker")(plain, rank, world_size, init_address)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*arguments)

    def train_on_copy(self, frame: Any, step: int) -> Any:
        """`train_step` on a batch that travelled through the object store, because its file is on another
        host.
        """
        with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="async_rl_batch_") as file:
            file.write(frame)
            file.flush()
            return self._worker.train_step(file.name, step)


class EngineActor:
    """Owns one SGLang server process: it dies with this actor."""

    def __init__(self, config: dict[str, Any], index: int, log_dir: str, driver_node: str) -> None:
        die_with_parent()
        parsed = parse_config(config)
        assert isinstance(parsed.engine, SGLangEngines)
        elsewhere = ray.get_runtime_context().get_node_id() != driver_node
        self._server = SGLangServer(
            parsed.engine,
            parsed.model,
            routing=parsed.routing.from_engine,
            index=index,
            log_dir=Path(log_dir),
            seed=parsed.run.seed,
            advertise_host=node_address() if elsewhere else None,
        )

    async def process(self) -> Process:
        """Which process this is."""
        return this_process(ray.get_runtime_context().get_node_id())

    async def start(self) -> tuple[str, str, str]:
        """Start (again); URL, API key and admin key."""
        await self._server.start()
        return self._server.url, self._server.api_key, self._server.admin_key

    async def wait(self) -> str:
        """Wait until the server process ends; its last words."""
        await self._server.wait()
        return self._server.last_words()

    async def died(self) -> str | None:
        """Its last words when it has ended, else None."""
        return await self._server.died()

    async def stop(self) -> None:
        """End the server process."""
        await self._server.stop()


def node_address() -> str:
    """Where this node is reached by the others; 127.0.0.1 where Ray is of one machine."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def free_address() -> tuple[str, int]:
    """This node's address and a port that is free now."""
    host = node_address()
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]


def redirect_output(path: str) -> None:
    """Send everything this process prints to its own log in the run folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
