"""Exports a checkpoint of any layout as a Hugging Face folder, in one process, also beside a run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from async_rl.config import LayoutConfig, LoraConfig
from async_rl.errors import CheckpointError, ConfigError
from trainer.checkpoints.loading import check_tensors, find_checkpoint
from trainer.megatron import shards, storage
from trainer.megatron.bridge import SHARD_BYTES, HFBridge
from trainer.megatron.cpu import fuses_layers
from trainer.megatron.layout import transformer_config
from trainer.megatron.lora import attach_adapters
from trainer.megatron.model import Float16Module
from trainer.megatron.process_groups import choose_device, start_process_groups, stop_process_groups
from trainer.weights.adapter_export import export_adapter, write_adapter

_TIMEOUT_S = 60.0
"""Timeout of process groups; the export is a single rank, which waits for no other."""


class ExportedModel(NamedTuple):
    """The result of an export."""

    checkpoint: Path
    step: int
    skipped_checkpoints: tuple[str, ...]


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    model: Path | None = None,
    max_shard_bytes: int | None = None,
    adapter: bool = False,
) -> ExportedModel:
    """Write the weights of a checkpoint, with the config and tokenizer of its model.

    Adapters are merged into the weights of the model's folder, as for engines that serve merged weights.

    Args:
        checkpoint: A checkpoint, a folder of checkpoints or a run's folder; of several checkpoints, the
            newest complete one is exported.
        out: The folder to create.
        model: The folder with config and tokenizer; None: the `model.path` of the run.
        max_shard_bytes: Largest size of one safetensors file; None: 4 GiB.
        adapter: Whether to write the adapter alone, as a folder of PEFT.

    Raises:
        ConfigError: When `out` is not empty, the model's folder has no config.json, or an adapter is asked
            for and there is none.
        CheckpointError: When there is no complete checkpoint, or it belongs to another model.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out is {out}, which already exists: name a new folder")
    directory = checkpoint / "checkpoints" if (checkpoint / "checkpoints").is_dir() else checkpoint
    start_process_groups(0, 1, "", LayoutConfig(), timeout_s=_TIMEOUT_S)
    try:
        found = find_checkpoint(directory)
        if found is None:
            raise CheckpointError(
                f"there is no checkpoint in {directory}: name a run's folder or a checkpoint"
            )
        lora = None if found.manifest.lora is None else msgspec.convert(found.manifest.lora, LoraConfig)
        if adapter and lora is None:
            raise ConfigError(
                f"--adapter: {found.path} holds all weights and no adapter, because trainer.lora was null: "
                "leave --adapter out"
            )
        path = Path(found.manifest.model) if model is None else model
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"the model's folder {path} has no config.json: name the run's model folder with --model"
            )
        dtype = getattr(torch, found.manifest.dtype)
        fields = transformer_config(LayoutConfig(), "none", replay=False, fused=fuses_layers(dtype))
        bridge = HFBridge(str(path), dtype, **fields)
        chunks = [module.to(choose_device("auto")) for module in bridge.build_chunks()]
        if dtype != torch.float32:
            chunks = [Float16Module(bridge.config, chunk) for chunk in chunks]
        if lora is not None:
            bridge.load_hf(chunks)
            for chunk in chunks:
                attach_adapters(chunk, lora, seed=0)
        parts, metadata = shards.parameter_parts(chunks), storage.read_metadata(found.path)
        wanted = {part.key: tuple(part.global_shape) for part in parts}
        check_tensors(found.path, wanted, storage.stored_shapes(metadata))
        storage.read_parts(found.path, metadata, parts)
        bridge.shard_bytes = SHARD_BYTES if max_shard_bytes is None else max_shard_bytes
        if adapter and lora is not None:
            write_adapter(export_adapter(chunks, bridge), out, lora, str(path))
        else:
            bridge.save_hf(chunks, out)
    finally:
        stop_process_groups()
    return ExportedModel(found.path, found.manifest.step, found.skipped_checkpoints)
