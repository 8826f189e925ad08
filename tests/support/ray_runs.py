"""Runs with real parts, most under Ray: configs, folders, events to wait for, and what holds afterwards."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_rl.config import Config
from async_rl.observability.console_report import RunProgress
from async_rl.observability.records import StepRecord
from async_rl.observability.text_console import TextConsole
from async_rl.store.ledger import Ledger
from async_rl.types import Completion, Task
from tests.support.ledgers import audit_ledger
from tests.support.run_config import config_with

GROUP_SIZE = 4


def real_config(
    calculator: Path, folder: Path, *overrides: str, sections: Mapping[str, Mapping[str, Any]]
) -> Config:
    """A config of SGLang and Megatron on this CPU, which learn to call a calculator.

    Args:
        calculator: The fixture.
        folder: Where the run's folder will be.
        overrides: As on the command line.
        sections: Values by section, in place of those here.
    """
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder), "drain_s": 120},
        "model": {"path": str(calculator / "model"), "dtype": "float32"},
        "data": {"path": str(calculator / "data" / "tasks.jsonl")},
        "engine": {
            "device": "cpu",
            "max_running_requests": 4,
            "max_total_tokens": 16384,
            "context_length": 512,
        },
        "rollout": {
            "agent_loop": "agent_loops.tool_loop:ToolLoop",
            "agent_loop_args": {"tools": ["agent_loops.calculator:calculator"]},
            "group_size": GROUP_SIZE,
            "max_concurrent_trajectories": 16,
            "max_staleness": 2,
            "max_context_tokens": 480,
            "max_new_tokens": 48,
        },
        "trainer": {"device": "cpu", "groups_per_batch": 2, "optimizer": {"lr": 1e-3}},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | dict(values)
    return config_with(*overrides, **tree)


def fingerprint(task: Task, completion: Completion) -> float:
    """Differs between any two answers, so that every group has advantages."""
    return zlib.crc32(completion.text.encode()) / 2**32


def make_run_folder(config: Config) -> Path:
    """Make the folder of a run, as the command does, and return it."""
    run_dir = Path(config.run.dir) / config.run.name
    for name in ("checkpoints", "logs"):
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    return run_dir


def assert_ledger_holds(run_dir: Path) -> None:
    """Check that each trajectory of a finished run is accounted for, exactly once."""
    ledger = Ledger(run_dir / "ledger.sqlite")
    assert audit_ledger(ledger).unaccounted == 0
    ledger.close()


class Lines(logging.Handler):
    """Lets a test wait for a line of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._more = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._loop.call_soon_threadsafe(self._more.set)

    async def seen(self, *texts: str) -> None:
        """Wait until a line contains one of the texts."""
        while not any(text in line for line in self.lines for text in texts):
            self._more.clear()
            await self._more.wait()


class Steps(RunProgress):
    """Lets a test wait for a step."""

    def __init__(self) -> None:
        super().__init__(TextConsole(quiet=True))
        self._done = 0
        self._waiters: list[tuple[int, asyncio.Event]] = []

    def step(self, record: StepRecord) -> None:
        self._done = record.step
        for wanted, event in self._waiters:
            if self._done >= wanted:
                event.set()

    async def more(self, count: int) -> None:
        """Wait until `count` more steps are finished."""
        event = asyncio.Event()
        self._waiters.append((self._done + count, event))
        await event.wait()
