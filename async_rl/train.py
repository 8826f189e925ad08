"""`async-rl train CONFIG`, also `python -m async_rl.train CONFIG`: one run in its folder.

```
<run.dir>/<run.name>/
  config.yaml      the resolved config        metrics.jsonl   one StepRecord a line
  logs/            driver, engines, ranks     summary.json    the run in one screen, for programs
  checkpoints/     to resume from             reward.png      its curves
  hf/              the model, Hugging Face format       url             of the page and /metrics
  versions.json    of what it runs on
```
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from async_rl.config import Config, load_config
from async_rl.errors import AsyncRLError, ConfigError, StallError
from async_rl.records import Summary, read_records
from async_rl.reference import resolved_yaml, versions
from async_rl.report import Progress, print_summary, write_run_files
from async_rl.supervision import first_error, service_of

log = logging.getLogger(__name__)

Launch = Callable[[Config, Path, asyncio.Event, Progress], Awaitable[Summary]]
"""Runs a config in its folder until it is done or the event is set."""

_LINE = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def train(path: Path, overrides: Sequence[str] = (), launch: Launch | None = None) -> int:
    """Run a config to its end, or until a signal.

    Args:
        path: The config's YAML file.
        overrides: `dotted.key=value` changes to it.
        launch: Starts the processes of the run; None takes `async_rl.placement.run`.

    Returns:
        The exit code. An error of the run is printed, its traceback goes to the log.

    Raises:
        ConfigError: Before the run has a folder, and so a log.
    """
    from async_rl.preflight import check, check_trainer

    config = load_config(path, overrides)
    check_trainer(config, config.trainer.worker, "trainer.worker")
    check(config)
    shown = console()
    with private_files(), run_folder(config) as run_dir:
        finished = read_records(run_dir / "metrics.jsonl")
        if finished and finished[-1].step >= config.run.max_steps and (run_dir / "summary.json").exists():
            summary = msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=Summary)
            print_summary(shown, run_dir, finished, summary)
            shown.print(
                f"{run_dir} is complete: raise run.max_steps to go on, or set run.name for another run"
            )
            return 0
        log_file = run_dir / "logs" / "driver.log"
        with logging_to(log_file, config.run.log_level):
            signals: list[signal.Signals] = []
            try:
                summary = asyncio.run(_run(config, run_dir, launch or _on_ray, Progress(shown), signals))
            except asyncio.CancelledError:
                print(f"async-rl: aborted by {signals[0].name}; log: {log_file}", file=sys.stderr)
                return 128 + signals[0]
            except Exception as error:
                cause = first_error(error)
                log.error("the run failed: %s", describe(cause), exc_info=error)
                print(f"async-rl: {describe(cause)}; log: {log_file}", file=sys.stderr)
                return cause.exit_code if isinstance(cause, AsyncRLError) else 1
        records = read_records(run_dir / "metrics.jsonl")
        write_run_files(run_dir, records, summary)
        print_summary(shown, run_dir, records, summary)
    return 128 + signals[0] if signals else 0


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


async def _run(
    config: Config, run_dir: Path, launch: Launch, progress: Progress, signals: list[signal.Signals]
) -> Summary:
    stop = asyncio.Event()

    def stopping(name: str) -> None:
        progress.phase(f"{name}: running work ends, then a checkpoint is written; once more to abort")
        stop.set()

    progress.phase(f"starting processes; their logs are in {run_dir / 'logs'}")
    with on_signals(stopping, signals):
        return await launch(config, run_dir, stop, progress)


async def _on_ray(config: Config, run_dir: Path, stop: asyncio.Event, progress: Progress) -> Summary:
    from async_rl import placement  # imports Ray: a second that a test of this module need not pay

    return await placement.run(config, run_dir, stop, progress)


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
def private_files() -> Iterator[None]:
    """What this process, and all that it starts meanwhile, writes is for its user alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


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


if __name__ == "__main__":
    from async_rl.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
