"""Writes payloads for buckets in memory that other processes of this host can open: the host's, or a GPU's.

`/update_weights_from_tensor` of SGLang 0.5.23 takes a pickle, which the server reads with an allow list. This
module only writes pickles, for a server that checks our admin key, and never reads one. A pickle has the
names, dtypes, shapes and offsets of the tensors and the name of the memory, not the bytes.

On the host the name is that of a file in shared memory. Torch counts, in the memory itself, the processes
that have it open. Its other strategy, passing file descriptors, needs a key that the two sides do not share.
A helper process of torch removes the file when the last process that had it open has ended, for whatever
reason.

On a GPU it is a CUDA IPC handle, for engines that share the trainer's GPU: others do not see it, and weights
pass through the host's memory. Torch keeps memory that was freed here until the other processes have closed
it; of an engine that was killed, as long as this process lives.
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
from typing import Any, Final

import torch
from torch import multiprocessing
from torch.multiprocessing import reductions

from async_rl.engine_protocol import TensorSpec
from async_rl.errors import WeightSyncError

_SHARED_MEMORY: Final = "/dev/shm"

_DEVICE: Final = 6
"""Which argument of `rebuild_cuda_tensor` names the GPU.

Source: sglang/srt/utils/patch_torch.py, `_REDUCE_TENSOR_ARG_DEVICE_INDEX`.
"""


def shared_buffer(num_bytes: int) -> torch.Tensor:
    """Return a reusable buffer in shared memory, `[num_bytes] uint8`.

    Raises:
        WeightSyncError: When there is not enough shared memory: a write beyond it would kill this process.
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
    """Return the payload of a bucket for one rank of one engine. Opens are counted: no rank can share one.

    Args:
        data: `[n] uint8`, of a `shared_buffer` or on a GPU. It can be read until it is overwritten.
        bucket: The tensors in it.
    """
    metadata, end = [], 0
    for spec in bucket:
        begin, end = end, end + spec.num_bytes
        # Replaces SGLang's FlattenedTensorMetadata, whose module is not imported here.
        metadata.append(
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
        named = _DeviceHandle(data) if data.is_cuda else data
        ForkingPickler(written).dump({"flattened_tensor": named, "metadata": metadata})
    return written.getvalue()


class _DeviceHandle:
    """A tensor on a GPU, which is pickled as torch does, but with the GPU's UUID in place of its number.

    The GPU has another number in an engine. SGLang looks up the UUID (`srt/utils/patch_torch.py`).
    """

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = reductions.reduce_tensor(self._data)
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])


def free_closed_handles() -> None:
    """Free memory of this process's GPU that was freed here while another process had it open."""
    torch.cuda.ipc_collect()


@contextmanager
def _by_name() -> Iterator[None]:
    """Let torch share memory by file name in the block."""
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)
