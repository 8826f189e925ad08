"""Rows of a benchmark of hours, kept one by one, so that a rerun continues."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

import msgspec

R = TypeVar("R")


class KeptRows(Generic[R]):
    """A file with a row on each line.

    Example:
        >>> kept = KeptRows(path, Row)
        >>> if not any(row.seed == 0 for row in kept.rows):
        ...     kept.append(measure(seed=0))
    """

    def __init__(self, path: Path, kind: type[R]) -> None:
        """Read what is there; an unfinished last line, of a program that was killed, is cut off."""
        self._path = path
        self.rows: list[R] = []
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        self.rows = [msgspec.json.decode(line, type=kind) for line in whole]
        if len(whole) < len(lines):
            path.write_bytes(b"".join(whole))

    def append(self, row: R) -> None:
        """Write a row."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        self.rows.append(row)
