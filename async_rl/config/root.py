"""The whole config, and the checks of settings that must fit together.

The message of each check names the settings, their values and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec.structs import replace

from async_rl.config.base import Strict
from async_rl.config.data_settings import DataConfig
from async_rl.config.engine_settings import RoutingConfig, SGLangEngines, SimulatedEngines, WeightsConfig
from async_rl.config.evaluation_settings import EvaluationConfig
from async_rl.config.rollout_settings import LARGEST_MASK, JudgeReward, RolloutConfig
from async_rl.config.run_settings import (
    DoctorConfig,
    FrozenModelConfig,
    MetricsConfig,
    ModelConfig,
    PlacementConfig,
    QueueConfig,
    RunConfig,
)
from async_rl.config.sft_settings import SftConfig
from async_rl.config.trainer_settings import (
    ADVANTAGES,
    OBJECTIVES,
    CriticConfig,
    LoraConfig,
    RejectConfig,
    TrainerConfig,
)
from async_rl.config.urls_file import is_server
from async_rl.config.worker_count import WorkerCount, choose_workers
from async_rl.runtime.files import FILE_NAME

_OWN_ARGUMENTS: Final = frozenset(
    f"--{name}"
    for name in (
        *("model-path", "model", "dtype", "device", "config", "host", "port", "api-key", "admin-api-key"),
        *("tp-size", "tensor-parallel-size", "tp", "nnodes", "node-rank", "dist-init-addr", "random-seed"),
        *("context-length", "max-running-requests", "max-total-tokens", "weight-version"),
    )
)
"""Arguments of a server that `engines.sglang.server` sets, and other names of the same."""


class Config(Strict, frozen=True, kw_only=True):
    """All settings of a run."""

    model: ModelConfig
    models: dict[str, FrozenModelConfig] = {}
    """Further models by name, on engines that are never updated: teachers and judges."""
    data: DataConfig = DataConfig()
    run: RunConfig = RunConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: SGLangEngines | SimulatedEngines = SGLangEngines()
    routing: RoutingConfig = RoutingConfig()
    queue: QueueConfig = QueueConfig()
    weights: WeightsConfig = WeightsConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sft: SftConfig = SftConfig()
    placement: PlacementConfig = PlacementConfig()
    metrics: MetricsConfig = MetricsConfig()
    doctor: DoctorConfig = DoctorConfig()

    def __post_init__(self) -> None:
        """Check settings against each other."""
        for check in CHECKS:
            check(self)

    @property
    def has_tasks(self) -> bool:
        """Whether it names tasks to roll out; a config for `async-rl sft` need not."""
        return self.data.path is not None or bool(self.data.datasets)

    def of_model(self, name: str) -> Config:
        """Return the config of the engines of a model in `models`, as if it were the policy."""
        model = self.models[name]
        changed: dict[str, Any] = {
            "num_engines": model.num_engines,
            "max_running_requests": model.max_running_requests,
            "urls_file": None,
        }
        if isinstance(self.engine, SGLangEngines):
            changed |= {
                "urls": model.urls,
                "tp_size": model.tp_size,
                "num_nodes": model.num_nodes,
                "context_length": model.context_length,
                "max_total_tokens": model.max_total_tokens,
                "extra_args": model.extra_args,
                "narrow_routing": False,
            }
        return Config(
            model=ModelConfig(path=model.path, dtype=model.dtype),
            engine=replace(self.engine, **changed),
            run=self.run,
            routing=RoutingConfig(replay="off"),
            rollout=RolloutConfig(max_context_tokens=2, max_new_tokens=1),
            placement=replace(self.placement, shared=False),
            trainer=TrainerConfig(device=self.trainer.device),
        )

    @property
    def adapters(self) -> LoraConfig | None:
        """The adapters that engines load in place of whole weights; None where they are given those."""
        lora = self.trainer.lora
        return lora if lora is not None and lora.sync == "adapter" else None

    @property
    def workers(self) -> WorkerCount:
        """The number of rollout workers, which `rollout.num_workers` may leave to this program."""
        return choose_workers(self.rollout, self.engine, self.placement)

    @property
    def num_workers(self) -> int:
        """The number of rollout workers; 0: the driver runs sessions itself."""
        return self.workers.number

    @property
    def max_attempts_per_worker(self) -> int:
        """How many attempts a rollout worker runs at most: its share while one of the others is missing."""
        return -(-self.rollout.max_concurrent_trajectories // max(1, self.num_workers - 1))

    @property
    def batch_trajectories(self) -> int:
        """Trajectories that one trainer step consumes."""
        return self.trainer.groups_per_batch * self.rollout.group_size

    @property
    def max_outstanding_groups(self) -> int:
        """Maximum number of groups dispatched and not yet trained: more could not be trained within the
        staleness bound.
        """
        return self.trainer.groups_per_batch * (self.rollout.max_staleness + 1)


def check_sharing(config: Config) -> None:
    """Check that no setting needs engines and trainer at the same time on shared devices.

    Raises:
        ValueError: The settings do not fit together.
    """
    if not config.placement.shared:
        return
    engine, weights, trainer = config.engine, config.weights, config.trainer
    urls = engine.urls if isinstance(engine, SGLangEngines) else ()
    if urls or engine.urls_file is not None:
        raise ValueError(
            "placement.shared: engine.urls and engine.urls_file name servers started elsewhere, whose "
            "devices this run cannot share: leave them out"
        )
    if isinstance(engine, SGLangEngines) and engine.device != trainer.device:
        raise ValueError(
            f"placement.shared: engine.device is {engine.device} and trainer.device is {trainer.device}: set "
            "both to the same"
        )
    if isinstance(engine, SGLangEngines) and any(
        argument.startswith("--tokenizer-worker-num") and argument != "--tokenizer-worker-num=1"
        for argument in engine.extra_args
    ):
        raise ValueError(
            "placement.shared: engine.extra_args has --tokenizer-worker-num, but only one process of a "
            "server can refuse calls while its devices are released: remove it"
        )
    if weights.interrupt != "abort":
        raise ValueError(
            f"placement.shared: weights.interrupt is {weights.interrupt}, which leaves calls on engines that "
            "must be empty: set weights.interrupt=abort"
        )
    if weights.transport not in ("disk", "tensor"):
        raise ValueError(
            f"placement.shared: weights.transport is {weights.transport}, which needs more of the devices "
            "than the weights of both sides: set weights.transport=tensor, or disk"
        )
    for field in ("overlap", "rolling"):
        if getattr(weights, field):
            raise ValueError(
                f"placement.shared: weights.{field} makes engines and trainer work at the same time: set "
                f"weights.{field}=false"
            )
    if weights.every > 1:
        raise ValueError(
            f"placement.shared: weights.every is {weights.every}, but engines take the weights whenever they "
            "get the devices: set weights.every=1"
        )
    if config.evaluation.enabled and config.evaluation.engines != "shared":
        raise ValueError(
            f"placement.shared: evaluation.engines is {config.evaluation.engines}, but engines reserved for "
            "evaluation would hold their devices while the trainer works: set evaluation.engines=shared"
        )


def check_adapters(config: Config) -> None:
    """Check that engines can load adapters, where these alone are sent (`trainer.lora.sync: adapter`).

    Raises:
        ValueError: They cannot.
    """
    lora, weights = config.adapters, config.weights
    if lora is None:
        return
    merged = "or set trainer.lora.sync=merged"
    if weights.transport != "disk":
        raise ValueError(
            f"trainer.lora.sync is adapter and weights.transport is {weights.transport}: engines load "
            f"adapters from files; set weights.transport=disk, {merged}"
        )
    if weights.interrupt != "abort":
        raise ValueError(
            f"trainer.lora.sync is adapter and weights.interrupt is {weights.interrupt}: an engine finishes "
            "a call with the adapter with which it was begun, so calls must end before an update; set "
            f"weights.interrupt=abort, {merged}"
        )
    if weights.verify != "version":
        raise ValueError(
            f"trainer.lora.sync is adapter and weights.verify is {weights.verify}: engines sum the model's "
            f"weights, which do not change, and not the adapter; set weights.verify=version, {merged}"
        )


def check_data(config: Config) -> None:
    """Check that training data is named in one place only, and that dataset weights are complete.

    Raises:
        ValueError: The settings do not fit together.
    """
    data = config.data
    if data.path is not None and data.datasets:
        raise ValueError("data.path and data.datasets are both set: set only one of them")
    weights = [dataset.weight for dataset in data.datasets]
    if None in weights and any(weights):
        raise ValueError(
            f"data.datasets: the weights are {weights}; set all of them, or none to take every example once "
            "per epoch"
        )
    if data.curriculum is None:
        return
    if any(weights):
        raise ValueError(
            "data.curriculum and the weights of data.datasets both say how often tasks are drawn: set only "
            "one of them"
        )
    pools = data.curriculum.pools
    names, bounds = ["unseen", *(pool.name for pool in pools)], [pool.up_to for pool in pools]
    if len(set(names)) < len(names):
        raise ValueError(f"data.curriculum.pools: the names are {names[1:]}; expected different ones")
    if bounds != sorted(set(bounds)) or bounds[-1:] != [1]:
        raise ValueError(
            f"data.curriculum.pools: up_to is {bounds}; expected ascending success rates, the last one 1"
        )
    if not any(pool.weight for pool in pools):
        raise ValueError("data.curriculum.pools: all weights are 0; expected one above 0")


def check_groups(config: Config) -> None:
    """Check that there are enough groups for every update, and siblings where something compares them.

    Raises:
        ValueError: The settings do not fit together.
    """
    rollout, trainer = config.rollout, config.trainer
    if trainer.updates_per_batch > trainer.groups_per_batch:
        raise ValueError(
            f"trainer.updates_per_batch is {trainer.updates_per_batch}, but trainer.groups_per_batch only "
            f"{trainer.groups_per_batch}, and groups are not split: lower the one or raise the other"
        )
    teacher_alone = trainer.loss.teacher.only
    if rollout.dynamic_filtering and teacher_alone:
        raise ValueError(
            "rollout.dynamic_filtering drops groups of equal rewards, and with trainer.loss.teacher.only "
            "rewards have no effect, so it would drop groups that the teacher trains: set "
            "rollout.dynamic_filtering=false"
        )
    if rollout.group_size > 1 or rollout.max_branches or teacher_alone:
        return
    if rollout.dynamic_filtering:
        raise ValueError(
            "rollout.dynamic_filtering drops groups of equal rewards, and rollout.group_size is 1, so it "
            "would drop all: raise rollout.group_size"
        )
    # The trainer's check asks a function of the user's whether its baseline is the group.
    advantages = trainer.loss.advantages
    if advantages in ADVANTAGES and advantages not in ("reinforce++", "gae"):
        raise ValueError(
            "rollout.group_size is 1, so a group's advantages are all zero: use at least 2, or set "
            "trainer.loss.advantages=reinforce++, whose baseline is the batch, or gae, whose baseline is a "
            "critic; or train on a teacher alone (trainer.loss.teacher.only=true)"
        )


def check_engines(config: Config) -> None:
    """Check that servers are named in one place only, by URLs.

    Raises:
        ValueError: The settings do not fit together.
    """
    engine = config.engine
    if not isinstance(engine, SGLangEngines):
        return
    names = {f"models.{name}": model.extra_args for name, model in config.models.items()}
    for name, arguments in ({"engine": engine.extra_args} | names).items():
        if any(argument.startswith("--preferred-sampling-params") for argument in arguments):
            raise ValueError(
                f"{name}.extra_args has --preferred-sampling-params, with which servers would sample from "
                "another distribution than that of the trainer's log-probs: remove it, and set what rollout "
                "has (temperature, top_p, top_k, min_p)"
            )
        if own := {argument.partition("=")[0] for argument in arguments} & _OWN_ARGUMENTS:
            raise ValueError(
                f"{name}.extra_args has {' and '.join(sorted(own))}, which the run sets itself from other "
                f"settings, such as model.path and {name}.tp_size: remove it, and set those"
            )
    check_nodes("engine", engine)
    check_urls("engine", engine.urls)
    if engine.num_nodes > 1 and config.weights.transport == "tensor":
        raise ValueError(
            f"engine.num_nodes is {engine.num_nodes} and weights.transport is tensor, which hands over "
            "memory of the trainer's node: set weights.transport=distributed"
        )
    if engine.urls and engine.urls_file:
        raise ValueError("engine.urls and engine.urls_file are both set: write the URLs into the file")


def check_urls(section: str, urls: Sequence[str]) -> None:
    """Check that each server is named once, by its URL.

    Raises:
        ValueError: It is not.
    """
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"{section}.urls has {url!r}, which is no URL: write http://{url.rpartition('//')[2]}"
            )
        if not is_server(url):
            raise ValueError(
                f"{section}.urls has {url!r}, which is not the URL of a server such as http://10.0.0.7:30000"
            )
        if urls.count(url) > 1:
            raise ValueError(f"{section}.urls has {url} twice: name each server once")


def check_nodes(section: str, engines: SGLangEngines | FrozenModelConfig) -> None:
    """Check that the GPUs of an engine can be divided among its nodes.

    Raises:
        ValueError: They cannot.
    """
    if engines.tp_size % engines.num_nodes:
        raise ValueError(
            f"{section}.num_nodes is {engines.num_nodes} and {section}.tp_size is {engines.tp_size}: each "
            "node has an equal part of the GPUs, so the one must divide the other"
        )


def check_models(config: Config) -> None:
    """Check that `models` has what other settings name, and that names of engines differ.

    Raises:
        ValueError: The settings do not fit together.
    """
    known = ", ".join(config.models) or "none"
    for name, model in config.models.items():
        if not re.fullmatch(FILE_NAME, name) or name == "engine":
            raise ValueError(
                f"models has the name {name!r}: engines are named after it, as the policy's are `engine-0`; "
                "use letters, digits, dots, dashes and underscores, and not `engine`"
            )
        check_nodes(f"models.{name}", model)
        check_urls(f"models.{name}", model.urls)
    teacher, rollout = config.trainer.loss.teacher, config.rollout
    for name, reward in rollout.rewards.items():
        if not isinstance(reward, JudgeReward):
            continue
        if reward.judge not in config.models:
            raise ValueError(
                f"rollout.rewards.{name}.judge is {reward.judge!r}, which models does not have (there: "
                f"{known}): add it there"
            )
        try:
            re.compile(reward.score)
        except re.error as error:
            raise ValueError(
                f"rollout.rewards.{name}.score is {reward.score!r}, no regular expression: {error}"
            ) from error
    if teacher.model is None:
        if teacher.only:
            raise ValueError(
                "trainer.loss.teacher.only is set, but trainer.loss.teacher.model names no teacher, so "
                "nothing would be trained: name one"
            )
        return
    if teacher.model not in config.models:
        raise ValueError(
            f"trainer.loss.teacher.model is {teacher.model!r}, which models does not have (there: {known}): "
            "add it there"
        )
    if rollout.top_p < 1 or rollout.top_k != -1 or rollout.min_p > 0:
        raise ValueError(
            f"trainer.loss.teacher: rollout truncates its sampling (top_k = {rollout.top_k}, top_p = "
            f"{rollout.top_p:g}, min_p = {rollout.min_p:g}), and engines return log-probs of the teacher "
            "over its whole vocabulary, not over the tokens that were kept: set top_p=1, min_p=0, top_k=-1"
        )


def check_layout(config: Config) -> None:
    """Check that the trainer's ranks fit `trainer.layout`.

    Raises:
        ValueError: The settings do not fit together.
    """
    layout, ranks = config.trainer.layout, config.trainer.num_ranks
    model_parallel = layout.tp * layout.pp * layout.cp
    if ranks % model_parallel:
        raise ValueError(
            f"trainer.num_ranks is {ranks}, but trainer.layout needs a multiple of tp*pp*cp = "
            f"{model_parallel}"
        )
    if ranks % (layout.ep * layout.etp * layout.pp):
        raise ValueError(
            f"trainer.num_ranks is {ranks}, but the experts need a multiple of "
            f"ep*etp*pp = {layout.ep * layout.etp * layout.pp}"
        )
    if layout.vpp > 1 and layout.pp == 1:
        raise ValueError(
            f"trainer.layout.vpp is {layout.vpp}, but pp is 1: only a pipeline can be interleaved; set vpp=1 "
            "or raise pp"
        )
    if layout.pp == 1 and (layout.first_stage_layers or layout.last_stage_layers):
        raise ValueError(
            "trainer.layout has first_stage_layers or last_stage_layers, but pp is 1: only stages of a "
            "pipeline can differ; leave them out or raise pp"
        )


def check_sampling(config: Config) -> None:
    """Check that prompts and answers fit the context, and that tokens can be sampled.

    Raises:
        ValueError: The settings do not fit together.
    """
    rollout, engine = config.rollout, config.engine
    if rollout.max_new_tokens >= rollout.max_context_tokens:
        raise ValueError(
            f"rollout.max_new_tokens is {rollout.max_new_tokens} which leaves no tokens for a prompt in "
            f"rollout.max_context_tokens = {rollout.max_context_tokens}: lower the one or raise the other"
        )
    if rollout.top_k == 0:
        raise ValueError("rollout.top_k is 0, so that no token could be sampled: use -1 for no limit")
    if rollout.needs_masks and not 1 <= rollout.top_k <= LARGEST_MASK:
        raise ValueError(
            f"rollout.top_k is {rollout.top_k} with top_p = {rollout.top_p:g} and min_p = {rollout.min_p:g}: "
            f"engines return at most {LARGEST_MASK} kept tokens per position, and without them the trainer "
            f"cannot compute log-probs of the truncated distribution. Set rollout.top_k to 1 to "
            f"{LARGEST_MASK}, or top_p=1, min_p=0 and top_k=-1 (replay_sampling=false: biased gradients)"
        )
    for name in ("context_length", "max_total_tokens") if isinstance(engine, SGLangEngines) else ():
        limit = getattr(engine, name)
        if limit is not None and limit < rollout.max_context_tokens:
            raise ValueError(
                f"engine.{name} is {limit}, below rollout.max_context_tokens = "
                f"{rollout.max_context_tokens}: raise the one or lower the other"
            )


def check_loss(config: Config) -> None:
    """Check that each term of the loss can have its effect.

    Raises:
        ValueError: The settings do not fit together.
    """
    loss, rollout = config.trainer.loss, config.rollout
    _check_function("advantages", loss.advantages, ADVANTAGES, loss.advantages_args)
    _check_function("objective", loss.objective, OBJECTIVES, loss.objective_args)
    if loss.importance.low > loss.importance.high:
        raise ValueError(
            f"trainer.loss.importance.low is {loss.importance.low}, above its high = "
            f"{loss.importance.high}: no ratio is between them"
        )
    low, high = loss.reject.geometric_low, loss.reject.geometric_high
    if low is not None and high is not None and low > high:
        raise ValueError(
            f"trainer.loss.reject.geometric_low is {low}, above geometric_high = {high}: every answer would "
            "be rejected"
        )
    if loss.dual_clip is not None and loss.objective != "ppo":
        raise ValueError(
            f"trainer.loss.dual_clip is {loss.dual_clip}, but only objective=ppo supports it, and "
            f"trainer.loss.objective is {loss.objective}: set dual_clip=null"
        )
    buffer = loss.overlong_buffer_tokens
    if buffer is not None and buffer >= rollout.max_new_tokens:
        raise ValueError(
            f"trainer.loss.overlong_buffer_tokens is {buffer}, and rollout.max_new_tokens only "
            f"{rollout.max_new_tokens}: every answer would be penalised"
        )
    if loss.kl.coefficient and loss.kl.where == "loss" and loss.kl.estimator == "k1":
        raise ValueError(
            "trainer.loss.kl: k1 as a term of the loss has a gradient of mean zero and restrains nothing: "
            "use k2 or k3, or where=reward"
        )
    if loss.kl.coefficient and loss.kl.where == "reward" and loss.teacher.only:
        raise ValueError(
            "trainer.loss.kl.where is reward, and with trainer.loss.teacher.only rewards have no effect: set "
            "trainer.loss.kl.where=loss"
        )
    if loss.kl.coefficient and loss.kl.where == "reward" and loss.advantages == "grpo":
        raise ValueError(
            "trainer.loss.kl.where is reward, and trainer.loss.advantages is grpo, which divides by the "
            "deviation of the group's rewards: where task rewards are equal the coefficient cancels, and "
            "advantages are as large for 1e-4 as for 1. reinforce++, reinforce++_baseline and gae divide by "
            "the deviation over the batch, where the same happens if all of its task rewards are equal (for "
            "the baseline form: those of each group). Use where=loss, or advantages=dr_grpo or rloo"
        )


def check_critic(config: Config) -> None:
    """Check that the settings of a critic are used.

    Raises:
        ValueError: The settings do not fit together.
    """
    loss, critic = config.trainer.loss, config.trainer.critic
    if loss.advantages != "gae":
        if critic != CriticConfig():
            raise ValueError(
                f"trainer.critic is set, but trainer.loss.advantages is {loss.advantages}, which uses no "
                "critic: set it to gae, or leave trainer.critic out"
            )
        return
    if loss.turn_discount is not None:
        raise ValueError(
            f"trainer.loss.turn_discount is {loss.turn_discount}, but trainer.loss.advantages is gae, in "
            "which each turn's reward is of its last token: set turn_discount=null and use "
            "trainer.critic.gamma"
        )


def check_lora(config: Config) -> None:
    """Check that adapters can be trained with the other settings.

    Raises:
        ValueError: The settings do not fit together.
    """
    lora, loss = config.trainer.lora, config.trainer.loss
    if lora is None:
        return
    if len(set(lora.targets)) < len(lora.targets):
        raise ValueError(f"trainer.lora.targets is {list(lora.targets)}: name each target once")
    if loss.advantages == "gae":
        raise ValueError(
            "trainer.lora is set, and trainer.loss.advantages is gae, whose critic trains all weights of a "
            "second model and would take the memory that adapters save: use other advantages, or set "
            "trainer.lora=null"
        )


def _check_function(key: str, name: str, known: tuple[str, ...], args: dict[str, Any]) -> None:
    if name not in known and ":" not in name:
        raise ValueError(
            f"trainer.loss.{key} is {name!r}, expected one of {', '.join(known)}, or the dotted path "
            "of a function of your own, `module:function`"
        )
    if args and name in known:
        raise ValueError(
            f"trainer.loss.{key}_args is {args}, but trainer.loss.{key}={name} takes no "
            "arguments: set it to {}"
        )


def old_log_probs_reason(config: Config) -> str | None:
    """Return why every step computes the old log-probs in a forward pass of their own; None if it does not.

    With one update per batch that pass would repeat the update's own forward pass, bit for bit.
    """
    loss, updates = config.trainer.loss, config.trainer.updates_per_batch * config.trainer.epochs_per_batch
    if loss.old_log_probs == "rollout":
        return None
    if updates > 1:
        return f"a batch has {updates} updates"
    if config.routing.replay == "r2":
        return "routing.replay=r2 records the experts in it"
    if loss.reject != RejectConfig():
        return "trainer.loss.reject compares whole answers before the update"
    if loss.kl.coefficient and loss.kl.where == "reward":
        return "the KL penalty in the reward is measured with them"
    if loss.teacher.model is not None and loss.teacher.where == "reward":
        return "the teacher's reward is measured with them"
    return None


def check_corrections(config: Config) -> None:
    """Check that data of older weights is corrected for, or that its use is allowed.

    Raises:
        ValueError: The settings do not fit together.
    """
    loss, bound = config.trainer.loss, config.rollout.max_staleness
    corrected = loss.importance.level != "off" or loss.old_log_probs == "rollout"
    if bound and not corrected and not loss.uncorrected:
        raise ValueError(
            f"rollout.max_staleness is {bound}, and nothing corrects for data of older weights: set "
            "trainer.loss.importance.level=token or trainer.loss.old_log_probs=rollout, or "
            "allow uncorrected training by trainer.loss.uncorrected=true"
        )


def check_updates(config: Config) -> None:
    """Check that a batch can be full before the engines take new weights.

    Raises:
        ValueError: No group would be admitted in between; see `async_rl.staleness`.
    """
    every, bound = config.weights.every, config.rollout.max_staleness
    if every > bound + 1:
        raise ValueError(
            f"weights.every is {every}, but groups that are trained at most {bound} versions later "
            f"(rollout.max_staleness) fill {bound + 1} batches: set weights.every={bound + 1} or less, or "
            "raise the bound"
        )


def check_routing(config: Config) -> None:
    """Check that routing that is to be replayed is recorded completely.

    Raises:
        ValueError: The settings do not fit together.
    """
    routing, old = config.routing, config.trainer.loss.old_log_probs
    if routing.replay == "r2" and old != "recompute":
        raise ValueError(
            "routing.replay=r2 records routing where the old log-probs are computed, but "
            f"trainer.loss.old_log_probs is {old}: set it to recompute, or replay r3"
        )
    in_place = config.weights.interrupt == "in_place"
    if routing.replay == "r3" and in_place and routing.merge == "replace":
        raise ValueError(
            "weights.interrupt=in_place keeps the old KV cache, so the engine itself splices routing: set "
            "routing.merge=splice, or interrupt by abort or retract"
        )


def check_evaluation(config: Config) -> None:
    """Check that there are validation sets, and engines to answer them.

    Raises:
        ValueError: The settings do not fit together.
    """
    evaluation, engine = config.evaluation, config.engine
    if evaluation.enabled and not config.data.validation:
        raise ValueError(
            "evaluation.every or evaluation.at_start is set, but data.validation names no dataset: add "
            "`data.validation: [{path: ...}]`"
        )
    if evaluation.top_k == 0:
        raise ValueError("evaluation.top_k is 0, so that no token could be sampled: use -1 for no limit")
    if not (evaluation.enabled and isinstance(evaluation.engines, int)):
        return
    if engine.urls_file is not None:
        raise ValueError(
            f"evaluation.engines is {evaluation.engines}, but the engines of engine.urls_file join and "
            "leave: set evaluation.engines=shared"
        )
    urls = engine.urls if isinstance(engine, SGLangEngines) else ()
    total = len(urls) or engine.num_engines
    if evaluation.engines >= total:
        raise ValueError(
            f"evaluation.engines is {evaluation.engines}, and the run has {total} engines, so none "
            "would be left for rollouts: lower it, add engines, or set evaluation.engines=shared"
        )


CHECKS: Final[tuple[Callable[[Config], None], ...]] = (
    check_data,
    check_groups,
    check_engines,
    check_models,
    check_layout,
    check_sampling,
    check_loss,
    check_critic,
    check_lora,
    check_corrections,
    check_updates,
    check_routing,
    check_evaluation,
    check_adapters,
    check_sharing,
)
"""In the order in which their errors are reported."""
