"""How far trainer and engines agree on the tokens of a batch, and what their disagreement is made of. Pure.

```
difference = trainer's log-prob before the update - engine's, of each trained token
    lag 0        same weights: the mismatch of two programs        ─► kl_mismatch
      routed by the trainer itself, minus with the engine's rows   ─► kl_routing (a probe)
    lag 1, 2+    older weights: what they have beyond the mismatch ─► kl_staleness
```

The parts are halves of mean squares (k2, an estimate of the KL divergence for small differences): unlike
means, which cancel, and absolute values, squares of independent differences add up, so that noise of the
engine moves the mismatch and leaves what staleness adds where it was.

Source: estimators k1 and k2: John Schulman, "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

import math

import numpy as np

from async_rl.observability.records import Extreme
from async_rl.types import BoolArray, Float32Array, TrainBatch
from trainer.megatron.packing import Targets

NUM_EXTREMES = 5
"""Enough to see whether they are of one trajectory or lag."""

_PERCENTILES = {"p1": 1.0, "p50": 50.0, "p99": 99.0, "p999": 99.9}


def measure_mismatch(wanted: Targets, start: Float32Array, importance_cap: float | None) -> dict[str, float]:
    """Figures of a whole batch, under the names of `async_rl.observability.records.StepRecord`.

    Args:
        wanted: Of the batch.
        start: `[S]`, the trainer's log-probs before the update at the predicting positions, of all ranks.
        importance_cap: Where importance weights are truncated; None: nowhere.

    Returns:
        Means over no tokens are NaN. Percentiles are order statistics of all tokens, not estimates.
        The effective sample share is `(sum w)^2 / (n sum w^2)` of the truncated ratios `w`.

    Source: effective sample size: Kong, "A note on importance sampling using standardized weights" (1992).
    """
    difference, lag = _differences(wanted, start)
    buckets = {"lag0": lag <= 0, "lag1": lag == 1, "lag2_up": lag >= 2}
    squares = difference**2 / 2
    mismatch = _mean(squares[buckets["lag0"]])
    with np.errstate(over="ignore"):
        ratios = np.exp(difference)
    weights = ratios if importance_cap is None else np.minimum(ratios, importance_cap)
    mean_weight, mean_square = _mean(weights), _mean(weights**2)
    return {
        "log_prob_diff": _mean(difference),
        "log_prob_abs_diff": _mean(np.abs(difference)),
        "lag0_log_prob_abs_diff": _mean(np.abs(difference[buckets["lag0"]])),
        "rollout_kl": -_mean(difference),
        **{f"rollout_kl_{name}": -_mean(difference[chosen]) for name, chosen in buckets.items()},
        **{f"tokens_{name}": float(chosen.sum()) for name, chosen in buckets.items()},
        "kl_mismatch": mismatch,
        "kl_staleness": _mean(squares[~buckets["lag0"]]) - mismatch,
        **_percentiles(ratios),
        "effective_sample_share": mean_weight**2 / mean_square if mean_square else math.nan,
    }


def measure_routing(
    wanted: Targets, start: Float32Array, native: Float32Array, probed: BoolArray
) -> dict[str, float]:
    """What replay takes away from the mismatch, from a pass without it; tokens of lag 0 only.

    Tokens of older weights were routed by those: what native routing changes there is staleness as well.

    Args:
        wanted: Of the batch.
        start: As for `measure`; rows replayed.
        native: `[S]`, the same without replay.
        probed: `[S]`, where there is a value in `native`.
    """
    chosen = wanted.mask & probed & (wanted.lag <= 0)
    rollout = wanted.rollout_log_probs[chosen].astype(np.float64)
    by_itself, replayed = native[chosen] - rollout, start[chosen] - rollout
    return {
        "kl_routing": _mean(by_itself**2 / 2) - _mean(replayed**2 / 2),
        "routing_native_abs_diff": _mean(np.abs(by_itself)),
        "routing_replayed_abs_diff": _mean(np.abs(replayed)),
        "routing_probe_tokens": float(chosen.sum()),
    }


def largest_differences(batch: TrainBatch, wanted: Targets, start: Float32Array) -> tuple[Extreme, ...]:
    """The tokens with the largest absolute differences, largest first.

    Args:
        batch: The batch.
        wanted: Of it.
        start: As for `measure`.
    """
    difference, lag = _differences(wanted, start)
    index = np.flatnonzero(wanted.mask)
    negated = -np.abs(difference)
    largest = np.arange(len(index))
    if len(index) > NUM_EXTREMES:
        largest = np.argpartition(negated, NUM_EXTREMES)[:NUM_EXTREMES]
    found = []
    for place in sorted(largest.tolist(), key=negated.item):
        i = int(index[place])
        trajectory = int(wanted.trajectory[i])
        found.append(
            Extreme(
                trajectory_id=batch.trajectory_ids[trajectory],
                position=i + 1 - int(batch.offsets[trajectory]),  # at i it is predicted
                token_id=int(wanted.labels[i]),
                lag=int(lag[place]),
                rollout_log_prob=float(wanted.rollout_log_probs[i]),
                log_prob=float(start[i]),
            )
        )
    return tuple(found)


def _differences(wanted: Targets, start: Float32Array) -> tuple[np.ndarray, np.ndarray]:
    """Trainer minus rollout log-probs, float64, and lags of the trained tokens, `[n]` each."""
    mask = wanted.mask
    return start[mask].astype(np.float64) - wanted.rollout_log_probs[mask], wanted.lag[mask]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _percentiles(ratios: np.ndarray) -> dict[str, float]:
    shares = list(_PERCENTILES.values())
    found = np.percentile(ratios, shares, method="inverted_cdf") if len(ratios) else [math.nan] * len(shares)
    return {f"importance_ratio_{name}": float(value) for name, value in zip(_PERCENTILES, found, strict=True)}
