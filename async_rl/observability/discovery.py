"""Publishes the address of a run's `/metrics` and `/health` for Prometheus and `async-rl doctor`.

Every run has its own port, often a free one that the system chooses. Prometheus reads `<folder>/*.json`
(file_sd) again whenever a file appears, changes or disappears: runs need no fixed port, and Prometheus no
restart.

**Source**: https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config
"""

from __future__ import annotations

import errno
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from async_rl.errors import ConfigError, EnvironmentNotReady, StallError
from async_rl.observability.diagnosis import Diagnosis
from async_rl.runtime.files import is_locked, replace_file
from async_rl.runtime.untrusted_json import UNREADABLE

URL_FILE: Final = "url"
"""The file in the run folder with the address at which the driver serves `/metrics` and `/health`."""

_HEALTH_TIMEOUT_S: Final = 10.0


def check_targets(folder: Path, run_name: str) -> None:
    """Check, without writing, that the target file of a run can be written.

    Raises:
        EnvironmentNotReady: It cannot.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    number = None
    if not there.is_dir():
        number = errno.EEXIST if there == folder else errno.ENOTDIR
    elif not os.access(there, os.W_OK | os.X_OK):
        number = errno.EACCES
    if number is not None:
        raise _not_announced(folder / f"{run_name}.json", os.strerror(number))


def _not_announced(path: Path, reason: str | None) -> EnvironmentNotReady:
    return EnvironmentNotReady(
        f"cannot write {path}, by which Prometheus finds the run ({reason}): set "
        f"metrics.targets_dir to a folder that can be written"
    )


@contextmanager
def announced(url: str, run_name: str, folder: Path) -> Iterator[None]:
    """Keep a target file for a run while the block runs.

    A killed run leaves its file, so that Prometheus reports it as down; its next start rewrites the file.
    Other users may read the file, because Prometheus usually runs as another user.

    Args:
        url: The URL of the run's endpoints. A wildcard address is replaced by this machine's name.
        run_name: The label `run` and the name of the file.
        folder: The folder of target files; created if it is missing.

    Raises:
        EnvironmentNotReady: The folder cannot be written.
    """
    path = folder / f"{run_name}.json"
    text = json.dumps([{"targets": [_address(url)], "labels": {"run": run_name}}]) + "\n"
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            folder.chmod(0o755)
        replace_file(path, text.encode(), mode=0o644)
    except OSError as error:
        raise _not_announced(path, error.strerror) from error
    try:
        yield
    finally:
        with suppress(OSError):  # it must not hide the error that ends the run
            if path.read_text() == text:  # another run of this name may have replaced it
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


class _Health(msgspec.Struct):
    """The part of the response of `/health` that `ask_health` uses."""

    phase: str
    step: int
    diagnosis: Diagnosis


def ask_health(target: str) -> tuple[str, int]:
    """Ask a run that is in progress what it waits for.

    Args:
        target: Its metrics URL, or its run folder.

    Returns:
        The diagnosis as text, and an exit code: that of a stall if the run is stalled, else 0.

    Raises:
        ConfigError: The target is no URL, or the folder does not belong to a run that serves metrics.
        EnvironmentNotReady: Nothing answers at the address, or the run has none.
    """
    if "://" in target and not _is_url(target):
        raise ConfigError(f"{target!r} is not the URL of a job; expected http://HOST:PORT")
    url = target if "://" in target else _url_of_run(Path(target))
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=_HEALTH_TIMEOUT_S) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:  # 503 reports that the run is stalled, and why
        body = error.read()
    except OSError as error:
        if isinstance(getattr(error, "reason", error), ConnectionRefusedError):
            raise EnvironmentNotReady(
                f"no answer from {url}: nothing listens there, so the run has ended, is starting, or has "
                "another address"
            ) from error
        raise EnvironmentNotReady(
            f"no answer from {url} within {_HEALTH_TIMEOUT_S:.0f} s: the host cannot be reached, or the "
            f"run's event loop is blocked, which its logs/driver.log reports ({error})"
        ) from error
    except HTTPException as error:  # decoding it says so
        body = str(error).encode()
    try:
        health = msgspec.json.decode(body, type=_Health)
    except UNREADABLE as error:
        raise ConfigError(f"{url}/health does not belong to an async-rl run: {error}") from error
    diagnosis = health.diagnosis
    text = f"{health.phase}, step {health.step}: {diagnosis.state}\n{diagnosis.text}"
    return text, StallError.exit_code if diagnosis.state == "stalled" else 0


def _is_url(text: str) -> bool:
    """Return whether a text is an HTTP URL with a host."""
    try:
        place = urlsplit(text)
        return place.scheme in ("http", "https") and bool(place.hostname) and place.port != 0
    except ValueError:  # an invalid port or address
        return False


def _url_of_run(folder: Path) -> str:
    file = folder / URL_FILE
    try:
        text = file.read_bytes().decode(errors="replace").strip()
    except OSError as error:
        if is_locked(folder / ".lock"):
            raise EnvironmentNotReady(
                f"the run in {folder} has no address yet: it is starting, so ask again in some seconds "
                "(`async-rl sft` has none at all)"
            ) from error
        raise ConfigError(f"{folder} is not the folder of a run that serves metrics: {error}") from error
    if not _is_url(text):
        found = f"{file} holds {text!r:.80}, expected http://HOST:PORT"
        raise EnvironmentNotReady(f"{found}: name the job's metrics URL in place of its folder")
    return text
