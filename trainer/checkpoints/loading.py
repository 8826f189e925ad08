"""The newest whole checkpoint, and a model that takes it up, whatever layout wrote it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch.distributed as dist

from async_rl.errors import CheckpointError
from async_rl.trainer_protocol import TrainerState
from trainer.checkpoints import folder
from trainer.checkpoints.manifest import NAME, Manifest, flaw, is_of_format_1, read_manifest
from trainer.collectives import exchange, raise_on_all_ranks
from trainer.megatron import shards, storage
from trainer.megatron.model import MegatronModel

log = logging.getLogger(__name__)


class Found(NamedTuple):
    """A whole checkpoint."""

    path: Path
    manifest: Manifest
    skipped_checkpoints: tuple[str, ...]
    """What is wrong with each of the newer ones."""


def resume(directory: Path, model: MegatronModel, layout: dict[str, int | None], dtype: str) -> TrainerState:
    """Take up the newest whole checkpoint of a folder, or start at step 0. Called on all ranks.

    Leftovers of saves that were cut short are removed: nobody else may be writing there.

    Raises:
        CheckpointError: As `find` and `load`.
    """
    with raise_on_all_ranks(CheckpointError, f"cannot look for checkpoints in {directory}"):
        if dist.get_rank() == 0:
            for left in folder.clean(directory):
                log.warning("removed %s, which was never finished", left)
    found = find(directory)
    return TrainerState(step=0) if found is None else load(found, model, layout, dtype)


def find(directory: Path) -> Found | None:
    """The checkpoint that a folder means: itself, or the newest whole one in it. Called on all ranks.

    Ranks share the reading of files.

    Returns:
        None when there is none at all.

    Raises:
        CheckpointError: When there are some, and none is whole, or the newest is of an earlier version.
    """
    named = (directory / NAME).exists() or folder.step_of(directory) is not None
    # Rank 0 looks for all: another host may see a folder later.
    names = [] if named else [path.name for path in folder.newest_first(directory)]
    seen = msgspec.json.decode(exchange(msgspec.json.encode(names))[0], type=list[str])
    flaws: list[str] = []
    for path in [directory] if named else [directory / name for name in seen]:
        with raise_on_all_ranks(CheckpointError, f"cannot read checkpoint {path}"):
            if is_of_format_1(path):
                read_manifest(path)
            found = flaw(path, share=dist.get_rank(), of=dist.get_world_size())
        told = sorted({words.decode() for words in exchange((found or "").encode()) if words})
        if not told:
            return Found(path, read_manifest(path), tuple(flaws))
        flaws.append(told[0])
    if flaws:
        raise CheckpointError(
            f"no checkpoint in {directory} is whole: {'; '.join(flaws)}. Restore one of them, or remove them "
            "to start from the model's own weights"
        )
    return None


def load(found: Found, model: MegatronModel, layout: dict[str, int | None], dtype: str) -> TrainerState:
    """Take up a checkpoint that is whole. Called on all ranks.

    Raises:
        CheckpointError: When it is of another model or data type.
    """
    path, manifest = found.path, found.manifest
    same_layout = manifest.layout == layout
    with raise_on_all_ranks(CheckpointError, f"cannot read checkpoint {path}"):
        if manifest.dtype != dtype:
            raise CheckpointError(
                f"{path} was trained with model.dtype {manifest.dtype}, but it is {dtype} now: set it back"
            )
        metadata = storage.read_metadata(path)
        stored = storage.shapes(metadata)
        wanted = shards.to_load(model, optimizer=manifest.optimizer_step > 0)
        random = shards.random_state() if same_layout else {}
        wanted += random.values()
        check_tensors(path, {part.key: tuple(part.global_shape) for part in wanted}, stored)
    keys = sorted(key for key in stored if not key.startswith("random."))
    asked = np.isin(keys, [part.key for part in wanted])
    everywhere = np.any([np.frombuffer(words, bool) for words in exchange(asked.tobytes())], axis=0)
    with raise_on_all_ranks(CheckpointError, f"cannot read checkpoint {path}"):
        if not everywhere.all():
            left = [keys[index] for index in np.flatnonzero(~everywhere)]
            raise CheckpointError(
                _of_another_model(path, f"it has {left[0]}, which this one has not", len(left))
            )
        storage.read(path, metadata, wanted)
        if manifest.optimizer_step:
            shards.set_optimizer_step(model, manifest.optimizer_step)
        if same_layout:
            shards.set_random_state(model, random)
    return TrainerState(
        step=manifest.step, extra=manifest.extra, skipped_checkpoints=found.skipped_checkpoints
    )


def check_tensors(path: Path, wanted: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]) -> None:
    """Compare a model's tensors with those of a checkpoint.

    Args:
        path: The checkpoint.
        wanted: Shapes of the model's tensors, by key.
        stored: Of the checkpoint's.

    Raises:
        CheckpointError: When one is missing or of another shape.
    """
    wrong = [key for key, shape in wanted.items() if stored.get(key) != shape]
    if wrong:
        key = wrong[0]
        raise CheckpointError(
            _of_another_model(
                path, f"{key} is {stored.get(key, 'missing')}, expected {wanted[key]}", len(wrong)
            )
        )


def _of_another_model(path: Path, difference: str, count: int) -> str:
    others = f" ({count} such differences)" if count > 1 else ""
    return f"{path} is of another model: {difference}{others}"
