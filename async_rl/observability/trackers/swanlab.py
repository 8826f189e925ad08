"""SwanLab, whose client is imported when a run asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

from async_rl.config import Config, to_builtins
from async_rl.observability.trackers.service_tracker import ServiceTracker


class SwanlabTracker(ServiceTracker):
    """One SwanLab run, in the mode that SWANLAB_MODE says."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        """Log in, which may take long.

        Args:
            config: Of the run; SwanLab shows it. It contains no keys.
            run_dir: Where SwanLab keeps its files, in `swanlab/`, and we the id.
        """
        import swanlab

        super().__init__(run_dir / "swanlab.json")
        run_id = self.run_id or uuid4().hex[:21]  # the longest that SwanLab takes
        folder = run_dir / "swanlab"
        folder.mkdir(exist_ok=True)
        settings = swanlab.Settings
        self._run: Any = swanlab.init(
            project=config.metrics.project,
            name=config.run.name,
            id=run_id,
            resume="allow",
            log_dir=str(folder),
            config=to_builtins(config),
            settings=settings(
                interactive=False,  # the terminal is ours
                terminal=settings.Terminal(proxy_type="none"),
                # Nor does it read the user's working tree, packages and command line.
                probe=settings.Probe(git=False, requirements=False, runtime=False, monitor=False),
            ),
        )
        self.keep_run(run_id)

    def send_step(self, step: int, metrics: dict[str, float]) -> None:
        """Implements `ServiceTracker.send_step`."""
        self._run.log(metrics, step=step)

    def close(self) -> None:
        """Implements `Tracker.close`."""
        self._run.finish()
