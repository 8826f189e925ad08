"""Log-probs and entropies over a vocabulary that may be split over several ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist


def vocab_parallel_log_probs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-prob of each label and the entropy of each distribution, in float32.

    Args:
        logits: `[n, V / ranks]`, for this rank's part of the vocabulary.
        labels: `[n]` int64, global token ids.
        temperature: The sampling temperature; log-probs are those of the distribution that was sampled from.
        group: The ranks that share the vocabulary, in its order; None for a single rank.

    Returns:
        Log-probs and entropies (nats), `[n]` each, both with gradient.

    Source: the exchange of maxima and sums is that of Megatron-Core, `tensor_parallel/cross_entropy.py`.
    """
    return _VocabParallelLogProbs.apply(logits, labels, temperature, group)


class _VocabParallelLogProbs(torch.autograd.Function):
    """Computes one softmax for both results and keeps only its float32 copy for the backward pass."""

    @staticmethod
    def forward(ctx, logits, labels, temperature, group):
        largest = logits.max(dim=-1, keepdim=True).values.float()
        _reduce(largest, dist.ReduceOp.MAX, group)
        shifted = logits.float() - largest
        if temperature != 1:
            shifted /= temperature
        first = shifted.shape[-1] * (dist.get_rank(group) if _parallel(group) else 0)
        local = labels - first
        ours = (local >= 0) & (local < shifted.shape[-1])
        index = local.clamp(0, shifted.shape[-1] - 1)[:, None]
        predicted = shifted.gather(-1, index).squeeze(-1) * ours
        weights = shifted.exp()
        # The entropy needs no second softmax: it is log Z - (sum of e^x x) / Z.
        sums = torch.stack([weights.sum(-1), torch.linalg.vecdot(weights, shifted), predicted])
        _reduce(sums, dist.ReduceOp.SUM, group)
        normaliser, weighted, predicted = sums
        log_normaliser = normaliser.log()
        entropy = log_normaliser - weighted / normaliser
        ctx.save_for_backward(weights, normaliser, index, ours, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return predicted - log_normaliser, entropy

    @staticmethod
    def backward(ctx, of_log_prob, of_entropy):
        weights, normaliser, index, ours, entropy = ctx.saved_tensors
        gradient = None
        if of_log_prob is not None:
            scale = of_log_prob / ctx.temperature
            gradient = weights * (-scale / normaliser)[:, None]
            gradient.scatter_add_(-1, index, (scale * ours)[:, None])
        if of_entropy is not None:
            # dH/dx = -p (log p + H), where p log p is 0 at 0.
            p = weights / normaliser[:, None]
            own = (torch.xlogy(p, p) + p * entropy[:, None]) * (-of_entropy / ctx.temperature)[:, None]
            gradient = own if gradient is None else gradient + own
        return None if gradient is None else gradient.to(ctx.dtype), None, None, None


def _parallel(group: dist.ProcessGroup | None) -> bool:
    return group is not None and dist.get_world_size(group) > 1


def _reduce(values: torch.Tensor, op: dist.ReduceOp, group: dist.ProcessGroup | None) -> None:
    if _parallel(group):
        dist.all_reduce(values, op=op, group=group)
