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
def raise_on_all_ranks(
    kind: type[AsyncRLError] = TrainerError, doing: str = "", group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Run a block without exchanges on every rank, and wait for all; an error of any rank is raised on all.

    Args:
        kind: What a foreign exception (full disk, damaged file) is raised as.
        doing: Said before the foreign exception's own words.
        group: All ranks by another group than the default one: a thread beside the training has its own.

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
    words = b"" if error is None else msgspec.msgpack.encode((type(error).__name__, str(error)))
    for rank, text in enumerate(exchange(words, group)):
        if text:
            raise error if rank == dist.get_rank() and error else _error(rank, text)


def exchange(words: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """The words of all ranks, by rank. Objects would be pickled, and what arrives is not to be unpickled."""
    mine, sizes = _padded(words, group)
    texts = [torch.empty_like(mine) for _ in sizes]
    if len(mine):
        dist.all_gather(texts, mine, group=group)
    return _cut(texts, sizes)


def gather(words: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """The words of all ranks, by rank, on rank 0; nothing on the others."""
    mine, sizes = _padded(words, group)
    texts = [torch.empty_like(mine) for _ in sizes] if dist.get_rank() == 0 else []
    dist.gather(mine, texts or None, group=group)
    return _cut(texts, sizes)


def _padded(words: bytes, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, list[int]]:
    """This rank's words, as long as the longest of any, and how long each rank's are."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    size = torch.tensor([len(words)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(n) for n in sizes]
    longest = max(lengths)
    mine = torch.frombuffer(bytearray(words.ljust(longest + 1, b"\0")), dtype=torch.uint8)[:longest]
    return mine.to(device), lengths


def _cut(texts: list[torch.Tensor], sizes: list[int]) -> list[bytes]:
    return [text[:n].cpu().numpy().tobytes() for text, n in zip(texts, sizes, strict=False)]


def _error(rank: int, words: bytes) -> AsyncRLError:
    name, message = msgspec.msgpack.decode(words, type=tuple[str, str])
    # One of a worker of the user's own is a TrainerError elsewhere.
    kind = getattr(errors, name, TrainerError)
    return kind(f"rank {rank}: {message}")
