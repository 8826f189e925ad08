"""A folder of whole weights on an engine's host that is brought from version to version by deltas.

The next version is written beside the current one, and replaces it when the sum over each of its tensors
equals the trainer's. The folder is in memory (`weights.local_dir`); engines load from it as from any other.
No other user of the host can read it or make it first.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from async_rl.runtime.files import private_folder
from async_rl.weights.delta import Change, DeltaHeader, DeltaRefused, Raw, decode, read_header

log = logging.getLogger(__name__)


class WeightFolder:
    """A folder of whole weights on this host. Can be used from any thread."""

    def __init__(self, root: Path) -> None:
        """Start empty; what an earlier incarnation left under `root` is removed."""
        self._root = root
        self._held: tuple[int, Path] | None = None
        self._lock = threading.Lock()
        self._in_use = ExitStack()
        self.clear_folder()

    def copy_version(self, path: str, version: int) -> str:
        """Copy a folder of whole weights here.

        Returns:
            The path of the copy.

        Raises:
            DeltaRefused: When there is not enough space.
        """
        with self._lock:
            self.clear_folder()
            try:
                return self._write_version(Path(path), version, ())
            except OSError as error:
                self.clear_folder()
                raise DeltaRefused(f"cannot copy {path} to {self._root}: {error}", "failed") from error

    def apply_delta(self, path: str) -> str:
        """Create the next version from the current one.

        Returns:
            The path of the new version, which replaces the current one.

        Raises:
            DeltaRefused: When the delta is of another version, the file is damaged or there is not enough
                space. The current version stays.
        """
        with self._lock:
            try:
                files = [np.memmap(file, np.uint8, "r") for file in sorted(Path(path).glob("*.delta"))]
                parts = [(read_header(data), data) for data in files]
                if {header.num_files for header, _ in parts} != {len(parts)}:
                    raise DeltaRefused(f"{path} has {len(parts)} files, and others are missing", "damaged")
                header = parts[0][0]
                if self._held is None or self._held[0] != header.base:
                    held = "nothing" if self._held is None else f"version {self._held[0]}"
                    raise DeltaRefused(f"{path} is of version {header.base}; held is {held}", "base")
                return self._write_version(self._held[1], header.version, parts)
            except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
                raise DeltaRefused(f"cannot apply {path} in {self._root}: {error}", "failed") from error

    def clear_folder(self) -> None:
        """Remove all versions, which frees the memory."""
        self._held = None
        shutil.rmtree(self._root, ignore_errors=True)
        self._in_use.close()

    def _write_version(self, source: Path, version: int, delta: Sequence[tuple[DeltaHeader, Raw]]) -> str:
        self._root.parent.mkdir(parents=True, exist_ok=True)
        private_folder(self._root)
        if self._held is None:
            self._in_use.enter_context(_locked(self._root))
        final = self._root / f"version_{version}"
        scratch = self._root / f".version_{version}.tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            shutil.copytree(source, scratch)
            for header, data in delta:
                patch(scratch, header, data)
            shutil.rmtree(final, ignore_errors=True)
            scratch.rename(final)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        before, self._held = self._held, (version, final)
        if before is not None and before[1] != final:
            shutil.rmtree(before[1], ignore_errors=True)
        return str(final)


def remove_left_folders(parent: Path, prefix: str) -> None:
    """Remove folders of killed processes on this host, whose names begin so and which no process uses.

    An engine removes the folder of its own number by itself. But after a restart of the run the engines of
    this host may have other numbers, and the copy of a large model is half of the host's memory.
    """
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError), _locked(folder):
            log.info("removing weights that a killed process left in %s", folder)
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Mark a folder as used, until the block or the process ends.

    Raises:
        OSError: Another process uses it, or it is no folder.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


def patch(folder: Path, header: DeltaHeader, data: Raw) -> None:
    """Change the safetensors of a folder in place.

    Raises:
        DeltaRefused: When they are not the base of the delta, or the result differs from the trainer's; some
            tensors are changed then.
    """
    missing = {change.name: change for change in header.changes}
    for path in sorted(folder.glob("*.safetensors")):
        mapped = np.memmap(path, np.uint8, "r+")
        (length,) = struct.unpack("<Q", mapped[:8].tobytes())
        table: dict[str, Any] = json.loads(mapped[8 : 8 + length].tobytes())
        for name in missing.keys() & table.keys():
            start, end = (8 + length + offset for offset in table[name]["data_offsets"])
            _patch_tensor(mapped[start:end], missing.pop(name), data)
    if missing:
        raise DeltaRefused(f"{folder} has no {', '.join(sorted(missing)[:3])}", "base")


def _patch_tensor(target: Raw, change: Change, data: Raw) -> None:
    found = google_crc32c.value(target)
    if (len(target), found) != (change.num_bytes, change.before):
        raise DeltaRefused(f"{change.name} sums to {found:08x}, expected {change.before:08x}", "base")
    decode(data[change.start : change.end], target, change.itemsize)
    if (found := google_crc32c.value(target)) != change.after:
        raise DeltaRefused(
            f"{change.name} sums to {found:08x} when changed, expected {change.after:08x}", "damaged"
        )
