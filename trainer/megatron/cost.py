"""How long a trajectory keeps a rank busy: what data-parallel ranks and micro-batches are balanced by.

Every token passes through the weights once, and attends to all before it: n tokens cost `n + n² / even`, in
units of one token's weights. At `even` tokens attention costs as much as all the rest, which is 17 thousand
for a Qwen3-30B-A3B; balanced by tokens alone, the rank with the longest answers is then the one all wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SequenceCost:
    """Work of a sequence, in that of one token's weights.

    Example:
        >>> SequenceCost(even=1000.0)(500)
        750.0
    """

    even: float
    """Length, in tokens, at which attention costs as much as the weights."""

    def __call__(self, tokens: int) -> float:
        """Of a sequence of so many tokens, which grows more than linearly."""
        return tokens * (1 + tokens / self.even)


def sequence_cost(config: Any, vocab_size: int, moe_layers: int) -> SequenceCost:
    """From the sizes of a model.

    Args:
        config: Megatron's `TransformerConfig`.
        vocab_size: Rows of the output layer.
        moe_layers: How many layers have experts.

    Source: two operations a weight and token (arXiv 2001.08361, section 2.1); causal attention of n queries
    takes n² · heads · (size of keys + size of values) a layer, half of the full product.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    if config.multi_latent_attention:
        keys, values = config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
        queries = (
            config.q_lora_rank * (hidden + heads * keys) if config.q_lora_rank else hidden * heads * keys
        )
        compressed = hidden * (config.kv_lora_rank + config.qk_pos_emb_head_dim)
        expanded = config.kv_lora_rank * heads * (config.qk_head_dim + values)
        attention = queries + compressed + expanded + heads * values * hidden
    else:
        keys = values = config.kv_channels
        attention = hidden * keys * 2 * (heads + config.num_query_groups)
    weights = config.num_layers * attention + vocab_size * hidden
    weights += (config.num_layers - moe_layers) * 3 * hidden * config.ffn_hidden_size
    if moe_layers:
        chosen = config.moe_router_topk * config.moe_ffn_hidden_size
        shared = config.moe_shared_expert_intermediate_size or 0
        weights += moe_layers * hidden * (3 * (chosen + shared) + config.num_moe_experts)
    return SequenceCost(even=2 * weights / (config.num_layers * heads * (keys + values)))
