"""The teacher of on-policy distillation: scores the tokens of each trajectory that the policy has finished.

```
 finished trajectory ──► one call of a teacher's engine, which prefills it ──► log-prob of each sampled token
                            ▲ the engine failed: the next lease                    a column of its frame
                            └─────────────────────
```

The call samples nothing and needs no chat template: teacher and policy have the same tokens. Scores are
those of the finished trajectory, so an interruption or a restart before it leaves nothing to restore.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from async_rl.engine_protocol import GenerateRequest, SamplingParams
from async_rl.rollout.model_calls import call_model
from async_rl.rollout.session.context import SessionContext
from async_rl.runtime.supervision import run_together
from async_rl.runtime.waits import waiting
from async_rl.types import Float32Array, Sampled, Trajectory


class Teacher:
    """Scores trajectories."""

    def __init__(self, name: str, context: SessionContext) -> None:
        """Score with the engines of a model, by its name in `models`."""
        self._name = name
        self._context = context

    async def score_trajectories(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Return trajectories with their `teacher_log_probs`; those without a sampled token as they are.

        Raises:
            RolloutError: The teacher refuses the tokens of one.
        """
        return await run_together(
            (f"score {each.trajectory_id}", self._score_trajectory(each)) for each in trajectories
        )

    async def _score_trajectory(self, trajectory: Trajectory) -> Trajectory:
        segments = trajectory.segments
        lengths = [len(segment.token_ids) for segment in segments]
        sampled = [isinstance(segment, Sampled) for segment in segments]
        own = np.repeat(
            [is_own and i >= trajectory.num_inherited for i, is_own in enumerate(sampled)], lengths
        )
        masked = [isinstance(segment, Sampled) and segment.mask is not None for segment in segments]
        if not own.any():
            return trajectory
        start, end = int(own.argmax()), len(own) - int(own[::-1].argmax())
        began_s = self._context.clock()
        scores = np.zeros(len(own), np.float32)
        with waiting("teacher", self._name):
            scores[start:end] = await self._score_tokens(trajectory.token_ids[:end], start)
        self._context.metrics.model_call_seconds.labels(self._name).observe(self._context.clock() - began_s)
        # Sampled before the run had a teacher: the policy's log-probs are of the kept tokens only.
        scores[np.repeat(masked, lengths)] = np.nan
        scores[~own] = 0
        return msgspec.structs.replace(trajectory, teacher_log_probs=scores)

    async def _score_tokens(self, token_ids: np.ndarray, start: int) -> Float32Array:
        """Ask engines until one answers: those that fail are quarantined, and leases wait for the others."""
        request = GenerateRequest(
            request_id="",
            input_ids=token_ids,
            max_new_tokens=0,
            sampling=SamplingParams(),
            score_from=start,
        )
        while True:
            _, finish = await call_model(self._context, self._name, request)
            if finish is not None and finish.scores is not None:
                return finish.scores
