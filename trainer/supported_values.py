"""The model types that the trainer supports, and the values of config.json that it rejects.

`async-rl check` and each rank use this list, so it does without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from async_rl.engines.model_facts import NOT_SUPPORTED
from async_rl.errors import ConfigError

_QWEN: Final[dict[str, tuple[Any, ...]]] = {
    "rope_parameters.rope_type": ("default",),
    "qkv_bias": (True,),
    "attention_bias": (False,),
}
_DEEPSEEK: Final[dict[str, tuple[Any, ...]]] = {
    "rope_parameters.rope_type": ("default", "yarn"),
    "rope_parameters.attention_factor": (None,),
    "rope_parameters.truncate": (True,),
    "rope_interleave": (True,),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "attention_bias": (False,),
}
_SUPPORTED: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": {"rope_parameters.rope_type": ("default",), "norm_topk_prob": (True,), "n_group": (1,)},
    "kimi_k2": _DEEPSEEK,
    "llama": {
        "rope_parameters.rope_type": ("default", "llama3"),
        "rope_parameters.partial_rotary_factor": (1.0,),
        "partial_rotary_factor": (1.0,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "bias": (False,),
    },
    "mixtral": {"rope_parameters.rope_type": ("default",), "sliding_window": (None,)},
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": _QWEN,
}
"""The supported values of fields, by type. transformers takes the first one for a field that a config.json
lacks."""

_APPLIED_BY_SGLANG: Final[dict[str, tuple[Any, ...]]] = {
    "compression_config": (None,),
    "final_logit_softcapping": (None,),
    "llama_4_scaling": (None,),
    "original_num_attention_heads": (None,),
    "quantization_config": (None,),
    "rope_is_neox_style": (True,),
    "swiglu_limit": (None,),
}
"""Fields that SGLang applies, in some or all of its model classes for these types, and the trainer does not;
with the value that changes nothing.

Source: sglang/srt/models/{llama,qwen2,deepseek_v2}.py, srt/layers/logits_processor.py,
srt/model_loader/checkpoint_quantization.py."""

_OF_ANY: Final = {"use_sliding_window": (False,), "hidden_act": ("silu",)} | _APPLIED_BY_SGLANG

_LLAMA3: Final = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Settings of `rope_type: llama3`, which Megatron hard-codes."""

KNOWN_MODEL_TYPES: Final = tuple(_SUPPORTED)
"""Supported values of `model_type`, those of `trainer.megatron.architectures`."""

_DEEPSEEK_SIZES: Final = {
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
}
_OTHER_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v3": _DEEPSEEK_SIZES,
    "glm4_moe": {"num_experts_per_tok": 8},
    "kimi_k2": _DEEPSEEK_SIZES,
    "mixtral": {"num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts_per_tok": 4, "norm_topk_prob": False},
    "qwen3_moe": {"num_experts_per_tok": 8, "norm_topk_prob": False},
}
"""What transformers takes for other fields that a config.json lacks, of those that are read here."""


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
    for field, actual, allowed in _expectations(kind, fields):
        if actual not in allowed:
            raise ConfigError(
                f"{path}/config.json has {field} = {actual!r}; the trainer supports only "
                f"{' or '.join(map(repr, allowed))} for {kind}"
            )
    if (top_k := fields.get("num_experts_per_tok")) is not None:
        _check_gates(top_k, normalised=fields.get("norm_topk_prob", True))


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
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
    kind = config["model_type"]
    defaults = {name: values[0] for name, values in (_OF_ANY | _SUPPORTED[kind]).items() if "." not in name}
    return defaults | _OTHER_DEFAULTS.get(kind, {}) | dict(config) | {"rope_parameters": rope}


def _expectations(kind: str, fields: dict[str, Any]) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield fields of config.json, with the value and the supported values of each."""
    rope = fields["rope_parameters"]
    for name, allowed in (_SUPPORTED[kind] | _OF_ANY).items():
        of_rope = name.removeprefix("rope_parameters.")
        yield name, fields[name] if of_rope == name else rope.get(of_rope, allowed[0]), allowed
    if rope["rope_type"] == "llama3":
        for name, value in _LLAMA3.items():
            yield f"rope_parameters.{name}", rope.get(name), (value,)
    if _SUPPORTED[kind] is _DEEPSEEK:
        both_or_none = bool(rope.get("mscale")) == bool(rope.get("mscale_all_dim"))
        yield "both or none of rope_parameters.mscale and mscale_all_dim", both_or_none, (True,)
        yield "num_key_value_heads", fields["num_key_value_heads"], (fields["num_attention_heads"],)
        # Hugging Face and SGLang rank groups by their two best experts, Megatron by the average number of
        # experts per chosen group. They agree for two, and when all groups are chosen.
        top_groups = fields["topk_group"]
        each = 2 if fields["n_group"] == top_groups else fields["num_experts_per_tok"] // top_groups
        yield "num_experts_per_tok / topk_group", each, (2,)


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
