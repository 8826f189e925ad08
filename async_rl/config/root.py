"""A whole config, and what no single section can check."""

from __future__ import annotations

from async_rl.config.base import Strict
from async_rl.config.data import DataConfig
from async_rl.config.engines import RoutingConfig, SGLangEngines, SimulatedEngines, WeightsConfig
from async_rl.config.evaluation import EvaluationConfig
from async_rl.config.rollout import RolloutConfig
from async_rl.config.service import (
    DoctorConfig,
    MetricsConfig,
    ModelConfig,
    PlacementConfig,
    QueueConfig,
    RunConfig,
)
from async_rl.config.sft import SftConfig
from async_rl.config.sharing import check_sharing
from async_rl.config.trainer import TrainerConfig


class Config(Strict, frozen=True, kw_only=True):
    """A whole run."""

    model: ModelConfig
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
        """Check what no single field can."""
        supervised = self.sft.path is not None and self.data == DataConfig()
        if (self.data.path is None) == (not self.data.datasets) and not supervised:
            both = "are both set: name one file in the one, or all in the other"
            none = "are both missing: set data.path to a .jsonl or .parquet file of tasks"
            raise ValueError(f"data.path and data.datasets {none if self.data.path is None else both}")
        weights = [dataset.weight for dataset in self.data.datasets]
        if None in weights and any(weights):
            raise ValueError(
                f"data.datasets: the weights are {weights}; set all of them, or none for every row once an "
                "epoch"
            )
        alone = self.rollout.group_size == 1 and not self.rollout.max_branches
        if self.rollout.dynamic_filtering and alone:
            raise ValueError(
                "rollout.dynamic_filtering drops groups of equal rewards, and rollout.group_size is 1, so it "
                "would drop all: raise rollout.group_size"
            )
        if isinstance(self.engine, SGLangEngines) and self.engine.urls and self.engine.urls_file:
            raise ValueError("engine.urls and engine.urls_file are both set: write the URLs into the file")
        layout, ranks = self.trainer.layout, self.trainer.num_ranks
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
        if self.rollout.max_new_tokens >= self.rollout.max_context_tokens:
            raise ValueError(
                f"rollout.max_new_tokens is {self.rollout.max_new_tokens} and leaves no room for a prompt in "
                f"rollout.max_context_tokens = {self.rollout.max_context_tokens}: lower the one or "
                f"raise the other"
            )
        if self.rollout.top_k == 0:
            raise ValueError("rollout.top_k is 0, so that no token could be drawn: use -1 for no limit")
        loss, bound = self.trainer.loss, self.rollout.max_staleness
        if alone and loss.advantages != "reinforce++":
            raise ValueError(
                "rollout.group_size is 1, so a group's advantages are all zero: use at least 2, or set "
                "trainer.loss.advantages=reinforce++, whose baseline is the batch"
            )
        if loss.importance.low > loss.importance.high:
            raise ValueError(
                f"trainer.loss.importance.low is {loss.importance.low}, above its high = "
                f"{loss.importance.high}: no ratio is between them"
            )
        buffer = loss.overlong_buffer_tokens
        if buffer is not None and buffer >= self.rollout.max_new_tokens:
            raise ValueError(
                f"trainer.loss.overlong_buffer_tokens is {buffer}, and rollout.max_new_tokens only "
                f"{self.rollout.max_new_tokens}: every answer would be penalised"
            )
        if loss.kl.coefficient and loss.kl.where == "loss" and loss.kl.estimator == "k1":
            raise ValueError(
                "trainer.loss.kl: k1 as a term of the loss has a gradient of mean zero and holds nothing "
                "back: use k2 or k3, or where=reward"
            )
        corrected = loss.importance.level != "off" or loss.old_log_probs == "rollout"
        if bound and not corrected and not loss.uncorrected:
            raise ValueError(
                f"rollout.max_staleness is {bound}, and nothing corrects for data of older weights: set "
                "trainer.loss.importance.level=token or trainer.loss.old_log_probs=rollout, or say that you "
                "want it so by trainer.loss.uncorrected=true"
            )
        if isinstance(self.engine, SGLangEngines):
            context = self.engine.context_length
            if context is not None and context < self.rollout.max_context_tokens:
                raise ValueError(
                    f"engine.context_length is {context}, below rollout.max_context_tokens = "
                    f"{self.rollout.max_context_tokens}: raise the one or lower the other"
                )
        if layout.vpp > 1 and layout.pp == 1:
            raise ValueError(
                f"trainer.layout.vpp is {layout.vpp}, but pp is 1: only a pipeline can be interleaved; set "
                "vpp=1 or raise pp"
            )
        if layout.pp == 1 and (layout.first_stage_layers or layout.last_stage_layers):
            raise ValueError(
                "trainer.layout has first_stage_layers or last_stage_layers, but pp is 1: only stages of a "
                "pipeline can differ; leave them out or raise pp"
            )
        if self.routing.replay == "r2" and self.trainer.loss.old_log_probs != "recompute":
            raise ValueError(
                "routing.replay=r2 records routing where the old log-probs are computed, but "
                f"trainer.loss.old_log_probs is {self.trainer.loss.old_log_probs}: set it to recompute, or "
                "replay r3"
            )
        if (
            self.routing.replay == "r3"
            and self.weights.interrupt == "in_place"
            and self.routing.merge == "replace"
        ):
            raise ValueError(
                "weights.interrupt=in_place keeps the old KV cache, so the engine splices routing "
                "by itself: set "
                "routing.merge=splice, or interrupt by abort or retract"
            )
        self._check_evaluation()
        if self.placement.shared:
            check_sharing(self)

    def _check_evaluation(self) -> None:
        evaluation, engine = self.evaluation, self.engine
        if evaluation.enabled and not self.data.validation:
            raise ValueError(
                "evaluation.every or evaluation.at_start is set, but data.validation names no dataset: add "
                "`data.validation: [{path: ...}]`"
            )
        too_many = [k for k in evaluation.pass_at if k > evaluation.samples]
        if too_many:
            raise ValueError(
                f"evaluation.pass_at has {too_many[0]}, but evaluation.samples is {evaluation.samples}: "
                "pass@k needs at least k answers of a task"
            )
        if not (evaluation.enabled and isinstance(evaluation.engines, int)):
            return
        if engine.urls_file is not None:
            raise ValueError(
                f"evaluation.engines is {evaluation.engines}, but the engines of engine.urls_file come and "
                "go: set evaluation.engines=shared"
            )
        urls = engine.urls if isinstance(engine, SGLangEngines) else ()
        total = len(urls) or engine.num_engines
        if evaluation.engines >= total:
            raise ValueError(
                f"evaluation.engines is {evaluation.engines}, and the run has {total} engines, of which none "
                "would be left for rollouts: lower it, add engines, or set evaluation.engines=shared"
            )

    @property
    def batch_trajectories(self) -> int:
        """Trajectories one trainer step consumes."""
        return self.trainer.groups_per_batch * self.rollout.group_size

    @property
    def max_outstanding_groups(self) -> int:
        """Groups that may be dispatched and not yet trained: more could not be trained within the bound."""
        return self.trainer.groups_per_batch * (self.rollout.max_staleness + 1)
