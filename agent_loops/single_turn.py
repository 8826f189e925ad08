"""The simplest agent loop: one prompt, one answer."""

from __future__ import annotations

from agent_loops.base import AgentLoop
from async_rl.rollout.session.api import Session
from async_rl.types import Task


class SingleTurnLoop(AgentLoop):
    """Lets the policy write one turn, which is the answer.

    Args:
        stop: Additional strings that end the answer.
    """

    def __init__(self, stop: list[str] | None = None) -> None:
        self._stop = tuple(stop or ())

    async def run(self, task: Task, session: Session) -> None:
        """Implements `AgentLoop.run`."""
        session.start(task.messages, task.tools)
        await session.generate(stop=self._stop)
