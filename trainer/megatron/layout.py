"""A parallel layout in Megatron's words.

What 0.16.1 would take without a word and compute wrongly is set right here or refused by `trainer.validate`;
docs/design/trainer.md has the list.
"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state

from async_rl.config import LayoutConfig


def transformer_config(layout: LayoutConfig, recompute: str, replay: bool, *, fused: bool) -> dict[str, Any]:
    """Fields of Megatron's `TransformerConfig` that no model decides; the process groups must stand.

    `fused` are the layers of TransformerEngine.
    """
    interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
    fields: dict[str, Any] = {
        "calculate_per_token_loss": True,  # gradients are divided by the tokens of the whole batch, see `run`
        "moe_enable_routing_replay": replay,
        "moe_token_dispatcher_type": "alltoall",
        "gradient_accumulation_fusion": False,  # a kernel of Apex
        # Tensor ranks without their own part of the sequence route every token, each for itself.
        "sequence_parallel": parallel_state.get_tensor_model_parallel_world_size() > 1,
        # In batches, what interleaved stages of a pipeline of two send each other over Gloo arrives in the
        # wrong order, and gradients are wrong without a word.
        "batch_p2p_comm": False,
        "overlap_p2p_comm": interleaved,
        "variable_seq_lengths": not interleaved,  # see `MegatronModel.level_lengths`
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        # All expert ranks would draw the same numbers. (Loading overwrites every weight anyway.)
        "use_cpu_initialization": False,
        # Experts are balanced where the model was pretrained. Here the reward alone moves the weights: the
        # auxiliary loss would pull at the router's own choice, which is not the one that is replayed, and a
        # bias that moves by itself would change the engine's choice between two updates.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_router_bias_update_rate": 0.0,
    }
    if recompute == "full":
        fields |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif recompute == "selective":
        # Fused attention keeps little; what fills the memory of an MoE model is what its experts keep.
        fields |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    if fused:
        fields |= {"moe_grouped_gemm": True, "moe_permute_fusion": True, "apply_rope_fusion": True}
    return fields
