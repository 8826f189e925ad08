"""Settings of engines, of the routing that they report, and of how weights get to them."""

from __future__ import annotations

from typing import Annotated, Literal

from async_rl.config.base import Meta, PositiveInt, Strict


class EnginesConfig(Strict, frozen=True, kw_only=True):
    """What is done with any engine: when it counts as failed, how it is brought back, what it is given."""

    stall_s: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "An engine with calls that says nothing for so long has failed, seconds; what it has to "
                "prefill is allowed for."
            ),
        ),
    ] = 60.0
    min_prefill_tokens_per_s: Annotated[
        float,
        Meta(gt=0, description="Slowest prefill that is no stall: what waits for one extends `stall_s` so."),
    ] = 500.0
    probe_s: Annotated[
        float,
        Meta(
            gt=0, description="How often an engine that says nothing is asked whether it is there, seconds."
        ),
    ] = 10.0
    probe_timeout_s: Annotated[float, Meta(gt=0, description="Longest answer to that question, seconds.")] = (
        10.0
    )
    probe_misses: Annotated[
        int, Meta(ge=1, description="Questions in a row without an answer that make an engine failed.")
    ] = 3
    max_prefill_tokens: Annotated[
        PositiveInt | None,
        Meta(
            description=(
                "Calls wait, oldest trajectory first, while an engine has so many tokens to prefill; null "
                "sends all at once."
            )
        ),
    ] = 32768
    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Restarts of one engine within `restart_window_s`; after them `exhausted` says what happens."
            ),
        ),
    ] = 3
    restart_window_s: Annotated[
        float, Meta(gt=0, description="Restarts longer ago are forgotten, seconds.")
    ] = 3600.0
    restart_delay_s: Annotated[
        float,
        Meta(
            ge=0,
            description=(
                "Wait before the second restart within the window, seconds; it doubles with each further "
                "one, less a random share of up to a half."
            ),
        ),
    ] = 2.0
    restart_delay_max_s: Annotated[float, Meta(ge=0, description="Longest such wait, seconds.")] = 300.0
    exhausted: Annotated[
        Literal["leave_out", "end_run"],
        Meta(
            description=(
                "`leave_out`: an engine without restarts left stays out of service until the window has "
                "moved on; `end_run`: the run ends with its last error."
            )
        ),
    ] = "leave_out"
    max_outage_s: Annotated[
        float, Meta(gt=0, description="The run ends when no engine has served for so long, seconds.")
    ] = 300.0
    urls_file: Annotated[
        str | None,
        Meta(
            description=(
                "A file of URLs of servers, one a line, that is read again every few seconds: they join and "
                "leave the running job as lines come and go. Instead of `urls`."
            )
        ),
    ] = None
    drain_s: Annotated[
        float,
        Meta(
            ge=0,
            description=(
                "How long calls may go on at a server that leaves, seconds; then they move with their tokens."
            ),
        ),
    ] = 30.0


class SGLangEngines(EnginesConfig, frozen=True, kw_only=True, tag_field="kind", tag="sglang"):
    """Real SGLang servers: started by us, or somewhere else (`urls`)."""

    num_engines: Annotated[
        int, Meta(ge=1, description="Servers to start; none when `urls` or `urls_file` is set.")
    ] = 1
    urls: Annotated[
        list[str],
        Meta(
            description=(
                "URLs of servers that run already. Their keys are read from the environment variables "
                "ASYNC_RL_ENGINE_API_KEY and ASYNC_RL_ENGINE_ADMIN_KEY."
            )
        ),
    ] = []
    device: Annotated[
        Literal["auto", "cuda", "cpu"], Meta(description="`auto` takes the GPU where torch sees one.")
    ] = "auto"
    tp_size: Annotated[int, Meta(ge=1, description="Tensor-parallel size of one engine.")] = 1
    host: Annotated[
        str,
        Meta(
            description=(
                "Address the servers bind to; `auto` takes the loopback interface where Ray is of this "
                "machine alone, and in a cluster the address of each server's node."
            )
        ),
    ] = "auto"
    context_length: Annotated[
        PositiveInt | None, Meta(description="Context length of the server; null takes the model's.")
    ] = None
    max_running_requests: Annotated[
        int, Meta(ge=1, description="Requests decoded together by one engine.")
    ] = 64
    max_total_tokens: Annotated[
        PositiveInt | None, Meta(description="KV cache in tokens; null lets SGLang choose (GPU only).")
    ] = None
    start_timeout_s: Annotated[float, Meta(gt=0, description="Longest start of a server, seconds.")] = 600.0
    request_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest answer to a control request, seconds.")
    ] = 60.0
    extra_args: Annotated[
        list[str], Meta(description="Further command-line arguments of the SGLang server, as they are.")
    ] = []
    narrow_routing: Annotated[
        bool,
        Meta(
            description=(
                "Servers we start send routing as uint8/uint16 of the MoE layers only: a quarter of the "
                "bytes (uint16: half), less where layers are dense. Patches SGLang 0.5.23 as it starts; "
                "refused for any other version."
            )
        ),
    ] = False


class SimulatedEngines(EnginesConfig, frozen=True, kw_only=True, tag_field="kind", tag="simulated"):
    """Engines of the same contract in virtual or real time, without a model: for tests and dry runs."""

    num_engines: Annotated[int, Meta(ge=1, description="Simulated engines.")] = 2
    max_running_requests: Annotated[int, Meta(ge=1, description="Requests decoded together.")] = 64
    decode_step_s: Annotated[float, Meta(ge=0, description="Time of one decode step, seconds.")] = 0.002
    prefill_tokens_per_s: Annotated[float, Meta(gt=0, description="Prefill speed.")] = 30000.0
    mean_new_tokens: Annotated[float, Meta(gt=0, description="Mean length of an answer, tokens.")] = 32.0
    vocab_size: Annotated[int, Meta(ge=4, description="Token ids are drawn below this.")] = 512
    num_layers: Annotated[int, Meta(ge=1, description="Layers in the routing payload.")] = 2
    num_experts: Annotated[int, Meta(ge=2, description="Experts of a layer.")] = 8
    top_k: Annotated[int, Meta(ge=1, description="Experts a token is sent to.")] = 2


class RoutingConfig(Strict, frozen=True, kw_only=True):
    """Routing replay."""

    replay: Annotated[
        Literal["off", "r2", "r3"],
        Meta(
            description=(
                "`r3` replays the engine's expert choice in the trainer, `r2` the trainer's own of the old "
                "log-prob pass; both for MoE models only."
            )
        ),
    ] = "r3"
    merge: Annotated[
        Literal["replace", "splice"],
        Meta(
            description=(
                "On resume, the newest full-sequence routing replaces the earlier one (`replace`), "
                "or only extends it "
                "(`splice`). Never concatenated."
            )
        ),
    ] = "replace"
    flip_sample: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description=(
                "Share of the interrupted trajectories whose replaced rows are decoded too, to measure how "
                "many experts changed (`routing_flip_ratio`)."
            ),
        ),
    ] = 0.05
    probe_every: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Steps between probes that route one micro-batch a rank without replay, to measure what "
                "replay takes away from the engine mismatch (`kl_routing_nats`); 0 never does."
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
                "`disk`: safetensors files; `distributed`: NCCL or Gloo broadcast in buckets; `tensor`: "
                "buckets in shared memory, for engines on the host of trainer rank 0; `delta`: a file of "
                "what has changed, applied to a copy of the weights on each engine's host."
            )
        ),
    ] = "disk"
    interrupt: Annotated[
        Literal["abort", "retract", "in_place"],
        Meta(
            description=(
                "What happens to running requests: `abort` ends them and sessions resume them "
                "anywhere; `retract` lets the "
                "engine recompute them; `in_place` keeps their old KV cache."
            )
        ),
    ] = "abort"
    rolling: Annotated[
        bool, Meta(description="Update one engine after the other, so that the rest go on generating.")
    ] = False
    overlap: Annotated[
        bool,
        Meta(
            description=(
                "Copy the trainer's weights after a step and send them while the next step runs: the trainer "
                "stands still for the copy only, and rank 0 holds all weights once more."
            )
        ),
    ] = False
    snapshot: Annotated[
        Literal["host", "device"],
        Meta(
            description="Where that copy lies: in rank 0's host memory (pinned beside a GPU) or on its GPU."
        ),
    ] = "host"
    bucket_bytes: Annotated[int, Meta(ge=1 << 16, description="Size of a bucket, bytes.")] = 256 << 20
    full_every: Annotated[
        int,
        Meta(ge=0, description="Deltas between two versions that go out whole, with `transport: delta`."),
    ] = 64
    local_dir: Annotated[
        str,
        Meta(
            min_length=1,
            description=(
                "Where an engine's host keeps its copy for `transport: delta`, one folder an engine: room "
                "for the weights twice, in memory or on a fast disk."
            ),
        ),
    ] = "/dev/shm"
    verify: Annotated[
        Literal["version", "checksum"],
        Meta(
            description=(
                "What is read back from an engine after an update: `version`: the version that it reports; "
                "`checksum`: also sums over all its weights, compared between engines and with the trainer's."
            )
        ),
    ] = "version"
    keep_versions: Annotated[int, Meta(ge=1, description="Published versions kept on disk.")] = 2
    timeout_s: Annotated[float, Meta(gt=0, description="Longest update of one engine, seconds.")] = 300.0
