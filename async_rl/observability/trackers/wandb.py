"""Weights & Biases, whose client is imported when a run asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

from async_rl.config import Config, to_builtins
from async_rl.observability.trackers.service_tracker import ServiceTracker


class WandbTracker(ServiceTracker):
    """One wandb run."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        """Log in, which may take long.

        Args:
            config: Of the run; wandb shows it. It contains no keys.
            run_dir: Where wandb keeps its files, in `wandb/`, and we the id.
        """
        import wandb

        super().__init__(run_dir / "wandb.json")
        run_id = self.run_id or uuid4().hex[:8]
        self._run: Any = wandb.init(
            project=config.metrics.wandb_project,
            name=config.run.name,
            id=run_id,
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
        self.keep_run(run_id)

    def send_step(self, step: int, metrics: dict[str, float]) -> None:
        """Implements `ServiceTracker.send_step`."""
        self._run.log(metrics, step=step)

    def close(self) -> None:
        """Implements `Tracker.close`."""
        self._run.finish()
