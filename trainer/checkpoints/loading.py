"""Finds the newest complete checkpoint and loads it into a model, whatever layout wrote it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch.distributed as dist

from async_rl.errors import CheckpointError
from async_rl.trainer_protocol import TrainerState
from trainer.checkpoints import folder
from trainer.checkpoints.manifest import MANIFEST_NAME, Manifest, describe_lora, find_flaw, read_manifest
from trainer.collectives import all_gather_bytes, raise_on_all_ranks
from trainer.megatron import shards, storage
from trainer.megatron.model import MegatronModel

log = logging.getLogger(__name__)


class WholeCheckpoint(NamedTuple):
    """A complete checkpoint, whose files match its manifest."""

    path: Path
    manifest: Manifest
    skipped_checkpoints: tuple[str, ...]
    """What is wrong with each newer checkpoint that was skipped."""


def load_newest(
    directory: Path,
    model: MegatronModel,
    layout: dict[str, int | None],
    dtype: str,
    critic: MegatronModel | None = None,
) -> TrainerState:
    """Load the newest complete checkpoint of a folder, or start at step 0. Called on all ranks.

    It removes leftovers of interrupted saves, so no other process may be writing to the folder.

    Raises:
        CheckpointError: As `find_checkpoint` and `load_checkpoint`.
    """
    with raise_on_all_ranks(CheckpointError, f"cannot look for checkpoints in {directory}"):
        if dist.get_rank() == 0:
            for left in folder.remove_leftovers(directory):
                log.warning("removed %s, an unfinished checkpoint", left)
    found = find_checkpoint(directory)
    if found is None:
        return TrainerState(step=0)
    state = load_checkpoint(found, model, layout, dtype, critic)
    with raise_on_all_ranks(CheckpointError, f"cannot set checkpoints in {directory} aside"):
        if dist.get_rank() == 0:
            for aside in folder.set_aside_newer(directory, found.path):
                log.warning("kept as %s: a checkpoint that could not be read", aside)
    return state


def find_checkpoint(directory: Path) -> WholeCheckpoint | None:
    """Find the checkpoint in a folder: the folder itself, or the newest complete one in it. Called on all
    ranks.

    Each rank reads a share of the files.

    Returns:
        The checkpoint, or None when the folder holds none at all.

    Raises:
        CheckpointError: When none of the folder's checkpoints is complete.
    """
    named = (directory / MANIFEST_NAME).exists() or folder.step_of(directory) is not None
    # Rank 0 lists the folder for all ranks: another host may see new folders later.
    names = [] if named else [path.name for path in folder.checkpoints_newest_first(directory)]
    seen = msgspec.json.decode(all_gather_bytes(msgspec.json.encode(names))[0], type=list[str])
    flaws: list[str] = []
    for path in [directory] if named else [directory / name for name in seen]:
        with raise_on_all_ranks(CheckpointError, f"cannot read checkpoint {path}"):
            found = find_flaw(path, share=dist.get_rank(), of=dist.get_world_size())
        told = sorted({words.decode() for words in all_gather_bytes((found or "").encode()) if words})
        if not told:
            return WholeCheckpoint(path, read_manifest(path), tuple(flaws))
        flaws.append(told[0])
    if flaws:
        raise CheckpointError(
            f"no checkpoint in {directory} is complete: {'; '.join(flaws)}. Restore one of them, or remove "
            "them to start from the model's own weights"
        )
    return None


def load_checkpoint(
    found: WholeCheckpoint,
    model: MegatronModel,
    layout: dict[str, int | None],
    dtype: str,
    critic: MegatronModel | None = None,
) -> TrainerState:
    """Load a complete checkpoint into a model and its critic. Called on all ranks.

    Raises:
        CheckpointError: When the checkpoint belongs to another model or data type, or either the run or the
            checkpoint has no critic, or other adapters.
    """
    path, manifest = found.path, found.manifest
    same_layout = manifest.layout == layout
    with raise_on_all_ranks(CheckpointError, f"cannot read checkpoint {path}"):
        if manifest.dtype != dtype:
            raise CheckpointError(
                f"{path} was trained with model.dtype={manifest.dtype}, but it is {dtype} now: set it back"
            )
        _check_lora(path, manifest.lora, describe_lora(model.lora))
        critic_step = manifest.critic_optimizer_step
        if (critic is None) != (critic_step is None):
            has, lacks = ("a critic", "has none now") if critic is None else ("no critic", "has one now")
            raise CheckpointError(
                f"{path} has {has}, and the run {lacks}: set trainer.loss.advantages back, or start another "
                "run from its Hugging Face export (async-rl export)"
            )
        metadata = storage.read_metadata(path)
        stored = storage.stored_shapes(metadata)
        wanted = shards.parts_to_load(model, optimizer=manifest.optimizer_step > 0)
        if critic is not None:
            wanted += shards.of_critic(shards.parts_to_load(critic, optimizer=bool(critic_step)))
        random = shards.random_state() if same_layout else {}
        if any(stored.get(part.key) != tuple(part.global_shape) for part in random.values()):
            random = {}  # a GPU's generators are others than a CPU's
        wanted += random.values()
        check_tensors(path, {part.key: tuple(part.global_shape) for part in wanted}, stored)
    keys = sorted(key for key in stored if not key.startswith("random."))
    asked = np.isin(keys, [part.key for part in wanted])
    everywhere = np.any([np.frombuffer(words, bool) for words in all_gather_bytes(asked.tobytes())], axis=0)
    with raise_on_all_ranks(CheckpointError, f"cannot read checkpoint {path}"):
        if not everywhere.all():
            left = [keys[index] for index in np.flatnonzero(~everywhere)]
            raise CheckpointError(
                _of_another_model(path, f"it has {left[0]}, which the model lacks", len(left))
            )
        storage.read_parts(path, metadata, wanted)
        if manifest.optimizer_step:
            shards.set_optimizer_step(model, manifest.optimizer_step)
        if critic is not None and critic_step:
            shards.set_optimizer_step(critic, critic_step)
        if random:
            shards.set_random_state(model, random)
    return TrainerState(
        step=manifest.step, extra=manifest.extra, skipped_checkpoints=found.skipped_checkpoints
    )


def _check_lora(path: Path, stored: dict[str, Any] | None, wanted: dict[str, Any] | None) -> None:
    if stored == wanted:
        return
    has = "all weights and no adapters" if stored is None else f"only adapters, of {_settings(stored)}"
    now = "null" if wanted is None else _settings(wanted)
    raise CheckpointError(
        f"{path} holds {has}, and trainer.lora is {now} now: set it back, or start another run from the "
        "checkpoint's Hugging Face export (async-rl export)"
    )


def _settings(lora: dict[str, Any]) -> str:
    return f"rank {lora['rank']}, alpha {lora['alpha']:g}, targets {', '.join(lora['targets'])}"


def check_tensors(path: Path, wanted: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]) -> None:
    """Compare a model's tensors with those of a checkpoint.

    Args:
        path: The checkpoint.
        wanted: Shapes of the model's tensors, by key.
        stored: Shapes of the checkpoint's tensors, by key.

    Raises:
        CheckpointError: When a tensor is missing or has another shape.
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
