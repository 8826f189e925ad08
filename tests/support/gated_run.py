"""A run under Ray that stops at a gate until a test has acted there: `python -m tests.support.gated_run`.

```
 the run                                the test
 pass_gate("train_step 2"): writes ───► the FIFO `at`
 waits ◄─────────────────────────────── opens and closes the FIFO `go`
```
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from async_rl.rollout.session.api import Session
from async_rl.trainer_protocol import StepResult, TrainerState
from async_rl.types import Completion, TakenBatch, Task
from tests.support.mortal_rank import MortalRank
from tests.support.quick_server import QuickServer

GATES = "ASYNC_RL_TEST_GATES"
"""Environment variable with the folder that has the FIFOs, and the name of the gate in `gate`."""


def pass_gate(name: str) -> None:
    """Wait for the test if this is the run's gate, the first time that it is reached."""
    folder = Path(os.environ[GATES])
    if (folder / "gate").read_text() != name:
        return
    try:
        (folder / "reached").touch(exist_ok=False)
    except FileExistsError:
        return
    with (folder / "at").open("w") as at:
        at.write(f"{name}\n")
    with (folder / "go").open() as go:
        go.read()


class GatedRank(MortalRank):
    """Has gates in each of its phases."""

    def setup(self, checkpoint_dir: str | None) -> TrainerState:
        pass_gate("setup")
        return super().setup(checkpoint_dir)

    def train_step(self, batch: TakenBatch, step: int) -> StepResult:
        pass_gate(f"train_step {step}")
        return super().train_step(batch, step)

    def publish(self, directory: str, weight_version: int) -> None:
        pass_gate(f"publish {weight_version}")
        super().publish(directory, weight_version)

    def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        pass_gate(f"save_checkpoint {self._step}")
        super().save_checkpoint(directory, extra)


class GatedLoop:
    """One turn; a trajectory of the third version waits at the gate before it."""

    async def run(self, task: Task, session: Session) -> None:
        session.start(task.messages)
        turn = await session.generate(max_new_tokens=8)
        if turn.weight_versions[-1] >= 2:
            await asyncio.to_thread(pass_gate, "turn")


class GatedServer(QuickServer):
    """Stops at a gate while it starts."""

    async def start(self, rendezvous: str | None = None) -> None:
        await asyncio.to_thread(pass_gate, "server")
        await super().start(rendezvous)


def length(task: Task, completion: Completion) -> float:
    return float(len(completion.text) % 7)


def _native_handler() -> int:
    """Return the address of the handler of SIGTERM, which the kernel calls."""
    action = (ctypes.c_size_t * 32)()
    ctypes.CDLL(None).sigaction(int(signal.SIGTERM), None, action)
    return action[0]


def main() -> None:
    """Run `async-rl train` with the arguments."""
    from ray import _raylet  # type: ignore[attr-defined]
    from ray._private import node

    from async_rl import placement
    from async_rl.cli.main import main as async_rl_main

    start_head, core_worker = node.Node.start_head_processes, _raylet.CoreWorker

    def gated_start(self: Any) -> None:
        start_head(self)
        pass_gate("ray processes")

    def gated_core_worker(*args: Any, **kwargs: Any) -> Any:
        before = _native_handler()
        connected = core_worker(*args, **kwargs)
        while before != _native_handler():
            time.sleep(0.001)  # until the run has its handler back
        pass_gate("ray connection")
        return connected

    node.Node.start_head_processes = gated_start  # type: ignore[method-assign]
    _raylet.CoreWorker = gated_core_worker
    placement.run = partial(placement.run, server=GatedServer)
    sys.exit(async_rl_main(["train", *sys.argv[1:]]))


if __name__ == "__main__":
    from tests.support import gated_run  # actors must find the classes in a module that they can import

    gated_run.main()
