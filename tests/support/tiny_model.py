"""Tiny models of Qwen3's architecture with random weights, on disk as Hugging Face writes them."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.megatron.cpu import declare_torchvision_ops


def build_tiny_qwen3_moe(
    path: Path,
    *,
    vocab_size: int = 96,
    hidden_size: int = 32,
    num_layers: int = 3,
    num_heads: int = 4,
    num_groups: int = 2,
    head_dim: int = 16,
    num_experts: int = 8,
    top_k: int = 2,
    expert_size: int = 32,
    dense_size: int = 64,
    dense_layers: tuple[int, ...] = (),
    tie_embeddings: bool = False,
    max_position_embeddings: int = 512,
    std: float = 0.1,
    seed: int = 0,
) -> Path:
    """Write a random Qwen3-MoE in float32. A larger `std` makes choices between experts clearer."""
    declare_torchvision_ops()
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=dense_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_groups,
        head_dim=head_dim,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=expert_size,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=list(dense_layers),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_embeddings,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return _save(Qwen3MoeForCausalLM, config, path, std, seed)


def build_tiny_qwen3(
    path: Path, *, vocab_size: int = 96, num_layers: int = 2, std: float = 0.1, seed: int = 0
) -> Path:
    """Write a random dense Qwen3 in float32."""
    declare_torchvision_ops()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return _save(Qwen3ForCausalLM, config, path, std, seed)


def write_byte_tokenizer(path: Path, *, vocab_size: int) -> None:
    """Write a tokenizer of all bytes, two special tokens (0 and 1) and fillers; none of them ends a text."""
    declare_torchvision_ops()
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


def _save(model_class, config, path: Path, std: float, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.8, 1.2, generator=generator)
            else:
                parameter.normal_(std=std, generator=generator)
    model.save_pretrained(path)
    return path
