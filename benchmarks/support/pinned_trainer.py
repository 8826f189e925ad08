"""A trainer on a core of its own."""

from __future__ import annotations

import os

from async_rl.trainer_protocol import TrainerState
from trainer.worker import TrainerWorker


class PinnedTrainer(TrainerWorker):
    """A single rank that runs on the core above those that the run was started on."""

    def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """Move all threads of this process, then do as `TrainerWorker.setup`."""
        core = max(os.sched_getaffinity(0)) + 1
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {core})
        return super().setup(checkpoint_dir)
