"""Settings of evaluation: when the validation sets are answered, by which engines, how it is counted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from async_rl.config.base import Meta, PositiveInt, Strict


class EvaluationConfig(Strict, frozen=True, kw_only=True):
    """Evaluation of `data.validation` during training, at a pinned weight version.

    See docs/guide/evaluation-and-sft.md.
    """

    every: Annotated[
        int, Meta(ge=0, description="Weight versions between evaluations; 0 evaluates none of them.")
    ] = 0
    at_start: Annotated[
        bool, Meta(description="Evaluate the version that a new run starts from as well.")
    ] = False
    engines: Annotated[
        Annotated[int, Meta(ge=1)] | Literal["shared"],
        Meta(
            description=(
                "Who answers: `shared` borrows one engine of the rollouts for the time of an evaluation, a "
                "number keeps so many of the run's engines, the last ones, for evaluation alone."
            )
        ),
    ] = "shared"
    samples: Annotated[int, Meta(ge=1, description="Answers of a task.")] = 1
    pass_at: Annotated[
        tuple[PositiveInt, ...],
        Meta(description="For which k pass@k is estimated; none above `samples`."),
    ] = (1,)
    pass_reward: Annotated[float, Meta(description="An answer passes when its reward is at least this.")] = (
        1.0
    )
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None,
        Meta(description="Sampling temperature, 0 is greedy; null takes the rollouts'."),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="Nucleus sampling; null takes the rollouts'."),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Top-k sampling, -1 is off; null takes the rollouts'."),
    ] = None
    max_new_tokens: Annotated[
        PositiveInt | None,
        Meta(description="Most tokens of one turn; null takes the rollouts'."),
    ] = None
    agent_loop: Annotated[
        str | None,
        Meta(
            description=(
                "Dotted path, or a name of `rollout.agent_loops`, for rows that name none; null takes the "
                "rollouts'."
            )
        ),
    ] = None
    agent_loop_args: Annotated[
        dict[str, Any], Meta(description="Keyword arguments of its constructor, where it is a dotted path.")
    ] = {}
    max_concurrent: Annotated[int, Meta(ge=1, description="Answers that are made at a time.")] = 64
    timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "Longest evaluation, seconds; one that takes longer is given up, and its version marked as "
                "missing."
            ),
        ),
    ] = 1800.0
    keep_answers: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Evaluations of which the answers are kept for `async-rl inspect`, the newest ones; 0 keeps "
                "none."
            ),
        ),
    ] = 5

    @property
    def enabled(self) -> bool:
        """Whether there is any."""
        return bool(self.every) or self.at_start
