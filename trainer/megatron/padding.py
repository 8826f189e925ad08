"""Tokens that must not count: padding, and tokens that were not routed as the engine routed them.

They pass through the layers, which costs little and changes nothing for the others. But they are no load of
an expert: not in the counters that move a router's expert bias, not in an auxiliary or z-loss. Megatron-Core
takes a `padding_mask` for that; in 0.16.1 two things about it are wrong, and set right here:

- The counters mask a `[tokens, experts]` map with `[tokens]` flags (`TopKRouter._apply_expert_bias`): an
  error, or the wrong experts where both sizes agree.
- Only the first pipeline stage cuts the mask to its part of the sequence; the others take it as it comes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter


def count_real_tokens(chunk: torch.nn.Module) -> None:
    """Let the routers of a chunk leave masked tokens out of their counters."""
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module._apply_expert_bias = partial(_count, module._apply_expert_bias)


def _count(megatrons: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    if padding_mask is not None:
        routing_map = routing_map.masked_fill(padding_mask[:, None], 0)
    megatrons(routing_map)


def mask_for(
    excluded: torch.Tensor, *, first_stage: bool, tensor_rank: int, tensor_size: int
) -> torch.Tensor:
    """What a chunk takes as `padding_mask`, `[1, t]` or its part, from the whole of it.

    Args:
        excluded: `[1, t]` bool, True where a token does not count.
        first_stage: Whether the chunk holds the embedding.
        tensor_rank: Among the ranks that share the sequence.
        tensor_size: How many they are.
    """
    if first_stage:
        return excluded
    part = excluded.shape[1] // tensor_size
    return excluded[:, tensor_rank * part : (tensor_rank + 1) * part]
