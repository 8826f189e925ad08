"""`async-rl rollout`: the calculator's loop on an engine that writes scripted answers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.cli.inspection.try_out import rollout
from async_rl.cli.main import main
from async_rl.engines.simulated import Fault
from async_rl.errors import EnvironmentNotReady
from async_rl.queue.archive import InspectedTrajectories
from async_rl.runtime.supervision import first_error
from tests.support.writer import writing

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator" / "config.yaml"


def asks_the_calculator(conversation: str) -> str:
    expression = re.findall(r"What is (.*)\?", conversation)[-1]
    if "<tool_response>" not in conversation:
        call = {"name": "calculator", "arguments": {"expression": expression}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    (result,) = re.findall(r"<tool_response>\n(.*)\n</tool_response>", conversation)
    return f"{expression} = {result}."


@pytest.fixture
def overrides(calculator: Path) -> list[str]:
    return [f"model.path={calculator / 'model'}", f"data.path={calculator / 'data' / 'tasks.jsonl'}"]


def test_trajectories_are_shown_and_saved_when_a_loop_is_tried_out(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tried.jsonl"
    overrides += ["trainer.loss.advantages=gae", "trainer.critic.lr=1e-4"]  # which it does without
    code = rollout(EXAMPLE, overrides, number=3, save=file, open_engines=writing(asks_the_calculator))
    assert code == 0
    out = capsys.readouterr().out
    assert "3 trajectories: mean reward 1.000, 0 failed" in out
    assert "3 tool calls (0 errors)" in out
    views = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({view["task_id"] for view in views}) == 3
    for view in views:
        assert [p["role"] for p in view["passages"]] == ["prompt", "policy", "tool", "policy"]
        assert [p["trained"] for p in view["passages"]] == [False, True, False, True]
        assert view["routing"]["rows"] == view["tokens"] - 1
        assert view["routing"]["invalid"] == 0


def test_all_are_siblings_when_a_task_is_named(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = rollout(
        EXAMPLE,
        overrides,
        number=4,
        task_id="calculator-7",
        as_json=True,
        open_engines=writing(lambda _: "7"),
    )
    assert code == 0
    views = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {view["task_id"] for view in views} == {"calculator-7"}
    assert len({view["group_id"] for view in views}) == 1
    assert len({view["trajectory_id"] for view in views}) == 4


LOOP = """
from agent_loops.base import AgentLoop


class Loop(AgentLoop):
    async def run(self, task, session):
        session.start(task.messages)
        turn = await session.generate()
        return {}[turn.text]
"""
RETURNS_A_NUMBER = LOOP.replace("{}[turn.text]", "42")


@pytest.fixture
def try_loop(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Tries a loop with a given source out, twice."""

    def try_out(source: str) -> int:
        (tmp_path / "own_loop.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "own_loop", raising=False)
        changes = [*overrides, "rollout.agent_loop=own_loop:Loop", "rollout.agent_loop_args={}"]
        return rollout(EXAMPLE, changes, number=2, open_engines=writing(lambda _: "some text"))

    return try_out


def test_the_users_line_is_shown_when_a_loop_raises(
    try_loop: Callable[[str], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert try_loop(LOOP) == 1
    out = capsys.readouterr().out
    assert "KeyError: 'some text'" in out
    assert 'own_loop.py", line 9, in run' in out
    assert "return {}[turn.text]" in out
    assert "⟩some text⟨" in out, "what was sampled before it raised is shown too"
    assert "2 trajectories: no rewards, 2 failed" in out


def test_failed_trajectories_are_counted_when_nothing_was_kept_of_them(
    try_loop: Callable[[str], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def keep_nothing(*args: object) -> None:
        """What is left of an attempt whose worker was killed."""

    monkeypatch.setattr(InspectedTrajectories, "keep", keep_nothing)
    assert try_loop(LOOP) == 1
    captured = capsys.readouterr()
    assert "2 trajectories: no rewards, 2 failed" in captured.out
    assert "KeyError: 'some text'" in captured.err.splitlines()[-1]


def test_one_sentence_says_why_when_a_loop_returns_something_unexpected(
    try_loop: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert try_loop(RETURNS_A_NUMBER) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("async-rl: 2 of 2 trajectories failed; the last one: AgentLoopError: agent loop")
    assert "run() returned 42 (int), expected None or one of 'completed', 'length'" in last


def test_an_error_of_the_program_itself_is_not_lost(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(InspectedTrajectories, "read_file", refuse)
    with pytest.raises(ExceptionGroup) as raised:
        rollout(EXAMPLE, overrides, number=1, open_engines=writing(lambda _: "7"))
    assert str(first_error(raised.value)) == "the disk is gone"


def test_it_ends_with_the_cause_when_the_engine_dies(overrides: list[str]) -> None:
    engines = writing(lambda _: "never said", Fault("die"))
    with pytest.raises(EnvironmentNotReady, match="engine-0 failed: connection lost"):
        rollout(EXAMPLE, overrides, number=1, open_engines=engines)


def test_options_may_stand_between_overrides(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = "engine={kind: simulated, decode_step_s: 0.0, mean_new_tokens: 4}"
    assert main(["rollout", str(EXAMPLE), overrides[0], "--n", "2", overrides[1], "--json", simulated]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--task", "no-such"], "no task 'no-such'; its first is 'calculator-0'"),
        (["--n", "0"], "--n is 0"),
        (["rollout.reward=agent_loops.rewards:nothing"], "agent_loops.rewards:nothing"),
        (["--save", "/no/such/folder/x.jsonl"], "cannot be written: No such file or directory; expected a"),
        (["--save", "/tmp"], "cannot be written: Is a directory; expected a file in a folder that exists"),
    ],
)
def test_one_sentence_when_there_is_nothing_to_try(
    overrides: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["rollout", str(EXAMPLE), *overrides, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_usage_is_shown_when_an_option_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["rollout", "x.yaml", "--nn", "2"], ["doctor", "x", "a=b"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "unrecognized arguments" in capsys.readouterr().err
