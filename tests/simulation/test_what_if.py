"""A past run of the real scheduler is fitted, and predicts runs that differ from it in one setting."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.cli.price import simulated_bounds
from async_rl.cli.what_if import EXPRESSED, changed_config, remarks_on, remarks_on_config, what_if
from async_rl.config import Config
from async_rl.config.reference import resolved_yaml
from async_rl.errors import ConfigError
from async_rl.planning.engine_costs import fit_engine_costs
from async_rl.planning.past_run import (
    Intervals,
    PastRun,
    PastTrajectory,
    RecordedTasks,
    TurnCalls,
    read_past_run,
)
from async_rl.planning.planned_job import PlannedRun, Sharing, simulate_run
from async_rl.planning.run_fit import (
    FittedRun,
    fit_run,
    recorded_figures,
    simulate_past,
    simulated_figures,
    slow_engines,
)
from async_rl.planning.virtual_time import run_virtual
from async_rl.planning.workload import EndlessTasks, Workload, calibrate, num_engines
from tests.support.past_runs import (
    PUBLISH_S,
    REWARD_S,
    TOOL_S,
    TRAIN_S_PER_TOKEN,
    UPDATE_S,
    past_config,
    record_run,
)

pytestmark = pytest.mark.real

HOW = PlannedRun(versions=8, warmup=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, written in virtual time."""
    folder = tmp_path_factory.mktemp("runs") / "recorded"
    with pytest.MonkeyPatch.context() as patch:
        run_virtual(record_run(past_config(), folder, patch))
    return folder


@pytest.fixture(scope="module")
def fitted(folder: Path) -> FittedRun:
    return fit_run(read_past_run(folder), HOW)


def recorded(config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch) -> PastRun:
    run_virtual(record_run(config, folder, monkeypatch))
    return read_past_run(folder)


def test_times_of_a_run_are_read_as_they_were_when_it_has_ended(folder: Path, fitted: FittedRun) -> None:
    past, workload = fitted.past, fitted.workload
    assert workload.sync_s == pytest.approx(UPDATE_S, rel=0.01)
    assert workload.publish_s == pytest.approx(PUBLISH_S, rel=0.01)
    assert workload.train_tokens_per_s == pytest.approx(1 / TRAIN_S_PER_TOKEN, rel=0.01)
    assert fitted.sharing == Sharing()
    tools = [each.turns[1].wait_s for each in past.trajectories]
    assert TOOL_S / 2 <= min(tools) < max(tools) <= TOOL_S * 1.5 + 1e-6
    assert np.mean(tools) == pytest.approx(TOOL_S, rel=0.1)
    assert all(each.turns[-1].wait_s == pytest.approx(REWARD_S, abs=1e-6) for each in past.trajectories)
    assert all(40 <= each.turns[0].read < 60 and each.turns[1].read == 12 for each in past.trajectories)
    # The engine takes 40 ms for a token, and sends two at a time, whatever else it does.
    for call in past.calls:
        if call.num_calls == 1 and call.sampled % 2 == 0:
            decode_s = call.end_s - call.begin_s - call.first_token_s
            assert decode_s == pytest.approx((call.sampled - 2) * 0.04, abs=0.001)
    assert {call.engine_id for call in past.calls} == {"engine-0", "engine-1"}
    assert sum(call.num_calls > 1 for call in past.calls) > 10


def test_a_run_is_predicted_when_nothing_is_changed(fitted: FittedRun) -> None:
    before, now = fitted.recorded, fitted.simulated
    assert now.tokens_per_s == pytest.approx(before.tokens_per_s, rel=0.1)
    assert now.versions_per_s == pytest.approx(before.versions_per_s, rel=0.1)
    assert now.trainer_trains == pytest.approx(before.trainer_trains, abs=0.07)
    assert now.trainer_waits == pytest.approx(before.trainer_waits, abs=0.07)
    assert now.staleness_mean == pytest.approx(before.staleness_mean, abs=0.25)
    assert now.calls_running == pytest.approx(before.calls_running, rel=0.15)


@pytest.mark.parametrize(
    "change",
    [
        "rollout.max_staleness=0",
        "rollout.max_concurrent_trajectories=6",
        "engine.num_engines=1",
        "weights.interrupt=in_place",
        "trainer.groups_per_batch=2",
        "weights.every=2",
    ],
)
def test_another_run_is_predicted_when_one_setting_differs(
    change: str, folder: Path, fitted: FittedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = recorded_figures(recorded(past_config(change), tmp_path / "run", monkeypatch))
    config = changed_config(folder, fitted.past, [change])
    run = simulate_past(fitted.past, config, fitted.workload, fitted.sharing, HOW)
    predicted = simulated_figures(run, config, fitted.workload, HOW)
    assert predicted.tokens_per_s == pytest.approx(other.tokens_per_s, rel=0.15)
    assert predicted.versions_per_s == pytest.approx(other.versions_per_s, rel=0.15)
    assert predicted.staleness_max <= other.staleness_max
    assert predicted.interrupted == pytest.approx(other.interrupted, abs=0.2)


def test_both_runs_are_printed_when_a_setting_is_changed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert what_if(folder, ["rollout.max_staleness=0"], as_json=True) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["changed"]["staleness_max"] == 0 < tree["recorded"]["staleness_max"]
    ratio = tree["changed"]["tokens_per_s"] / tree["simulated"]["tokens_per_s"]
    assert tree["expected"]["tokens_per_s"] == pytest.approx(tree["recorded"]["tokens_per_s"] * ratio)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rollout.max_stalness=3", "max_stalness"),
        ("trainer.optimizer.lr=1e-3", "trainer.optimizer.lr is no setting that a simulation expresses"),
        ("engine.decode_step_s=1", "engine.decode_step_s is no setting that a simulation expresses"),
    ],
)
def test_a_change_is_refused_when_a_simulation_cannot_express_it(
    change: str, message: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        what_if(folder, [change])


def test_every_setting_is_known_when_it_is_said_to_be_expressed(folder: Path) -> None:
    tree = resolved_yaml(past_config())
    for key in EXPRESSED:
        assert f"  {key.split('.')[1]}:" in tree


def test_a_run_is_refused_when_its_record_does_not_suffice(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"no config.yaml"):
        read_past_run(tmp_path)
    with pytest.raises(ConfigError, match="has the records of 3 steps"):
        recorded(past_config("run.max_steps=3"), tmp_path / "short", monkeypatch)
    with pytest.raises(ConfigError, match=r"trajectories.sqlite does not exist"):
        recorded(past_config("run.keep_trajectories=0"), tmp_path / "bare", monkeypatch)
    with pytest.raises(ConfigError, match="keeps 0 trained trajectories with times"):
        recorded(past_config("run.keep_trajectories=4"), tmp_path / "few", monkeypatch)
    few = past_config("run.keep_trajectories=60", "trainer.groups_per_batch=8")
    with pytest.raises(ConfigError, match="keeps trajectories of 2 of its last 11 steps"):
        recorded(few, tmp_path / "newest", monkeypatch)


def test_groups_keep_their_siblings_when_they_are_given_out_again(fitted: FittedRun) -> None:
    past = fitted.past
    tasks = RecordedTasks(past.trajectories, fitted.workload, 1, 0, 4)
    by_group: dict[str, list[int]] = {}
    for each in past.trajectories:
        by_group.setdefault(each.group_id, []).append(each.sampled)
    known = sorted(sorted(lengths) for lengths in by_group.values())
    number = len(known)
    assert sorted(sorted(tasks.answers(index)) for index in range(number)) == known
    assert [tasks.answers(i) for i in range(number)] != [tasks.answers(number + i) for i in range(number)]
    more = RecordedTasks(past.trajectories, fitted.workload, 1, 0, 6).answers(0)
    assert len(more) == 6
    assert set(more) == set(tasks.answers(0))
    assert tasks.ks_distance(np.array([each.sampled for each in past.trajectories], np.int32)) == 0


def test_intervals_are_counted_when_they_overlap() -> None:
    both = Intervals([0.0, 2.0], [4.0, 6.0])
    assert both.mean_number(np.array([0.0, 1.0]), np.array([6.0, 3.0])) == pytest.approx([8 / 6, 1.5])
    assert both.joined().mean_number(np.array([0.0, 5.0]), np.array([6.0, 7.0])) == pytest.approx([1.0, 0.5])
    since, until = (np.array(each) + 1.7e9 for each in ([0.0, 1.0, 8.0], [4.0, 2.0, 9.0]))
    apart = Intervals(since, until, np.array([2.0, 1.0, 5.0]))
    begins = np.array([0.0, 4.0, 8.5]) + 1.7e9
    assert apart.mean_number(begins, begins + 4) == pytest.approx([9 / 4, 0.0, 2.5 / 4])
    assert apart.joined().mean_number(begins, begins + 4) == pytest.approx([1.0, 0.0, 0.5 / 4])


def test_costs_of_an_engine_are_found_when_its_work_varies(fitted: FittedRun) -> None:
    """Calls come, are prefilled, and decode 100 tokens together; training takes half of an engine's time."""
    step_s, token_s, call_s, prefill_s, lost = 0.010, 0.003, 0.02, 0.0001, 0.5
    calls, now = [], 1.7e9
    settled_s, records = {0: now}, [replace(fitted.past.records[0], step=0, step_s=0.0, sync_s=0.0)]
    for version in range(1, 61):
        begin, trains = now, version % 3 == 0
        together, prompt = 1 + version * 7 % 12, 10 + version * 5 % 40
        slower = 1 / (1 - lost) if trains else 1.0
        for _ in range(4):
            first_s = together * (call_s + prompt * prefill_s) * slower
            decode_s = 100 * (step_s + token_s * together) * slower
            call = TurnCalls("engine-0", now, first_s, now + first_s + decode_s, 100, prompt, 1)
            calls += [call] * together
            now = call.end_s + 0.5
        settled_s[version] = now
        records.append(replace(records[0], step=version, step_s=(now - begin) * trains))
    past = replace(
        fitted.past,
        calls=calls,
        settled_s=settled_s,
        records=records,
        trajectories=[PastTrajectory("group", [], [call]) for call in calls],
    )
    usual = Workload(decode_base_s=0.012, decode_per_call_s=0.002, prefill_call_s=0.01)
    found = fit_engine_costs(past, usual)
    assert found.lost == pytest.approx(lost, rel=0.1)
    assert found[:2] == pytest.approx((step_s, token_s), rel=0.1)
    assert found.call_s == pytest.approx(call_s, rel=0.4)  # a small part of the time
    # Where nothing varies, costs keep their usual proportion.
    began_s = [1.7e9 + 10 * version for version in range(60)]
    alike = [TurnCalls("engine-0", at, 0.5, at + 5, 100, 10, 1) for at in began_s for _ in range(4)]
    settled_s = {step: 1.7e9 + 10 * step for step in range(61)}
    records = [replace(each, step_s=0.0) for each in records]
    past = replace(past, calls=alike, settled_s=settled_s, records=records)
    found = fit_engine_costs(past, usual)
    assert found.token_s / found.step_s == pytest.approx(2 / 12, rel=0.3)


@pytest.mark.parametrize(
    ("first_token_s", "token_s", "said"),
    [
        (0.1, 0.01, []),
        (0.2, 0.01, ["engine-2 sends a first token 2.0 times as slowly as the others"]),
        (0.1, 0.015, ["engine-2 decodes a token 1.5 times as slowly as the others"]),
    ],
)
def test_an_engine_is_named_when_it_is_slower_than_the_others(
    first_token_s: float, token_s: float, said: list[str]
) -> None:
    calls = []
    for number in range(120):
        first, each = (first_token_s, token_s) if number % 3 == 2 else (0.1, 0.01)
        calls.append(TurnCalls(f"engine-{number % 3}", number, first, number + first + 100 * each, 100, 9, 1))
    assert [str(each) for each in slow_engines(calls)] == said
    assert not slow_engines(calls[:30])


def test_engines_and_trainer_slow_each_other_down_when_they_share_a_machine() -> None:
    config = past_config()
    workload = Workload(
        prompt_tokens=30, mean_tokens=100, max_tokens=100, sigma=0.0, decode_base_s=0.02,
        decode_per_call_s=0.0, train_tokens_per_s=1000.0, sync_s=0.1,
    )  # fmt: skip

    def simulated(sharing: Sharing) -> tuple[float, float]:
        run = simulate_run(config, workload, HOW, lambda scale: EndlessTasks(workload, scale, 0, 4), sharing)
        steps = run.records[HOW.warmup :]
        return run.usage.decode_s / run.usage.decoded_tokens, sum(each.step_s for each in steps) / len(steps)

    decode_s, step_s = simulated(Sharing())
    shared_decode_s, shared_step_s = simulated(Sharing(by_trainer=0.5, by_engine=0.2, of_trainer=1.0))
    assert 1.2 * decode_s < shared_decode_s < 1.7 * decode_s
    assert 1.5 * step_s < shared_step_s <= 2.001 * step_s


def test_the_copy_of_weights_is_not_guessed_when_the_run_made_none(fitted: FittedRun) -> None:
    overlap = replace(fitted.past.config, weights=replace(fitted.past.config.weights, overlap=True))
    assert any("weights.overlap" in each for each in remarks_on(fitted, overlap))
    assert not remarks_on(fitted, fitted.past.config)


def test_engines_are_those_that_had_calls_when_the_config_names_others(folder: Path, tmp_path: Path) -> None:
    """A resumed run has another config than its record, and external engines come and go."""
    other, urls = shutil.copytree(folder, tmp_path / "other"), tmp_path / "urls.txt"
    (other / "config.yaml").write_text(resolved_yaml(past_config("engine.num_engines=4")))
    past = read_past_run(other)
    assert num_engines(past.config) == 2
    (remark,) = remarks_on_config(other, past, [])
    assert "has calls of 2 engines, and config.yaml names 4" in remark
    assert num_engines(changed_config(other, past, ["rollout.max_staleness=1"])) == 2
    assert num_engines(changed_config(other, past, ["engine.num_engines=3"])) == 3
    urls.write_text("http://10.0.0.1:30000\nhttp://10.0.0.2:30000\n")
    (other / "config.yaml").write_text(resolved_yaml(past_config(f"engine.urls_file={urls}")))
    past = read_past_run(other)
    assert fit_run(past, HOW).simulated.tokens_per_s > 0
    assert remarks_on_config(other, past, []) == []


def test_running_calls_are_those_of_the_run_when_it_had_ended_and_went_on(fitted: FittedRun) -> None:
    past, hour = fitted.past, 3600.0
    middle = past.steady_steps[len(past.steady_steps) // 2]
    settled_s = {step: s + hour * (step > middle) for step, s in past.settled_s.items()}
    calls = [
        call._replace(begin_s=call.begin_s + hour, end_s=call.end_s + hour)
        if call.begin_s > past.settled_s[middle]
        else call
        for call in past.calls
    ]
    after = recorded_figures(replace(past, calls=calls, settled_s=settled_s))
    assert after.calls_running == pytest.approx(fitted.recorded.calls_running, rel=0.1)


def test_an_update_takes_as_long_when_versions_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = recorded(past_config("weights.every=2"), tmp_path / "run", monkeypatch)
    assert any(not each.sync_s for each in past.records)
    assert calibrate(past.config, past.records)["sync_s"] == pytest.approx(UPDATE_S, rel=0.01)


def test_calls_of_one_wave_are_aborted_in_its_pause_when_engines_take_weights_in_turn(
    fitted: FittedRun,
) -> None:
    config = fitted.past.config
    parts = {"publish": 0.2, "interrupt": 1.0, "load": 0.3}
    steps = [replace(each, sync_s=0.2 + 2 * 1.3, sync_parts=parts) for each in fitted.past.records]
    rolling = replace(config, weights=replace(config.weights, rolling=True))
    workload = fit_run(replace(fitted.past, config=rolling, records=steps), HOW).workload
    assert workload.sync_s == pytest.approx(0.3)
    assert workload.abort_call_s == pytest.approx(1.0 / fitted.recorded.calls_running)


def test_bounds_are_priced_by_the_record_when_it_suffices(folder: Path, fitted: FittedRun) -> None:
    plans, remarks = simulated_bounds(folder / "config.yaml", ["rollout.max_staleness=1"], folder)
    assert remarks == []
    assert plans[2].tokens_per_s == pytest.approx(fitted.recorded.tokens_per_s, rel=0.15)
    assert plans[0].tokens_per_s < plans[1].tokens_per_s < plans[2].tokens_per_s


def test_what_a_real_run_would_make_of_it_is_said(folder: Path, fitted: FittedRun, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    replayed = past_config(
        routing={"replay": "r3", "merge": "replace"},
        evaluation={"every": 5},
        data={"path": "none.jsonl", "validation": [{"path": "none.jsonl"}]},
    )
    (other / "config.yaml").write_text(resolved_yaml(replayed))
    evaluations, refused = remarks_on_config(other, fitted.past, ["weights.interrupt=in_place"])
    assert evaluations.startswith("Evaluations are left out")
    assert "routing.merge" in refused
    dropped = replace(fitted.past.records[-1], dropped_reasons={"straggler": 7})
    past = replace(fitted.past, records=[*fitted.past.records[:-1], dropped])
    (remark,) = remarks_on(replace(fitted, past=past), past.config)
    assert "7 straggler" in remark
