"""Settings of the run itself: its folder and model, queue, placement, stall doctor and metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from async_rl.config.base import Meta, PositiveFloat, Strict


class RunConfig(Strict, frozen=True, kw_only=True):
    """The run itself."""

    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9._-]+$", description="Name of the run and of its folder.")
    ] = "run"
    dir: Annotated[str, Meta(description="Folder that holds the run folders.")] = "runs"
    seed: Annotated[int, Meta(ge=0, description="Seed of the data order, sampling and initialisation.")] = 0
    max_steps: Annotated[int, Meta(ge=1, description="Trainer steps; each publishes one weight version.")] = (
        100
    )
    resume: Annotated[
        Literal["auto", "never", "must"],
        Meta(
            description=(
                "`auto` continues from the newest whole checkpoint of the run folder, or begins; `never` "
                "refuses one, `must` wants one."
            )
        ),
    ] = "auto"
    drain_s: Annotated[
        float, Meta(ge=0, description="Longest wait for running work when the run stops, seconds.")
    ] = 30.0
    log_level: Annotated[
        Literal["debug", "info", "warning"], Meta(description="Level of the run's log file.")
    ] = "info"
    keep_trajectories: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "So many newest finished trajectories are kept for `async-rl inspect`, without routing "
                "rows: some 8 bytes a token. 0 keeps none."
            ),
        ),
    ] = 1000


class ModelConfig(Strict, frozen=True, kw_only=True):
    """The policy."""

    path: Annotated[str, Meta(description="Folder of a Hugging Face model and its tokenizer.")]
    dtype: Annotated[
        Literal["float32", "bfloat16"], Meta(description="Type of weights in engines and trainer.")
    ] = "bfloat16"


class QueueConfig(Strict, frozen=True, kw_only=True):
    """The queue between rollouts and trainer."""

    max_bytes: Annotated[
        int, Meta(ge=1 << 20, description="Most bytes of finished trajectories held in the spool.")
    ] = 8 << 30
    journal_s: Annotated[
        PositiveFloat | None,
        Meta(
            description=(
                "Seconds between writes of the journal of trajectories in flight: what a kill can cost; null "
                "keeps none, and a restart then samples them from their beginning."
            ),
        ),
    ] = 1.0


class PlacementConfig(Strict, frozen=True, kw_only=True):
    """Where processes run. The same config runs on one machine or a cluster."""

    ray_address: Annotated[
        str | None,
        Meta(
            description=(
                "Ray cluster to join: `auto` finds the one this machine is a node of, `host:port` names it; "
                "null or `local` starts Ray here."
            )
        ),
    ] = None
    wait_s: Annotated[
        PositiveFloat,
        Meta(
            description=(
                "Longest wait for nodes with room for all engines, or all ranks, seconds; longer where nodes "
                "are started on demand."
            )
        ),
    ] = 60.0
    cpus_per_engine: Annotated[float, Meta(ge=0, description="CPUs reserved for an engine.")] = 0.0
    cpus_per_rank: Annotated[float, Meta(ge=0, description="CPUs reserved for a trainer rank.")] = 0.0
    cpus_per_rollout_worker: Annotated[
        float, Meta(ge=0, description="CPUs reserved for each of `rollout.num_workers`.")
    ] = 0.0
    gpus_per_engine: Annotated[
        float | None, Meta(description="GPUs of an engine; null takes its tp_size on cuda, 0 on cpu.")
    ] = None
    gpus_per_rank: Annotated[
        float | None, Meta(description="GPUs of a trainer rank; null takes 1 on cuda, 0 on cpu.")
    ] = None
    shared: Annotated[
        bool,
        Meta(
            description=(
                "Engines and trainer take turns on the same devices: engines give their memory back while "
                "the trainer works, and the other way round. On a CPU there is nothing to gain but the cores."
            )
        ),
    ] = False
    resources_per_engine: Annotated[
        dict[str, PositiveFloat],
        Meta(description="Custom Ray resources of an engine, such as a label of the nodes it may run on."),
    ] = {}
    resources_per_rank: Annotated[
        dict[str, PositiveFloat], Meta(description="The same for a trainer rank.")
    ] = {}
    engine_strategy: Annotated[
        Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
        Meta(description="How engines are put on nodes; all GPUs of one engine are always on one node."),
    ] = "SPREAD"
    trainer_strategy: Annotated[
        Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
        Meta(
            description=(
                "How trainer ranks are put on nodes; those of a node have consecutive numbers, so that "
                "neighbours in tp and ep share it."
            )
        ),
    ] = "PACK"

    @property
    def joins(self) -> bool:
        """Whether the run joins a cluster that is there already."""
        return self.ray_address not in (None, "local")


class DoctorConfig(Strict, frozen=True, kw_only=True):
    """What happens when a run does not move."""

    action: Annotated[
        Literal["report", "repair", "end"],
        Meta(
            description=(
                "`report`: the chain of waits goes to the log, `/health` and the metrics; `repair`: what "
                "everything waits for is also tried again, taken out of service or dropped, and the run ends "
                "with exit code 4 if that does not help; `end`: it ends at once."
            )
        ),
    ] = "report"
    stall_s: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "The run stands still when no token, no end of a trajectory, no step and no engine that "
                "begins to serve came for so long, seconds, and what it waits for is over its own limit or "
                "has none."
            ),
        ),
    ] = 45.0
    look_s: Annotated[float, Meta(gt=0, description="Time between two looks, seconds.")] = 5.0
    blocked_s: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "An event loop that stands still for so long is reported with what it executes, seconds."
            ),
        ),
    ] = 10.0


class WandbConfig(Strict, frozen=True, kw_only=True):
    """Weights & Biases; its key comes from `wandb login` or WANDB_API_KEY, never from here."""

    project: Annotated[str, Meta(description="Project; the run in it is named `run.name`.")] = "async_rl"
    entity: Annotated[str | None, Meta(description="User or team; null takes the account's own.")] = None
    mode: Annotated[
        Literal["online", "offline"],
        Meta(description="`offline` writes files that `wandb sync` uploads later."),
    ] = "online"


class MetricsConfig(Strict, frozen=True, kw_only=True):
    """The /metrics and /health endpoints of the driver, and experiment trackers."""

    host: Annotated[str, Meta(description="Address to bind to.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0 takes a free one and prints it.")] = 0
    trackers: Annotated[
        list[str],
        Meta(
            description=(
                "Where each step's figures go beside `metrics.jsonl`, under verl's names "
                "(docs/reference/metrics.md): "
                "`wandb`, `tensorboard`, `jsonl`, `console`, or the dotted path of one of your own."
            )
        ),
    ] = []
    wandb: WandbConfig = WandbConfig()
    targets_dir: Annotated[
        str | None,
        Meta(description="Where the run tells Prometheus its address; null takes `.prometheus` in run.dir."),
    ] = None
