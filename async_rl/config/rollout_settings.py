"""Settings of rollouts: agent loops, rewards, groups, staleness, lengths and sampling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from async_rl.config.base import Meta, PositiveFloat, PositiveInt, Strict


class NamedLoop(Strict, frozen=True, kw_only=True):
    """An agent loop with a short name, which rows can give."""

    loop: Annotated[str, Meta(description="Dotted path of the class: `module:Class`.")]
    args: Annotated[dict[str, Any], Meta(description="Keyword arguments of its constructor.")] = {}


class RewardConfig(Strict, frozen=True, kw_only=True):
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


class RolloutConfig(Strict, frozen=True, kw_only=True):
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
                "of `rewards`; see docs/guide/own-task.md."
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
    num_workers: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Processes that run agent loops, tools and rewards; 0 runs them in the driver. See "
                "docs/guide/scaling-up.md."
            ),
        ),
    ] = 0
    worker_stall_s: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "A worker process that says nothing for so long, seconds, is ended and started again, and "
                "others play on what it played."
            ),
        ),
    ] = 30.0
    worker_start_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest start of a worker process, user code included, seconds.")
    ] = 120.0
    max_staleness: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Hard bound of trainer version minus oldest sampled version, when a trajectory is trained."
            ),
        ),
    ] = 4
    staleness_policy: Annotated[
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
                "(`failed_siblings: retry`), it became too old (`staleness_policy: drop`), or its frame was "
                "damaged."
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
