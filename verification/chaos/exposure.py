"""Observes what a run exposes to other users: ports, command lines, files and endpoints, without any key."""

from __future__ import annotations

import ipaddress
import os
import re
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from verification.chaos.evidence import Processes

_KEY = re.compile(r'^(?:admin-)?api-key: "([0-9a-f]+)"$', re.MULTILINE)


class Exposure(msgspec.Struct):
    """Findings over a run; empty lists and sets mean that nothing is exposed."""

    num_listening: int = 0
    """Sockets that were listening, so that a test does not pass when nothing was observed."""
    open_to_others: set[str] = msgspec.field(default_factory=set)
    """Sockets that listen on other interfaces than loopback, with their process."""
    secrets: set[str] = msgspec.field(default_factory=set)
    """Keys of the engines and the token of Ray."""
    leaks: set[str] = msgspec.field(default_factory=set)
    """Places where others can read one of the keys."""
    readable: set[str] = msgspec.field(default_factory=set)
    """Files and folders that other users may open."""

    def look(self, processes: Processes, run_dir: Path, output: Path, port: int) -> None:
        """Observes everything once during the run.

        Args:
            processes: Processes of the run.
            run_dir: Folder of the run.
            output: Output of the driver.
            port: Port of the metrics endpoint.
        """
        shown: dict[str, str] = {}
        for process in [process for role in processes.look().values() for process in role]:
            with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                command = process.cmdline()
                shown[f"command line of {process.name()}"] = " ".join(command)
                self._ports(process)
                self._keys(process, command)
        for path in ("metrics", "health"):
            with (
                suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as answer,
            ):
                shown[f"/{path}"] = answer.read().decode()
        paths = sorted(_paths(run_dir))
        for path in [output, *(path for path in paths if path.is_file())]:
            with suppress(FileNotFoundError):
                shown[str(path)] = path.read_bytes().decode("latin-1")
        for path in [run_dir, *paths]:
            self._private(path)
        self.leaks |= {where for where, text in shown.items() if any(key in text for key in self.secrets)}

    def _ports(self, process: psutil.Process) -> None:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                self.num_listening += 1
                address = ipaddress.ip_address(connection.laddr.ip)
                address = getattr(address, "ipv4_mapped", None) or address
                if not address.is_loopback:
                    self.open_to_others.add(f"{process.name()} on {connection.laddr.ip}")

    def _keys(self, process: psutil.Process, command: list[str]) -> None:
        token = process.environ().get("RAY_AUTH_TOKEN")
        if token is not None:
            self.secrets.add(token)
        for word in command:
            if word.startswith("--temp_dir="):  # Ray makes it readable by all, so its parent must not be
                self._private(Path(word.removeprefix("--temp_dir=")).parent)
            if word.endswith("/keys.yaml"):
                self.secrets.update(_KEY.findall(Path(word).read_text()))
                self._private(Path(word))
                self._private(Path(word).parent)

    def _private(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            if path.stat().st_mode & 0o077:
                self.readable.add(f"{path} {path.stat().st_mode & 0o777:o}")


def _paths(folder: Path) -> Iterator[Path]:
    """Yield everything in a folder, of which the run may delete parts meanwhile."""
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent) / name for name in (*folders, *files))
