"""Translates a parallel layout, and `trainer.megatron`, into fields of Megatron's config classes.

Some settings make Megatron-Core 0.16.1 compute wrong results without an error. They are corrected here or
rejected by `trainer.validate`; docs/design/trainer.md lists them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnBackend

from async_rl.config import LayoutConfig


def transformer_config(layout: LayoutConfig, recompute: str, replay: bool, *, fused: bool) -> dict[str, Any]:
    """Return the fields of Megatron's `TransformerConfig` that do not depend on the model.

    The process groups must exist.

    Args:
        layout: Parallel sizes.
        recompute: `trainer.recompute`.
        replay: Whether routers are built with routing replay.
        fused: Whether layers are those of TransformerEngine.
    """
    interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    fields: dict[str, Any] = {
        # Gradients are divided by the tokens of the whole batch, see `run_schedule`.
        "calculate_per_token_loss": True,
        "moe_enable_routing_replay": replay,
        "moe_token_dispatcher_type": "alltoall",
        # For the output layer and on a CPU it is a kernel of Apex; see `accumulate_in_place` for others.
        "gradient_accumulation_fusion": False,
        # Without sequence parallelism, every tensor rank would route all tokens by itself.
        "sequence_parallel": parallel_state.get_tensor_model_parallel_world_size() > 1,
        # When batched, tensors that interleaved stages of a two-stage pipeline send over Gloo arrive in the
        # wrong order, and gradients are silently wrong.
        "batch_p2p_comm": False,
        "overlap_p2p_comm": interleaved,
        # Interleaved stages of a two-stage pipeline send to one peer for both the previous and the next
        # chunk. The order distinguishes their tensors, but not the shapes that Megatron exchanges before
        # them.
        "variable_seq_lengths": not (interleaved and stages == 2),
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        # True would make all expert ranks draw the same numbers. (Loading overwrites every weight anyway.)
        "use_cpu_initialization": False,
        # Balancing experts belongs to pretraining. Here only the reward changes the weights: an auxiliary
        # loss would act on the router's own choice instead of the replayed one, and a self-adjusting bias
        # would change the engine's choice between two updates.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_router_bias_update_rate": 0.0,
        # mbridge takes these from config.json. Engines compute without dropout, and so must we.
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if recompute in ("full", "offload"):
        fields |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif recompute == "selective":
        # Fused attention keeps few activations; the experts of an MoE model keep most of them.
        fields |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    if fused:
        fields |= {"moe_grouped_gemm": True, "moe_permute_fusion": True, "apply_rope_fusion": True}
    return fields


def fields_of(kind: type, passed: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `trainer.megatron` sets of one of Megatron's config classes.

    Args:
        kind: The class; a name that several classes have is set in each.
        passed: The checked values of the config (`trainer.passthrough`), with types of torch by name.
    """
    names = {field.name for field in dataclasses.fields(kind)} - {"gradient_accumulation_fusion"}
    found = {name: value for name, value in passed.items() if name in names}
    for name, value in found.items():
        if name.endswith("_dtype") and isinstance(getattr(torch, str(value), None), torch.dtype):
            found[name] = getattr(torch, value)
        elif name == "attention_backend":
            found[name] = AttnBackend[value]
    return found


def accumulate_in_place(chunk: torch.nn.Module) -> None:
    """Make the layers of TransformerEngine add weight gradients to Megatron's buffers in their products.

    Megatron's field would require Apex, for an output layer that is not used (`leave_out_output_layer`).
    """
    for module in chunk.modules():
        trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if trained and hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
