"""Weights & Biases, whose client is imported when a run asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from async_rl.config import Config, to_builtins
from async_rl.runtime.files import replace_file


class _Kept(msgspec.Struct, kw_only=True):
    """What the next start of a run must know; kept in the run folder."""

    id: str
    last: int = -1
    """Step."""


class WandbTracker:
    """One wandb run across restarts of a run: its id is kept in the run folder, and no step is logged twice.

    What wandb has cannot be taken back: steps that are repeated after a restart from a checkpoint are left
    out until there is a new one. `metrics.jsonl` has the repeated ones.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        """Log in, which may take long.

        Args:
            config: Of the run; wandb shows it. It contains no keys.
            run_dir: Where wandb keeps its files, in `wandb/`, and we the id.
        """
        import wandb

        self._path = run_dir / "wandb.json"
        self._kept = (
            msgspec.json.decode(self._path.read_bytes(), type=_Kept)
            if self._path.exists()
            else _Kept(id=uuid4().hex[:8])
        )
        self._run: Any = wandb.init(
            project=config.metrics.wandb_project,
            name=config.run.name,
            id=self._kept.id,
            resume="allow",
            dir=str(run_dir),
            config=to_builtins(config),
            settings=wandb.Settings(
                console="off",  # the terminal is ours
                quiet=True,
                disable_git=True,  # nor does it read the user's working tree
                disable_code=True,
            ),
        )
        self._keep()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Implements `Tracker.log`."""
        if step > self._kept.last:
            self._run.log(dict(metrics), step=step)
            self._kept.last = step
            self._keep()

    def close(self) -> None:
        """Implements `Tracker.close`."""
        self._run.finish()

    def _keep(self) -> None:
        replace_file(self._path, msgspec.json.encode(self._kept))
