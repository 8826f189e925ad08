"""Copies of gradients, and their inner products over all ranks.

A rank copies the gradients that it counts for the gradient norm: of the ranges that its optimizers update,
without replicas of tensor-parallel ranks and without the second copy of tied embeddings. All ranks together
have every parameter once, in any layout, so that products of their copies add up to those of whole gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer

from async_rl.types import Float64Array
from trainer.megatron.model import MegatronModel


class GradientPart(NamedTuple):
    """This rank's part of a gradient, in host memory: what one of its optimizers updates."""

    tensors: list[torch.Tensor]
    group: dist.ProcessGroup | None
    """The ranks that hold the other parts; None: all."""


def copy_gradients(model: MegatronModel, factor: float) -> list[GradientPart]:
    """Copy this rank's part of the gradients of the last schedule, times a factor; collective."""
    model.optimizer.prepare_grads()
    optimizer = model.optimizer
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [
        GradientPart(
            [
                (gradient * factor).to("cpu", torch.float32)
                for gradient in each.get_main_grads_for_grad_norm()
            ],
            each.get_grad_stats_parallel_group(),
        )
        for each in chained
    ]


def inner_products(
    left: Sequence[list[GradientPart]], right: Sequence[list[GradientPart]], device: torch.device
) -> Float64Array:
    """Return the inner products of gradients, `[len(left), len(right)]`, the same on every rank; collective.

    Args:
        left: Gradients, as `copy_gradients` returns them.
        right: More of the same model.
        device: Where ranks exchange sums.
    """
    total = np.zeros((len(left), len(right)))
    for number, (_, group) in enumerate(left[0]):
        own = [
            [
                sum(_product(a, b) for a, b in zip(one[number].tensors, other[number].tensors, strict=True))
                for other in right
            ]
            for one in left
        ]
        sums = torch.tensor(own, dtype=torch.float64, device=device)
        dist.all_reduce(sums, group=group)
        total += sums.cpu().numpy()
    return total


def _product(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a * b).sum(dtype=torch.float64))
