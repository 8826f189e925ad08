"""Checksums over the weights as an engine computes them, for SGLang on a CPU without tensor parallelism.

SGLang hashes the bytes of each parameter, which may fuse several Hugging Face tensors. On one rank these are
concatenated, so that the hash continues from tensor to tensor. Other layouts lead to other checksums:
`async_rl.weights.checksums` determines at the start which parameters are comparable.

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
"""Engines pad the vocabulary with zeros to a multiple of this: SGLang's `DEFAULT_VOCAB_PADDING_SIZE`."""


def checksum_parameters(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the first 8 bytes of SHA-256 over each parameter of an engine, as hexadecimal digits.

    Args:
        tensors: Tensors under their Hugging Face names; tensors of one parameter come in the engine's order.
    """
    hashes = {}
    for name, tensor in tensors:
        # A copy, because torch cannot resize storages that NumPy has seen, as `offload` does on a CPU.
        copied = tensor.detach().to("cpu", copy=True).contiguous()
        data = copied.reshape(-1).view(torch.uint8).numpy()
        found = hashes.setdefault(_parameter(name), hashlib.sha256())
        found.update(memoryview(data))
        if name.endswith(_OF_VOCABULARY):
            found.update(bytes(-len(tensor) % _VOCABULARY_MULTIPLE * tensor[0].nbytes))
    return {name: found.hexdigest()[:16] for name, found in hashes.items()}


def sum_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return a sum over the bits of each tensor, computed on its device: it only tells which have changed.

    Args:
        tensors: Tensors under their Hugging Face names, which get a prefix: no engine computes these sums.
    """
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {
        f"bits of {name}": str(
            tensor.detach().contiguous().view(bits[tensor.itemsize]).sum(dtype=torch.int64).item()
        )
        for name, tensor in tensors
    }


def _parameter(name: str) -> str:
    """Return the name of the engine's parameter that contains a tensor."""
    for pattern, fused in _FUSED:
        if pattern.search(name):
            return pattern.sub(fused, name)
    return name
