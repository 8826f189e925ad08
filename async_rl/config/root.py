"""A whole config."""

from __future__ import annotations

from async_rl.config.base import Strict
from async_rl.config.checks import CHECKS
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
        for check in CHECKS:
            check(self)

    @property
    def batch_trajectories(self) -> int:
        """Trajectories one trainer step consumes."""
        return self.trainer.groups_per_batch * self.rollout.group_size

    @property
    def max_outstanding_groups(self) -> int:
        """Groups that may be dispatched and not yet trained: more could not be trained within the bound."""
        return self.trainer.groups_per_batch * (self.rollout.max_staleness + 1)
