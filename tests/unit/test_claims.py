"""Claims: each task belongs to one agent at a time, whatever becomes of the agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from agent_loops.claims import ClaimBoard, ClaimLoop, End, Offer, claimed_reward
from agent_loops.testing import make_task
from async_rl.errors import AgentLoopError, ConfigError
from tests.support.talk import lines, talking

KEY = "k" * 20
OFFER = Offer(task={"id": "t"}, base_url="u", root_url="r", api_key="a", model="m")


class Agent:
    """An agent elsewhere."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http, self.url = http, url
        self.claimed: dict[str, Any] = {}

    async def post(self, path: str, key: str = KEY, **body: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        async with self.http.post(f"{self.url}/v1/{path}", json=body, headers=headers) as answer:
            return answer.status, await answer.json() if answer.status != 204 else None

    async def claim(self, wait_s: float = 30.0) -> dict[str, Any]:
        status, self.claimed = await self.post("claims", wait_s=wait_s)
        assert status == 200
        return self.claimed

    async def ask(self, *messages: str) -> tuple[int, str]:
        roles = ("user", "assistant")
        said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
        body, key = {"messages": said}, f"Bearer {self.claimed['api_key']}"
        headers = {
            "Authorization": key,
            "x-stainless-retry-count": "0",
        }  # a first try
        url = f"{self.claimed['base_url']}/chat/completions"
        async with self.http.post(url, json=body, headers=headers) as answer:
            told = await answer.json()
            return answer.status, told["choices"][0]["message"]["content"] if answer.status == 200 else told

    async def end(self, **body: Any) -> int:
        return (await self.post(f"claims/{self.claimed['id']}/end", **body))[0]


@asynccontextmanager
async def running(
    script: Any, *, lease_s: float = 60.0, **bench: Any
) -> AsyncIterator[tuple[Any, Agent, Any]]:
    """A loop that offers one task, an agent, and the task of its trajectory."""
    world, _ = talking(script, **bench)
    loop = ClaimLoop(claims={"lease_s": lease_s})
    async with loop, aiohttp.ClientSession() as http:
        trajectory = asyncio.create_task(loop.run(make_task(), world.session))
        try:
            yield world, Agent(http, loop.claims_url), trajectory
        finally:
            trajectory.cancel()
            await asyncio.wait([trajectory])


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_RL_CLAIMS_KEY", KEY)


async def test_an_offer_goes_to_one_agent_and_ends_as_it_says():
    board = ClaimBoard(lease_s=60.0)
    offers = [asyncio.create_task(board.offer(OFFER)) for _ in range(2)]
    first, second = await board.claim(1.0), await board.claim(1.0)
    assert first is not None
    assert second is not None
    assert first[0] != second[0]
    assert await board.claim(0.01) is None
    assert board.end(first[0], End(reward=1.0))
    assert board.end(first[0], End(reward=1.0)), "the same end again, by a client that retries"
    assert not board.end(first[0], End(reward=2.0))
    assert await offers[0] == End(reward=1.0)
    assert not board.renew(first[0])
    offers[1].cancel()
    await asyncio.wait([offers[1]])
    assert not board.end(second[0], End(reward=1.0)), "what was withdrawn"


async def test_a_claim_lasts_while_it_is_renewed_and_no_longer():
    board = ClaimBoard(lease_s=10.0)
    offer = asyncio.create_task(board.offer(OFFER))
    claimed = await board.claim(1.0)
    assert claimed is not None
    for _ in range(5):
        await asyncio.sleep(6.0)
        assert board.renew(claimed[0])
    await asyncio.sleep(11.0)
    assert await offer == End(expired=True)
    assert not board.renew(claimed[0])


async def test_an_offer_that_is_withdrawn_before_it_is_claimed_reaches_nobody():
    board = ClaimBoard(lease_s=10.0)
    offer = asyncio.create_task(board.offer(OFFER))
    await asyncio.sleep(0)
    offer.cancel()
    await asyncio.wait([offer])
    assert await board.claim(1.0) is None


@pytest.mark.real_time
async def test_an_agent_elsewhere_does_a_task_and_its_reward_is_the_trajectorys():
    async with running(lines("Paris.")) as (world, agent, trajectory):
        claimed = await agent.claim()
        assert claimed["task"]["messages"] == make_task().messages
        assert await agent.ask("Capital?") == (200, "Paris.")
        assert await agent.end(reward=0.5, parts={"style": 0.25}) == 200
        assert await trajectory is None
    assert claimed_reward(make_task(), world.session.completion) == {"reward": 0.5, "style": 0.25}


@pytest.mark.real_time
async def test_what_an_agent_calls_a_failure_fails_the_attempt():
    async with running(lines("Paris.")) as (_, agent, trajectory):
        await agent.claim()
        await agent.ask("Capital?")
        await agent.end(failure="the database is down")
        with pytest.raises(AgentLoopError, match="failed: the database is down"):
            await trajectory


@pytest.mark.real_time
async def test_a_task_whose_agent_is_gone_is_given_out_again_and_nothing_is_sampled_twice():
    async with running(lines("Paris.", "Sure."), lease_s=0.3) as (world, agent, trajectory):
        first = await agent.claim()
        await agent.ask("Capital?")
        other = Agent(agent.http, agent.url)
        second = await other.claim()
        assert (first["task"], first["id"] == second["id"]) == (second["task"], False)
        assert (await agent.ask("Capital?"))[0] == 410, "the key of a lost claim is void"
        assert await agent.end(reward=1.0) == 410
        assert await other.ask("Capital?") == (200, "Paris.")
        assert await other.ask("Capital?", "Paris.", "Sure?") == (200, "Sure.")
        assert world.session.num_turns == 2
        assert await other.end(reward=1.0) == 200
        await trajectory


@pytest.mark.real_time
async def test_an_answer_that_a_lost_agent_waits_for_is_its_successors():
    async with running(lines("Paris."), lease_s=1.0, decode_step_s=0.2) as (world, agent, trajectory):
        await agent.claim()
        waiting = asyncio.create_task(agent.ask("Capital?"))
        other = Agent(agent.http, agent.url)
        await other.claim()
        answers = [await other.ask("Capital?"), await waiting]
        assert answers == [(200, "Paris.")] * 2
        assert world.session.num_turns == 1
        await other.end(reward=1.0)
        await trajectory


@pytest.mark.real_time
async def test_an_attempt_fails_when_two_agents_have_lost_its_task():
    async with running(lines("Paris."), lease_s=0.2) as (_, agent, trajectory):
        await agent.claim()
        await agent.claim()
        with pytest.raises(AgentLoopError, match="2 agents claimed the task and did not renew it"):
            await trajectory


@pytest.mark.real_time
async def test_a_failure_after_a_full_context_ends_the_trajectory_as_it_is():
    async with running(lines("Paris.", "never")) as (_, agent, trajectory):
        await agent.claim()
        await agent.ask("Capital?")
        status, told = await agent.ask("Capital?", "Paris.", "word " * 3000)
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
        await agent.end(failure="context full")
        assert await trajectory == "length"


@pytest.mark.real_time
async def test_requests_without_the_key_or_of_another_form_are_refused():
    async with running(lines("Paris.")) as (_, agent, trajectory):
        assert (await agent.post("claims", key="wrong" * 5))[0] == 401
        assert (await agent.post("claims", wait_s="long"))[0] == 400
        assert (await agent.post("claims/unknown/renew"))[0] == 410
        assert (await agent.post("nothing"))[0] == 404
        await agent.claim()
        assert await agent.end(reward=1e300) == 400
        assert await agent.end(expired=True) == 400
        await agent.ask("Capital?")
        assert await agent.end() == 200
        await trajectory


@pytest.mark.real_time
async def test_rollout_workers_offer_tasks_at_the_drivers_board():
    driver, world = ClaimLoop(), talking(lines("Paris."))[0]
    async with driver.serve_workers() as arguments:
        worker = ClaimLoop(**arguments)
        async with worker, aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
            group.create_task(worker.run(make_task(), world.session))
            agent = Agent(http, arguments["claims"]["board"])
            await agent.claim()
            assert await agent.ask("Capital?") == (200, "Paris.")
            assert await agent.end(reward=1.0) == 200
    assert world.session.completion.reported == {"reward": 1.0}


@pytest.mark.real_time
async def test_a_workers_offer_is_withdrawn_when_its_trajectory_ends():
    driver, world = ClaimLoop(), talking(lines())[0]
    async with driver.serve_workers() as arguments, ClaimLoop(**arguments) as worker:
        run = asyncio.create_task(worker.run(make_task(), world.session))
        async with aiohttp.ClientSession() as http:
            agent = Agent(http, arguments["claims"]["board"])
            await agent.claim()
            run.cancel()
            await asyncio.wait([run])
            # The driver learns it from the lost connection.
            ends = [await agent.end(reward=1.0) for _ in range(100)]
            assert ends[-1] == 410


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"claims": {"lease_s": 0}}, "lease_s"),
        ({"claims": {"unknown": 1}}, "unknown"),
        ({"claims": {"key_env": "NOT_SET"}}, "NOT_SET has no key"),
        ({"constraints": "maybe"}, "constraints is 'maybe'"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        ClaimLoop(**arguments)


async def test_an_offer_that_did_not_reach_its_agent_is_the_next_ones():
    board = ClaimBoard(lease_s=10.0)
    offers = [asyncio.create_task(board.offer(OFFER)) for _ in range(2)]
    first = await board.claim(1.0)
    assert first is not None
    board.take_back(first[0])
    assert not board.renew(first[0])
    await asyncio.sleep(11.0)
    second = await board.claim(1.0)
    assert second is not None
    assert second[0] != first[0]
    assert board.end(second[0], End(reward=1.0))
    assert await offers[0] == End(reward=1.0)
    offers[1].cancel()
