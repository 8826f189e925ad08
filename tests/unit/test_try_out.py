"""`async-rl rollout`: the calculator's loop on an engine that writes scripted answers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from async_rl.cli.inspection.try_out import rollout
from async_rl.cli.main import main
from async_rl.errors import EnvironmentNotReady
from tests.support.writer import writing
from verification.simulation.breakable_engine import Fault

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
        assert [len(p["token_ids"]) for p in view["passages"]] == [p["tokens"] for p in view["passages"]]
        sampled = [p["tokens"] if p["turn"] else 0 for p in view["passages"]]
        assert [len(p["rollout_log_probs"]) for p in view["passages"]] == sampled
        assert view["routing"]["rows"] == view["tokens"] - 1
        assert view["routing"]["invalid"] == 0


LOOP = """
from agent_loops.base import AgentLoop


class Loop(AgentLoop):
    async def run(self, task, session):
        session.start(task.messages)
        turn = await session.generate()
        return %s
"""


@pytest.mark.parametrize(
    ("returned", "shown", "last"),
    [
        ("{}[turn.text]", ['own_loop.py", line 9, in run', "return {}[turn.text]"], "KeyError: 'some text'"),
        ("42", [], "run() returned 42 (int), expected None or one of 'completed', 'length'"),
    ],
)
def test_the_cause_and_what_was_sampled_are_shown_when_a_loop_fails(
    overrides: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    returned: str,
    shown: list[str],
    last: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "own_loop.py").write_text(LOOP % returned)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_loop", raising=False)
    changes = [*overrides, "rollout.agent_loop=own_loop:Loop", "rollout.agent_loop_args={}"]
    assert rollout(EXAMPLE, changes, number=2, open_engines=writing(lambda _: "some text")) == 1
    captured = capsys.readouterr()
    for words in (*shown, "⟩some text⟨", "2 trajectories: no rewards, 2 failed"):
        assert words in captured.out
    assert last in captured.err.splitlines()[-1]


def test_it_ends_with_the_cause_when_the_engine_dies(overrides: list[str]) -> None:
    engines = writing(lambda _: "never said", Fault("die"))
    with pytest.raises(EnvironmentNotReady, match="engine-0 failed: connection lost"):
        rollout(EXAMPLE, overrides, number=1, open_engines=engines)


def test_siblings_of_a_named_task_are_shown_when_options_stand_between_overrides(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--n", "2", overrides[1], "--task", "calculator-7", "--json"]
    simulated = "engine={kind: simulated, decode_step_s: 0.0, mean_new_tokens: 4}"
    assert main(["rollout", str(EXAMPLE), overrides[0], *words, simulated]) == 0
    views = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {view["task_id"] for view in views} == {"calculator-7"}
    assert len({view["group_id"] for view in views}) == 1
    assert len({view["trajectory_id"] for view in views}) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--task", "no-such"], "no task 'no-such'; its first is 'calculator-0'"),
        (["--n", "0"], "--n is 0"),
        (["model.path=models/none"], "async-rl: there is no folder 'models/none' (looked from"),
        (["--save", "/no/such/folder/x.jsonl"], "cannot be written: No such file or directory; expected a"),
    ],
)
def test_one_sentence_when_there_is_nothing_to_try(
    overrides: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["rollout", str(EXAMPLE), *overrides, *arguments]) == 2
    assert said in capsys.readouterr().err
