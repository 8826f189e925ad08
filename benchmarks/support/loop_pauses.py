"""Records how long the event loop of a process, the driver or a rollout worker, does not come round.

```
 PausesLoop, the agent loop of a benchmark ─► a timer every 2 ms ─► a line a second: pauses-<pid>.jsonl
```

A pause is how late a timer is. On a machine with other load part of it is that the thread did not run: so its
CPU time between two timers is recorded too, which is what the process itself caused at most.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from agent_loops.single_turn import SingleTurnLoop
from async_rl.rollout.session.api import Session
from async_rl.types import Task

FOLDER: Final = "ASYNC_RL_LOOP_PAUSES"
"""Environment variable with the folder that the lines go to."""

TICK_S: Final = 0.002


class Pauses(msgspec.Struct):
    """The longest pauses of some time, in seconds."""

    time_s: float = 0.0
    """When it ended, since 1970."""
    longest_s: float = 0.0
    longest_cpu_s: float = 0.0
    """The most CPU time of the loop's thread between two timers."""


async def record_pauses(path: Path) -> None:
    """Write the pauses of the running event loop to a file, a line a second; never returns."""
    clock = asyncio.get_running_loop().time
    pauses, written_s = Pauses(), clock()
    while True:
        cpu_s, due_s = time.thread_time(), clock() + TICK_S
        await asyncio.sleep(TICK_S)
        now = clock()
        pauses.longest_s = max(pauses.longest_s, now - due_s)
        pauses.longest_cpu_s = max(pauses.longest_cpu_s, time.thread_time() - cpu_s)
        if now >= written_s + 1.0:
            written_s, pauses.time_s = now, time.time()
            with path.open("ab") as file:
                file.write(msgspec.json.encode(pauses) + b"\n")
            pauses = Pauses()


def longest_pauses(folder: Path, since_s: float) -> Pauses:
    """Return the longest pauses of all processes since a time; zeros where nothing was recorded."""
    lines: Iterable[Pauses] = (
        pauses
        for path in folder.glob("pauses-*.jsonl")
        for line in path.read_bytes().splitlines()
        if (pauses := msgspec.json.decode(line, type=Pauses)).time_s > since_s + 1.0  # began after it
    )
    longest = Pauses()
    for pauses in lines:
        longest.longest_s = max(longest.longest_s, pauses.longest_s)
        longest.longest_cpu_s = max(longest.longest_cpu_s, pauses.longest_cpu_s)
    return longest


class PausesLoop(SingleTurnLoop):
    """Lets the policy write one turn, in a process whose event loop is recorded from the first one on."""

    _recorder: asyncio.Task[None] | None = None

    async def run(self, task: Task, session: Session) -> None:
        """Implements `AgentLoop.run`."""
        if PausesLoop._recorder is None:
            path = Path(os.environ[FOLDER]) / f"pauses-{os.getpid()}.jsonl"
            PausesLoop._recorder = asyncio.get_running_loop().create_task(record_pauses(path))
        await super().run(task, session)
