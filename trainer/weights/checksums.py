"""Sums over the weights as an engine makes them, where the trainer can: SGLang on a CPU, without tensor
parallelism.

SGLang sums the bytes of each parameter and has several of Hugging Face's tensors in one. With one rank these
lie one after the other, so that the sum goes on from tensor to tensor. Where a model is laid out otherwise
the sum is another one: `async_rl.weights.checksums` finds out at the start which are comparable.

Source: sglang/srt/utils/weight_checker.py, `tensor_hash` of managers/mm_utils.py (0.5.23); its models'
`stacked_params_mapping`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final

import torch

_FUSED: Final = (
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)

_OF_VOCABULARY: Final = ("embed_tokens.weight", "lm_head.weight")

_VOCABULARY_MULTIPLE: Final = 64
"""An engine fills these up with rows of zeros; `DEFAULT_VOCAB_PADDING_SIZE` of SGLang."""


def checksum_parameters(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """The first 8 bytes of SHA-256 over each parameter of an engine, as hexadecimal digits.

    Args:
        tensors: Under their Hugging Face names, those of one parameter in the engine's order.
    """
    hashes = {}
    for name, tensor in tensors:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        found = hashes.setdefault(_parameter(name), hashlib.sha256())
        found.update(memoryview(data))
        if name.endswith(_OF_VOCABULARY):
            found.update(bytes(-len(tensor) % _VOCABULARY_MULTIPLE * tensor[0].nbytes))
    return {name: found.hexdigest()[:16] for name, found in hashes.items()}


def _parameter(name: str) -> str:
    """The engine's parameter that a tensor becomes, or becomes a part of."""
    for pattern, fused in _FUSED:
        if pattern.search(name):
            return pattern.sub(fused, name)
    return name
