"""What trackers of services have in common: one run of the service, continued over restarts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import msgspec

from async_rl.runtime.files import replace_file


class _Kept(msgspec.Struct, kw_only=True):
    """What the next start of a run must know; kept in the run folder."""

    id: str
    last: int = -1
    """Step."""


class ServiceTracker(ABC):
    """One run of a service across restarts: its id is kept in the run folder, and no step is logged twice.

    What a service has cannot be taken back: steps that are repeated after a restart from a checkpoint are
    left out until there is a new one. `metrics.jsonl` has the repeated ones.
    """

    def __init__(self, path: Path) -> None:
        """Look for the run of earlier starts.

        Args:
            path: The file that keeps the id and the last step.
        """
        self._path = path
        self._kept = msgspec.json.decode(path.read_bytes(), type=_Kept) if path.exists() else None

    @property
    def run_id(self) -> str | None:
        """The id of the service's run; None before `keep_run`."""
        return None if self._kept is None else self._kept.id

    def keep_run(self, run_id: str) -> None:
        """Keep the id of the run for later starts."""
        self._kept = self._kept or _Kept(id=run_id)
        self._write()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Implements `Tracker.log`."""
        assert self._kept is not None, "there is a run"
        if step > self._kept.last:
            self.send_step(step, dict(metrics))
            self._kept.last = step
            self._write()

    @abstractmethod
    def send_step(self, step: int, metrics: dict[str, float]) -> None:
        """Send the figures of a step that is greater than all before it."""

    @abstractmethod
    def close(self) -> None:
        """Implements `Tracker.close`."""

    def _write(self) -> None:
        replace_file(self._path, msgspec.json.encode(self._kept))
