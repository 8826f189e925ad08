"""Times two ways of doing the same in turn, and prints them as rows with their ratio.

Load comes and goes, so a ratio is one of the same round, and a row has the quartiles of these ratios.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table


class Row(msgspec.Struct, kw_only=True):
    """One line of the table; times in microseconds."""

    what: str
    size: str
    p50_us: float
    p99_us: float
    reference: str = ""
    reference_us: float = 0.0
    ratio: float = 0.0
    ratio_low: float = 0.0
    ratio_high: float = 0.0
    target: str = ""


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the docstring of a benchmark as its help, and with `--json`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows; - is the standard output")
    return parser


def timed(work: Callable[[], Any]) -> Callable[[], float]:
    """Returns the seconds that the work takes."""

    def run() -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return run


def in_turns(repetitions: int, **contestants: Callable[[], float]) -> dict[str, np.ndarray]:
    """Returns the seconds of each, alternately, after two warm-up rounds."""
    measured = {name: np.empty(repetitions) for name in contestants}
    for round_ in range(-2, repetitions):
        for name, contestant in contestants.items():
            seconds = contestant()
            if round_ >= 0:
                measured[name][round_] = seconds
    return measured


def row(what: str, size: str, ours: np.ndarray, reference: str, other: np.ndarray, target: str = "") -> Row:
    """Compares ours with the reference, of the same round where there are as many of both."""
    ratios = np.percentile(ours / (other if len(other) == len(ours) else np.median(other)), [25, 50, 75])
    return Row(
        what=what,
        size=size,
        p50_us=float(np.median(ours)) * 1e6,
        p99_us=float(np.percentile(ours, 99)) * 1e6,
        reference=reference,
        reference_us=float(np.median(other)) * 1e6,
        ratio=float(ratios[1]),
        ratio_low=float(ratios[0]),
        ratio_high=float(ratios[2]),
        target=target,
    )


def show(rows: Sequence[Row], title: str) -> None:
    """Prints the rows as a table."""
    table = Table(title=title)
    for column in ("", "size", "p50", "p99", "reference", "its p50", "ratio", "quartiles", "target"):
        table.add_column(column, justify="left" if column in ("", "size", "reference", "target") else "right")
    for r in rows:
        amount = _bytes if "(bytes)" in r.what else _time
        table.add_row(
            r.what,
            r.size,
            amount(r.p50_us),
            amount(r.p99_us),
            r.reference,
            amount(r.reference_us),
            f"{r.ratio:.2f}",
            f"{r.ratio_low:.2f}-{r.ratio_high:.2f}",
            r.target,
        )
    Console(width=150).print(table)


def _time(microseconds: float) -> str:
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.2f} s"
    return f"{microseconds / 1000:.2f} ms" if microseconds >= 100 else f"{microseconds:.2f} us"


def _bytes(count: float) -> str:
    return f"{count / 1e6:.0f} MB"


def write_json(where: str | None, rows: Sequence[Any]) -> None:
    """Writes the rows as a JSON list to a file, or to the standard output for `-`."""
    if where is None:
        return
    text = msgspec.json.format(msgspec.json.encode(rows), indent=1).decode()
    if where == "-":
        print(text)
    else:
        Path(where).write_text(text + "\n")
