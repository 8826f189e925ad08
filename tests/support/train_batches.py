"""Builds random `TrainBatch`es, as the queue delivers them to the trainer."""

from __future__ import annotations

import numpy as np

from async_rl.types import TrainBatch


def random_rows(rng: np.random.Generator, tokens: int, layers: int, experts: int, top_k: int) -> np.ndarray:
    """Return routing rows, `[tokens, layers, top_k] uint8`, without repeated experts in a row."""
    scores = rng.random((tokens, layers, experts))
    return np.argsort(scores, axis=2)[..., :top_k].astype(np.uint8)


def random_batch(
    seed: int = 0,
    *,
    lengths: tuple[int, ...] = (13, 7, 30, 19, 5, 22),
    group_size: int = 2,
    prompt: int = 3,
    vocab_size: int = 96,
    layers: int | tuple[int, ...] = 3,
    experts: int = 8,
    top_k: int = 2,
    rewards: np.ndarray | None = None,
    routing: bool = True,
    trainer_version: int = 4,
) -> TrainBatch:
    """Return trajectories of random tokens: a prompt, then sampled tokens, with noise for log-probs.

    `layers` are the indices of the layers with experts, or their number if all layers have experts.
    """
    moe_layers = tuple(range(layers)) if isinstance(layers, int) else layers
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    mask = np.ones(total, bool)
    for start in offsets[:-1]:
        mask[start : start + prompt] = False
    log_probs = np.where(mask, rng.normal(-4.0, 0.3, total), 0).astype(np.float32)
    versions = np.where(mask, rng.integers(trainer_version - 2, trainer_version + 1, total), -1)
    valid = np.ones(total, bool)
    valid[offsets[1:] - 1] = False
    return TrainBatch(
        batch_id=f"batch-{seed}",
        trainer_version=trainer_version,
        trajectory_ids=tuple(f"{seed:08d}-{j:04d}" for j in range(len(lengths))),
        group_index=(np.arange(len(lengths)) // group_size).astype(np.int32),
        rewards=(
            rng.integers(0, 2, len(lengths)) + rng.normal(0, 0.1, len(lengths))
            if rewards is None
            else rewards
        ).astype(np.float32),
        offsets=offsets,
        token_ids=rng.integers(3, vocab_size, total).astype(np.int32),
        loss_mask=mask,
        rollout_log_probs=log_probs,
        weight_versions=versions.astype(np.int32),
        routed_experts=random_rows(rng, total, len(moe_layers), experts, top_k) if routing else None,
        routing_valid=valid if routing else None,
        num_experts=experts if routing else 0,
        moe_layers=moe_layers if routing else (),
    )
