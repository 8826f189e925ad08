"""One question, one answer."""

from __future__ import annotations

from agent_loops.base import AgentLoop
from async_rl.rollout.session.api import Session
from async_rl.types import Task


class SingleTurnLoop(AgentLoop):
    """Asks the policy once; what it writes is the answer.

    Args:
        stop: Strings that end the answer besides the end of turn.
    """

    def __init__(self, stop: list[str] | None = None) -> None:
        self._stop = tuple(stop or ())

    async def run(self, task: Task, session: Session) -> None:
        """See `AgentLoop.run`."""
        session.start(task.messages, task.tools)
        await session.generate(stop=self._stop)
