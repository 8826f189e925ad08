"""A driver that is killed with many trajectories in flight, and what its successor asks of the engines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_rl.config import to_builtins
from async_rl.engine_protocol import GenerateRequest
from async_rl.engines.simulated import SimulatedEngine
from tests.simulation.test_loop import make_config, run
from tests.support import held_rewards
from tests.support.local_cluster import LocalCluster

NUMBER = 64
MAX_AT_A_TIME = 16


@pytest.mark.real
async def test_rows_are_recovered_a_few_at_a_time_when_a_driver_was_killed(
    calculator: Path, tmp_path: Path
) -> None:
    """After the restart all trajectories are complete, and their routing rows are gone."""
    config = make_config(
        calculator,
        tmp_path,
        "run.max_steps=2",
        f"rollout.reward={held_rewards.__name__}:reward",
        f"rollout.max_concurrent_trajectories={NUMBER}",
        "rollout.max_staleness=1",
        "trainer.groups_per_batch=8",
        "engine.prefill_tokens_per_s=500",
        "queue.journal_s=0.05",
    )
    file = tmp_path / "config.json"
    file.write_bytes(msgspec.json.encode(to_builtins(config)))
    driver = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", held_rewards.__name__, str(file), str(NUMBER)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert driver.stdout is not None
    assert await driver.stdout.readline() == b"held\n"
    os.kill(driver.pid, signal.SIGKILL)
    assert await driver.wait() == -signal.SIGKILL

    cluster, calls = LocalCluster(config), Calls()
    for engine in cluster.engines:
        calls.watch(engine)
    summary = await run(config, cluster)
    assert 1 < calls.most_recoveries <= MAX_AT_A_TIME
    assert calls.num_recoveries >= NUMBER  # an update may interrupt some
    assert summary.trajectories.trained == NUMBER
    assert summary.routing.rows_invalid == 0
    assert summary.routing.rows_checked > 0


class Calls:
    """Counts the calls for rows alone."""

    def __init__(self) -> None:
        self.num_recoveries = self.most_recoveries = 0
        self._open = 0

    def watch(self, engine: SimulatedEngine) -> None:
        generate = engine.generate

        async def watched(request: GenerateRequest) -> AsyncGenerator[Any, None]:
            recovers = request.max_new_tokens == 0
            self.num_recoveries += recovers
            self._open += recovers
            self.most_recoveries = max(self.most_recoveries, self._open)
            try:
                async for event in generate(request):
                    yield event
            finally:
                self._open -= recovers

        engine.generate = watched  # type: ignore[method-assign]
