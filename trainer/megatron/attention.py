"""Causal attention over packed trajectories in plain torch, for the layer spec without TransformerEngine.

Megatron's local attention rejects packed sequences and context parallelism. This module supports both and is
cheap for many short trajectories: it pads them into a few rectangles of similar length and calls the fused
kernel once for each. Padding on the right of a causal rectangle is never attended to.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


@dataclasses.dataclass
class Rectangle:
    """Sequences of similar length, padded to the longest of them."""

    take: torch.Tensor  # [rows * width] int64, packed position of each cell; padding repeats a real token
    rows: int
    width: int
    cells: torch.Tensor  # [tokens] int64, the cells that are not padding, in order


@dataclasses.dataclass
class PackedTrajectories(PackedSeqParams):
    """The bounds of the trajectories in a packed micro-batch, in Megatron's format `thd`.

    Lengths are those of whole trajectories, padding included, before context parallelism splits them.
    """

    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> PackedTrajectories:
        """Describe trajectories of the given lengths, packed in order."""
        ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        longest = max(lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=lengths,
        )

    @functools.cached_property
    def rectangles(self) -> tuple[tuple[Rectangle, ...], torch.Tensor]:
        """The rectangles, and for each packed token its index among their tokens, `[t] int64`."""
        return _rectangles(self.lengths, self.cu_seqlens_q.device)


class PackedAttention(torch.nn.Module):
    """Implements `core_attention` of Megatron's local layer spec for packed trajectories."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.context_group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedTrajectories | None = None,
    ) -> torch.Tensor:
        """Compute attention within each trajectory.

        Args:
            query: `[t, heads, d]`.
            key: `[t, groups, d]`.
            value: `[t, groups, v]`; `v` differs from `d` in latent attention.
            attention_mask: None; the packing determines which tokens attend to each other.
            attn_mask_type: Always causal.
            attention_bias: None.
            packed_seq_params: The bounds of the trajectories.

        Returns:
            `[t, heads * v]`.
        """
        assert packed_seq_params is not None, "this trainer always packs"
        if self.context_group.size() > 1:
            return self._over_context_ranks(query, key, value, packed_seq_params.lengths)
        rectangles, order = packed_seq_params.rectangles
        parts = [self._rectangle(query, key, value, rectangle) for rectangle in rectangles]
        return torch.cat(parts).index_select(0, order)

    def _rectangle(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, r: Rectangle
    ) -> torch.Tensor:
        """Compute attention in one rectangle; return `[tokens, heads * v]` in the order of `r.cells`."""
        repeat = query.shape[1] // key.shape[1]

        def cut(x: torch.Tensor, times: int) -> torch.Tensor:
            x = x.index_select(0, r.take).view(r.rows, r.width, *x.shape[1:]).transpose(1, 2)
            return x.repeat_interleave(times, 1) if times > 1 else x

        out = F.scaled_dot_product_attention(
            cut(query, 1), cut(key, repeat), cut(value, repeat), is_causal=True, scale=self.scale
        )
        return out.transpose(1, 2).reshape(r.rows * r.width, -1).index_select(0, r.cells)

    def _over_context_ranks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...]
    ) -> torch.Tensor:
        """Gathers keys and values of all context ranks and masks by position: for tests, not long inputs."""
        size, rank = self.context_group.size(), self.context_group.rank()
        key, value = (
            gather_from_sequence_parallel_region(x.contiguous(), group=self.context_group)
            for x in (key, value)
        )
        positions = [zigzag(lengths, size, r, query.device) for r in range(size)]
        sequence = torch.repeat_interleave(
            torch.arange(len(lengths), device=query.device), torch.tensor(lengths, device=query.device)
        )
        mine, all_ = positions[rank], torch.cat(positions)
        mask = (all_[None] <= mine[:, None]) & (sequence[all_][None] == sequence[mine][:, None])
        repeat = query.shape[1] // key.shape[1]
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None].repeat_interleave(repeat, 1),
            value.transpose(0, 1)[None].repeat_interleave(repeat, 1),
            attn_mask=mask,
            scale=self.scale,
        )
        return out[0].transpose(0, 1).reshape(query.shape[0], -1)


def zigzag(lengths: tuple[int, ...], size: int, rank: int, device: torch.device) -> torch.Tensor:
    """Return the packed positions of a context rank: chunks `rank` and `2*size-1-rank` of each trajectory.

    Every length must be a multiple of `2 * size`. The order is Megatron's (`get_batch_on_this_cp_rank`),
    which balances the work of causal attention.
    """
    parts, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length, device=device).chunk(2 * size)
        parts += [chunks[rank], chunks[2 * size - 1 - rank]]
        start += length
    return torch.cat(parts)


def _rectangles(lengths: tuple[int, ...], device: torch.device) -> tuple[tuple[Rectangle, ...], torch.Tensor]:
    """Groups sequences so that none is padded to more than 1.5 times its length."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in by_length:
        if groups and lengths[i] * 1.5 >= lengths[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    rectangles, positions = [], []
    for members in groups:
        width = lengths[members[0]]
        column = torch.arange(width)
        first = torch.tensor([starts[i] for i in members])[:, None]
        length = torch.tensor([lengths[i] for i in members])[:, None]
        real = (column < length).flatten()
        take = (first + torch.minimum(column, length - 1)).flatten()
        rectangles.append(
            Rectangle(
                take=take.to(device),
                rows=len(members),
                width=width,
                cells=real.nonzero()[:, 0].to(device),
            )
        )
        positions.append(take[real])
    return tuple(rectangles), torch.cat(positions).argsort().to(device)
