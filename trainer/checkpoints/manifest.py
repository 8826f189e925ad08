"""What a checkpoint says of itself: what it is of, and which files it is made of.

The manifest is written last, when all files stand on the disk. A checkpoint without one, or with files that
are not as the manifest says, is not whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import google_crc32c
import msgspec

from async_rl.errors import CheckpointError

FORMAT: Final = 2
MANIFEST_NAME: Final = "manifest.json"

_CHUNK: Final = 1 << 24
_NAME_OF_FORMAT_1: Final = "meta.json"


class FileRecord(msgspec.Struct, frozen=True):
    """A file as it was written."""

    num_bytes: int
    crc32c: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint."""

    format: int = FORMAT
    step: int
    """Steps done; the weight version equals it."""
    extra: dict[str, Any]
    """What the run asked to be kept with it."""
    layout: dict[str, int | None]
    """That wrote it: ranks and parallel sizes. Any other can read it."""
    model: str
    """`model.path`: where config and tokenizer are."""
    dtype: str
    """Of the parameters."""
    optimizer_step: int
    """Updates that the moments have seen; 0: there are none in it."""
    versions: dict[str, str]
    """Of the packages that wrote it."""
    files: dict[str, FileRecord] = {}


def record_file(path: Path) -> FileRecord:
    """Size and checksum of a file."""
    crc = size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = google_crc32c.extend(crc, chunk)
            size += len(chunk)
    return FileRecord(size, crc)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it, down to the disk."""
    with (folder / MANIFEST_NAME).open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest)))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Read it; the files are not looked at.

    Raises:
        CheckpointError: When there is none, or one of another format.
    """
    if not (folder / MANIFEST_NAME).is_file() and (folder / _NAME_OF_FORMAT_1).is_file():
        raise CheckpointError(
            f"{folder} has format 1, of an earlier version; this one reads format {FORMAT}: finish the run "
            "with the version that began it, or begin another run from its Hugging Face export"
        )
    try:
        manifest = msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {MANIFEST_NAME}: it was never finished") from error
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{folder / MANIFEST_NAME} cannot be read: {error}") from error
    if manifest.format != FORMAT:
        raise CheckpointError(f"{folder} has format {manifest.format}; this version reads format {FORMAT}")
    return manifest


def is_of_format_1(folder: Path) -> bool:
    """Whether an earlier version wrote it."""
    return (folder / _NAME_OF_FORMAT_1).is_file() and not (folder / MANIFEST_NAME).is_file()


def find_flaw(folder: Path, *, share: int = 0, of: int = 1) -> str | None:
    """What is wrong with a checkpoint, or None; sizes of all files are compared, and contents of a share.

    Args:
        folder: The checkpoint.
        share: Which part of the files to read: ranks share the work.
        of: How many parts there are.
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
