"""Settings of the trainer: layout, loss, optimizer, checkpoints; docs/design/trainer.md explains the loss."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from async_rl.config.base import Meta, Strict

ADVANTAGES: Final = ("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "gae")
"""The estimators of `trainer.losses.advantages`."""

OBJECTIVES: Final = ("ppo", "gspo", "cispo")
"""The objectives of `trainer.losses.objectives`."""


class LayoutConfig(Strict, frozen=True, kw_only=True):
    """Parallel layout of the trainer; data parallelism is what remains of `trainer.num_ranks`."""

    tp: Annotated[
        int, Meta(ge=1, description="Tensor parallel (with sequence parallelism when above 1).")
    ] = 1
    pp: Annotated[int, Meta(ge=1, description="Pipeline parallel.")] = 1
    vpp: Annotated[
        int, Meta(ge=1, description="Chunks of layers per pipeline stage (interleaved schedule).")
    ] = 1
    cp: Annotated[int, Meta(ge=1, description="Context parallel.")] = 1
    ep: Annotated[int, Meta(ge=1, description="Expert parallel.")] = 1
    etp: Annotated[int, Meta(ge=1, description="Expert tensor parallel.")] = 1
    first_stage_layers: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description=(
                "Layers of the first pipeline stage, which also holds the embedding; null gives "
                "all stages the same number."
            )
        ),
    ] = None
    last_stage_layers: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description=(
                "Layers of the last pipeline stage, which also holds the output layer; null as above."
            )
        ),
    ] = None


class ImportanceConfig(Strict, frozen=True, kw_only=True):
    """Importance weights exp(old - rollout) of the proximal policy over the policy that sampled."""

    level: Annotated[
        Literal["off", "token", "sequence", "geometric"],
        Meta(
            description=(
                "Level of the ratio: of each `token`, of a whole answer (`sequence`: the product "
                "of its tokens' ratios, `geometric`: their geometric mean), or `off`."
            )
        ),
    ] = "token"
    beyond: Annotated[
        Literal["truncate", "mask"],
        Meta(
            description=(
                "What happens to a ratio outside the bounds: `truncate` sets it to the bound "
                "(TIS), `mask` leaves its tokens out (IcePop by token, MIS by sequence)."
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
    """A penalty on the distance from a reference policy: the weights of `model.path`."""

    coefficient: Annotated[
        float,
        Meta(
            ge=0,
            description=(
                "Weight of the penalty; 0 loads no reference, which otherwise costs a forward pass per batch."
            ),
        ),
    ] = 0.0
    estimator: Annotated[
        Literal["k1", "k2", "k3"],
        Meta(description="Schulman's estimators: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, d = log(p/ref)."),
    ] = "k3"
    where: Annotated[
        Literal["loss", "reward"],
        Meta(
            description=(
                "Added to the loss of each token, or subtracted from the reward: of the trajectory, or under "
                "`reinforce++` of each token, which is charged for itself and later ones. Not with `grpo`; "
                "its coefficient keeps its meaning with `dr_grpo` and `rloo` only."
            )
        ),
    ] = "loss"


class TeacherConfig(Strict, frozen=True, kw_only=True):
    """On-policy distillation: the reverse KL to a teacher, at the tokens that the policy sampled."""

    model: Annotated[
        str | None, Meta(description="Name of the teacher in `models`; null distills from none.")
    ] = None
    coefficient: Annotated[
        float, Meta(ge=0, description="Weight of the reverse KL; with 0 it is only measured.")
    ] = 1.0
    where: Annotated[
        Literal["reward", "loss"],
        Meta(
            description=(
                "`reward`: the teacher's log-prob minus that of the policy at the batch's start is added to "
                "the token's advantage; `loss`: half the square of the difference to the current policy, "
                "whose gradient is that of the reverse KL, is added to its loss."
            )
        ),
    ] = "reward"
    only: Annotated[
        bool, Meta(description="Train on the teacher alone; rewards are measured, and have no effect.")
    ] = False


class LossConfig(Strict, frozen=True, kw_only=True):
    """Advantages, the policy objective, and corrections for data of older weights."""

    advantages: Annotated[
        str,
        Meta(
            description=(
                "Baseline and scale of rewards: `grpo` takes the group's mean and deviation, "
                "`dr_grpo` its mean only, `rloo` the siblings' mean, `reinforce++` the batch's "
                "mean and deviation, `reinforce++_baseline` the group's mean and the batch's "
                "deviation, `gae` the values of `trainer.critic`; or the dotted path of a function of "
                "your own, `module:function`."
            )
        ),
    ] = "grpo"
    advantages_args: Annotated[
        dict[str, Any],
        Meta(description="Keyword arguments of the function, if `advantages` is a dotted path."),
    ] = {}
    turn_discount: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(
            description=(
                "Each turn has a return of its own: its reward (`Session.reward_turn`) and those of later "
                "turns, each discounted by this; the reward of the conversation is of its last turn. null "
                "gives all turns of a conversation the sum."
            ),
        ),
    ] = None
    overlong_buffer_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description=(
                "The reward falls from 0 to -1 over this many tokens before "
                "`rollout.max_new_tokens` (DAPO), by the longest turn; null disables it."
            ),
        ),
    ] = None
    objective: Annotated[
        str,
        Meta(
            description=(
                "`ppo` clips each token's ratio, `gspo` the whole answer's; `cispo` clips the "
                "ratio as a weight, so that every token keeps its gradient; or the dotted path of a "
                "function of your own, `module:function`."
            )
        ),
    ] = "ppo"
    objective_args: Annotated[
        dict[str, Any],
        Meta(description="Keyword arguments of the function, if `objective` is a dotted path."),
    ] = {}
    clip_low: Annotated[
        float, Meta(gt=0, le=1, description="Lower clip: the minimum ratio is 1 minus this.")
    ] = 0.2
    clip_high: Annotated[float, Meta(gt=0, description="Upper clip: the maximum ratio is 1 plus this.")] = 0.2
    dual_clip: Annotated[
        Annotated[float, Meta(gt=1)] | None,
        Meta(description="For `ppo`: maximum ratio with which a token with a negative advantage counts."),
    ] = None
    aggregate: Annotated[
        Literal["token_mean", "sequence_mean", "constant"],
        Meta(
            description=(
                "`token_mean` weights all tokens of a batch equally, `sequence_mean` all attempts; "
                "`constant` weights each token by one over the number of attempts times "
                "`rollout.max_new_tokens` (Dr. GRPO)."
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
    check_old_log_probs_every: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "With one update per batch, recomputed log-probs are those of the update's own forward pass. "
                "Every this many steps a pass of their own checks that; 0 never does. Several updates, "
                "`routing.replay: r2`, `reject` and a KL penalty in the reward need that pass in each step."
            ),
        ),
    ] = 50
    importance: ImportanceConfig = ImportanceConfig()
    reject: RejectConfig = RejectConfig()
    kl: KLConfig = KLConfig()
    teacher: TeacherConfig = TeacherConfig()
    uncorrected: Annotated[
        bool,
        Meta(
            description=(
                "Train on data of older weights without any correction (`old_log_probs: "
                "recompute`, `importance.level: off`); refused unless this is set."
            )
        ),
    ] = False


class OptimizerConfig(Strict, frozen=True, kw_only=True):
    """AdamW as implemented by Megatron."""

    lr: Annotated[float, Meta(gt=0, description="Learning rate.")] = 1e-6
    warmup_steps: Annotated[int, Meta(ge=0, description="Steps of linear warm-up.")] = 0
    weight_decay: Annotated[float, Meta(ge=0, description="Weight decay.")] = 0.0
    beta2: Annotated[float, Meta(ge=0, lt=1, description="Decay of the second moment.")] = 0.99
    clip_grad: Annotated[float, Meta(gt=0, description="Maximum gradient norm.")] = 1.0
    skip_grad_norm_above: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="An update whose gradient norm is above this is skipped; null skips none."),
    ] = None


class CriticConfig(Strict, frozen=True, kw_only=True):
    """A value model for `trainer.loss.advantages: gae`: a copy of the policy's, with one output.

    It has the policy's layout and trains on the same micro-batches, with an optimizer of its own.
    """

    gamma: Annotated[
        float, Meta(ge=0, le=1, description="Discount of rewards and values per trained token.")
    ] = 1.0
    gae_lambda: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description=(
                "1 compares the sum of later rewards with the value; below it, values of later tokens "
                "replace rewards, with less variance and the critic's bias."
            ),
        ),
    ] = 1.0
    lr: Annotated[
        float,
        Meta(gt=0, description="Learning rate; the other settings are those of `trainer.optimizer`."),
    ] = 1e-5
    warmup_steps: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "First steps of the run in which only the critic trains and the policy stays as it is; "
                "`trainer.optimizer.warmup_steps` begins after them."
            ),
        ),
    ] = 0
    value_clip: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description=(
                "How far the updates of a batch may move a value and still gain by it, in units of rewards; "
                "null: any distance. It takes effect from the second update on."
            )
        ),
    ] = 0.2


class LoraConfig(Strict, frozen=True, kw_only=True):
    """Low-rank adapters: only they are trained, and the weights of `model.path` stay as they are."""

    rank: Annotated[int, Meta(ge=1, description="Rank of each adapter.")] = 16
    alpha: Annotated[
        float, Meta(gt=0, description="An adapter's product is scaled by this over its rank.")
    ] = 32.0
    targets: Annotated[
        tuple[Literal["attention", "mlp", "experts"], ...],
        Meta(
            min_length=1,
            description=(
                "What has adapters: the projections of `attention`, of dense layers and shared experts "
                "(`mlp`), of each of the `experts`."
            ),
        ),
    ] = ("attention",)
    sync: Annotated[
        Literal["adapter", "merged"],
        Meta(
            description=(
                "What engines receive: the `adapter` of each version, beside weights that they keep, or "
                "weights with the adapter `merged` into them, for engines that cannot serve it."
            )
        ),
    ] = "adapter"


class TrainerConfig(Strict, frozen=True, kw_only=True):
    """The trainer: processes, batches, loss, optimizer and checkpoints."""

    worker: Annotated[
        str, Meta(description="Dotted path of the worker class; each rank has one instance.")
    ] = "trainer.worker:TrainerWorker"
    num_ranks: Annotated[int, Meta(ge=1, description="Processes of the trainer.")] = 1
    device: Annotated[
        Literal["auto", "cuda", "cpu"], Meta(description="`auto` takes the GPU if torch sees one.")
    ] = "auto"
    require_transformer_engine: Annotated[
        bool,
        Meta(
            description=(
                "Refuse to train an MoE model in bfloat16 on GPUs without TransformerEngine: Megatron's own "
                "layers compute the experts one after the other, many times slower."
            )
        ),
    ] = True
    layout: LayoutConfig = LayoutConfig()
    groups_per_batch: Annotated[int, Meta(ge=1, description="Groups consumed by one step.")] = 8
    micro_batch_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Token budget of one packed micro-batch; a longer trajectory gets one of its own.",
        ),
    ] = 16384
    updates_per_batch: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Optimizer steps per batch: the batch is split into this many parts of whole "
                "groups, and the proximal policy remains that of its start."
            ),
        ),
    ] = 1
    epochs_per_batch: Annotated[
        int, Meta(ge=1, description="Epochs over a batch, with `updates_per_batch` steps each.")
    ] = 1
    recompute: Annotated[
        Literal["none", "selective", "full", "offload"],
        Meta(
            description=(
                "Activations that are computed again in the backward pass: `full` keeps the inputs of layers "
                "only, and `offload` keeps these on the host."
            )
        ),
    ] = "none"
    overlap_grad_reduce: Annotated[
        bool,
        Meta(
            description=("Sum gradients over data-parallel ranks during the backward pass; for several GPUs.")
        ),
    ] = False
    megatron: Annotated[
        dict[str, Any],
        Meta(
            description=(
                "Fields of Megatron-Core's TransformerConfig, DistributedDataParallelConfig and "
                "OptimizerConfig, passed through by name; those that the trainer sets itself are refused."
            )
        ),
    ] = {}
    loss: LossConfig = LossConfig()
    capture_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Size up to which the batches since the last checkpoint are kept in the run folder, bytes, "
                "so that `async-rl replay-step` can repeat a step bit for bit; 0 keeps none. A capture also "
                "holds on to a checkpoint that is not larger than this."
            ),
        ),
    ] = 4 << 30
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    critic: CriticConfig = CriticConfig()
    checkpoint_every: Annotated[
        int, Meta(ge=0, description="Steps between checkpoints; 0 writes one only at the end.")
    ] = 20
    keep_checkpoints: Annotated[
        int, Meta(ge=1, description="Number of newest checkpoints that are kept.")
    ] = 2
    keep_every: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description=(
                "Checkpoints of steps that are multiples of this are never removed; null removes "
                "old ones regardless."
            )
        ),
    ] = None
    max_mismatch_nats: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description=(
                "The run ends if engine and trainer differ by more than this in the log-probs of the first "
                "tokens that were sampled with the trainer's own weights, mean per token; null does not "
                "compare. bfloat16 and FP8 differ by less than a tenth of the default."
            )
        ),
    ] = 0.5
    start_timeout_s: Annotated[
        float, Meta(gt=0, description="Maximum start time of the trainer, seconds.")
    ] = 600.0
    step_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "Maximum duration of a trainer step, seconds; ranks that take longer count as hung."
            ),
        ),
    ] = 3600.0
    max_restarts: Annotated[
        int,
        Meta(ge=0, description="Restarts of a trainer that died or hung; after them the run ends."),
    ] = 3
