"""Every setting of a run, with its type, its bounds and a description.

`load_config` is the only way to read a config: YAML, then dotted overrides whose values are YAML too, then a
strict conversion. A misspelt or renamed key, a value out of range, or two settings that exclude each other
end in one `ConfigError` that names the place and the remedy. Nothing outside the config is configurable; keys
for servers are generated per run and passed in a file that only the run's user can read.
"""

from async_rl.config.data_settings import (
    CurriculumConfig,
    DataConfig,
    DatasetConfig,
    PoolConfig,
    RowsConfig,
    SourceConfig,
)
from async_rl.config.description import changed_fields, describe_fields
from async_rl.config.engine_settings import (
    EnginesConfig,
    MaxCalls,
    RoutingConfig,
    SGLangEngines,
    SimulatedEngines,
    WeightsConfig,
)
from async_rl.config.evaluation_settings import EvaluationConfig
from async_rl.config.loader import apply_override, load_config, parse_config, to_builtins
from async_rl.config.rollout_settings import (
    FunctionReward,
    HttpReward,
    JudgeReward,
    NamedLoop,
    RewardConfig,
    RolloutConfig,
)
from async_rl.config.root import Config, old_log_probs_reason
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
    ImportanceConfig,
    KLConfig,
    LayoutConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    RejectConfig,
    TeacherConfig,
    TrainerConfig,
)

__all__ = [
    "ADVANTAGES",
    "OBJECTIVES",
    "Config",
    "CriticConfig",
    "CurriculumConfig",
    "DataConfig",
    "DatasetConfig",
    "DoctorConfig",
    "EnginesConfig",
    "EvaluationConfig",
    "FrozenModelConfig",
    "FunctionReward",
    "HttpReward",
    "ImportanceConfig",
    "JudgeReward",
    "KLConfig",
    "LayoutConfig",
    "LoraConfig",
    "LossConfig",
    "MaxCalls",
    "MetricsConfig",
    "ModelConfig",
    "NamedLoop",
    "OptimizerConfig",
    "PlacementConfig",
    "PoolConfig",
    "QueueConfig",
    "RejectConfig",
    "RewardConfig",
    "RolloutConfig",
    "RoutingConfig",
    "RowsConfig",
    "RunConfig",
    "SGLangEngines",
    "SftConfig",
    "SimulatedEngines",
    "SourceConfig",
    "TeacherConfig",
    "TrainerConfig",
    "WeightsConfig",
    "apply_override",
    "changed_fields",
    "describe_fields",
    "load_config",
    "old_log_probs_reason",
    "parse_config",
    "to_builtins",
]
