"""`async-rl train CONFIG`, also `python -m async_rl.cli train CONFIG`: one run in its folder.

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
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from async_rl.config import Config, load_config
from async_rl.errors import AsyncRLError
from async_rl.observability.console_report import RunProgress, print_summary, write_run_files
from async_rl.observability.records import Summary, step_record_log
from async_rl.run.folder import console, describe, logging_to, on_signals, run_folder
from async_rl.runtime.processes import private_files
from async_rl.runtime.supervision import first_error

log = logging.getLogger(__name__)

Launch = Callable[[Config, Path, asyncio.Event, RunProgress], Awaitable[Summary]]
"""Runs a config in its folder until it is done or the event is set."""


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
    from async_rl.run.preflight import check, check_trainer

    config = load_config(path, overrides)
    check_trainer(config, config.trainer.worker, "trainer.worker")
    check(config)
    shown = console()
    with private_files(), run_folder(config) as run_dir:
        finished = step_record_log(run_dir / "metrics.jsonl").read()
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
                summary = asyncio.run(_run(config, run_dir, launch or _on_ray, RunProgress(shown), signals))
            except asyncio.CancelledError:
                print(f"async-rl: aborted by {signals[0].name}; log: {log_file}", file=sys.stderr)
                return 128 + signals[0]
            except Exception as error:
                cause = first_error(error)
                log.error("the run failed: %s", describe(cause), exc_info=error)
                print(f"async-rl: {describe(cause)}; log: {log_file}", file=sys.stderr)
                return cause.exit_code if isinstance(cause, AsyncRLError) else 1
        records = step_record_log(run_dir / "metrics.jsonl").read()
        write_run_files(run_dir, records, summary)
        print_summary(shown, run_dir, records, summary)
    return 128 + signals[0] if signals else 0


async def _run(
    config: Config, run_dir: Path, launch: Launch, progress: RunProgress, signals: list[signal.Signals]
) -> Summary:
    stop = asyncio.Event()

    def stopping(name: str) -> None:
        progress.phase(f"{name}: running work ends, then a checkpoint is written; once more to abort")
        stop.set()

    progress.phase(f"starting processes; their logs are in {run_dir / 'logs'}")
    with on_signals(stopping, signals):
        return await launch(config, run_dir, stop, progress)


async def _on_ray(config: Config, run_dir: Path, stop: asyncio.Event, progress: RunProgress) -> Summary:
    from async_rl import placement  # imports Ray: a second that a test of this module need not pay

    return await placement.run(config, run_dir, stop, progress)
