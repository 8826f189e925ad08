"""How much memory trajectories take in the process that runs them, at most.

A running attempt holds its tokens and the routing rows that its engines have sent. While an attempt ends, its
rows are decoded and merged; its frame is written from these arrays. Then both are freed.
"""

from __future__ import annotations

from typing import Final

from async_rl import routing
from async_rl.config import Config
from async_rl.engine_protocol import EngineFacts

_TOKEN_BYTES: Final = 48
"""Id, log-prob and version of a token, in segments, in the journal's entry and in what is merged of them."""

_MERGES: Final = 2
"""Copies of the rows that a trajectory needs while it ends: decoded, and merged."""


def trajectory_bytes(config: Config, facts: EngineFacts) -> int:
    """Return what an attempt with all its branches takes at most, bytes."""
    row_bytes = 0
    if config.routing.from_engine and facts.is_moe:
        # Engines may send the rows of all layers; only those of the layers with experts are kept.
        layers = facts.num_layers + _MERGES * len(facts.moe_layers)
        row_bytes = layers * facts.top_k * routing.id_dtype(facts.num_experts).itemsize
    tokens = min(config.rollout.max_context_tokens, facts.context_length)
    return (1 + config.rollout.max_branches) * tokens * (_TOKEN_BYTES + row_bytes)


def describe_memory(config: Config, facts: EngineFacts) -> str:
    """Return a finding for `async-rl check`."""
    rollout, each = config.rollout, trajectory_bytes(config, facts)
    who, number = "the driver", rollout.max_concurrent_trajectories
    if config.num_workers:
        who, number = "each rollout worker", config.max_attempts_per_worker
    return (
        f"memory: trajectories take at most {number * each / 2**30:.2g} GiB in {who}: {number} of up to "
        f"{each / 2**20:.2g} MiB, with their routing rows until they are stored"
    )
