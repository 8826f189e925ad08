"""The model types that the trainer supports, and the values of config.json that it rejects.

`async-rl check` and each rank use this list, so it does without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from async_rl.engines.model_facts import NOT_SUPPORTED
from async_rl.errors import ConfigError

KNOWN_MODEL_TYPES = (
    "deepseek_v3",
    "glm4_moe",
    "kimi_k2",
    "llama",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
"""Supported values of `model_type`, those of `trainer.megatron.architectures`."""


def check_model_type(kind: str, path: str) -> None:
    """Check that the trainer supports a model type.

    Raises:
        ConfigError: When it does not; the message lists the supported types, or says what is missing.
    """
    if kind in NOT_SUPPORTED:
        raise ConfigError(
            f"model.path is {path}, of type {kind!r}, which cannot be trained: {NOT_SUPPORTED[kind]}"
        )
    if kind not in KNOWN_MODEL_TYPES:
        raise ConfigError(
            f"model.path is {path}, a model of type {kind!r}; the trainer supports "
            f"{', '.join(KNOWN_MODEL_TYPES)}"
        )


def check_supported_values(config: dict[str, Any], path: str) -> None:
    """Check a parsed config.json of a supported type.

    Raises:
        ConfigError: The trainer does not support one of its values.
    """
    kind, fields = config["model_type"], fields_of(config)
    for field, actual, allowed in _EXPECTED[kind](fields):
        if actual not in allowed:
            raise ConfigError(
                f"{path}/config.json has {field} = {actual!r}; the trainer supports only "
                f"{' or '.join(map(repr, allowed))} for {kind}"
            )
    if (top_k := getattr(fields, "num_experts_per_tok", None)) is not None:
        _check_gates(top_k, normalised=getattr(fields, "norm_topk_prob", True))


_DEEPSEEK: Final = {
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "attention_bias": False,
}
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": {"n_group": 1, "num_experts_per_tok": 8, "norm_topk_prob": True},
    "kimi_k2": _DEEPSEEK,
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mixtral": {"num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {},
    "qwen2_moe": {"num_experts_per_tok": 4, "norm_topk_prob": False},
    "qwen3": {},
    "qwen3_moe": {"num_experts_per_tok": 8, "norm_topk_prob": False},
}
"""What transformers takes for fields that a config.json lacks, of those that are read here."""


def fields_of(config: dict[str, Any]) -> SimpleNamespace:
    """Return a config.json with the defaults of its type, and rotary settings where transformers has them.

    Source: transformers 5, `convert_rope_params_to_dict` and `standardize_rope_params`.
    """
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] in ("llama3", "yarn"):
        original = "original_max_position_embeddings"
        if original in config:
            rope[original] = config[original]
        rope.setdefault(original, config.get("max_position_embeddings"))
    defaults = {"hidden_act": "silu", **_DEFAULTS[config["model_type"]]}
    return SimpleNamespace(**{**defaults, **config, "rope_parameters": rope})


def _check_gates(top_k: int, *, normalised: bool) -> None:
    """Check that the router can learn: the normalised gate of a single expert is 1, whatever its logits are.

    Raises:
        ConfigError: When a token goes to one expert, with a normalised gate. Megatron-Core refuses it too.
    """
    if top_k == 1 and normalised:
        raise ConfigError(
            "the model's config.json has num_experts_per_tok = 1 with normalised gates (norm_topk_prob), so "
            "that every gate is 1 and its router has no gradient; use a model with more experts per token, "
            "or one with norm_topk_prob false"
        )


Expectation = tuple[str, Any, tuple[Any, ...]]
"""A field of config.json, its value, and the supported values."""


_APPLIED_BY_SGLANG: Final = {
    "compression_config": None,
    "final_logit_softcapping": None,
    "llama_4_scaling": None,
    "original_num_attention_heads": None,
    "quantization_config": None,
    "rope_is_neox_style": True,
    "swiglu_limit": None,
}
"""Fields that SGLang applies, in some or all of its model classes for these types, and the trainer does not;
with the value that changes nothing.

Source: sglang/srt/models/{llama,qwen2,deepseek_v2}.py, srt/layers/logits_processor.py,
srt/model_loader/checkpoint_quantization.py."""


def _expected_of_any(fields: SimpleNamespace) -> list[Expectation]:
    return [
        ("use_sliding_window", getattr(fields, "use_sliding_window", False), (False,)),
        ("hidden_act", fields.hidden_act, ("silu",)),
        *((name, getattr(fields, name, value), (value,)) for name, value in _APPLIED_BY_SGLANG.items()),
    ]


def _expected_of_qwen(fields: SimpleNamespace) -> list[Expectation]:
    return [
        ("rope_parameters.rope_type", fields.rope_parameters.get("rope_type", "default"), ("default",)),
        ("qkv_bias", getattr(fields, "qkv_bias", True), (True,)),
        ("attention_bias", getattr(fields, "attention_bias", False), (False,)),
        *_expected_of_any(fields),
    ]


def _expected_of_llama(fields: SimpleNamespace) -> list[Expectation]:
    rope = fields.rope_parameters
    kind = rope.get("rope_type", "default")
    partial = getattr(fields, "partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    scaled = (
        ("low_freq_factor", 1),
        ("high_freq_factor", 4),
        ("original_max_position_embeddings", 8192),
    )  # Megatron hard-codes these
    return [
        ("rope_parameters.rope_type", kind, ("default", "llama3")),
        *((f"rope_parameters.{name}", rope.get(name), (v,)) for name, v in scaled if kind == "llama3"),
        ("attention_bias", fields.attention_bias, (False,)),
        ("mlp_bias", fields.mlp_bias, (False,)),
        ("bias", getattr(fields, "bias", False), (False,)),
        ("partial_rotary_factor", partial, (1.0,)),
        *_expected_of_any(fields),
    ]


def _expected_of_mixtral(fields: SimpleNamespace) -> list[Expectation]:
    return [
        ("rope_parameters.rope_type", fields.rope_parameters.get("rope_type", "default"), ("default",)),
        ("sliding_window", fields.sliding_window, (None,)),
        *_expected_of_any(fields),
    ]


def _expected_of_deepseek(fields: SimpleNamespace) -> list[Expectation]:
    rope = fields.rope_parameters
    groups, top_groups = fields.n_group, fields.topk_group
    return [
        ("rope_parameters.rope_type", rope.get("rope_type", "default"), ("default", "yarn")),
        ("rope_parameters.attention_factor", rope.get("attention_factor"), (None,)),
        ("rope_parameters.truncate", rope.get("truncate", True), (True,)),
        (
            "both or none of rope_parameters.mscale and mscale_all_dim",
            bool(rope.get("mscale")) == bool(rope.get("mscale_all_dim")),
            (True,),
        ),
        ("rope_interleave", fields.rope_interleave, (True,)),
        ("num_key_value_heads", fields.num_key_value_heads, (fields.num_attention_heads,)),
        ("moe_layer_freq", getattr(fields, "moe_layer_freq", 1), (1,)),
        ("scoring_func", getattr(fields, "scoring_func", "sigmoid"), ("sigmoid",)),
        ("topk_method", getattr(fields, "topk_method", "noaux_tc"), ("noaux_tc",)),
        ("norm_topk_prob", fields.norm_topk_prob, (True,)),
        # Hugging Face and SGLang rank groups by their two best experts, Megatron by the average number of
        # experts per chosen group. They agree for two, and when all groups are chosen.
        (
            "num_experts_per_tok / topk_group",
            2 if groups == top_groups else fields.num_experts_per_tok // top_groups,
            (2,),
        ),
        ("attention_bias", fields.attention_bias, (False,)),
        *_expected_of_any(fields),
    ]


def _expected_of_glm(fields: SimpleNamespace) -> list[Expectation]:
    return [
        ("rope_parameters.rope_type", fields.rope_parameters.get("rope_type", "default"), ("default",)),
        ("norm_topk_prob", fields.norm_topk_prob, (True,)),
        ("n_group", fields.n_group, (1,)),
        *_expected_of_any(fields),
    ]


_EXPECTED: dict[str, Callable[[SimpleNamespace], list[Expectation]]] = {
    "deepseek_v3": _expected_of_deepseek,
    "glm4_moe": _expected_of_glm,
    "kimi_k2": _expected_of_deepseek,
    "llama": _expected_of_llama,
    "mixtral": _expected_of_mixtral,
    "qwen2": _expected_of_qwen,
    "qwen2_moe": _expected_of_qwen,
    "qwen3": _expected_of_qwen,
    "qwen3_moe": _expected_of_qwen,
}
