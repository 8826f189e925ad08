"""Shows a run on the terminal: the first screen, progress during the run, and the summary at its end.

This module only reads `StepRecord`s and the `Summary`. It draws on the terminal with rich and plotext; `page`
draws the same records for browsers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from async_rl import __version__
from async_rl.config import Config, changed_fields, old_log_probs_reason
from async_rl.observability.evaluation_record import EVERYTHING, EvaluationRecord
from async_rl.observability.evaluation_report import describe_best, evaluation_lines, with_margin
from async_rl.observability.failures import FailureRow
from async_rl.observability.formatting import compact, format_duration, format_percent
from async_rl.observability.panels import PANELS
from async_rl.observability.records import (
    MANY_WITHOUT_SIGNAL,
    WINDOW,
    Figure,
    StepRecord,
    Summary,
    count_without_signal,
    is_finite,
    last_at_equal_versions,
    no_signal,
    seconds_left,
)
from async_rl.observability.text_console import TextConsole, pairs
from async_rl.runtime.files import replace_file
from async_rl.trainer_protocol import read_best

_TICK_WIDTH = 9
"""Columns of a chart for each tick of its x axis."""

_KL_PANELS: Final = (PANELS["ppo-kl"], PANELS["kl-parts"])
"""What is healthy, of the KL figures in a step's line."""

SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"


def derived_bounds(config: Config) -> dict[str, int | str]:
    """Return what follows from the config, by its description: bounds, and how old log-probs are computed."""
    outstanding, branches = config.max_outstanding_groups, config.rollout.max_branches
    in_flight = min(config.rollout.max_concurrent_trajectories, outstanding * config.rollout.group_size)
    return {
        "trajectories in a batch": config.batch_trajectories,
        "groups dispatched and not yet trained, at most": outstanding,
        "trajectories dispatched and not yet trained, at most": outstanding * config.rollout.group_size,
        "trajectories in flight, at most": in_flight,
        **({"their branches, at most": in_flight * branches} if branches else {}),
        "old log-probs": _old_log_probs(config),
        "ppo_kl": _how_ppo_kl_is_measured(config),
    }


def _how_ppo_kl_is_measured(config: Config) -> str:
    if config.trainer.loss.old_log_probs == "rollout":
        return "as ppo_kl_bypass, against the engines' log-probs (trainer.loss.old_log_probs=rollout)"
    if config.trainer.updates_per_batch * config.trainer.epochs_per_batch > 1:
        return "over the updates of a batch after its first"
    setting = "updates_per_batch" if config.trainer.groups_per_batch > 1 else "epochs_per_batch"
    return f"none, as a batch has one update, where it would be 0; trainer.{setting}=2 measures it"


def _old_log_probs(config: Config) -> str:
    loss = config.trainer.loss
    if loss.old_log_probs == "rollout":
        return "the engines'"
    if reason := old_log_probs_reason(config):
        return f"from a forward pass of their own, as {reason}"
    every = loss.check_old_log_probs_every
    check = f", compared with another every {every} steps" if every else ""
    return f"from the update's own forward pass{check}"


def print_header(console: TextConsole, config: Config, run_dir: Path, metrics_url: str) -> None:
    """Print the first screen: version, run folder, changed settings and the bounds that follow from them."""
    console.print(Text(f"async-rl {__version__}", style="bold"))
    console.print(
        pairs(
            [
                ("run folder", _path(run_dir)),
                ("live page", metrics_url),
                ("metrics", f"{metrics_url}/metrics"),
            ]
        )
    )
    console.print(Text("differs from the defaults", style="bold"))
    console.print(pairs([(key, str(value)) for key, value in changed_fields(config).items()]))
    console.print(Text("follows from it", style="bold"))
    console.print(pairs([(key, str(value)) for key, value in derived_bounds(config).items()]))
    console.print(Text("what is healthy in a step's line", style="bold"))
    console.print(pairs([(panel.title, panel.note) for panel in _KL_PANELS]))


_NAMES_WIDTH = 30
"""The number of the panel's columns that its frame and the names in it take."""


class RunProgress:
    """Shows the progress of a run: a live panel on a terminal, otherwise one line per step.

    The panel moves the cursor, so only an interactive console shows it.
    """

    def __init__(self, console: TextConsole) -> None:
        self._console = console
        self._started_s = time.monotonic()
        self._max_steps = 0
        self._records: list[StepRecord] = []
        self._num_continued = 0
        """The first of the records that are of earlier starts of the trainer."""
        self._in_flight = 0
        self._queued = 0
        self._waiting_for = ""
        self._evaluation: EvaluationRecord | None = None
        """The last one of this process."""
        self._live = (
            Live(get_renderable=self.render, console=console, refresh_per_second=4, transient=True)
            if console.is_interactive
            else None
        )

    def start(self, config: Config, run_dir: Path, metrics_url: str) -> None:
        """Print the first screen and, on a terminal, open the live panel under it."""
        self._started_s = time.monotonic()
        self._max_steps = config.run.max_steps
        print_header(self._console, config, run_dir, metrics_url)
        if self._live:
            self._live.start()

    def stop(self) -> None:
        """Close the live panel; printed lines stay."""
        if self._live:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Print what the run does now, as a line that stays; for phases that occur a few times per run."""
        self._waiting_for = text
        self.note(text)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._print(f"[{time.monotonic() - self._started_s:5.0f} s] {text}")

    def evaluation(self, record: EvaluationRecord, earlier: Sequence[EvaluationRecord]) -> None:
        """Print an evaluation as lines that stay; `earlier` are those before it."""
        first, *lines = evaluation_lines(record, earlier)
        self.note(first)
        for line in lines:
            self._print(line)
        if record.scores:
            self._evaluation = record

    def continue_from(self, records: Sequence[StepRecord]) -> None:
        """Show a run that has these steps, and measure its pace anew."""
        self._records = list(records)
        self._num_continued = len(records)

    def flow(self, *, in_flight: int, queued: int, waiting_for: str) -> None:
        """Update the number of trajectories and the current wait in the live panel."""
        self._in_flight, self._queued, self._waiting_for = in_flight, queued, waiting_for

    def step(self, record: StepRecord) -> None:
        """Show a finished step."""
        self._records.append(record)
        self._in_flight, self._queued = record.in_flight, record.queued
        if not self._live:
            self._print(step_line(record, self._max_steps))

    def render(self) -> RenderableType:
        """Return the present live panel."""
        record = self._records[-1] if self._records else None
        done = record.step if record else 0
        columns = max(8, self._console.width - _NAMES_WIDTH)
        rows: list[tuple[str, str]] = [
            ("step", f"{done} of {self._max_steps}"),
            ("in flight / queued", f"{self._in_flight} / {self._queued} trajectories"),
            ("waiting for", self._waiting_for or "nothing"),
        ]
        if record:
            parts = _parts_of_kl(record, last_at_equal_versions(self._records))
            width = min(40, columns - 8)
            rewards = sparkline([each.reward_mean for each in self._records[-width:]], width)
            rows += [
                ("reward", f"{compact(record.reward_mean)}  {rewards}"),
                *_learning(count_without_signal(self._records)),
                *_named_kl(record.ppo_kl, record.ppo_kl_bypass),
                *([("parts of rollout KL", parts)] if parts else []),
                ("staleness p50 / p95", f"{record.staleness_p50:.0f} / {record.staleness_p95:.0f} versions"),
                ("interrupted", f"{record.interrupted} of {record.trajectories} trajectories"),
                ("throughput", f"{record.tokens_per_s:,.0f} tokens/s"),
                ("wait / step / sync", f"{record.wait_s:.2f} / {record.step_s:.2f} / {record.sync_s:.2f} s"),
            ]
        if (evaluation := self._evaluation) is not None:
            reward = with_margin(evaluation.scores[EVERYTHING].reward)
            rows.append(("evaluation", f"reward {reward} at version {evaluation.weight_version}"))
        bar = Table.grid()  # a bar alone does not end its line
        bar.add_row(
            ProgressBar(total=self._max_steps, completed=done, width=min(40, self._console.width - 4))
        )
        title = f"async-rl  {format_duration(time.monotonic() - self._started_s)}{self._remaining(done)}"
        return Panel(Group(bar, pairs(rows)), title=Text(title), title_align="left", expand=False)

    def _remaining(self, done: int) -> str:
        """Return the remaining time as text, estimated from the last steps."""
        ends_s = [record.time_s for record in self._records[self._num_continued :]]
        left_s = seconds_left(ends_s, self._max_steps - done)
        return "" if left_s is None else f" · {format_duration(left_s)} left"

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)


def _learning(groups: int) -> list[tuple[str, str]]:
    """Return a warning if this number of consecutive groups had no signal."""
    return [("learning", no_signal(groups))] if groups >= MANY_WITHOUT_SIGNAL else []


def _parts_of_kl(record: StepRecord, at_equal_versions: StepRecord | None) -> str:
    """Return the measured parts of the rollout KL; the mismatch is of the last step that measured it."""
    parts: dict[str, Figure] = {}
    if at_equal_versions is not None:
        older = "" if at_equal_versions is record else f" of step {at_equal_versions.step}"
        parts[f"mismatch{older}"] = at_equal_versions.kl_mismatch
    parts |= {"staleness": record.kl_staleness, "routing": record.kl_routing}
    return ", ".join(f"{name} {part:.0e}" for name, part in parts.items() if is_finite(part))


def _named_kl(ppo_kl: Figure, bypass: Figure) -> list[tuple[str, str]]:
    """Return the KL of the updates under its name; nothing where none is measured.

    The two compare different policies and need different names. With one update per batch there is none.
    """
    named = {"ppo_kl": ppo_kl, "ppo_kl_bypass": bypass}
    return [(name, f"{compact(value)} nats") for name, value in named.items() if is_finite(value)]


def _kl_curves(records: Sequence[StepRecord]) -> Iterator[tuple[str, str]]:
    """Yield the KL figures by step, as far as measured, each group with what is healthy."""
    for panel in _KL_PANELS:
        curves = {field: [getattr(record, field) for record in records] for field in panel.lines}
        highest = {
            field: max(filter(is_finite, values), key=abs, default=None) for field, values in curves.items()
        }
        for field, value in highest.items():
            if value is not None:
                yield f"{field} by step", f"at most {value:.0e} nats  {sparkline(curves[field], 28)}"
        if any(value is not None for value in highest.values()):
            yield "", panel.note


def step_line(record: StepRecord, max_steps: int) -> str:
    """Return one step as one line of text."""
    policy = "".join(f" | {name} {text}" for name, text in _named_kl(record.ppo_kl, record.ppo_kl_bypass))
    parts = _parts_of_kl(record, record)
    return (
        f"step {record.step:>{len(str(max_steps))}}/{max_steps}"
        f" | reward {compact(record.reward_mean)}"
        f"{policy}{f' | rollout KL: {parts}' if parts else ''}"
        f" | stale p50 {record.staleness_p50:.0f} p95 {record.staleness_p95:.0f}"
        f" | interrupted {record.interrupted}/{record.trajectories}"
        f" | in flight {record.in_flight} | queued {record.queued}"
        f" | {record.tokens_per_s:,.0f} tok/s"
        f" | wait {record.wait_s:.2f} step {record.step_s:.2f} sync {record.sync_s:.2f} s"
    )


def sparkline(values: Sequence[Figure], width: int = 40) -> str:
    """Return the last values as a row of blocks, scaled to their range; a missing value is a gap."""
    shown = list(values[-width:])
    finite = [value for value in shown if is_finite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    blocks, span = "▁▂▃▄▅▆▇█", (high - low) or 1.0
    return "".join(
        blocks[int((value - low) / span * (len(blocks) - 1))] if is_finite(value) else " " for value in shown
    )


def write_summary(run_dir: Path, summary: Summary) -> None:
    """Write `summary.json` into the run folder."""
    text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    replace_file(run_dir / SUMMARY_FILE, text + b"\n")


def print_summary(
    console: TextConsole,
    run_dir: Path,
    records: Sequence[StepRecord],
    summary: Summary,
    evaluations: Sequence[EvaluationRecord] = (),
) -> None:
    """Print the last screen: the reward curve, the run's figures, and the path of its files."""
    if len(records) > 1:
        console.print(reward_chart(records, width=min(console.width, 90), colour=console.is_terminal))
    counts, sync = summary.trajectories, summary.sync
    dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(counts.dropped.items()) if n) or "0"
    rows = [
        (
            "reward",
            f"{compact(summary.reward_first)} → {compact(summary.reward_last)} (means of {WINDOW} steps)",
        ),
        *_learning(summary.groups_without_signal),
        *_evaluated(run_dir, evaluations),
        ("weight versions", f"{summary.weight_versions} published in {summary.rl_seconds:.0f} s"),
        ("trajectories", f"{counts.dispatched} dispatched, {counts.trained} trained, dropped: {dropped}"),
        ("", f"{counts.in_flight} in flight, {counts.queued} queued"),
        *failure_pairs(summary.failures),
        ("interrupted and resumed", f"{format_percent(summary.interrupted_share)} of the trained ones"),
        ("staleness", f"at most {summary.staleness_max} versions (bound {summary.max_staleness})"),
        *_named_kl(summary.ppo_kl_mean, summary.ppo_kl_bypass_mean),
        *_kl_curves(records),
        ("trainer against rollout", f"{compact(summary.log_prob_abs_diff_mean)} nats at equal versions"),
        (
            "routing",
            f"{summary.routing.merge}: {summary.routing.rows_checked:,} rows checked, "
            f"{summary.routing.rows_invalid:,} invalid",
        ),
        ("throughput", f"{compact(summary.tokens_per_s)} tokens/s sampled"),
        (
            "idle",
            f"trainer {format_percent(summary.trainer_idle_share)}, "
            f"engines {format_percent(summary.engine_idle_share)}",
        ),
        ("weight sync", f"{compact(sync.mean_s)} s mean, {compact(sync.max_s)} s longest"),
        ("pause beyond transfer", f"{_milliseconds(sync.pause_max_s)} longest"),
        ("files", _path(run_dir)),
    ]
    if (run_dir / REPORT_FILE).exists():
        rows.append(("as one page", _path(run_dir / REPORT_FILE)))
    console.print(Panel(pairs(rows), title=Text("summary"), title_align="left", expand=False))


def failure_pairs(failures: Sequence[FailureRow]) -> list[tuple[str, str]]:
    """Return why attempts did not succeed, as rows of `pairs`: a kind, then its examples."""
    rows: list[tuple[str, str]] = []
    for row in failures:
        rows.append((row.label, f"{row.number:,} attempts, {row.share} of all"))
        rows += [("", f"{each.trajectory_id}: {each.error}") for each in row.examples]
    return rows


def _evaluated(run_dir: Path, evaluations: Sequence[EvaluationRecord]) -> Iterator[tuple[str, str]]:
    """Yield the last evaluation, the best one, and the checkpoint that `trainer.keep_best` keeps."""
    done = [record for record in evaluations if record.scores]
    if not done:
        return
    kept = read_best(run_dir / "checkpoints")
    metric = f"{EVERYTHING}/reward" if kept is None else kept.metric
    yield "last evaluation", describe_best(done[-1:], metric)
    yield "best evaluation", describe_best(done, metric)
    if kept is not None and kept.step is not None:
        yield "best checkpoint", f"of step {kept.step}, {compact(kept.value)}; kept by trainer.keep_best"


def reward_chart(records: Sequence[StepRecord], *, width: int, colour: bool) -> Text:
    """Return the reward by step as a text chart, drawn with `plotext`."""
    import plotext

    points = [(r.step, r.reward_mean) for r in records if is_finite(r.reward_mean)]
    if len(points) < 2:
        return Text("")
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, 15)
    figure.title("mean reward by step")
    steps, rewards = zip(*points, strict=True)
    figure.draw(figure.signal(list(steps), list(rewards), marker="braille").lines())
    figure.ruler("x").ticks(_step_ticks(steps[0], steps[-1], at_most=width // _TICK_WIDTH))
    text = Text(figure.build().string(colorless=True).rstrip(), style="cyan" if colour else "")
    figure.clear()
    return text


def _step_ticks(first: int, last: int, *, at_most: int) -> list[int]:
    """Return the steps at which a chart has ticks: multiples of 1, 2, 5, 10, ..., few enough to be read."""
    sizes = (digit * 10**power for power in count() for digit in (1, 2, 5))
    distance = next(size for size in sizes if (last - first) // size < at_most)
    return list(range(-(-first // distance) * distance, last + 1, distance))


def _milliseconds(seconds: Figure) -> str:
    return f"{seconds * 1000:.0f} ms" if is_finite(seconds) else "n/a"


def _path(path: Path) -> str:
    """Return the path relative to the working directory if it is below it."""
    absolute = path.resolve()
    return os.path.relpath(absolute) if absolute.is_relative_to(Path.cwd()) else str(absolute)
