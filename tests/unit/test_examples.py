"""Each example does what it is there for: its own config, loop, tools, data and reward, on an engine that
writes what a policy would that has learnt the task."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from async_rl.cli.inspection.try_out import rollout
from async_rl.config import load_config
from async_rl.engines.model_facts import load_facts
from async_rl.run.preflight import check_model
from tests.support.writer import Answer, writing
from trainer.losses.trial import try_loss

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def rows_of(example: str) -> dict[str, dict[str, Any]]:
    """The tasks by what they ask."""
    lines = (EXAMPLES / example / "tasks.jsonl").read_text().splitlines()
    return {row["messages"][0]["content"]: row for row in map(json.loads, lines)}


def tried(
    example: str,
    model: Path,
    answer: Answer,
    capsys: pytest.CaptureFixture[str],
    *,
    number: int,
    **options: Any,
) -> list[dict[str, Any]]:
    """Portraits of trajectories of an example."""
    code = rollout(
        EXAMPLES / example / "config.yaml",
        [f"model.path={model}"],
        number=number,
        as_json=True,
        open_engines=writing(answer),
        **options,
    )
    assert code == 0, capsys.readouterr().out
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def results(conversation: str) -> list[str]:
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", conversation, re.DOTALL)


@pytest.mark.parametrize("name", ["gymnasium", "harbor", "openenv", "verifiers"])
def test_environments_have_limits_that_the_untrained_model_has(name: str, calculator: Path) -> None:
    model = calculator / "model"
    config = load_config(EXAMPLES / "environments" / f"{name}.yaml", [f"model.path={model}"])
    check_model(config, load_facts(str(model)))


@pytest.mark.needs("namespaces")
def test_a_shell_answers_questions(calculator: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of("shell")

    def answer(conversation: str) -> str:
        (row,) = [row for question, row in rows.items() if question in conversation]
        return results(conversation)[-1] if results(conversation) else call("shell", command=row["command"])

    portraits = tried("shell", calculator / "model", answer, capsys, number=len(rows))
    assert {p["reward"] for p in portraits} == {1.0}
    assert {p["tool_errors"] for p in portraits} == {0}


def test_retrieval_finds_in_the_corpus_what_only_the_corpus_knows(
    calculator: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of("retrieval")

    def answer(conversation: str) -> str:
        (row,) = [row for question, row in rows.items() if question in conversation]
        return results(conversation)[-1] if results(conversation) else call("search", query=row["query"])

    portraits = tried("retrieval", calculator / "model", answer, capsys, number=len(rows))
    assert {p["task_id"] for p in portraits} == {row["id"] for row in rows.values()}
    assert [p["reward_parts"] for p in portraits] == [{"reward": 1.0, "searched": 1.0, "found": 1.0}] * len(
        rows
    )
    silent = tried("retrieval", calculator / "model", lambda _: "No idea.", capsys, number=2)
    assert [p["reward_parts"]["reward"] for p in silent] == [0.0, 0.0]


def test_both_sides_of_a_debate_are_trained_on_the_solvers_last_answer(
    calculator: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of("debate")

    def answer(conversation: str) -> str:
        (row,) = [row for question, row in rows.items() if question in conversation]
        if "You check answers" in conversation:
            return f"Wrong: it is {row['answer']}, not 0."  # which by itself would not be rewarded
        told = re.findall(r"Wrong: it is (\d+)", conversation)
        return f"So it is {told[-1]}." if told else "It is 0."

    portraits = tried("debate", calculator / "model", answer, capsys, number=3)
    assert len(portraits) == 6, "each attempt is a solver's trajectory and a critic's"
    assert {p["reward"] for p in portraits} == {1.0}
    critics = [p for p in portraits if "." in p["trajectory_id"]]
    assert len(critics) == 3
    assert {len([c for c in p["passages"] if c["role"] == "policy"]) for p in critics} == {1}
    solvers = [p for p in portraits if p not in critics]
    assert {len([c for c in p["passages"] if c["role"] == "policy"]) for p in solvers} == {2}
    assert all(
        any("Wrong: it is" in c["text"] for c in p["passages"] if c["role"] == "user") for p in solvers
    )


def test_a_config_with_a_loss_of_its_own_is_checked_and_tried(
    calculator: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try_loss(load_config(EXAMPLES / "custom_loss" / "config.yaml"))
    portraits = tried("custom_loss", calculator / "model", lambda _: "It is 4.", capsys, number=2)
    assert len(portraits) == 2


@pytest.mark.needs("namespaces")
def test_programs_are_run_behind_walls(calculator: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of("code_sandbox")

    def answer(conversation: str) -> str:
        (row,) = [row for question, row in rows.items() if question in conversation]
        return results(conversation)[-1] if results(conversation) else call("python", code=row["program"])

    portraits = tried("code_sandbox", calculator / "model", answer, capsys, number=len(rows))
    assert {p["reward"] for p in portraits} == {1.0}
    assert {p["tool_errors"] for p in portraits} == {0}

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        code = f"import socket; socket.create_connection({address}); print('I am', 'out')"

        def breaks_out(conversation: str) -> str:
            return "No." if results(conversation) else call("python", code=code)

        model = calculator / "model"
        (portrait,) = tried("code_sandbox", model, breaks_out, capsys, number=1, task_id="primes")
    said = next(p["text"] for p in portrait["passages"] if p["role"] == "tool")
    assert "Error" in said
    assert "I am out" not in said
    assert portrait["reward"] == 0.0
