"""Megatron's two layer specs on a CPU, that of TransformerEngine with emulated layers; stored tensors.

```
local                  Megatron's own layers, norms and experts apart
transformer_engine     norms inside the projections behind them, experts of a layer in one
```
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainers import take_layers_of_transformer_engine
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
