"""A driver whose trajectories all wait for their reward, in a process that a test kills.

```
python -m tests.support.held_rewards CONFIG.json NUMBER    prints "held" once so many are in the journal
```
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from async_rl.config import Config, parse_config
from async_rl.run import entry
from async_rl.store.journal import Journal
from async_rl.types import Completion, Task
from tests.support.local_cluster import LocalCluster
from tests.support.ray_runs import make_run_folder

HOLDS = False
"""Whether rewards never come."""
_num_held = 0


async def reward(task: Task, completion: Completion) -> float:
    """Score every answer alike, or never."""
    global _num_held
    _num_held += 1
    if HOLDS:
        await asyncio.Event().wait()
    return 1.0


async def hold(config: Config, number: int) -> None:
    global HOLDS
    HOLDS = True
    write = Journal.write_in_thread

    async def write_and_tell(self: Journal, **named: object) -> None:
        complete = _num_held >= number
        await write(self, **named)  # type: ignore[arg-type]
        if complete:
            print("held", flush=True)

    Journal.write_in_thread = write_and_tell  # type: ignore[method-assign, assignment]
    run_dir = make_run_folder(config)
    await entry.run(config, run_dir, asyncio.Event(), LocalCluster(config))


if __name__ == "__main__":
    from tests.support import held_rewards

    tree = msgspec.json.decode(Path(sys.argv[1]).read_bytes())
    asyncio.run(held_rewards.hold(parse_config(tree), int(sys.argv[2])))
