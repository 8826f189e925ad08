"""Environments of verifiers, unmodified, with their real package and a policy that follows a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_loops.environment import EnvironmentLoop
from agent_loops.environment.verifiers import VerifiersLoop, list_tasks
from agent_loops.testing import make_task
from async_rl.errors import AgentLoopError, ConfigError
from async_rl.types import Sampled, StopReason, Task
from tests.support.package_environments import python_with
from tests.support.sessions import Bench
from tests.support.talk import lines, talking

pytestmark = [
    pytest.mark.long,
    pytest.mark.needs("pypi"),
    pytest.mark.timeout(600),  # packages are installed, the environment imports them
]

GAME = "examples.environments.numbers_game:load_environment"
ECHO = "tests.support.verifiers_environments:Echo"
END = "<|im_end|>"
TOOLS = "tests.support.verifiers_environments:tools"


@pytest.fixture(scope="module")
def python() -> str:
    return str(python_with("verifiers"))


@asynccontextmanager
async def loop_of(python: str, name: str, **args: Any) -> AsyncIterator[EnvironmentLoop]:
    async with EnvironmentLoop("verifiers", id=name, args=args, python=python) as loop:
        yield loop


async def tasks_of(python: str, name: str, **args: Any) -> list[Task]:
    listed = await list_tasks({"id": name, "args": args, "python": python}, 8, evaluation=False)
    return [as_task(each) for each in json.loads(json.dumps(listed))]


def as_task(example: dict[str, Any]) -> Task:
    return make_task(messages=example["messages"], metadata={"verifiers": example["verifiers"]})


async def played(
    loop: EnvironmentLoop, task: Task, *says: str, **limits: int
) -> tuple[StopReason | None, dict[str, float], str]:
    """Return the stop reason, what was reported, and the text of the trajectory."""
    bench, _ = talking(lines(*says), **limits)
    reason = await loop.run(task, bench.session)
    assert bench.counted("openai_requests_total", result="another") == 0
    trajectory = await bench.session.finish_trajectory("completed", {"reward": 1.0})
    sampled = [each for each in trajectory.segments if isinstance(each, Sampled)]
    assert "".join(text_of(bench, each.token_ids) for each in sampled) == "".join(
        f"{said}{END}" for said in says
    )
    return reason, dict(bench.session.completion.reported), text_of(bench, trajectory.token_ids)


def text_of(bench: Bench, token_ids: Any) -> str:
    return str(bench.chat.tokenizer.decode(token_ids))


def transcript(*messages: tuple[str, str]) -> str:
    """Return the tokens of a conversation as text; the last message is the policy's."""
    return "\n".join(f"<|im_start|>{role}\n{text}{END}" for role, text in messages)


SAY = as_task(
    {
        "messages": [{"role": "user", "content": "Say."}],
        "verifiers": {"example_id": 0, "question": "Say.", "answer": ""},
    }
)


async def test_an_environment_is_played_to_its_end_and_its_rubric_gives_the_reward(python: str) -> None:
    tasks = await tasks_of(python, GAME)
    asked = [
        ("system", "Find a number. Answer with your guess alone."),
        ("user", "I think of a number from 1 to 100."),
    ]
    assert len(tasks) == 8
    assert [(each["role"], each["content"]) for each in tasks[0].messages] == asked
    async with loop_of(python, GAME) as loop:
        found = await asyncio.gather(
            played(loop, tasks[0], "1", "fifty", "50", "Bye."),
            played(loop, tasks[1], *8 * ["1"]),
        )
    assert found[0] == (
        None,
        {"reward": 1.0, "sum_step_rewards": 1.0, "num_turns": 4.0},
        transcript(
            *asked,
            ("assistant", "1"),
            ("user", "higher"),
            ("assistant", "fifty"),
            ("user", "Write a number."),
            ("assistant", "50"),
            ("user", "Right.\nEpisode already ended."),  # and `GymEnv` asks once more
            ("assistant", "Bye."),
        ),
    )
    assert found[1][:2] == ("max_turns", {"reward": 0.0, "sum_step_rewards": 0.0, "num_turns": 8.0})
    assert found[1][2].count("higher") == 7


async def test_an_environment_with_tools_is_played_through_the_parser_of_the_model(python: str) -> None:
    (task,) = await tasks_of(python, TOOLS)
    call = json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})
    says = f"<think>\nWhere?\n</think>\n\nI look.\n<tool_call>\n{call}\n</tool_call>"
    async with loop_of(python, TOOLS) as loop:
        reason, reported, text = await played(loop, task, says, "It will rain.")
    assert reason is None
    assert reported["reward"] == reported["weather_calls"] == 1.0
    assert text.endswith(
        transcript(
            ("user", "Weather in Oslo?"),
            ("assistant", says),
            ("user", "<tool_response>\nOslo: rain\n</tool_response>"),
            ("assistant", "It will rain."),
        )
    )


async def test_a_full_context_ends_the_episode_with_the_reward_of_what_was_said(
    python: str, tmp_path: Path
) -> None:
    async with loop_of(python, ECHO, folder=str(tmp_path)) as loop:
        reason, reported, _ = await played(loop, SAY, "x" * 300, max_context_tokens=600)
    assert reason == "length"
    assert reported == {"reward": 150.0, "length": 300.0, "num_turns": 1.0}


async def test_an_empty_answer_ends_the_episode_with_the_reward_of_what_was_said(
    python: str, tmp_path: Path
) -> None:
    async with loop_of(python, ECHO, folder=str(tmp_path)) as loop:
        reason, reported, _ = await played(loop, SAY, "four", "")
    assert reason is None
    assert reported == {"reward": 2.0, "length": 4.0, "num_turns": 1.0}


async def test_faults_fail_their_attempts_and_a_process_that_ends_is_replaced(
    python: str, tmp_path: Path
) -> None:
    async with loop_of(python, ECHO, folder=str(tmp_path)) as loop:
        for says, why in {
            "raise": "RuntimeError: the dice fell off the table",
            "refuse": "ToolError..the dice are loaded",
            "unscored": "Error calling reward function length: no score for 'unscored'",
            "odd": "Out of range float values",
            "die": "its process ended with 3",
        }.items():
            with pytest.raises(AgentLoopError, match=why):
                await played(loop, SAY, *3 * [says])
        reason, reported, _ = await played(loop, SAY, "a", "b", "long")
    assert (reason, reported["reward"]) == ("max_turns", 2.0)


async def test_the_process_ends_in_spite_of_its_threads_once_episodes_and_environment_are_torn_down(
    python: str, tmp_path: Path
) -> None:
    asked, driver = asyncio.Event(), VerifiersLoop(ECHO, {"folder": str(tmp_path)}, python)

    def never_ends(prompt: str) -> str:
        asked.set()
        return "x" * 4000

    async with driver:
        bench, _ = talking(never_ends, decode_step_s=0.01)
        episode = asyncio.ensure_future(driver.run(SAY, bench.session))
        await asked.wait()
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        process = driver.process.popen
        assert process.poll() is None
    assert process.returncode == 0
    assert (tmp_path / "ended").read_text() == "0\n"
    assert (tmp_path / "torn_down").exists()


async def test_an_environment_that_cannot_be_loaded_is_an_error_of_the_config(python: str) -> None:
    with pytest.raises(ConfigError, match=r"TypeError.*surprise"):
        async with loop_of(python, GAME, surprise=1):
            pass
    with pytest.raises(ConfigError, match=r"'no-such' of verifiers cannot be loaded.*Could not import"):
        async with loop_of(python, "no-such"):
            pass
