"""Log-probs and entropies of tokens from their hidden states, without materialising all of their logits.

The output layer and the softmax run over a part of the rows at a time, and a row keeps a few numbers for the
backward pass, which computes its logits again. Memory beyond the hidden states is therefore that of one part,
and of the weight's gradient in float32. The logits take a third more matrix products, but fewer passes over
the vocabulary.

With `x` the tempered logits of a row, `m` the largest, `y = x - m` and `Z = sum(e^y)`:

- `log p = y - log Z` at the label, and the entropy is `H = log Z - sum(e^y y) / Z`.
- Every derivative by `x` has the form `e^y (a y + b)`, with `a` and `b` of the row; at the label the log-prob
  adds 1.

Where sampling was truncated, only the kept tokens of a row have logits: those of the others count as minus
infinity, so that log-probs, entropies and gradients are those of the renormalised distribution.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from async_rl.types import Int64Array, SamplingMask

LOGITS_AT_ONCE = 1 << 27
"""The logits of one part: 883 rows of a vocabulary of 152 thousand, 256 MiB in bfloat16."""


_EXCLUDED = -1e30
"""The logit of tokens that were not kept. It is finite, so that its product with a probability of 0 is 0."""


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that truncated sampling kept in each of n rows, on the device; none: it kept all of them."""

    ends: Int64Array  # [n] where the ids of each row end, on the host: slices need no synchronisation
    rows: torch.Tensor  # [m] int64, ascending
    token_ids: torch.Tensor  # [m] int64, global
    untruncated: torch.Tensor  # [n] bool, rows that kept all tokens

    @classmethod
    def of(cls, mask: SamplingMask, device: torch.device) -> KeptTokens:
        """Return a sampling mask on a device."""
        return cls(
            ends=np.cumsum(mask.counts, dtype=np.int64),
            rows=torch.from_numpy(mask.rows).to(device),
            token_ids=torch.from_numpy(mask.token_ids.astype(np.int64)).to(device),
            untruncated=torch.from_numpy(mask.counts == 0).to(device),
        )

    def exclude(self, logits: torch.Tensor, start: int, first: int) -> None:
        """Overwrite the logits of tokens that were not kept.

        Args:
            logits: `[part, V / ranks]`, of the rows from `start` on.
            start: The first row.
            first: The first token of this rank's part of the vocabulary.
        """
        stop, size = start + len(logits), logits.shape[1]
        begin, end = (int(self.ends[row - 1]) if row else 0 for row in (start, stop))
        local = self.token_ids[begin:end] - first
        # One more column takes the tokens of other ranks' parts.
        local = torch.where((local >= 0) & (local < size), local, size)
        kept = torch.zeros(len(logits), size + 1, dtype=torch.bool, device=logits.device)
        kept[self.rows[begin:end] - start, local] = True
        kept |= self.untruncated[start:stop, None]
        logits.masked_fill_(~kept[:, :size], max(_EXCLUDED, torch.finfo(logits.dtype).min))


def vocab_parallel_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    kept: KeptTokens | None = None,
    vocabulary: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of each label and the entropy of each distribution, in float32.

    Args:
        hidden: `[n, H]`, the inputs of the output layer. With a group, their gradient is that of this rank's
            part of the vocabulary; the caller sums it over the group.
        weight: `[V / ranks, H]`, this rank's part of the output layer.
        labels: `[n]` int64, global token ids.
        temperature: The sampling temperature; log-probs are those of the distribution that was sampled from.
        group: The ranks that share the vocabulary, in its order; None for a single rank.
        kept: The tokens that could be sampled in each row, each label among them; None: all could.
        vocabulary: The number of tokens; rows of the output layer beyond it are padding. Every rank has a
            part of them. None: there is no padding.

    Returns:
        Log-probs and entropies (nats), `[n]` each, both with gradient.

    Source: the exchange of maxima and sums is that of Megatron-Core, `tensor_parallel/cross_entropy.py`;
    recomputing logits in parts is that of arXiv 2411.09009 (Cut Cross-Entropy).
    """
    return _VocabParallelLogProbs.apply(hidden, weight, labels, temperature, group, kept, vocabulary)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, padded_weight, labels, temperature, group, kept, vocabulary):
        first = len(padded_weight) * (dist.get_rank(group) if _parallel(group) else 0)
        weight = padded_weight if vocabulary is None else padded_weight[: vocabulary - first]
        local = labels - first
        ours = (local >= 0) & (local < len(weight))
        index = local.clamp(0, len(weight) - 1)[:, None]
        own_largest, normaliser, weighted, predicted = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        for rows in _parts(hidden, weight):
            logits = hidden[rows] @ weight.t()
            if kept is not None:
                kept.exclude(logits, rows.start, first)
            predicted[rows] = logits.gather(-1, index[rows])[:, 0]
            own_largest[rows], normaliser[rows], weighted[rows] = _fused(_row_sums, logits, temperature)
            del logits  # before the next part's
        largest = own_largest.clone()
        _reduce(largest, dist.ReduceOp.MAX, group)
        # Sums relative to the largest logit of this rank become relative to that of all ranks.
        moved = own_largest - largest
        sums = torch.stack([normaliser, weighted + moved * normaliser, predicted / temperature - largest])
        sums *= torch.stack([moved.exp(), moved.exp(), ours.float()])
        _reduce(sums, dist.ReduceOp.SUM, group)
        normaliser, weighted, predicted = sums
        log_probs = predicted - normaliser.log()
        entropy = normaliser.log() - weighted / normaliser
        ctx.save_for_backward(hidden, padded_weight, index, ours, largest, normaliser, log_probs, entropy)
        ctx.temperature, ctx.kept, ctx.first, ctx.tokens = temperature, kept, first, len(weight)
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, of_log_prob, of_entropy):
        hidden, padded_weight, index, ours, largest, normaliser, log_probs, entropy = ctx.saved_tensors
        weight = padded_weight[: ctx.tokens]
        of_log_prob = torch.zeros_like(log_probs) if of_log_prob is None else of_log_prob / ctx.temperature
        factor, offset = None, -of_log_prob / normaliser
        at_label = of_log_prob * -log_probs.expm1()
        if of_entropy is not None:
            # dH/dx = -p (log p + H)
            of_entropy = of_entropy / ctx.temperature
            factor = -of_entropy / normaliser
            offset += factor * (entropy - normaliser.log())
            at_label -= of_entropy * log_probs.exp() * (log_probs + entropy)
        of_hidden, of_weight = torch.empty_like(hidden), None
        parts = list(_parts(hidden, weight))
        if ctx.needs_input_grad[1]:
            # Parts are added in float32, and rounded once.
            wide = torch.float32 if len(parts) > 1 else weight.dtype
            of_weight = torch.zeros_like(padded_weight, dtype=wide)
        for rows in parts:
            logits = hidden[rows] @ weight.t()
            if ctx.kept is not None:
                ctx.kept.exclude(logits, rows.start, ctx.first)
            gradient = _fused(
                _logit_gradients,
                logits,
                ctx.temperature,
                largest[rows],
                None if factor is None else factor[rows],
                offset[rows],
            )
            known = gradient.gather(-1, index[rows])
            value = torch.where(ours[rows, None], at_label[rows, None].to(known.dtype), known)
            gradient.scatter_(-1, index[rows], value)
            torch.mm(gradient, weight, out=of_hidden[rows])
            if of_weight is not None:
                _add_product(of_weight[: ctx.tokens], gradient.t(), hidden[rows])
            del gradient, logits  # before the next part's
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return of_hidden, of_weight, None, None, None, None, None


def _parts(hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[slice]:
    """Yield parts of the rows, of at most `LOGITS_AT_ONCE` logits; all but the last are of one size."""
    size = max(1, LOGITS_AT_ONCE // len(weight))
    for start in range(0, len(hidden), size):
        yield slice(start, start + size)


def _fused(function: Callable[..., Any], logits: torch.Tensor, *rest: Any) -> Any:
    """Call a function of logits, which it may overwrite; on a GPU it is compiled into one kernel."""
    return (_compiled(function) if logits.is_cuda else function)(logits, *rest)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _row_sums(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `m`, `sum(e^y)` and `sum(e^y y)` of each row."""
    shifted = logits.float()
    if temperature != 1:
        shifted /= temperature
    largest = shifted.amax(-1)
    shifted -= largest[:, None]
    weights = shifted.exp()
    return largest, weights.sum(-1), torch.linalg.vecdot(weights, shifted)


def _logit_gradients(
    logits: torch.Tensor,
    temperature: float,
    largest: torch.Tensor,
    factor: torch.Tensor | None,
    offset: torch.Tensor,
) -> torch.Tensor:
    """Return `e^y (factor y + offset)`, in the type of the logits; a factor of None is 0."""
    shifted = logits.float()
    if temperature != 1:
        shifted /= temperature
    shifted -= largest[:, None]
    if factor is None:
        return shifted.exp_().mul_(offset[:, None]).to(logits.dtype)
    weights = shifted.exp()
    return shifted.mul_(factor[:, None]).add_(offset[:, None]).mul_(weights).to(logits.dtype)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a matrix product to a total, which may have a wider type than the factors."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:  # only the GPU's product can have another type than its factors
        total += left @ right


def _parallel(group: dist.ProcessGroup | None) -> bool:
    return group is not None and dist.get_world_size(group) > 1


def _reduce(values: torch.Tensor, op: dist.ReduceOp, group: dist.ProcessGroup | None) -> None:
    if _parallel(group):
        dist.all_reduce(values, op=op, group=group)
