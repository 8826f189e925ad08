"""The loops of docs/guide/agents.md, as the page shows them, on a real session."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agent_loops.base import AgentLoop
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.types import Trajectory, TurnReward
from tests.support.sessions import Bench, simulated
from tests.support.templates_of_models import chat_of
from tests.support.writer import Answer, Writer

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "agents.md"


def loops() -> dict[str, AgentLoop]:
    found: dict[str, AgentLoop] = {}
    for source in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        if "(AgentLoop)" not in source:
            continue
        names: dict[str, Any] = {}
        exec(compile(source, str(PAGE), "exec"), names)
        classes = [value for value in names.values() if isinstance(value, type)]
        (kind,) = (each for each in classes if issubclass(each, AgentLoop) and each is not AgentLoop)
        found[kind.__name__] = kind()
    return found


LOOPS = loops()


async def play(name: str, answer: Answer) -> tuple[RolloutSession, list[Trajectory]]:
    """The trajectories that come of a loop whose policy answers so."""
    chat = chat_of("qwen3")
    bench = Bench(
        simulated(Writer(chat, answer), decode_step_s=0.0),  # type: ignore[arg-type]
        chat=chat,
        max_context_tokens=900,
        max_new_tokens=200,
        max_branches=2,
    )
    session = bench.session
    task = type(session.task)(task_id="t", messages=[{"role": "user", "content": "What is 2 + 2?"}])
    session.task = task
    reason = await LOOPS[name].run(task, session)
    assert await session.close() == 0
    session.end_session(reason)
    return session, [await each.finish_trajectory(each.stop_reason, {"reward": 1.0}) for each in session.tree]


def texts_of(session: RolloutSession) -> list[str]:
    return [message["content"] for message in session.messages if message["role"] == "assistant"]


def turns_of(trajectory: Trajectory) -> list[str]:
    chat = chat_of("qwen3")
    return [chat.decode(trajectory.token_ids[turn.start : turn.end]) for turn in trajectory.turns]


async def test_a_container_is_made_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    async def docker(*words: str) -> None:
        commands.append(words)

    monkeypatch.setattr(LOOPS["InContainer"], "docker", docker, raising=False)
    session, _ = await play("InContainer", lambda text: "4")
    name = f"box-{session.trajectory_id}"
    assert commands == [("run", "-d", "--name", name, "python:3.11", "sleep", "inf"), ("rm", "-f", name)]


async def test_a_second_turn_is_asked_for() -> None:
    session, (trajectory,) = await play("AskTwice", lambda text: "Yes." if "Are you sure?" in text else "4")
    assert turns_of(trajectory) == texts_of(session) == ["4", "Yes."]


@pytest.mark.parametrize(
    ("asks", "reason", "errors"), [(["SEARCH: a b"], "completed", 0), (["SEARCH:"] * 9, "max_turns", 4)]
)
async def test_tools_are_answered_counted_and_noted(asks: list[str], reason: str, errors: int) -> None:
    left = list(asks)
    session, (trajectory,) = await play("Searching", lambda text: left.pop(0) if left else "It is 4.")
    assert trajectory.outcome.stop_reason == reason
    assert trajectory.outcome.num_tool_errors == errors
    assert trajectory.turns[0].metadata == {"words": asks[0].split()[1:]}
    results = [message["content"] for message in session.messages if message["role"] == "tool"]
    assert results[0] == ("Error: no words to search for" if errors else '{"found":2}')


async def test_a_branch_goes_another_way_from_the_same_state() -> None:
    def answer(text: str) -> str:
        return "Once more: 4." if "another way" in text else "Right." if "Check it" in text else "4"

    _, (root, branch) = await play("SecondThoughts", answer)
    assert turns_of(root) == ["4", "Right."]
    assert turns_of(branch) == ["4", "Once more: 4."]
    assert branch.num_inherited_tokens == root.turns[0].end
    assert sum(t.num_sampled_tokens for t in (root, branch)) == sum(
        turn.end - turn.start for turn in (*root.turns, branch.turns[1])
    )


async def test_lines_are_played_side_by_side() -> None:
    _, lines = await play("BestOfSome", lambda text: "Four." if "In one word?" in text else "It is 4.")
    assert [turns_of(line) for line in lines] == [["It is 4.", "Four."]] * 3


async def test_turns_have_rewards_of_their_own() -> None:
    _, (trajectory,) = await play("Steps", lambda text: "So." if "Go on." in text else "It therefore is 4.")
    assert turns_of(trajectory) == ["It therefore is 4.", "So.", "So."]
    assert trajectory.turn_rewards == (TurnReward(end=trajectory.turns[0].end, reward=0.1),)
    assert trajectory.reward == 1.1


async def test_a_helper_has_a_conversation_of_its_own() -> None:
    session, (main, helper) = await play(
        "Summarising", lambda text: "A sum." if "In one sentence" in text else "It is 4."
    )
    assert (turns_of(main), turns_of(helper)) == (["It is 4."], ["A sum."])
    assert [each.completion.text for each in session.tree] == ["It is 4."] * 2
