"""Settings of the run itself: its folder and model, queue, placement, stall doctor and metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from async_rl.config.base import Meta, PositiveFloat, PositiveInt, Strict
from async_rl.runtime.files import FILE_NAME


class RunConfig(Strict, frozen=True, kw_only=True):
    """The run itself: its folder, length and log."""

    name: Annotated[str, Meta(pattern=FILE_NAME, description="Name of the run and of its folder.")] = "run"
    dir: Annotated[str, Meta(description="Folder that holds the run folders.")] = "runs"
    seed: Annotated[
        int, Meta(ge=0, lt=2**62, description="Seed of the data order, sampling and initialisation.")
    ] = 0
    max_steps: Annotated[int, Meta(ge=1, description="Trainer steps; each publishes one weight version.")] = (
        100
    )
    resume: Annotated[
        Literal["auto", "never", "must"],
        Meta(
            description=(
                "`auto` continues from the newest complete checkpoint in the run folder, or "
                "starts a new run; `never` refuses a folder with checkpoints; `must` requires "
                "one."
            )
        ),
    ] = "auto"
    drain_s: Annotated[
        float,
        Meta(
            ge=0, description="Maximum time for running trajectories to finish when the run stops, seconds."
        ),
    ] = 30.0
    log_level: Annotated[
        Literal["debug", "info", "warning"], Meta(description="Level of the run's log file.")
    ] = "info"
    keep_trajectories: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Number of newest finished trajectories that are kept for `async-rl inspect`, "
                "without routing: about 8 bytes per token. 0 keeps none."
            ),
        ),
    ] = 1000


class ModelConfig(Strict, frozen=True, kw_only=True):
    """The policy."""

    path: Annotated[str, Meta(description="Folder of a Hugging Face model and its tokenizer.")]
    dtype: Annotated[
        Literal["float32", "bfloat16"], Meta(description="Data type of the weights in engines and trainer.")
    ] = "bfloat16"
    trusted_roles: Annotated[
        list[Literal["system", "developer", "user", "assistant", "tool"]],
        Meta(
            description=(
                "Roles of messages in which the text of a control token, such as `<|im_end|>`, becomes "
                "that token, and so can end a turn and begin another in any role; tools' schemas belong "
                "to `system`. Name a role only if you trust all who write its text: datasets, tools, "
                "agents; see docs/design/security.md."
            )
        ),
    ] = []


class FrozenModelConfig(Strict, frozen=True, kw_only=True):
    """A further model, on engines of its own that are never updated: a teacher or a judge.

    Device, host, time limits, health checks and restarts of its engines are those of `engine`.
    """

    path: Annotated[str, Meta(description="Folder of the Hugging Face model and its tokenizer.")]
    dtype: Annotated[
        Literal["float32", "bfloat16"], Meta(description="Data type of the weights in its engines.")
    ] = "bfloat16"
    num_engines: Annotated[int, Meta(ge=1, description="Servers to start; none if `urls` is set.")] = 1
    urls: Annotated[
        list[str],
        Meta(description="URLs of servers that are already running; their keys are as for `engine`."),
    ] = []
    tp_size: Annotated[int, Meta(ge=1, description="Tensor-parallel size of one engine.")] = 1
    num_nodes: Annotated[
        int, Meta(ge=1, description="Nodes that share one engine, each with an equal part of its GPUs.")
    ] = 1
    context_length: Annotated[
        PositiveInt | None, Meta(description="Context length of its servers; null takes the model's.")
    ] = None
    max_running_requests: Annotated[
        int, Meta(ge=1, description="Requests that one of its engines works on together.")
    ] = 64
    max_total_tokens: Annotated[
        PositiveInt | None, Meta(description="KV cache in tokens; null lets SGLang choose (GPU only).")
    ] = None
    extra_args: Annotated[
        list[str], Meta(description="Further command-line arguments of its servers, passed unchanged.")
    ] = []


class QueueConfig(Strict, frozen=True, kw_only=True):
    """The queue between rollouts and trainer."""

    max_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description=(
                "Maximum size of finished trajectories in the spool, bytes; with `spool_dir` on each node."
            ),
        ),
    ] = 8 << 30
    spool_dir: Annotated[
        str | None,
        Meta(
            description=(
                "Folder on each node, such as one on its own disk, in which its processes keep finished "
                "trajectories until they are trained; null keeps them in the run folder. They then cross "
                "the network once, to nodes whose trainer ranks need them. What a lost node had is sampled "
                "again."
            )
        ),
    ] = None
    journal_s: Annotated[
        PositiveFloat | None,
        Meta(
            description=(
                "Seconds between writes of the journal of trajectories in flight, which is the "
                "work that a kill can lose; null keeps no journal, and a restart then samples "
                "them from the beginning."
            ),
        ),
    ] = 1.0
    journal_dir: Annotated[
        str | None,
        Meta(
            description=(
                "Folder on each node in which its processes keep their journals; null keeps them in the "
                "run folder. Use it where the run folder is too slow for 8 bytes per sampled token. "
                "Trajectories whose node is lost, or that go on at another node, then start from "
                "their prompts."
            ),
        ),
    ] = None


Resources = dict[str, Annotated[float, Meta(ge=0)]]
"""Amounts of Ray's resources, by name."""


class PlacementConfig(Strict, frozen=True, kw_only=True):
    """Where processes run. The same config works on one machine and on a cluster."""

    ray_address: Annotated[
        str | None,
        Meta(
            description=(
                "Ray cluster to join: `auto` finds the one that this machine belongs to, "
                "`host:port` names it; null or `local` starts Ray here."
            )
        ),
    ] = None
    wait_s: Annotated[
        PositiveFloat,
        Meta(
            description=(
                "Maximum wait for nodes with capacity for all engines, or all ranks, seconds; set "
                "it higher where nodes are started on demand."
            )
        ),
    ] = 60.0
    shared: Annotated[
        bool,
        Meta(
            description=(
                "Engines and trainer share the same devices and alternate: engines release their "
                "memory while the trainer works, and the trainer releases its own while they "
                "generate. On CPUs this only shares the cores."
            )
        ),
    ] = False
    resources_per_engine: Annotated[
        Resources,
        Meta(
            description=(
                "What Ray reserves for an engine on each of its nodes: `CPU`, `GPU` (without it, tp_size / "
                "num_nodes on cuda) and custom resources, such as a label of the nodes that it may run on."
            )
        ),
    ] = {}
    resources_per_rank: Annotated[
        Resources,
        Meta(
            description=(
                "What Ray reserves for a trainer rank: `CPU`, `GPU` (without it, 1 on cuda) and custom "
                "resources."
            )
        ),
    ] = {}
    resources_per_rollout_worker: Annotated[
        Resources,
        Meta(
            description=(
                "What Ray reserves for a process of `rollout.num_workers`: `CPU` and custom resources, such "
                "as that of nodes with engines; workers are spread over the nodes that have them."
            )
        ),
    ] = {}

    @property
    def joins(self) -> bool:
        """Whether the run joins an existing cluster."""
        return self.ray_address not in (None, "local")


class DoctorConfig(Strict, frozen=True, kw_only=True):
    """The stall doctor, which detects a run without progress."""

    action: Annotated[
        Literal["report", "repair", "end"],
        Meta(
            description=(
                "`report`: write the chain of waits to the log, `/health` and the metrics; "
                "`repair`: also retry, quarantine or drop what the run waits for, and end the run "
                "with exit code 4 if that does not help; `end`: end the run at once."
            )
        ),
    ] = "report"
    stall_s: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "The run is stalled after this many seconds without a token, a finished "
                "trajectory, a trainer step or an engine that starts to serve, if what it waits "
                "for exceeds its own limit or has none."
            ),
        ),
    ] = 45.0


class MetricsConfig(Strict, frozen=True, kw_only=True):
    """The /metrics and /health endpoints of the driver, and experiment trackers."""

    host: Annotated[str, Meta(description="Address to bind to.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0 takes a free one and prints it.")] = 0
    trackers: Annotated[
        list[str],
        Meta(
            description=(
                "Where the figures of each step are sent, in addition to `metrics.jsonl`, under "
                "verl's names (docs/reference/metrics.md): `wandb`, `tensorboard`, `jsonl`, `console`, or "
                "the dotted path of a user's class."
            )
        ),
    ] = []
    wandb_project: Annotated[
        str,
        Meta(
            description=(
                "Project of the run in Weights & Biases, under the name `run.name`. Its key, entity and mode "
                "are what `wandb login`, WANDB_API_KEY, WANDB_ENTITY and WANDB_MODE say."
            )
        ),
    ] = "async_rl"
    targets_dir: Annotated[
        str | None,
        Meta(
            description=(
                "Folder of the file that tells Prometheus the address of the run; null takes "
                "`.prometheus` in run.dir."
            )
        ),
    ] = None
