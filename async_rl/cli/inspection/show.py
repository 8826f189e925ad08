"""Prints trajectories on a terminal. Everything that a colour shows is also printed as a word."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Final, Literal, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from async_rl.cli.inspection.trajectory_view import LogProbs, Passage, TrajectoryView
from async_rl.observability.text_console import TextConsole, pairs
from async_rl.store.archive import ArchiveRow

_VERSION_STYLES: Final = ("green", "bright_blue", "magenta", "bright_yellow", "bright_cyan", "bright_red")
"""Colours of weight versions: consecutive versions differ."""

_ROLE_STYLES: Final = {"prompt": "dim", "user": "bright_white", "tool": "yellow"}


_WIDE: Final = 120
"""Width in characters of what is printed into a file."""

_STATUS_WIDTH: Final = 24
"""The least width of a status that is wrapped: it may be the message of an error."""

_GAP: Final = 3
"""Spaces between two columns: the padding of both, and the divider of `box.SIMPLE_HEAD`."""


class _Column(NamedTuple):
    name: str
    cell: Callable[[ArchiveRow], RenderableType]
    justify: Literal["left", "right"] = "right"


def version_style(weight_version: int) -> str:
    """Return the colour of tokens sampled under a weight version."""
    return _VERSION_STYLES[weight_version % len(_VERSION_STYLES)]


def terminal() -> TextConsole:
    """Return the console of a command: as wide as the terminal, or of a fixed width in a file."""
    console = TextConsole()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = TextConsole(width=_WIDE)
    return console


def show_trajectory(console: TextConsole, view: TrajectoryView) -> None:
    """Print a whole trajectory: figures, conversation and history."""
    console.print(Rule(Text(f"trajectory {view.trajectory_id}", style="bold"), align="left"))
    console.print(pairs(_facts(view)))
    for passage in view.passages:
        console.print(_heading(passage))
        console.print(Padding(_body(passage), (0, 0, 0, 2), expand=False))
    if view.error is not None:
        console.print(Text("error", style="bold red"))
        console.print(Padding(Text(view.error, style="red"), (0, 0, 0, 2), expand=False))
    if view.history:
        console.print(Text("history", style="bold"))
        console.print(pairs([(_time(event.unix_s), event.what) for event in view.history]))
    console.print()


def show_table(console: TextConsole, rows: Sequence[ArchiveRow], ids: Sequence[str], title: str) -> None:
    """Print a line for each trajectory, without the columns for which there is no room.

    Args:
        console: Where to print.
        rows: The trajectories.
        ids: Their names in the table.
        title: Title of the table.
    """
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    columns = _fitting(rows, ids, console.width)
    for column in columns:
        table.add_column(
            column.name, justify=column.justify, no_wrap=column.name != "status", overflow="fold"
        )
    for row, name in zip(rows, ids, strict=True):
        table.add_row(name, *(column.cell(row) for column in columns[1:]))
    console.print(table)


def _fitting(rows: Sequence[ArchiveRow], ids: Sequence[str], width: int) -> list[_Column]:
    """Return the columns that fit side by side without splitting a word."""

    def width_of(column: _Column) -> int:
        cells = ids if column is _COLUMNS[0] else [str(column.cell(row)) for row in rows]
        widest = max(map(cell_len, [column.name, *cells]))
        return (min(widest, _STATUS_WIDTH) if column.name == "status" else widest) + _GAP

    columns = list(_COLUMNS)
    for name in _LEFT_OUT:
        if sum(map(width_of, columns)) + 1 > width:  # before the first column is one space more
            columns = [column for column in columns if column.name != name]
    return columns


def show_summary(console: TextConsole, views: Sequence[TrajectoryView]) -> None:
    """Print one line that summarises trajectories."""
    rewards = [p.reward for p in views if p.reward is not None]
    failed = sum(p.error is not None for p in views)
    mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "no rewards"
    tokens = sum(p.trained_tokens for p in views)
    console.print(
        f"{len(views)} trajectories: {mean}, {failed} failed, {tokens:,} tokens sampled, "
        f"{sum(p.tool_calls for p in views)} tool calls ({sum(p.tool_errors for p in views)} errors)",
        soft_wrap=True,
    )


def _facts(p: TrajectoryView) -> list[tuple[str, str | Text]]:
    versions = Text(", ").join([Text(f"v{v}", style=version_style(v)) for v in p.weight_versions])
    rows: list[tuple[str, str | Text]] = [
        ("task", f"{p.task_id}, group {p.group_id}"),
        ("reward", _reward(p)),
        ("ended by", p.stop_reason),
        ("tokens", f"{p.tokens:,}: {p.trained_tokens:,} trained, {p.tokens - p.trained_tokens:,} masked"),
        ("turns", f"{p.turns}, {p.tool_calls} tool calls, {p.tool_errors} failed"),
        ("weights", Text.assemble(versions or "-", f" on {', '.join(p.engines) or 'no engine'}")),
        ("interrupted", f"{p.interruptions} times, {p.resumes} resumes, {p.failovers} failovers"),
    ]
    if p.routing is not None:
        invalid = f", {p.routing.invalid:,} of them invalid" if p.routing.invalid else ", all valid"
        spans = ", ".join(
            f"[{s.start}, {s.end}) v{s.weight_version}"
            if s.weight_version >= 0
            else f"[{s.start}, {s.end}) never"
            for s in p.routing.spans
        )
        rows.append(("routing", f"{p.routing.rows:,} rows{invalid}: {spans}"))
    if p.log_probs is not None:
        rows.append(("log-probs", _log_probs(p.log_probs)))
    rows.append(("took", f"{p.duration_s:.2f} s"))
    return rows


def _reward(p: TrajectoryView) -> Text:
    if p.reward is None:
        return Text("none")
    parts = ", ".join(f"{name} {value:.3f}" for name, value in p.reward_parts.items() if name != "reward")
    style = "bold green" if p.reward > 0 else "bold red"
    return Text.assemble((f"{p.reward:.3f}", style), f" ({parts})" if parts else "")


def _heading(passage: Passage) -> Rule:
    name = f"turn {passage.turn}" if passage.turn else passage.role
    trained = "trained" if passage.trained else "inherited" if passage.turn else "masked"
    title = Text.assemble((name, "bold"), f" · {passage.tokens:,} tokens, {trained}")
    if masked := sum(call.masked for call in passage.calls):
        title.append(f" except {masked:,} that are too old")
    if passage.calls:
        title.append(f" · {_span([call.weight_version for call in passage.calls])}")
    if passage.log_probs is not None:
        title.append(f" · mean log-prob {passage.log_probs.mean:.3f}")
    if passage.engine_s is not None:
        title.append(f" · {passage.engine_s:.2f} s")
    if passage.notes:
        title.append(f" · {', '.join(f'{name}={value}' for name, value in passage.notes.items())}")
    return Rule(title, align="left", style="dim", characters="─")


def _body(passage: Passage) -> Text:
    if not passage.calls:
        return Text(passage.text.strip("\n"), style=_ROLE_STYLES.get(passage.role, ""))
    body = Text()
    before = ""
    for call in passage.calls:
        body.append(f"⟨{before}v{call.weight_version} {call.engine_id}⟩", style="dim")
        body.append(call.text, style=version_style(call.weight_version))
        # An engine that continues under new weights does not end the call.
        before = f"{call.finish_reason} → " if call.finish_reason in ("abort", "failover") else "→ "
    body.append(f"⟨{passage.calls[-1].finish_reason}⟩", style="dim")
    return body


def _status(row: ArchiveRow) -> Text:
    match row.status:
        case "trained":
            return Text(f"trained in step {row.step}", style="green")
        case "dropped" | "failed":
            return Text(f"{row.status}: {row.reason}", style="red")
        case other:
            return Text(other)


_COLUMNS: Final = (
    _Column("trajectory", lambda row: row.trajectory_id, "left"),
    _Column("task", lambda row: row.task_id, "left"),
    _Column("status", _status, "left"),
    _Column("reward", lambda row: "-" if row.reward is None else f"{row.reward:.3f}"),
    _Column("ended by", lambda row: row.stop_reason, "left"),
    _Column("turns", lambda row: f"{row.turns}"),
    _Column("tokens", lambda row: f"{row.tokens:,}"),
    _Column("sampled", lambda row: f"{row.sampled:,}"),
    _Column("cut", lambda row: f"{row.interruptions}"),
    _Column("versions", lambda row: _span([row.oldest_version, row.newest_version])),
    _Column("seconds", lambda row: f"{row.duration_s:.2f}"),
)

_LEFT_OUT: Final = ("sampled", "turns", "seconds", "ended by", "task", "cut", "versions", "tokens", "reward")
"""Columns that a narrow terminal lacks, the first to go first."""


def _log_probs(figures: LogProbs) -> str:
    token = f" ({figures.least_likely!r})" if figures.least_likely else ""  # a special token is left out
    return f"mean {figures.mean:.3f}, 5% below {figures.p05:.3f}, least {figures.min:.3f}{token} nats"


def _span(versions: Iterable[int | None]) -> str:
    known = sorted({version for version in versions if version is not None})
    if not known:
        return "-"
    return f"v{known[0]}" if len(known) == 1 else f"v{known[0]} to v{known[-1]}"


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")
