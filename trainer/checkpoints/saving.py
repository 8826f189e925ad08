"""Writes checkpoints in the background: training pauses only while its state is copied.

```
trainer   step ─ copy ─ step ─ step ─ step ─ copy ─ ...
thread           └ write ─ fsync ─ manifest ─ rename ─ remove old ones
```

The copy goes into host memory, which is reused for the next checkpoint. The rest runs in a thread with its
own process group, so that its exchanges do not interfere with those of a step. (Megatron forks a writer
process instead. A process with threads of Gloo, Ray and CUDA must not fork: the child can deadlock on a lock
that was held by a thread which does not exist in it.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist

from async_rl.config import Config
from async_rl.errors import CheckpointError
from async_rl.trainer_protocol import Saved, read_best
from trainer.checkpoints import folder
from trainer.checkpoints.manifest import (
    FileRecord,
    Manifest,
    describe_lora,
    record_file,
    write_manifest,
)
from trainer.collectives import gather_bytes, raise_on_all_ranks
from trainer.megatron import shards, storage
from trainer.megatron.model import MegatronModel

log = logging.getLogger(__name__)

_ALIGNMENT: Final = 64
"""Alignment of staged tensors in bytes, a multiple of every element size."""

_PACKAGES: Final = ("async-rl", "torch", "megatron-core")


class _RankFiles(msgspec.Struct, frozen=True, array_like=True):
    """The tensors and files that one rank wrote."""

    tensors: list[storage.WrittenPart]
    files: dict[str, FileRecord]


class CheckpointSaver:
    """Writes the checkpoints of one model. Every method but `poll_saved` is called on all ranks.

    Invariant: at most one checkpoint is being written.
    """

    def __init__(
        self,
        config: Config,
        model: MegatronModel,
        layout: dict[str, int | None],
        critic: MegatronModel | None = None,
    ) -> None:
        """Open the process group of the writing thread; called on all ranks.

        Args:
            config: The run's config.
            model: The model whose state is saved.
            layout: The model's number of ranks and parallel sizes.
            critic: The value model, whose state is saved with it.
        """
        self._model, self._critic, trainer = model, critic, config.trainer
        self._about = Manifest(
            step=0,
            extra={},
            layout=layout,
            model=str(Path(config.model.path).resolve()),
            dtype=config.model.dtype,
            optimizer_step=0,
            lora=describe_lora(trainer.lora),
            versions={name: version(name) for name in _PACKAGES},
        )
        """What every manifest has; step, `extra` and files are those of one checkpoint."""
        self._keep, self._keep_every = trainer.keep_checkpoints, trainer.keep_every
        self._keeps_best = trainer.keep_best is not None
        timeout_s = trainer.step_timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending_write: Future[None] | None = None
        self.staging_buffer = torch.empty(0, dtype=torch.uint8)
        self._saved = Saved()

    def start_save(self, directory: Path, step: int, extra: dict[str, Any]) -> None:
        """Copy the state and start to write it to `step_<step>` in the background.

        It first waits for the previous checkpoint if that is still being written.
        """
        self.poll_saved(wait=True)
        begin = time.perf_counter()
        manifest = msgspec.structs.replace(
            self._about,
            step=step,
            extra=extra,
            optimizer_step=shards.optimizer_step(self._model),
            critic_optimizer_step=None if self._critic is None else shards.optimizer_step(self._critic),
        )
        parts = shards.parts_to_save(self._model) + list(shards.random_state().values())
        if self._critic is not None:
            parts += shards.of_critic(shards.parts_to_save(self._critic))
        parts = self._stage(parts)
        self._saved = Saved(
            step=self._saved.step,
            pause_s=time.perf_counter() - begin,
            num_bytes=sum(part.data.nbytes for part in parts),
        )
        self.pending_write = self._thread.submit(self._write, directory, manifest, parts)

    def poll_saved(self, *, wait: bool) -> Saved:
        """Return the state of the last save.

        Args:
            wait: Whether to wait until it has been completed or has failed.
        """
        if self.pending_write is not None and (wait or self.pending_write.done()):
            error = self.pending_write.exception()
            if error is not None:
                log.error("%s", error, exc_info=error)
                self._saved = msgspec.structs.replace(self._saved, failure=str(error))
            self.pending_write = None
        return msgspec.structs.replace(self._saved, writing=self.pending_write is not None)

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._thread.shutdown()

    def _stage(self, parts: Sequence[shards.TensorPart]) -> list[shards.TensorPart]:
        """Return the same parts with their data copied to host memory."""
        sizes = [-(-part.data.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts]
        if len(self.staging_buffer) < sum(sizes):
            pinned = self._model.device.type == "cuda"
            self.staging_buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        staged, position = [], 0
        for part, size in zip(parts, sizes, strict=True):
            region = self.staging_buffer[position : position + part.data.nbytes]
            copy = region.view(part.dtype).view(part.data.shape)
            copy.copy_(part.data, non_blocking=True)
            staged.append(replace(part, data=copy))
            position += size
        torch.cuda.synchronize()
        return staged

    def _write(self, directory: Path, manifest: Manifest, parts: Sequence[shards.TensorPart]) -> None:
        """Run in the thread: write and publish the checkpoint, and remove old ones."""
        begin = time.perf_counter()
        doing = f"cannot write checkpoint {folder.final_path(directory, manifest.step)}"
        agreed = partial(raise_on_all_ranks, CheckpointError, doing, self._group)
        rank = dist.get_rank()
        scratch = folder.scratch_path(directory, manifest.step)
        try:
            with agreed():
                if rank == 0:
                    folder.remove_leftovers(directory)
                    scratch.mkdir(parents=True)
            with agreed():
                tensors = storage.write_parts(scratch, parts, rank)
                files = {name: record_file(scratch / name) for name in {each.file for each in tensors}}
            of_ranks = gather_bytes(msgspec.msgpack.encode(_RankFiles(tensors, files)), self._group)
            with agreed():
                if rank == 0:
                    self._publish(
                        directory, manifest, [msgspec.msgpack.decode(t, type=_RankFiles) for t in of_ranks]
                    )
        except CheckpointError:
            if rank == 0:
                folder.remove_leftovers(directory)  # the unfinished checkpoint may be what fills the disk
            raise
        self._saved = msgspec.structs.replace(
            self._saved, step=manifest.step, write_s=time.perf_counter() - begin
        )

    def _publish(self, directory: Path, manifest: Manifest, of_ranks: Sequence[_RankFiles]) -> None:
        scratch = folder.scratch_path(directory, manifest.step)
        common = storage.write_metadata(scratch, [of_rank.tensors for of_rank in of_ranks])
        files = {name: each for of_rank in of_ranks for name, each in of_rank.files.items()}
        files |= {name: record_file(scratch / name) for name in common}
        write_manifest(scratch, msgspec.structs.replace(manifest, files=files))
        folder.publish_checkpoint(directory, manifest.step)
        best = read_best(directory) if self._keeps_best else None
        kept = set() if best is None else best.kept
        folder.remove_old_checkpoints(directory, manifest.step, self._keep, self._keep_every, kept)
