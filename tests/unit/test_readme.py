"""What the README shows runs as it is shown."""

import re
from pathlib import Path
from typing import Any

import yaml

from async_rl.config import load_config
from async_rl.types import Completion, Task
from tests.support.scripted_session import ScriptedSession, make_task

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no {language} block"
    return found.group(1)


def loop_module() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(block("python"), "README.md", "exec"), names)
    return names


async def test_the_loop_of_the_readme_calls_its_tool_and_uses_the_result():
    call = '<tool_call>{"name": "capital", "arguments": {"country": "France"}}</tool_call>'
    session = ScriptedSession(call, "It is Paris.")
    await loop_module()["SearchLoop"]().run(make_task(), session)
    assert session.tool_results == ["Paris"]
    assert session.tools[0]["function"]["name"] == "capital"
    assert session.turns_left == 0


def test_the_reward_of_the_readme_tells_right_from_wrong():
    reward = loop_module()["contains_answer"]
    task = Task(task_id="t", messages=[], answer="Paris")
    assert reward(task, Completion(messages=[], text="It is Paris.", stop_reason="completed")) == 1.0
    assert reward(task, Completion(messages=[], text="It is Rome.", stop_reason="completed")) == 0.0


def test_the_config_of_the_readme_is_the_quickstarts():
    example = ROOT / "examples" / "calculator" / "config.yaml"
    assert yaml.safe_load(block("yaml")) == yaml.safe_load(example.read_text())
    load_config(example)
