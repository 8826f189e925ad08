"""Compares log-probs of engines and trainer once, on the first tokens that both computed with equal weights.

Engines that serve another model than the trainer trains, because weights are missing or a field of
`config.json` is ignored, differ by whole nats. Nothing that is trained from them is worth anything.
"""

from __future__ import annotations

from typing import Final

from async_rl.config import Config, SimulatedEngines
from async_rl.errors import EngineMismatch
from async_rl.trainer_protocol import StepResult

_MIN_TOKENS: Final = 64
"""A mean over fewer says little."""


class EngineComparison:
    """Adds up the differences of the first tokens of an incarnation, until there are enough."""

    def __init__(self, config: Config) -> None:
        """Compare unless `trainer.max_mismatch_nats` is null; log-probs of simulated engines are made up."""
        is_simulated = isinstance(config.engine, SimulatedEngines)
        self._limit = None if is_simulated else config.trainer.max_mismatch_nats
        self._num_tokens, self._sum = 0, 0.0

    def observe_step(self, result: StepResult) -> None:
        """Add the tokens of a step that were sampled with the weights which the step began with.

        Raises:
            EngineMismatch: The mean difference exceeds `trainer.max_mismatch_nats`.
        """
        num_tokens = int(result.metrics.get("tokens_lag0", 0))
        if self._limit is None or self._num_tokens >= _MIN_TOKENS or not num_tokens:
            return
        self._num_tokens += num_tokens
        self._sum += num_tokens * result.metrics["lag0_log_prob_abs_diff"]
        mean = self._sum / self._num_tokens
        if self._num_tokens >= _MIN_TOKENS and mean > self._limit:
            raise EngineMismatch(
                f"step {result.step}: engines and trainer differ by {mean:.3g} nats per token with the same "
                f"weights, expected at most trainer.max_mismatch_nats = {self._limit:g}: the engines compute "
                "another model. Look into their logs for weights that are missing, and compare the model's "
                "config.json with what SGLang's model class reads"
            )
