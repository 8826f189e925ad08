"""Every setting of a run, typed, strict, with its bounds and a sentence each.

A config is read in one way (`load_config`): YAML, then dotted overrides whose values are YAML too, then a
strict conversion. A misspelt key, a value out of range or two settings that exclude each other end in one
`ConfigError` that says where and what to do. Nothing outside the config is configurable; keys for servers are
generated per run and handed over in a file that only we can read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from async_rl import yaml12
from async_rl.errors import ConfigError

Meta = msgspec.Meta
PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the config."""


class RunConfig(_Strict, frozen=True, kw_only=True):
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
        Literal["auto", "never"],
        Meta(
            description="`auto` continues from the newest checkpoint of the run folder; `never` refuses one."
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


class ModelConfig(_Strict, frozen=True, kw_only=True):
    """The policy."""

    path: Annotated[str, Meta(description="Folder of a Hugging Face model and its tokenizer.")]
    dtype: Annotated[
        Literal["float32", "bfloat16"], Meta(description="Type of weights in engines and trainer.")
    ] = "bfloat16"


class RowsConfig(_Strict, frozen=True, kw_only=True):
    """How the rows of a dataset are read. A key may be dotted: `reward_model.ground_truth`."""

    schema: Annotated[
        Literal["auto", "plain", "verl", "slime"] | None,
        Meta(
            description=(
                "Which keys a row has, where they are not named here; `auto` looks at the first row, and "
                "`async-rl check` says what it found; see docs/datasets.md. Null takes `data.schema`, which "
                "is `auto`."
            )
        ),
    ] = None
    messages_key: Annotated[
        str | None, Meta(description="Key of the chat messages, or of a prompt string; null: the schema's.")
    ] = None
    answer_key: Annotated[
        str | None,
        Meta(description="Key of the reference answer, null where a row has none; null: the schema's."),
    ] = None
    id_key: Annotated[
        str | None, Meta(description="Key of the row's id; rows without are named by position.")
    ] = None
    agent_loop_key: Annotated[
        str | None,
        Meta(
            description=(
                "Key of a row's own agent loop, a dotted path or a name of `rollout.agent_loops`; rows "
                "without take `rollout.agent_loop`."
            )
        ),
    ] = None
    reward_key: Annotated[
        str | None,
        Meta(
            description=(
                "Key of a row's own reward, a dotted path or a name of `rollout.rewards`; rows without take "
                "that of their data source, or `rollout.reward`."
            )
        ),
    ] = None
    data_source_key: Annotated[
        str | None, Meta(description="Key of the name of the collection a row is from.")
    ] = None
    tools_key: Annotated[
        str | None, Meta(description="Key of JSON schemas of tools, which go into the prompt.")
    ] = None
    metadata_key: Annotated[
        str | None, Meta(description="Key of an object whose own keys become metadata of the task.")
    ] = None


class SourceConfig(RowsConfig, frozen=True, kw_only=True):
    """A dataset."""

    path: Annotated[str, Meta(description="A .jsonl or .parquet file of tasks.")]
    name: Annotated[str | None, Meta(description="What it is called; null takes the file's stem.")] = None


class DatasetConfig(SourceConfig, frozen=True, kw_only=True):
    """One of several datasets to train on."""

    weight: Annotated[
        PositiveFloat | None,
        Meta(
            description=(
                "How often a task of it comes, beside the weights of the others; null for all: every row "
                "once an epoch."
            )
        ),
    ] = None


class DataConfig(RowsConfig, frozen=True, kw_only=True):
    """Where tasks come from: one file or several. What is no key below becomes the task's metadata."""

    path: Annotated[
        str | None, Meta(description="A .jsonl or .parquet file of tasks; null where `datasets` names them.")
    ] = None
    datasets: Annotated[
        list[DatasetConfig],
        Meta(description="Several datasets, mixed by weight; keys they do not name are taken from `data`."),
    ] = []
    validation: Annotated[
        list[SourceConfig], Meta(description="Datasets that are checked as well and never trained on.")
    ] = []
    long_prompts: Annotated[
        Literal["refuse", "filter", "keep"],
        Meta(
            description=(
                "Prompts of more than `max_prompt_tokens`: `refuse` ends with their lines, `filter` leaves "
                "them out and says how many, `keep` does not look: they are dropped when their turn comes."
            )
        ),
    ] = "refuse"
    max_prompt_tokens: Annotated[
        PositiveInt | None,
        Meta(
            description=(
                "Longest prompt, tokens, tools of the row included and those of the loop not; null takes "
                "what leaves room for one token in `rollout.max_context_tokens`."
            )
        ),
    ] = None
    shuffle: Annotated[bool, Meta(description="Shuffle each epoch with the run's seed.")] = True
    epochs: Annotated[
        PositiveInt | None,
        Meta(
            description=(
                "Passes over the data, each of as many tasks as there are rows; null goes on until "
                "`run.max_steps`."
            )
        ),
    ] = None


class NamedLoop(_Strict, frozen=True, kw_only=True):
    """An agent loop with a short name, which rows can give."""

    loop: Annotated[str, Meta(description="Dotted path of the class: `module:Class`.")]
    args: Annotated[dict[str, Any], Meta(description="Keyword arguments of its constructor.")] = {}


class RewardConfig(_Strict, frozen=True, kw_only=True):
    """A reward with a name."""

    timeout_s: Annotated[
        PositiveFloat | None,
        Meta(description="Longest call, seconds; null takes `rollout.reward_timeout_s`."),
    ] = None
    max_retries: Annotated[
        int, Meta(ge=0, description="Further calls after one that raised, or took too long.")
    ] = 0
    retry_delay_s: Annotated[
        float,
        Meta(ge=0, description="Wait before the first of them, seconds; it doubles, up to 30 s."),
    ] = 1.0
    max_concurrent: Annotated[
        PositiveInt | None, Meta(description="Most calls at a time; null sets no limit.")
    ] = None
    part: Annotated[
        str | None,
        Meta(description="Which part of a mapping is trained on; null takes `reward`, or else `score`."),
    ] = None


class FunctionReward(RewardConfig, frozen=True, kw_only=True, tag_field="kind", tag="function"):
    """A function of the user's, sync or async."""

    function: Annotated[str, Meta(description="Dotted path: `module:function`.")]
    style: Annotated[
        Literal["auto", "plain", "group", "verl", "slime", "slime_group"],
        Meta(
            description=(
                "How it is called: `auto` looks at the names of its parameters; `plain` (task, completion), "
                "`group` (task, completions), `verl` (data_source, solution_str, ground_truth, extra_info), "
                "`slime` (args, sample), `slime_group` (args, samples)."
            )
        ),
    ] = "auto"
    args: Annotated[
        dict[str, Any],
        Meta(description="Keyword arguments of each call; for slime's, attributes of `args`."),
    ] = {}
    processes: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description=(
                "Worker processes for a blocking function that computes: 0 calls it in a thread, null does "
                "as the function asks (`workers.in_processes`)."
            )
        ),
    ] = None


class HttpReward(RewardConfig, frozen=True, kw_only=True, tag_field="kind", tag="http"):
    """A server that is asked by POST with JSON."""

    url: Annotated[str, Meta(pattern=r"^https?://", description="Where to post.")]
    group: Annotated[bool, Meta(description="Ask once for all trajectories of a group.")] = False
    token_env: Annotated[
        str | None,
        Meta(description="Environment variable that holds a bearer token; it is never written down."),
    ] = None
    max_retries: Annotated[
        int,
        Meta(
            ge=0,
            description="Further requests after a lost connection, one that took too long, 429 or 5xx.",
        ),
    ] = 3
    max_concurrent: Annotated[
        PositiveInt | None, Meta(description="Most requests at a time; null sets no limit.")
    ] = 64


class RolloutConfig(_Strict, frozen=True, kw_only=True):
    """How trajectories are made."""

    agent_loop: Annotated[
        str,
        Meta(
            description=(
                "The default agent loop: dotted path of its class, `module:Class`, or a name of "
                "`agent_loops`."
            )
        ),
    ] = "agent_loops.single_turn:SingleTurnLoop"
    agent_loop_args: Annotated[
        dict[str, Any], Meta(description="Keyword arguments of its constructor, where it is a dotted path.")
    ] = {}
    agent_loops: Annotated[
        dict[str, NamedLoop], Meta(description="Agent loops with short names, which rows can give.")
    ] = {}
    reward: Annotated[
        str,
        Meta(
            description=(
                "The default reward: dotted path of a function, `module:function`, sync or async, or a name "
                "of `rewards`; see docs/rewards.md."
            )
        ),
    ] = "agent_loops.rewards:exact_match"
    rewards: Annotated[
        dict[str, FunctionReward | HttpReward],
        Meta(description="Rewards with names, and how each is called; without a kind, `function`."),
    ] = {}
    rewards_by_source: Annotated[
        dict[str, str],
        Meta(description="Reward of the rows of a data source, by its name: a dotted path or a name."),
    ] = {}
    group_size: Annotated[int, Meta(ge=1, description="Trajectories of one task (G).")] = 8
    max_concurrent_trajectories: Annotated[
        int, Meta(ge=1, description="Trajectories in flight, counted singly, not in groups.")
    ] = 256
    max_staleness: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Hard bound of trainer version minus oldest sampled version, when a trajectory is trained."
            ),
        ),
    ] = 4
    overage: Annotated[
        Literal["wait", "drop", "mask_tokens"],
        Meta(
            description=(
                "`wait`: a batch waits for groups that would otherwise grow too old, nothing is dropped; "
                "`drop`: it does not wait for those that are due now, they are dropped; `mask_tokens`: "
                "tokens that grew too old are left out of the loss, and a batch waits only where a whole "
                "answer would be."
            )
        ),
    ] = "wait"
    max_context_tokens: Annotated[
        int, Meta(ge=2, description="Longest trajectory, prompt and all turns together, tokens.")
    ] = 4096
    max_new_tokens: Annotated[
        int, Meta(ge=1, description="Most tokens the policy may write in one turn, over all its resumes.")
    ] = 1024
    max_turns: Annotated[
        int, Meta(ge=1, description="Most turns of one trajectory; the session ends it there.")
    ] = 256
    max_branches: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Most branches of one trajectory, those of branches included; each is one more trajectory "
                "of its group, made in the slot of the first."
            ),
        ),
    ] = 0
    temperature: Annotated[float, Meta(gt=0, le=2, description="Sampling temperature.")] = 1.0
    top_p: Annotated[
        float, Meta(gt=0, le=1, description="Nucleus sampling; below 1 the log-probs are of the truncation.")
    ] = 1.0
    top_k: Annotated[int, Meta(ge=-1, description="Top-k sampling; -1 is off.")] = -1
    trajectory_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest life of one agent loop call, seconds.")
    ] = 1800.0
    tool_timeout_s: Annotated[float, Meta(gt=0, description="Longest tool call, seconds.")] = 30.0
    reward_timeout_s: Annotated[float, Meta(gt=0, description="Longest reward call, seconds.")] = 60.0
    max_attempts: Annotated[
        int, Meta(ge=1, description="Tries of a trajectory whose loop, tool or reward failed.")
    ] = 2
    failed_siblings: Annotated[
        Literal["train_rest", "drop", "retry"],
        Meta(
            description=(
                "What becomes of a group of which trajectories failed for good: `train_rest` trains the "
                "others, `drop` drops the group, `retry` drops it and dispatches its task again, later; "
                "without retries left, the others are trained."
            )
        ),
    ] = "train_rest"
    min_group_size: Annotated[
        int,
        Meta(
            ge=1,
            description="A group of which fewer trajectories are left is dropped: nothing to compare with.",
        ),
    ] = 2
    max_task_retries: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "How often a task is dispatched again after its group was lost: siblings failed "
                "(`failed_siblings: retry`), it grew too old (`overage: drop`), its frame was damaged."
            ),
        ),
    ] = 1
    straggler_wait_s: Annotated[
        PositiveFloat | None,
        Meta(
            description=(
                "Once half of a group has finished, how long it waits for the others before it goes "
                "without them, seconds; null waits for all. Every limit takes long answers away first: "
                "look at `length_ks`."
            )
        ),
    ] = None
    dynamic_filtering: Annotated[
        bool,
        Meta(
            description=(
                "Drop groups whose rewards are all equal: they carry no gradient; others are dispatched "
                "in their place (DAPO)."
            )
        ),
    ] = False
    max_filtered_groups: Annotated[
        int,
        Meta(ge=1, description="So many groups in a row may be filtered out before the run ends."),
    ] = 256
    max_failed_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="A run ends with an error when more than this share of the last 100 "
            "trajectories failed.",
        ),
    ] = 0.5


class EnginesConfig(_Strict, frozen=True, kw_only=True):
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
    host: Annotated[str, Meta(description="Address the servers bind to.")] = "127.0.0.1"
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


class RoutingConfig(_Strict, frozen=True, kw_only=True):
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


class QueueConfig(_Strict, frozen=True, kw_only=True):
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


class WeightsConfig(_Strict, frozen=True, kw_only=True):
    """How new weights reach the engines."""

    transport: Annotated[
        Literal["disk", "distributed"],
        Meta(description="`disk`: safetensors files; `distributed`: NCCL or Gloo broadcast in buckets."),
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
    bucket_bytes: Annotated[int, Meta(ge=1 << 16, description="Size of a broadcast bucket, bytes.")] = (
        256 << 20
    )
    keep_versions: Annotated[int, Meta(ge=1, description="Published versions kept on disk.")] = 2
    timeout_s: Annotated[float, Meta(gt=0, description="Longest update of one engine, seconds.")] = 300.0


class LayoutConfig(_Strict, frozen=True, kw_only=True):
    """Parallel layout of the trainer; data parallelism is what remains of `trainer.num_ranks`."""

    tp: Annotated[
        int, Meta(ge=1, description="Tensor parallel (with sequence parallelism when above 1).")
    ] = 1
    pp: Annotated[int, Meta(ge=1, description="Pipeline parallel.")] = 1
    vpp: Annotated[
        int, Meta(ge=1, description="Chunks of layers a pipeline stage holds (interleaved schedule).")
    ] = 1
    cp: Annotated[int, Meta(ge=1, description="Context parallel.")] = 1
    ep: Annotated[int, Meta(ge=1, description="Expert parallel.")] = 1
    etp: Annotated[int, Meta(ge=1, description="Expert tensor parallel.")] = 1


class ImportanceConfig(_Strict, frozen=True, kw_only=True):
    """Importance weights exp(old - rollout) of the proximal over the policy that sampled."""

    level: Annotated[
        Literal["off", "token", "sequence", "geometric"],
        Meta(
            description=(
                "Whose ratio: each `token`'s, a whole answer's (`sequence`: the product of its tokens', "
                "`geometric`: their geometric mean), or `off`."
            )
        ),
    ] = "token"
    beyond: Annotated[
        Literal["truncate", "mask"],
        Meta(
            description=(
                "What is done with a ratio outside the bounds: `truncate` sets it to the bound (TIS), `mask` "
                "leaves its tokens out (IcePop by token, MIS by sequence)."
            )
        ),
    ] = "truncate"
    low: Annotated[float, Meta(ge=0, description="Lower bound of the ratio.")] = 0.0
    high: Annotated[float, Meta(gt=0, description="Upper bound of the ratio.")] = 2.0


class RejectConfig(_Strict, frozen=True, kw_only=True):
    """Whole answers that are left out because they are too far from the policy that is trained."""

    geometric_low: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Leave an answer out when the geometric mean of its ratios is below this."),
    ] = None
    geometric_high: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Leave an answer out when that mean is above this."),
    ] = None
    token_below: Annotated[
        Annotated[float, Meta(gt=0, lt=1)] | None,
        Meta(description="Leave an answer out when the ratio of any of its tokens is below this."),
    ] = None


class KLConfig(_Strict, frozen=True, kw_only=True):
    """A penalty on the distance from a reference: the weights of `model.path`."""

    coefficient: Annotated[
        float,
        Meta(
            ge=0, description="Weight of the penalty; 0 has no reference, which costs a forward pass a batch."
        ),
    ] = 0.0
    estimator: Annotated[
        Literal["k1", "k2", "k3"],
        Meta(description="Schulman's estimators: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, d = log(p/ref)."),
    ] = "k3"
    where: Annotated[
        Literal["loss", "reward"],
        Meta(description="Added to the loss of each token, or taken from the reward of the trajectory."),
    ] = "loss"


class LossConfig(_Strict, frozen=True, kw_only=True):
    """Advantages, the policy objective, and what corrects for older weights."""

    advantages: Annotated[
        Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline"],
        Meta(
            description=(
                "Baseline and scale of rewards: `grpo` the group's mean and deviation, `dr_grpo` its mean "
                "alone, `rloo` the siblings' mean, `reinforce++` the batch's mean and deviation, "
                "`reinforce++_baseline` the group's mean and the batch's deviation."
            )
        ),
    ] = "grpo"
    overlong_buffer_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description=(
                "The reward falls from 0 to -1 over the last so many tokens before "
                "`rollout.max_new_tokens` (DAPO); null leaves it as it is."
            ),
        ),
    ] = None
    objective: Annotated[
        Literal["ppo", "gspo", "cispo"],
        Meta(
            description=(
                "`ppo` clips each token's ratio, `gspo` the whole answer's, `cispo` clips it as a weight and "
                "leaves every token its gradient."
            )
        ),
    ] = "ppo"
    clip_low: Annotated[
        float, Meta(gt=0, le=1, description="Lower clip: the ratio is kept above 1 - this.")
    ] = 0.2
    clip_high: Annotated[float, Meta(gt=0, description="Upper clip: the ratio is kept below 1 + this.")] = 0.2
    dual_clip: Annotated[
        Annotated[float, Meta(gt=1)] | None,
        Meta(description="`ppo`: largest ratio that a token with a negative advantage counts with."),
    ] = None
    aggregate: Annotated[
        Literal["token_mean", "sequence_mean", "constant"],
        Meta(
            description=(
                "All tokens of a batch count alike, all answers do, or each token counts one over the "
                "number of answers times `rollout.max_new_tokens` (Dr. GRPO)."
            )
        ),
    ] = "token_mean"
    entropy_bonus: Annotated[
        float, Meta(ge=0, description="Weight of the entropy of each token's distribution in the loss.")
    ] = 0.0
    old_log_probs: Annotated[
        Literal["recompute", "rollout"],
        Meta(
            description=(
                "The proximal policy: `recompute` takes the trainer's log-probs at the start of the "
                "update (decoupled PPO), `rollout` the engine's."
            )
        ),
    ] = "recompute"
    importance: ImportanceConfig = ImportanceConfig()
    reject: RejectConfig = RejectConfig()
    kl: KLConfig = KLConfig()
    uncorrected: Annotated[
        bool,
        Meta(
            description=(
                "Train on data of older weights without any correction for it (`old_log_probs: recompute`, "
                "`importance.level: off`); refused unless this is set."
            )
        ),
    ] = False


class OptimizerConfig(_Strict, frozen=True, kw_only=True):
    """AdamW as Megatron runs it."""

    lr: Annotated[float, Meta(gt=0, description="Learning rate.")] = 1e-6
    warmup_steps: Annotated[int, Meta(ge=0, description="Steps of linear warm-up.")] = 0
    weight_decay: Annotated[float, Meta(ge=0, description="Weight decay.")] = 0.0
    beta1: Annotated[float, Meta(ge=0, lt=1, description="First moment's decay.")] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1, description="Second moment's decay.")] = 0.99
    eps: Annotated[float, Meta(gt=0, description="Denominator's floor.")] = 1e-8
    clip_grad: Annotated[float, Meta(gt=0, description="Gradient norm is clipped to this.")] = 1.0
    skip_grad_norm_above: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="An update whose gradient norm is above this is skipped; null: none is."),
    ] = None


class TrainerConfig(_Strict, frozen=True, kw_only=True):
    """The trainer."""

    worker: Annotated[str, Meta(description="Dotted path of the worker class, one instance a rank.")] = (
        "trainer.worker:TrainerWorker"
    )
    num_ranks: Annotated[int, Meta(ge=1, description="Processes of the trainer.")] = 1
    device: Annotated[
        Literal["auto", "cuda", "cpu"], Meta(description="`auto` takes the GPU where torch sees one.")
    ] = "auto"
    layout: LayoutConfig = LayoutConfig()
    groups_per_batch: Annotated[int, Meta(ge=1, description="Groups consumed by one step.")] = 8
    micro_batch_tokens: Annotated[
        int,
        Meta(ge=1, description="Token budget of one packed micro-batch (a longer trajectory stands alone)."),
    ] = 16384
    updates_per_batch: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Optimizer steps of one batch: it is cut into so many parts by whole groups, and the "
                "proximal policy stays that of its start."
            ),
        ),
    ] = 1
    epochs_per_batch: Annotated[
        int, Meta(ge=1, description="How often a batch is gone through; `updates_per_batch` steps each time.")
    ] = 1
    max_skipped_updates: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Updates in a row that may be skipped because the loss or the gradient norm is not finite or "
                "a spike; one more is an error."
            ),
        ),
    ] = 3
    recompute: Annotated[
        Literal["none", "full", "selective"], Meta(description="Activation recomputation.")
    ] = "none"
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint_every: Annotated[
        int, Meta(ge=0, description="Steps between checkpoints; 0 writes one at the end only.")
    ] = 20
    keep_checkpoints: Annotated[int, Meta(ge=1, description="Checkpoints kept.")] = 2
    start_timeout_s: Annotated[float, Meta(gt=0, description="Longest start of the trainer, seconds.")] = (
        600.0
    )
    step_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Longest trainer step, seconds; ranks that take longer count as hung."),
    ] = 3600.0
    max_restarts: Annotated[
        int,
        Meta(ge=0, description="Restarts of a trainer that died or hung before the run ends."),
    ] = 3


class PlacementConfig(_Strict, frozen=True, kw_only=True):
    """Where processes run. The same config runs on one machine or a cluster."""

    ray_address: Annotated[
        str | None, Meta(description="Ray cluster to join (`auto` or an address); null starts Ray here.")
    ] = None
    cpus_per_engine: Annotated[float, Meta(ge=0, description="CPUs reserved for an engine.")] = 0.0
    cpus_per_rank: Annotated[float, Meta(ge=0, description="CPUs reserved for a trainer rank.")] = 0.0
    gpus_per_engine: Annotated[
        float | None, Meta(description="GPUs of an engine; null takes its tp_size on cuda, 0 on cpu.")
    ] = None
    gpus_per_rank: Annotated[
        float | None, Meta(description="GPUs of a trainer rank; null takes 1 on cuda, 0 on cpu.")
    ] = None
    strategy: Annotated[
        Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
        Meta(description="Ray placement-group strategy of engines and of trainer ranks."),
    ] = "PACK"


class DoctorConfig(_Strict, frozen=True, kw_only=True):
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


class WandbConfig(_Strict, frozen=True, kw_only=True):
    """Weights & Biases; its key comes from `wandb login` or WANDB_API_KEY, never from here."""

    project: Annotated[str, Meta(description="Project; the run in it is named `run.name`.")] = "async_rl"
    entity: Annotated[str | None, Meta(description="User or team; null takes the account's own.")] = None
    mode: Annotated[
        Literal["online", "offline"],
        Meta(description="`offline` writes files that `wandb sync` uploads later."),
    ] = "online"


class MetricsConfig(_Strict, frozen=True, kw_only=True):
    """The /metrics and /health endpoints of the driver, and experiment trackers."""

    host: Annotated[str, Meta(description="Address to bind to.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0 takes a free one and prints it.")] = 0
    trackers: Annotated[
        list[str],
        Meta(
            description=(
                "Where each step's figures go beside `metrics.jsonl`, under verl's names (docs/metrics.md): "
                "`wandb`, `tensorboard`, `jsonl`, `console`, or the dotted path of one of your own."
            )
        ),
    ] = []
    wandb: WandbConfig = WandbConfig()
    targets_dir: Annotated[
        str | None,
        Meta(description="Where the run tells Prometheus its address; null takes `.prometheus` in run.dir."),
    ] = None


class Config(_Strict, frozen=True, kw_only=True):
    """A whole run."""

    model: ModelConfig
    data: DataConfig
    run: RunConfig = RunConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: SGLangEngines | SimulatedEngines = SGLangEngines()
    routing: RoutingConfig = RoutingConfig()
    queue: QueueConfig = QueueConfig()
    weights: WeightsConfig = WeightsConfig()
    trainer: TrainerConfig = TrainerConfig()
    placement: PlacementConfig = PlacementConfig()
    metrics: MetricsConfig = MetricsConfig()
    doctor: DoctorConfig = DoctorConfig()

    def __post_init__(self) -> None:
        """Check what no single field can."""
        if (self.data.path is None) == (not self.data.datasets):
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

    @property
    def batch_trajectories(self) -> int:
        """Trajectories one trainer step consumes."""
        return self.trainer.groups_per_batch * self.rollout.group_size

    @property
    def max_outstanding_groups(self) -> int:
        """Groups that may be dispatched and not yet trained: more could not be trained within the bound."""
        return self.trainer.groups_per_batch * (self.rollout.max_staleness + 1)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `dotted.key=value` overrides, and check everything.

    Args:
        path: The YAML file.
        overrides: Each `a.b.c=value`; the value is parsed as YAML, so `null`, `true`, `[1, 2]` and numbers
        work.

    Raises:
        ConfigError: With the place, the actual value, what was expected, and what to do.
    """
    file = Path(path)
    try:
        text = file.read_text()
    except OSError as e:
        raise ConfigError(f"cannot read the config {file}: {e.strerror}. Name an existing YAML file") from e
    try:
        tree = yaml12.load(text) or {}
    except yaml12.YAMLError as e:
        raise ConfigError(f"{file} is not valid YAML: {e}") from e
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds a {type(tree).__name__}, expected a mapping of sections")
    for override in overrides:
        apply_override(tree, override)
    return parse_config(tree, source=str(file))


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `dotted.key=value` in a tree of plain values, in place."""
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} is not of the form dotted.key=value")
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent!r} holds {child!r}, not a section")
        node = child
    try:
        node[leaf] = yaml12.load(value)
    except yaml12.YAMLError as e:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {e}") from e


def parse_config(tree: dict[str, Any], source: str = "config") -> Config:
    """Convert plain values to a `Config`, strictly."""
    engine = tree.setdefault("engine", {})
    if isinstance(engine, dict):
        engine.setdefault("kind", "sglang")
    match tree:
        case {"rollout": {"rewards": dict(rewards)}}:
            for reward in rewards.values():
                if isinstance(reward, dict):
                    reward.setdefault("kind", "function")
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{source}: {_readable(str(e), tree)}") from e


def to_builtins(config: Config) -> dict[str, Any]:
    """The config as plain values, every default filled in."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return plain


def describe_fields() -> Iterator[tuple[str, str, Any, str]]:
    """Yield (dotted key, type, default, description) of every setting, in order; NODEFAULT for none."""
    yield from _describe(Config, "")


def changed_fields(config: Config) -> dict[str, Any]:
    """Dotted keys whose value differs from the default, with the value."""
    required = Config(model=ModelConfig(path=""), data=DataConfig(path=""), engine=type(config.engine)())
    defaults = dict(_flatten(required)) | {"data.path": None, "engine.kind": "sglang"}
    return {key: value for key, value in _flatten(config) if value != defaults[key]}


def _flatten(section: _Strict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if tag := section.__struct_config__.tag:
        yield prefix + "kind", tag
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, _Strict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, msgspec.to_builtins(value)


def _describe(struct: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, str, Any, str]]:
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        hint, key = hints[field.name], prefix + field.name
        sections = [t for t in (hint, *get_args(hint)) if isinstance(t, type) and issubclass(t, _Strict)]
        if sections:
            for section in sections:
                tag = section.__struct_config__.tag
                if len(sections) > 1:
                    yield f"{key}.kind", "literal", tag, (section.__doc__ or "").split("\n")[0]
                yield from _describe(section, key + ".")
            continue
        description = ""
        if get_origin(hint) is Annotated:
            base, *metas = get_args(hint)
            description = next((m.description for m in metas if m.description), "")
            hint = base
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        yield key, _type_name(hint), default, description
        for section in _entries(hint):
            entry = key + ("[]." if get_origin(hint) is list else ".NAME.")
            if (tag := section.__struct_config__.tag) is not None:
                yield f"{entry}kind", "literal", tag, (section.__doc__ or "").split("\n")[0]
            yield from _describe(section, entry)


def _entries(hint: Any) -> list[type[_Strict]]:
    """The sections that a list or a mapping is of."""
    if get_origin(hint) not in (list, dict):
        return []
    held = get_args(hint)[-1]
    return [t for t in (held, *get_args(held)) if isinstance(t, type) and issubclass(t, _Strict)]


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " | ".join(str(value) for value in get_args(hint))
    if get_origin(hint) is Annotated:
        return _type_name(get_args(hint)[0])
    if get_origin(hint) is not None and type(None) in get_args(hint):
        return " | ".join("null" if t is type(None) else _type_name(t) for t in get_args(hint))
    if _entries(hint):
        return "list" if get_origin(hint) is list else "mapping"
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _readable(message: str, tree: dict[str, Any]) -> str:
    """Add the value found and the nearest known key to msgspec's sentence."""
    unknown = re.search(r"unknown field `(\w+)`(?: - at `\$\.?([\w.\[\]]*)`)?", message)
    if unknown:
        name, section = unknown.group(1), re.sub(r"\[\d+\]", "[...]", unknown.group(2) or "")
        prefix = f"{section}." if section else ""
        keys = (key.replace(".NAME.", "[...].").replace("[].", "[...].") for key, *_ in describe_fields())
        known = sorted({key[len(prefix) :].split(".")[0] for key in keys if key.startswith(prefix)})
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"unknown field {name!r} - at $.{unknown.group(2) or ''}; {hint}".replace("$.;", "$;")
    place = re.search(r"`\$\.([\w.]+)`", message)
    if place:
        value: Any = tree
        for part in place.group(1).split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not isinstance(value, dict):
            return f"{message.replace('`', chr(39))}; found {value!r}"
    return message.replace("`", "'")
