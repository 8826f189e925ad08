"""Times two ways of doing the same in turn, and prints rows: a column for each of their keys.

Load comes and goes, so a ratio is one of the same round, and a row has the quartiles of these ratios.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
"""One line of a table; several numbers are a figure with its spread."""


def argument_parser(description: str | None, quick: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the docstring of a benchmark as its help, `--json`, and maybe `--quick`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows; - is the standard output")
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def timed(work: Callable[[], Any]) -> Callable[[], float]:
    """Return the seconds that the work takes."""

    def run() -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return run


def in_turns(
    repetitions: int, contestants: dict[str, Callable[[], float]], warm_up: int = 1
) -> dict[str, np.ndarray]:
    """Return the seconds of each, alternately, after rounds to warm up."""
    measured: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(warm_up + repetitions):
        for name, contestant in contestants.items():
            measured[name].append(contestant())
    return {name: np.array(seconds[warm_up:]) for name, seconds in measured.items()}


@contextmanager
def other_process(target: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """Run a function in a process of its own, with a connection to the yielded one, until the block ends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process raises an EOFError here
    try:
        yield ours
    finally:
        process.terminate()
        process.join()


def row(what: str, size: str, ours: np.ndarray, reference: str, other: np.ndarray) -> Row:
    """Compare ours with the reference, of the same round where there are as many of both."""
    ratios = np.percentile(ours / (other if len(other) == len(ours) else np.median(other)), [50, 25, 75])
    seconds = {
        "seconds": float(np.median(ours)),
        "reference": reference,
        "its seconds": float(np.median(other)),
    }
    return {"": what, "size": size, **seconds, "ratio (quartiles)": ratios.tolist()}


def report(
    rows: Sequence[Any], title: str, where: str | None, wrong: Sequence[str] = (), columns: Sequence[str] = ()
) -> int:
    """Print rows as a table, write them as JSON to a file (`-`: standard output), and say what is wrong.

    Returns:
        The exit status.
    """
    show(rows, title, columns, stderr=where == "-")
    text = msgspec.json.format(msgspec.json.encode(rows), indent=1).decode()
    if where == "-":
        print(text)
    elif where is not None:
        Path(where).write_text(text + "\n")
    for sentence in wrong:
        print(f"WRONG: {sentence}", file=sys.stderr)
    return int(bool(wrong))


def show(rows: Sequence[Any], title: str, columns: Sequence[str] = (), *, stderr: bool = False) -> None:
    """Print rows, mappings or structs, as a table of all columns or of some."""
    lines: list[Row] = msgspec.to_builtins(rows)
    table = Table(title=title, title_justify="left")
    columns = columns or list(dict.fromkeys(column for line in lines for column in line))
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column in ("", "what") else "right")
    for line in lines:
        table.add_row(*(_text(line.get(column)) for column in columns))
    Console(width=180, stderr=stderr).print(table)


def _text(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool() | str():
            return str(value)
        case [middle, *spread]:
            return f"{_text(middle)} ({'-'.join(map(_text, spread))})"
        case int():
            return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
