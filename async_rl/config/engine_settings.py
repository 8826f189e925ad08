"""Settings of engines, of routing replay, and of weight updates."""

from __future__ import annotations

from typing import Annotated, Literal

from async_rl.config.base import Meta, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Strict

MaxCalls = Literal["adaptive"] | PositiveInt | None
"""See `engine.max_calls`."""


class EnginesConfig(Strict, frozen=True, kw_only=True):
    """Settings of every kind of engine: failure detection, restarts and load."""

    stall_s: PositiveFloat = 60.0
    """An engine that has calls but sends nothing for this many seconds has failed; time for the tokens that
    it must prefill is added. So has one that sends less than a megabyte of a routing payload in this time."""
    max_restarts: NonNegativeInt = 3
    """Restarts of one engine within an hour; after them it stays out of service until its oldest restart is
    an hour ago."""
    max_outage_s: PositiveFloat = 300.0
    """The run ends when no engine has served for this many seconds."""
    max_calls: MaxCalls = None
    """Calls that one engine is given at once; the others wait, and go to the first engine that has space.
    null gives an engine all calls, which then wait in its own queue. `adaptive`: as many as its KV cache
    holds, by the lengths of calls and the retractions seen so far, but at most an eighth more than it runs at
    once (`max_running_requests`). A number fixes it. See docs/design/engines.md."""
    urls_file: str | None = None
    """A file of server URLs, one per line, that is read again every few seconds: servers join and leave the
    running job as lines are added and removed. Use it instead of `urls`."""


class SGLangEngines(EnginesConfig, frozen=True, kw_only=True, tag_field="kind", tag="sglang"):
    """SGLang servers, started by the run or elsewhere (`urls`)."""

    num_engines: PositiveInt = 1
    """Servers to start; none if `urls` or `urls_file` is set."""
    urls: list[str] = []
    """URLs of servers that are already running. Their keys are read from the environment variables
    ASYNC_RL_ENGINE_API_KEY and ASYNC_RL_ENGINE_ADMIN_KEY."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` takes the GPU if torch sees one."""
    tp_size: PositiveInt = 1
    """Tensor-parallel size of one engine."""
    num_nodes: PositiveInt = 1
    """Nodes that share one engine, each with an equal part of its `tp_size` GPUs; above 1 only for a model
    that one node cannot hold."""
    host: str = "auto"
    """Address that the servers bind to; `auto` takes the loopback interface if Ray runs on this machine only,
    and the address of each server's node in a cluster."""
    context_length: PositiveInt | None = None
    """Context length of the server; null takes the model's."""
    max_running_requests: PositiveInt = 64
    """Requests that one engine decodes together."""
    max_total_tokens: PositiveInt | None = None
    """KV cache in tokens; null lets SGLang choose (GPU only)."""
    start_timeout_s: PositiveFloat = 600.0
    """Maximum start time of a server, seconds; begins anew with each compiler that the server starts, as its
    first start on a machine does for kernels."""
    request_timeout_s: PositiveFloat = 60.0
    """Maximum response time of a control request, seconds."""
    extra_args: list[str] = []
    """Further command-line arguments of the SGLang server, passed unchanged."""
    narrow_routing: bool = False
    """Started servers send routing as uint8 or uint16 and of the MoE layers only: a quarter of the bytes
    (uint16: half), fewer if some layers are dense. This patches SGLang 0.5.23 at its start and is refused for
    any other version."""


class SimulatedEngines(EnginesConfig, frozen=True, kw_only=True, tag_field="kind", tag="simulated"):
    """Engines with the same contract in virtual or real time, without a model: for tests and dry runs."""

    num_engines: PositiveInt = 2
    """Simulated engines."""
    max_running_requests: PositiveInt = 64
    """Requests that one engine decodes together."""
    max_total_tokens: PositiveInt | None = None
    """KV cache in tokens; null: it holds all."""
    decode_step_s: NonNegativeFloat = 0.002
    """Duration of one decode step, seconds."""
    prefill_tokens_per_s: PositiveFloat = 30000.0
    """Prefill speed, tokens per second."""
    mean_new_tokens: PositiveFloat = 32.0
    """Mean length of an answer, tokens."""


class RoutingConfig(Strict, frozen=True, kw_only=True):
    """Routing replay."""

    replay: Literal["off", "r2", "r3"] = "r3"
    """`r3` replays the engine's expert choice in the trainer, `r2` the trainer's own choice in the old
    log-prob pass; both are for MoE models only."""
    merge: Literal["replace", "splice"] = "replace"
    """On resume, the newest full-sequence routing replaces the earlier one (`replace`) or only extends it
    (`splice`). It is never concatenated."""
    flip_sample: Annotated[float, Meta(ge=0, le=1)] = 0.05
    """Share of the interrupted trajectories whose replaced rows are decoded too, to measure how many experts
    changed (`routing_flip_ratio`)."""
    probe_every: NonNegativeInt = 10
    """Steps between probes that route one micro-batch per rank without replay, to measure how much engine
    mismatch replay removes (`kl_routing_nats`); 0 disables them."""

    @property
    def from_engine(self) -> bool:
        """Whether engines must return routing."""
        return self.replay == "r3"


class WeightsConfig(Strict, frozen=True, kw_only=True):
    """How new weights reach the engines."""

    transport: Literal["disk", "distributed", "tensor", "delta"] = "disk"
    """`disk`: safetensors files; `distributed`: NCCL or Gloo broadcast in buckets; `tensor`: buckets in
    shared memory, for engines on the host of trainer rank 0, or with `placement.shared` on the GPUs that
    engines and ranks share; `delta`: a file of the changes, applied to a copy of the weights on each engine's
    host."""
    interrupt: Literal["abort", "retract", "in_place"] = "abort"
    """What happens to running requests: `abort` ends them and sessions resume them on any engine; `retract`
    lets the engine recompute them; `in_place` keeps their old KV cache."""
    every: PositiveInt = 1
    """Bring only every so manyth version to the engines, which spares interruptions and makes tokens older
    when they are trained: at most `rollout.max_staleness` + 1."""
    rolling: bool = False
    """Update one engine after the other, so that the others keep generating."""
    overlap: bool = False
    """Copy the trainer's weights after a step and send them while the next step runs: the trainer pauses only
    for the copy, and rank 0 holds all weights once more."""
    snapshot: Literal["host", "device"] = "host"
    """Where that copy is stored: in rank 0's host memory (pinned if there is a GPU) or on its GPU."""
    bucket_bytes: Annotated[int, Meta(ge=1 << 16)] = 256 << 20
    """Size of a bucket, bytes."""
    senders: PositiveInt | None = None
    """Number of trainer ranks that send with `transport: distributed`, each what it and its neighbours own;
    null for one on each host. Every engine has a process group with each. With `overlap` rank 0 sends."""
    local_dir: Annotated[str, Meta(min_length=1)] = "/dev/shm"
    """Where an engine's host keeps its copy for `transport: delta`, one folder per engine: capacity for the
    weights twice, in memory or on a fast disk."""
    verify: Literal["version", "checksum"] = "version"
    """What is read back from an engine after an update: `version`: the version that it reports; `checksum`:
    also checksums of all its weights, compared between engines and with the trainer's."""
    timeout_s: PositiveFloat = 300.0
    """Maximum duration of the update of one engine, seconds."""
