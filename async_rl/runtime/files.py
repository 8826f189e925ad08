"""Replaces files atomically."""

from __future__ import annotations

from pathlib import Path


def replace_file(path: Path, content: bytes, *, mode: int | None = None) -> None:
    """Write a file so that a reader sees either the old content or the new content, never a part of it.

    The content survives a crash of the process, not a power failure: nothing is synced to disk.

    Args:
        path: The file to create or replace; its folder must exist.
        content: The whole new content.
        mode: Permission bits; None leaves them to the process's umask.

    Raises:
        OSError: The folder cannot be written or the disk is full.
    """
    partial = path.with_name(f".{path.name}.part")
    partial.write_bytes(content)
    if mode is not None:
        partial.chmod(mode)
    partial.replace(path)
