"""Settings of rollouts: agent loops, rewards, groups, staleness, lengths and sampling."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from async_rl.config.base import Meta, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Strict


class NamedLoop(Strict, frozen=True, kw_only=True):
    """An agent loop with a short name, which examples can refer to."""

    loop: str
    """Dotted path of the class: `module:Class`."""
    args: dict[str, Any] = {}
    """Keyword arguments of its constructor."""


class RewardConfig(Strict, frozen=True, kw_only=True):
    """A reward with a name."""

    timeout_s: PositiveFloat | None = None
    """Maximum duration of a call, seconds; null takes `rollout.reward_timeout_s`."""
    max_retries: NonNegativeInt = 0
    """Further calls after one that raised an exception or timed out."""
    max_concurrent: PositiveInt | None = None
    """Maximum number of concurrent calls; null sets no limit."""
    part: str | None = None
    """Part of a returned mapping that is trained on; null takes `reward`, or else `score`."""


class FunctionReward(RewardConfig, frozen=True, kw_only=True, tag_field="kind", tag="function"):
    """A user's function, sync or async."""

    function: str
    """Dotted path: `module:function`."""
    style: Literal["auto", "plain", "group", "verl", "slime", "slime_group"] = "auto"
    """How the function is called: `auto` decides by the names of its parameters; `plain` (task, completion),
    `group` (task, completions), `verl` (data_source, solution_str, ground_truth, extra_info), `slime` (args,
    sample), `slime_group` (args, samples)."""
    args: dict[str, Any] = {}
    """Keyword arguments of each call; for slime's styles, attributes of `args`."""
    processes: NonNegativeInt | None = None
    """Worker processes for a blocking function that uses the CPU: 0 calls it in a thread, null does what the
    function declares with `async_rl.runtime.worker_processes.in_processes`."""


class HttpReward(RewardConfig, frozen=True, kw_only=True, tag_field="kind", tag="http"):
    """A server that scores by POST requests with JSON."""

    url: Annotated[str, Meta(pattern=r"^https?://")]
    """URL of the POST requests."""
    group: bool = False
    """Send one request for all trajectories of a group."""
    token_env: str | None = None
    """Environment variable that holds a bearer token; the token is never written to a file."""
    max_retries: NonNegativeInt = 3
    """Further requests after a lost connection, a timeout, 429 or 5xx."""
    max_concurrent: PositiveInt | None = 64
    """Maximum number of concurrent requests; null sets no limit."""


class JudgeReward(RewardConfig, frozen=True, kw_only=True, tag_field="kind", tag="judge"):
    """A model in `models` that answers a prompt about each completion."""

    judge: str
    """Name of the model in `models`."""
    template: str
    """The question, a message of the user. `{question}` stands for the task's messages, `{conversation}` for
    all messages, `{response}` for the last answer, `{answer}` for the task's answer."""
    score: str = r"-?\d+(?:\.\d+)?"
    """Regular expression whose last match in the judge's answer is the score: the number in its group, or all
    of it."""
    scale: PositiveFloat = 1.0
    """What the score is divided by."""
    max_new_tokens: PositiveInt = 512
    """Maximum length of the judge's answer."""
    temperature: NonNegativeFloat = 0.0
    """Temperature of the judge."""
    max_retries: NonNegativeInt = 2
    """Further questions after an answer without a score, at a temperature of at least 1."""


LARGEST_MASK: Final = 4096
"""The most kept tokens per position that SGLang returns by default (`--sampling-mask-max-tokens`)."""


class RolloutConfig(Strict, frozen=True, kw_only=True):
    """How trajectories are generated."""

    agent_loop: str = "agent_loops.single_turn:SingleTurnLoop"
    """The default agent loop: dotted path of its class, `module:Class`, or a name of `agent_loops`."""
    agent_loop_args: dict[str, Any] = {}
    """Keyword arguments of its constructor, if `agent_loop` is a dotted path."""
    agent_loops: dict[str, NamedLoop] = {}
    """Agent loops with short names, which examples can refer to."""
    reward: str = "agent_loops.rewards:exact_match"
    """The default reward: dotted path of a function, `module:function`, sync or async, or a name of
    `rewards`; see docs/guide/own-task.md."""
    rewards: dict[str, FunctionReward | HttpReward | JudgeReward] = {}
    """Named rewards, and how each is called; without a kind, `function`."""
    rewards_by_source: dict[str, str] = {}
    """Reward of each data source's examples, by the name of the source: a dotted path or a name of
    `rewards`."""
    trust_examples: bool = False
    """Import agent loops and rewards that examples name by dotted path. Such a dataset runs any code with
    your rights: set this only for data that you trust like your own code. Otherwise examples may only name
    what `agent_loops`, `rewards` and the defaults declare."""
    group_size: PositiveInt = 8
    """Trajectories per task (G)."""
    max_concurrent_trajectories: PositiveInt = 256
    """Maximum number of trajectories in flight; each trajectory of a group counts."""
    num_workers: NonNegativeInt | Literal["auto"] = "auto"
    """Processes that run agent loops, tools and rewards, and read the engines' tokens; 0 does that in the
    driver. `auto`: one per 512 of `max_concurrent_trajectories`, but 0 on one machine up to 512, and with
    simulated engines. See docs/guide/scaling-up.md."""
    worker_stall_s: PositiveFloat = 30.0
    """A worker process that does not answer for this many seconds is killed and restarted; other workers
    continue its trajectories."""
    max_staleness: NonNegativeInt = 4
    """Hard upper bound on staleness: trainer version minus oldest sampled version when a trajectory is
    trained."""
    staleness_policy: Literal["wait", "drop", "mask_tokens"] = "wait"
    """What happens when a group would exceed `max_staleness`. `wait`: the batch waits for it, and nothing is
    dropped; `drop`: the batch does not wait, and the group is dropped; `mask_tokens`: tokens that are too old
    are left out of the loss, and the batch waits only if a whole trajectory would be masked."""
    max_context_tokens: Annotated[int, Meta(ge=2)] = 4096
    """Maximum length of a trajectory, prompt and all turns together, tokens."""
    max_new_tokens: PositiveInt = 1024
    """Maximum number of tokens that the policy may write in one turn, including all resumes."""
    max_turns: PositiveInt = 256
    """Maximum number of turns of a trajectory; the session ends it there."""
    max_branches: NonNegativeInt = 0
    """Maximum number of branches of a trajectory, including branches of branches; each branch is one more
    trajectory of the group and uses the slot of the trajectory it belongs to."""
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    """Sampling temperature, at least 0.01."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 disables it. Below 1, `top_k` must be set."""
    top_k: Annotated[int, Meta(ge=-1)] = -1
    """Top-k sampling; -1 disables it. With `top_p` or `min_p` it must be set, to at most 4096: engines return
    no more kept tokens."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Tokens less likely than this share of the likeliest are not sampled; 0: all are."""
    replay_sampling: bool = True
    """Carry the tokens that `top_k`, `top_p` and `min_p` kept to the trainer, whose log-probs are then those
    of the truncated distribution. Without, every log-prob and gradient of a truncated run is biased."""
    trajectory_timeout_s: PositiveFloat = 1800.0
    """Maximum duration of one agent loop call, seconds. Time in which no engine serves does not count, here
    and for `tool_timeout_s` and `straggler_wait_s`."""
    tool_timeout_s: PositiveFloat = 30.0
    """Maximum duration of a tool call, seconds."""
    reward_timeout_s: PositiveFloat = 60.0
    """Maximum duration of a reward call, seconds."""
    max_attempts: PositiveInt = 2
    """Attempts at a trajectory whose loop, tool or reward fails."""
    failed_siblings: Literal["train_rest", "drop", "retry"] = "train_rest"
    """What happens to a group in which some trajectories failed for good: `train_rest` trains the others,
    `drop` drops the group, `retry` drops it and dispatches its task again later; without retries left, the
    others are trained."""
    min_group_size: PositiveInt = 2
    """A group with fewer remaining trajectories is dropped, because there is nothing to compare them with; a
    trajectory and its branches count as one."""
    straggler_wait_s: PositiveFloat | None = None
    """How long a group waits for its remaining trajectories once half of them have finished, seconds; then it
    is used without them. Null waits for all. Any limit removes long answers first: watch `length_ks`."""
    dynamic_filtering: bool = False
    """Drop groups whose rewards are all equal, because they carry no gradient, and dispatch other tasks
    instead (DAPO)."""
    max_filtered_groups: PositiveInt = 256
    """Consecutive groups that may be filtered out (`dynamic_filtering`) or lost to failed trajectories before
    the run ends with an error. Stragglers and `staleness_policy` do not count."""
    max_failed_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """The run ends with an error when more than this share of the last 100 trajectories failed."""

    @property
    def min_siblings(self) -> int:
        """How many siblings a group needs to be trained; a group of one has nobody to wait for."""
        return min(self.min_group_size, self.group_size)

    @property
    def needs_masks(self) -> bool:
        """Whether sampling is truncated, and the kept tokens are replayed in training."""
        return self.replay_sampling and (self.top_p < 1 or self.top_k != -1 or self.min_p > 0)
