"""Reads the dimensions of a model that other modules need from its config.json."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from async_rl.config import Config, SGLangEngines
from async_rl.engine_protocol import EngineFacts
from async_rl.errors import ConfigError
from async_rl.runtime.hub_paths import suggest_hub
from async_rl.runtime.untrusted_json import UNREADABLE

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of published Qwen2/3-MoE, of the same written by newer transformers, and of DeepSeek, GLM, Kimi."""


NOT_SUPPORTED = {
    "gpt_oss": (
        "mbridge 0.15.1 has no names for its weights, and neither the trainer's attention nor SGLang's "
        "torch_native has its sinks and sliding windows"
    ),
    "qwen3_next": (
        "Megatron-Core 0.16.1 computes its gated delta net on unpacked sequences only, and mbridge "
        "0.15.1 has no names for its weights"
    ),
}
"""By `model_type`: what the pinned libraries lack. `docs/reference/models.md` names their source files."""


def load_facts(model_path: str | Path, context_length: int | None = None) -> EngineFacts:
    """Return the dimensions of the model in a Hugging Face folder.

    Args:
        model_path: The folder with config.json.
        context_length: The server's context length; None takes the model's own.

    Raises:
        ConfigError: When there is no such folder, its config lacks a value, or its architecture has experts
            and is unknown.
    """
    try:
        return facts_of(read_config(model_path), context_length)
    except ConfigError:  # which is a ValueError, too
        raise
    except KeyError as e:
        raise ConfigError(
            f"{model_path}/config.json has no {e}: is it the config of a causal language model?"
        ) from e
    except (ValueError, TypeError) as e:
        raise ConfigError(f"{model_path}/config.json has a value that cannot be used: {e}") from e


def check_served_by_sglang(model_path: str | Path) -> None:
    """Refuse a model that SGLang 0.5.23 would compute otherwise than its config.json says.

    Its Qwen2-MoE and Qwen3-MoE have experts in every layer and ignore `mlp_only_layers` and
    `decoder_sparse_step`: weights of a dense layer are dropped, and its experts stay uninitialised.
    `_IGNORED_BY_SGLANG` has other fields that its model classes do not read. It chooses the class by
    `architectures`, and the trainer by `model_type`.

    Source: sglang/srt/models/qwen2_moe.py and qwen3_moe.py, `is_layer_sparse = True`.

    Raises:
        ConfigError: With the dense layers, or the field.
    """
    config = read_config(model_path)
    facts = facts_of(config)
    kind, named = _kind(config), config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    expected = ARCHITECTURES.get(kind, first or "the model's class in SGLang")
    if first != expected:
        raise ConfigError(
            f"{model_path}/config.json has model_type {kind!r} and architectures {named!r}, by which SGLang "
            f"chooses the model's class: set architectures to [{expected}], or use the config.json that "
            "belongs to the weights"
        )
    text = config.get("text_config") or config
    text = {**(text.get("rope_parameters") or {}), **text}
    for field, (kinds, is_ignored, remedy) in _IGNORED_BY_SGLANG.items():
        if (not kinds or kind in kinds) and is_ignored(text):
            raise ConfigError(
                f"{model_path}/config.json has {field} = {text[field]!r}, which SGLang's model class for "
                f"{kind} ignores: its log-probs would not be those of this model. {remedy}"
            )
    dense = sorted(set(range(facts.num_layers)) - set(facts.moe_layers))
    if facts.is_moe and dense and _HAS_EXPERTS[kind] is _sparse_step:
        raise ConfigError(
            f"{model_path} has dense layers {dense}, but SGLang serves every layer of a {kind} with "
            "experts: it would sample from wrong weights. Use a model without mlp_only_layers and with "
            "decoder_sparse_step 1"
        )


def check_model(config: Config, facts: EngineFacts) -> None:
    """Refuse settings that the model cannot serve.

    Raises:
        ConfigError: With the remedy.
    """
    if config.routing.replay != "off" and not facts.is_moe:
        raise ConfigError(
            f"routing.replay is {config.routing.replay}, but {config.model.path} is a dense model without "
            "experts: set routing.replay=off"
        )
    if config.rollout.max_context_tokens > facts.context_length:
        raise ConfigError(
            f"rollout.max_context_tokens is {config.rollout.max_context_tokens}, but {config.model.path} has "
            f"a context of {facts.context_length} tokens: lower it"
        )
    if isinstance(config.engine, SGLangEngines):
        check_served_by_sglang(config.model.path)
        if any(argument.partition("=")[0] == "--quantization" for argument in config.engine.extra_args):
            raise ConfigError(
                "engine.extra_args has --quantization: engines would sample from rounded weights, and could "
                "not load those of the trainer; remove it"
            )


def read_config(model_path: str | Path) -> dict[str, Any]:
    """Return the config.json of a Hugging Face model folder.

    Raises:
        ConfigError: When it is missing or damaged.
    """
    file = Path(model_path) / "config.json"
    if not file.parent.is_dir():
        raise ConfigError(
            f"there is no folder {str(model_path)!r} (looked from {Path.cwd()}). Set model.path to a folder "
            f"with a Hugging Face model{suggest_hub(str(model_path))}"
        )
    if file.exists() and not file.is_file():  # reading a pipe would wait for its writer
        raise ConfigError(f"{file} is no regular file. Set model.path to a folder with a Hugging Face model")
    try:
        text = file.read_bytes()
        if text.startswith(codecs.BOM_UTF8):  # which other readers of the file refuse, too
            raise ConfigError(f"{file} begins with a byte-order mark: save it as UTF-8 without one")
        return msgspec.json.decode(text, type=dict[str, Any])
    except OSError as e:
        raise ConfigError(
            f"cannot read {file}: {e.strerror}. Set model.path to a folder with a Hugging Face model"
        ) from e
    except UNREADABLE as e:
        raise ConfigError(f"{file} is not valid JSON: {e}") from e


def _kind(config: dict[str, Any]) -> str:
    text = config.get("text_config") or config
    return str(text.get("model_type", config.get("model_type")))


def facts_of(config: dict[str, Any], context_length: int | None = None) -> EngineFacts:
    """Return the dimensions in a parsed config.

    Raises:
        ConfigError: When the model has experts and its architecture is unknown: which of its layers have
            experts would be a guess, and routing of the wrong layers would ruin the training.
        KeyError: When a key is missing that every language model has.
        ValueError, TypeError: When a dimension is no number, or does not fit another one.
    """
    text = config.get("text_config") or config
    _check_dimensions(text)
    num_layers = int(text["num_hidden_layers"])
    num_experts = next((int(text[key]) for key in _NUM_EXPERTS if text.get(key)), 0)
    moe_layers: tuple[int, ...] = ()
    if num_experts or any("expert" in key and text[key] for key in text):
        kind = _kind(config)
        if kind in NOT_SUPPORTED:
            raise ConfigError(
                f"the model is of type {kind!r}, which cannot be trained: {NOT_SUPPORTED[kind]}"
            )
        if kind not in _HAS_EXPERTS:
            raise ConfigError(
                f"the model has experts and is of type {kind!r}; the layers with experts are known for "
                f"{', '.join(sorted(_HAS_EXPERTS))}. Use one of those, or add a rule for it to {__name__}"
            )
        moe_layers = tuple(i for i in range(num_layers) if num_experts and _HAS_EXPERTS[kind](text, i))
    if moe_layers and not 1 <= (top_k := text["num_experts_per_tok"]) <= num_experts:
        raise ValueError(
            f"num_experts_per_tok is {top_k}, expected 1 to {num_experts}, the number of experts"
        )
    return EngineFacts(
        num_layers=num_layers,
        moe_layers=moe_layers,
        num_experts=num_experts if moe_layers else 0,
        top_k=int(text["num_experts_per_tok"]) if moe_layers else 0,
        vocab_size=int(text["vocab_size"]),
        context_length=context_length or int(text["max_position_embeddings"]),
        latent_attention=bool(text.get("kv_lora_rank")),
    )


def _check_dimensions(text: dict[str, Any]) -> None:
    """Check the types of the fields that others compute with, and that heads can share keys and values.

    Raises:
        TypeError: A dimension is no whole number, or rotary settings are no object.
        ValueError: A dimension is larger than that of any model, or heads cannot be divided into groups.
    """
    for name in _DIMENSIONS:
        if type(value := text.get(name) or 0) is not int or value < 0:
            raise TypeError(f"{name} is {value!r}, expected a whole number")
        if value > (most := _MOST.get(name, _MOST_OF_ALL)):
            raise ValueError(f"{name} is {value}, expected at most {most}")
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(value := text.get(name) or {}, dict):
            raise TypeError(f"{name} is {value!r}, expected an object with rope_type and its settings")
    heads = text.get("num_attention_heads") or 0
    if heads % (groups := text.get("num_key_value_heads") or 1):
        raise ValueError(
            f"num_attention_heads is {heads}, expected a multiple of num_key_value_heads, {groups}"
        )


def _sparse_step(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer is an n-th one and not listed as dense.

    Source: transformers `Qwen3MoeDecoderLayer`, `Qwen2MoeDecoderLayer`.
    """
    step = config.get("decoder_sparse_step") or 1
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


def _after_dense_layers(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer follows the first dense ones, and is an n-th one or flagged.

    Source: DeepSeek-V3's `modeling_deepseek.py` (moe_layer_freq is a step or one flag a layer).
    """
    if layer < int(config["first_k_dense_replace"]):
        return False
    frequency = config.get("moe_layer_freq") or 1
    return bool(frequency[layer]) if isinstance(frequency, list) else layer % frequency == 0


def _has_window(config: dict[str, Any]) -> bool:
    """Whether attention is limited to a window that is shorter than the context.

    Source: transformers `Qwen2Config`, `Qwen3MoeConfig`: models with `use_sliding_window` set it to true.
    """
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", True)
    return bool(window and used and int(window) < int(config["max_position_embeddings"]))


_DIMENSIONS: Final = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *(*_NUM_EXPERTS, "num_experts_per_tok", "n_shared_experts", "first_k_dense_replace"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
"""Fields that are numbers of things; a model lacks some, or has them as null."""

_MOST: Final = {"num_hidden_layers": 10_000} | dict.fromkeys(_NUM_EXPERTS, 1 << 16)
_MOST_OF_ALL: Final = 1 << 31
"""Far above the dimensions of any model: what computes with them takes time and memory for each layer."""

ARCHITECTURES: Final = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""By `model_type`: SGLang's model class that computes what the trainer computes."""

_IGNORED_BY_SGLANG: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], bool], str]] = {
    "tie_word_embeddings": (
        ("qwen3_moe", "qwen2_moe", "glm4_moe", "mixtral"),
        lambda config: bool(config.get("tie_word_embeddings")),
        "Store a copy of the embedding as lm_head.weight, and set tie_word_embeddings to false",
    ),
    "sliding_window": ((), _has_window, "Use a model with full attention"),
    "hidden_act": (
        ("mixtral",),
        lambda config: config.get("hidden_act", "silu") != "silu",
        "Use a model with silu",
    ),
    "head_dim": (
        ("mixtral", "qwen2_moe"),
        lambda config: (
            (config.get("head_dim") or 0) * config.get("num_attention_heads", 0)
            not in (0, config.get("hidden_size"))
        ),
        "Use a model whose head_dim is hidden_size / num_attention_heads",
    ),
    "rope_theta": (
        ("mixtral",),
        lambda config: not float(config.get("rope_theta") or 0).is_integer(),
        "Use a model with a whole number, to which SGLang rounds it down",
    ),
    "mlp_bias": (("llama",), lambda config: bool(config.get("mlp_bias")), "Use a model without it"),
    "attention_bias": (
        ("deepseek_v2", "deepseek_v3", "kimi_k2"),
        lambda config: bool(config.get("attention_bias")),
        "Use a model without it",
    ),
}
"""Fields of config.json that SGLang 0.5.23 does not read, though they change what a model computes: for which
`model_type`s (none: for all), when, and what to do.

Source: sglang/srt/models, compared with transformers' `modeling_*.py`."""

_HAS_EXPERTS: dict[str, Callable[[dict[str, Any], int], bool]] = {
    "deepseek_v2": _after_dense_layers,
    "deepseek_v3": _after_dense_layers,
    "glm4_moe": _after_dense_layers,
    "kimi_k2": _after_dense_layers,
    "mixtral": lambda config, layer: True,
    "qwen2_moe": _sparse_step,
    "qwen3_moe": _sparse_step,
}
"""By `model_type`: a function of config.json and layer (from 0) that says whether the layer has experts."""
