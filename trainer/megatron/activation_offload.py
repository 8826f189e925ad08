"""Keeps the inputs of layers that are computed again on the host, from their forward to their backward pass.

With `trainer.recompute: full`, a layer keeps its input alone. Copies are in the order of the stream that
computes: the device's memory is free for the layer after the next one, and a copy back comes before the layer
is computed again. Megatron-Core 0.16.1 has two ways of its own, which do not fit: one excludes recomputation
and pipelines, the other expects micro-batches of one size and number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class LayerInputsOnHost:
    """Moves the hidden states that autograd saves in a forward pass."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        """Move nothing yet.

        Args:
            hidden_size: Size of a hidden state, by which they are known.
            device: Where the model is.
        """
        self._hidden_size, self._device = hidden_size, device

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Move what is saved in the block."""
        with torch.autograd.graph.saved_tensors_hooks(self._keep, self._bring_back):
            yield

    def _keep(self, saved: torch.Tensor) -> torch.Tensor:
        # `[tokens, 1, H]`; weights and rotary embeddings have other shapes.
        if saved.ndim != 3 or saved.shape[-1] != self._hidden_size:
            return saved
        return copy_to_host(saved)

    def _bring_back(self, kept: torch.Tensor) -> torch.Tensor:
        return kept.to(self._device, non_blocking=True)


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, pinned beside a GPU, which later work of the same stream may read."""
    pinned = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    return host.copy_(tensor, non_blocking=True)
