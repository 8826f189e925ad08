"""Settings of evaluation: when it runs, on which engines, and how answers are scored."""

from __future__ import annotations

from typing import Annotated, Literal

from async_rl.config.base import Meta, NonNegativeInt, PositiveFloat, PositiveInt, Strict


class EvaluationConfig(Strict, frozen=True, kw_only=True):
    """Evaluation of `data.validation` during training, at a pinned weight version.

    See docs/guide/evaluation-and-sft.md.
    """

    every: NonNegativeInt = 0
    """Weight versions between evaluations; 0 disables them."""
    at_start: bool = False
    """Also evaluate the version that a new run starts from."""
    engines: PositiveInt | Literal["shared"] = "shared"
    """Engines that answer: `shared` borrows one of the rollouts' engines for the duration of an evaluation; a
    number reserves this many of the run's engines, the last ones, for evaluation."""
    samples: PositiveInt = 1
    """Answers per task; pass@k is estimated for k = 1, 2, 4, … and for all."""
    pass_reward: float = 1.0
    """An answer passes when its reward is at least this."""
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """Sampling temperature, 0 is greedy; null takes that of rollouts."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Nucleus sampling; null takes that of rollouts."""
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """Top-k sampling, -1 disables it; null takes that of rollouts."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of tokens of one turn; null takes that of rollouts."""
    agent_loop: str | None = None
    """Dotted path, or a name of `rollout.agent_loops` (for one with arguments), for examples that name none;
    null takes that of rollouts."""
    max_concurrent: PositiveInt = 64
    """Maximum number of concurrent answers."""
    timeout_s: PositiveFloat = 1800.0
    """Maximum duration of an evaluation, seconds; a longer one is cancelled, and its version marked as
    missing."""

    @property
    def enabled(self) -> bool:
        """Whether the run evaluates at all."""
        return bool(self.every) or self.at_start
