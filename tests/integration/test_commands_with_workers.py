"""`async-rl rollout` and `async-rl evaluate` with rollout workers: no session runs in this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_loops.base import AgentLoop
from async_rl.cli.evaluate import evaluate
from async_rl.cli.inspection import try_out
from async_rl.cli.inspection.try_out import rollout
from async_rl.observability.evaluation_record import FILE, evaluation_record_log
from async_rl.rollout.session.api import Session
from async_rl.types import Completion, Task
from tests.support.quick_server import QuickServer

pytestmark = [pytest.mark.real, pytest.mark.ray, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator" / "config.yaml"


class OwnProcess(AgentLoop):
    """Notes its process, and fails where the task says so."""

    def __init__(self, folder: str, *, fails: bool = False) -> None:
        self._folder = Path(folder)
        self._fails = fails

    async def run(self, task: Task, session: Session) -> None:
        (self._folder / str(os.getpid())).touch()
        session.start(task.messages)
        await session.generate()
        if self._fails:
            raise KeyError("no such tool")


def length(task: Task, completion: Completion) -> float:
    return float(len(completion.text))  # of the model's 24 tokens, a letter each


@pytest.fixture
def overrides(calculator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(try_out, "SGLangServer", QuickServer)
    (tmp_path / "processes").mkdir()
    return [
        f"model.path={calculator / 'model'}",
        f"data.path={calculator / 'data' / 'tasks.jsonl'}",
        "engine.device=cpu",
        "routing.replay=off",
        "rollout.max_new_tokens=24",
        f"rollout.agent_loop={__name__}:OwnProcess",
        f"rollout.reward={__name__}:length",
        "rollout.num_workers=1",
        # Of the nodes of a cluster, which these commands do not use.
        "placement.resources_per_rollout_worker={rollout: 1, CPU: 1000}",
    ]


def loop_args(tmp_path: Path, *, fails: bool = False) -> str:
    return f"rollout.agent_loop_args={{folder: {tmp_path / 'processes'}, fails: {str(fails).lower()}}}"


def other_processes(tmp_path: Path) -> list[str]:
    found = [path.name for path in (tmp_path / "processes").iterdir()]
    assert str(os.getpid()) not in found
    return found


@pytest.mark.parametrize(
    ("fails", "said"),
    [(False, "2 trajectories: mean reward 24"), (True, 'raise KeyError("no such tool")')],
    ids=["ends", "raises"],
)
def test_trajectories_are_tried_out_in_a_worker_and_the_users_line_is_shown_when_their_loop_raises(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: bool, said: str
) -> None:
    assert rollout(EXAMPLE, [*overrides, loop_args(tmp_path, fails=fails)], number=2) == int(fails)
    assert said in capsys.readouterr().out
    assert len(other_processes(tmp_path)) == 1


def test_a_model_is_evaluated_in_a_worker(overrides: list[str], calculator: Path, tmp_path: Path) -> None:
    lines = (calculator / "data" / "tasks.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "held_out.jsonl").write_text("".join(lines[:3]))
    validation = f"data.validation=[{{path: {tmp_path / 'held_out.jsonl'}}}]"
    out = tmp_path / "out"
    assert evaluate(EXAMPLE, [*overrides, loop_args(tmp_path), validation], out=out) == 0
    (record,) = evaluation_record_log(out / FILE).read()
    assert (record.asked, record.dropped, record.sampled_tokens) == (3, {}, 3 * 24)
    assert record.scores["all"].reward.value == 24
    assert len(other_processes(tmp_path)) == 1
    assert len(list((out / "trajectories").iterdir())) == 3
