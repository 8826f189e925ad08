"""Settings of the trainer: layout, loss, optimizer, checkpoints; docs/design/trainer.md explains the loss."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from async_rl.config.base import Meta, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Strict

ADVANTAGES: Final = ("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "gae")
"""The estimators of `trainer.losses.advantages`."""

OBJECTIVES: Final = ("ppo", "gspo", "cispo")
"""The objectives of `trainer.losses.objectives`."""


class LayoutConfig(Strict, frozen=True, kw_only=True):
    """Parallel layout of the trainer; data parallelism is what remains of `trainer.num_ranks`."""

    tp: PositiveInt = 1
    """Tensor parallel (with sequence parallelism when above 1)."""
    pp: PositiveInt = 1
    """Pipeline parallel."""
    vpp: PositiveInt = 1
    """Chunks of layers per pipeline stage (interleaved schedule)."""
    cp: PositiveInt = 1
    """Context parallel."""
    ep: PositiveInt = 1
    """Expert parallel."""
    etp: PositiveInt = 1
    """Expert tensor parallel."""
    first_stage_layers: PositiveInt | None = None
    """Layers of the first pipeline stage, which also holds the embedding; null gives all stages the same
    number."""
    last_stage_layers: PositiveInt | None = None
    """Layers of the last pipeline stage, which also holds the output layer; null as above."""


class ImportanceConfig(Strict, frozen=True, kw_only=True):
    """Importance weights exp(old - rollout) of the proximal policy over the policy that sampled."""

    level: Literal["off", "token", "sequence", "geometric"] = "token"
    """Level of the ratio: of each `token`, of a whole answer (`sequence`: the product of its tokens' ratios,
    `geometric`: their geometric mean), or `off`."""
    beyond: Literal["truncate", "mask"] = "truncate"
    """What happens to a ratio outside the bounds: `truncate` sets it to the bound (TIS), `mask` leaves its
    tokens out (IcePop by token, MIS by sequence)."""
    low: NonNegativeFloat = 0.0
    """Lower bound of the ratio."""
    high: PositiveFloat = 2.0
    """Upper bound of the ratio."""


class RejectConfig(Strict, frozen=True, kw_only=True):
    """Whole answers that are left out because they are too far from the policy that is trained."""

    geometric_low: PositiveFloat | None = None
    """Leave an answer out when the geometric mean of its ratios is below this."""
    geometric_high: PositiveFloat | None = None
    """Leave an answer out when that mean is above this."""
    token_below: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Leave an answer out when the ratio of any of its tokens is below this."""


class KLConfig(Strict, frozen=True, kw_only=True):
    """A penalty on the distance from a reference policy: the weights of `model.path`."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the penalty; 0 loads no reference, which otherwise costs a forward pass per batch."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, d = log(p/ref)."""
    where: Literal["loss", "reward"] = "loss"
    """Added to the loss of each token, or subtracted from the reward: of the trajectory, or under
    `reinforce++` of each token, which is charged for itself and later ones. Not with `grpo`; its coefficient
    keeps its meaning with `dr_grpo` and `rloo` only."""


class TeacherConfig(Strict, frozen=True, kw_only=True):
    """On-policy distillation: the reverse KL to a teacher, at the tokens that the policy sampled."""

    model: str | None = None
    """Name of the teacher in `models`; null distills from none."""
    coefficient: NonNegativeFloat = 1.0
    """Weight of the reverse KL; with 0 it is only measured."""
    where: Literal["reward", "loss"] = "reward"
    """`reward`: the teacher's log-prob minus that of the policy at the batch's start is added to the token's
    advantage; `loss`: half the square of the difference to the current policy, whose gradient is that of the
    reverse KL, is added to its loss."""
    only: bool = False
    """Train on the teacher alone; rewards are measured, and have no effect."""


class LossConfig(Strict, frozen=True, kw_only=True):
    """Advantages, the policy objective, and corrections for data of older weights."""

    advantages: str = "grpo"
    """Baseline and scale of rewards: `grpo` takes the group's mean and deviation, `dr_grpo` its mean only,
    `rloo` the siblings' mean, `reinforce++` the batch's mean and deviation, `reinforce++_baseline` the
    group's mean and the batch's deviation, `gae` the values of `trainer.critic`; or the dotted path of a
    function of your own, `module:function`."""
    advantages_args: dict[str, Any] = {}
    """Keyword arguments of the function, if `advantages` is a dotted path."""
    turn_discount: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Each turn has a return of its own: its reward (`Session.reward_turn`) and those of later turns, each
    discounted by this; the reward of the conversation is of its last turn. null gives all turns of a
    conversation the sum."""
    overlong_buffer_tokens: PositiveInt | None = None
    """The reward falls from 0 to -1 over this many tokens before `rollout.max_new_tokens` (DAPO), by the
    longest turn; null disables it."""
    objective: str = "ppo"
    """`ppo` clips each token's ratio, `gspo` the whole answer's; `cispo` clips the ratio as a weight, so that
    every token keeps its gradient; or the dotted path of a function of your own, `module:function`."""
    objective_args: dict[str, Any] = {}
    """Keyword arguments of the function, if `objective` is a dotted path."""
    clip_low: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """Lower clip: the minimum ratio is 1 minus this."""
    clip_high: PositiveFloat = 0.2
    """Upper clip: the maximum ratio is 1 plus this."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """For `ppo`: maximum ratio with which a token with a negative advantage counts."""
    aggregate: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """`token_mean` weights all tokens of a batch equally, `sequence_mean` all attempts; `constant` weights
    each token by one over the number of attempts times `rollout.max_new_tokens` (Dr. GRPO)."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Weight of the entropy of each token's distribution in the loss."""
    old_log_probs: Literal["recompute", "rollout"] = "recompute"
    """The proximal policy: `recompute` takes the trainer's log-probs at the start of the update (decoupled
    PPO), `rollout` the engine's."""
    check_old_log_probs_every: NonNegativeInt = 50
    """With one update per batch, recomputed log-probs are those of the update's own forward pass. Every this
    many steps a pass of their own checks that; 0 never does. Several updates, `routing.replay: r2`, `reject`
    and a KL penalty in the reward need that pass in each step."""
    importance: ImportanceConfig = ImportanceConfig()
    reject: RejectConfig = RejectConfig()
    kl: KLConfig = KLConfig()
    teacher: TeacherConfig = TeacherConfig()
    uncorrected: bool = False
    """Train on data of older weights without any correction (`old_log_probs: recompute`, `importance.level:
    off`); refused unless this is set."""


class OptimizerConfig(Strict, frozen=True, kw_only=True):
    """AdamW as implemented by Megatron."""

    lr: PositiveFloat = 1e-6
    """Learning rate."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay."""
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.99
    """Decay of the second moment."""
    clip_grad: PositiveFloat = 1.0
    """Maximum gradient norm."""
    skip_grad_norm_above: PositiveFloat | None = None
    """An update whose gradient norm is above this is skipped; null skips none."""


class CriticConfig(Strict, frozen=True, kw_only=True):
    """A value model for `trainer.loss.advantages: gae`: a copy of the policy's, with one output.

    It has the policy's layout and trains on the same micro-batches, with an optimizer of its own.
    """

    gamma: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Discount of rewards and values per trained token."""
    gae_lambda: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """1 compares the sum of later rewards with the value; below it, values of later tokens replace rewards,
    with less variance and the critic's bias."""
    lr: PositiveFloat = 1e-5
    """Learning rate; the other settings are those of `trainer.optimizer`."""
    warmup_steps: NonNegativeInt = 0
    """First steps of the run in which only the critic trains and the policy stays as it is;
    `trainer.optimizer.warmup_steps` begins after them."""
    value_clip: PositiveFloat | None = 0.2
    """How far the updates of a batch may move a value and still gain by it, in units of rewards; null: any
    distance. It takes effect from the second update on."""


LoraTarget = Literal["attention", "mlp", "experts"]


class LoraConfig(Strict, frozen=True, kw_only=True):
    """Low-rank adapters: only they are trained, and the weights of `model.path` stay as they are."""

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """An adapter's product is scaled by this over its rank."""
    targets: Annotated[tuple[LoraTarget, ...], Meta(min_length=1)] = ("attention",)
    """What has adapters: the projections of `attention`, of dense layers and shared experts (`mlp`), of each
    of the `experts`."""
    sync: Literal["adapter", "merged"] = "adapter"
    """What engines receive: the `adapter` of each version, beside weights that they keep, or weights with the
    adapter `merged` into them, for engines that cannot serve it."""


class TrainerConfig(Strict, frozen=True, kw_only=True):
    """The trainer: processes, batches, loss, optimizer and checkpoints."""

    worker: str = "trainer.worker:TrainerWorker"
    """Dotted path of the worker class; each rank has one instance."""
    num_ranks: PositiveInt = 1
    """Processes of the trainer."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` takes the GPU if torch sees one."""
    require_transformer_engine: bool = True
    """Refuse to train an MoE model in bfloat16 on GPUs without TransformerEngine: Megatron's own layers
    compute the experts one after the other, many times slower."""
    layout: LayoutConfig = LayoutConfig()
    groups_per_batch: PositiveInt = 8
    """Groups consumed by one step."""
    micro_batch_tokens: PositiveInt = 16384
    """Token budget of one packed micro-batch; a longer trajectory gets one of its own."""
    updates_per_batch: PositiveInt = 1
    """Optimizer steps per batch: the batch is split into this many parts of whole groups, and the proximal
    policy remains that of its start."""
    epochs_per_batch: PositiveInt = 1
    """Epochs over a batch, with `updates_per_batch` steps each."""
    recompute: Literal["none", "selective", "full", "offload"] = "none"
    """Activations that are computed again in the backward pass: `full` keeps the inputs of layers only, and
    `offload` keeps these on the host."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel ranks during the backward pass; for several GPUs."""
    megatron: dict[str, Any] = {}
    """Fields of Megatron-Core's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig, passed
    through by name; those that the trainer sets itself are refused."""
    loss: LossConfig = LossConfig()
    capture_bytes: NonNegativeInt = 4 << 30
    """Size up to which the batches since the last checkpoint are kept in the run folder, bytes, so that
    `async-rl replay-step` can repeat a step bit for bit; 0 keeps none. A capture also holds on to a
    checkpoint that is not larger than this."""
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    critic: CriticConfig = CriticConfig()
    checkpoint_every: NonNegativeInt = 20
    """Steps between checkpoints; 0 writes one only at the end."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints that are kept."""
    keep_every: PositiveInt | None = None
    """Checkpoints of steps that are multiples of this are never removed; null removes old ones regardless."""
    keep_best: Annotated[str, Meta(pattern=r"^.+/(reward|pass@[1-9][0-9]*)$")] | None = None
    """The figure of evaluations by which the best checkpoint is never removed: `SET/reward` or `SET/pass@K`,
    such as `all/reward` or `aime/pass@8`, where SET is `all` or a validation set. Versions that are evaluated
    then get a checkpoint; null keeps none for its evaluation."""
    max_mismatch_nats: PositiveFloat | None = 0.5
    """The run ends if engine and trainer differ by more than this in the log-probs of the first tokens that
    were sampled with the trainer's own weights, mean per token; null does not compare. bfloat16 and FP8
    differ by less than a tenth of the default."""
    start_timeout_s: PositiveFloat = 600.0
    """Maximum start time of the trainer, seconds."""
    step_timeout_s: PositiveFloat = 3600.0
    """Maximum duration of a trainer step, seconds; ranks that take longer count as hung."""
    max_restarts: NonNegativeInt = 3
    """Restarts of a trainer that died or hung; after them the run ends."""
