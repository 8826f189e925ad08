"""One attempt at a task: the agent loop in its session, and what its trajectories are worth.

Who dispatches attempts (the rollout manager, an evaluation) makes the session, and decides what becomes of
one that failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

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


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A session that has ended well, and what it is worth."""

    session: RolloutSession
    reward_source: str
    """The trajectory whose last words it is rewarded for."""
    parts: dict[str, float] | None
    """Its reward; None where that comes with its siblings'."""
    completion: Completion | None = None
    """What the reward sees, where the session itself does not know."""


async def play(task: Task, session: Conversation, loops: AgentLoops, rollout: RolloutConfig) -> None:
    """Run the agent loop of a task in a session, to the end of it and of its branches.

    Raises:
        AgentLoopError: It raised, took too long, or left something undone.
        AsyncRLError: Of an engine, a tool or a prompt.
    """
    name = task.agent_loop or rollout.agent_loop
    loop = await loops.entered(name)
    ended: StopReason | None = None
    try:
        async with (
            asyncio.timeout(rollout.trajectory_timeout_s) as scope,
            waiting("agent loop", name, scope=scope) as wait,
        ):
            ended = await loop.run(task, session)
    except TimeoutError as error:
        limit = f"ran past rollout.trajectory_timeout_s = {rollout.trajectory_timeout_s}: raise it, or"
        why = "was ended by the stall doctor:" if wait.cut else limit
        raise AgentLoopError(f"agent loop {name} {why} bound the loop's own waits") from error
    except Exception as error:
        cause = first_error(error)  # a loop may have a task group of its own
        if session.is_over(cause) and session.last_turn is not None:
            pass  # what was sampled before a budget was used up is kept
        elif isinstance(cause, AsyncRLError):
            raise cause from cause.__cause__
        else:
            raise AgentLoopError(f"agent loop {name} raised {type(cause).__name__}: {cause}") from error
    finally:
        num_left = await session.close()
    if num_left:
        raise AgentLoopError(
            f"agent loop {name} ended while {num_left} of its sessions had not: await what it starts, "
            "and give each session a block, `async with session:`, where several are written at once"
        )
    if session.last_turn is None:
        raise AgentLoopError(
            f"agent loop {name} returned without a turn: await session.generate() at least once in run()"
        )
    session.end(ended)


async def score(task: Task, tree: Sequence[Conversation], rewards: Rewards) -> Mapping[str, dict[str, float]]:
    """Score a session and its branches, side by side; those with one reward_source once.

    Returns:
        By reward_source, the parts of its reward.

    Raises:
        RewardError: One of them has no reward.
    """
    speakers = {each.reward_source.trajectory_id: each.reward_source for each in tree}
    try:
        async with Nursery() as scoring:
            parts = {
                name: scoring.start_task(f"reward of {name}", rewards.score(task, reward_source.completion))
                for name, reward_source in speakers.items()
            }
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return {name: scored.result() for name, scored in parts.items()}


async def close(played: Sequence[Played]) -> Sequence[Trajectory]:
    """Make trajectories of sessions that have ended well, side by side.

    Raises:
        AlignmentError: The routing of one does not fit its tokens.
    """
    try:
        async with Nursery() as ending:
            ends = [
                ending.start_task(
                    f"end of {each.session.trajectory_id}",
                    each.session.finish(each.session.stop_reason, each.parts or {}),
                )
                for each in played
            ]
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return [end.result() for end in ends]


async def finish(task: Task, tree: Sequence[RolloutSession], rewards: Rewards) -> Sequence[Trajectory]:
    """Score what came of a session and its branches, and make trajectories of them.

    Raises:
        RewardError: As `score`.
        AlignmentError: As `close`.
    """
    return await close(await score_tree(task, tree, rewards))


async def score_tree(task: Task, tree: Sequence[RolloutSession], rewards: Rewards) -> Sequence[Played]:
    """A session and its branches with their rewards; see `score`."""
    parts = await score(task, tree, rewards)
    return [
        Played(
            session=each,
            reward_source=each.reward_source.trajectory_id,
            parts=parts[each.reward_source.trajectory_id],
        )
        for each in tree
    ]
