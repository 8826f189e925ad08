"""Chat formats of model families: their templates' structure and special tokens on a small tokenizer."""

from functools import cache
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
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


_PROMPT: Final = "{% if add_generation_prompt %}{{ ASSISTANT }}{% endif %}"
_LIKE: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...], str, str]]] = {
    # Name: special tokens, other added tokens, the end of a turn, template.
    "roles_in_tokens": (  # Phi-3: the role makes the token
        ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"),
        (),
        "<|end|>",
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
        + _PROMPT.replace("ASSISTANT", "'<|assistant|>'"),
    ),
    "undeclared": (  # DeepSeek: the tokens of roles are not special
        ("<｜end▁of▁sentence｜>",),
        ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁output▁begin｜>", "<think>", "</think>"),
        "<｜end▁of▁sentence｜>",
        "{% for m in messages %}"
        "{% if m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}"
        "{% elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content }}"
        "{% else %}{{ '<｜User｜>' + m.content }}{% endif %}{% endfor %}"
        + _PROMPT.replace("ASSISTANT", "'<｜Assistant｜>'"),
    ),
    "brackets": (  # Mistral
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        (),
        "</s>",
        "{% for m in messages %}"
        "{% if m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}"
        "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content | tojson + '[/TOOL_RESULTS]' }}"
        "{% else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}{% endfor %}",
    ),
    "ended_by_next": (  # GLM-4.5: no token ends a turn; calls are written argument by argument
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        "<|endoftext|>",
        "{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}<|assistant|>{{ '\n' + (m.content or '') }}"
        "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name }}"
        "{% for key, value in call.function.arguments.items() %}"
        "{{ '\n<arg_key>' + key + '</arg_key>\n<arg_value>' + value | string + '</arg_value>' }}"
        "{% endfor %}{{ '\n</tool_call>' }}{% endfor %}"
        "{% elif m.role == 'tool' %}{{ '<|observation|>' if messages[loop.index0 - 1].role != 'tool' }}"
        "{{ '\n<tool_response>' + m.content + '</tool_response>' }}"
        "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}"
        + _PROMPT.replace("ASSISTANT", "'<|assistant|>'"),
    ),
    "calls_in_text": (  # DeepSeek-V3: arguments are concatenated as text, and tools are never shown
        ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁output▁begin｜>"),
        "<｜end▁of▁sentence｜>",
        "{% for m in messages %}"
        "{% if m.role == 'assistant' and m.content is none %}{{ '<｜Assistant｜>' }}"
        "{% for call in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' "
        "+ call.function.name + '\n```json\n' + call.function.arguments + '\n```<｜tool▁call▁end｜>' }}"
        "{% endfor %}{{ '<｜end▁of▁sentence｜>' }}"
        "{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}"
        "{% elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content }}"
        "{% else %}{{ '<｜User｜>' + m.content }}{% endif %}{% endfor %}"
        + _PROMPT.replace("ASSISTANT", "'<｜Assistant｜>'"),
    ),
    "in_parts": (  # some templates of models that see images
        ("<|im_start|>", "<|im_end|>"),
        (),
        "<|im_end|>",
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
        + _PROMPT.replace("ASSISTANT", "'<|im_start|>assistant\n'"),
    ),
    "normalised": (  # compatibility characters become those of the control tokens
        ("<|im_start|>", "<|im_end|>"),
        ("<tool_response>", "</tool_response>", "<|note|>"),
        "<|im_end|>",
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'tool' %}{{ '<tool_response>' + m.content + '</tool_response>' }}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        + _PROMPT.replace("ASSISTANT", "'<|im_start|>assistant\n'"),
    ),
}
LIKE_OTHERS: Final = tuple(name for name in _LIKE if name != "in_parts")
"""Formats in the way of further families, with what is special about their control tokens."""


@cache
def chat_of(name: str, trusted_roles: tuple[str, ...] = ()) -> ChatFormat:
    """The chat format of a family; `ours` is the calculator example's."""
    if name in _LIKE:
        special, tags, end, template = _LIKE[name]
        normalizer = normalizers.NFKC() if name == "normalised" else None
        tokenizer = _tokenizer(special, end, template, tags=tags, normalizer=normalizer)
        return ChatFormat(tokenizer, trusted_roles=trusted_roles)
    path = _CALCULATOR if name == "ours" else _HERE / "templates" / f"{name}.jinja"
    special, end = (_LLAMA, "<|eot_id|>") if name == "llama3_1" else (_CHATML, "<|im_end|>")
    tokenizer = _tokenizer(special, end, path.read_text(encoding="utf-8"))
    return ChatFormat(tokenizer, trusted_roles=trusted_roles)


def _tokenizer(
    special: tuple[str, ...],
    end: str,
    template: str,
    *,
    tags: tuple[str, ...] = _TAGS,
    normalizer: Any = None,
) -> PreTrainedTokenizerFast:
    """Bytes, a few merges, and the family's special tokens."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, _MERGES)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES))
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in tags])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=end)
    fast.chat_template = template
    return fast
