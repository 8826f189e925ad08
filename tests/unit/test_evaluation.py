"""Scores of answers, when an evaluation is due, and its record."""

import fcntl
import json
from collections.abc import Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from async_rl.cli.evaluate import evaluate
from async_rl.cli.inspection.browse import inspect
from async_rl.config import EvaluationConfig, load_config, parse_config, to_builtins
from async_rl.engines.model_facts import load_facts
from async_rl.engines.simulated import SimulatedEngine
from async_rl.errors import ConfigError, EnvironmentNotReady, RewardUnavailable
from async_rl.evaluation.estimates import EvaluatedAnswer, pass_at_k, scores
from async_rl.evaluation.evaluator import evaluation_config
from async_rl.evaluation.service import due
from async_rl.observability import long_work
from async_rl.observability.evaluation_record import EvaluationRecord, evaluation_record_log
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import StepRecord
from async_rl.observability.text_console import TextConsole
from async_rl.observability.trackers.tracker import Trackers
from async_rl.rollout.attempt import LocalBackend
from async_rl.run.preflight import check_config
from async_rl.types import Completion, Task
from tests.support.run_config import config_with, write_run


def answer(
    task: str, reward: float, *, dataset: str = "aime", source: str = "", **parts: float
) -> EvaluatedAnswer:
    return EvaluatedAnswer(
        dataset=dataset,
        source=source,
        task_id=task,
        parts={"reward": reward, **parts},
        tokens=10,
        truncated=reward == 0.0,
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["trainer.keep_best=all/reward", "evaluation.every=0"],
            "nothing is evaluated: set evaluation.every",
        ),
        (["trainer.keep_best=amie/reward"], "no set 'amie'; expected one of all, aime, aime/algebra"),
        (["trainer.keep_best=aime/pass@3"], r"evaluations have reward, pass@1, pass@2, pass@4$"),
        (["trainer.keep_best=reward"], "keep_best"),
    ],
)
def test_config_error_when_evaluations_lack_the_figure_of_the_best_checkpoint(tmp_path, overrides, words):
    config = write_run(tmp_path)
    row = {"prompt": "1 + 1?", "answer": "2", "data_source": "algebra"}
    (tmp_path / "aime.jsonl").write_text(json.dumps(row))
    sets = [
        f"data.validation=[{{path: {tmp_path / 'aime.jsonl'}}}]",
        "evaluation.samples=4",
        "evaluation.every=2",
    ]
    for figure in ("all/reward", "aime/pass@4", "aime/algebra/pass@1"):
        check_config(load_config(config, [*sets, f"trainer.keep_best={figure}"]))
    with pytest.raises(ConfigError, match=words):
        check_config(load_config(config, [*sets, *overrides]))


def test_scores_are_those_of_a_hand_computed_case():
    """Two tasks with 1 of 4 and 3 of 4 answers that pass, and one task of another dataset with none."""
    found = scores(
        [
            *[answer("a", reward, format=1.0) for reward in (1.0, 0.0, 0.0, 0.0)],
            *[answer("b", reward, format=0.0) for reward in (1.0, 1.0, 1.0, 0.0)],
            *[answer("a", 0.0, dataset="code", source="leet") for _ in range(4)],
        ],
        samples=4,
        pass_reward=1.0,
    )
    assert list(found["all"].pass_at) == ["1", "2", "4"]
    assert set(found) == {"all", "aime", "code", "code/leet"}
    aime = found["aime"]
    assert (aime.tasks, aime.answers, aime.tokens_mean, aime.truncated_share) == (2, 8, 10.0, 0.5)
    assert aime.reward.value == pytest.approx(0.5)
    assert aime.pass_at["1"].value == pytest.approx(0.5)
    # 1 - C(3, 2)/C(4, 2) = 1/2, and 1 - C(1, 2)/C(4, 2) = 1.
    assert aime.pass_at["2"].value == pytest.approx(0.75)
    # The deviation of 0.25 and 0.75 is 0.3536, over the square root of two tasks 0.25, times 1.96.
    assert (aime.reward.low, aime.reward.high) == pytest.approx((0.5 - 0.49, 0.5 + 0.49), abs=1e-4)
    assert aime.pass_at["2"].high == 1.0
    assert aime.parts == {"format": 0.5}
    assert found["all"].reward.value == pytest.approx(1 / 3)  # of tasks, though one dataset has more answers
    assert found["code/leet"].pass_at["1"].value == 0.0


def test_tasks_with_too_few_answers_say_nothing_of_pass_at_k():
    found = scores([answer("a", 1.0), answer("b", 0.0), answer("b", 1.0)], samples=2, pass_reward=1.0)
    assert (found["all"].pass_at["2"].tasks, found["all"].pass_at["2"].value) == (1, 1.0)
    with pytest.raises(ValueError, match="at least 2"):
        pass_at_k(1, 1, 2)


@pytest.mark.parametrize(
    ("every", "at_start", "version", "evaluated", "expected"),
    [
        (5, False, 0, None, False),
        (5, True, 0, None, True),
        (5, True, 0, 0, False),
        (0, True, 3, 0, False),
        (5, True, 4, 0, False),
        (5, True, 5, 0, True),
        (5, False, 5, 5, False),
        (5, False, 7, None, True),  # resumed after a crash in the evaluation of 5
        (5, False, 12, 7, True),  # 7 was evaluated for 5, so that 10 is due
        (5, False, 9, 7, False),
    ],
)
def test_a_version_is_due(every, at_start, version, evaluated, expected):
    assert due(EvaluationConfig(every=every, at_start=at_start), version, evaluated) is expected


def config(**evaluation):
    overrides = ("data.validation=[{path: v.jsonl}]", "engine.num_engines=2", "rollout.agent_loop_args.a=1")
    return config_with(*overrides, evaluation={"every": 5, **evaluation})


def test_sampling_and_loop_are_the_rollouts_unless_they_are_given():
    def settings(**evaluation):
        return evaluation_config(config(**evaluation)).rollout

    same = {"num_workers": 0, "max_concurrent_trajectories": 64, "replay_sampling": False}
    assert settings() == msgspec.structs.replace(config().rollout, **same)
    changed = settings(temperature=0.0, max_new_tokens=7, agent_loop="m:Other")
    assert (changed.temperature, changed.max_new_tokens) == (0.0, 7)
    assert (changed.agent_loop, changed.agent_loop_args) == ("m:Other", {})
    changed = settings(top_p=0.5, top_k=3)
    assert (changed.top_p, changed.top_k, changed.agent_loop_args) == (0.5, 3, {"a": 1})


def test_greedy_and_short_answers_need_no_other_settings_of_training():
    base = config(max_new_tokens=7, temperature=0.0)
    loss = msgspec.structs.replace(base.trainer.loss, overlong_buffer_tokens=100)
    trainer = msgspec.structs.replace(base.trainer, loss=loss)
    answering = evaluation_config(msgspec.structs.replace(base, trainer=trainer))
    read = parse_config(to_builtins(answering)).rollout  # as a worker reads it
    assert (read.max_new_tokens, read.temperature) == (7, 0)
    assert evaluation_config(config(max_new_tokens=10**6)).rollout.max_new_tokens < 10**6


@pytest.mark.parametrize(
    ("of_rollouts", "max_concurrent", "workers"), [(0, 4096, 0), (1, 4096, 1), (4, 513, 2), (4, 1, 1)]
)
def test_answers_are_written_in_workers_where_rollouts_are(of_rollouts, max_concurrent, workers):
    base = config(max_concurrent=max_concurrent)
    rollout = msgspec.structs.replace(base.rollout, num_workers=of_rollouts)
    assert evaluation_config(msgspec.structs.replace(base, rollout=rollout)).num_workers == workers


@pytest.mark.parametrize(
    ("evaluation", "words"),
    [
        ({"engines": 2}, "none would be left for rollouts"),
        ({"engines": "some"}, "evaluation.engines"),
        ({"top_k": 0}, "evaluation.top_k is 0"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(evaluation, words):
    with pytest.raises(ConfigError, match=words):
        config(**evaluation)


def record_of(version: int, **rewards: float) -> EvaluationRecord:
    """Return a finished evaluation with one answer to one task per set; `dataset` and its sources have a
    slash.
    """
    answers = [answer("t", reward, dataset=name) for name, reward in rewards.items()]
    found = scores(answers, samples=1, pass_reward=1.0)
    return EvaluationRecord(weight_version=version, status="done", scores=found, asked=len(answers))


def test_trackers_are_given_an_evaluation_with_the_step_after_it_and_the_last_one_at_the_end():
    logged: list[tuple[int, Mapping[str, float]]] = []

    class Listing:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            logged.append((step, metrics))

        def close(self) -> None: ...

    trackers = Trackers({"list": Listing}, Metrics(), devices=1)
    for step in (1, 2):
        trackers.log(StepRecord(step=step, weight_version=step, time_s=1.0))
        trackers.log_evaluation(record_of(step, aime=float(step)))
    trackers.close()
    found = [(step, figures.get("val-core/aime/reward/mean")) for step, figures in logged]
    assert found == [(1, None), (2, 1.0), (3, 2.0)]
    assert logged[1][1]["val-aux/weight_version"] == 1
    assert logged[1][1]["val-core/all/pass@1"] == 1.0


@asynccontextmanager
async def simulated(config, log_dir):
    facts = load_facts(config.model.path)
    yield [SimulatedEngine(f"engine-{i}", config.engine, seed=i, facts=facts) for i in range(2)]


def test_a_model_is_evaluated_alone_and_its_answers_can_be_inspected(calculator, tmp_path, capsys):
    path = write_config(
        calculator,
        tmp_path,
        evaluation={"samples": 2},
    )
    path.write_text(path.read_text().replace(str(calculator / "model"), "elsewhere"))
    out = tmp_path / "out"
    console = TextConsole(width=120)
    assert (
        evaluate(path, [], model=calculator / "model", out=out, console=console, open_engines=simulated) == 0
    )
    shown = capsys.readouterr().out
    assert "6 answers" in shown
    assert "pass@2" in shown
    (found,) = evaluation_record_log(out / "evaluations.jsonl").read()
    assert (found.weight_version, found.unaccounted, found.scores["val"].tasks) == (0, 0, 3)
    assert inspect(out, None, console=console) == 0
    assert "6 of the 6" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"data\.validation"):
        evaluate(path, ["data.validation=[]"], model=calculator / "model", open_engines=simulated)


def test_an_evaluation_says_how_far_it_is_when_it_takes_long(calculator, tmp_path, capsys, monkeypatch):
    path = write_config(calculator, tmp_path, evaluation={"samples": 2})
    assert evaluate(path, [], console=TextConsole(), open_engines=simulated) == 0
    assert "evaluating" not in capsys.readouterr().err, "it was short"
    monkeypatch.setattr(long_work, "_LINE_EVERY_S", 0.0)
    assert evaluate(path, [], console=TextConsole(), open_engines=simulated) == 0
    shown = capsys.readouterr()
    assert "evaluating: 0 of 6 answers after 0 s" in shown.err
    assert "evaluating" not in shown.out


class RewardsTurns:
    """Gives its turn a reward of its own, as a loop of the rollouts may."""

    async def run(self, task, session):
        session.start(task.messages)
        await session.generate()
        session.reward_turn(-0.2)
        await session.generate()
        session.reward_turn(0.7)


def score_one(task: Task, completion: Completion) -> dict[str, float]:
    return {"reward": 1.0, "format": 0.5}


def write_config(calculator, folder, *, rollout=None, evaluation=None) -> Path:
    """A config for three of the calculator's tasks, on simulated engines."""
    tasks = three_tasks(calculator, folder)
    tree = {
        "model": {"path": str(calculator / "model")},
        "data": tasks | {"validation": [tasks | {"name": "val"}]},
        "engine": {"kind": "simulated", "decode_step_s": 0.0, "mean_new_tokens": 4},
        "rollout": {"max_context_tokens": 256, "max_new_tokens": 16, **(rollout or {})},
        "evaluation": evaluation or {},
    }
    (path := folder / "run.yaml").write_text(json.dumps(tree))
    return path


def three_tasks(calculator, folder):
    """A source of three of the calculator's tasks."""
    lines = (calculator / "data" / "tasks.jsonl").read_text().splitlines(keepends=True)
    (folder / "tasks.jsonl").write_text("".join(lines[:3]))
    return {"path": str(folder / "tasks.jsonl")}


@pytest.mark.parametrize("reward", ["score_one", "score_all"])
def test_rewards_of_turns_do_not_count_in_an_evaluation(calculator, tmp_path, reward):
    rollout = {"agent_loop": f"{__name__}:RewardsTurns", "reward": f"{__name__}:{reward}"}
    path, out = write_config(calculator, tmp_path, rollout=rollout), tmp_path / "out"
    assert evaluate(path, [], out=out, console=TextConsole(), open_engines=simulated) == 0
    (found,) = evaluation_record_log(out / "evaluations.jsonl").read()
    score = found.scores["all"]
    assert (score.reward.value, score.pass_at["1"].value) == (1.0, 1.0)
    assert score.parts == ({"format": 0.5} if reward == "score_one" else {})


def score_all(task: Task, completions: list[Completion]) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RewardUnavailable("its worker ended"), "RewardUnavailable"), (OSError("no disk"), "RewardError")],
)
def test_only_the_answers_to_a_task_that_cannot_be_scored_are_dropped(
    calculator, tmp_path, monkeypatch, error, reason
):
    scored, left = LocalBackend.score_group, list[Path]()

    async def score_group(backend, task, completions):
        if len(left) == 0:
            left.extend(Path(completion.path) for completion in completions)
            assert all(path.exists() for path in left)
            raise error
        assert not any(path.exists() for path in left), "those of the dropped answers are discarded"
        return await scored(backend, task, completions)

    monkeypatch.setattr(LocalBackend, "score_group", score_group)
    evaluation = {"samples": 2, "max_concurrent": 1}
    path = write_config(
        calculator, tmp_path, rollout={"reward": f"{__name__}:score_all"}, evaluation=evaluation
    )
    out = tmp_path / "out"
    assert evaluate(path, [], out=out, console=TextConsole(), open_engines=simulated) == 0
    (found,) = evaluation_record_log(out / "evaluations.jsonl").read()
    assert (found.dropped, found.scores["all"].answers, found.unaccounted) == ({reason: 2}, 4, 0)


def score_none(task: Task, completion: Completion) -> float:
    raise ValueError("no gold")


def test_an_evaluation_is_missing_with_its_reason_when_all_answers_are_dropped(calculator, tmp_path, capsys):
    path, out = (
        write_config(calculator, tmp_path, rollout={"reward": f"{__name__}:score_none"}),
        tmp_path / "out",
    )
    assert evaluate(path, [], out=out, console=TextConsole(width=300), open_engines=simulated) == 1
    (found,) = evaluation_record_log(out / "evaluations.jsonl").read()
    assert (found.status, found.dropped, found.unaccounted) == ("missing", {"RewardError": 3}, 0)
    assert found.reason.startswith("all answers were dropped: 3 RewardError; the last: ")
    assert found.reason.endswith("score_none raised ValueError: no gold")
    assert found.reason in capsys.readouterr().out


def test_an_error_of_an_evaluation_is_printed_and_logged_in_its_folder(calculator, tmp_path, capsys):
    @asynccontextmanager
    async def absent(config, log_dir):
        raise EnvironmentNotReady("no engine here")
        yield []

    # No rollouts serve at this port here.
    agent = {"agent_loop": "agent_loops.openai_agent:OpenAIAgentLoop"}
    agent |= {"agent_loop_args": {"command": ["true"], "port": 8123}}
    path = write_config(calculator, tmp_path, rollout=agent, evaluation={"every": 1})
    out = tmp_path / "out"
    assert evaluate(path, [], out=out, open_engines=absent) == EnvironmentNotReady.exit_code
    log = out / "logs" / "driver.log"
    assert f"async-rl: no engine here; log: {log}" in capsys.readouterr().err
    assert "Traceback" in log.read_text()
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with pytest.raises(ConfigError, match="another process writes into"):
            evaluate(path, [], out=out, open_engines=absent)
