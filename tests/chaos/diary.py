"""The trainer's diary: one JSON line for each start and each step, as rank 0 saw them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

DIARY = "ASYNC_RL_CHAOS_DIARY"
"""Environment variable with the diary's path. Every process of the run inherits it, and is known by it."""


class SetUp(msgspec.Struct, frozen=True, kw_only=True, tag="set up"):
    """The trainer came up, at the step of a checkpoint or at 0."""

    step: int
    pid: int


class Trained(msgspec.Struct, frozen=True, kw_only=True, tag="trained"):
    """A step was done."""

    step: int
    version: int
    """That the trainer held when it consumed the batch."""
    trajectory_ids: tuple[str, ...]
    oldest: tuple[int, ...]
    """Version of the oldest sampled token of each."""


Entry = SetUp | Trained


def write(path: Path, entry: Entry) -> None:
    """Add an entry, whole: it is one write to a file that is only appended to."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, msgspec.json.encode(entry) + b"\n")
    finally:
        os.close(descriptor)


def read(path: Path) -> list[Entry]:
    """All entries; none before the first."""
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return msgspec.json.Decoder(Entry).decode_lines(whole) if whole else []


def effective(entries: Iterable[Entry]) -> dict[int, Trained]:
    """The steps that the final weights are made of: what came after a checkpoint is undone by its setup.

    Raises:
        AssertionError: When a step does not follow the one before it.
    """
    steps: dict[int, Trained] = {}
    for entry in entries:
        if isinstance(entry, SetUp):
            assert entry.step <= len(steps), f"came up at step {entry.step} after {len(steps)} steps"
            steps = {step: done for step, done in steps.items() if step <= entry.step}
        else:
            assert entry.step == len(steps) + 1, f"step {entry.step} was done after step {len(steps)}"
            steps[entry.step] = entry
    return steps
