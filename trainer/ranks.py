"""Deciding together: an error of one rank must not leave the others waiting in an exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from async_rl.errors import AsyncRLError, TrainerError


@contextmanager
def together(kind: type[AsyncRLError] = TrainerError, doing: str = "") -> Iterator[None]:
    """Run a block without exchanges on every rank, and wait for all; an error of any rank is raised on all.

    Args:
        kind: What a foreign exception (full disk, damaged file) is raised as.
        doing: Said before the foreign exception's own words.

    Raises:
        AsyncRLError: Of the lowest rank that failed.
    """
    error: AsyncRLError | None = None
    try:
        yield
    except AsyncRLError as e:
        error = e
    except Exception as e:
        error = kind(f"{doing}: {e}")
        error.__cause__ = e
    errors: list[AsyncRLError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, failure in enumerate(errors):
        if failure is not None:
            raise error if rank == dist.get_rank() and error else type(failure)(f"rank {rank}: {failure}")
