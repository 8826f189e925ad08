"""Checks `trainer.megatron`: fields of Megatron-Core's own config classes, passed through by name.

```
trainer.megatron ─ owned here? ─ known, right type? ─ fits model, layout, device? ─► class that has it
                   OWNED         Megatron's source    NEEDS                          layout.py, model.py
```

Names and types are read from the source of the installed Megatron-Core, which is not imported: that would
load torch. Where it is not installed only the other two checks are made; every rank makes all of them.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple

import msgspec

from async_rl.config import Config
from async_rl.engines.model_facts import facts_of, read_config
from async_rl.errors import ConfigError
from async_rl.runtime.devices import detect_device

CLASSES: Final = {
    "ModelParallelConfig": "model_parallel_config.py",
    "TransformerConfig": "transformer/transformer_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
}
"""Megatron's classes whose fields can be set, and their files below `megatron/core`."""

_OWNED: Final = {
    "config.json of the model decides it, and engines serve the same model": """
        num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels
        add_bias_linear add_qkv_bias gated_linear_unit activation_func glu_linear_offset
        activation_func_clamp_value layernorm_epsilon layernorm_zero_centered_gamma normalization
        qk_layernorm qk_l2_norm softmax_scale softmax_type rotary_interleaved window_size
        window_attn_skip_freq attention_output_gate no_rope_freq apply_residual_connection_post_layernorm
        multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type
        rotary_base rotary_percent rotary_scaling_factor original_max_position_embeddings beta_fast
        beta_slow mscale mscale_all_dim mrope_section num_moe_experts moe_layer_freq moe_ffn_hidden_size
        moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk
        moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
        moe_router_topk_scaling_factor moe_router_score_function moe_router_enable_expert_bias
        moe_latent_size moe_apply_probs_on_input""",
    "no supported model has it": """
        experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim
        linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads is_hybrid_model
        mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
        heterogeneous_block_specs hetereogenous_dist_checkpoint use_fused_weighted_squared_relu
        memory_efficient_layer_norm persist_layer_norm""",
    "multi-token prediction is not trained": "mtp_num_layers mtp_loss_scaling_factor mtp_standalone",
    "set trainer.layout instead": """
        tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
        context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split moe_extended_tp
        hierarchical_context_parallel_sizes""",
    "trainer.device and trainer.layout decide how ranks are connected": """
        pipeline_model_parallel_comm_backend num_distributed_optimizer_instances use_ring_exchange_p2p""",
    "the trainer packs trajectories and cuts them by its own plan": """
        hybrid_context_parallel max_seqlen_per_dp_cp_rank""",
    "set model.dtype instead": """
        fp16 bf16 params_dtype pipeline_dtype enable_autocast autocast_dtype fp32_residual_connection
        apply_query_key_layer_scaling""",
    "only float16 needs it, which model.dtype does not allow": """
        loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis""",
    "set trainer.optimizer instead": """
        lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad min_lr decoupled_lr decoupled_min_lr""",
    "the optimizer is AdamW: checkpoints hold its two moments": """
        optimizer decoupled_weight_decay sgd_momentum muon_momentum muon_split_qkv muon_use_nesterov
        muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps muon_tp_mode muon_extra_scale_factor qk_clip
        qk_clip_alpha qk_clip_threshold""",
    "checkpoints hold main weights in float32": "store_param_remainders",
    "set trainer.recompute instead; routing replay must know which layers are computed again": """
        recompute_granularity recompute_method recompute_num_layers moe_layer_recompute
        distribute_saved_activations num_microbatches_with_partial_activation_checkpoints""",
    "set trainer.overlap_grad_reduce instead": "overlap_grad_reduce",
    "weights are published after every step: they would lack its update, or wait for the gather": """
        overlap_param_gather align_param_gather overlap_param_gather_with_optimizer_step""",
    "gradients are summed in float32 and divided once, by the tokens of the whole batch": """
        calculate_per_token_loss grad_reduce_in_fp32 average_in_collective gradient_reduce_div_fusion
        reduce_scatter_with_fp32_accumulation main_grads_dtype""",
    "an update that is not finite is skipped and counted: see trainer.max_skipped_updates": """
        check_for_nan_in_grad check_for_large_grads""",
    "it is on where several ranks share parameters": "use_distributed_optimizer",
    "export, checkpoints and offloading use the buffers of Megatron's DistributedDataParallel": """
        use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy
        suggested_communication_unit_size preserve_fp32_weights keep_fp8_transpose_cache fsdp_double_buffer
        fsdp_manual_registration init_model_with_meta_device nccl_ub disable_symmetric_registration""",
    "only the reward may change weights: it would act on the router's choice, not on the engine's": """
        moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate
        moe_router_force_load_balancing moe_per_layer_logging""",
    "set routing.replay instead": "moe_enable_routing_replay",
    "it changes which experts compute a token, and the engine's choice is replayed": """
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_token_dropping
        moe_router_padding_for_quantization moe_router_padding_for_fp8""",
    "log-probs must be those of the policy that sampled, without noise": """
        hidden_dropout attention_dropout moe_input_jitter_eps""",
    "log-probs and their gradients are computed without logits, by trainer.losses.log_probs": """
        cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute
        wgrad_deferral_limit""",
    "attention over packed trajectories has its own kernels, without it": """
        masked_softmax_fusion attention_softmax_in_fp32 fp8_dot_product_attention fp8_multi_head_attention""",
    "stages exchange micro-batches of varying lengths; other values fail, or give wrong gradients": """
        variable_seq_lengths overlap_p2p_comm batch_p2p_comm batch_p2p_sync overlap_p2p_comm_warmup_flush
        microbatch_group_size_per_vp_stage""",
    "its buffers and graphs have one fixed size, and micro-batches have varying lengths": """
        tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
        tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend enable_cuda_graph
        cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps
        external_cuda_graph cuda_graph_impl cuda_graph_scope use_te_rng_tracker
        fine_grained_activation_offloading offload_modules min_offloaded_tensor_size
        cpu_offloading_double_buffering""",
    "its schedule calls layers instead of the model, which routing replay wraps": """
        overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release""",
    "it excludes recomputation and pipelines": """
        cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights""",
    "engines, checkpoints and exports get the parameters in model.dtype": """
        fp8_param fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag fp4_param main_params_dtype""",
    "its scales follow from earlier batches, which checkpoints do not hold: a resumed run would differ": """
        fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo tp_only_amax_red""",
    "engines serve the model in model.dtype, too far from products of four bits": """
        fp4 fp4_recipe fp4_quantizer_factory""",
    "quantisation is that of fp8 and fp8_recipe": """
        fp8_quantizer_factory use_kitchen use_kitchen_attention kitchen_attention_backend quant_recipe""",
    "every weight is loaded": """
        perform_initialization use_cpu_initialization init_method output_layer_init_method init_method_std
        embedding_init_method embedding_init_method_std""",
    "model.dtype, trainer.device and TransformerEngine decide which layers are built": """
        transformer_impl moe_use_legacy_grouped_gemm""",
    "it is for inference, which is the engines' task": """
        flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers
        inference_fuse_tp_communication symmetric_ar_type mlp_chunks_for_prefill cache_mla_latents""",
    "the trainer sets it itself": """
        timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
        barrier_with_L1_time""",
    "Megatron-Core ignores it": "async_tensor_model_parallel_allreduce",
    "nothing would read the result: metrics are the trainer's own": """
        log_num_zeros_in_grad log_max_attention_logit test_mode config_logger_dir""",
}

OWNED: Final[Mapping[str, str]] = {name: reason for reason, names in _OWNED.items() for name in names.split()}
"""Fields that this project sets or relies on, each with the reason why the config cannot."""


@functools.cache
def megatron_fields() -> Mapping[str, str] | None:
    """Return the fields of `CLASSES` with their types, as the installed Megatron-Core's source has them.

    Returns:
        None where it is not installed.
    """
    try:
        package = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    if package is None or not package.submodule_search_locations:
        return None
    found: dict[str, str] = {}
    for name, file in CLASSES.items():
        source = (Path(package.submodule_search_locations[0]) / file).read_text()
        body = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name).body
        for item in body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                field = item.target.id
                if not field.startswith("_"):
                    found.setdefault(field, ast.unparse(item.annotation))
    return found


def plain_type(annotation: str) -> Any:
    """Return the type that a value of the config must have for a field with this annotation.

    Types of torch and enumerations are given by name: `bfloat16`, `flash`.
    """
    names = vars(typing) | {
        "torch": SimpleNamespace(dtype=Literal["float32", "bfloat16", "float16", "uint8"]),
        "AttnBackend": Literal["flash", "fused", "unfused", "local", "auto"],
    }
    return eval(annotation, {}, names)  # of an installed library's source


class Situation(NamedTuple):
    """What the values of `trainer.megatron` must fit to."""

    config: Config
    values: Mapping[str, Any]
    model: Mapping[str, Any]
    """The parsed config.json."""
    num_experts: int
    on_gpu: bool

    def value(self, name: str, default: Any = None) -> Any:
        """Return a field's value, or what it is without one."""
        return self.values.get(name, default)

    @property
    def fused(self) -> bool:
        """Whether layers can be those of TransformerEngine."""
        return self.on_gpu and self.config.model.dtype == "bfloat16"

    @property
    def precise_router(self) -> bool:
        """Whether routers compute in float32 or more."""
        own = self.model["model_type"] in ("deepseek_v3", "glm4_moe", "kimi_k2")
        return self.value("moe_router_dtype", "fp32" if own else None) is not None


_DEVICES: Final = {
    "GPU": """
        moe_deepep_num_sms moe_hybridep_num_sms moe_flex_dispatcher_backend moe_enable_deepep
        disable_bf16_reduced_precision_matmul batch_invariant_mode optimizer_cpu_offload
        optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d
        pin_cpu_grads pin_cpu_params""",
    "layers": """
        gradient_accumulation_fusion apply_rope_fusion fused_single_qkv_rope moe_grouped_gemm
        moe_permute_fusion moe_router_fusion fp8 fp8_recipe fp8_wgrad first_last_layers_bf16
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 disable_parameter_transpose_cache
        activation_func_fp8_input_store use_te_activation_func attention_backend cp_comm_type
        use_precision_aware_optimizer exp_avg_dtype exp_avg_sq_dtype""",
}
"""Fields that work on a GPU only, and of them those of TransformerEngine's layers or optimizer."""

_FUSED: Final = frozenset(_DEVICES["layers"].split())
_GPU: Final = frozenset(_DEVICES["GPU"].split()) | _FUSED


_MOMENTS: Final = ("exp_avg_dtype", "exp_avg_sq_dtype")
_OF_OFFLOAD: Final = (
    "optimizer_offload_fraction",
    "use_torch_optimizer_for_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
)


class Need(NamedTuple):
    """What a value of a field needs beside it."""

    name: str
    asks: Callable[[Any], bool]
    """Whether a value has the need."""
    holds: Callable[[Situation], bool]
    text: str


def _given(value: Any) -> bool:
    return bool(value)


def _is_flex(at: Situation) -> bool:
    return at.value("moe_token_dispatcher_type", "alltoall") == "flex"


NEEDS: Final = (
    Need(
        "moe_token_dispatcher_type",
        lambda value: value == "allgather",
        lambda at: False,
        "Megatron-Core's all-gather does not exchange micro-batches of varying lengths: use alltoall or flex",
    ),
    Need(
        "moe_token_dispatcher_type",
        lambda value: value == "flex",
        lambda at: at.on_gpu,
        "DeepEP and HybridEP are kernels for GPUs: use alltoall on a CPU",
    ),
    Need(
        "moe_token_dispatcher_type",
        lambda value: value == "flex",
        lambda at: at.config.trainer.layout.ep * at.config.trainer.layout.etp > 1,
        "it exchanges tokens between ranks: set trainer.layout.ep above 1, or use alltoall",
    ),
    Need(
        "moe_token_dispatcher_type",
        lambda value: value == "flex",
        lambda at: at.precise_router,
        "it sends gates as float32: set moe_router_dtype=fp32, so that they are not rounded before",
    ),
    Need("moe_enable_deepep", _given, _is_flex, "set moe_token_dispatcher_type=flex"),
    Need(
        "moe_enable_deepep",
        _given,
        lambda at: at.value("moe_flex_dispatcher_backend", "deepep") == "deepep",
        "moe_flex_dispatcher_backend names another backend: leave one of them out",
    ),
    Need("moe_flex_dispatcher_backend", _given, _is_flex, "set moe_token_dispatcher_type=flex"),
    Need(
        "moe_shared_expert_overlap",
        _given,
        lambda at: not _is_flex(at),
        "Megatron-Core overlaps shared experts with moe_token_dispatcher_type=alltoall only",
    ),
    Need(
        "moe_shared_expert_overlap",
        _given,
        lambda at: bool(at.model.get("n_shared_experts") or at.model.get("shared_expert_intermediate_size")),
        "the model has no shared experts: leave it out",
    ),
    Need(
        "moe_router_fusion",
        _given,
        lambda at: at.config.routing.replay == "off",
        "the fused router ignores replayed choices: set routing.replay=off, or leave it out",
    ),
    Need(
        "apply_rope_fusion",
        _given,
        lambda at: not at.model.get("kv_lora_rank"),
        "the kernel for latent attention is experimental, and for YaRN only: leave it out",
    ),
    Need(
        "fp8",
        _given,
        lambda at: at.value("fp8_recipe", "delayed") in ("tensorwise", "blockwise", "mxfp8"),
        "set fp8_recipe to tensorwise, blockwise or mxfp8: the scales of Megatron's default, delayed, follow "
        "from earlier batches, which checkpoints do not hold",
    ),
    Need(
        "fp8",
        _given,
        lambda at: at.config.trainer.lora is None,
        "adapters would be rounded to eight bits with every product: leave it out, or set trainer.lora=null",
    ),
    Need(
        "moe_shared_expert_overlap",
        _given,
        lambda at: "mlp" not in (at.config.trainer.lora.targets if at.config.trainer.lora else ()),
        "shared experts exchange tokens apart from their projections then, so that these cannot have "
        "adapters: leave it out, or mlp out of trainer.lora.targets",
    ),
    Need("fp8_recipe", _given, lambda at: bool(at.value("fp8")), "set fp8 to e4m3 or hybrid"),
    Need(
        "fp8",
        _given,
        lambda at: at.value("fp8_recipe") != "blockwise" or at.model["hidden_size"] % 128 == 0,
        "blocks have 128 values, which must divide the model's hidden size: take another fp8_recipe",
    ),
    Need(
        "optimizer_cpu_offload",
        _given,
        lambda at: at.fused and bool(at.value("use_precision_aware_optimizer")),
        "set use_precision_aware_optimizer=true and model.dtype=bfloat16: main weights would stay on the "
        "device otherwise",
    ),
    Need(
        "optimizer_cpu_offload",
        _given,
        lambda at: not at.config.placement.shared or at.value("optimizer_offload_fraction", 1.0) == 1.0,
        "with placement.shared the device must be empty between steps: set optimizer_offload_fraction=1.0",
    ),
    *(
        Need(
            name,
            _given,
            lambda at: bool(at.value("optimizer_cpu_offload")),
            "it divides the work of optimizer_cpu_offload: set that",
        )
        for name in _OF_OFFLOAD
    ),
    Need(
        "optimizer_offload_fraction",
        lambda value: not 0 < value <= 1,
        lambda at: False,
        "expected a fraction above 0, at most 1",
    ),
    *(
        Need(
            name,
            lambda value: value != "float32",
            lambda at: bool(at.value("use_precision_aware_optimizer")),
            "set use_precision_aware_optimizer=true",
        )
        for name in _MOMENTS
    ),
    *(
        Need(
            name,
            lambda value: value != "float32",
            lambda at: not at.value("optimizer_cpu_offload"),
            "the optimizer of the host, torch's AdamW, keeps its moments in float32",
        )
        for name in _MOMENTS
    ),
    *(
        Need(
            name,
            lambda value: value not in ("float32", "bfloat16"),
            lambda at: False,
            "such moments have scales, which checkpoints do not hold: set bfloat16",
        )
        for name in _MOMENTS
    ),
    Need(
        "bucket_size",
        _given,
        lambda at: at.config.trainer.overlap_grad_reduce,
        "gradients are summed in buckets during the backward pass: set trainer.overlap_grad_reduce=true",
    ),
    Need(
        "recompute_modules",
        _given,
        lambda at: at.config.trainer.recompute == "selective",
        "it names what trainer.recompute=selective computes again: set that",
    ),
    Need(
        "recompute_modules",
        lambda value: "moe_act" in value,
        lambda at: at.fused,
        "moe_act is of grouped experts, which need a GPU, TransformerEngine and model.dtype=bfloat16",
    ),
    Need(
        "recompute_modules",
        lambda value: "mla_up_proj" in value,
        lambda at: bool(at.model.get("kv_lora_rank")),
        "mla_up_proj is of latent attention, which the model does not have",
    ),
    Need(
        "recompute_modules",
        lambda value: "shared_experts" in value,
        lambda at: not at.value("moe_shared_expert_overlap"),
        "shared_experts cannot be computed again with moe_shared_expert_overlap: leave one of them out",
    ),
    Need(
        "recompute_modules",
        lambda value: not {"moe", "moe_act", "shared_experts"}.isdisjoint(value),
        lambda at: at.num_experts > 0,
        "the model has no experts: name core_attn, mlp or layernorm",
    ),
    Need("first_last_layers_bf16", _given, lambda at: bool(at.value("fp8")), "set fp8 to e4m3 or hybrid"),
)


def check_megatron_settings(config: Config, *, on_gpu: bool | None = None) -> None:
    """Check `trainer.megatron`.

    Args:
        config: The run's config.
        on_gpu: Whether the trainer runs on GPUs; None: by `trainer.device` and this machine.

    Raises:
        ConfigError: A field is owned by this project, unknown, of another type, or does not fit the config.
    """
    values = config.trainer.megatron
    if not values:
        return
    for name in values:
        if name in OWNED:
            raise ConfigError(f"trainer.megatron.{name} cannot be set: {OWNED[name]}")
    if (fields := megatron_fields()) is not None:
        for name, value in values.items():
            _check_field(fields, name, value)
    at = situation_of(config, on_gpu)
    for name, value in values.items():
        if name.startswith("moe_") and not at.num_experts:
            raise ConfigError(f"trainer.megatron.{name} is set, but the model has no experts: leave it out")
        _check_device(at, name, value)
    for need in NEEDS:
        value = values.get(need.name)
        if value is not None and need.asks(value) and not need.holds(at):
            raise ConfigError(f"trainer.megatron.{need.name} is {value!r}: {need.text}")


def situation_of(config: Config, on_gpu: bool | None = None) -> Situation:
    """Return what `trainer.megatron` must fit to; arguments are those of `check_megatron_settings`."""
    if on_gpu is None:
        device = config.trainer.device
        on_gpu = (detect_device() if device == "auto" else device) == "cuda"
    model = read_config(config.model.path)
    return Situation(config, config.trainer.megatron, model, facts_of(model).num_experts, on_gpu)


def row_multiple(passed: Mapping[str, Any], tp: int) -> int:
    """Return what the rows of each rank must be a multiple of, for products in fp8; 1 without them.

    Source: `get_fp8_align_size` of megatron-core 0.16.1; TransformerEngine 2.11 gathers blocks of 128 rows
    from tensor-parallel ranks (`Float8BlockQuantizer.is_quantizable`).
    """
    if not passed.get("fp8"):
        return 1
    recipe = passed.get("fp8_recipe")
    return 32 if recipe == "mxfp8" else 128 if recipe == "blockwise" and tp > 1 else 16


def _check_field(fields: Mapping[str, str], name: str, value: Any) -> None:
    if name not in fields:
        near = difflib.get_close_matches(name, fields, n=3, cutoff=0.6)
        raise ConfigError(
            f"trainer.megatron.{name}: Megatron-Core has no such field in "
            f"{', '.join(list(CLASSES)[1:])}; the nearest names are {', '.join(near) or 'too far away'}"
        )
    try:
        msgspec.convert(value, plain_type(fields[name]))
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"trainer.megatron.{name} is {value!r}: {error}; Megatron-Core declares it as {fields[name]}"
        ) from error


def _check_device(at: Situation, name: str, value: Any) -> None:
    """Check that a field which only works on GPUs, or in fused layers, is not set anywhere else."""
    if not value or value == "auto":
        return
    if name in _GPU and not at.on_gpu:
        raise ConfigError(
            f"trainer.megatron.{name} works on GPUs only, and the trainer runs on a CPU: leave it out, or "
            "set trainer.device=cuda if the ranks run elsewhere"
        )
    if name in _FUSED and not at.fused:
        raise ConfigError(
            f"trainer.megatron.{name} is of TransformerEngine, and has a use in half precision only: set "
            "model.dtype=bfloat16"
        )
