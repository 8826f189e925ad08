"""Runs a job in its folder: the lock, the log file, signals, the exit message and the exit code.

`async-rl train`, `sft` and `evaluate` all run through `run_in_folder`:

```
 open the folder (lock, config.yaml, versions.json) ─► complete already? ─► log to logs/driver.log
      ─► run the job; the first signal stops it, a second Ctrl-C cancels it ─► show its result ─► exit code
```
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from async_rl.config import Config
from async_rl.config.reference import resolved_yaml, versions
from async_rl.errors import AsyncRLError, ConfigError, EnvironmentNotReady, StallError
from async_rl.observability.text_console import TextConsole
from async_rl.runtime.files import is_locked, replace_file, try_lock
from async_rl.runtime.package_warnings import hide_package_warnings
from async_rl.runtime.printable import PrintableFormatter, print_text
from async_rl.runtime.processes import private_files
from async_rl.runtime.short_pauses import short_pauses
from async_rl.runtime.supervision import first_error, service_of, was_stopped_at_start
from async_rl.runtime.threads import exit_despite_threads

log = logging.getLogger(__name__)

T = TypeVar("T")

_LINE = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

_FOLDERS = frozenset(
    ("batches", "checkpoints", "evaluations", "hf", "journal", "logs", "spool", "trajectories", "weights")
)
_FILES = frozenset(
    (
        *("config.yaml", "evaluations.jsonl", "identity.json", "ledger.sqlite", "metrics.jsonl"),
        *("report.html", "sequence.u64", "summary.json", "trajectories.sqlite", "url", "versions.json"),
    )
)
"""What a run keeps in its folder."""


def run_in_folder(
    folder: AbstractContextManager[Path],
    config: Config,
    job: Callable[[Path, asyncio.Event], Coroutine[Any, Any, T]],
    *,
    finish: Callable[[Path, T], int],
    is_complete: Callable[[Path], bool] = lambda folder: False,
    on_stop: Callable[[str], None] | None = None,
    keep_log: bool = True,
) -> int:
    """Run a job in its folder until it ends or a signal stops it.

    An error of the job is printed as one sentence; the log has its traceback.

    Args:
        folder: Opens the folder of the job and locks it: `run_folder` or `result_folder`.
        config: The resolved config.
        job: Gets the folder and an event; once the event is set it saves its work and returns.
        finish: Writes and shows the job's result; returns the exit code.
        is_complete: Whether an earlier incarnation finished the job; if so it is not started.
        on_stop: Reports the first signal, by its name. None cancels the job at the first signal.
        keep_log: Whether the folder stays, so that messages name its log.

    Returns:
        The exit code: that of `finish` or of the error, or 128 plus the number of the first signal.
    """
    with private_files(), folder as path:
        if is_complete(path):
            return 0
        log_file = path / "logs" / "driver.log"
        where = f"; log: {log_file}" if keep_log else ""
        signals: list[signal.Signals] = []
        with logging_to(log_file):
            try:
                result = asyncio.run(_until_signal(job, path, on_stop, signals))
            except asyncio.CancelledError:
                print_text(f"async-rl: aborted by {signals[0].name}{where}", file=sys.stderr)
                return _exit_code(128 + signals[0])
            except Exception as error:
                if signals and was_stopped_at_start(error):
                    print_text(f"async-rl: {signals[0].name} ended the start{where}", file=sys.stderr)
                    return _exit_code(128 + signals[0])
                cause = first_error(error)
                log.error("the run failed: %s", describe_error(cause), exc_info=error)
                print_text(f"async-rl: {describe_error(cause)}{where}", file=sys.stderr)
                return _exit_code(cause.exit_code if isinstance(cause, AsyncRLError) else 1)
        code = finish(path, result)
    return _exit_code(128 + signals[0]) if signals else code


def _exit_code(code: int) -> int:
    """Return the exit code of a job that was cut short, also if calls of its start still run."""
    exit_despite_threads(code)
    return code


async def _until_signal(
    job: Callable[[Path, asyncio.Event], Coroutine[Any, Any, T]],
    path: Path,
    on_stop: Callable[[str], None] | None,
    received: list[signal.Signals],
) -> T:
    stop = asyncio.Event()

    def stopping(name: str) -> None:
        if on_stop is not None:
            on_stop(name)
            stop.set()

    with short_pauses(), on_signals(stopping, received, cancel_at=1 if on_stop is None else 2):
        return await job(path, stop)


def run_console() -> TextConsole:
    """Return the console that shows a run.

    FORCE_COLOR, which CI sets, asks for colours, not for a panel that moves the cursor about in a log.
    """
    return TextConsole(force_interactive=None if sys.stdout.isatty() else False)


def describe_error(cause: BaseException) -> str:
    """Return one sentence: the service that failed, if it is known, and why."""
    service = service_of(cause)
    text = str(cause) if isinstance(cause, AsyncRLError) else f"{type(cause).__name__}: {cause}"
    if isinstance(cause, StallError):  # the doctor itself did not fail
        return text
    return f"{service} failed: {text}" if service else text


@contextmanager
def on_signals(
    first: Callable[[str], None], received: list[signal.Signals], *, cancel_at: int = 2
) -> Iterator[None]:
    """Call `first` at the first SIGINT or SIGTERM, and cancel the current task at a later SIGINT.

    After that the process handles signals as any other does. A repeated SIGTERM changes nothing: what sends
    it (Slurm, `timeout`, a process supervisor) often sends it again, and ends a process by SIGKILL.

    Args:
        first: Gets the signal's name.
        received: Is filled with the signals, in order.
        cancel_at: Number of the signal that cancels the task; 1 cancels it at the first, whichever it is.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    handled = (signal.SIGINT, signal.SIGTERM)

    def handle(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            first(number.name)
        if len(received) >= cancel_at and (number is signal.SIGINT or cancel_at == 1):
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


def find_run_folder(run: Path) -> Path:
    """Return the folder of a run that a command names, by its path or by its name below `runs`.

    Raises:
        ConfigError: There is no such folder.
    """
    folder = run if run.is_dir() else Path("runs") / run
    if not folder.is_dir():
        raise ConfigError(f"there is no run folder {str(run)!r} (searched in {Path.cwd()} and in runs/)")
    return folder


def check_run_folder(config: Config) -> Path:
    """Check, without writing, that a run can start in its folder, and return the folder.

    Raises:
        ConfigError: It cannot be created, another process runs in it, or `run.resume` is `never` and it has
            checkpoints, or `must` and it has none.
    """
    folder = Path(config.run.dir) / config.run.name
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:  # the name is too long, or a folder above may not be read
        raise _not_created(folder, error.errno) from error
    if not there.is_dir():
        raise _not_created(folder, errno.EEXIST if there == folder else errno.ENOTDIR)
    if not os.access(there, os.W_OK | os.X_OK):
        raise _not_created(folder, errno.EACCES)
    for path in folder.iterdir() if folder == there else ():
        is_known = path.name in _FOLDERS or path.name in _FILES
        if is_known and not (path.is_dir() if path.name in _FOLDERS else path.is_file()):
            expected = "folder" if path.name in _FOLDERS else "file"
            raise ConfigError(
                f"{path} is no {expected}, as which a run keeps it: restore it, or move it away"
            )
    checkpoints = folder / "checkpoints"
    if config.run.resume == "never" and any(checkpoints.glob("*")):
        raise ConfigError(
            f"run.resume is never, but {folder} has checkpoints: choose another run.name, remove the folder, "
            f"or set run.resume=auto to continue from them"
        )
    if config.run.resume == "must" and not any(checkpoints.glob("step_*")):
        raise ConfigError(
            f"run.resume is must, but there is no checkpoint in {checkpoints}: look at run.dir "
            "and run.name, or set run.resume=auto to start a new run"
        )
    if is_locked(folder / ".lock"):
        raise ConfigError(_taken(folder))
    return folder


def _not_created(folder: Path, number: int | None) -> ConfigError:
    return ConfigError(f"run.dir: cannot create the run folder {folder}: {os.strerror(number or 0)}")


def _taken(folder: Path) -> str:
    return f"run.name: another process runs in {folder}: choose another name"


@contextmanager
def run_folder(config: Config, check: Callable[[Path], None]) -> Iterator[Path]:
    """Create the run's folder, write the resolved config into it and lock it against other processes.

    Args:
        config: The run's config.
        check: Refuses a config that cannot continue the run in this folder, before it is written.

    Raises:
        ConfigError: The run cannot start in it, see `check_run_folder`.
    """
    folder = check_run_folder(config)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # earlier versions created folders that all users could read
        for name in ("logs", "checkpoints", "hf"):
            (folder / name).mkdir(exist_ok=True)
    except OSError as error:
        raise _not_created(folder, error.errno) from error
    with _locked(folder, _taken(folder), config, partial(check, folder)):
        yield folder


@contextmanager
def result_folder(path: Path, config: Config) -> Iterator[Path]:
    """Create a folder for results that are not those of a run, and lock it like a run's.

    Raises:
        ConfigError: Another process writes into it, or it cannot be created.
    """
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: cannot create the folder {path}: {error.strerror}") from error
    with _locked(path, f"--out: another process writes into {path}: choose another folder", config):
        yield path


@contextmanager
def _locked(
    folder: Path, taken: str, config: Config, check: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Lock a folder and write `config.yaml` and `versions.json`; raise ConfigError(taken) if it is locked."""
    with ExitStack() as stack:
        with _written(folder):
            lock = stack.enter_context((folder / ".lock").open("w"))
            locked = try_lock(lock)
            if locked is False:
                raise ConfigError(taken)
            if locked is None:
                log.warning("the file system of %s has no locks: do not start a second process there", folder)
            check()
            replace_file(folder / "config.yaml", resolved_yaml(config).encode())
            (folder / "versions.json").write_bytes(msgspec.json.encode(versions()))
        yield


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Raise one sentence when the block cannot write into a folder.

    Raises:
        EnvironmentNotReady: It cannot.
    """
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise EnvironmentNotReady(
            f"cannot write into {folder}: {os.strerror(error.errno or 0)}{where}; free space on its disk or "
            "make it writable, or choose a folder on another disk"
        ) from error


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Log our records, and what other packages log as a warning, to a file during the block.

    Python's warnings about the user's code are logged, too; those about installed packages are not.
    """
    with _written(path.parent):
        handler = logging.FileHandler(path)
    handler.setFormatter(PrintableFormatter(_LINE))
    root, ours = logging.getLogger(), logging.getLogger("async_rl")
    levels = root.level, ours.level
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.INFO)
    logging.captureWarnings(True)
    hide_package_warnings()
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        root.setLevel(levels[0])
        ours.setLevel(levels[1])
        handler.close()
