"""The supported architectures: the Megatron config of each. `trainer.supported_values` rejects values before.

mbridge maps the names of weights and splits them. Configs are built here, from config.json in the format of
transformers 5: mbridge assumes some fields, and reads others from places where they no longer are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mbridge.core.safetensor_io import SafeTensorIO
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from mbridge.models.glm4moe import GLM4MoEBridge
from mbridge.models.llama import LLaMABridge
from mbridge.models.mixtral import MixtralBridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen2moe import Qwen2MoEBridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from transformers import AutoConfig, DeepseekV3Config

from async_rl.engines.model_facts import facts_of, read_config
from trainer.megatron.attention import PackedAttention
from trainer.megatron.cpu import fuses_layers
from trainer.supported_values import check_model_type, check_supported_values


class _Spec:
    """Extends mbridge's bridges by the local layer spec and the config.json format of transformers 5."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, fields: dict[str, Any]) -> None:
        self._fused = fuses_layers(dtype)
        self._fields = {**({} if self._fused else _LOCAL_SPEC), **fields}
        if getattr(hf_config, "head_dim", None) is None:  # null in Mixtral's config
            hf_config.head_dim = hf_config.hidden_size // hf_config.num_attention_heads
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns about its own defaults
            super().__init__(hf_config, dtype=dtype)
        ranks = self.mpu.tp_size
        if hf_config.vocab_size % ranks:
            self.make_vocab_size_divisible_by = ranks

    def _adjust_mapping_for_shared_weights(self) -> None:
        # mbridge records tied embeddings in a table shared by all models of a class, or not at all.
        self._DIRECT_MAPPING = dict(self._DIRECT_MAPPING)
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        return super()._build_base_config(text_config_key, **{**kwargs, **self._fields})

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        self.has_vp_stage = True
        spec = get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=self._fused, normalization="RMSNorm", vp_stage=vp_stage
        )
        if not self._fused:
            for layer in spec.layer_specs:
                attention = layer.submodules.self_attention.submodules
                attention.core_attention = PackedAttention
                if self.config.multi_latent_attention:
                    # The spec shards the down-projections by columns and gathers their outputs. Heads share
                    # the rotary part of the keys, whose gradient would come from one rank's heads only.
                    # Replicated projections, as with TransformerEngine, sum gradients over the tensor ranks.
                    attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
        return spec

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return {
            "vocab_size": self.hf_config.vocab_size,
            "max_sequence_length": self.hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": self.hf_config.rope_parameters["rope_theta"],
        }


class _Llama(_Spec, LLaMABridge):
    """Llama 2 and 3."""

    def _get_gptmodel_args(self) -> dict[str, Any]:
        rope = self.hf_config.rope_parameters
        args = super()._get_gptmodel_args()
        if rope.get("rope_type", "default") == "llama3":
            args |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        return args


class _Qwen2(_Spec, Qwen2Bridge):
    """Dense Qwen2 and Qwen2.5."""


class _Qwen3(_Spec, Qwen3Bridge):
    """Dense Qwen3."""


class _Mixtral(_Spec, MixtralBridge):
    """Mixtral, with gates that sum to 1; mbridge's config makes them sum to less."""

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        kwargs["moe_router_pre_softmax"] = False
        return super()._build_base_config(text_config_key, **kwargs)


class _Qwen3MoE(_Spec, Qwen3MoEBridge):
    """Qwen3-MoE, also with dense layers between MoE layers."""

    _MLP_MAPPING = {**Qwen3MoEBridge._MLP_MAPPING, **Qwen3Bridge._MLP_MAPPING}  # noqa: RUF012 - mbridge's way

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        kwargs["moe_router_pre_softmax"] = not self.hf_config.norm_topk_prob
        return super()._build_base_config(text_config_key, **kwargs)


class _Qwen2MoE(_Spec, Qwen2MoEBridge):
    """Qwen2-MoE: a gated shared expert, biases in attention; also with dense layers between."""

    _MLP_MAPPING = {**Qwen2MoEBridge._MLP_MAPPING, **Qwen3Bridge._MLP_MAPPING}  # noqa: RUF012 - mbridge's way

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        kwargs["moe_router_pre_softmax"] = not self.hf_config.norm_topk_prob
        kwargs["moe_shared_expert_gate"] = True
        return super()._build_base_config(text_config_key, **kwargs)


class _DeepseekV3(_Spec, DeepseekV3Bridge):
    """DeepSeek-V3 without its multi-token prediction, which the engines do not use either.

    The config is built here because mbridge omits the groups of experts, reads the rotary settings from where
    transformers 5 no longer keeps them, and adds layers for multi-token prediction.
    """

    def _build_config(self) -> Any:
        hf = self.hf_config
        grouped = hf.n_group != hf.topk_group  # otherwise every group is chosen
        # Megatron's fused kernel for latent attention is experimental and exists for YaRN only.
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

    def _model_provider(self, callbacks: list[Callable[[torch.nn.Module], None]]) -> Callable[..., Any]:
        # DeepSeek's own adds layers for multi-token prediction, and no rows of padding to the vocabulary.
        return super(DeepseekV3Bridge, self)._model_provider(callbacks)

    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO:
        # mbridge dequantises fp8 blocks here, on a GPU; `trainer.supported_values` rejects such checkpoints.
        return SafeTensorIO(weights_path)


class _Glm4MoE(_Spec, GLM4MoEBridge):
    """GLM-4.5 without its multi-token prediction, which the engines do not use either.

    The config is built here because mbridge assumes one shared expert, adds biases and norms to attention
    regardless of config.json, and requires fused kernels.
    """

    def _build_config(self) -> Any:
        hf = self.hf_config
        return self._build_base_config(
            kv_channels=hf.head_dim,
            qk_layernorm=hf.use_qk_norm,
            add_qkv_bias=hf.attention_bias,
            num_moe_experts=hf.n_routed_experts,
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
    """Return the rotary fields of Megatron's `MLATransformerConfig`.

    Source: transformers, `_compute_yarn_parameters` and `yarn_apply_mscale`: when both mscales are given, the
    rotation is scaled by the inverse of their quotient; the softmax is scaled by `mscale_all_dim`.
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


_BRIDGES: dict[str, type[_Spec]] = {
    "deepseek_v3": _DeepseekV3,
    "glm4_moe": _Glm4MoE,
    "kimi_k2": _DeepseekV3,
    "llama": _Llama,
    "mixtral": _Mixtral,
    "qwen2": _Qwen2,
    "qwen2_moe": _Qwen2MoE,
    "qwen3": _Qwen3,
    "qwen3_moe": _Qwen3MoE,
}


_LOCAL_SPEC: dict[str, Any] = {
    # Fused kernels of Apex and TransformerEngine, which the local spec does not use.
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "moe_grouped_gemm": False,
    "moe_shared_expert_overlap": False,
}


class KimiK2Config(DeepseekV3Config):
    """The config.json of Kimi-K2, a DeepSeek-V3 under its own `model_type`.

    transformers knows the type only from the code in the model's folder, which is never run.

    Source: the deployment guide of MoonshotAI/Kimi-K2, "Others"; sglang/srt/utils/hf_transformers/common.py,
    `_KimiK2ConfigAlias`.
    """

    model_type = "kimi_k2"


def load_hf_config(path: Path) -> Any:
    """Return the config of a model folder as transformers reads it, without code from the folder.

    Raises:
        ConfigError: When the trainer does not support the model's type.
    """
    kind = str(read_config(path).get("model_type"))
    check_model_type(kind, str(path))
    reader = KimiK2Config if kind == KimiK2Config.model_type else AutoConfig
    return reader.from_pretrained(path, trust_remote_code=False)


def bridge_for(hf_config: Any, path: str, dtype: torch.dtype, fields: dict[str, Any]) -> Any:
    """Return mbridge's bridge for a model, with a config for the current parallel state.

    Args:
        hf_config: The model's config.json.
        path: The model's folder, for messages.
        dtype: Type of the parameters.
        fields: Fields of Megatron's `TransformerConfig`, which override the model's.

    Raises:
        ConfigError: When the trainer does not support the model, or a value in its config.
    """
    config = read_config(path)
    check_supported_values(config, path)
    facts = facts_of(config)
    pattern = [int(layer in facts.moe_layers) for layer in range(facts.num_layers)]
    return _BRIDGES[hf_config.model_type](hf_config, dtype, {"moe_layer_freq": pattern, **fields})
