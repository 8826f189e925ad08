"""Checkpoints: everything a rank needs to go on as if it had never stopped, bit for bit.

```
checkpoints/step_00000120/   appears by a rename when every rank has written its part
    meta.json                step, layout, extra
    rank_00000.pt …          parameters, main parameters, optimizer moments, random generators
```

Parts are per rank and hold what that rank holds, so a checkpoint is loaded by the same layout that wrote it.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from async_rl.errors import CheckpointError
from async_rl.training import TrainerState
from trainer.megatron.model import MegatronModel
from trainer.megatron.state import rank_state, restore
from trainer.ranks import together

FORMAT = 1
_NAME = re.compile(r"^step_(\d{8})$")


def newest(directory: str | Path) -> Path | None:
    """The newest complete checkpoint in a folder, or None."""
    found = complete(directory)
    return found[-1] if found else None


def find(directory: str | Path) -> Path | None:
    """The checkpoint that a folder means: itself, or the newest complete one in it, or none."""
    path = Path(directory)
    return path if (path / "meta.json").is_file() else newest(path)


def complete(directory: str | Path) -> list[Path]:
    """All complete checkpoints in a folder, oldest first."""
    root = Path(directory)
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if _NAME.match(p.name) and (p / "meta.json").is_file())


def save(
    directory: str | Path,
    model: MegatronModel,
    step: int,
    extra: dict[str, Any],
    layout: dict[str, int],
    keep: int,
) -> Path:
    """Write `step_<step>` into a folder and remove all but the newest `keep`. Called on all ranks.

    Raises:
        CheckpointError: When it cannot be written; older checkpoints stay.
    """
    root = Path(directory)
    final = root / f"step_{step:08d}"
    scratch = root / f".{final.name}.tmp"
    first = dist.get_rank() == 0
    written = partial(together, CheckpointError, f"cannot write checkpoint {final}")
    with written():
        if first:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
    with written():
        _write(scratch / _part(dist.get_rank()), lambda file: torch.save(rank_state(model), file))
    with written():
        if first:
            meta = {"format": FORMAT, "step": step, "layout": layout, "extra": extra}
            _write(scratch / "meta.json", lambda file: file.write(json.dumps(meta, indent=2).encode()))
            if final.exists():  # of a run that came this far before it was set back
                shutil.rmtree(final)
            scratch.rename(final)
            for old in complete(root)[:-keep]:
                shutil.rmtree(old)
    return final


def load(path: Path, model: MegatronModel, layout: dict[str, int]) -> TrainerState:
    """Read a checkpoint into a model that was built for the same layout. Called on all ranks.

    Raises:
        CheckpointError: When it is incomplete, damaged, or of another layout or model.
    """
    with together(CheckpointError, f"cannot read checkpoint {path}"):
        meta = _read_meta(path)
        if meta["layout"] != layout:
            raise CheckpointError(
                f"{path} was written with layout {meta['layout']}, but trainer.layout and trainer.num_ranks "
                f"ask for {layout}: set them back, or start from the run's Hugging Face export"
            )
        part = path / _part(dist.get_rank())
        try:
            state = torch.load(part, map_location=model.device, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as e:
            raise CheckpointError(
                f"{part} cannot be read: {e}. Remove {path} to resume from an older checkpoint"
            ) from e
        try:
            restore(model, state)
        except ValueError as e:
            raise CheckpointError(f"{path} is of another model: {e}") from e
    return TrainerState(step=meta["step"], extra=meta["extra"])


def _part(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _write(path: Path, write: Any) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads((path / "meta.json").read_text())
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path} is no complete checkpoint: {e}") from e
    if meta.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {meta.get('format')!r}, this version reads {FORMAT}")
    return meta
