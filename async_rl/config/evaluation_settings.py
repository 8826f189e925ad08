"""Settings of evaluation: when it runs, on which engines, and how answers are scored."""

from __future__ import annotations

from typing import Annotated, Literal

from async_rl.config.base import Meta, PositiveInt, Strict


class EvaluationConfig(Strict, frozen=True, kw_only=True):
    """Evaluation of `data.validation` during training, at a pinned weight version.

    See docs/guide/evaluation-and-sft.md.
    """

    every: Annotated[int, Meta(ge=0, description="Weight versions between evaluations; 0 disables them.")] = 0
    at_start: Annotated[bool, Meta(description="Also evaluate the version that a new run starts from.")] = (
        False
    )
    engines: Annotated[
        Annotated[int, Meta(ge=1)] | Literal["shared"],
        Meta(
            description=(
                "Engines that answer: `shared` borrows one of the rollouts' engines for the "
                "duration of an evaluation; a number reserves this many of the run's engines, the "
                "last ones, for evaluation."
            )
        ),
    ] = "shared"
    samples: Annotated[
        int, Meta(ge=1, description="Answers per task; pass@k is estimated for k = 1, 2, 4, … and for all.")
    ] = 1
    pass_reward: Annotated[float, Meta(description="An answer passes when its reward is at least this.")] = (
        1.0
    )
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None,
        Meta(description="Sampling temperature, 0 is greedy; null takes that of rollouts."),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="Nucleus sampling; null takes that of rollouts."),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Top-k sampling, -1 disables it; null takes that of rollouts."),
    ] = None
    max_new_tokens: Annotated[
        PositiveInt | None,
        Meta(description="Maximum number of tokens of one turn; null takes that of rollouts."),
    ] = None
    agent_loop: Annotated[
        str | None,
        Meta(
            description=(
                "Dotted path, or a name of `rollout.agent_loops` (for one with arguments), for examples "
                "that name none; null takes that of rollouts."
            )
        ),
    ] = None
    max_concurrent: Annotated[int, Meta(ge=1, description="Maximum number of concurrent answers.")] = 64
    timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "Maximum duration of an evaluation, seconds; a longer one is cancelled, and its "
                "version marked as missing."
            ),
        ),
    ] = 1800.0
    keep_answers: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Number of newest evaluations whose answers are kept for `async-rl inspect`; 0 keeps none."
            ),
        ),
    ] = 5

    @property
    def enabled(self) -> bool:
        """Whether the run evaluates at all."""
        return bool(self.every) or self.at_start
