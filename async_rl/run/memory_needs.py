"""How much memory trajectories take in the process that runs them, at most.

A running attempt holds its tokens, with the sampling masks of a truncated distribution, and the routing rows
that its engines have sent, narrowed as they arrive.
While an attempt ends whose rows came in several answers, these are merged one after the other; its frame is
written from the result. Then all are freed. `tests/contract/test_trajectory_memory.py` measures a process.
"""

from __future__ import annotations

import math
from typing import Final

from async_rl import routing
from async_rl.config import Config
from async_rl.engine_protocol import EngineFacts

_TOKEN_BYTES: Final = 48
"""Id, log-prob and version of a token, in segments, in the journal's entry and in what is merged of them."""

_MASK_ID_BYTES: Final = 16
"""A kept id of a sampling mask: 4 in the buffer of the running call, which has at most half of its size to
spare and is copied when it grows, 4 in the segment, and 4 in the column of the trajectory."""

_ROW_COPIES: Final = 3
"""Copies of the rows that exist while a trajectory ends: as sent, and before and after the last merge."""


def trajectory_bytes(config: Config, facts: EngineFacts) -> int:
    """Return what an attempt with all its branches takes at most, bytes."""
    row_bytes = 0
    if config.routing.from_engine and facts.is_moe:
        row = len(facts.moe_layers) * facts.top_k * routing.id_dtype(facts.num_experts).itemsize
        # A trajectory whose flips are measured keeps the last rows that an update replaced, or with `splice`
        # those of each version.
        versions = 1 + config.rollout.max_staleness if config.routing.merge == "splice" else 1
        row_bytes = math.ceil((_ROW_COPIES + config.routing.flip_sample * versions) * row)
    mask_bytes = _MASK_ID_BYTES * config.rollout.top_k if config.rollout.needs_masks else 0
    tokens = min(config.rollout.max_context_tokens, facts.context_length)
    return (1 + config.rollout.max_branches) * tokens * (_TOKEN_BYTES + mask_bytes + row_bytes)


def describe_memory(config: Config, facts: EngineFacts) -> str:
    """Return a finding for `async-rl check`."""
    rollout, each = config.rollout, trajectory_bytes(config, facts)
    who, number, others = "the driver", rollout.max_concurrent_trajectories, ""
    if config.num_workers:
        who, number = "each rollout worker", config.max_attempts_per_worker
        others = "; the process takes about 0.3 GiB more, and the texts of its conversations"
    return (
        f"memory: trajectories take at most {number * each / 2**30:.2g} GiB in {who}: {number} of up to "
        f"{each / 2**20:.2g} MiB, with their routing rows until they are stored{others}"
    )
