"""The trainer's side of a weight-update group, for a process of its own: NCCL may end it."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from async_rl.engine_protocol import GroupInvite
from async_rl.errors import WeightSyncError
from async_rl.weights.broadcast import WeightGroup, send_buckets


class Sent(NamedTuple):
    """What a sender has seen, seconds."""

    sending_s: float
    closing_s: float
    is_usable: bool
    """Whether the group could have sent more."""


def bucket_of(number: int, num_bytes: int, device: str = "cpu") -> torch.Tensor:
    """Return a bucket that is filled with its number."""
    return torch.full((num_bytes,), number, dtype=torch.uint8, device=device)


def send(invite: GroupInvite, num_buckets: int, num_bytes: int) -> Sent:
    """Send buckets into a group, and the first one once more unless it has failed; then close it."""
    group = WeightGroup(invite, 60)
    device = "cuda" if invite.backend == "nccl" else "cpu"
    buckets = [bucket_of(number, num_bytes, device) for number in range(num_buckets)]
    begin = time.monotonic()
    send_buckets(buckets, [group])
    sending_s, is_usable = time.monotonic() - begin, True
    try:
        group.start_broadcast(buckets[0])
    except (RuntimeError, WeightSyncError):
        is_usable = False
    else:
        group.wait()
    closing = time.monotonic()
    group.close()
    return Sent(sending_s, time.monotonic() - closing, is_usable)
