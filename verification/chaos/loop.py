"""An agent loop whose attempts leave processes behind, as careless user code does."""

from __future__ import annotations

import asyncio

from agent_loops.sandbox import Interpreter, Limits
from agent_loops.tool_loop import ToolLoop
from async_rl.rollout.session.api import Session
from async_rl.types import StopReason, Task

_left: list[Interpreter] = []
"""Keeps sandboxes open."""


class LeavingLoop(ToolLoop):
    """Starts a process in a session of its own and every 8th time a sandbox, and ends neither."""

    async def run(self, task: Task, session: Session) -> StopReason | None:
        await asyncio.create_subprocess_exec("sleep", "100000", start_new_session=True)
        if hash(session.trajectory_id) % 8 == 0:
            _left.append(await Interpreter.start(Limits()))
        return await super().run(task, session)
