"""What runs in the processes that Ray starts: a trainer rank, and the owner of an SGLang server."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import ray

from async_rl.config import SGLangEngines, parse_config
from async_rl.engines.sglang.connect import is_loopback
from async_rl.engines.sglang.server import SGLangServer
from async_rl.errors import EnvironmentNotReady
from async_rl.placement.shared_devices import Device
from async_rl.runtime.loading import load_object
from async_rl.runtime.processes import Process, die_with_parent, this_process
from async_rl.weights.weight_folder import WeightFolder


class ActorHome(msgspec.Struct, frozen=True):
    """What an actor must know to be at home on its node; the same for all actors of a run."""

    folder: str
    """The driver's working folder: relative paths mean the same everywhere."""
    sign: str
    """A file in the run's folder, by which an actor sees that the folder is the driver's own."""
    word: str
    """What is written in it."""
    driver_node: str


class NodeActor:
    """What ranks and owners of servers have in common."""

    def arrive(self, home: ActorHome, log_path: str | None) -> Process:
        """Go to the driver's folder and look whether the run's folder is shared; which process this is.

        Args:
            home: Of the run.
            log_path: Where all that this process prints goes; None leaves it to Ray.

        Raises:
            EnvironmentNotReady: When this node does not see the driver's files.
        """
        go_to_work(home, node_address())
        if log_path is not None:
            redirect_output(log_path)
        use_interface_of(node_address())
        return this_process(ray.get_runtime_context().get_node_id())


class RankActor(NodeActor):
    """One trainer rank in a process of its own."""

    def __init__(self, cpus: float, gpu: str | None = None) -> None:
        die_with_parent()
        if gpu is not None:  # one that it shares with an engine, to which Ray has given it
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        # Several ranks of OpenMP threads that spin for each other stall a machine of few cores for seconds.
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(cpus)))
        self._worker: Any = None
        self._frame: SharedFrame | None = None

    def address(self) -> tuple[str, int]:
        """A host and free port of this node."""
        return free_address()

    def make(
        self, worker: str, config: dict[str, Any], rank: int, world_size: int, init_address: str
    ) -> None:
        """Load and make the worker class that the config names."""
        sys.path.insert(0, os.getcwd())
        self._worker = load_object(worker, what="trainer worker")(config, rank, world_size, init_address)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*arguments)

    def hold(self, frame: Any) -> str:
        """Keep a batch that travelled through the object store for all ranks of this node; its path.

        Args:
            frame: `[bytes] uint8`, in this node's store.
        """
        self._frame = None  # of the step before
        self._frame = SharedFrame(frame)
        return self._frame.path


class EngineActor(NodeActor):
    """Owns one SGLang server process: it dies with this actor."""

    def __init__(self, server: type[SGLangServer], config: dict[str, Any], index: int, log_dir: str) -> None:
        die_with_parent()
        parsed = parse_config(config)
        assert isinstance(parsed.engine, SGLangEngines)
        self._index = index
        self._server = server(
            parsed.engine,
            parsed.model,
            routing=parsed.routing.from_engine,
            index=index,
            log_dir=Path(log_dir),
            seed=parsed.run.seed,
            shared=parsed.placement.shared,
            node_address=node_address(),
        )
        run = hashlib.sha256(str(Path(log_dir).absolute()).encode()).hexdigest()[:16]
        # The same in the next life, which removes what this one left.
        name = f"async_rl-weights-{run}-{index}"
        self._folder = WeightFolder(Path(parsed.weights.local_dir) / name)

    def arrive(self, home: ActorHome, log_path: str | None) -> Process:
        """See `Actor.arrive`.

        Raises:
            EnvironmentNotReady: Also when nobody would reach the server.
        """
        process = super().arrive(home, log_path)
        elsewhere = process.host != home.driver_node and not is_loopback(node_address())
        if elsewhere and is_loopback(self._server.host):
            raise EnvironmentNotReady(
                f"engine.host keeps engine-{self._index} to the loopback interface of node {node_address()}, "
                "where the driver does not reach it: set engine.host=auto"
            )
        return process

    async def devices(self) -> list[Device]:
        """The GPUs that Ray has given to its server."""
        context = ray.get_runtime_context()
        return [Device(context.get_node_id(), gpu) for gpu in context.get_accelerator_ids().get("GPU", [])]

    async def start(self) -> tuple[str, str, str]:
        """Start (again); URL, API key and admin key."""
        await self._server.start()
        return self._server.url, self._server.api_key, self._server.admin_key

    async def wait(self) -> str:
        """Wait until the server process ends; its last words."""
        await self._server.wait()
        return self._server.exit_reason()

    async def died(self) -> str | None:
        """Its last words when it has ended, else None."""
        return await self._server.died()

    async def stop(self) -> None:
        """End the server process."""
        await self._server.stop()
        await asyncio.to_thread(self._folder.clear_folder)

    async def copy_version(self, path: str, version: int) -> str:
        """See `WeightFolder.copy_version`."""
        return await asyncio.to_thread(self._folder.copy_version, path, version)

    async def apply_delta(self, path: str) -> str:
        """See `WeightFolder.apply_delta`."""
        return await asyncio.to_thread(self._folder.apply_delta, path)


class SharedFrame:
    """Bytes in memory under a path that other processes of this host and user can open.

    The path is of this process (an anonymous file), so nothing is left behind when it is killed.
    """

    def __init__(self, data: Any) -> None:
        self._file = os.memfd_create("async_rl_batch", os.MFD_CLOEXEC)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]

    @property
    def path(self) -> str:
        """Good for as long as this object."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def __del__(self) -> None:
        os.close(self._file)


def go_to_work(home: ActorHome, node: str) -> None:
    """Make the driver's working folder this process's, and check that its files are the driver's.

    Raises:
        EnvironmentNotReady: What this node lacks.
    """
    os.umask(0o077)  # as the driver's: what a run writes is for its user alone
    remedy = (
        "put the config, the model and run.dir on a file system that all nodes share, under the same path"
    )
    try:
        os.chdir(home.folder)
    except OSError as error:
        raise EnvironmentNotReady(
            f"node {node} has no folder {home.folder}, where the driver runs ({error.strerror}): {remedy}"
        ) from error
    try:
        word = Path(home.sign).read_text()
    except OSError as error:
        word = str(error.strerror)
    if word != home.word:
        raise EnvironmentNotReady(
            f"node {node} does not see what the driver writes into {Path(home.sign).parent} ({word[:80]}): "
            f"weights and checkpoints go through it; {remedy}"
        )
    if not os.access(Path(home.sign).parent, os.W_OK):
        raise EnvironmentNotReady(
            f"node {node} may not write into {Path(home.sign).parent}: run Ray as the same user on all nodes"
        )


def use_interface_of(address: str) -> None:
    """Let Gloo and NCCL talk over the interface that has an address, unless the environment names one.

    They would go by the host's name, or take the first interface that is up, which may be one that the other
    nodes do not reach.
    """
    name = interface_of(address)
    if name is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if not is_loopback(address):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # "=": exactly this one


def interface_of(address: str) -> str | None:
    """The interface of this host that has an address, or whose network it is in."""
    wanted = ipaddress.ip_address(address)
    near = None
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            if found.family not in (socket.AF_INET, socket.AF_INET6) or found.netmask is None:
                continue
            own = found.address.partition("%")[0]
            if ipaddress.ip_address(own) == wanted:
                return str(name)
            if found.family == socket.AF_INET and wanted in ipaddress.ip_network(
                f"{own}/{found.netmask}", strict=False
            ):
                near = name
    return near


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
