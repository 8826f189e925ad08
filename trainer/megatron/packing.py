"""Turns a `TrainBatch` into micro-batches of packed trajectories. Pure.

Per-token arrays are first moved to the *predicting* position: the model's output at position i predicts token
i+1, so the mask, log-probs and targets of token i+1 move to i once, for the whole batch. Routing rows are not
moved: row i belongs to the forward pass of token i.

Trajectories are balanced over data-parallel ranks and micro-batches by their cost. Every token passes through
the weights once and attends to all tokens before it, so n tokens cost `n + n² / even`, in units of one
token's weights. At `even` tokens attention costs as much as everything else; for Qwen3-30B-A3B this is 17
thousand. If balanced by tokens alone, all ranks would wait for the rank with the longest answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from async_rl.types import BoolArray, Float32Array, Int32Array, Int64Array, TrainBatch
from trainer.memory.dimensions import Dimensions, weights_of_token

UNKNOWN_LAG: Final = -1
"""The lag of tokens whose weights are not known, `TokenSpan.lag_unknown`."""


MicroBatch = tuple[int, ...]
"""The trajectories packed together; empty where a rank only takes part in the exchanges of the others."""


@dataclasses.dataclass(frozen=True)
class Targets:
    """Per-token arrays of a whole batch at the predicting positions; 0 at the end of each trajectory."""

    labels: Int32Array  # [S] the token to predict
    mask: BoolArray  # [S] whether predicting it is trained on
    rollout_log_probs: Float32Array  # [S]
    lag: Int32Array  # [S] trainer version minus the version that sampled the token, or `UNKNOWN_LAG`
    trajectory: Int64Array  # [S] index of the trajectory

    @property
    def lengths(self) -> Int64Array:
        """Trained tokens of each trajectory, up to the last trajectory that has any, `[<= N]`."""
        return np.bincount(self.trajectory[self.mask])


@dataclasses.dataclass(frozen=True)
class Packing:
    """Maps the positions of a packed micro-batch to tokens of the batch."""

    source: Int64Array  # [t] index into the batch's tokens, -1 where padded
    lengths: tuple[int, ...]  # padded lengths, sum t


def split_updates(group_index: Int32Array, updates: int) -> list[list[int]]:
    """Split a batch into one part per update: whole groups, in parts with nearly equal numbers of groups.

    Args:
        group_index: `[N]`, equal for siblings.
        updates: The largest number of parts; there are fewer when there are fewer groups.

    Returns:
        Ascending indices of trajectories for each part; no part is empty.
    """
    groups = np.unique(group_index)
    parts = np.array_split(groups, min(updates, len(groups)))
    return [np.flatnonzero(np.isin(group_index, part)).tolist() for part in parts]


def plan_micro_batches(
    lengths: Sequence[int],
    budget: int,
    ranks: int,
    align: int = 1,
    multiple: int = 1,
    cost: Callable[[int], float] = float,
) -> list[list[MicroBatch]]:
    """Distributes trajectories over data-parallel ranks and splits each rank's share into micro-batches.

    Shares are balanced by cost (the most expensive trajectory first, to the rank with the lowest load), and
    so are the micro-batches of a share. A micro-batch holds at most `budget` tokens, padding included; a
    longer trajectory forms its own. All ranks get the same number of micro-batches, the most expensive first,
    because ranks exchange experts and gradients in lockstep; a rank with few trajectories gets empty ones.

    Args:
        lengths: Tokens of each trajectory.
        budget: Largest number of tokens of a micro-batch.
        ranks: Data-parallel ranks.
        align: Every trajectory is padded to a multiple of this.
        multiple: The number of micro-batches is a multiple of this.
        cost: The cost of a trajectory by its padded length; must not decrease.

    Returns:
        `[rank][micro-batch]`; every trajectory occurs once.
    """
    padded = [-(-n // align) * align for n in lengths]
    costs = [cost(n) for n in padded]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for j in sorted(range(len(costs)), key=lambda j: (-costs[j], j)):
        rank = loads.index(min(loads))
        shares[rank].append(j)
        loads[rank] += costs[j]
    tight = [_first_fit(share, padded, budget) for share in shares]
    count = -(-max((len(bins) for bins in tight), default=0) // multiple) * multiple
    plan = []
    for share, bins in zip(shares, tight, strict=True):
        even = _even_fit(share, padded, costs, budget, count)
        if even is None:
            even = bins + [[] for _ in range(count - len(bins))]
        even.sort(key=lambda members: -sum(costs[j] for j in members))
        plan.append([tuple(sorted(members)) for members in even])
    return plan


def _first_fit(share: list[int], padded: list[int], budget: int) -> list[list[int]]:
    """Return nearly the fewest bins: each trajectory, longest first, goes into the first bin with space."""
    bins: list[list[int]] = []
    free: list[int] = []
    for j in share:
        place = next((i for i, tokens_left in enumerate(free) if tokens_left >= padded[j]), None)
        if place is None:
            bins.append([j])
            free.append(budget - padded[j])
        else:
            bins[place].append(j)
            free[place] -= padded[j]
    return bins


def _even_fit(
    share: list[int], padded: list[int], costs: list[float], budget: int, count: int
) -> list[list[int]] | None:
    """Return `count` bins of similar cost: each trajectory goes into the cheapest bin with space.

    Returns None when a trajectory fits into no bin.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens, loads = [0] * count, [0.0] * count
    for j in share:
        candidates = [i for i in range(count) if not bins[i] or tokens[i] + padded[j] <= budget]
        if not candidates:
            return None
        place = min(candidates, key=loads.__getitem__)
        bins[place].append(j)
        tokens[place] += padded[j]
        loads[place] += costs[j]
    return bins


def pack_micro_batch(micro_batch: MicroBatch, offsets: Int64Array, align: int = 1) -> Packing:
    """Concatenates trajectories, each padded on the right to a multiple of `align`.

    In causal attention, padding on the right does not affect real tokens. An empty micro-batch becomes
    `align` tokens of padding, so that the rank takes part in every exchange.
    """
    if not micro_batch:
        return Packing(source=np.full(align, -1, np.int64), lengths=(align,))
    parts, lengths = [], []
    for j in micro_batch:
        start, end = int(offsets[j]), int(offsets[j + 1])
        padding = -(end - start) % align
        parts.append(np.arange(start, end, dtype=np.int64))
        parts.append(np.full(padding, -1, np.int64))
        lengths.append(end - start + padding)
    return Packing(source=np.concatenate(parts), lengths=tuple(lengths))


def level_packings(packings: Sequence[Packing]) -> list[Packing]:
    """Pad packings to the length of the longest, each by one additional sequence of padding.

    The padding keeps the alignment, because all packings are aligned.
    """
    longest = max((len(packing.source) for packing in packings), default=0)
    result = []
    for packing in packings:
        missing = longest - len(packing.source)
        if missing:
            filled = np.concatenate([packing.source, np.full(missing, -1, np.int64)])
            packing = Packing(source=filled, lengths=(*packing.lengths, missing))
        result.append(packing)
    return result


def make_targets(batch: TrainBatch) -> Targets:
    """Return a batch's per-token arrays at the predicting positions."""
    ends = batch.offsets[1:][np.diff(batch.offsets) > 0] - 1
    trajectory = np.repeat(np.arange(batch.num_trajectories), np.diff(batch.offsets))
    lag = batch.trainer_version - batch.weight_versions
    if batch.lag_unknown is not None:
        lag[batch.lag_unknown] = UNKNOWN_LAG
    return Targets(
        labels=shift_left(batch.token_ids, ends),
        mask=shift_left(batch.loss_mask, ends),
        rollout_log_probs=shift_left(batch.rollout_log_probs, ends),
        lag=shift_left(lag, ends),
        trajectory=trajectory,
    )


def shift_left(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Move the value of token i+1 to i; the last token of each trajectory (at `ends`) gets 0."""
    moved = np.empty_like(values)
    moved[:-1] = values[1:]
    moved[ends] = 0
    return moved


@dataclasses.dataclass(frozen=True)
class SequenceCost:
    """The cost of a sequence, in units of one token's pass through the weights.

    Example:
        >>> SequenceCost(even=1000.0)(500)
        750.0
    """

    even: float
    """Length in tokens at which attention costs as much as the weights."""

    def __call__(self, tokens: int) -> float:
        """Return the cost of a sequence of this length; it grows more than linearly."""
        return tokens * (1 + tokens / self.even)


def sequence_cost(model: Dimensions) -> SequenceCost:
    """Return the cost function of a model.

    Source: two operations per weight and token (arXiv 2001.08361, section 2.1); causal attention of n queries
    takes n² · heads · (size of keys + size of values) per layer, half of the full product.
    """
    keys, values = model.head, model.head
    if model.latent is not None:
        keys, values = model.latent.plain + model.latent.rotated, model.latent.value
    return SequenceCost(
        even=2 * weights_of_token(model) / (len(model.has_experts) * model.heads * (keys + values))
    )
