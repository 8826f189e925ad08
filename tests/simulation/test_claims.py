"""A run whose agents live in other processes, which are killed at random: nothing is lost, nothing twice."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.data.chat_format import load_chat_format
from tests.simulation.test_loop import assert_conserved, make_config, run
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.real_time, pytest.mark.real]

CLIENT = Path(__file__).parents[2] / "examples" / "claims" / "client.py"


def start_agent(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(CLIENT), f"http://127.0.0.1:{port}"])


async def kill_at_random(port: int, rng: random.Random, *, number: int) -> None:
    """Keep some agents running, and kill one after the other."""
    agents = [start_agent(port) for _ in range(number)]
    try:
        while True:
            await asyncio.sleep(rng.uniform(0.5, 2.0))
            index = rng.randrange(number)
            agents[index].kill()
            agents[index].wait()
            agents[index] = start_agent(port)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


@pytest.mark.parametrize("workers", [0, 2])
async def test_each_task_is_trained_once_while_agents_are_killed(
    calculator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv("ASYNC_RL_CLAIMS_KEY", "k" * 20)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = make_config(
        calculator,
        tmp_path,
        "run.max_steps=4",
        "run.drain_s=5",
        "rollout.agent_loop=agent_loops.claims:ClaimLoop",
        f"rollout.agent_loop_args.claims={{port: {port}, lease_s: 1.0}}",
        "rollout.reward=agent_loops.claims:claimed_reward",
        "rollout.group_size=2",
        "rollout.max_attempts=20",
        f"rollout.num_workers={workers}",
        "rollout.max_concurrent_trajectories=8",
        "rollout.max_context_tokens=512",
        "trainer.groups_per_batch=2",
    )
    cluster = LocalCluster(config, step_s=0.02, chat=load_chat_format(config.model.path))
    async with asyncio.TaskGroup() as group:
        killing = group.create_task(kill_at_random(port, random.Random(1), number=3))
        assert_conserved(await run(config, cluster))
        killing.cancel()
    trained = [name for batch in cluster.trainer.batches for name in batch.trajectory_ids]
    assert len(trained) == len(set(trained)) == 4 * 4
