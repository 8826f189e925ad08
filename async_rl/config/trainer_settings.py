"""Settings of the trainer: layout, loss, optimizer, checkpoints; docs/design/trainer.md explains the loss."""

from __future__ import annotations

from typing import Annotated, Literal

from async_rl.config.base import Meta, Strict


class LayoutConfig(Strict, frozen=True, kw_only=True):
    """Parallel layout of the trainer; data parallelism is what remains of `trainer.num_ranks`."""

    tp: Annotated[
        int, Meta(ge=1, description="Tensor parallel (with sequence parallelism when above 1).")
    ] = 1
    pp: Annotated[int, Meta(ge=1, description="Pipeline parallel.")] = 1
    vpp: Annotated[
        int, Meta(ge=1, description="Chunks of layers a pipeline stage holds (interleaved schedule).")
    ] = 1
    cp: Annotated[int, Meta(ge=1, description="Context parallel.")] = 1
    ep: Annotated[int, Meta(ge=1, description="Expert parallel.")] = 1
    etp: Annotated[int, Meta(ge=1, description="Expert tensor parallel.")] = 1
    first_stage_layers: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description=(
                "Layers of the first pipeline stage, which also holds the embedding; null: stages have "
                "equally many."
            )
        ),
    ] = None
    last_stage_layers: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Layers of the last pipeline stage, which also holds the output layer; likewise."),
    ] = None


class ImportanceConfig(Strict, frozen=True, kw_only=True):
    """Importance weights exp(old - rollout) of the proximal over the policy that sampled."""

    level: Annotated[
        Literal["off", "token", "sequence", "geometric"],
        Meta(
            description=(
                "Whose ratio: each `token`'s, a whole answer's (`sequence`: the product of its tokens', "
                "`geometric`: their geometric mean), or `off`."
            )
        ),
    ] = "token"
    beyond: Annotated[
        Literal["truncate", "mask"],
        Meta(
            description=(
                "What is done with a ratio outside the bounds: `truncate` sets it to the bound (TIS), `mask` "
                "leaves its tokens out (IcePop by token, MIS by sequence)."
            )
        ),
    ] = "truncate"
    low: Annotated[float, Meta(ge=0, description="Lower bound of the ratio.")] = 0.0
    high: Annotated[float, Meta(gt=0, description="Upper bound of the ratio.")] = 2.0


class RejectConfig(Strict, frozen=True, kw_only=True):
    """Whole answers that are left out because they are too far from the policy that is trained."""

    geometric_low: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Leave an answer out when the geometric mean of its ratios is below this."),
    ] = None
    geometric_high: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Leave an answer out when that mean is above this."),
    ] = None
    token_below: Annotated[
        Annotated[float, Meta(gt=0, lt=1)] | None,
        Meta(description="Leave an answer out when the ratio of any of its tokens is below this."),
    ] = None


class KLConfig(Strict, frozen=True, kw_only=True):
    """A penalty on the distance from a reference: the weights of `model.path`."""

    coefficient: Annotated[
        float,
        Meta(
            ge=0, description="Weight of the penalty; 0 has no reference, which costs a forward pass a batch."
        ),
    ] = 0.0
    estimator: Annotated[
        Literal["k1", "k2", "k3"],
        Meta(description="Schulman's estimators: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, d = log(p/ref)."),
    ] = "k3"
    where: Annotated[
        Literal["loss", "reward"],
        Meta(description="Added to the loss of each token, or taken from the reward of the trajectory."),
    ] = "loss"


class LossConfig(Strict, frozen=True, kw_only=True):
    """Advantages, the policy objective, and what corrects for older weights."""

    advantages: Annotated[
        Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline"],
        Meta(
            description=(
                "Baseline and scale of rewards: `grpo` the group's mean and deviation, `dr_grpo` its mean "
                "alone, `rloo` the siblings' mean, `reinforce++` the batch's mean and deviation, "
                "`reinforce++_baseline` the group's mean and the batch's deviation."
            )
        ),
    ] = "grpo"
    overlong_buffer_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description=(
                "The reward falls from 0 to -1 over the last so many tokens before "
                "`rollout.max_new_tokens` (DAPO), by the longest turn; null leaves it as it is."
            ),
        ),
    ] = None
    objective: Annotated[
        Literal["ppo", "gspo", "cispo"],
        Meta(
            description=(
                "`ppo` clips each token's ratio, `gspo` the whole answer's, `cispo` clips it as a weight and "
                "leaves every token its gradient."
            )
        ),
    ] = "ppo"
    clip_low: Annotated[
        float, Meta(gt=0, le=1, description="Lower clip: the ratio is kept above 1 - this.")
    ] = 0.2
    clip_high: Annotated[float, Meta(gt=0, description="Upper clip: the ratio is kept below 1 + this.")] = 0.2
    dual_clip: Annotated[
        Annotated[float, Meta(gt=1)] | None,
        Meta(description="`ppo`: largest ratio that a token with a negative advantage counts with."),
    ] = None
    aggregate: Annotated[
        Literal["token_mean", "sequence_mean", "constant"],
        Meta(
            description=(
                "All tokens of a batch count alike, all answers do, or each token counts one over the "
                "number of answers times `rollout.max_new_tokens` (Dr. GRPO)."
            )
        ),
    ] = "token_mean"
    entropy_bonus: Annotated[
        float, Meta(ge=0, description="Weight of the entropy of each token's distribution in the loss.")
    ] = 0.0
    old_log_probs: Annotated[
        Literal["recompute", "rollout"],
        Meta(
            description=(
                "The proximal policy: `recompute` takes the trainer's log-probs at the start of the "
                "update (decoupled PPO), `rollout` the engine's."
            )
        ),
    ] = "recompute"
    importance: ImportanceConfig = ImportanceConfig()
    reject: RejectConfig = RejectConfig()
    kl: KLConfig = KLConfig()
    uncorrected: Annotated[
        bool,
        Meta(
            description=(
                "Train on data of older weights without any correction for it (`old_log_probs: recompute`, "
                "`importance.level: off`); refused unless this is set."
            )
        ),
    ] = False


class OptimizerConfig(Strict, frozen=True, kw_only=True):
    """AdamW as Megatron runs it."""

    lr: Annotated[float, Meta(gt=0, description="Learning rate.")] = 1e-6
    warmup_steps: Annotated[int, Meta(ge=0, description="Steps of linear warm-up.")] = 0
    weight_decay: Annotated[float, Meta(ge=0, description="Weight decay.")] = 0.0
    beta1: Annotated[float, Meta(ge=0, lt=1, description="First moment's decay.")] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1, description="Second moment's decay.")] = 0.99
    eps: Annotated[float, Meta(gt=0, description="Denominator's floor.")] = 1e-8
    clip_grad: Annotated[float, Meta(gt=0, description="Gradient norm is clipped to this.")] = 1.0
    skip_grad_norm_above: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="An update whose gradient norm is above this is skipped; null: none is."),
    ] = None


class TrainerConfig(Strict, frozen=True, kw_only=True):
    """The trainer."""

    worker: Annotated[str, Meta(description="Dotted path of the worker class, one instance a rank.")] = (
        "trainer.worker:TrainerWorker"
    )
    num_ranks: Annotated[int, Meta(ge=1, description="Processes of the trainer.")] = 1
    device: Annotated[
        Literal["auto", "cuda", "cpu"], Meta(description="`auto` takes the GPU where torch sees one.")
    ] = "auto"
    layout: LayoutConfig = LayoutConfig()
    groups_per_batch: Annotated[int, Meta(ge=1, description="Groups consumed by one step.")] = 8
    micro_batch_tokens: Annotated[
        int,
        Meta(ge=1, description="Token budget of one packed micro-batch (a longer trajectory stands alone)."),
    ] = 16384
    updates_per_batch: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Optimizer steps of one batch: it is cut into so many parts by whole groups, and the "
                "proximal policy stays that of its start."
            ),
        ),
    ] = 1
    epochs_per_batch: Annotated[
        int, Meta(ge=1, description="How often a batch is gone through; `updates_per_batch` steps each time.")
    ] = 1
    max_skipped_updates: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Updates in a row that may be skipped because the loss or the gradient norm is not finite or "
                "a spike; one more is an error."
            ),
        ),
    ] = 3
    recompute: Annotated[
        Literal["none", "full", "selective"], Meta(description="Activation recomputation.")
    ] = "none"
    overlap_grad_reduce: Annotated[
        bool,
        Meta(
            description=(
                "Sum gradients over data-parallel ranks while the backward pass goes on; for several GPUs."
            )
        ),
    ] = False
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint_every: Annotated[
        int, Meta(ge=0, description="Steps between checkpoints; 0 writes one at the end only.")
    ] = 20
    keep_checkpoints: Annotated[int, Meta(ge=1, description="Newest checkpoints kept.")] = 2
    keep_every: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Checkpoints of steps that are multiples of this are kept for ever; null: none is."),
    ] = None
    max_failed_checkpoints: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Checkpoints in a row that may fail to be written while training goes on; one more ends the "
                "run."
            ),
        ),
    ] = 3
    start_timeout_s: Annotated[float, Meta(gt=0, description="Longest start of the trainer, seconds.")] = (
        600.0
    )
    step_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Longest trainer step, seconds; ranks that take longer count as hung."),
    ] = 3600.0
    max_restarts: Annotated[
        int,
        Meta(ge=0, description="Restarts of a trainer that died or hung before the run ends."),
    ] = 3
