"""Compaction, sub-agents, retries and side requests of a program become conversations of one attempt, as
docs/guide/harness.md says: the same program in each dialect, scored once for all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from agent_loops.agent_program import AgentProgram
from agent_loops.harness import HarnessLoop
from async_rl.openai_api.endpoint import EndpointAccess
from async_rl.types import Task
from tests.support.dialects import client_in
from tests.support.scripted_session import make_task
from tests.support.talk import talking

pytestmark = pytest.mark.real_time

EACH = pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
ANY = pytest.mark.parametrize("dialect", ["chat", "responses", "chained", "messages"])
HERE = __name__
Acts = Callable[[Any], Awaitable[None]]


class Acting(AgentProgram):
    """A program whose process is played by a coroutine with the official client of a dialect."""

    def __init__(self, dialect: str, acts: Acts, access: EndpointAccess, task: Task) -> None:
        super().__init__(["true"], access, task)
        self._dialect, self._acts = dialect, acts

    async def run(self) -> int:
        async with client_in(self._dialect, self._access) as client:
            await self._acts(client)
        return 0


class ActingLoop(HarnessLoop):
    """A harness whose program acts in this process."""

    def __init__(self, dialect: str, acts: Acts) -> None:
        super().__init__({"command": ["true"]}, score=f"{HERE}:half")
        self._dialect, self._acts = dialect, acts

    async def _make_program(self, task: Task, place: Any, access: EndpointAccess) -> AgentProgram:
        return Acting(self._dialect, self._acts, access, task)


def half(task: Task, workspace: Path) -> float:
    return 0.5


def echo(prompt: str) -> str:
    """The policy repeats what it was asked last, in brackets."""
    asked = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return f"[{asked}]"


async def conversations(dialect: str, acts: Acts, *, max_branches: int = 4) -> list[list[str]]:
    """Play a program; return what each conversation says, once all of them are rewarded for the score."""
    bench, _ = talking(echo, max_branches=max_branches)
    bench.session.task = make_task()
    reason = await ActingLoop(dialect, acts).run(make_task(), bench.session)
    assert reason is None
    tree = bench.session.tree
    assert all(each.completion.reported == {"reward": 0.5} for each in tree)
    return [[message["content"] for message in each.messages] for each in tree]


def forget(client: Any) -> None:
    """Begin a new history, as a program does that compacts the old one or starts a sub-agent."""
    client.history, client.last = [], None


@ANY
async def test_compaction_is_a_turn_of_the_old_conversation_and_then_another(dialect: str):
    async def acts(client: Any) -> None:
        await client.ask("Task.", system="S.")
        await client.ask("Result.", system="S.")
        summary = await client.ask("Summarise.", system="S.")
        forget(client)
        await client.ask(f"So far: {summary.text}", system="S.")
        await client.ask("Go on.", system="S.")

    assert await conversations(dialect, acts) == [
        ["S.", "Task.", "[Task.]", "Result.", "[Result.]", "Summarise.", "[Summarise.]"],
        ["S.", "So far: [Summarise.]", "[So far: [Summarise.]]", "Go on.", "[Go on.]"],
    ]


@EACH
async def test_a_history_that_is_cut_is_another_conversation_with_the_rest_as_context(dialect: str):
    """Each token is trained once: the answers that are repeated are not the policy's here."""

    async def acts(client: Any) -> None:
        for text in ("One.", "Two.", "Three."):
            await client.ask(text, system="S.")
        first = 1 if dialect == "chat" else 0
        del client.history[first : first + 2]
        await client.ask("Four.", system="S.")

    first, other = await conversations(dialect, acts)
    assert first == ["S.", "One.", "[One.]", "Two.", "[Two.]", "Three.", "[Three.]"]
    assert other == ["S.", "Two.", "[Two.]", "Three.", "[Three.]", "Four.", "[Four.]"]


@EACH
async def test_sub_agents_are_conversations_side_by_side(dialect: str):
    async def acts(client: Any) -> None:
        async def sub_agent(number: int) -> str:
            other = type(client)(client.client)
            for text in (f"Part {number}.", f"More of {number}."):
                heard = await other.ask(text, system="You are a helper.")
            return str(heard.text)

        await client.ask("Task.", system="S.")
        parts = await asyncio.gather(sub_agent(1), sub_agent(2))
        await client.ask(" ".join(parts), system="S.")

    main, *helpers = await conversations(dialect, acts)
    assert main[:3] == ["S.", "Task.", "[Task.]"]
    assert main[3] == "[More of 1.] [More of 2.]"
    assert sorted(helpers) == [
        ["You are a helper.", f"Part {n}.", f"[Part {n}.]", f"More of {n}.", f"[More of {n}.]"]
        for n in (1, 2)
    ]


@EACH
@pytest.mark.parametrize(("count", "number"), [("1", 1), (None, 1), ("0", 2)])
async def test_a_request_again_is_the_same_turn_unless_it_is_a_first_try(
    dialect: str, count: str | None, number: int
):
    """The official clients count their tries; a client without the header may be retrying."""

    async def acts(client: Any) -> None:
        await client.ask("Task.")
        again = type(client)(client.client)
        header = openai.omit if dialect != "messages" else anthropic.omit
        value = header if count is None else count
        heard = await again.ask("Task.", extra_headers={"x-stainless-retry-count": value})
        assert heard.text == "[Task.]"

    assert await conversations(dialect, acts) == [["Task.", "[Task.]"]] * number


@EACH
async def test_a_side_request_of_another_model_is_the_policys_too(dialect: str):
    """Its name is returned, and it is rewarded as all conversations are."""

    async def acts(client: Any) -> None:
        await client.ask("Task.", system="S.")
        side = type(client)(client.client)
        request = side._request
        side._request = lambda *given: {**request(*given), "model": "small-fast-model"}
        await side.ask("A title for: Task.", system="You write titles.")
        await client.ask("Go on.", system="S.")

    assert await conversations(dialect, acts) == [
        ["S.", "Task.", "[Task.]", "Go on.", "[Go on.]"],
        ["You write titles.", "A title for: Task.", "[A title for: Task.]"],
    ]


@EACH
async def test_one_conversation_too_many_is_refused_and_the_others_count(dialect: str):
    async def acts(client: Any) -> None:
        await client.ask("Task.", system="S.")
        for n in range(2):
            other = type(client)(client.client)
            if n < 1:
                await other.ask("Part.", system="You are a helper.")
                continue
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="max_branches"):
                await other.ask("Other part.", system="You are a helper.")
        await client.ask("Go on.", system="S.")

    assert await conversations(dialect, acts, max_branches=1) == [
        ["S.", "Task.", "[Task.]", "Go on.", "[Go on.]"],
        ["You are a helper.", "Part.", "[Part.]"],
    ]


@EACH
async def test_other_tools_begin_another_conversation(dialect: str):
    """The policy reads its tools at the beginning of a conversation."""
    tool = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}

    async def acts(client: Any) -> None:
        await client.ask("Task.", tools=[tool])
        await client.ask("Without tools: sum up.")

    assert await conversations(dialect, acts) == [
        ["Task.", "[Task.]"],
        ["Task.", "[Task.]", "Without tools: sum up.", "[Without tools: sum up.]"],
    ]
