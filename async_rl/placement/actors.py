"""The actors in processes that Ray starts: a trainer rank, and the owner of an SGLang server."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import psutil
import ray

from async_rl.config import parse_config
from async_rl.engines.sglang.server import SGLangServer
from async_rl.engines.sglang.server_checks import ServerState
from async_rl.errors import EnvironmentNotReady
from async_rl.placement.shared_devices import Device
from async_rl.runtime.addresses import NODE_ADDRESS, is_loopback
from async_rl.runtime.files import private_folder
from async_rl.runtime.loading import add_import_folder, load_object
from async_rl.runtime.package_warnings import hide_package_warnings
from async_rl.runtime.processes import Process, die_with_parent, this_process
from async_rl.weights.weight_folder import WeightFolder, remove_left_folders


class ActorSetup(msgspec.Struct, frozen=True):
    """How an actor finds the files of the run on its node; the same for all actors of a run."""

    folder: str
    """The driver's working folder, so that relative paths mean the same everywhere."""
    marker_path: str
    """A file in the run's folder, by which an actor checks that the folder is the driver's."""
    marker: str
    """The content of that file."""
    driver_node: str
    import_folders: tuple[str, ...] = ()
    """Where the driver looks for the user's modules beside its working folder."""


class NodeActor:
    """Base class of all actors of a run."""

    def join_run(self, setup: ActorSetup, log_path: str | None) -> Process:
        """Change to the driver's working folder, check that the run's folder is shared, and return this
        process.

        Args:
            setup: Describes the run's files.
            log_path: Log file for all output of this process; None leaves it to Ray.

        Raises:
            EnvironmentNotReady: This node does not see the driver's files.
        """
        enter_driver_folder(setup, node_address())
        for folder in setup.import_folders:
            add_import_folder(Path(folder))
        hide_package_warnings()
        if log_path is not None:
            redirect_output(log_path)
        use_interface_of(node_address())
        os.environ[NODE_ADDRESS] = node_address()
        return this_process(ray.get_runtime_context().get_node_id())


def use_private_compile_cache() -> None:
    """Let torch.compile keep its code, which it loads again, where no other user can have put any.

    Its own default is a folder of a known name in /tmp, whose owner it does not check.

    Raises:
        EnvironmentNotReady: Another user has made the folder.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    try:
        folder = private_folder(Path(tempfile.gettempdir()) / f"async-rl-compiled-{os.getuid()}")
    except OSError as error:
        raise EnvironmentNotReady(
            f"no folder for compiled code: {error}; have it removed, or set TORCHINDUCTOR_CACHE_DIR"
        ) from error
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def prepare_rank_environment(cpus: float, *, shares_gpu: bool) -> None:
    """Set what OpenMP, NCCL and CUDA of a trainer rank read when they start.

    Args:
        cpus: The cores that Ray has reserved for the rank.
        shares_gpu: Whether the rank alternates with an engine on its GPU.
    """
    # OpenMP threads of several ranks that spin for each other stall a machine with few cores for seconds.
    os.environ["OMP_NUM_THREADS"] = str(max(1, int(cpus)))
    # As SGLang sets it: ranks and engines that broadcast weights to each other must allocate alike.
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    # Megatron starts an exchange right before the kernels that it overlaps with: in one hardware queue these
    # do not delay it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # torch rounds pinned memory up to a power of two, by which smaller blocks are reused. The buffer of a
    # checkpoint may take 90 GB, and would take 137.
    settings = ["pinned_max_round_threshold_mb:1024"]
    if not shares_gpu:
        # Micro-batches differ in length: memory in fixed segments would be cut into pieces too small for the
        # next one. torch-memory-saver, which empties a shared GPU, does not work with these.
        settings.append("expandable_segments:True")
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = ",".join(settings)


class RankActor(NodeActor):
    """One trainer rank in a process of its own."""

    def __init__(self, cpus: float, gpu: str | None = None) -> None:
        die_with_parent()
        if gpu is not None:  # shared with an engine, to which Ray has assigned it
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        prepare_rank_environment(cpus, shares_gpu=gpu is not None)
        use_private_compile_cache()
        self._worker: Any = None

    def free_address(self) -> tuple[str, int]:
        """Return a host and a free port of this node."""
        return free_address()

    def make_worker(
        self, worker: str, config: dict[str, Any], rank: int, world_size: int, init_address: str
    ) -> None:
        """Load the worker class that the config names and construct the worker."""
        self._worker = load_object(worker, what="trainer worker")(config, rank, world_size, init_address)

    def call_worker(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*arguments)


class EngineActor(NodeActor):
    """Owns one SGLang server process, or one node's part of it, which ends with this actor."""

    def __init__(
        self, server: type[SGLangServer], config: dict[str, Any], index: int, log_dir: str, node_rank: int = 0
    ) -> None:
        die_with_parent()
        parsed = parse_config(config)
        self._index = index
        self._server = server(
            parsed, index=index, log_dir=Path(log_dir), node_address=node_address(), node_rank=node_rank
        )
        run = hashlib.sha256(str(Path(log_dir).absolute()).encode()).hexdigest()[:16]
        # The next incarnation of the run uses the same names and removes what this one left.
        folders, prefix = Path(parsed.weights.local_dir), f"async_rl-weights-{run}-"
        self._folder = WeightFolder(folders / f"{prefix}{index}")
        remove_left_folders(folders, prefix)

    def join_run(self, setup: ActorSetup, log_path: str | None) -> Process:
        """Join the run as `NodeActor.join_run` does, and check that the driver can reach the server.

        Raises:
            EnvironmentNotReady: This node does not see the driver's files, or its server would not be
                reachable.
        """
        process = super().join_run(setup, log_path)
        elsewhere = process.host != setup.driver_node and not is_loopback(node_address())
        if elsewhere and is_loopback(self._server.host):
            raise EnvironmentNotReady(
                f"engine.host keeps engine-{self._index} to the loopback interface of node {node_address()}, "
                "which the driver cannot reach: set engine.host=auto"
            )
        return process

    async def devices(self) -> list[Device]:
        """Return the GPUs that Ray has assigned to the server."""
        context = ray.get_runtime_context()
        return [Device(context.get_node_id(), gpu) for gpu in context.get_accelerator_ids().get("GPU", [])]

    async def rendezvous(self) -> str:
        """Return an address for `start_server` of all parts of an engine."""
        return self._server.rendezvous()

    async def start_server(self, rendezvous: str | None) -> tuple[str, str, str]:
        """Start or restart the server; return its URL, API key and admin key."""
        await self._server.start(rendezvous)
        return self._server.url, self._server.api_key, self._server.admin_key

    async def wait_exit(self) -> str:
        """Wait until the server process ends, and return its exit reason."""
        await self._server.wait()
        return self._server.exit_reason()

    async def server_state(self) -> ServerState:
        """Return whether and why the server process has ended, and what it compiles."""
        return await self._server.state()

    async def stop_server(self) -> None:
        """End the server process and remove its local weights."""
        await self._server.stop()
        await asyncio.to_thread(self._folder.clear_folder)

    async def copy_version(self, path: str, version: int) -> str:
        """Copy full weights into this host's folder, and return its path."""
        return await asyncio.to_thread(self._folder.copy_version, path, version)

    async def apply_delta(self, path: str) -> str:
        """Apply a delta to this host's copy of the weights, and return its path."""
        return await asyncio.to_thread(self._folder.apply_delta, path)


def enter_driver_folder(setup: ActorSetup, node: str) -> None:
    """Change to the driver's working folder, and check that its files are the driver's.

    Raises:
        EnvironmentNotReady: The folder is missing, is not the driver's, or cannot be written.
    """
    os.umask(0o077)  # like the driver's: only the run's user may read its files
    remedy = (
        "put the config, the model and run.dir on a file system that all nodes share, under the same path"
    )
    try:
        os.chdir(setup.folder)
    except OSError as error:
        raise EnvironmentNotReady(
            f"node {node} has no folder {setup.folder}, where the driver runs ({error.strerror}): {remedy}"
        ) from error
    try:
        marker = Path(setup.marker_path).read_text()
    except OSError as error:
        marker = str(error.strerror)
    if marker != setup.marker:
        raise EnvironmentNotReady(
            f"node {node} does not see what the driver writes into {Path(setup.marker_path).parent} "
            f"({marker[:80]}): weights and checkpoints go through it; {remedy}"
        )
    if not os.access(Path(setup.marker_path).parent, os.W_OK):
        raise EnvironmentNotReady(
            f"node {node} may not write into {Path(setup.marker_path).parent}: run Ray as the same user on "
            "all nodes"
        )


def use_interface_of(address: str) -> None:
    """Make Gloo and NCCL use the interface that has an address, unless the environment names one.

    They would otherwise use the host's name or the first active interface, which other nodes may not reach.
    """
    name = interface_of(address)
    if name is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if not is_loopback(address):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # "=": exactly this one


def interface_of(address: str) -> str | None:
    """Return the interface of this host that has an address, or whose network contains it."""
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
    """Return the address at which other nodes reach this one; 127.0.0.1 if Ray runs on one machine."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def free_address() -> tuple[str, int]:
    """Return this node's address and a port that is free now."""
    host = node_address()
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]


def redirect_output(path: str) -> None:
    """Send all output of this process to a log file in the run folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
