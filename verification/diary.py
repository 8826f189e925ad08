"""The trainer's diary: one JSON line for each start, step and checkpoint, recorded by rank 0.

`verification/audit_run.py` describes the lines, and compares them with the ledger.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import msgspec

from async_rl.types import TakenBatch, TrainBatch

DIARY = "ASYNC_RL_CHAOS_DIARY"
"""Environment variable with the diary's path. The processes of a chaos run inherit it and are found by it."""


class SetUp(msgspec.Struct, frozen=True, kw_only=True, tag="set up"):
    """The trainer started, at the step of a checkpoint or at 0."""

    step: int


class Trained(msgspec.Struct, frozen=True, kw_only=True, tag="trained"):
    """A step was completed."""

    step: int
    version: int
    """The trainer's weight version when it consumed the batch."""
    trajectory_ids: tuple[str, ...]
    oldest: tuple[int, ...]
    """Version of the oldest trained token of each trajectory; -1 where none is trained."""
    rewards: tuple[float, ...]
    """The reward of each trajectory."""
    group_ids: tuple[str, ...]


class Saving(msgspec.Struct, frozen=True, kw_only=True, tag="saving"):
    """A checkpoint is about to be written."""

    step: int
    positions: dict[str, int]
    """Position in the sequence of tasks of each trained group, which the ledger forgets after checkpoints."""


Entry = SetUp | Trained | Saving


def trained(taken: TakenBatch, batch: TrainBatch, step: int) -> Trained:
    """Return the entry of a step."""
    parts = [slice(*bounds) for bounds in pairwise(batch.offsets.tolist())]
    versions = [batch.weight_versions[part][batch.loss_mask[part]].tolist() for part in parts]
    return Trained(
        step=step,
        version=batch.trainer_version,
        trajectory_ids=batch.trajectory_ids,
        oldest=tuple(min(each, default=-1) for each in versions),
        rewards=tuple(batch.rewards.tolist()),
        group_ids=taken.group_ids,
    )


def saving(step: int, checkpoints: str | Path) -> Saving:
    """Return the entry of a checkpoint, with what the ledger beside the checkpoints has."""
    ledger = Path(checkpoints).absolute().with_name("ledger.sqlite")
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True, timeout=10)) as database:
        found = database.execute(
            "SELECT DISTINCT group_id, position FROM groups JOIN trajectories USING (group_id) "
            "WHERE state = 'trained'"
        ).fetchall()
    return Saving(step=step, positions=dict(found))


def write(path: Path, entry: Entry) -> None:
    """Append an entry by a single write."""
    with path.open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(entry) + b"\n")


def read(path: Path) -> list[Entry]:
    """Return all entries; an empty list before the first."""
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return msgspec.json.Decoder(Entry).decode_lines(whole) if whole else []
