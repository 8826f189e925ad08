"""The policy loss, token by token, and the log-probs it is made of."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


class PolicyLoss(NamedTuple):
    """Per trained token, `[n]` each."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """1 where the clipped side was taken, so that the token gives no gradient."""


def clipped_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Clipped PPO around the proximal policy, weighted for the behaviour policy.

    `-w · min(r · A, clip(r, 1 - clip_low, 1 + clip_high) · A)` with `r = exp(log_probs - old_log_probs)`.

    Args:
        log_probs: `[n]` float32, current policy, with gradient.
        old_log_probs: `[n]` float32, proximal policy.
        advantages: `[n]`.
        weights: `[n]`, importance weights of the proximal over the behaviour policy.
        clip_low: Lower clip of the ratio.
        clip_high: Upper clip of the ratio.

    Source: arXiv 1707.06347 (PPO), equation 7; decoupled: arXiv 2110.00641, equation 5; two clips: arXiv
    2503.14476 (DAPO), section 3.1.
    """
    ratio = (log_probs - old_log_probs).exp()
    free = ratio * advantages
    bound = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(
        loss=-weights * torch.minimum(free, bound), clipped=(bound < free).to(log_probs.dtype).detach()
    )


def vocab_parallel_log_probs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each label and entropy of each distribution, in float32.

    Args:
        logits: `[n, V / ranks]`, this rank's part of the vocabulary.
        labels: `[n]` int64, global token ids.
        temperature: The sampling temperature: log-probs are of the distribution that was sampled from.
        group: The ranks that share the vocabulary, in its order; None when there is one.

    Returns:
        Log-probs `[n]` with gradient, and entropies `[n]` in nats without.

    Source: the exchange of maxima and sums is that of Megatron-Core, `tensor_parallel/cross_entropy.py`.
    """
    return _VocabParallelLogProbs.apply(logits, labels, temperature, group)


class _VocabParallelLogProbs(torch.autograd.Function):
    """One softmax for both results; its float32 copy is all that is kept for the backward pass."""

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
        # The entropy comes without a second softmax: log Z - (sum of e^x x) / Z.
        sums = torch.stack([weights.sum(-1), torch.linalg.vecdot(weights, shifted), predicted])
        _reduce(sums, dist.ReduceOp.SUM, group)
        normaliser, weighted, predicted = sums
        log_normaliser = normaliser.log()
        entropy = log_normaliser - weighted / normaliser
        ctx.save_for_backward(weights, normaliser, index, ours)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.mark_non_differentiable(entropy)
        return predicted - log_normaliser, entropy

    @staticmethod
    def backward(ctx, grad, _):
        weights, normaliser, index, ours = ctx.saved_tensors
        scale = grad / ctx.temperature
        gradient = weights * (-scale / normaliser)[:, None]
        gradient.scatter_add_(-1, index, (scale * ours)[:, None])
        return gradient.to(ctx.dtype), None, None, None


def _parallel(group: dist.ProcessGroup | None) -> bool:
    return group is not None and dist.get_world_size(group) > 1


def _reduce(values: torch.Tensor, op: dist.ReduceOp, group: dist.ProcessGroup | None) -> None:
    if _parallel(group):
        dist.all_reduce(values, op=op, group=group)
