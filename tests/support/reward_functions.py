"""Rewards as users write them, to be named by dotted path."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.runtime.worker_processes import in_processes
from async_rl.types import Completion, Task


def length(task: Task, completion: Completion, scale: float = 1.0) -> float:
    """Plain, blocking."""
    return len(completion.text) * scale


async def never(task: Task, completion: Completion) -> float:
    """Plain, async; does not return."""
    await asyncio.Future()
    return 0.0


class Flaky:
    """Fails so many times, then returns its number of calls."""

    failures = calls = 0

    @classmethod
    async def score(cls, task: Task, completion: Completion) -> float:
        cls.calls += 1
        if cls.calls <= cls.failures:
            raise RuntimeError("try again")
        return float(cls.calls)


class Crowd:
    """Counts how many calls run at a time."""

    now = most = 0

    @classmethod
    async def score(cls, task: Task, completion: Completion) -> float:
        cls.now += 1
        cls.most = max(cls.most, cls.now)
        await asyncio.sleep(1.0)
        cls.now -= 1
        return 1.0


def count_arguments(*arguments: object, **named: object) -> float:
    """Take any arguments, so that they do not show its style."""
    return float(len(arguments) + len(named))


def compute_score(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    """As in verl: a mapping with `score` and text beside it."""
    right = solution_str.strip() == ground_truth and data_source == "openai/gsm8k"
    return {"score": float(right), "index": extra_info["index"], "pred": solution_str}


async def rm(args, sample, **kwargs):  # type: ignore[no-untyped-def]
    """As in slime."""
    assert len(sample.loss_mask) == sample.response_length == len(sample.tokens) - args.prompt_tokens
    assert sample.status.value == "completed"
    assert (sample.metadata, args.rollout.group_size) == ({"level": 2}, 3)
    return 1.0 if sample.response.endswith(sample.label) else 0.0


async def group_rm(args, samples):  # type: ignore[no-untyped-def]
    """As in slime with `--group-rm`."""
    return [float(len(sample.response)) for sample in samples]


async def relative(task: Task, completions: Sequence[Completion]) -> list[Any]:
    """Reward the longest completion of a group; an empty completion gets no number."""
    most = max(len(completion.text) for completion in completions)
    return [float("nan") if not c.text else {"reward": len(c.text) / most, "most": most} for c in completions]


@in_processes(1)
def pid(task: Task, completion: Completion) -> float:
    """Run in a process; hangs once, holding the interpreter's lock, if the test asks for it."""
    if completion.text == "die":
        os._exit(3)
    if completion.text.startswith("hang in "):
        Path(completion.text.removeprefix("hang in ")).write_text(str(os.getpid()))
        while True:
            time.monotonic()
    return float(os.getpid())


def make_completion(text: str) -> Completion:
    """What a reward sees of a conversation that ended so."""
    return Completion(messages=[{"role": "assistant", "content": text}], text=text, stop_reason="completed")
