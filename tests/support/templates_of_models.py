"""Chat formats of model families: their templates' structure and special tokens on a small tokenizer."""

from functools import cache
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from async_rl.data.chat_format import ChatFormat

_HERE: Final = Path(__file__).parent
_CALCULATOR: Final = _HERE.parents[1] / "examples" / "calculator" / "chat_template.jinja"
_CHATML: Final = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_LLAMA: Final = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
)
_TAGS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of their own in Qwen3, but not special: they stay when text is decoded."""

_MERGES: Final = [("Ċ", "Ċ"), ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "Ġ"), ("4", "2")]
"""Some, so that a text can be tokenised in more than one way."""

_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Into words, as the tokenizers of Llama 3 and Qwen do (that of GPT-4, tiktoken's cl100k_base)."""

TEMPLATES: Final = ("qwen3", "qwen2_5", "llama3_1", "ours")
APPEND_ONLY: Final = ("qwen2_5", "ours")
"""These never rewrite an earlier turn."""


@cache
def chat_of(name: str) -> ChatFormat:
    """The chat format of a family; `ours` is the calculator example's."""
    path = _CALCULATOR if name == "ours" else _HERE / "templates" / f"{name}.jinja"
    special, end = (_LLAMA, "<|eot_id|>") if name == "llama3_1" else (_CHATML, "<|im_end|>")
    return ChatFormat(_tokenizer(special, end, path.read_text(encoding="utf-8")))


def _tokenizer(special: tuple[str, ...], end: str, template: str) -> PreTrainedTokenizerFast:
    """Bytes, a few merges, and the family's special tokens."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, _MERGES)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES))
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in _TAGS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=end)
    fast.chat_template = template
    return fast
