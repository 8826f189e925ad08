"""`async-rl inspect RUN [TRAJECTORY]`: shows the newest finished trajectories of a run."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from rich.text import Text

from async_rl.cli.inspection.show import show_table, show_trajectory, terminal
from async_rl.cli.inspection.trajectory_view import Decode, decoder, token_numbers, view_trajectory
from async_rl.config import Config, load_config
from async_rl.data.chat_format import load_chat_format
from async_rl.errors import ConfigError
from async_rl.observability.console_report import failure_pairs
from async_rl.observability.formatting import abbreviate_ids
from async_rl.observability.text_console import TextConsole, pairs
from async_rl.run.folder import find_run_folder
from async_rl.runtime.printable import print_text
from async_rl.store.archive import FILE, ArchiveEvent, ArchiveReader, ArchiveRow
from async_rl.store.ledger_tables import read_attempts

Order = Literal["newest", "longest", "most-interrupted", "reward", "slowest"]
ORDERS: Final[dict[Order, str]] = {
    "newest": "number DESC",
    "longest": "tokens DESC, number DESC",
    "most-interrupted": "interruptions DESC, number DESC",
    "reward": "reward IS NULL, reward, number DESC",
    "slowest": "duration_s DESC, number DESC",
}
"""How a table is sorted, in SQL; `reward` has the worst first."""


_CONDITIONS: Final = {
    "status": "status = ?",
    "reason": "instr(lower(reason), lower(?))",
    "task": "task_id = ?",
    "failure": "failure = ?",
    "min_reward": "reward >= ?",
    "max_reward": "reward <= ?",
}
"""What selects trajectories for a table, in SQL."""


def inspect(
    run: Path,
    trajectory: str | None,
    *,
    sort: Order = "newest",
    limit: int = 20,
    special: bool = False,
    as_json: bool = False,
    console: TextConsole | None = None,
    **selected: str | float | None,
) -> int:
    """Print a table of a run's trajectories, or one of them in full.

    Args:
        run: The run's folder, or its name below `runs`.
        trajectory: Beginning of an id; None prints the table.
        sort: Order of the table.
        limit: Maximum number of lines of the table; 0 for all.
        special: Whether special tokens are shown.
        as_json: Print JSON instead: a list of table rows, or a `TrajectoryView`.
        console: Where to print; None takes stdout.
        selected: Which trajectories the table has, by the names of `_CONDITIONS`; None selects all.

    Returns:
        The exit code.

    Raises:
        ConfigError: There is no such run or trajectory, or the beginning matches several.
    """
    console = console or terminal()
    run_dir = find_run_folder(run)
    reader = ArchiveReader(run_dir / FILE)
    try:
        if trajectory is None:
            given = {_CONDITIONS[name]: value for name, value in selected.items() if value is not None}
            where = " AND ".join(["1", *given])
            rows = reader.find_rows(where, list(given.values()), order=ORDERS[sort], limit=limit or -1)
            _print_table(console, run_dir, reader, rows, as_json=as_json)
        else:
            _print_one(console, run_dir, reader, trajectory, special=special, as_json=as_json)
    finally:
        reader.close()
    return 0


def _print_table(
    console: TextConsole, run_dir: Path, reader: ArchiveReader, rows: Sequence[ArchiveRow], *, as_json: bool
) -> None:
    if as_json:
        print_text(msgspec.json.encode(rows).decode())
        return
    short = abbreviate_ids(
        [row.trajectory_id for row in rows], (row.trajectory_id for row in reader.find_rows())
    )
    title = f"{len(rows)} of the {reader.count_trajectories()} newest finished trajectories of {run_dir}"
    show_table(console, rows, short, title)
    if counts := _ledger(run_dir, "SELECT state, count(*) FROM trajectories GROUP BY state"):
        now = dict(counts)
        console.print(
            f"in flight {now.get('in_flight', 0)}, queued {now.get('queued', 0)}; "
            f"`async-rl inspect {run_dir} TRAJECTORY` shows one in full",
            soft_wrap=True,
        )
    if failures := read_attempts(run_dir / "ledger.sqlite").rows():
        console.print(Text("\nwhy attempts of the run did not succeed", style="bold"))
        console.print(pairs(failure_pairs(failures)))


def _print_one(
    console: TextConsole,
    run_dir: Path,
    reader: ArchiveReader,
    beginning: str,
    *,
    special: bool,
    as_json: bool,
) -> None:
    row = _find(reader, beginning)
    kept, events = reader.read_trajectory(row.trajectory_id)
    config = _config(run_dir)
    decode, remark = _decoder_of(config, special=special)
    view = view_trajectory(
        kept,
        decode,
        history=[*events, *_ledger_events(run_dir, row)],
        oldest_trained=_oldest_trained(config, row),
    )
    if as_json:
        print_text(msgspec.json.encode(view).decode())
        return
    show_trajectory(console, view)
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
    """Return the config of the run; None if it cannot be read, which only costs details.

    The answers of an evaluation are two folders below their run's.
    """
    folders = (run_dir, *run_dir.resolve().parents[:2])
    found = next((folder for folder in folders if (folder / "config.yaml").is_file()), run_dir)
    try:
        return load_config(found / "config.yaml", [])
    except ConfigError:
        return None


def _decoder_of(config: Config | None, *, special: bool) -> tuple[Decode, str]:
    """Return a function from tokens to text, and a remark if it cannot produce text."""
    if config is None:
        return token_numbers, "The run's config.yaml cannot be read: tokens are shown as numbers."
    try:
        return decoder(load_chat_format(config.model.path), special=special), ""
    except ConfigError as error:
        return token_numbers, f"Tokens are shown as numbers: {error}"


def _oldest_trained(config: Config | None, row: ArchiveRow) -> int | None:
    """Return the oldest version trained on under `mask_tokens`. A step consumes at the version before it."""
    if config is None or row.step is None or config.rollout.staleness_policy != "mask_tokens":
        return None
    return row.step - 1 - config.rollout.max_staleness


def _ledger_events(run_dir: Path, row: ArchiveRow) -> list[ArchiveEvent]:
    """Return the ledger's state of a trajectory; the archive may lack the last second before a kill."""
    found = _ledger(
        run_dir,
        "SELECT state, coalesce(reason, ''), step, position, weight_version "
        "FROM trajectories JOIN groups USING (group_id) WHERE trajectory_id = ?",
        (row.trajectory_id,),
    )
    if not found:
        return []
    ((state, reason, step, position, weight_version),) = found
    status = f"{state}{f' in step {step}' if step is not None else ''}{f' ({reason})' if reason else ''}"
    what = f"in the ledger: {status}; task at position {position}, its group no older than v{weight_version}"
    return [ArchiveEvent(unix_s=(run_dir / "ledger.sqlite").stat().st_mtime, what=what)]


def _ledger(run_dir: Path, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """Query the run's ledger, read-only; return nothing if there is no readable ledger."""
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
