"""Measures the difference between the trainer's and the engines' log-probs of a batch, and its parts. Pure.

```
difference = trainer's log-prob before the update - engine's, of each trained token
    lag 0        same weights: the mismatch of two programs        ─► kl_mismatch
      with the trainer's own routing, minus with the engine's rows ─► kl_routing (a probe)
    lag 1, 2+    older weights: the excess over the mismatch       ─► kl_staleness
    unknown      weights that a restart has undone, or unreported: in none of the parts
```

The parts are halves of mean squares (k2, an estimate of the KL divergence for small differences). Squares of
independent differences add up, while means cancel and absolute values do not add up. Noise of the engine
therefore changes the mismatch and leaves the part of staleness unchanged.

Source: estimators k1 and k2: John Schulman, "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

import math

import numpy as np

from async_rl.observability.records import Extreme
from async_rl.types import BoolArray, Float32Array, TrainBatch
from trainer.megatron.packing import UNKNOWN_LAG, Targets

NUM_EXTREMES = 5
"""Enough to see whether the largest differences share a trajectory or a lag."""

_PERCENTILES = {"p1": 1.0, "p50": 50.0, "p99": 99.0, "p999": 99.9}


def measure_mismatch(wanted: Targets, start: Float32Array, importance_cap: float | None) -> dict[str, float]:
    """Return figures of a whole batch, under the names of `async_rl.observability.records.StepRecord`.

    Args:
        wanted: The batch's targets.
        start: `[S]`, the trainer's log-probs before the update at the predicting positions, of all ranks.
        importance_cap: The value at which importance weights are truncated; None: no truncation.

    Returns:
        The figures. Means over no tokens are NaN. Percentiles are order statistics of all tokens, not
        estimates. Tokens of unknown lag count only where all tokens do. The effective sample share is
        `(sum w)^2 / (n sum w^2)` of the truncated ratios `w`.

    Source: effective sample size: Kong, "A note on importance sampling using standardized weights" (1992).
    """
    difference, lag = _differences(wanted, start)
    buckets = {"lag0": lag == 0, "lag1": lag == 1, "lag2_up": lag >= 2}
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
        "tokens_lag_unknown": float((lag == UNKNOWN_LAG).sum()),
        "kl_mismatch": mismatch,
        "kl_staleness": _mean(squares[lag > 0]) - mismatch,
        **_percentiles(ratios),
        "effective_sample_share": mean_weight**2 / mean_square if mean_square else math.nan,
    }


def measure_routing(
    wanted: Targets, start: Float32Array, native: Float32Array, probed: BoolArray
) -> dict[str, float]:
    """Return the part of the mismatch that routing replay removes, from a pass without replay.

    Only tokens of lag 0 count: tokens of older weights were routed by those weights, so that native routing
    changes their staleness as well.

    Args:
        wanted: The batch's targets.
        start: `[S]`, the trainer's log-probs before the update, with replayed rows.
        native: `[S]`, the same log-probs without replay.
        probed: `[S]`, True where `native` holds a value.
    """
    chosen = wanted.mask & probed & (wanted.lag == 0)
    rollout = wanted.rollout_log_probs[chosen].astype(np.float64)
    by_itself, replayed = native[chosen] - rollout, start[chosen] - rollout
    return {
        "kl_routing": _mean(by_itself**2 / 2) - _mean(replayed**2 / 2),
        "routing_native_abs_diff": _mean(np.abs(by_itself)),
        "routing_replayed_abs_diff": _mean(np.abs(replayed)),
        "routing_probe_tokens": float(chosen.sum()),
    }


def largest_differences(batch: TrainBatch, wanted: Targets, start: Float32Array) -> tuple[Extreme, ...]:
    """Return the tokens with the largest absolute differences, largest first.

    Args:
        batch: The batch.
        wanted: The batch's targets.
        start: `[S]`, the trainer's log-probs before the update.
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
                position=i + 1 - int(batch.offsets[trajectory]),  # position i predicts token i + 1
                token_id=int(wanted.labels[i]),
                lag=None if lag[place] == UNKNOWN_LAG else int(lag[place]),
                rollout_log_prob=float(wanted.rollout_log_probs[i]),
                log_prob=float(start[i]),
            )
        )
    return tuple(found)


def _differences(wanted: Targets, start: Float32Array) -> tuple[np.ndarray, np.ndarray]:
    """Return trainer minus rollout log-probs, float64, and lags of the trained tokens, `[n]` each."""
    mask = wanted.mask
    return start[mask].astype(np.float64) - wanted.rollout_log_probs[mask], wanted.lag[mask]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _percentiles(ratios: np.ndarray) -> dict[str, float]:
    shares = list(_PERCENTILES.values())
    found = np.percentile(ratios, shares, method="inverted_cdf") if len(ratios) else [math.nan] * len(shares)
    return {f"importance_ratio_{name}": float(value) for name, value in zip(_PERCENTILES, found, strict=True)}
