"""A Ray cluster of several nodes on this machine; each has an address of its own in 127.0.0.0/8."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from async_rl.engines.sglang.server import free_port

_RAY = Path(sys.executable).with_name("ray")
_TRIES = 4


class RayNodes:
    """Nodes as `ray start` makes them, closed by a token.

    Example:
        >>> with RayNodes() as nodes:
        ...     nodes.start()
        ...     other = nodes.start(engines=1)
        ...     nodes.take_away(other)
    """

    def __init__(self, **environment: str) -> None:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once a process
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
            "RAY_gcs_server_port_wait_time_s": "120",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self.address = ""
        """The address of the head, once it runs."""
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._numbers = count(2)
        self._folder = tempfile.TemporaryDirectory(prefix="n", ignore_cleanup_errors=True)

    def start(self, *, cpus: int = 1, gpus: int = 0, **resources: float) -> str:
        """Start a node, the head if it is the first, wait until it has joined, and return its address.

        The GPUs are only counted: no process finds any. Ray allows a node half a minute to start, which is
        short on a busy machine: a failed start is repeated.
        """
        for _ in range(_TRIES):
            own = f"127.0.0.{next(self._numbers)}"
            port = free_port(own)
            offered = [f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--resources={json.dumps(resources)}"]
            process = self.nodes[own] = self._start(own, port, offered)
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line.decode())
                if "Ray runtime started" in said[-1]:
                    self.address = self.address or f"{own}:{port}"
                    return own
            process.wait()
            process.stdout.close()
            del self.nodes[own]
        raise AssertionError("a node did not start: " + "".join(said))

    def _start(self, own: str, port: int, offered: list[str]) -> subprocess.Popen[bytes]:
        head = ["--head", f"--port={port}", "--include-dashboard=false"]
        role = ["--address", self.address] if self.address else head
        folder = Path(self._folder.name) / own
        folder.mkdir()
        return subprocess.Popen(
            [
                *(_RAY, "start", "--block", "--disable-usage-stats", *role),
                *(f"--node-ip-address={own}", f"--object-store-memory={80 << 20}", f"--temp-dir={folder}"),
                *offered,
                *("--min-worker-port=0", "--max-worker-port=0"),  # any: a fixed range may hold the head's own
            ],
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def node_of(self, pid: int) -> str:
        """Return the node of an actor's process."""
        raylet = psutil.Process(pid).parents()[0].cmdline()
        return next(word.partition("=")[2] for word in raylet if word.startswith("--node_ip_address="))

    def nodes_with(self, program: str) -> set[str]:
        """Return the nodes on which a process runs whose command line contains a word."""
        found = set()
        for address, node in self.nodes.items():
            for one in psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []:
                with suppress(psutil.NoSuchProcess):
                    if program in " ".join(one.cmdline()):
                        found.add(address)
        return found

    def kill(self, program: str) -> None:
        """Kill processes on any node whose command line contains a word."""
        for node in self.nodes.values():
            for one in psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []:
                with suppress(psutil.NoSuchProcess):
                    if program in " ".join(one.cmdline()):
                        one.kill()

    def take_away(self, node: str) -> None:
        """End a node and all its processes, like a preempted machine: its raylet still deregisters."""
        process = self.nodes[node]
        family = psutil.Process(process.pid).children(recursive=True)
        for one in family:
            with suppress(psutil.NoSuchProcess):
                # One that is killed is missed after a quarter of a minute, one that is asked to end says so.
                if one.name() == "raylet":
                    one.terminate()
                else:
                    one.kill()
        process.kill()
        process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.nodes.values():
            if process.poll() is None:
                for one in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        one.kill()
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._folder.cleanup()
