"""`async-rl doctor`: asks a running job why it does not move, by its `/health`."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

import msgspec

from async_rl.errors import ConfigError, EnvironmentNotReady, StallError
from async_rl.observability.diagnosis import Diagnosis

URL_FILE: Final = "url"
"""In the run folder: where the driver serves `/metrics` and `/health`."""

_LIMIT_S: Final = 10.0


class _Health(msgspec.Struct):
    phase: str
    step: int
    diagnosis: Diagnosis


def checkup(target: str) -> tuple[str, int]:
    """Ask a job.

    Args:
        target: Its metrics URL, or its run folder.

    Returns:
        What it says for people, and an exit code: that of a stall when it stands still, else 0.

    Raises:
        ConfigError: The folder is of no run that serves metrics.
        EnvironmentNotReady: Nobody answers.
    """
    url = target if "://" in target else _url_of(Path(target))
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=_LIMIT_S) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:  # 503 says that the run is not well, and why
        body = error.read()
    except OSError as error:
        raise EnvironmentNotReady(
            f"nobody answers at {url} within {_LIMIT_S:.0f} s: the run has ended, or its event loop is "
            f"blocked, which its logs/driver.log says ({error})"
        ) from error
    try:
        health = msgspec.json.decode(body, type=_Health)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{url}/health is not of an async-rl run: {error}") from error
    diagnosis = health.diagnosis
    text = f"{health.phase}, step {health.step}: {diagnosis.state}\n{diagnosis.text}"
    return text, StallError.exit_code if diagnosis.state == "stalled" else 0


def _url_of(folder: Path) -> str:
    try:
        return (folder / URL_FILE).read_text().strip()
    except OSError as error:
        raise ConfigError(f"{folder} is not the folder of a run that serves metrics: {error}") from error
