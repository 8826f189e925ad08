"""Deciding together: an error of one rank must not leave the others waiting in an exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch
import torch.distributed as dist

from async_rl import errors
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
    for rank, failure in enumerate(_exchange(error)):
        if failure is not None:
            raise error if rank == dist.get_rank() and error else failure


def _exchange(error: AsyncRLError | None) -> list[AsyncRLError | None]:
    """The errors of all ranks, as text: objects would be pickled, and what arrives is not to be unpickled."""
    words = b"" if error is None else msgspec.msgpack.encode((type(error).__name__, str(error)))
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    size = torch.tensor([len(words)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(n) for n in sizes)
    if not longest:
        return [None] * len(sizes)
    mine = torch.frombuffer(bytearray(words.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
    texts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(texts, mine)
    return [
        _error(rank, text[: int(n)].cpu().numpy().tobytes())
        for rank, (n, text) in enumerate(zip(sizes, texts, strict=True))
    ]


def _error(rank: int, words: bytes) -> AsyncRLError | None:
    if not words:
        return None
    name, message = msgspec.msgpack.decode(words, type=tuple[str, str])
    kind = getattr(
        errors, name, TrainerError
    )  # one of a worker of the user's own is a TrainerError elsewhere
    return kind(f"rank {rank}: {message}")
