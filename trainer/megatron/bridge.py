"""Hugging Face weights into Megatron-Core and out again, through mbridge.

mbridge 0.15.1 speaks the parameter names of the layer spec with TransformerEngine. A model built from the
local spec is shown to it through a view that carries those names; everything else (which tensor is split how,
who gathers what) stays mbridge's. Its configs come from the model's own config.json.
"""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mbridge.core.safetensor_io import SafeTensorIO
from mbridge.core.util import unwrap_model
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from mbridge.models.glm4moe import GLM4MoEBridge
from mbridge.models.qwen2moe import Qwen2MoEBridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from safetensors.torch import save_file
from transformers import AutoConfig

from async_rl.errors import ConfigError
from trainer.megatron.attention import PackedAttention
from trainer.megatron.cpu import has_transformer_engine
from trainer.ranks import together

SHARD_BYTES = 4 << 30
"""Largest safetensors file that `save_hf` writes; a single larger tensor stands alone."""

_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


_MLA_INPUT_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""With TransformerEngine latent attention fuses its own norms into the projections behind them; its input's
stands alone."""


class _TransformerEngineNames:
    """A model under the parameter names of the TransformerEngine spec, as far as mbridge looks at it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.decoder = model.decoder
        self._names = {name: name for name in model.state_dict() if "_extra_state" not in name}
        moe_layers = {name.split(".")[2] for name in self._names if name.endswith(".mlp.router.weight")}
        latent = any(name.endswith(".linear_kv_down_proj.weight") for name in self._names)
        for name in self._names:
            self._names[name] = _te_name(name, moe_layers, latent)
        self._state = {self._names[n]: t for n, t in model.state_dict().items() if n in self._names}
        self._parameters = [(self._names[n], p) for n, p in model.named_parameters()]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._state

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return self._parameters


def _te_name(name: str, moe_layers: set[str], latent: bool) -> str:
    layer = re.match(r"^(decoder\.layers\.\d+\.)(.+)$", name)
    if latent and layer and layer.group(2) in _MLA_INPUT_NORMS:
        return layer.group(1) + _MLA_INPUT_NORMS[layer.group(2)]
    name = re.sub(
        r"^(decoder\.layers\.\d+)\.input_layernorm\.weight$",
        r"\1.self_attention.linear_qkv.layer_norm_weight",
        name,
    )
    name = re.sub(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r".\2.weight\1", name)
    dense = re.match(r"^decoder\.layers\.(\d+)\.pre_mlp_layernorm\.weight$", name)
    if dense and dense.group(1) not in moe_layers:
        return f"decoder.layers.{dense.group(1)}.mlp.linear_fc1.layer_norm_weight"
    return name


class _Spec:
    """What both bridges need beside mbridge's own: the local spec, config.json as transformers 5 has it."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, fields: dict[str, Any]) -> None:
        self._fields = fields
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron deprecates defaults of its own
            super().__init__(hf_config, dtype=dtype)

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        return super()._build_base_config(text_config_key, **{**kwargs, **self._fields})

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        self.has_vp_stage = True
        fused = has_transformer_engine()
        spec = get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=fused, normalization="RMSNorm", vp_stage=vp_stage
        )
        if not fused:
            for layer in spec.layer_specs:
                attention = layer.submodules.self_attention.submodules
                attention.core_attention = PackedAttention
                if self.config.multi_latent_attention:
                    # The spec shards the down-projections by columns and gathers what comes out. Heads share
                    # the rotary part of the keys, and its gradient would be that of one rank's heads alone.
                    # Replicated, as with TransformerEngine, gradients are summed over the tensor ranks.
                    attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
        return spec

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return {
            "vocab_size": self.hf_config.vocab_size,
            "max_sequence_length": self.hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": self.hf_config.rope_parameters["rope_theta"],
        }


class _Qwen3(_Spec, Qwen3Bridge):
    """Dense Qwen3."""


class _Qwen3MoE(_Spec, Qwen3MoEBridge):
    """Qwen3-MoE, also with dense layers in between."""

    _MLP_MAPPING = {**Qwen3MoEBridge._MLP_MAPPING, **Qwen3Bridge._MLP_MAPPING}  # noqa: RUF012 - mbridge's way

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        kwargs["moe_router_pre_softmax"] = not self.hf_config.norm_topk_prob
        kwargs["moe_layer_freq"] = moe_layer_pattern(self.hf_config)
        return super()._build_base_config(text_config_key, **kwargs)


class _Qwen2MoE(_Spec, Qwen2MoEBridge):
    """Qwen2-MoE: a gated shared expert, biases in attention; also with dense layers in between."""

    _MLP_MAPPING = {**Qwen2MoEBridge._MLP_MAPPING, **Qwen3Bridge._MLP_MAPPING}  # noqa: RUF012 - mbridge's way

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        kwargs["moe_router_pre_softmax"] = not self.hf_config.norm_topk_prob
        kwargs["moe_layer_freq"] = moe_layer_pattern(self.hf_config)
        kwargs["moe_shared_expert_gate"] = True
        return super()._build_base_config(text_config_key, **kwargs)


class _DeepseekV3(_Spec, DeepseekV3Bridge):
    """DeepSeek-V3 without its multi-token prediction, which the engines do not use either.

    The config is built here and not by mbridge: that one leaves out the groups of experts, reads the rotary
    settings where transformers 5 no longer keeps them, and takes layers for the prediction of further tokens.
    """

    def _build_config(self) -> Any:
        hf = self.hf_config
        grouped = hf.n_group != hf.topk_group  # otherwise every group is taken
        # Megatron calls its fused kernel for latent attention experimental, and it exists for YaRN only.
        self._fields = {**self._fields, "apply_rope_fusion": False}
        return self._build_base_config(
            qk_layernorm=True,
            q_lora_rank=hf.q_lora_rank,
            kv_lora_rank=hf.kv_lora_rank,
            qk_head_dim=hf.qk_nope_head_dim,
            qk_pos_emb_head_dim=hf.qk_rope_head_dim,
            v_head_dim=hf.v_head_dim,
            **_latent_rope(hf.rope_parameters),
            num_moe_experts=hf.n_routed_experts,
            moe_layer_freq=moe_layer_pattern(hf),
            moe_ffn_hidden_size=hf.moe_intermediate_size,
            moe_shared_expert_intermediate_size=hf.moe_intermediate_size * hf.n_shared_experts,
            moe_router_topk=hf.num_experts_per_tok,
            moe_router_num_groups=hf.n_group if grouped else None,
            moe_router_group_topk=hf.topk_group if grouped else None,
            moe_router_topk_scaling_factor=hf.routed_scaling_factor,
            moe_router_score_function="sigmoid",
            moe_router_dtype="fp32",
            moe_router_enable_expert_bias=True,
        )

    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO:
        # mbridge dequantises blocks of fp8 here, on a GPU; such checkpoints are refused, see `_EXPECTED`.
        return SafeTensorIO(weights_path)


class _Glm4MoE(_Spec, GLM4MoEBridge):
    """GLM-4.5 without its multi-token prediction, which the engines do not use either.

    The config is built here and not by mbridge: that one takes one shared expert for granted, adds biases and
    norms to attention whatever config.json says, and asks for fused kernels.
    """

    def _build_config(self) -> Any:
        hf = self.hf_config
        return self._build_base_config(
            kv_channels=hf.head_dim,
            qk_layernorm=hf.use_qk_norm,
            add_qkv_bias=hf.attention_bias,
            num_moe_experts=hf.n_routed_experts,
            moe_layer_freq=moe_layer_pattern(hf),
            moe_ffn_hidden_size=hf.moe_intermediate_size,
            moe_shared_expert_intermediate_size=hf.moe_intermediate_size * hf.n_shared_experts,
            moe_router_topk=hf.num_experts_per_tok,
            moe_router_topk_scaling_factor=hf.routed_scaling_factor,
            moe_router_score_function="sigmoid",
            moe_router_dtype="fp32",
            moe_router_enable_expert_bias=True,
        )

    def _get_gptmodel_args(self) -> dict[str, Any]:
        part = self.hf_config.rope_parameters.get("partial_rotary_factor", 1.0)
        return super()._get_gptmodel_args() | {"rotary_percent": part}


def _latent_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary fields of Megatron's `MLATransformerConfig`.

    Source: transformers, `_compute_yarn_parameters` and `yarn_apply_mscale`: the scale of the rotation is 1
    over both mscales' quotient when both are given, the softmax is scaled by `mscale_all_dim`.
    """
    fields: dict[str, Any] = {"rotary_base": rope["rope_theta"]}
    if rope.get("rope_type", "default") == "default":
        # The factor scales the softmax for either type.
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    both = rope.get("mscale") and rope.get("mscale_all_dim")
    return fields | {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope["mscale"] if both else 1.0,
        "mscale_all_dim": rope["mscale_all_dim"] if both else 0.0,
    }


_BRIDGES: dict[str, type] = {
    "deepseek_v3": _DeepseekV3,
    "glm4_moe": _Glm4MoE,
    "qwen2_moe": _Qwen2MoE,
    "qwen3": _Qwen3,
    "qwen3_moe": _Qwen3MoE,
}


def moe_layer_pattern(hf_config: Any) -> list[int]:
    """Which layers have experts, `[num_layers]` of 0 and 1; all 0 for a dense model.

    Source: transformers, `Qwen3MoeDecoderLayer.__init__`, `DeepseekV3DecoderLayer.__init__` and
    `Glm4MoeDecoderLayer.__init__`.
    """
    layers = range(hf_config.num_hidden_layers)
    if hf_config.model_type in ("deepseek_v3", "glm4_moe"):
        return [int(layer >= hf_config.first_k_dense_replace) for layer in layers]
    num_experts = getattr(hf_config, "num_experts", 0) or 0
    return [
        int(
            num_experts > 0
            and layer not in hf_config.mlp_only_layers
            and (layer + 1) % hf_config.decoder_sparse_step == 0
        )
        for layer in layers
    ]


class HFBridge:
    """One model's way between Hugging Face and Megatron. Every method is called on all ranks."""

    def __init__(self, path: str, dtype: torch.dtype, **transformer_config: Any) -> None:
        """Read config.json and build the Megatron config for the current parallel state.

        Args:
            path: Folder of the Hugging Face model.
            dtype: Type of the parameters.
            transformer_config: Fields of Megatron's `TransformerConfig` to set.

        Raises:
            ConfigError: When there is no such model, or it is one this trainer does not know.
        """
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise ConfigError(
                f"model.path is {path}, but there is no config.json: name a Hugging Face model folder"
            )
        self.hf_config = AutoConfig.from_pretrained(self.path)
        _check_supported(self.hf_config, path)
        local = {} if has_transformer_engine() else _LOCAL_SPEC
        self._bridge = _BRIDGES[self.hf_config.model_type](
            self.hf_config, dtype, {**local, **transformer_config}
        )

    @property
    def config(self) -> Any:
        """Megatron's `TransformerConfig`."""
        return self._bridge.config

    def build(self) -> list[torch.nn.Module]:
        """This rank's chunks of the model, uninitialised in the sense that `load_hf` overwrites them."""
        provide = self._bridge._model_provider([])
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron deprecates arguments that its own specs leave out
            return [
                provide(
                    pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                    post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                    vp_stage=stage,
                )
                for stage in ([None] if chunks is None else range(chunks))
            ]

    @torch.no_grad()
    def load_hf(self, models: list[torch.nn.Module]) -> None:
        """Load the folder's weights."""
        self._bridge.load_weights(_views(models), str(self.path))

    @torch.no_grad()
    def export_hf(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor under its Hugging Face name, gathered from all model-parallel ranks.

        Must be exhausted on all ranks: gathering is collective. A tensor may be a view of a parameter.
        """
        yield from self._bridge.export_weights(_views(models))

    def save_hf(self, models: list[torch.nn.Module], directory: str | Path) -> None:
        """Write a complete Hugging Face folder: weights, config, tokenizer, generation config.

        Written beside and renamed: the folder appears when it is complete. Rank 0 writes, all wait for it.

        Raises:
            TrainerError: On all ranks, when it cannot be written.
        """
        final = Path(directory)
        tensors = self.export_hf(models)
        with together(doing=f"cannot write {final}"):
            try:
                if dist.get_rank() == 0:
                    self._write(tensors, final)
            finally:
                collections.deque(tensors, maxlen=0)  # gathering is collective: all ranks go through all

    def _write(self, tensors: Iterator[tuple[str, torch.Tensor]], final: Path) -> None:
        scratch = final.with_name(f".{final.name}.{os.getpid()}.tmp")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        shards = _ShardWriter(scratch)
        for name, tensor in tensors:
            shards.add(name, tensor)
        shards.finish()
        self._copy_companions(scratch)
        if final.exists():
            shutil.rmtree(final)
        scratch.rename(final)

    def _copy_companions(self, directory: Path) -> None:
        """Copy everything of the source folder that is no weight, and note the type of the weights."""
        for file in self.path.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHT_FILES):
                shutil.copyfile(file, directory / file.name)
        config = json.loads((self.path / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(self._bridge.dtype).removeprefix("torch.")
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


_LOCAL_SPEC: dict[str, Any] = {
    # Fused kernels of Apex and TransformerEngine, which the local spec does without.
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "moe_grouped_gemm": False,
    "moe_shared_expert_overlap": False,
}


def _check_supported(hf_config: Any, path: str) -> None:
    kind = hf_config.model_type
    if kind not in _BRIDGES:
        raise ConfigError(
            f"model.path is {path}, a model of type {kind!r}; the trainer knows {', '.join(sorted(_BRIDGES))}"
        )
    for field, actual, allowed in _EXPECTED[kind](hf_config):
        if actual not in allowed:
            raise ConfigError(
                f"{path}/config.json has {field} = {actual!r}; the trainer knows only "
                f"{' or '.join(map(repr, allowed))} for {kind}"
            )


Expectation = tuple[str, Any, tuple[Any, ...]]
"""A field of config.json, its value, and the values the trainer knows."""


def _expected_of_any(hf_config: Any) -> list[Expectation]:
    return [
        ("use_sliding_window", getattr(hf_config, "use_sliding_window", False), (False,)),
        ("hidden_act", hf_config.hidden_act, ("silu",)),
        ("quantization_config", getattr(hf_config, "quantization_config", None), (None,)),
    ]


def _expected_of_qwen(hf_config: Any) -> list[Expectation]:
    return [
        ("rope_parameters.rope_type", hf_config.rope_parameters.get("rope_type", "default"), ("default",)),
        ("qkv_bias", getattr(hf_config, "qkv_bias", True), (True,)),
        ("attention_bias", getattr(hf_config, "attention_bias", False), (False,)),
        *_expected_of_any(hf_config),
    ]


def _expected_of_deepseek(hf_config: Any) -> list[Expectation]:
    rope = hf_config.rope_parameters
    groups, top_groups = hf_config.n_group, hf_config.topk_group
    return [
        ("rope_parameters.rope_type", rope.get("rope_type", "default"), ("default", "yarn")),
        ("rope_parameters.attention_factor", rope.get("attention_factor"), (None,)),
        ("rope_parameters.truncate", rope.get("truncate", True), (True,)),
        (
            "both or none of rope_parameters.mscale and mscale_all_dim",
            bool(rope.get("mscale")) == bool(rope.get("mscale_all_dim")),
            (True,),
        ),
        ("rope_interleave", hf_config.rope_interleave, (True,)),
        ("num_key_value_heads", hf_config.num_key_value_heads, (hf_config.num_attention_heads,)),
        ("moe_layer_freq", getattr(hf_config, "moe_layer_freq", 1), (1,)),
        ("scoring_func", getattr(hf_config, "scoring_func", "sigmoid"), ("sigmoid",)),
        ("topk_method", getattr(hf_config, "topk_method", "noaux_tc"), ("noaux_tc",)),
        ("norm_topk_prob", hf_config.norm_topk_prob, (True,)),
        # Megatron normalises the gates of several experts always, that of a single one never.
        ("num_experts_per_tok above 1", hf_config.num_experts_per_tok > 1, (True,)),
        # Hugging Face and SGLang rank groups by their two best experts, Megatron by as many as a chosen group
        # gives on average. They agree for two, and where all groups are taken anyway.
        (
            "num_experts_per_tok / topk_group",
            2 if groups == top_groups else hf_config.num_experts_per_tok // top_groups,
            (2,),
        ),
        ("attention_bias", hf_config.attention_bias, (False,)),
        *_expected_of_any(hf_config),
    ]


def _expected_of_glm(hf_config: Any) -> list[Expectation]:
    return [
        ("rope_parameters.rope_type", hf_config.rope_parameters.get("rope_type", "default"), ("default",)),
        ("norm_topk_prob", hf_config.norm_topk_prob, (True,)),
        # Megatron normalises the gates of several experts always, that of a single one never.
        ("num_experts_per_tok above 1", hf_config.num_experts_per_tok > 1, (True,)),
        ("n_group", hf_config.n_group, (1,)),
        *_expected_of_any(hf_config),
    ]


_EXPECTED: dict[str, Callable[[Any], list[Expectation]]] = {
    "deepseek_v3": _expected_of_deepseek,
    "glm4_moe": _expected_of_glm,
    "qwen2_moe": _expected_of_qwen,
    "qwen3": _expected_of_qwen,
    "qwen3_moe": _expected_of_qwen,
}


def _views(models: list[torch.nn.Module]) -> list[_TransformerEngineNames]:
    return [_TransformerEngineNames(unwrap_model(model)) for model in models]


class _ShardWriter:
    """Writes tensors into safetensors files of at most `SHARD_BYTES`; if several, with their index."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._shards: list[list[str]] = []
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def _flush(self) -> None:
        save_file(self._pending, self.directory / f"{len(self._shards)}.part", metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def finish(self) -> None:
        self._flush()
        if len(self._shards) == 1:
            (self.directory / "0.part").rename(self.directory / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            file = f"model-{i + 1:05d}-of-{len(self._shards):05d}.safetensors"
            (self.directory / f"{i}.part").rename(self.directory / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self.directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
