"""One attempt at a task: the agent loop in its session, and what the trajectories that come of it are worth.

Who dispatches attempts (the rollout manager, an evaluation) makes the session, and decides what becomes of one
that failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from async_rl.config import RolloutConfig
from async_rl.errors import AgentLoopError, AsyncRLError
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.rewards import Rewards
from async_rl.rollout.session import RolloutSession
from async_rl.supervision import Nursery, first_error
from async_rl.types import StopReason, Task, Trajectory
from async_rl.waits import waiting


async def play(task: Task, session: RolloutSession, loops: AgentLoops, rollout: RolloutConfig) -> None:
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


async def finish(task: Task, tree: Sequence[RolloutSession], rewards: Rewards) -> Sequence[Trajectory]:
    """Score what came of a session and its branches, side by side; those with one speaker once.

    Raises:
        RewardError: One of them has no reward.
        AlignmentError: The routing of one does not fit its tokens.
    """
    speakers = {each.speaker.trajectory_id: each.speaker for each in tree}
    try:
        async with Nursery() as scoring:
            parts = {
                name: scoring.start(f"reward of {name}", rewards.score(task, speaker.completion))
                for name, speaker in speakers.items()
            }
        async with Nursery() as ending:
            ends = [
                ending.start(
                    f"end of {each.trajectory_id}",
                    each.finish(each.stop_reason, parts[each.speaker.trajectory_id].result()),
                )
                for each in tree
            ]
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return [end.result() for end in ends]
