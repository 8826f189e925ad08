"""A dataset is data: what its examples name must be declared by the config."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from async_rl.config import load_config
from async_rl.errors import ConfigError
from async_rl.run.preflight import check_config
from tests.support.run_config import write_run

CODE = """
from pathlib import Path

Path("ran").touch()


class Loop:
    async def run(self, task, session):
        return "stop"


def reward(task, completion):
    return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "injected", None)
    monkeypatch.delitem(sys.modules, "injected")
    write_run(tmp_path)
    (tmp_path / "injected.py").write_text(CODE)
    return tmp_path


def check(folder: Path, example: dict, **rollout) -> list[str]:
    (folder / "data.jsonl").write_text(json.dumps({"prompt": "2 + 2?", "answer": "4"} | example) + "\n")
    overrides = [
        f"{key}={json.dumps(value)}" for key, value in ({"data.path": "data.jsonl"} | rollout).items()
    ]
    return check_config(load_config(folder / "run.yaml", overrides))


EXAMPLES = [{"agent_loop": "injected:Loop"}, {"reward_function": "injected:reward"}]


@pytest.mark.parametrize("example", EXAMPLES)
def test_nothing_is_imported_because_an_example_names_it(folder: Path, example: dict) -> None:
    with pytest.raises(
        ConfigError, match=r"task row-0: an example names .* does not declare: add rollout\."
    ) as error:
        check(folder, example)
    assert "rollout.trust_examples: true, which lets the dataset run any code" in str(error.value)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("example", EXAMPLES)
def test_dotted_paths_of_examples_are_imported_when_the_config_trusts_them(
    folder: Path, example: dict
) -> None:
    check(folder, example, **{"rollout.trust_examples": True})
    assert (folder / "ran").exists()


def test_examples_may_name_what_the_config_declares(folder: Path) -> None:
    findings = check(
        folder,
        {"agent_loop": "mine", "reward_function": "score"},
        **{
            "rollout.agent_loops": {"mine": {"loop": "injected:Loop"}},
            "rollout.rewards": {"score": {"function": "injected:reward"}},
        },
    )
    assert {"agent loop: mine, of 1 tasks", "reward: score, of 1 tasks"} <= set(findings)


def test_examples_may_repeat_the_defaults(folder: Path) -> None:
    """A dotted path that the config has itself is declared."""
    check(
        folder,
        {"agent_loop": "injected:Loop", "reward_function": "injected:reward"},
        **{"rollout.agent_loop": "injected:Loop", "rollout.rewards_by_source": {"x": "injected:reward"}},
    )
