"""Settings of the run itself: its folder and model, queue, placement, stall doctor and metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from async_rl.config.base import Meta, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Strict
from async_rl.runtime.files import FILE_NAME


class RunConfig(Strict, frozen=True, kw_only=True):
    """The run itself: its folder, length and log."""

    name: Annotated[str, Meta(pattern=FILE_NAME)] = "run"
    """Name of the run and of its folder."""
    dir: str = "runs"
    """Folder that holds the run folders."""
    seed: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    """Seed of the data order, sampling and initialisation."""
    max_steps: PositiveInt = 100
    """Trainer steps; each publishes one weight version."""
    resume: Literal["auto", "never", "must"] = "auto"
    """`auto` continues from the newest complete checkpoint in the run folder, or starts a new run; `never`
    refuses a folder with checkpoints; `must` requires one."""
    drain_s: NonNegativeFloat = 30.0
    """Maximum time for running trajectories to finish when the run stops, seconds."""
    keep_trajectories: NonNegativeInt = 1000
    """Number of newest finished trajectories that are kept for `async-rl inspect`, without routing: about 8
    bytes per token. 0 keeps none."""


class ModelConfig(Strict, frozen=True, kw_only=True):
    """The policy."""

    path: str
    """Folder of a Hugging Face model and its tokenizer, or `hub:OWNER/NAME` on the Hugging Face Hub, with
    `?revision=…` behind it: every command downloads it into the Hub's cache, `plan` only its config."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights in engines and trainer."""
    trusted_roles: list[Literal["system", "developer", "user", "assistant", "tool"]] = []
    """Roles of messages in which the text of a control token, such as `<|im_end|>`, becomes that token, and
    so can end a turn and begin another in any role; tools' schemas belong to `system`. Name a role only if
    you trust all who write its text: datasets, tools, agents; see docs/design/security.md."""


class FrozenModelConfig(Strict, frozen=True, kw_only=True):
    """A further model, on engines of its own that are never updated: a teacher or a judge.

    Device, host, time limits, health checks and restarts of its engines are those of `engine`.
    """

    path: str
    """Folder of the Hugging Face model and its tokenizer, or its name on the Hub, as `model.path`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights in its engines."""
    num_engines: PositiveInt = 1
    """Servers to start; none if `urls` is set."""
    urls: list[str] = []
    """URLs of servers that are already running; their keys are as for `engine`."""
    tp_size: PositiveInt = 1
    """Tensor-parallel size of one engine."""
    num_nodes: PositiveInt = 1
    """Nodes that share one engine, each with an equal part of its GPUs."""
    context_length: PositiveInt | None = None
    """Context length of its servers; null takes the model's."""
    max_running_requests: PositiveInt = 64
    """Requests that one of its engines works on together."""
    max_total_tokens: PositiveInt | None = None
    """KV cache in tokens; null lets SGLang choose (GPU only)."""
    extra_args: list[str] = []
    """Further command-line arguments of its servers, passed unchanged."""


class QueueConfig(Strict, frozen=True, kw_only=True):
    """The queue between rollouts and trainer."""

    max_bytes: Annotated[int, Meta(ge=1 << 20)] = 8 << 30
    """Maximum size of finished trajectories in the spool, bytes; with `spool_dir` on each node."""
    spool_dir: str | None = None
    """Folder on each node, such as one on its own disk, in which its processes keep finished trajectories
    until they are trained; null keeps them in the run folder. They then cross the network once, to nodes
    whose trainer ranks need them. What a lost node had is sampled again."""
    journal_s: PositiveFloat | None = 1.0
    """Seconds between writes of the journal of trajectories in flight, which is the work that a kill can
    lose; null keeps no journal, and a restart then samples them from the beginning."""
    journal_dir: str | None = None
    """Folder on each node in which its processes keep their journals; null keeps them in the run folder. Use
    it where the run folder is too slow for 8 bytes per sampled token. Trajectories whose node is lost, or
    that go on at another node, then start from their prompts."""


Resources = dict[str, Annotated[float, Meta(ge=0)]]
"""Amounts of Ray's resources, by name."""


class PlacementConfig(Strict, frozen=True, kw_only=True):
    """Where processes run. The same config works on one machine and on a cluster."""

    ray_address: str | None = None
    """Ray cluster to join: `auto` finds the one that this machine belongs to, `host:port` names it; null or
    `local` starts Ray here."""
    wait_s: PositiveFloat = 60.0
    """Maximum wait for nodes with capacity for all engines, or all ranks, seconds; set it higher where nodes
    are started on demand."""
    shared: bool = False
    """Engines and trainer share the same devices and alternate: engines release their memory while the
    trainer works, and the trainer releases its own while they generate. On CPUs this only shares the
    cores."""
    resources_per_engine: Resources = {}
    """What Ray reserves for an engine on each of its nodes: `CPU`, `GPU` (without it, tp_size / num_nodes on
    cuda) and custom resources, such as a label of the nodes that it may run on."""
    resources_per_rank: Resources = {}
    """What Ray reserves for a trainer rank: `CPU`, `GPU` (without it, 1 on cuda) and custom resources. With
    `shared` on cuda, an engine's placement has them once for each of its GPUs, and `GPU` is ignored."""
    resources_per_rollout_worker: Resources = {}
    """What Ray reserves for a process of `rollout.num_workers`: `CPU` and custom resources, such as that of
    nodes with engines; workers are spread over the nodes that have them."""

    @property
    def joins(self) -> bool:
        """Whether the run joins an existing cluster."""
        return self.ray_address not in (None, "local")


class DoctorConfig(Strict, frozen=True, kw_only=True):
    """The stall doctor, which detects a run without progress."""

    action: Literal["report", "repair", "end"] = "report"
    """`report`: write the chain of waits to the log, `/health` and the metrics; `repair`: also retry,
    quarantine or drop what the run waits for, and end the run with exit code 4 if that does not help; `end`:
    end the run at once."""
    stall_s: PositiveFloat = 45.0
    """The run is stalled after this many seconds without a token, a finished trajectory, a trainer step or an
    engine that starts to serve, if what it waits for exceeds its own limit or has none."""


class MetricsConfig(Strict, frozen=True, kw_only=True):
    """The /metrics and /health endpoints of the driver, and experiment trackers."""

    host: str = "127.0.0.1"
    """Address to bind to."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port; 0 takes a free one and prints it."""
    trackers: list[str] = []
    """Where the figures of each step are sent, in addition to `metrics.jsonl`, under verl's names
    (docs/reference/metrics.md): `wandb`, `mlflow`, `swanlab`, `trackio`, `tensorboard`, `jsonl`, `console`,
    or the dotted path of a user's class."""
    project: str = "async_rl"
    """Project of the run in SwanLab and Trackio, and its experiment in MLflow. Where their servers are, and
    their keys, are what their own settings say, such as MLFLOW_TRACKING_URI."""
    wandb_project: str = "async_rl"
    """Project of the run in Weights & Biases, under the name `run.name`. Its key, entity and mode are what
    `wandb login`, WANDB_API_KEY, WANDB_ENTITY and WANDB_MODE say."""
    targets_dir: str | None = None
    """Folder of the file that tells Prometheus the address of the run; null takes `.prometheus` in
    run.dir."""
