"""`async-rl train CONFIG`, also `python -m async_rl.cli train CONFIG`: one run in its folder.

```
<run.dir>/<run.name>/
  config.yaml      the resolved config        metrics.jsonl   one StepRecord per line
  logs/            driver, engines, ranks     summary.json    totals of the run, for programs
  checkpoints/     to resume from             report.html     the run as one page, with its curves
  hf/              the exported model         url             address of the page and /metrics
  versions.json    installed versions
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import msgspec

from async_rl.config import Config, load_config
from async_rl.observability.console_report import RunProgress, print_summary, write_summary
from async_rl.observability.evaluation_record import FILE, evaluation_record_log
from async_rl.observability.page.html_report import write_report
from async_rl.observability.records import Summary, step_record_log
from async_rl.planning.interruption_cost import describe_measured
from async_rl.run.folder import run_console, run_folder, run_in_folder
from async_rl.run.identity import check_identity
from async_rl.run.preflight import check_start
from async_rl.run.this_machine import check_machine
from async_rl.runtime.supervision import cut_by
from async_rl.runtime.threads import call_until_cancelled

Launch = Callable[[Config, Path, asyncio.Event, RunProgress], Awaitable[Summary]]
"""Runs a config in its folder until it is done or the event is set."""


def train(path: Path, overrides: Sequence[str] = (), launch: Launch | None = None) -> int:
    """Run a config to its end, or until a signal.

    Args:
        path: The config's YAML file.
        overrides: `dotted.key=value` changes to it.
        launch: Starts the processes of the run; None takes `async_rl.placement.run`.

    Returns:
        The exit code. An error of the run is printed; the log has its traceback.

    Raises:
        ConfigError: The config cannot work; there is no run folder and no log yet.
        EnvironmentNotReady: This machine lacks what the config needs, or the page's address is in use.
    """
    config = load_config(path, overrides)
    check_start(config)
    check_machine(config)
    shown = run_console()
    progress = RunProgress(shown)
    results: list[tuple[Path, Summary]] = []

    def is_complete(run_dir: Path) -> bool:
        finished = step_record_log(run_dir / "metrics.jsonl").read()
        summary_file = run_dir / "summary.json"
        if not finished or finished[-1].step < config.run.max_steps or not summary_file.exists():
            return False
        summary = msgspec.json.decode(summary_file.read_bytes(), type=Summary)
        print_summary(shown, run_dir, finished, summary, evaluation_record_log(run_dir / FILE).read())
        shown.print(
            f"{run_dir} is complete: raise run.max_steps to continue, or set run.name for another run"
        )
        return True

    async def run(run_dir: Path, stop: asyncio.Event) -> Summary:
        progress.phase(f"starting processes; their logs are in {run_dir / 'logs'}")
        return await (launch or _on_ray)(config, run_dir, stop, progress)

    def on_stop(name: str) -> None:
        progress.phase(f"{name}: stopping; a second Ctrl-C aborts")

    def finish(run_dir: Path, summary: Summary) -> int:
        write_summary(run_dir, summary)
        results.append((run_dir, summary))
        return 0

    exit_code = run_in_folder(
        run_folder(config, partial(check_identity, config)),
        config,
        run,
        finish=finish,
        is_complete=is_complete,
        on_stop=on_stop,
    )
    for run_dir, summary in results:
        # After the folder is unlocked, so that the report says that the run has ended.
        write_report(run_dir, failures=summary.failures)
        steps = step_record_log(run_dir / "metrics.jsonl").read()
        print_summary(shown, run_dir, steps, summary, evaluation_record_log(run_dir / FILE).read())
    return exit_code


async def _on_ray(config: Config, run_dir: Path, stop: asyncio.Event, progress: RunProgress) -> Summary:
    async with cut_by(stop):  # importing Ray takes a second; tests of this module do without it
        placement = await call_until_cancelled(lambda: import_module("async_rl.placement"), name="import")
    summary: Summary = await placement.run(
        config, run_dir, stop, progress, describe_updates=partial(describe_measured, config)
    )
    return summary
