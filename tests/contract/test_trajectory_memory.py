"""What trajectories take in the process that runs them, against what is reported; over real HTTP."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from async_rl.config import Config, parse_config
from async_rl.data.chat_format import ChatFormat
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.observability.metrics import Metrics
from async_rl.rollout.attempt import Attempt, AttemptEnd, LocalBackend
from async_rl.rollout.session.api import Session
from async_rl.run.memory_needs import trajectory_bytes
from async_rl.store.journal import Journal
from async_rl.store.spool import SpoolFolder
from async_rl.types import Completion, Task
from tests.support.payload_server import PeakMemory, facts_of_long_calls, payload_server
from tests.support.sessions import Bench, PlainChat

pytestmark = pytest.mark.real  # of a gigabyte, over real HTTP

ATTEMPTS, TOKENS = 24, 16384
FACTS = facts_of_long_calls(TOKENS)
MARGIN = 32 << 20
"""What else the process takes meanwhile: connections, threads, what Python keeps."""
ENDING: asyncio.Barrier


class LongChat(PlainChat):
    """A prompt that leaves space for one token."""

    def prompt_ids(self, messages: Any, tools: Any = ()) -> np.ndarray:
        return np.zeros(TOKENS - 1, np.int32)


class EndsWithOthers:
    """Ends when the rows of all attempts have arrived."""

    async def run(self, task: Task, session: Session) -> None:
        session.start(task.messages)
        await session.generate()
        await ENDING.wait()


def reward(task: Task, completion: Completion) -> float:
    return 1.0


def make_config() -> Config:
    return parse_config(
        {
            "model": {"path": "m"},
            "data": {"path": "d"},
            "rollout": {
                "agent_loop": f"{__name__}:EndsWithOthers",
                "reward": f"{__name__}:reward",
                "max_context_tokens": TOKENS,
                "max_new_tokens": 1,
            },
        }
    )


async def run_attempts(config: Config, folder: Path, url: str) -> int:
    """Run all attempts at once, and return by how much the process grew at most, bytes."""
    global ENDING
    ENDING = asyncio.Barrier(ATTEMPTS)
    engine = SGLangEngine("engine-0", url, FACTS)
    chat = cast(ChatFormat, LongChat())
    limits = {"max_context_tokens": TOKENS, "max_new_tokens": 1}
    bench = Bench(engine, facts=FACTS, chat=chat, **limits)
    backend = LocalBackend(replace(bench.context, config=config), SpoolFolder(folder / "frames"), None)
    (folder / "journal").mkdir()
    backend.journal = Journal(folder / "journal", Metrics())
    gc.collect()
    growth = PeakMemory()

    async def run_one(number: int) -> AttemptEnd:
        task = Task(task_id="t", messages=[{"role": "user", "content": "hi"}])
        attempt = Attempt(task, f"{number:032x}", "g", 1, started_s=0.0)
        return await backend.run_attempt(attempt)

    async with backend, asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_one(number)) for number in range(ATTEMPTS)]
    peak = growth.stop()
    backend.journal.close()
    await engine.close()
    for task in tasks:
        (stored,) = task.result().trajectories
        assert stored.num_tokens == TOKENS
        assert stored.routing is not None
        assert os.path.getsize(stored.path) == stored.nbytes
    return peak


def measure(folder: Path, url: str) -> int:
    return asyncio.run(run_attempts(make_config(), folder, url))


@pytest.mark.timeout(600)
def test_attempts_that_end_at_once_take_no_more_than_is_reported(tmp_path: Path) -> None:
    # In a process of its own: this one has memory that earlier tests have freed.
    with (
        payload_server(TOKENS - 1, 48, 8, 128) as url,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
    ):
        peak = process.submit(measure, tmp_path, url).result()
    each = trajectory_bytes(make_config(), FACTS)
    assert ATTEMPTS * each / 4 < peak < ATTEMPTS * each + MARGIN  # in one answer: nothing is merged
