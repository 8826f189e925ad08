"""Tiny models with random weights, on disk as Hugging Face writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

_FIELDS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SHORT_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_groups": "num_key_value_heads",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "dense_size": "intermediate_size",
    "norm_top_k": "norm_topk_prob",
    "tie_embeddings": "tie_word_embeddings",
}


def build_tiny_dense(path: Path, kind: str, *, std: float = 0.1, seed: int = 0, **config: Any) -> Path:
    """Write a random model in float32. A larger `std` makes choices between experts clearer.

    Args:
        path: The folder.
        kind: A `model_type`.
        std: Of the weights.
        seed: Of the weights.
        config: Fields of the model's config, also by the short names above.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {_SHORT_NAMES.get(name, name): value for name, value in config.items()}
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(_FIELDS | fields))).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.8, 1.2, generator=generator)
            else:
                parameter.normal_(std=std, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1, generator=generator)  # as large as differences between scores
    model.save_pretrained(path)
    return path


def build_tiny_qwen3_moe(path: Path, *, dense_layers: tuple[int, ...] = (), **config: Any) -> Path:
    """Write a random Qwen3-MoE; `config` as of `build_tiny_dense`, here and below."""
    sizes = {"num_layers": 3, "head_dim": 16, "num_experts": 8, "top_k": 2, "expert_size": 32}
    kinds = {"norm_top_k": True, "decoder_sparse_step": 1, "mlp_only_layers": list(dense_layers)}
    return build_tiny_dense(path, "qwen3_moe", **(sizes | kinds | config))


def build_tiny_qwen3(path: Path, **config: Any) -> Path:
    """Write a random dense Qwen3, which is tied."""
    return build_tiny_dense(path, "qwen3", **({"head_dim": 16, "tie_embeddings": True} | config))


def build_tiny_mixtral(path: Path, **config: Any) -> Path:
    """Write a random Mixtral: experts in every layer, gates of the chosen ones normalised."""
    return build_tiny_dense(
        path, "mixtral", **({"num_local_experts": 8, "top_k": 2, "intermediate_size": 48} | config)
    )


def build_tiny_qwen2_moe(
    path: Path, *, hidden_size: int = 32, dense_layers: tuple[int, ...] = (), **config: Any
) -> Path:
    """Write a random Qwen2-MoE: gated shared expert, attention biases, gates not normalised."""
    sizes = {"hidden_size": hidden_size, "dense_size": 2 * hidden_size, "num_layers": 3, "num_experts": 8}
    sizes |= {"top_k": 2, "expert_size": 32, "shared_expert_intermediate_size": 48}
    kinds = {"norm_top_k": False, "decoder_sparse_step": 1, "mlp_only_layers": list(dense_layers)}
    return build_tiny_dense(path, "qwen2_moe", **(sizes | kinds | config))


def build_tiny_deepseek_v3(
    path: Path,
    *,
    hidden_size: int = 32,
    dense_layers: int = 1,
    num_experts: int = 16,
    num_groups: int = 4,
    top_groups: int = 2,
    max_position_embeddings: int = 512,
    **config: Any,
) -> Path:
    """Write a random DeepSeek-V3.

    Dense first layers, a shared expert, sigmoid scores with a bias that only selects, experts in groups, and
    latent attention with head sizes that all differ, so that a mix-up of sizes fails.
    """
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "dense_size": 2 * hidden_size,
        "num_layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": dense_layers,
        "n_routed_experts": num_experts,
        "top_k": 4,
        "n_group": num_groups,
        "topk_group": top_groups,
        "n_shared_experts": 1,
        "expert_size": 32,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": max_position_embeddings,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": max_position_embeddings // 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
    build_tiny_dense(path, "deepseek_v3", **(fields | config))
    # The published DeepSeek-V3 config has these; transformers ignores them, and SGLang reads them.
    amend_config(path, moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid")
    return path


def build_tiny_kimi_k2(path: Path, **config: Any) -> Path:
    """Write a random Kimi-K2: a DeepSeek-V3 without groups, and a config.json as published.

    Published are the older form of rotary settings, a YaRN ramp without width, and a class in the folder's
    own code, which is not there.
    """
    build_tiny_deepseek_v3(path, num_groups=1, top_groups=1, routed_scaling_factor=2.827, **config)
    fields = json.loads((path / "config.json").read_text())
    yarn = fields.pop("rope_parameters") | {"beta_fast": 1.0, "beta_slow": 1.0, "type": "yarn"}
    del yarn["rope_type"]
    fields["rope_theta"] = yarn.pop("rope_theta") * 5
    (path / "config.json").write_text(json.dumps(fields))
    amend_config(
        path,
        model_type="kimi_k2",
        rope_scaling=yarn,
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    )
    return path


def build_tiny_glm4_moe(path: Path, *, dense_layers: int = 1, **config: Any) -> Path:
    """Write a random GLM-4.5.

    Dense first layers, a shared expert, sigmoid scores with a bias that only selects, biases in attention,
    norms of queries and keys, and a rotation of half of each head.
    """
    fields: dict[str, Any] = {
        "num_layers": 3,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": dense_layers,
        "n_routed_experts": 8,
        "top_k": 3,
        "n_shared_experts": 1,
        "expert_size": 32,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    }
    return build_tiny_dense(path, "glm4_moe", **(fields | config))


def amend_config(path: Path, **fields: Any) -> None:
    """Set fields of a model folder's config.json."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields, indent=2))


def write_byte_tokenizer(path: Path, *, vocab_size: int) -> None:
    """Write a tokenizer of all bytes, two special tokens (0 and 1) and fillers, without an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<filler-{number}>" for number in range(vocab_size - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>").save_pretrained(
        path
    )
