"""Megatron's two layer specs on a CPU, that of TransformerEngine with emulated layers; files of checkpoints.

```
local                  Megatron's own layers, norms and experts apart
transformer_engine     norms inside the projections behind them, experts of a layer in one
```
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.support.trainers import take_layers_of_transformer_engine
from trainer.checkpoints.manifest import read_manifest, record_file, write_manifest
from trainer.megatron import layout, model

_UNFUSED = (
    *("masked_softmax_fusion", "persist_layer_norm", "bias_activation_fusion", "bias_dropout_fusion"),
    *("moe_permute_fusion", "apply_rope_fusion", "moe_shared_expert_overlap"),
)
"""Kernels that are not emulated. Without them both specs compute the same, bit for bit."""


@contextlib.contextmanager
def layers_of(spec: str) -> Iterator[None]:
    """Build bfloat16 models of the block from the layers of a spec."""
    with pytest.MonkeyPatch.context() as patch:
        take_layers_of_transformer_engine(patch, spec == "transformer_engine")
        patch.setattr(model, "transformer_config", unfused_config)
        yield


def unfused_config(*arguments: Any, **named: Any) -> dict[str, Any]:
    """Return `layout.transformer_config` without kernels that exist for one of the specs only."""
    return layout.transformer_config(*arguments, **named) | dict.fromkeys(_UNFUSED, False)


def stored_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return everything in a checkpoint but generators, as whole tensors, read by Megatron itself.

    Process groups must exist.
    """
    from megatron.core import dist_checkpointing  # not before the trainer's modules have prepared it

    found = dist_checkpointing.load_plain_tensors(str(checkpoint))
    return {key: tensor for key, tensor in found.items() if not key.startswith("random.")}


def earlier_name(key: str, *, latent: bool) -> str:
    """Return what commit d1826be called a tensor of Megatron's own layers, by its name since.

    Args:
        key: The name, of a model whose first layer is dense and whose other layers have experts.
        latent: Whether it has latent attention.
    """
    if latent:
        key = re.sub(r"linear_(q|kv)_up_proj\.layer_norm_", r"\1_layernorm.", key)
        return key.replace(".layers.0.mlp.linear_fc1.layer_norm_", ".layers.0.pre_mlp_layernorm.")
    return re.sub(r"\.layers\.([1-9])\.pre_mlp_layernorm\.", r".layers.\1.mlp.linear_fc1.layer_norm_", key)


def rename_tensors(checkpoint: Path, renamed: Callable[[str], str]) -> None:
    """Give the tensors of a checkpoint other names, in its index."""
    path = checkpoint / ".metadata"
    index = pickle.loads(path.read_bytes())
    index.state_dict_metadata = {renamed(key): value for key, value in index.state_dict_metadata.items()}
    index.storage_data = {
        replace(place, fqn=renamed(place.fqn)): info for place, info in index.storage_data.items()
    }
    path.write_bytes(pickle.dumps(index))
    manifest = read_manifest(checkpoint)
    files = manifest.files | {path.name: record_file(path)}
    write_manifest(checkpoint, msgspec.structs.replace(manifest, files=files))
