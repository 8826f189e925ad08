"""Append-only files of JSON lines: the records of steps and evaluations, and what a tracker logs."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from async_rl.codec import UNREADABLE
from async_rl.errors import ConfigError
from async_rl.runtime.files import replace_file, sync

R = TypeVar("R")


class RecordLog(Generic[R]):
    """A file with one JSON record per line, in ascending order of their steps.

    A crash can cut the last line short. Readers ignore such a line, and the next `append` removes it. A
    resumed run repeats the steps after its checkpoint: `truncate_to` removes their records before, so that
    the file has one line for each step.
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
        self._last: tuple[int, int] | None = None
        """The step of the line that `append` wrote last, and where it begins."""

    def append(self, record: R) -> None:
        """Write a record as the last line. It replaces one of the same step that was appended just before.

        Readers see the whole line or none of it. One write replaces a line, padded with spaces if it has
        become shorter, so that a kill leaves the old record or the new one.
        """
        step, line = self._step_of(record), msgspec.json.encode(record)
        with self.path.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(end - 1, 0))
            if file.read(1) not in (b"", b"\n"):
                end = file.truncate(len(self._whole_lines()))
        begin = end
        if self._last is not None and self._last[0] == step:
            begin = self._last[1]
            line = line.ljust(end - begin - 1)
        self._last = step, begin
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if os.pwrite(descriptor, line + b"\n", begin) <= len(line):  # the disk took a part of it
                os.ftruncate(descriptor, begin)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        """Flush all records to disk, so that a power cut loses none of them.

        Raises:
            OSError: The disk does not take them.
        """
        if self.path.exists():
            sync(self.path)
            sync(self.path.parent)

    def read(self) -> list[R]:
        """Return one record per step, ascending; none when the file does not exist.

        Raises:
            ConfigError: A line is not a record of this type.
        """
        kept: list[R] = []
        for _, record in self._decoded_lines():
            while kept and self._step_of(kept[-1]) >= self._step_of(record):
                kept.pop()
            kept.append(record)
        return kept

    def truncate_to(self, step: int) -> None:
        """Remove the records after a step, and all but the last of each.

        Readers see the old file or the new one.

        Raises:
            ConfigError: A line is not a record of this type.
        """
        self._last = None
        kept: dict[int, bytes] = {}  # an earlier version of this program has left several lines of a step
        for line, record in self._decoded_lines():
            if (number := self._step_of(record)) <= step:
                kept[number] = line
        content = b"".join(kept[number] for number in sorted(kept))
        if content != self._whole_lines():
            replace_file(self.path, content, durable=True)

    def _decoded_lines(self) -> Iterator[tuple[bytes, R]]:
        lines = self._whole_lines().splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            if line.isspace():  # as an editor may add
                continue
            try:
                record = self._decoder.decode(line)
            except UNREADABLE as error:
                if number == len(lines) > 1:  # a power cut may have left a part of a line that was replaced
                    return
                raise ConfigError(
                    f"{self.path} is damaged in line {number} ({error}): restore it, or remove that line"
                ) from error
            yield line, record

    def _whole_lines(self) -> bytes:
        if not self.path.exists():
            return b""
        whole, newline, _ = self.path.read_bytes().rpartition(b"\n")
        return whole + newline
