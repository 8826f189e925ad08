"""Append-only files of JSON lines: the records of steps and evaluations, and what a tracker logs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from async_rl.runtime.files import replace_file

R = TypeVar("R")


class RecordLog(Generic[R]):
    """A file with one JSON record per line, in ascending order of their steps.

    A crash can cut the last line short. Readers ignore such a line, and the next `append` removes it. A
    resumed run repeats the steps after its checkpoint and appends them again: the last record of a step
    counts.

    Example:
        >>> records = RecordLog(run_dir / "metrics.jsonl", StepRecord, lambda record: record.step)
        >>> records.append(StepRecord(step=1, weight_version=1, time_s=2.5))
        >>> records.read()[-1].step
        1
    """

    def __init__(self, path: Path, record_type: type[R], step_of: Callable[[R], int]) -> None:
        """Refer to a file, which need not exist yet.

        Args:
            path: The file.
            record_type: The type of each record.
            step_of: Returns the step, or weight version, of a record.
        """
        self.path = path
        self._decoder = msgspec.json.Decoder(record_type)
        self._step_of = step_of

    def append(self, record: R) -> None:
        """Write a record as the last line. Readers see the whole line or none of it."""
        with self.path.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(end - 1, 0))
            if file.read(1) not in (b"", b"\n"):
                file.truncate(len(self._whole_lines()))
            file.write(msgspec.json.encode(record) + b"\n")

    def read(self) -> list[R]:
        """Return one record per step, ascending; none when the file does not exist.

        Raises:
            msgspec.MsgspecError: When a line is not a record of this type.
        """
        kept: list[R] = []
        for record in self._decoder.decode_lines(self._whole_lines()):
            while kept and self._step_of(kept[-1]) >= self._step_of(record):
                kept.pop()
            kept.append(record)
        return kept

    def truncate_to(self, step: int) -> None:
        """Remove the records after a step. Readers see the old file or the new one."""
        lines = self._whole_lines().splitlines(keepends=True)
        kept = b"".join(line for line in lines if self._step_of(self._decoder.decode(line)) <= step)
        replace_file(self.path, kept)

    def _whole_lines(self) -> bytes:
        if not self.path.exists():
            return b""
        whole, newline, _ = self.path.read_bytes().rpartition(b"\n")
        return whole + newline
