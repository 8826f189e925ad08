"""Exchanges errors and bytes between ranks: an error of one rank must not leave the others waiting."""

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
    """Run a block on every rank, wait for all, and raise an error of any rank on all of them.

    The block itself must not exchange anything.

    Args:
        kind: The error that a foreign exception (full disk, damaged file) is raised as.
        doing: What the block does; the message of such an error begins with it.
        group: A group of all ranks; None is the default group. A thread beside the training has its own.

    Raises:
        AsyncRLError: The error of the lowest rank that failed.
    """
    error: AsyncRLError | None = None
    try:
        yield
    except AsyncRLError as e:
        error = e
    except Exception as e:
        error = kind(f"{doing}: {e}")
        error.__cause__ = e
    message = b"" if error is None else msgspec.msgpack.encode((type(error).__name__, str(error)))
    for rank, text in enumerate(all_gather_bytes(message, group)):
        if text:
            raise error if rank == dist.get_rank() and error else _error(rank, text)


def all_gather_bytes(message: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return the bytes of all ranks, by rank, without pickling."""
    mine, sizes = _padded(message, group)
    texts = [torch.empty_like(mine) for _ in sizes]
    if len(mine):
        dist.all_gather(texts, mine, group=group)
    return _cut(texts, sizes)


def gather_bytes(message: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return the bytes of all ranks, by rank, on rank 0, and an empty list on the others."""
    mine, sizes = _padded(message, group)
    texts = [torch.empty_like(mine) for _ in sizes] if dist.get_rank() == 0 else []
    dist.gather(mine, texts or None, group=group)
    return _cut(texts, sizes)


def _padded(message: bytes, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, list[int]]:
    """Return this rank's bytes padded to the longest of any rank, and the length of each rank's."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    size = torch.tensor([len(message)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(n) for n in sizes]
    longest = max(lengths)
    mine = torch.frombuffer(bytearray(message.ljust(longest + 1, b"\0")), dtype=torch.uint8)[:longest]
    return mine.to(device), lengths


def _cut(texts: list[torch.Tensor], sizes: list[int]) -> list[bytes]:
    return [text[:n].cpu().numpy().tobytes() for text, n in zip(texts, sizes, strict=False)]


def _error(rank: int, message: bytes) -> AsyncRLError:
    name, text = msgspec.msgpack.decode(message, type=tuple[str, str])
    # An error class that a user's worker defines arrives as a TrainerError.
    kind = getattr(errors, name, TrainerError)
    return kind(f"rank {rank}: {text}")
