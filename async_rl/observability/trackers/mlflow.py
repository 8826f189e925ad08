"""MLflow, whose client is imported when a run asks for it."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, Final

from async_rl.config import Config, changed_fields
from async_rl.observability.trackers.service_tracker import ServiceTracker

_MOST_METRICS: Final = 1000
_MOST_PARAMS: Final = 100
"""The most of a request, by MLflow's REST API."""

_MOST_CHARACTERS: Final = 6000
"""The longest value of a parameter, by MLflow's REST API."""


class MlflowTracker(ServiceTracker):
    """One run of the experiment `metrics.project`, where MLFLOW_TRACKING_URI says."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        """Create or continue the run, which may take long.

        Args:
            config: Of the run; MLflow shows what differs from the defaults. It contains no keys.
            run_dir: Where we keep the id.
        """
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        super().__init__(run_dir / "mlflow.json")
        self._metric, self._client = Metric, MlflowClient()
        if self.run_id is not None:
            self._id = self.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        project = config.metrics.project
        found = self._client.get_experiment_by_name(project)
        experiment = self._client.create_experiment(project) if found is None else found.experiment_id
        self._id = self._client.create_run(experiment, run_name=config.run.name).info.run_id
        self.keep_run(self._id)
        settings = changed_fields(config).items()
        params = [Param(_allowed(key), str(value)[:_MOST_CHARACTERS]) for key, value in settings]
        for begin in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + _MOST_PARAMS])

    def send_step(self, step: int, metrics: dict[str, float]) -> None:
        """Implements `ServiceTracker.send_step`."""
        now_ms = int(time.time() * 1000)
        sent: list[Any] = [
            self._metric(_allowed(name), value, now_ms, step) for name, value in metrics.items()
        ]
        for begin in range(0, len(sent), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=sent[begin : begin + _MOST_METRICS])

    def close(self) -> None:
        """Implements `Tracker.close`."""
        self._client.set_terminated(self._id)


def _allowed(name: str) -> str:
    """Return a name without characters that MLflow refuses: `pass@8` becomes `pass_8`."""
    return re.sub(r"[^\w\-. /]", "_", name)
