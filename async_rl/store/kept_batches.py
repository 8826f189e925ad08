"""Batches that stay on disk after their step, so that `async-rl replay-step` can repeat it.

```
batches/step_00000012/
  batch.msgpack         the batch: versions, masks, rewards, lengths
  frames_00003.bin      the frames that trainer rank 3 read, one after the other
  frames_00003.msgpack  where each of them begins; written last
  result.msgpack        the metrics of the step
```

The trainer's ranks write these files: the driver holds no frames, and each rank has those of its own
trajectories at hand. Nothing is synced to disk, because frames have checksums.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from async_rl.errors import DataError
from async_rl.runtime.files import replace_file
from async_rl.store import frames
from async_rl.trainer_protocol import StepResult
from async_rl.types import TakenBatch

FOLDER: Final = "batches"
"""Subfolder of the run's folder."""

_BATCH: Final = "batch.msgpack"
_RESULT: Final = "result.msgpack"
_ALIGNMENT: Final = 64
"""Bytes to which frames are aligned in a file, as their arrays are."""


def step_folder(folder: Path, step: int) -> Path:
    """Return the subfolder of a step."""
    return folder / f"step_{step:08d}"


def kept_steps(folder: Path) -> list[int]:
    """Return the steps that have a subfolder, ascending; of checkpoints, batches and captures alike."""
    if not folder.is_dir():
        return []
    matches = (re.fullmatch(r"step_(\d{8,})", path.name) for path in folder.iterdir())
    return sorted(int(match.group(1)) for match in matches if match)


def keep_frames(batch: TakenBatch, folder: Path, indices: Sequence[int], rank: int) -> None:
    """Copy the frames of some trajectories, and on rank 0 the batch itself.

    Args:
        batch: A batch whose frames can be read on this node.
        folder: The folder of the batch.
        indices: The trajectories whose frames this rank copies.
        rank: The trainer rank.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    offsets: dict[int, int] = {}
    data = folder / f"frames_{rank:05d}.bin"
    with data.open("wb") as file:
        for index in indices:
            offsets[index] = file.tell()
            file.write(frames.read_frame(batch.trajectories[index]).data)
            file.write(bytes(-file.tell() % _ALIGNMENT))
    replace_file(data.with_suffix(".msgpack"), msgspec.msgpack.encode(offsets))
    if rank == 0:
        replace_file(folder / _BATCH, msgspec.msgpack.encode(msgspec.structs.replace(batch, kept_in=None)))


def keep_result(folder: Path, result: StepResult) -> None:
    """Write the result of a step beside its batch.

    Raises:
        OSError: The folder cannot be written.
    """
    replace_file(folder / _RESULT, msgspec.msgpack.encode(result))


def load_batch(folder: Path) -> TakenBatch:
    """Return a kept batch, whose frames are in this folder.

    Raises:
        DataError: The batch or some of its frames are missing.
    """
    try:
        batch = msgspec.msgpack.decode((folder / _BATCH).read_bytes(), type=TakenBatch)
        places: dict[int, tuple[str, int]] = {}
        for path in sorted(folder.glob("frames_*.msgpack")):
            data = str(path.with_suffix(".bin").absolute())
            offsets = msgspec.msgpack.decode(path.read_bytes(), type=dict[int, int])
            places |= {index: (data, offset) for index, offset in offsets.items()}
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"the batch in {folder} cannot be read: {error}") from error
    missing = [each for index, each in enumerate(batch.trajectory_ids) if index not in places]
    if missing:
        raise DataError(
            f"{folder} lacks the frames of {len(missing)} of {len(batch.trajectory_ids)} trajectories, "
            f"first {missing[0]}: a trainer rank did not finish writing them"
        )
    return msgspec.structs.replace(
        batch,
        trajectories=tuple(
            msgspec.structs.replace(each, path=places[index][0], offset=places[index][1], node="")
            for index, each in enumerate(batch.trajectories)
        ),
    )


def load_result(folder: Path) -> StepResult | None:
    """Return the result of the step of a kept batch; None if the step did not finish."""
    try:
        return msgspec.msgpack.decode((folder / _RESULT).read_bytes(), type=StepResult)
    except FileNotFoundError:
        return None
