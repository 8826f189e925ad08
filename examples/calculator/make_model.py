"""Build the quickstart's model: a tiny Qwen3-MoE with random weights, and its tokenizer.

    python examples/calculator/make_model.py models/calculator-base

Weights are drawn with NumPy and written under Qwen3-MoE's names, so that torch is not needed and one seed
gives one model on every machine.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from problems import TOOLS, answer_with_tool, direct_answer, draw_expressions, question
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"]
"""Single tokens like the special ones, but part of the text."""
VOCAB_SIZE = 512
MAX_TOKENS = 1024

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "float32",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "router_aux_loss_coef": 0.0,
    "output_router_logits": False,
    "initializer_range": 0.05,
    "use_cache": True,
}


def build_tokenizer(template: str, seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on conversations of the task: words are tokens, each digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[^\s\d]+|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _corpus(template, seed),
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE - len(SPECIAL) - len(TAGS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    # The corpus has fewer words than the vocabulary has entries; reserved tokens fill the rest.
    num_reserved = VOCAB_SIZE - tokenizer.get_vocab_size() - len(SPECIAL)
    special = SPECIAL + [f"<|reserved_{index}|>" for index in range(num_reserved)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


def _corpus(template: str, seed: int) -> Iterator[str]:
    """Return the tokenizer's training text: conversations of the task, without the tags."""
    tags = re.compile("|".join(map(re.escape, SPECIAL + TAGS)))
    renderer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    for expression in draw_expressions(200, np.random.default_rng(seed)):
        for rest in (direct_answer(expression), answer_with_tool(expression)):
            messages = question(expression) + rest
            text = renderer.apply_chat_template(messages, tools=TOOLS, chat_template=template, tokenize=False)
            yield from tags.split(text)


def build_weights(seed: int) -> dict[str, np.ndarray]:
    """Return random float32 weights under Qwen3-MoE's names; norms are ones."""
    rng = np.random.default_rng(seed)
    hidden, head = CONFIG["hidden_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    expert = CONFIG["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "self_attn.q_norm.weight": (head,),
            prefix + "self_attn.k_norm.weight": (head,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate.weight": (CONFIG["num_experts"], hidden),
        }
        for index in range(CONFIG["num_experts"]):
            shapes |= {
                f"{prefix}mlp.experts.{index}.gate_proj.weight": (expert, hidden),
                f"{prefix}mlp.experts.{index}.up_proj.weight": (expert, hidden),
                f"{prefix}mlp.experts.{index}.down_proj.weight": (hidden, expert),
            }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (VOCAB_SIZE, hidden)}
    scale = np.float32(CONFIG["initializer_range"])
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.standard_normal(shape, dtype=np.float32) * scale
        for name, shape in shapes.items()
    }


def make_model(folder: Path, seed: int = 0) -> None:
    """Write config, weights and tokenizer into a folder, replacing its content."""
    folder.mkdir(parents=True, exist_ok=True)
    template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    tokenizer = build_tokenizer(template, seed)
    assert len(tokenizer) == VOCAB_SIZE
    tokenizer.save_pretrained(folder)
    stops = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    _write_json(folder / "config.json", CONFIG | stops)
    _write_json(folder / "generation_config.json", stops)
    save_file(build_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the command line and build the model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the model goes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--half", action="store_true", help="half as many experts, of half the size")
    arguments = parser.parse_args()
    if arguments.half:
        CONFIG.update(num_experts=4, moe_intermediate_size=32)
    make_model(arguments.folder, arguments.seed)
    num_parameters = sum(weight.size for weight in build_weights(arguments.seed).values())
    print(f"{arguments.folder}: Qwen3-MoE with {num_parameters:,} parameters, {VOCAB_SIZE} tokens")


if __name__ == "__main__":
    main()
