"""One attempt at a task: runs the agent loop in its session, scores it, and makes its trajectories.

The rollout manager and the evaluator dispatch attempts: they make the sessions, and decide what follows from
a failed attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from async_rl.config import RolloutConfig
from async_rl.errors import AgentLoopError, AsyncRLError
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.rollout.session.conversation import Conversation
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.runtime.supervision import Nursery, first_error
from async_rl.runtime.waits import waiting
from async_rl.types import Completion, StopReason, Task, Trajectory


class AttemptResult(msgspec.Struct, frozen=True, kw_only=True):
    """A session that has ended well, with its reward."""

    session: RolloutSession
    reward_source: str
    """The trajectory for whose completion it is rewarded."""
    parts: dict[str, float] | None
    """Its reward; None if the whole group is scored by one call."""
    completion: Completion | None = None
    """What the reward function receives, if the session itself does not have it."""


async def run_agent_loop(
    task: Task, session: Conversation[Any], loops: AgentLoops, rollout: RolloutConfig
) -> None:
    """Run the agent loop of a task in a session, until it and its branches have ended.

    Raises:
        AgentLoopError: The loop raised, took too long, or left a session open.
        AsyncRLError: An engine or a tool failed, or a prompt was too long.
    """
    name = task.agent_loop or rollout.agent_loop
    loop = await loops.entered_loop(name)
    stop_reason: StopReason | None = None
    try:
        async with (
            asyncio.timeout(rollout.trajectory_timeout_s) as scope,
            waiting("agent loop", name, scope=scope) as wait,
        ):
            stop_reason = await loop.run(task, session)
    except TimeoutError as error:
        limit = f"ran past rollout.trajectory_timeout_s = {rollout.trajectory_timeout_s}: raise it, or"
        why = "was ended by the stall doctor:" if wait.cut else limit
        raise AgentLoopError(f"agent loop {name} {why} bound the loop's own waits") from error
    except Exception as error:
        cause = first_error(error)  # the loop may have its own task group
        if session.has_exceeded(cause) and session.last_turn is not None:
            pass  # keep what was sampled before the budget was used up
        elif isinstance(cause, AsyncRLError):
            raise cause from cause.__cause__
        else:
            raise AgentLoopError(f"agent loop {name} raised {type(cause).__name__}: {cause}") from error
    finally:
        num_open = await session.close()
    if num_open:
        raise AgentLoopError(
            f"agent loop {name} ended while {num_open} of its sessions had not: await what it starts, "
            "and give each session a block, `async with session:`, where several are written at once"
        )
    if session.last_turn is None:
        raise AgentLoopError(
            f"agent loop {name} returned without a turn: await session.generate() at least once in run()"
        )
    session.end_session(stop_reason)


async def score_sources(
    task: Task, tree: Sequence[Conversation[Any]], rewards: Rewards
) -> Mapping[str, dict[str, float]]:
    """Score a session and its branches concurrently, each reward source once.

    Returns:
        The parts of the reward, by the trajectory id of the reward source.

    Raises:
        RewardError: One of them cannot be scored.
    """
    sources = {each.reward_source.trajectory_id: each.reward_source for each in tree}
    try:
        async with Nursery() as scoring:
            parts = {
                name: scoring.start_task(
                    f"reward of {name}", rewards.score_completion(task, source.completion)
                )
                for name, source in sources.items()
            }
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return {name: scored.result() for name, scored in parts.items()}


async def score_tree(task: Task, tree: Sequence[RolloutSession], rewards: Rewards) -> Sequence[AttemptResult]:
    """Score a session and its branches, and return the results in the order of the tree.

    Raises:
        RewardError: One of them cannot be scored.
    """
    parts = await score_sources(task, tree, rewards)
    return [
        AttemptResult(
            session=each,
            reward_source=each.reward_source.trajectory_id,
            parts=parts[each.reward_source.trajectory_id],
        )
        for each in tree
    ]


async def finish_trajectories(results: Sequence[AttemptResult]) -> Sequence[Trajectory]:
    """Make the trajectories of sessions that have ended well, concurrently.

    Raises:
        AlignmentError: The routing of one does not fit its tokens.
    """
    try:
        async with Nursery() as ending:
            ends = [
                ending.start_task(
                    f"end of {each.session.trajectory_id}",
                    each.session.finish_trajectory(each.session.stop_reason, each.parts or {}),
                )
                for each in results
            ]
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return [end.result() for end in ends]
