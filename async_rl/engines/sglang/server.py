"""Starts one SGLang server or one node's part of it, watches it, and ends it with all processes it started.

On a GPU it runs `hidden_keys.py`, or `memory_gate.py` where the trainer shares the device; on a CPU
`cpu_launcher.py`; on both `narrow_launcher.py` if routing is sent as narrow ids. All run under
`guard.py`, so that no server outlives the process that started it; where the guard is killed alone, its group
is ended here. The class does not depend on Ray: it works in the driver, in a Ray actor and in a test.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from async_rl.config import Config, SGLangEngines
from async_rl.engines.model_facts import load_facts
from async_rl.engines.sglang import aborted_rows, guard, narrow_launcher
from async_rl.engines.sglang.adapter_flags import adapter_flags
from async_rl.engines.sglang.server_checks import ServerState
from async_rl.errors import EnvironmentNotReady
from async_rl.runtime.devices import detect_device
from async_rl.runtime.files import socket_folder

_HERE = Path(__file__).parent

_CPU_KV_TOKENS = 1 << 16
"""KV cache of a CPU engine without a configured size: SGLang would take a share of the host's memory."""

_BELOW_TMPDIR = len("/async-rl-12345678/pymp-12345678/listener-12345678")
"""The longest path of a socket of a server below its temporary folder, bytes."""

_EXIT_REASON_LINES = 25

_COMPILERS = ("ninja", "nvcc", "cicc", "ptxas", "cudafe++", "cc1plus")
"""Names of programs that compile kernels."""

_GPU_GRACE_S = 15.0
"""Time for a server with a GPU to end by itself before it is killed, so that it frees the GPU's memory."""

_STOP_LIMIT_S = 30.0

_POLL_S = 0.05
"""Interval at which killed processes are looked for that are not children of this one."""

_EVERYWHERE = ("0.0.0.0", "::")
"""Addresses that can be bound to but not connected to."""

PORTS = range(15000, 30000)
"""Below the ephemeral range: while a server starts, no outgoing connection can take its port."""


class SGLangServer:
    """One SGLang server process.

    The port and both keys are chosen once, so that a restarted server keeps its address. The keys are passed
    in a file that only this user can read, not on the command line, which all users of the host can read.
    """

    def __init__(
        self,
        config: Config,
        *,
        index: int,
        log_dir: Path,
        node_address: str | None = None,
        node_rank: int = 0,
    ) -> None:
        """Choose address and keys; start nothing.

        Args:
            config: The run's config, with SGLang engines, or `Config.of_model` of it.
            index: Number of this engine; names its log.
            log_dir: Folder for `engine-<index>.log`.
            node_address: Address of this host in a cluster, to which `engine.host: auto` binds; None on a
                single machine.
            node_rank: Which of the engine's `num_nodes` nodes this is; the first one answers requests.
        """
        self._config = config
        self._index = index
        engine = self._engine
        self._device = detect_device() if engine.device == "auto" else engine.device
        here = node_address or "127.0.0.1"
        self._bind = here if engine.host == "auto" else engine.host
        self._host = here if self._bind in _EVERYWHERE else self._bind
        self._port = free_port(self._bind)
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        self._changing = asyncio.Lock()
        """Held by `start` and `stop`: one that was given up may still run in its actor."""
        self._log_begin = 0
        self._node_rank = node_rank
        self._rendezvous: str | None = None
        self.log_path = log_dir / (
            f"engine-{index}-node-{node_rank}.log" if node_rank else f"engine-{index}.log"
        )
        self.api_key = secrets.token_hex(24)
        self.admin_key = secrets.token_hex(24)

    @property
    def _engine(self) -> SGLangEngines:
        assert isinstance(self._config.engine, SGLangEngines), "only real engines have servers"
        return self._config.engine

    @property
    def _narrow(self) -> bool:
        """Whether it sends routing as narrow ids."""
        return self._config.routing.from_engine and self._engine.narrow_routing

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://{self._host}:{self._port}"

    @property
    def host(self) -> str:
        """Address of the server."""
        return self._host

    @property
    def pid(self) -> int | None:
        """Process id of the guard, which leads the server's process group."""
        return self._process.pid if self._process is not None else None

    def rendezvous(self) -> str:
        """Return an address at which the parts of an engine on several nodes can meet, for `start`."""
        return f"{self._host}:{free_port(self._bind)}"

    async def start(self, rendezvous: str | None = None) -> None:
        """Start the process (again); `SGLangEngine.wait_ready` waits until it answers.

        Args:
            rendezvous: Where the parts of an engine on several nodes meet, on the first one's node; another
                one at each start.

        Raises:
            EnvironmentNotReady: When SGLang is not installed, the process cannot be started, or the one
                before cannot be ended.
        """
        async with self._changing:
            await self._start(rendezvous)

    async def _start(self, rendezvous: str | None) -> None:
        if self.poll() is None and self._process is not None:
            raise EnvironmentNotReady(f"engine {self._index} runs already (pid {self._process.pid})")
        await self._clear_ended()
        check_sglang(narrow=self._narrow, saves_memory=self._saves_memory)
        self._rendezvous = rendezvous
        self._process = self._spawn()

    @property
    def _saves_memory(self) -> bool:
        """Whether memory is really released. Without it SGLang accepts the requests, which suits a CPU."""
        return self._config.placement.shared and self._device == "cuda"

    @property
    def _keeps_weights(self) -> bool:
        """Whether it keeps the model's weights in host memory while the trainer works: adapters are loaded
        onto them, and nothing else brings them back.
        """
        return self._config.placement.shared and self._config.adapters is not None

    def _spawn(self) -> subprocess.Popen[bytes]:
        scratch = self._scratch = Path(tempfile.mkdtemp(prefix="async-rl-", dir=socket_folder(_BELOW_TMPDIR)))
        keys = scratch / "keys.yaml"
        keys.touch(mode=0o600)
        keys.write_text(f'api-key: "{self.api_key}"\nadmin-api-key: "{self.admin_key}"\n')
        grace_s = 0.0 if self._device == "cpu" else _GPU_GRACE_S
        program = [sys.executable, "-I", guard.__file__, str(os.getpid()), str(scratch), str(grace_s)]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            self._log_begin = log.tell()
            return subprocess.Popen(
                [*program, *self.command(), "--config", str(keys)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(scratch),
                start_new_session=True,
            )

    def command(self) -> list[str]:
        """Return the server's command line, without the keys."""
        config, engine = self._config, self._engine
        # -P keeps the launcher's own folder, and the current one, off the import path.
        cpu = self._device == "cpu"
        module = "memory_gate" if config.placement.shared else "hidden_keys"
        launcher = (
            ["-P", str(_HERE / "cpu_launcher.py")]
            if cpu
            else ["-P", "-m", f"async_rl.engines.sglang.{module}"]
        )
        if self._narrow:
            facts = load_facts(config.model.path)
            layers = ",".join(map(str, facts.moe_layers))
            launcher = ["-P", "-m", "async_rl.engines.sglang.narrow_launcher", layers, str(facts.num_experts)]
        arguments = {
            "model-path": config.model.path,
            "dtype": config.model.dtype,
            "device": self._device,
            "host": self._bind,
            "port": self._port,
            "tp-size": engine.tp_size,
            "nnodes": engine.num_nodes if engine.num_nodes > 1 else None,
            "node-rank": self._node_rank if engine.num_nodes > 1 else None,
            "dist-init-addr": self._rendezvous,
            "max-running-requests": engine.max_running_requests,
            "context-length": engine.context_length,
            "max-total-tokens": engine.max_total_tokens,
            "random-seed": (config.run.seed * 1000 + self._index) % 2**32,  # NumPy takes no larger one
            "weight-version": 0,
            # At "info" SGLang logs its whole configuration, including the keys.
            "log-level": "warning",
        }
        switches = ["incremental-streaming-output"]
        if config.routing.from_engine:
            switches.append("enable-return-routed-experts")
        if self._saves_memory:
            switches.append("enable-memory-saver")
        if self._keeps_weights:
            switches.append("enable-weights-cpu-backup")
        if cpu:
            arguments["attention-backend"] = "torch_native"
            arguments["max-total-tokens"] = engine.max_total_tokens or _CPU_KV_TOKENS
            # An interrupt waits for the running forward pass: on a CPU, a long prefill takes hundreds of ms.
            arguments["chunked-prefill-size"] = 256
            # On few cores a step can take long while trainers use them; that is not a hang.
            arguments["watchdog-timeout"] = 600
            # Otherwise an idle scheduler uses a whole core to poll its sockets.
            switches += ["sleep-on-idle", "skip-server-warmup"]
        options = [f"--{key}={value}" for key, value in arguments.items() if value is not None]
        if config.adapters is not None:
            flags = adapter_flags(config.adapters, load_facts(config.model.path), self._device)
            options = [*flags, *options]
        return [sys.executable, *launcher, *options, *(f"--{s}" for s in switches), *engine.extra_args]

    def environment(self, scratch: Path) -> dict[str, str]:
        """Return the environment of the server's processes, which have `scratch` for temporary files."""
        # SGLang creates its sockets in the temporary folder, and does not remove them.
        environment = {**os.environ, "TMPDIR": str(scratch), "TOKENIZERS_PARALLELISM": "false"}
        # Our connections are idle between turns for as long as tools take.
        environment |= {"SGLANG_TIMEOUT_KEEP_ALIVE": "60"}
        # When one of its processes dies, a server must end at once; by default it first collects debug
        # information for up to a minute, while its calls wait.
        environment |= {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        # SGLang and what it imports warn of kernels and packages that they could use.
        environment = {"PYTHONWARNINGS": "ignore"} | environment
        if self._saves_memory:
            environment |= {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
        if self._saves_memory and self._keeps_weights:
            # Pinning host memory takes longer than copying, so it is pinned once and not in each phase.
            environment |= {"TMS_RETAIN_CPU_BACKUP": "1"}
        # As the trainer's ranks have it, which broadcast weights to this server.
        environment.setdefault("NCCL_CUMEM_ENABLE", "0")
        if self._device == "cpu":
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            # SGLang wants a NUMA node for each tensor-parallel rank, or a list of cores.
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            environment |= {"SGLANG_CPU_OMP_THREADS_BIND": "|".join([cores] * self._engine.tp_size)}
        return environment

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs or before it was started.

        A guard that was killed alone has left its server, which is killed here.
        """
        if self._process is None:
            return None
        if self._process.returncode is None:
            with suppress(ChildProcessError, ProcessLookupError):
                if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return None
                # Until the guard is reaped, no other process and no other group can have its number.
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.poll()

    async def wait(self) -> int:
        """Wait until the process ends; return its exit code."""
        assert self._process is not None, "wait() before start()"
        if self.poll() is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            descriptor = os.pidfd_open(self._process.pid)
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
            self.poll()
        return self._process.wait()

    async def state(self) -> ServerState:
        """Return whether and why it has ended, and what it compiles, for `SGLangEngine.wait_ready`."""
        if self._process is None or self.poll() is not None:
            return ServerState(self.exit_reason())
        return ServerState(compilers=frozenset(await asyncio.to_thread(compilers_of, self._process.pid)))

    def exit_reason(self) -> str:
        """Return the exit code, the end of the log, and the path of the log."""
        code = "was not started" if self._process is None else f"ended with code {self.poll()}"
        try:
            with open(self.log_path, errors="replace") as log:
                log.seek(self._log_begin)
                lines = deque((line.rstrip() for line in log if line.strip()), maxlen=_EXIT_REASON_LINES)
        except FileNotFoundError:
            lines = deque()
        part = f" on its node {self._node_rank}" if self._engine.num_nodes > 1 else ""
        return "\n  ".join([f"engine {self._index}{part} {code}; the end of {self.log_path}:", *lines])

    async def stop(self) -> None:
        """End the server and all processes it started, even stopped ones; returns when they have ended.

        Raises:
            EnvironmentNotReady: Some have not ended long after they were killed.
        """
        async with self._changing:
            await self._stop()

    async def _stop(self) -> None:
        if self._process is None:
            return
        if self.poll() is None:
            # Not by `Popen`, which would reap a guard that was killed meanwhile.
            os.kill(self._process.pid, signal.SIGCONT)  # the guard may be stopped too; it kills all others
            os.kill(self._process.pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(_GPU_GRACE_S + _STOP_LIMIT_S):
                    await self.wait()
            except TimeoutError:
                os.killpg(self._process.pid, signal.SIGKILL)
                await self.wait()
        await self._clear_ended()

    async def _clear_ended(self) -> None:
        """Wait for what a guard has left that was killed, and remove its scratch folder.

        Raises:
            EnvironmentNotReady: Some processes have not ended long after they were killed.
        """
        if self._process is None or self._scratch is None:
            return
        if left := await asyncio.to_thread(_wait_group_ended, self._process.pid, _STOP_LIMIT_S):
            raise EnvironmentNotReady(
                f"engine {self._index}: processes {left} still run {_STOP_LIMIT_S:g} s after they were killed"
            )
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)


def _wait_group_ended(group: int, limit_s: float) -> list[int]:
    """Wait until the processes have ended of a group whose leader has; return those left at the limit."""
    end_s = time.monotonic() + limit_s
    while left := guard.members(group):
        if Path(f"/proc/{group}").exists():  # a later process has the number, and leads another group
            return []
        if time.monotonic() > end_s:
            break
        time.sleep(_POLL_S)
    return left


def compilers_of(group: int) -> list[int]:
    """Return the processes of a group that compile: SGLang compiles kernels when it first needs them."""
    found = []
    for process in guard.members(group):
        with suppress(OSError):
            if Path(f"/proc/{process}/comm").read_text().strip() in _COMPILERS:
                found.append(process)
    return found


def check_sglang(*, narrow: bool, saves_memory: bool) -> None:
    """Check that the packages are installed that a server needs.

    Args:
        narrow: Whether it sends narrow routing, for which it is patched.
        saves_memory: Whether it releases its memory while the trainer works.

    Raises:
        EnvironmentNotReady: One is missing or has another version.
    """
    try:
        installed = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as e:
        raise EnvironmentNotReady(
            "sglang is not installed here: `make setup` installs it for a CPU, `make setup-gpu` for a GPU"
        ) from e
    if saves_memory and find_spec("torch_memory_saver") is None:
        raise EnvironmentNotReady(
            "placement.shared: SGLang releases device memory by torch-memory-saver, which is not "
            "installed here: `pip install torch-memory-saver`"
        )
    if narrow and installed != aborted_rows.SUPPORTED:
        raise EnvironmentNotReady(narrow_launcher.wrong_version(installed))


def free_port(host: str) -> int:
    """Return a free port."""
    for port in random.SystemRandom().sample(PORTS, k=100):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise EnvironmentNotReady(f"found no free port on {host} between {PORTS.start} and {PORTS.stop}")
