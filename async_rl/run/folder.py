"""A run's folder and the process that works in it: the lock, the log file, signals and the exit message."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from async_rl.config import Config
from async_rl.config.reference import resolved_yaml, versions
from async_rl.errors import AsyncRLError, ConfigError, StallError
from async_rl.runtime.supervision import service_of

_LINE = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def console() -> Console:
    """Where a run is shown.

    FORCE_COLOR, which CI sets, asks for colours, and not for a panel that moves the cursor about in a log.
    """
    return Console(force_interactive=None if sys.stdout.isatty() else False)


def describe(cause: BaseException) -> str:
    """One sentence: the service that failed, if one is known, and why."""
    service = service_of(cause)
    text = str(cause) if isinstance(cause, AsyncRLError) else f"{type(cause).__name__}: {cause}"
    if isinstance(cause, StallError):  # the doctor did not fail, it found what did
        return text
    return f"{service} failed: {text}" if service else text


@contextmanager
def on_signals(first: Callable[[str], None], received: list[signal.Signals]) -> Iterator[None]:
    """Call `first` at the first SIGINT or SIGTERM, cancel the current task at the second.

    From the third on the process ends as any other does.

    Args:
        first: Gets the signal's name.
        received: Is filled with the signals, in order.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    handled = (signal.SIGINT, signal.SIGTERM)

    def handle(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            first(number.name)
        else:
            restore()
            task.cancel()

    def restore() -> None:
        for number in handled:
            loop.remove_signal_handler(number)

    for number in handled:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        restore()


@contextmanager
def run_folder(config: Config) -> Iterator[Path]:
    """Make the run's folder, write the resolved config into it and keep other runs out of it.

    Raises:
        ConfigError: Another process runs in it, or `run.resume` is `never` and it has checkpoints, or `must`
            and it has none.
    """
    folder = Path(config.run.dir) / config.run.name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # what earlier versions made was open to all users
        for name in ("logs", "checkpoints", "hf"):
            (folder / name).mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot make the run folder {folder}: {error.strerror}") from error
    if config.run.resume == "never" and any((folder / "checkpoints").iterdir()):
        raise ConfigError(
            f"run.resume is never, but {folder} has checkpoints: choose another run.name, remove the folder, "
            f"or set run.resume=auto to continue from them"
        )
    if config.run.resume == "must" and not any((folder / "checkpoints").glob("step_*")):
        raise ConfigError(
            f"run.resume is must, but there is no checkpoint in {folder / 'checkpoints'}: look at run.dir "
            "and run.name, or set run.resume=auto to begin there"
        )
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"run.name: another process runs in {folder}: choose another name") from error
        partial = folder / ".config.yaml.part"
        partial.write_text(resolved_yaml(config))
        partial.replace(folder / "config.yaml")
        (folder / "versions.json").write_bytes(msgspec.json.encode(versions()))
        yield folder


@contextmanager
def logging_to(path: Path, level: str) -> Iterator[None]:
    """Send our log records from `level` on, and others' warnings, to a file while the block runs."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(_LINE))
    root, ours = logging.getLogger(), logging.getLogger("async_rl")
    levels = root.level, ours.level
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    ours.setLevel(level.upper())
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        root.setLevel(levels[0])
        ours.setLevel(levels[1])
        handler.close()
