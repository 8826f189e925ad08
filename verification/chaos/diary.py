"""The trainer's diary: one JSON line for each start and each step, recorded by rank 0."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from verification.chaos.engine_faults import append

DIARY = "ASYNC_RL_CHAOS_DIARY"
"""Environment variable with the diary's path, which every process of the run inherits; it identifies them."""


class SetUp(msgspec.Struct, frozen=True, kw_only=True, tag="set up"):
    """The trainer started, at the step of a checkpoint or at 0."""

    step: int
    pid: int


class Trained(msgspec.Struct, frozen=True, kw_only=True, tag="trained"):
    """A step was completed."""

    step: int
    version: int
    """The trainer's weight version when it consumed the batch."""
    trajectory_ids: tuple[str, ...]
    oldest: tuple[int, ...]
    """Version of the oldest sampled token of each trajectory."""
    rewards: tuple[float, ...] = ()
    """The reward of each trajectory."""


Entry = SetUp | Trained


def write(path: Path, entry: Entry) -> None:
    """Appends an entry by a single write."""
    append(path, msgspec.json.encode(entry) + b"\n")


def read(path: Path) -> list[Entry]:
    """Returns all entries; an empty list before the first."""
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return msgspec.json.Decoder(Entry).decode_lines(whole) if whole else []


def effective(entries: Iterable[Entry]) -> dict[int, Trained]:
    """Returns the steps that the final weights include; loading a checkpoint undoes the steps after it.

    Raises:
        AssertionError: When a step does not follow the previous one.
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
