"""Trackio, whose client is imported when a run asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

from async_rl.config import Config, to_builtins
from async_rl.observability.trackers.service_tracker import ServiceTracker


class TrackioTracker(ServiceTracker):
    """One Trackio run, on this machine or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        """Create or continue the run, which may take long.

        Args:
            config: Of the run; Trackio shows it. It contains no keys.
            run_dir: Where we keep the id.
        """
        import trackio

        super().__init__(run_dir / "trackio.json")
        # Trackio continues the run of a name, and runs of other folders may have the same.
        name = self.run_id or f"{config.run.name}-{uuid4().hex[:8]}"
        self._run: Any = trackio.init(
            project=config.metrics.project,
            name=name,
            resume="allow",
            config=to_builtins(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.keep_run(name)

    def send_step(self, step: int, metrics: dict[str, float]) -> None:
        """Implements `ServiceTracker.send_step`."""
        self._run.log(metrics, step=step)

    def close(self) -> None:
        """Implements `Tracker.close`."""
        self._run.finish()
