"""Settings of engines, of routing replay, and of weight updates."""

from __future__ import annotations

from typing import Annotated, Literal

from async_rl.config.base import Meta, PositiveInt, Strict


class EnginesConfig(Strict, frozen=True, kw_only=True):
    """Settings of every kind of engine: failure detection, restarts and load."""

    stall_s: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "An engine that has calls but sends nothing for this many seconds has failed; "
                "time for the tokens that it must prefill is added. So has one that sends less than a "
                "megabyte of a routing payload in this time."
            ),
        ),
    ] = 60.0
    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Restarts of one engine within an hour; after them it stays out of service until its oldest "
                "restart is an hour ago."
            ),
        ),
    ] = 3
    max_outage_s: Annotated[
        float, Meta(gt=0, description="The run ends when no engine has served for this many seconds.")
    ] = 300.0
    urls_file: Annotated[
        str | None,
        Meta(
            description=(
                "A file of server URLs, one per line, that is read again every few seconds: "
                "servers join and leave the running job as lines are added and removed. Use it "
                "instead of `urls`."
            )
        ),
    ] = None


class SGLangEngines(EnginesConfig, frozen=True, kw_only=True, tag_field="kind", tag="sglang"):
    """SGLang servers, started by the run or elsewhere (`urls`)."""

    num_engines: Annotated[
        int, Meta(ge=1, description="Servers to start; none if `urls` or `urls_file` is set.")
    ] = 1
    urls: Annotated[
        list[str],
        Meta(
            description=(
                "URLs of servers that are already running. Their keys are read from the "
                "environment variables ASYNC_RL_ENGINE_API_KEY and ASYNC_RL_ENGINE_ADMIN_KEY."
            )
        ),
    ] = []
    device: Annotated[
        Literal["auto", "cuda", "cpu"], Meta(description="`auto` takes the GPU if torch sees one.")
    ] = "auto"
    tp_size: Annotated[int, Meta(ge=1, description="Tensor-parallel size of one engine.")] = 1
    num_nodes: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Nodes that share one engine, each with an equal part of its `tp_size` GPUs; above 1 only "
                "for a model that one node cannot hold."
            ),
        ),
    ] = 1
    host: Annotated[
        str,
        Meta(
            description=(
                "Address that the servers bind to; `auto` takes the loopback interface if Ray "
                "runs on this machine only, and the address of each server's node in a cluster."
            )
        ),
    ] = "auto"
    context_length: Annotated[
        PositiveInt | None, Meta(description="Context length of the server; null takes the model's.")
    ] = None
    max_running_requests: Annotated[
        int, Meta(ge=1, description="Requests that one engine decodes together.")
    ] = 64
    max_total_tokens: Annotated[
        PositiveInt | None, Meta(description="KV cache in tokens; null lets SGLang choose (GPU only).")
    ] = None
    start_timeout_s: Annotated[float, Meta(gt=0, description="Maximum start time of a server, seconds.")] = (
        600.0
    )
    request_timeout_s: Annotated[
        float, Meta(gt=0, description="Maximum response time of a control request, seconds.")
    ] = 60.0
    extra_args: Annotated[
        list[str], Meta(description="Further command-line arguments of the SGLang server, passed unchanged.")
    ] = []
    narrow_routing: Annotated[
        bool,
        Meta(
            description=(
                "Started servers send routing as uint8 or uint16 and of the MoE layers only: a "
                "quarter of the bytes (uint16: half), fewer if some layers are dense. This "
                "patches SGLang 0.5.23 at its start and is refused for any other version."
            )
        ),
    ] = False


class SimulatedEngines(EnginesConfig, frozen=True, kw_only=True, tag_field="kind", tag="simulated"):
    """Engines with the same contract in virtual or real time, without a model: for tests and dry runs."""

    num_engines: Annotated[int, Meta(ge=1, description="Simulated engines.")] = 2
    max_running_requests: Annotated[
        int, Meta(ge=1, description="Requests that one engine decodes together.")
    ] = 64
    decode_step_s: Annotated[float, Meta(ge=0, description="Duration of one decode step, seconds.")] = 0.002
    prefill_tokens_per_s: Annotated[float, Meta(gt=0, description="Prefill speed, tokens per second.")] = (
        30000.0
    )
    mean_new_tokens: Annotated[float, Meta(gt=0, description="Mean length of an answer, tokens.")] = 32.0


class RoutingConfig(Strict, frozen=True, kw_only=True):
    """Routing replay."""

    replay: Annotated[
        Literal["off", "r2", "r3"],
        Meta(
            description=(
                "`r3` replays the engine's expert choice in the trainer, `r2` the trainer's own "
                "choice in the old log-prob pass; both are for MoE models only."
            )
        ),
    ] = "r3"
    merge: Annotated[
        Literal["replace", "splice"],
        Meta(
            description=(
                "On resume, the newest full-sequence routing replaces the earlier one (`replace`) "
                "or only extends it (`splice`). It is never concatenated."
            )
        ),
    ] = "replace"
    flip_sample: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description=(
                "Share of the interrupted trajectories whose replaced rows are decoded too, to "
                "measure how many experts changed (`routing_flip_ratio`)."
            ),
        ),
    ] = 0.05
    probe_every: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Steps between probes that route one micro-batch per rank without replay, to "
                "measure how much engine mismatch replay removes (`kl_routing_nats`); 0 disables "
                "them."
            ),
        ),
    ] = 10

    @property
    def from_engine(self) -> bool:
        """Whether engines must return routing."""
        return self.replay == "r3"


class WeightsConfig(Strict, frozen=True, kw_only=True):
    """How new weights reach the engines."""

    transport: Annotated[
        Literal["disk", "distributed", "tensor", "delta"],
        Meta(
            description=(
                "`disk`: safetensors files; `distributed`: NCCL or Gloo broadcast in buckets; "
                "`tensor`: buckets in shared memory, for engines on the host of trainer rank 0; "
                "`delta`: a file of the changes, applied to a copy of the weights on each "
                "engine's host."
            )
        ),
    ] = "disk"
    interrupt: Annotated[
        Literal["abort", "retract", "in_place"],
        Meta(
            description=(
                "What happens to running requests: `abort` ends them and sessions resume them on "
                "any engine; `retract` lets the engine recompute them; `in_place` keeps their old "
                "KV cache."
            )
        ),
    ] = "abort"
    rolling: Annotated[
        bool, Meta(description="Update one engine after the other, so that the others keep generating.")
    ] = False
    overlap: Annotated[
        bool,
        Meta(
            description=(
                "Copy the trainer's weights after a step and send them while the next step runs: "
                "the trainer pauses only for the copy, and rank 0 holds all weights once more."
            )
        ),
    ] = False
    snapshot: Annotated[
        Literal["host", "device"],
        Meta(
            description=(
                "Where that copy is stored: in rank 0's host memory (pinned if there is a GPU) or on its GPU."
            )
        ),
    ] = "host"
    bucket_bytes: Annotated[int, Meta(ge=1 << 16, description="Size of a bucket, bytes.")] = 256 << 20
    local_dir: Annotated[
        str,
        Meta(
            min_length=1,
            description=(
                "Where an engine's host keeps its copy for `transport: delta`, one folder per "
                "engine: capacity for the weights twice, in memory or on a fast disk."
            ),
        ),
    ] = "/dev/shm"
    verify: Annotated[
        Literal["version", "checksum"],
        Meta(
            description=(
                "What is read back from an engine after an update: `version`: the version that it "
                "reports; `checksum`: also checksums of all its weights, compared between engines "
                "and with the trainer's."
            )
        ),
    ] = "version"
    timeout_s: Annotated[
        float, Meta(gt=0, description="Maximum duration of the update of one engine, seconds.")
    ] = 300.0
