"""The manifest of a checkpoint: its step, layout and model, and the size and checksum of each of its files.

The manifest is written last, after all files are on disk. A checkpoint is incomplete when it has no manifest,
or when a file differs from what the manifest records.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import google_crc32c
import msgspec

from async_rl.config import LoraConfig
from async_rl.errors import CheckpointError
from async_rl.runtime.files import file_name

FORMAT: Final = 2
MANIFEST_NAME: Final = "manifest.json"

_CHUNK: Final = 1 << 24


class FileRecord(msgspec.Struct, frozen=True):
    """Size and checksum of a file."""

    num_bytes: int
    crc32c: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one checkpoint; stored in it as `manifest.json`."""

    format: int = FORMAT
    step: int
    """Completed steps; equal to the weight version."""
    extra: dict[str, Any]
    """State of the run that is saved with the checkpoint."""
    layout: dict[str, int | None]
    """Number of ranks and parallel sizes that wrote the checkpoint; any other layout can load it."""
    model: str
    """`model.path`: the folder with config and tokenizer."""
    dtype: str
    """Data type of the parameters."""
    optimizer_step: int
    """Updates included in the optimizer's moments; 0: the checkpoint has no moments."""
    critic_optimizer_step: int | None = None
    """The same of the value model; None: there is none."""
    lora: dict[str, Any] | None = None
    """Rank, alpha and targets of the adapters, which are all that the checkpoint holds; None: all weights."""
    versions: dict[str, str]
    """Versions of the packages that wrote the checkpoint, by package."""
    files: dict[str, FileRecord] = {}


def describe_lora(lora: LoraConfig | None) -> dict[str, Any] | None:
    """Return what a manifest says of adapters."""
    if lora is None:
        return None
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}


def record_file(path: Path) -> FileRecord:
    """Compute size and checksum of a file."""
    crc = size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = google_crc32c.extend(crc, chunk)
            size += len(chunk)
    return FileRecord(size, crc)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and flush it to disk."""
    with (folder / MANIFEST_NAME).open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest)))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest, without checking the files.

    Raises:
        CheckpointError: When the manifest is missing, unreadable or has another format.
    """
    try:
        manifest = msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {MANIFEST_NAME}: it was never completed") from error
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{folder / MANIFEST_NAME} cannot be read: {error}") from error
    try:
        for name in manifest.files:
            file_name(name, folder / MANIFEST_NAME)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if manifest.format != FORMAT:
        raise CheckpointError(f"{folder} has format {manifest.format}; this version reads format {FORMAT}")
    return manifest


def find_flaw(folder: Path, *, share: int = 0, of: int = 1) -> str | None:
    """Return what is wrong with a checkpoint, or None. It compares the sizes of all files and reads a share
    of them.

    Args:
        folder: The checkpoint.
        share: The index of the share whose checksums are verified; each rank verifies one.
        of: The number of shares.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    names = sorted(manifest.files)
    return _flaw_of_sizes(folder, manifest, names) or _flaw_of_contents(folder, manifest, names[share::of])


def _flaw_of_sizes(folder: Path, manifest: Manifest, names: Sequence[str]) -> str | None:
    for name in names:
        expected = manifest.files[name].num_bytes
        try:
            actual = (folder / name).stat().st_size
        except OSError as error:
            return f"{folder / name} is missing: {error.strerror}"
        if actual != expected:
            return f"{folder / name} has {actual} bytes, the manifest says {expected}"
    return None


def _flaw_of_contents(folder: Path, manifest: Manifest, names: Sequence[str]) -> str | None:
    for name in names:
        try:
            actual = record_file(folder / name)
        except OSError as error:
            return f"{folder / name} cannot be read: {error.strerror}"
        if actual.crc32c != manifest.files[name].crc32c:
            return f"{folder / name} is damaged: its checksum is not that of the manifest"
    return None
