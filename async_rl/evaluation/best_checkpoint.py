"""Decides which checkpoint has the best evaluation, and tells those who remove checkpoints.

```
 evaluations.jsonl, folder of checkpoints ─► best.json ─► the trainer, `async-rl export --best`
```

The file is derived from the records whenever something changes, so a resumed run needs no other state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from async_rl.observability.evaluation_record import EvaluationRecord, best_evaluation
from async_rl.runtime.files import replace_file
from async_rl.trainer_protocol import BEST_FILE, BestCheckpoint


class BestCheckpointFile:
    """Writes `best.json` for one incarnation of a run; nothing without `trainer.keep_best`."""

    def __init__(
        self, metric: str | None, directory: Path, evaluations: Callable[[], Sequence[EvaluationRecord]]
    ) -> None:
        """Write nothing yet.

        Args:
            metric: As `trainer.keep_best`.
            directory: The folder of checkpoints.
            evaluations: Returns the records of the versions that the run has not undone.
        """
        self.metric = metric
        self._directory = directory
        self._evaluations = evaluations
        self.evaluating: int | None = None
        """The version that is being evaluated."""

    def write(self) -> None:
        """Write which checkpoint is the best now, and which may become it; this blocks."""
        if self.metric is None or not self._directory.is_dir():
            return
        names = (path.name.removeprefix("step_") for path in self._directory.glob("step_*"))
        steps = {int(name) for name in names if name.isdigit()}
        best = best_evaluation(
            (record for record in self._evaluations() if record.weight_version in steps), self.metric
        )
        found = BestCheckpoint(
            metric=self.metric,
            step=None if best is None else best[0].weight_version,
            value=None if best is None else best[1],
            evaluating=self.evaluating,
        )
        replace_file(self._directory / BEST_FILE, msgspec.json.encode(found) + b"\n", durable=True)
