"""Checks `trainer.megatron`: fields of Megatron-Core's own config classes, passed through by name.

```
trainer.megatron ─ may be set? ─ right type?       ─ fits model, layout, device? ─► class that has it
                   ALLOWED       Megatron's source   _problems                      layout.py, model.py
```

Types are read from the source of the installed Megatron-Core, which is not imported: that would load torch.
Where it is not installed only the other two checks are made; every rank makes all of them.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import typing
from collections.abc import Iterator, Mapping
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

_ALLOWED: Final = """
    activation_func_fp8_input_store adam_beta1 adam_eps apply_rope_fusion apply_wd_to_qk_layernorm
    attention_backend
    batch_invariant_mode bias_activation_fusion bias_dropout_fusion bucket_size
    clone_scatter_output_in_embedding cp_comm_type deallocate_pipeline_outputs deterministic_mode
    disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache exp_avg_dtype exp_avg_sq_dtype
    first_last_layers_bf16 fp8 fp8_recipe fp8_wgrad fused_single_qkv_rope gradient_accumulation_fusion
    moe_deepep_num_sms moe_enable_deepep moe_flex_dispatcher_backend moe_grouped_gemm moe_hybridep_num_sms
    moe_permute_fusion moe_router_dtype moe_router_fusion moe_shared_expert_overlap moe_token_dispatcher_type
    num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 optimizer_cpu_offload optimizer_offload_fraction
    overlap_cpu_optimizer_d2h_h2d pad_buckets_for_high_nccl_busbw pin_cpu_grads pin_cpu_params
    recompute_modules use_precision_aware_optimizer use_te_activation_func use_torch_optimizer_for_cpu_offload
"""
ALLOWED: Final = frozenset(_ALLOWED.split())
"""Fields that can be set. Each was reviewed: replay, export, checkpoints and the loss are right with it."""

_INSTEAD: Final = {
    "trainer.layout": """
        tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
        context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage""",
    "model.dtype": "fp16 bf16 params_dtype pipeline_dtype",
    "trainer.optimizer": "lr weight_decay adam_beta2 clip_grad",
    "trainer.recompute": "recompute_granularity recompute_method recompute_num_layers",
    "trainer.overlap_grad_reduce": "overlap_grad_reduce",
    "trainer.recompute=offload": "cpu_offloading fine_grained_activation_offloading",
    "routing.replay": "moe_enable_routing_replay",
}
"""Settings of this project, and the fields that they decide."""


@functools.cache
def megatron_fields() -> Mapping[str, str] | None:
    """Return the types of the fields of `CLASSES`, as the installed Megatron-Core's source has them.

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

    @property
    def fused(self) -> bool:
        """Whether layers can be those of TransformerEngine."""
        return self.on_gpu and self.config.model.dtype == "bfloat16"

    @property
    def precise_router(self) -> bool:
        """Whether routers compute in float32 or more."""
        own = self.model["model_type"] in ("deepseek_v3", "glm4_moe", "kimi_k2")
        return self.values.get("moe_router_dtype", "fp32" if own else None) is not None


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
GPU_FIELDS: Final = frozenset(_DEVICES["GPU"].split()) | _FUSED


def _problems(at: Situation) -> Iterator[tuple[str, str]]:
    """Yield each field whose value does not fit the rest of the config, and why."""
    trainer, lora = at.config.trainer, at.config.trainer.lora
    flex = at.values.get("moe_token_dispatcher_type") == "flex"
    if at.values.get("moe_token_dispatcher_type") == "allgather":
        yield (
            "moe_token_dispatcher_type",
            "Megatron-Core's all-gather does not exchange micro-batches of varying lengths: use alltoall or "
            "flex",
        )
    if flex and not at.on_gpu:
        yield (
            "moe_token_dispatcher_type",
            "DeepEP and HybridEP are kernels for GPUs: use alltoall on a CPU",
        )
    if flex and trainer.layout.ep * trainer.layout.etp <= 1:
        yield (
            "moe_token_dispatcher_type",
            "it exchanges tokens between ranks: set trainer.layout.ep above 1, or use alltoall",
        )
    if flex and not at.precise_router:
        yield (
            "moe_token_dispatcher_type",
            "it sends gates as float32: set moe_router_dtype=fp32, so that they are not rounded before",
        )
    for name in ("moe_enable_deepep", "moe_flex_dispatcher_backend"):
        if at.values.get(name) and not flex:
            yield name, "set moe_token_dispatcher_type=flex"
    if (
        at.values.get("moe_enable_deepep")
        and at.values.get("moe_flex_dispatcher_backend", "deepep") != "deepep"
    ):
        yield (
            "moe_enable_deepep",
            "moe_flex_dispatcher_backend names another backend: leave one of them out",
        )
    if at.values.get("moe_shared_expert_overlap"):
        name = "moe_shared_expert_overlap"
        if flex:
            yield name, "Megatron-Core overlaps shared experts with moe_token_dispatcher_type=alltoall only"
        if not (at.model.get("n_shared_experts") or at.model.get("shared_expert_intermediate_size")):
            yield name, "the model has no shared experts: leave it out"
        if lora is not None and "mlp" in lora.targets:
            yield (
                name,
                "shared experts exchange tokens apart from their projections then, so that these cannot have "
                "adapters: leave it out, or mlp out of trainer.lora.targets",
            )
    if at.values.get("moe_router_fusion") and at.config.routing.replay != "off":
        yield (
            "moe_router_fusion",
            "the fused router ignores replayed choices: set routing.replay=off, or leave it out",
        )
    if at.values.get("apply_rope_fusion") and at.model.get("kv_lora_rank"):
        yield (
            "apply_rope_fusion",
            "the kernel for latent attention is experimental, and for YaRN only: leave it out",
        )
    if at.values.get("bucket_size") and not trainer.overlap_grad_reduce:
        yield (
            "bucket_size",
            "gradients are summed in buckets during the backward pass: set trainer.overlap_grad_reduce=true",
        )
    yield from _problems_of_fp8(at)
    yield from _problems_of_optimizer(at)
    yield from _problems_of_recomputation(at)


def _problems_of_fp8(at: Situation) -> Iterator[tuple[str, str]]:
    recipe = at.values.get("fp8_recipe", "delayed")
    if not at.values.get("fp8"):
        for name in ("fp8_recipe", "first_last_layers_bf16"):
            if at.values.get(name):
                yield name, "set fp8 to e4m3 or hybrid"
        return
    if recipe not in ("tensorwise", "blockwise", "mxfp8"):
        yield (
            "fp8",
            "set fp8_recipe to tensorwise, blockwise or mxfp8: the scales of Megatron's default, delayed, "
            "follow from earlier batches, which checkpoints do not hold",
        )
    if at.config.trainer.lora is not None:
        yield (
            "fp8",
            "adapters would be rounded to eight bits with every product: leave it out, or set "
            "trainer.lora=null",
        )
    if recipe == "blockwise" and at.model["hidden_size"] % 128:
        yield (
            "fp8",
            "blocks have 128 values, which must divide the model's hidden size: take another fp8_recipe",
        )


def _problems_of_optimizer(at: Situation) -> Iterator[tuple[str, str]]:
    offload, precise = at.values.get("optimizer_cpu_offload"), at.values.get("use_precision_aware_optimizer")
    fraction = at.values.get("optimizer_offload_fraction", 1.0)
    if offload and not (at.fused and precise):
        yield (
            "optimizer_cpu_offload",
            "set use_precision_aware_optimizer=true and model.dtype=bfloat16: main weights would stay on the "
            "device otherwise",
        )
    if offload and at.config.placement.shared and fraction != 1.0:
        yield (
            "optimizer_cpu_offload",
            "with placement.shared the device must be empty between steps: set "
            "optimizer_offload_fraction=1.0",
        )
    for name in (
        "optimizer_offload_fraction",
        "use_torch_optimizer_for_cpu_offload",
        "overlap_cpu_optimizer_d2h_h2d",
    ):
        if at.values.get(name) and not offload:
            yield name, "it divides the work of optimizer_cpu_offload: set that"
    if fraction is not None and not 0 < fraction <= 1:
        yield "optimizer_offload_fraction", "expected a fraction above 0, at most 1"
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        moment = at.values.get(name) or "float32"
        if moment != "float32" and not precise:
            yield name, "set use_precision_aware_optimizer=true"
        if moment != "float32" and offload:
            yield name, "the optimizer of the host, torch's AdamW, keeps its moments in float32"
        if moment not in ("float32", "bfloat16"):
            yield name, "such moments have scales, which checkpoints do not hold: set bfloat16"


def _problems_of_recomputation(at: Situation) -> Iterator[tuple[str, str]]:
    modules, name = at.values.get("recompute_modules") or (), "recompute_modules"
    if modules and at.config.trainer.recompute != "selective":
        yield name, "it names what trainer.recompute=selective computes again: set that"
    if "moe_act" in modules and not at.fused:
        yield (
            name,
            "moe_act is of grouped experts, which need a GPU, TransformerEngine and model.dtype=bfloat16",
        )
    if "mla_up_proj" in modules and not at.model.get("kv_lora_rank"):
        yield name, "mla_up_proj is of latent attention, which the model does not have"
    if "shared_experts" in modules and at.values.get("moe_shared_expert_overlap"):
        yield (
            name,
            "shared_experts cannot be computed again with moe_shared_expert_overlap: leave one of them out",
        )
    if not at.num_experts and not {"moe", "moe_act", "shared_experts"}.isdisjoint(modules):
        yield name, "the model has no experts: name core_attn, mlp or layernorm"


def check_megatron_settings(config: Config, *, on_gpu: bool | None = None) -> None:
    """Check `trainer.megatron`.

    Args:
        config: The run's config.
        on_gpu: Whether the trainer runs on GPUs; None: by `trainer.device` and this machine.

    Raises:
        ConfigError: A field may not be set, is of another type, or does not fit the config.
    """
    values = config.trainer.megatron
    if not values:
        return
    for name in values:
        if name not in ALLOWED:
            raise ConfigError(f"trainer.megatron.{name} cannot be set: {_remedy(name)}")
    if (fields := megatron_fields()) is not None:
        for name, value in values.items():
            _check_field(fields, name, value)
    at = situation_of(config, on_gpu)
    for name, value in values.items():
        if name.startswith("moe_") and not at.num_experts:
            raise ConfigError(f"trainer.megatron.{name} is set, but the model has no experts: leave it out")
        _check_device(at, name, value)
    for name, problem in _problems(at):
        raise ConfigError(f"trainer.megatron.{name} is {values[name]!r}: {problem}")


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


def _remedy(name: str) -> str:
    """Return what to do about a field that cannot be set."""
    for setting, names in _INSTEAD.items():
        if name in names.split():
            return f"set {setting} instead"
    near = difflib.get_close_matches(name, ALLOWED, n=3, cutoff=0.6)
    return f"the trainer decides it, or it does not exist; near it are {', '.join(near) or 'no fields'}"


def _check_field(fields: Mapping[str, str], name: str, value: Any) -> None:
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
    if name in GPU_FIELDS and not at.on_gpu:
        raise ConfigError(
            f"trainer.megatron.{name} works on GPUs only, and the trainer runs on a CPU: leave it out, or "
            "set trainer.device=cuda if the ranks run elsewhere"
        )
    if name in _FUSED and not at.fused:
        raise ConfigError(
            f"trainer.megatron.{name} is of TransformerEngine, and has a use in half precision only: set "
            "model.dtype=bfloat16"
        )
