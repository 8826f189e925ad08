"""Buckets in memory that other processes of this host can open, and the payloads that say where it lies.

What `/update_weights_from_tensor` of SGLang 0.5.23 takes is a pickle, which its server reads with a list of
what it may contain. We only ever write one, to a server that asks for our admin key, and read none. It
carries names, dtypes, shapes and places of the tensors and the name of a file in shared memory, never the
bytes. Weights of a GPU pass through that memory too: a CUDA IPC handle would be of use to an engine that sees
the trainer's GPU, and each is shown its own alone.

The handle is written by torch, which counts in the memory itself who has it open. Its other way, to pass file
descriptors, needs a key that the two ends do not share. A process of torch's removes the file when the last
of those that had it open has ended, however that came about.
"""

# mypy: disable-error-code="no-untyped-call"
# (torch.multiprocessing has no annotations.)

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Final

import torch
from torch import multiprocessing

from async_rl.engine_protocol import TensorSpec
from async_rl.errors import WeightSyncError
from async_rl.weights.buckets import size_of

_SHARED_MEMORY: Final = "/dev/shm"


def shared_buffer(num_bytes: int) -> torch.Tensor:
    """Memory to be filled again and again, `[num_bytes] uint8`.

    Raises:
        WeightSyncError: When there is not enough shared memory: the first write beyond it would kill us.
    """
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if num_bytes > free:
        raise WeightSyncError(
            f"weights.transport=tensor needs {num_bytes} bytes more of shared memory for a bucket, and "
            f"{_SHARED_MEMORY} has {free}: lower weights.bucket_bytes, or enlarge it (docker run --shm-size)"
        )
    with _by_name():
        shared: torch.Tensor = torch.empty(num_bytes, dtype=torch.uint8).share_memory_()
        return shared


def payload_for(data: torch.Tensor, bucket: Sequence[TensorSpec]) -> bytes:
    """What one rank of one engine is sent for a bucket; each needs its own, because opens are counted.

    Args:
        data: `[n] uint8`, of a `shared_buffer`. Whoever reads it may do so until it is overwritten.
        bucket: The tensors in it.
    """
    places, end = [], 0
    for spec in bucket:
        begin, end = end, end + size_of(spec)
        # Stands in for SGLang's FlattenedTensorMetadata, whose module is not imported here.
        places.append(
            SimpleNamespace(
                name=spec.name,
                shape=spec.shape,
                dtype=getattr(torch, spec.dtype),
                start_idx=begin,
                end_idx=end,
                numel=end - begin,
            )
        )
    written = io.BytesIO()
    with _by_name():
        ForkingPickler(written).dump({"flattened_tensor": data, "metadata": places})
    return written.getvalue()


@contextmanager
def _by_name() -> Iterator[None]:
    """Torch shares memory by file name in the block."""
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)
