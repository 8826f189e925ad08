"""`async-rl inspect RUN [TRAJECTORY]`: the newest finished trajectories of a run, which may be running."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from rich.console import Console
from rich.text import Text

from async_rl.cli.inspection.portrait import Decode, decoder, portray, token_numbers
from async_rl.cli.inspection.show import show, show_table, terminal
from async_rl.config import Config, load_config
from async_rl.data.chat_format import load_chat_format
from async_rl.errors import ConfigError
from async_rl.queue.archive import FILE, ArchiveEvent, ArchiveReader, ArchiveRow

Order = Literal["newest", "longest", "most-interrupted", "reward", "slowest"]
ORDERS: Final[dict[Order, str]] = {
    "newest": "number DESC",
    "longest": "tokens DESC, number DESC",
    "most-interrupted": "interruptions DESC, number DESC",
    "reward": "reward IS NULL, reward, number DESC",
    "slowest": "duration_s DESC, number DESC",
}
"""How a table is sorted, in SQL; `reward` has the worst first."""

_SHORTEST_PREFIX: Final = 8


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which trajectories of a run; what is None does not matter."""

    status: str | None = None
    reason: str | None = None
    """Some of the reason or error."""
    task: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None

    def sql(self) -> tuple[str, list[Any]]:
        """A condition, and the values of its question marks."""
        conditions = {
            "status = ?": self.status,
            "instr(lower(reason), lower(?))": self.reason,
            "task_id = ?": self.task,
            "reward >= ?": self.min_reward,
            "reward <= ?": self.max_reward,
        }
        given = {text: value for text, value in conditions.items() if value is not None}
        return " AND ".join(["1", *given]), list(given.values())


def inspect(
    run: Path,
    trajectory: str | None,
    *,
    chosen: Filter,
    order: Order = "newest",
    limit: int = 20,
    special: bool = False,
    as_json: bool = False,
    console: Console | None = None,
) -> int:
    """Print a table of a run's trajectories, or one of them whole.

    Args:
        run: The run's folder, or its name below `runs`.
        trajectory: Beginning of an id; None prints the table.
        chosen: Which of them the table has.
        order: Of the table.
        limit: Most lines of the table; 0 for all.
        special: Whether special tokens are shown.
        as_json: Print JSON instead: a list of rows, or a portrait.
        console: Where; None takes stdout.

    Returns:
        The exit code.

    Raises:
        ConfigError: There is no such run or trajectory, or the beginning fits several.
    """
    console = console or terminal()
    run_dir = run if run.is_dir() else Path("runs") / run
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run folder {str(run)!r} (looked from {os.getcwd()}, and in runs/)")
    reader = ArchiveReader(run_dir / FILE)
    try:
        if trajectory is None:
            where, values = chosen.sql()
            rows = reader.find_rows(where, values, order=ORDERS[order], limit=limit or -1)
            _print_table(console, run_dir, reader, rows, as_json=as_json)
        else:
            _print_one(console, run_dir, reader, trajectory, special=special, as_json=as_json)
    finally:
        reader.close()
    return 0


def abbreviate(ids: Iterable[str], among: Iterable[str]) -> list[str]:
    """The shortest beginnings of one length by which ids are told apart from all others."""
    everything = set(among)
    shown = list(ids)
    longest = max(map(len, everything), default=0)
    for length in range(_SHORTEST_PREFIX, longest):
        counted = Counter(name[:length] for name in everything)
        if all(counted[name[:length]] == 1 for name in shown):
            return [name[:length] for name in shown]
    return shown


def _print_table(
    console: Console, run_dir: Path, reader: ArchiveReader, rows: Sequence[ArchiveRow], *, as_json: bool
) -> None:
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return
    short = abbreviate([row.trajectory_id for row in rows], (row.trajectory_id for row in reader.find_rows()))
    title = f"{len(rows)} of the {reader.count_trajectories()} newest finished trajectories of {run_dir}"
    show_table(console, rows, short, title)
    if counts := _ledger(run_dir, "SELECT state, count(*) FROM trajectories GROUP BY state"):
        now = dict(counts)
        console.print(
            f"in flight {now.get('in_flight', 0)}, queued {now.get('queued', 0)}; "
            f"`async-rl inspect {run_dir} TRAJECTORY` shows one whole",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _print_one(
    console: Console, run_dir: Path, reader: ArchiveReader, beginning: str, *, special: bool, as_json: bool
) -> None:
    row = _find(reader, beginning)
    kept, events = reader.read_trajectory(row.trajectory_id)
    config = _config(run_dir)
    decode, remark = _decode(config, special=special)
    portrait = portray(
        kept,
        decode,
        history=[*events, *_as_the_ledger_says(run_dir, row)],
        oldest_trained=_oldest_trained(config, row),
    )
    if as_json:
        print(msgspec.json.encode(portrait).decode())
        return
    show(console, portrait)
    if remark:
        console.print(Text(remark, style="yellow"), soft_wrap=True)


def _find(reader: ArchiveReader, beginning: str) -> ArchiveRow:
    exact = reader.find_rows("trajectory_id = ?", (beginning,))
    found = exact or reader.find_rows(
        "substr(trajectory_id, 1, length(?)) = ?", (beginning, beginning), limit=6
    )
    if not found:
        raise ConfigError(
            f"no trajectory begins with {beginning!r} among the {reader.count_trajectories()} kept ones: run "
            "`async-rl inspect` without one, or raise run.keep_trajectories"
        )
    if len(found) > 1:
        names = ", ".join(row.trajectory_id for row in found[:5])
        raise ConfigError(f"several trajectories begin with {beginning!r}: {names}{', …' * (len(found) > 5)}")
    return found[0]


def _config(run_dir: Path) -> Config | None:
    """What the run was started with; None where it cannot be read, which costs only its details.

    The answers of an evaluation are two folders below their run's.
    """
    folders = (run_dir, *run_dir.resolve().parents[:2])
    found = next((folder for folder in folders if (folder / "config.yaml").is_file()), run_dir)
    try:
        return load_config(found / "config.yaml", [])
    except ConfigError:
        return None


def _decode(config: Config | None, *, special: bool) -> tuple[Decode, str]:
    """From tokens to text, and a remark where it is not text."""
    if config is None:
        return token_numbers, "The run's config.yaml cannot be read: tokens are shown as their numbers."
    try:
        return decoder(load_chat_format(config.model.path), special=special), ""
    except ConfigError as error:
        return token_numbers, f"Tokens are shown as their numbers: {error}"


def _oldest_trained(config: Config | None, row: ArchiveRow) -> int | None:
    """Under `mask_tokens`, the oldest version that was trained on. A step consumes at the one before it."""
    if config is None or row.step is None or config.rollout.staleness_policy != "mask_tokens":
        return None
    return row.step - 1 - config.rollout.max_staleness


def _as_the_ledger_says(run_dir: Path, row: ArchiveRow) -> list[ArchiveEvent]:
    """What the ledger has of it still; the archive may lack the last second before a kill."""
    found = _ledger(
        run_dir,
        "SELECT state, coalesce(reason, ''), step, position, weight_version "
        "FROM trajectories JOIN groups USING (group_id) WHERE trajectory_id = ?",
        (row.trajectory_id,),
    )
    if not found:
        return []
    ((state, reason, step, position, weight_version),) = found
    said = f"{state}{f' in step {step}' if step is not None else ''}{f' ({reason})' if reason else ''}"
    what = f"in the ledger: {said}; task at position {position}, its group no older than v{weight_version}"
    return [ArchiveEvent(unix_s=(run_dir / "ledger.sqlite").stat().st_mtime, what=what)]


def _ledger(run_dir: Path, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """Rows of the run's ledger, read-only; none where there is no ledger to read."""
    path = (run_dir / "ledger.sqlite").resolve()
    try:
        database = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    except sqlite3.Error:
        return []
    try:
        return database.execute(statement, values).fetchall()
    except sqlite3.Error:
        return []
    finally:
        database.close()
