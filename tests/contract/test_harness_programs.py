"""The example of `agent_loops.harness` with the real mini-swe-agent, in an environment with its package."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from async_rl.cli.inspection.try_out import rollout
from tests.support.package_environments import python_with
from tests.support.writer import writing

pytestmark = [pytest.mark.long, pytest.mark.needs("pypi")]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "repair"
REPAIRED = "def mean(values):\n    return sum(values) / len(values) if values else 0\n"
REPAIR = f"cat > solution.py <<'END'\n{REPAIRED}END"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.fixture(autouse=True)
def _with_mini(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", str(python_with("mini-swe-agent").parent), prepend=os.pathsep)


@pytest.fixture(scope="module")
def model(calculator: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a context for the prompts of real programs."""
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(calculator / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 15}))
    return folder


def bash(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


def repairs(conversation: str) -> str:
    assert '"name": "bash"' in conversation
    return bash(SUBMIT if "<tool_response>" in conversation else REPAIR)


def gives_up(conversation: str) -> str:
    return bash(SUBMIT)


def tried(model: Path, answer: Any, capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, Any]:
    """What is shown of one attempt at the task `mean`."""
    code = rollout(
        EXAMPLE / "config.yaml",
        [f"model.path={model}", *overrides],
        number=1,
        task_id="mean",
        as_json=True,
        open_engines=writing(answer),
    )
    shown = capsys.readouterr().out
    assert code == 0, shown
    (portrait,) = map(json.loads, shown.splitlines())
    return dict(portrait)


@pytest.mark.parametrize(("answer", "reward", "num_turns"), [(repairs, 1.0, 2), (gives_up, 0.0, 1)])
@pytest.mark.parametrize("imports", ["[]", "[minisweagent.run.mini, minisweagent.models.litellm_model]"])
def test_mini_swe_agent_is_scored_for_what_it_repaired(
    model: Path,
    answer: Any,
    reward: float,
    num_turns: int,
    imports: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = f"rollout.agent_loop_args.program={{preset: mini-swe-agent, imports: {imports}}}"
    portrait = tried(model, answer, capsys, program)
    assert portrait["reward"] == reward
    assert [each["role"] for each in portrait["passages"]].count("policy") == num_turns
    (notes,) = re.findall(r'"changed": "([^"]*)"', json.dumps(portrait))
    assert notes == ("~ solution.py" if reward else "")
