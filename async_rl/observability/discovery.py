"""Tells Prometheus where a run serves its metrics, by a file that it watches (file_sd).

Every run has a port of its own, often a free one. Prometheus reads `<folder>/*.json` again by itself whenever
a file comes, changes or goes: runs need no fixed port, and Prometheus no restart.

**Source**: https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from async_rl.errors import EnvironmentNotReady


@contextmanager
def announced(url: str, run_name: str, folder: Path) -> Iterator[None]:
    """Keep a target file for a run while the block runs.

    A run that is killed leaves its file, so that Prometheus sees it as down and says so; the next start of
    the run writes it anew. Other users may read the file, as Prometheus mostly is one: it holds an address
    and a name.

    Args:
        url: Of the run's endpoints. An address that stands for all becomes this machine's name.
        run_name: Becomes the label `run`, and the file's name.
        folder: Made if it is not there.

    Raises:
        EnvironmentNotReady: The folder cannot be written.
    """
    path = folder / f"{run_name}.json"
    partial = folder / f".{run_name}.part"
    text = json.dumps([{"targets": [_address(url)], "labels": {"run": run_name}}]) + "\n"
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            folder.chmod(0o755)
        partial.write_text(text)
        partial.chmod(0o644)
        partial.replace(path)
    except OSError as error:
        raise EnvironmentNotReady(
            f"cannot write {path}, by which Prometheus finds the run ({error.strerror}): set "
            f"metrics.targets_dir to a folder that can be written"
        ) from error
    try:
        yield
    finally:
        if path.exists() and path.read_text() == text:  # not that of another run of this name
            path.unlink()


def _address(url: str) -> str:
    place = urlsplit(url)
    assert place.hostname is not None
    host = place.hostname
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    elif ":" in host:
        host = f"[{host}]"
    return f"{host}:{place.port}"
