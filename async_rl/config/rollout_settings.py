"""Settings of rollouts: agent loops, rewards, groups, staleness, lengths and sampling."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from async_rl.config.base import Meta, PositiveFloat, PositiveInt, Strict


class NamedLoop(Strict, frozen=True, kw_only=True):
    """An agent loop with a short name, which examples can refer to."""

    loop: Annotated[str, Meta(description="Dotted path of the class: `module:Class`.")]
    args: Annotated[dict[str, Any], Meta(description="Keyword arguments of its constructor.")] = {}


class RewardConfig(Strict, frozen=True, kw_only=True):
    """A reward with a name."""

    timeout_s: Annotated[
        PositiveFloat | None,
        Meta(description="Maximum duration of a call, seconds; null takes `rollout.reward_timeout_s`."),
    ] = None
    max_retries: Annotated[
        int, Meta(ge=0, description="Further calls after one that raised an exception or timed out.")
    ] = 0
    max_concurrent: Annotated[
        PositiveInt | None, Meta(description="Maximum number of concurrent calls; null sets no limit.")
    ] = None
    part: Annotated[
        str | None,
        Meta(
            description=(
                "Part of a returned mapping that is trained on; null takes `reward`, or else `score`."
            )
        ),
    ] = None


class FunctionReward(RewardConfig, frozen=True, kw_only=True, tag_field="kind", tag="function"):
    """A user's function, sync or async."""

    function: Annotated[str, Meta(description="Dotted path: `module:function`.")]
    style: Annotated[
        Literal["auto", "plain", "group", "verl", "slime", "slime_group"],
        Meta(
            description=(
                "How the function is called: `auto` decides by the names of its parameters; "
                "`plain` (task, completion), `group` (task, completions), `verl` (data_source, "
                "solution_str, ground_truth, extra_info), `slime` (args, sample), `slime_group` "
                "(args, samples)."
            )
        ),
    ] = "auto"
    args: Annotated[
        dict[str, Any],
        Meta(description="Keyword arguments of each call; for slime's styles, attributes of `args`."),
    ] = {}
    processes: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description=(
                "Worker processes for a blocking function that uses the CPU: 0 calls it in a "
                "thread, null does what the function declares with "
                "`async_rl.runtime.worker_processes.in_processes`."
            )
        ),
    ] = None


class HttpReward(RewardConfig, frozen=True, kw_only=True, tag_field="kind", tag="http"):
    """A server that scores by POST requests with JSON."""

    url: Annotated[str, Meta(pattern=r"^https?://", description="URL of the POST requests.")]
    group: Annotated[bool, Meta(description="Send one request for all trajectories of a group.")] = False
    token_env: Annotated[
        str | None,
        Meta(
            description=(
                "Environment variable that holds a bearer token; the token is never written to a file."
            )
        ),
    ] = None
    max_retries: Annotated[
        int,
        Meta(
            ge=0,
            description="Further requests after a lost connection, a timeout, 429 or 5xx.",
        ),
    ] = 3
    max_concurrent: Annotated[
        PositiveInt | None, Meta(description="Maximum number of concurrent requests; null sets no limit.")
    ] = 64


class JudgeReward(RewardConfig, frozen=True, kw_only=True, tag_field="kind", tag="judge"):
    """A model in `models` that answers a prompt about each completion."""

    judge: Annotated[str, Meta(description="Name of the model in `models`.")]
    template: Annotated[
        str,
        Meta(
            description=(
                "The question, a message of the user. `{question}` stands for the task's messages, "
                "`{conversation}` for all messages, `{response}` for the last answer, `{answer}` for the "
                "task's answer."
            )
        ),
    ]
    score: Annotated[
        str,
        Meta(
            description=(
                "Regular expression whose last match in the judge's answer is the score: the number in its "
                "group, or all of it."
            )
        ),
    ] = r"-?\d+(?:\.\d+)?"
    scale: Annotated[float, Meta(gt=0, description="What the score is divided by.")] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1, description="Maximum length of the judge's answer.")] = 512
    temperature: Annotated[float, Meta(ge=0, description="Temperature of the judge.")] = 0.0
    max_retries: Annotated[
        int,
        Meta(
            ge=0,
            description="Further questions after an answer without a score, at a temperature of at least 1.",
        ),
    ] = 2


LARGEST_MASK: Final = 4096
"""The most kept tokens per position that SGLang returns by default (`--sampling-mask-max-tokens`)."""


class RolloutConfig(Strict, frozen=True, kw_only=True):
    """How trajectories are generated."""

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
        dict[str, Any],
        Meta(description="Keyword arguments of its constructor, if `agent_loop` is a dotted path."),
    ] = {}
    agent_loops: Annotated[
        dict[str, NamedLoop], Meta(description="Agent loops with short names, which examples can refer to.")
    ] = {}
    reward: Annotated[
        str,
        Meta(
            description=(
                "The default reward: dotted path of a function, `module:function`, sync or async, or a name "
                "of `rewards`; see docs/guide/own-task.md."
            )
        ),
    ] = "agent_loops.rewards:exact_match"
    rewards: Annotated[
        dict[str, FunctionReward | HttpReward | JudgeReward],
        Meta(description="Named rewards, and how each is called; without a kind, `function`."),
    ] = {}
    rewards_by_source: Annotated[
        dict[str, str],
        Meta(
            description=(
                "Reward of each data source's examples, by the name of the source: a dotted path "
                "or a name of `rewards`."
            )
        ),
    ] = {}
    trust_examples: Annotated[
        bool,
        Meta(
            description=(
                "Import agent loops and rewards that examples name by dotted path. Such a dataset runs any "
                "code with your rights: set this only for data that you trust like your own code. "
                "Otherwise examples may only name what `agent_loops`, `rewards` and the defaults declare."
            )
        ),
    ] = False
    group_size: Annotated[int, Meta(ge=1, description="Trajectories per task (G).")] = 8
    max_concurrent_trajectories: Annotated[
        int,
        Meta(
            ge=1, description="Maximum number of trajectories in flight; each trajectory of a group counts."
        ),
    ] = 256
    num_workers: Annotated[
        Annotated[int, Meta(ge=0)] | Literal["auto"],
        Meta(
            description=(
                "Processes that run agent loops, tools and rewards, and read the engines' tokens; 0 does "
                "that in the driver. `auto`: one per 512 of `max_concurrent_trajectories`, but 0 on one "
                "machine up to 512, and with simulated engines. See docs/guide/scaling-up.md."
            ),
        ),
    ] = "auto"
    worker_stall_s: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "A worker process that does not answer for this many seconds is killed and "
                "restarted; other workers continue its trajectories."
            ),
        ),
    ] = 30.0
    max_staleness: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Hard upper bound on staleness: trainer version minus oldest sampled version when "
                "a trajectory is trained."
            ),
        ),
    ] = 4
    staleness_policy: Annotated[
        Literal["wait", "drop", "mask_tokens"],
        Meta(
            description=(
                "What happens when a group would exceed `max_staleness`. `wait`: the batch waits "
                "for it, and nothing is dropped; `drop`: the batch does not wait, and the group "
                "is dropped; `mask_tokens`: tokens that are too old are left out of the loss, and "
                "the batch waits only if a whole trajectory would be masked."
            )
        ),
    ] = "wait"
    max_context_tokens: Annotated[
        int, Meta(ge=2, description="Maximum length of a trajectory, prompt and all turns together, tokens.")
    ] = 4096
    max_new_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Maximum number of tokens that the policy may write in one turn, including all resumes."
            ),
        ),
    ] = 1024
    max_turns: Annotated[
        int, Meta(ge=1, description="Maximum number of turns of a trajectory; the session ends it there.")
    ] = 256
    max_branches: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Maximum number of branches of a trajectory, including branches of branches; each "
                "branch is one more trajectory of the group and uses the slot of the trajectory "
                "it belongs to."
            ),
        ),
    ] = 0
    temperature: Annotated[float, Meta(ge=0, le=2, description="Sampling temperature, at least 0.01.")] = 1.0
    top_p: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Nucleus sampling; 1 disables it. Below 1, `top_k` must be set.",
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Meta(
            ge=-1,
            description=(
                "Top-k sampling; -1 disables it. With `top_p` or `min_p` it must be set, to at most 4096: "
                "engines return no more kept tokens."
            ),
        ),
    ] = -1
    min_p: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description="Tokens less likely than this share of the likeliest are not sampled; 0: all are.",
        ),
    ] = 0.0
    replay_sampling: Annotated[
        bool,
        Meta(
            description=(
                "Carry the tokens that `top_k`, `top_p` and `min_p` kept to the trainer, whose log-probs are "
                "then those of the truncated distribution. Without, every log-prob and gradient of a "
                "truncated run is biased."
            )
        ),
    ] = True
    trajectory_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "Maximum duration of one agent loop call, seconds. Time in which no engine serves does not "
                "count, here and for `tool_timeout_s` and `straggler_wait_s`."
            ),
        ),
    ] = 1800.0
    tool_timeout_s: Annotated[float, Meta(gt=0, description="Maximum duration of a tool call, seconds.")] = (
        30.0
    )
    reward_timeout_s: Annotated[
        float, Meta(gt=0, description="Maximum duration of a reward call, seconds.")
    ] = 60.0
    max_attempts: Annotated[
        int, Meta(ge=1, description="Attempts at a trajectory whose loop, tool or reward fails.")
    ] = 2
    failed_siblings: Annotated[
        Literal["train_rest", "drop", "retry"],
        Meta(
            description=(
                "What happens to a group in which some trajectories failed for good: `train_rest` "
                "trains the others, `drop` drops the group, `retry` drops it and dispatches its "
                "task again later; without retries left, the others are trained."
            )
        ),
    ] = "train_rest"
    min_group_size: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "A group with fewer remaining trajectories is dropped, because there is nothing "
                "to compare them with; a trajectory and its branches count as one."
            ),
        ),
    ] = 2
    straggler_wait_s: Annotated[
        PositiveFloat | None,
        Meta(
            description=(
                "How long a group waits for its remaining trajectories once half of them have "
                "finished, seconds; then it is used without them. Null waits for all. Any limit "
                "removes long answers first: watch `length_ks`."
            )
        ),
    ] = None
    dynamic_filtering: Annotated[
        bool,
        Meta(
            description=(
                "Drop groups whose rewards are all equal, because they carry no gradient, and "
                "dispatch other tasks instead (DAPO)."
            )
        ),
    ] = False
    max_filtered_groups: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Consecutive groups that may be filtered out (`dynamic_filtering`) or lost to failed "
                "trajectories before the run ends with an error. Stragglers and `staleness_policy` do not "
                "count."
            ),
        ),
    ] = 256
    max_failed_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description=(
                "The run ends with an error when more than this share of the last 100 trajectories failed."
            ),
        ),
    ] = 0.5

    @property
    def needs_masks(self) -> bool:
        """Whether sampling is truncated, and the kept tokens are replayed in training."""
        return self.replay_sampling and (self.top_p < 1 or self.top_k != -1 or self.min_p > 0)
