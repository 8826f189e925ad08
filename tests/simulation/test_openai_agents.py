"""The whole loop with an agent over OpenAI's API that has a sub-agent, on simulated engines."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agent_loops.openai_agent import AgentAPI
from async_rl.types import Completion, Task
from tests.simulation.test_loop import assert_conserved, make_config, run
from tests.support.local_cluster import LocalCluster

pytestmark = pytest.mark.real_time


async def agent(task: Task, api: AgentAPI) -> None:
    """Ask twice, and in between somebody else. Without OpenAI's client, whose start would cost the test."""
    async with aiohttp.ClientSession() as http:

        async def say(*messages: dict[str, Any]) -> dict[str, Any]:
            body = {"model": api.model, "messages": messages, "max_tokens": 24}
            async with http.post(f"{api.session_url}/chat/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            return dict(answer["choices"][0]["message"])

        question = task.messages[0]
        first = await say(question)
        advice = await say({"role": "system", "content": "Advise."}, question)
        await say(question, first, {"role": "user", "content": advice["content"]})


numbers = itertools.count()


def reward(task: Task, completion: Completion) -> float:
    """The reward of the last answer, which the main conversation gives; it differs every time."""
    assert [m["role"] for m in completion.messages] == ["user", "assistant"] * 2
    return float(next(numbers))


async def test_each_conversation_of_each_attempt_is_trained_once_with_the_reward_of_the_last_answer(
    calculator: Path, tmp_path: Path
) -> None:
    config = make_config(
        calculator,
        tmp_path,
        "run.max_steps=3",
        "run.drain_s=5",
        "rollout.agent_loop=agent_loops.openai_agent:OpenAIAgentLoop",
        f"rollout.agent_loop_args.agent={__name__}:agent",
        f"rollout.reward={__name__}:reward",
        "rollout.group_size=2",
        "rollout.max_branches=1",
        "rollout.max_concurrent_trajectories=8",
        "rollout.max_context_tokens=512",
        "trainer.groups_per_batch=2",
    )
    cluster = LocalCluster(config, step_s=0.02)
    assert_conserved(await run(config, cluster))
    batches = cluster.trainer.batches
    rewards = {
        name: value
        for batch in batches
        for name, value in zip(batch.trajectory_ids, batch.rewards.tolist(), strict=True)
    }
    assert len(rewards) == sum(batch.num_trajectories for batch in batches)
    roots = [name for name in rewards if "." not in name]
    assert len(roots) == 3 * 4
    assert sorted(rewards) == sorted([*roots, *(f"{root}.1" for root in roots)])
    assert all(rewards[root] == rewards[f"{root}.1"] for root in roots)
    assert len(set(rewards.values())) == len(roots)
