"""A checkpoint as a Hugging Face folder: by one process, whatever layout wrote it, also beside a run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from async_rl.config import LayoutConfig
from async_rl.errors import CheckpointError, ConfigError
from trainer.checkpoints.loading import check_tensors, find
from trainer.megatron import shards, storage
from trainer.megatron.bridge import SHARD_BYTES, HFBridge
from trainer.megatron.cpu import fuses_layers
from trainer.megatron.layout import transformer_config
from trainer.megatron.model import Float16Module
from trainer.megatron.process_groups import choose_device, start_process_groups, stop_process_groups

_TIMEOUT_S = 60.0
"""Nobody else is waited for."""


class Exported(NamedTuple):
    """What was written."""

    checkpoint: Path
    step: int
    skipped_checkpoints: tuple[str, ...]


def export(
    checkpoint: Path, out: Path, *, model: Path | None = None, max_shard_bytes: int | None = None
) -> Exported:
    """Write the weights of a checkpoint, with the config and tokenizer of its model.

    Args:
        checkpoint: It, or a folder of checkpoints, or a run's folder: the newest whole one counts.
        out: The folder to be made.
        model: Where config and tokenizer are; None: where the trainer had them from.
        max_shard_bytes: Of one safetensors file; None: 4 GiB.

    Raises:
        ConfigError: When there is something at `out`, or no model.
        CheckpointError: When there is no whole checkpoint, or it is of another model.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out is {out}, which is there already: name a folder that is to be made")
    directory = checkpoint / "checkpoints" if (checkpoint / "checkpoints").is_dir() else checkpoint
    start_process_groups(0, 1, "", LayoutConfig(), timeout_s=_TIMEOUT_S)
    try:
        found = find(directory)
        if found is None:
            raise CheckpointError(
                f"there is no checkpoint in {directory}: name a run's folder or a checkpoint"
            )
        path = Path(found.manifest.model) if model is None else model
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"the model's folder {path} has no config.json: name the one the run began from with --model"
            )
        dtype = getattr(torch, found.manifest.dtype)
        fields = transformer_config(LayoutConfig(), "none", replay=False, fused=fuses_layers(dtype))
        bridge = HFBridge(str(path), dtype, **fields)
        chunks = [module.to(choose_device("auto")) for module in bridge.build()]
        if dtype != torch.float32:
            chunks = [Float16Module(bridge.config, chunk) for chunk in chunks]
        parts, metadata = shards.parameters(chunks), storage.read_metadata(found.path)
        wanted = {part.key: tuple(part.global_shape) for part in parts}
        check_tensors(found.path, wanted, storage.shapes(metadata))
        storage.read(found.path, metadata, parts)
        bridge.shard_bytes = SHARD_BYTES if max_shard_bytes is None else max_shard_bytes
        bridge.save_hf(chunks, out)
    finally:
        stop_process_groups()
    return Exported(found.path, found.manifest.step, found.skipped_checkpoints)
