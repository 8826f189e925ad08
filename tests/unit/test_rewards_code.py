"""Programs of the policy against their tests, in the real sandbox."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_loops import sandbox
from agent_loops.rewards_code import cases_of, code_tests, program_of
from async_rl.errors import EnvironmentNotReady
from tests.support.reward_functions import make_completion
from tests.support.scripted_session import make_task

ADD = "def add(a, b):\n    return a + b\n"
SUM = "```python\nprint(sum(map(int, input().split())))\n```"
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize(
    ("answer", "text", "reward", "passed"),
    [
        (PAIRS, f"I add them.\n{SUM}\nDone.", 1.0, 1.0),
        (json.dumps(PAIRS), SUM, 1.0, 1.0),
        (PAIRS, "print(3)", 0.0, 0.5),
        ([{"input": "1 2", "output": "3"}], "import sys\nprint('3 ')\nsys.exit()", 1.0, 1.0),
        ({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}, ADD, 1.0, 1.0),
        (["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add(0, 0) == 0"], ADD, 0.0, 1 / 3),
        ("assert add(2, 2) == 4", f"```\n{ADD}```", 1.0, 1.0),
        ("assert add(2, 2) == 4", "import os\nos._exit(0)", 0.0, 0.0),
        ("assert True", "raise ValueError", 0.0, 0.0),
    ],
)
async def test_a_program_is_rewarded_when_its_tests_pass(
    answer: Any, text: str, reward: float, passed: float
) -> None:
    assert await code_tests(make_task(answer=answer), make_completion(text)) == {
        "reward": reward,
        "passed": passed,
    }


@pytest.mark.needs("namespaces")
async def test_the_share_is_rewarded_when_the_config_says_so() -> None:
    answer = ["assert add(1, 2) == 4", "assert add(1, 2) == 3"]
    scores = await code_tests(make_task(answer=answer), make_completion(ADD), partial=True)
    assert scores == {"reward": 0.5, "passed": 0.5}
    scores = await code_tests(make_task(answer=answer[::-1]), make_completion(ADD), max_tests=1)
    assert scores["reward"] == 1.0


@pytest.mark.needs("namespaces")
async def test_a_program_that_hangs_fails_its_tests_alone() -> None:
    task = make_task(answer="assert True")
    assert (await code_tests(task, make_completion("while True: pass"), wall_s=0.5))["reward"] == 0.0
    assert (await code_tests(task, make_completion("pass"), wall_s=30))["reward"] == 1.0


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize(
    "start", ["exit 1", "echo cannot fork; exit 127", "kill -9 $$", "cat > /dev/null"], ids=str
)
@pytest.mark.parametrize(
    "answer", ["assert True", {"inputs": [""], "outputs": ["1"]}], ids=["assert", "print"]
)
async def test_a_sandbox_that_does_not_start_is_no_failed_test(
    monkeypatch: pytest.MonkeyPatch, start: str, answer: Any
) -> None:
    limits = {"wall_s": 0.5}
    await code_tests(make_task(answer="assert True"), make_completion("pass"), **limits)  # it was checked
    monkeypatch.setattr(sandbox, "sandbox_command", lambda _: (["/bin/sh", "-c", start], None))
    monkeypatch.setattr(sandbox, "START_S", 1.0)
    with pytest.raises(EnvironmentNotReady, match="sandbox"):
        await code_tests(make_task(answer=answer), make_completion("print(1)"), **limits)


@pytest.mark.parametrize("answer", [None, "[]", {"inputs": []}, 4, [{"in": 1}]])
def test_an_answer_without_tests_is_an_error(answer: Any) -> None:
    with pytest.raises(ValueError, match="holds no tests"):
        cases_of(answer)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\nbetter:\n```py\nb\n```", "b\n"),
        ("```\ncut short", "cut short"),
        ("print(1)", "print(1)"),
    ],
)
def test_the_last_block_is_the_program(text: str, program: str) -> None:
    assert program_of(text) == program
