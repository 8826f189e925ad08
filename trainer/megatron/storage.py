"""Reads and writes parts of global tensors in Megatron's format `torch_dist`, that of torch's distributed
checkpoints.

```
__<rank>_<n>.distcp   the tensors that a rank wrote       .metadata       the location of each part (a pickle)
common.pt             empty: there are only tensors       metadata.json   the name of the format
```

Torch's own `save` and `load` exchange pickles between ranks. Here each rank reports what it wrote as msgpack,
and rank 0 builds the metadata from these reports; a reader needs no exchange. `.metadata` has to be a pickle.
It is read by an unpickler that creates only the classes that belong there.
"""

from __future__ import annotations

import pickle
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from async_rl.errors import CheckpointError
from async_rl.runtime.files import file_name, sync
from trainer.megatron.shards import TensorPart

METADATA: Final = ".metadata"
_OF_MEGATRON: Final = ("common.pt", "metadata.json")

_KNOWN: Final = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
            *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch", name)
        for name in ("Size", "bfloat16", "float16", "float32", "int32", "int64", "uint8", "bool")
    ),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}
"""Everything that a `.metadata` file may contain."""


class WrittenPart(msgspec.Struct, frozen=True, array_like=True):
    """One part of a tensor, as a rank wrote it."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int
    num_bytes: int


def write_parts(folder: Path, parts: Sequence[TensorPart], rank: int) -> list[WrittenPart]:
    """Write this rank's parts, which are in host memory, without an exchange with other ranks.

    Raises:
        OSError: When the disk is full; the message states the bytes to write and the bytes free.
    """
    writer, planner = FileSystemWriter(folder, thread_count=1), DefaultSavePlanner(False, False)
    planner.set_up_planner(_by_key(parts), writer.storage_meta(), is_coordinator=False)
    plans = [SavePlan([])] * rank + [planner.create_local_plan()]
    plan = planner.finish_plan(
        writer.prepare_global_plan(plans)[rank]
    )  # files are named by place in the list
    try:
        results = {_place(result.index): result for result in writer.write_data(plan, planner).wait()}
    except (OSError, RuntimeError) as error:
        # Torch's archive writer reports a lost position; the error that it was handling is the cause.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        needed, free = sum(part.data.nbytes for part in parts), shutil.disk_usage(folder).free
        raise OSError(
            cause.errno,
            f"{cause.strerror}: rank {rank} writes {needed} bytes, and {free} are free; the disk needs space "
            "for trainer.keep_checkpoints + 1 checkpoints",
        ) from error
    written = []
    for part in parts:
        result = results[part.key, tuple(part.global_offset)]
        info = result.storage_data
        written.append(
            WrittenPart(
                part.key,
                str(part.dtype).removeprefix("torch."),
                tuple(part.global_shape),
                tuple(part.global_offset),
                tuple(part.local_shape),
                info.relative_path,
                info.offset,
                info.length,
            )
        )
    return written


def write_metadata(folder: Path, of_ranks: Sequence[Sequence[WrittenPart]]) -> tuple[str, ...]:
    """Write the location of every part; called on one rank after all ranks have written.

    Returns:
        The names of the files that it wrote.

    Raises:
        CheckpointError: When the parts of a tensor leave gaps or overlap.
    """
    plans, results = [], []
    for of_rank in of_ranks:
        items = [_write_item(each) for each in of_rank]
        plans.append(SavePlan(items))
        results.append(
            [
                WriteResult(
                    item.index, each.num_bytes, _StorageInfo(each.file, each.position, each.num_bytes)
                )
                for item, each in zip(items, of_rank, strict=True)
            ]
        )
    try:
        _, metadata = DefaultSavePlanner(False, False).create_global_plan(plans)
    except ValueError as error:
        raise CheckpointError(f"the ranks' parts do not form complete tensors: {error}") from error
    FileSystemWriter(folder).finish(metadata, results)
    # Megatron's own `dist_checkpointing.load` reads these first.
    torch.save({}, folder / "common.pt")
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    for name in _OF_MEGATRON:
        sync(folder / name)
    return METADATA, *_OF_MEGATRON


def read_metadata(folder: Path) -> Metadata:
    """Read which parts of which tensors a checkpoint holds.

    Raises:
        CheckpointError: When the file is damaged, or holds something that does not belong there.
    """
    try:
        with (folder / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
    except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder / METADATA} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{folder / METADATA} holds a {type(metadata).__name__}, expected Metadata")
    try:
        for info in (metadata.storage_data or {}).values():
            file_name(info.relative_path, folder / METADATA)
    except (AttributeError, ValueError) as error:
        raise CheckpointError(f"{folder / METADATA} names no files of the checkpoint: {error}") from error
    return metadata


def stored_shapes(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors, by key."""
    tensors = metadata.state_dict_metadata.items()
    return {key: tuple(value.size) for key, value in tensors if isinstance(value, TensorStorageMetadata)}


def read_parts(folder: Path, metadata: Metadata, parts: Sequence[TensorPart]) -> None:
    """Overwrite the parts' data, however the tensors were split when written, without an exchange."""
    reader, planner = FileSystemReader(folder), DefaultLoadPlanner(False, False)
    planner.set_up_planner(_by_key(parts), metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        return super().find_class(module, name)


def _memory_format(kind: type, name: str) -> _MEM_FORMAT_ENCODING:
    """Stand in for `getattr`, by which Python 3.11.2 (Debian 12's) pickles a member of an enumeration."""
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"builtins.getattr of {kind} and {name} does not belong there")
    return _MEM_FORMAT_ENCODING[name]


def _by_key(parts: Sequence[TensorPart]) -> dict[str, Any]:
    """Return one object per tensor, as torch requires, which may hold several parts."""
    by_key = defaultdict(list)
    for part in parts:
        by_key[part.key].append(CheckpointableShardedTensor.from_sh_ten(part))
    return {key: LocalShardsContainer(several) for key, several in by_key.items()}


def _place(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _write_item(each: WrittenPart) -> WriteItem:
    offsets = torch.Size(each.offsets)
    return WriteItem(
        index=MetadataIndex(each.key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(each.sizes)),
            properties=TensorProperties(dtype=getattr(torch, each.dtype)),
            size=torch.Size(each.shape),
        ),
    )
