"""Agent loops that end or block their process in the middle of a turn, once in all processes of a test."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from async_rl.rollout.session.api import Session
from async_rl.types import Task

FATE = "ASYNC_RL_TEST_FATE"
"""Environment variable: a folder in which the deaths and the processes of loops are written down."""

RELEASED = "released"
"""The file, in the folder of `FATE`, that ends the block of `BlockingLoop`."""


class FatefulLoop:
    """One turn; the first loop that sees one grow starts a process, and dies with its own."""

    async def run(self, task: Task, session: Session) -> None:
        folder = Path(os.environ[FATE])
        (folder / f"process-{os.getpid()}").touch()

        def die(text: str) -> None:
            try:
                (folder / "died").touch(exist_ok=False)
            except FileExistsError:
                return
            (folder / "died").write_text(session.trajectory_id)
            daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            (folder / "daemon").write_text(str(daemon.pid))
            os.kill(os.getpid(), signal.SIGKILL)

        session.start(task.messages)
        await session.generate(on_text=die)
        session.annotate(process=os.getpid())


class BlockingLoop:
    """One turn; after the hundredth one a loop blocks its process until the test releases it."""

    async def run(self, task: Task, session: Session) -> None:
        folder = Path(os.environ[FATE])
        session.start(task.messages)
        await session.generate()
        (folder / f"answer-{session.trajectory_id}").touch()
        if len(list(folder.glob("answer-*"))) >= 100 and not (folder / "blocked").exists():
            (folder / "blocked").touch()
            while not (folder / RELEASED).exists():
                time.sleep(0.05)  # noqa: ASYNC251 - it shall block the event loop


def rewarded(task: Task, completion: Any) -> float:
    """Also records where it is called."""
    (Path(os.environ[FATE]) / f"process-{os.getpid()}").touch()
    return float(len(completion.text) % 7)
