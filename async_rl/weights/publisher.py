"""Publishes weight versions as files, whole or as adapters, and keeps the files while engines read them."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from async_rl.engine_protocol import AdapterUpdate, DiskUpdate
from async_rl.runtime.waits import waiting
from async_rl.trainer_protocol import Trainer

KEEP_VERSIONS: Final = 2
"""The newest versions that stay on disk: an engine may still load the one before the current version."""


class WeightPublisher:
    """Knows the current version and the files of recent versions; the trainer writes the files."""

    def __init__(self, trainer: Trainer, directory: Path, *, adapters: bool = False) -> None:
        """Publish nothing yet.

        Args:
            trainer: Writes the files.
            directory: Folder for published versions.
            adapters: Whether the trainer writes adapters, which engines load beside the model's weights.
        """
        self.adapters = adapters
        """Whether what is published is an adapter, and not whole weights."""
        self.current_version = -1
        """The version that engines have to serve."""
        self.directory = absolute(directory)
        self._trainer = trainer
        self._paths: dict[int, Path] = {}
        self._num_readers = Counter[int]()
        """By version: engines that load its files now."""

    async def remove_leftovers(self) -> None:
        """Remove what an earlier incarnation of the run published, or was publishing when it was killed."""
        for pattern in ("version_*", ".version_*.tmp", "delta_*"):
            for folder in sorted(self.directory.glob(pattern)):
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def adopt_files(self, version: int, path: Path) -> None:
        """Use existing files of a version, such as the model that version 0 is."""
        self._paths[version] = absolute(path)

    async def publish_files(self, version: int) -> None:
        """Let the trainer write the files of a version."""
        path = self.directory / f"version_{version}"
        with waiting("publish", f"version {version}"):
            await self._trainer.publish(str(path), version)
        self._paths[version] = path

    def has_files(self, version: int) -> bool:
        """Return whether there are files of a version."""
        return version in self._paths

    async def ensure_files(self, version: int) -> Path:
        """Return the folder of a version; publish it first if it has none."""
        if version not in self._paths:
            await self.publish_files(version)
        return self._paths[version]

    def path_of(self, version: int) -> Path:
        """Return the folder of a published version."""
        return self._paths[version]

    async def count_bytes(self, version: int) -> int:
        """Return the bytes of what was published of a version, whole or as a delta; 0 if nothing was."""

        def count() -> int:
            folders = self.directory / f"version_{version}", self.directory / f"delta_{version}"
            return sum(path.stat().st_size for folder in folders for path in folder.rglob("*"))

        return await asyncio.to_thread(count)

    def update_from(self, path: Path | str, version: int) -> DiskUpdate | AdapterUpdate:
        """Return the request that makes an engine load the files of a version from a folder."""
        kind = AdapterUpdate if self.adapters else DiskUpdate
        return kind(weight_version=version, path=str(path))

    @contextmanager
    def reading_files(self, version: int) -> Iterator[Path]:
        """Yield the folder of a version, which is kept until the block ends."""
        self._num_readers[version] += 1
        try:
            yield self._paths[version]
        finally:
            self._num_readers[version] -= 1

    async def remove_old_files(self) -> None:
        """Remove versions that are neither new, nor current, nor being read.

        Engines load the current one until the next, which may be published already, has taken its place.
        """
        kept = {self.current_version, *sorted(self._paths)[-KEEP_VERSIONS:]}
        unread = [v for v in self._paths if v not in kept and not self._num_readers[v]]
        for path in [self._paths.pop(version) for version in unread]:
            if path.parent == self.directory:
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def absolute(path: Path | str) -> Path:
    """Return a path that servers with other working folders understand."""
    return Path(path).absolute()
