"""A run of the real scheduler becomes slower than an earlier window of it lets expect, and says why."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_rl.cli.expectation import answer
from async_rl.errors import ConfigError
from async_rl.observability.page.tiles import tiles
from async_rl.observability.records import StepRecord, step_record_log
from async_rl.planning.past_run import read_past_run
from async_rl.planning.planned_job import PlannedRun
from async_rl.planning.run_comparison import expected_rate
from async_rl.planning.run_fit import recorded_figures
from async_rl.planning.virtual_time import run_virtual
from async_rl.run import plan_watch
from async_rl.run.plan_watch import AFTER_STEPS, RECORD, PlanQuestion, PlanWatch, ask_program
from tests.support.past_runs import past_config, record_run

CONFIG = past_config("run.max_steps=46")
HOW = PlannedRun(versions=8, warmup=3)
asked: list[PlanQuestion] = []


async def ask(run_dir: Path, question: PlanQuestion) -> dict[str, Any]:
    """Do what the program does, a second later: the archive writes once a second."""
    asked.append(question)
    await asyncio.sleep(1.0)
    return answer(question.kind, run_dir, question.first_step, question.number)


async def watched_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PlanWatch(CONFIG, folder, asyncio.get_running_loop().time, ask)
    await record_run(CONFIG, folder, monkeypatch, plan=plan, slow_from_s=100.0, engine_1=2.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in which engine-1 decodes 2.5 times as slowly from second 100, step 30, on."""
    asked.clear()
    folder = tmp_path_factory.mktemp("runs") / "slower"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_watch, "_WORTH_S", 0.0)
        patch.setattr(plan_watch, "_CAUSE_EVERY_S", 20.0)
        run_virtual(watched_run(folder, patch))
    return folder


@pytest.fixture(scope="module")
def records(folder: Path) -> list[StepRecord]:
    return step_record_log(folder / "metrics.jsonl").read()


@pytest.mark.real
def test_a_run_is_below_its_plan_when_an_engine_becomes_slow(records: list[StepRecord]) -> None:
    assert all(each.throughput_vs_plan_ratio is None for each in records[:AFTER_STEPS])
    healthy = [each.throughput_vs_plan_ratio for each in records[AFTER_STEPS:] if each.time_s < 100]
    slow = [each.throughput_vs_plan_ratio for each in records if each.time_s > 125]
    assert all(each is not None and 0.85 < each < 1.15 for each in healthy)
    assert all(each is not None and 0.55 < each < 0.85 for each in slow)
    assert (asked[0].kind, asked[0].number) == ("rate", 2)
    assert {question.kind for question in asked[1:]} == {"cause"}
    assert len(asked) <= 5


@pytest.mark.real
def test_the_page_names_the_slow_engine_when_a_run_is_below_its_plan(records: list[StepRecord]) -> None:
    assert not any(each.below_plan for each in records if each.time_s < 100)
    worst = records[-1].below_plan[0]
    said = re.fullmatch(r"engine-1 decodes a token (\d\.\d) times as slowly as the others", worst)
    assert said is not None
    assert 1.5 < float(said[1]) < 3
    ratio = records[-1].throughput_vs_plan_ratio
    assert ratio is not None
    (tile,) = (tile for tile in tiles(records, 2) if tile.name == "throughput")
    assert tile.note.startswith(f"{1 - ratio:.0%} below plan: engine-1 decodes a token")
    assert tile.verdict == "healthy", "it has not lasted for as long as the alert waits"


def test_the_window_is_kept_when_it_was_taken_once(folder: Path) -> None:
    before = (folder / RECORD).read_bytes()
    rate = answer("rate", folder, 30, 2)["tokens_per_s"]
    assert rate == pytest.approx(asked[1].number)
    assert (folder / RECORD).read_bytes() == before


@pytest.mark.real
def test_the_expected_rate_is_lower_when_fewer_engines_serve(folder: Path) -> None:
    both, one = (answer("rate", folder, 0, engines)["tokens_per_s"] for engines in (2, 1))
    assert 0.4 * both < one < 0.8 * both


@pytest.mark.real
def test_the_window_has_the_engines_that_served_when_one_was_missing(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("plan"))
    rate = answer("rate", tmp_path / "run", 6, 1)["tokens_per_s"]
    kept = json.loads((tmp_path / "run" / RECORD).read_text())
    assert kept["config"]["engine"]["num_engines"] == 1
    recorded = recorded_figures(read_past_run(folder, 6)).tokens_per_s
    assert recorded < rate < 1.3 * recorded, "as without the slow engine, and not as with half the engines"


@pytest.mark.real
def test_the_expected_rate_is_that_of_healthy_engines_when_one_was_slow_in_the_window(folder: Path) -> None:
    past = read_past_run(folder, first_step=36)
    healthy = asked[1].number
    recorded = recorded_figures(past).tokens_per_s
    assert recorded < 0.85 * healthy
    assert expected_rate(past, 2, HOW) == pytest.approx(healthy, rel=0.2)


@pytest.mark.real_time
async def test_the_program_answers_when_it_is_started(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}")
    found, failed = await asyncio.gather(
        ask_program(folder, PlanQuestion("rate", 6, 2)),
        ask_program(tmp_path, PlanQuestion("rate", 6, 2)),
        return_exceptions=True,
    )
    assert found == answer("rate", folder, 6, 2)
    assert isinstance(failed, RuntimeError)
    assert "has no config.yaml" in str(failed)


@pytest.mark.real_time
async def test_the_program_ends_when_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(run_dir: Path, question: PlanQuestion) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "1000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[0]

    monkeypatch.setattr(plan_watch, "_start_program", start)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask_program(tmp_path, PlanQuestion("rate", 6, 2)), 0.01)
    assert await asyncio.to_thread(started[0].wait, 60) == -signal.SIGKILL


def test_a_window_is_refused_when_it_has_too_few_steps(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has the records of 2 steps"):
        read_past_run(folder, first_step=45)


def test_expectations_are_forgotten_when_settings_have_changed(tmp_path: Path) -> None:
    for name in ("run.max_steps=99", "rollout.max_staleness=1"):
        plan = PlanWatch(CONFIG, tmp_path, lambda: 0.0)
        plan._take_answer(PlanQuestion("rate", 1, 2), {"tokens_per_s": 5.0})
        again = PlanWatch(past_config(name), tmp_path, lambda: 0.0)
        assert again._expected.tokens_per_s == ({2: 5.0} if name.startswith("run") else {})
    assert not (tmp_path / "plan").exists()


def steps(number: int, tokens: int = 100) -> list[StepRecord]:
    return [
        StepRecord(step=step, weight_version=step, time_s=1e3 * step, trained_tokens=tokens)
        for step in range(1, number + 1)
    ]


async def test_the_rate_is_that_of_the_last_steps_with_the_same_engines(tmp_path: Path) -> None:
    plan = PlanWatch(past_config("run.max_steps=99"), tmp_path, lambda: 0.0)
    plan._expected.tokens_per_s |= {2: 0.2, 1: 0.08}
    found = [plan.observe_step(steps(20 + i), engines)[0] for i, engines in enumerate([2] * 6 + [1] * 6)]
    assert found == [*[None] * 5, pytest.approx(0.5), *[None] * 5, pytest.approx(1.25)]
    plan.begin_steps()
    assert plan.observe_step(steps(32), 1) == (None, ())


@pytest.mark.parametrize(("max_steps", "wanted"), [(21, 0), (22, 1)])
async def test_a_window_is_taken_only_when_the_run_lasts(max_steps: int, wanted: int, tmp_path: Path) -> None:
    """A step takes 1000 s."""
    found: list[PlanQuestion] = []

    async def fail(run_dir: Path, question: PlanQuestion) -> dict[str, Any]:
        found.append(question)
        raise RuntimeError("it has failed")

    plan = PlanWatch(past_config(f"run.max_steps={max_steps}"), tmp_path, lambda: 0.0, fail)
    following = asyncio.ensure_future(plan.run())
    for number in range(1, 30):
        plan.observe_step(steps(number), 2)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    following.cancel()
    assert found == [PlanQuestion("rate", 6, 2)] * wanted, "a failure is not repeated"
    assert msgspec.to_builtins(plan._expected.tokens_per_s) == {}
