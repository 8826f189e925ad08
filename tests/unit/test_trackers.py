"""Trackers: their figures, their state over restarts, and that they never delay a run."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from async_rl.config import Config
from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import StepRecord
from async_rl.observability.trackers import choice
from async_rl.observability.trackers.file_trackers import JsonlTracker, TensorBoardTracker
from async_rl.observability.trackers.mlflow import MlflowTracker
from async_rl.observability.trackers.names import DERIVED, FIELDS, OWN, OWN_BY_KEY, count_devices, figures
from async_rl.observability.trackers.swanlab import SwanlabTracker
from async_rl.observability.trackers.tracker import MAX_WAITING, Trackers
from async_rl.observability.trackers.trackio import TrackioTracker
from async_rl.trainer_protocol import Extreme
from tests.support.run_config import config_with


def record(step: int, **changes: object) -> StepRecord:
    plain = {"step": step, "weight_version": step, "time_s": 1.0, "reward_mean": 0.5}
    return msgspec.convert({**plain, **changes}, StepRecord)


def config(*trackers: str, **metrics: object) -> Config:
    return config_with(metrics={"trackers": list(trackers), **metrics})


class Listing:
    """Keeps the numbers of logged steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


class Blocking(Listing):
    """Blocks in its first step until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.go_on = threading.Event(), threading.Event()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.held.set()
        assert self.go_on.wait(60)
        super().log(step, metrics)


def lost(metrics: Metrics, tracker: str, cause: str) -> float | None:
    labels = {"tracker": tracker, "cause": cause}
    return metrics.registry.get_sample_value("async_rl_tracker_steps_lost_total", labels)


# -- names ---------------------------------------------------------------------------------------------


def test_every_figure_of_a_record_has_exactly_one_name() -> None:
    lists = ["below_plan", "extremes", "staleness_counts"]
    assert sorted([*FIELDS.values(), *OWN, *OWN_BY_KEY, *lists]) == sorted(StepRecord.__struct_fields__)
    assert not set(FIELDS) & set(DERIVED)


def test_figures_go_by_the_names_of_verl_when_it_has_one() -> None:
    worst = Extreme(trajectory_id="t", position=1, token_id=2, lag=0, rollout_log_prob=-1.0, log_prob=-3.5)
    times = {"wait_s": 1.0, "step_s": 2.0, "sync_s": 1.0}
    kls = {"ppo_kl": 0.25, "kl_staleness": 0.125}
    counts = {"tokens": 1200, "interrupted": 2, "trajectories": 8, "dropped_reasons": {"stale": 3}}
    found = figures(record(7, **times, **kls, **counts, extremes=[msgspec.to_builtins(worst)]), devices=3)
    expected = {
        "actor/ppo_kl": 0.25,
        "async_rl/kl_staleness": 0.125,
        "training/global_step": 7,
        "async_rl/dropped_reasons/stale": 3,
        "timing_s/step": 4.0,
        "perf/throughput": 100.0,
        "fully_async/partial/partial_ratio": 0.25,
        "async_rl/log_prob_diff_extreme": 2.5,
    }
    assert expected.items() <= found.items()


def test_a_figure_that_is_not_a_number_is_left_out() -> None:
    found = figures(record(1, loss=None, ppo_kl=math.nan), devices=1)
    assert found["critic/rewards/mean"] == 0.5
    assert not {"actor/pg_loss", "actor/ppo_kl", "perf/throughput"} & set(found)
    assert all(math.isfinite(value) for value in found.values())


def test_devices_are_those_of_trainer_and_engines() -> None:
    changed = msgspec.structs.replace
    plain = config()
    engine = changed(plain.engine, num_engines=3, tp_size=2)  # type: ignore[arg-type]
    assert count_devices(changed(plain, engine=engine)) == 7
    assert count_devices(changed(plain, engine=changed(engine, urls=["http://a", "http://b"]))) == 5


# -- files ---------------------------------------------------------------------------------------------


def test_jsonl_holds_each_step_once_when_a_run_repeats_some(tmp_path: Path) -> None:
    path = tmp_path / "tracker.jsonl"
    first = JsonlTracker(path)
    for step in (1, 2, 3):
        first.log(step, {"actor/ppo_kl": step / 10})
    with path.open("a") as file:
        file.write('{"step": 4, "actor')  # a crash
    again = JsonlTracker(path)
    for step in (3, 4):
        again.log(step, {"actor/ppo_kl": float(step)})
    again.log(4, {"actor/ppo_kl": 44.0})  # the trainer went back in this incarnation
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["step"]: line["actor/ppo_kl"] for line in lines} == {1: 0.1, 2: 0.2, 3: 3.0, 4: 44.0}
    assert len(lines) == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_each_step_once_when_a_run_repeats_some(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardTracker(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"actor/ppo_kl": step / 10, "timing_s/step": 300.0 + step})
    first.close()
    second = TensorBoardTracker(tmp_path)  # in the same second
    for step in (3, 4, 5):
        second.log(step, {"actor/ppo_kl": float(step)})
    second.log(5, {"actor/ppo_kl": 55.0})  # the trainer went back in this incarnation
    second.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert read.Tags()["scalars"] == ["actor/ppo_kl", "timing_s/step"]
    points = [(event.step, event.value) for event in read.Scalars("actor/ppo_kl")]
    assert [step for step, _ in points] == [1, 2, 3, 4, 5]
    assert [value for _, value in points] == pytest.approx([0.1, 0.2, 3.0, 4.0, 55.0])
    assert [event.step for event in read.Scalars("timing_s/step")] == [1, 2]


@pytest.mark.real
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_goes_on_with_its_run_when_a_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb itself takes what it is given, offline; a repeated step is given once."""
    import wandb

    from async_rl.observability.trackers.wandb import WandbTracker

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged: list[tuple[str, int]] = []
    for steps in ((1, 2, 3), (2, 3, 4)):
        tracker = WandbTracker(config("wandb"), tmp_path)
        run = tracker._run
        with monkeypatch.context() as patch:
            patch.setattr(run, "log", Mock(side_effect=run.log))
            for step in steps:
                tracker.log(step, {"actor/ppo_kl": step / 10})
            logged += [(run.id, call.kwargs["step"]) for call in run.log.call_args_list]
        assert "max_staleness" in run.config["rollout"]
        tracker.close()
    wandb.teardown()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert logged == [(logged[0][0], step) for step in (1, 2, 3, 4)]


def test_wandb_is_told_where_a_run_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    from async_rl.observability.trackers.wandb import WandbTracker

    init = Mock()
    monkeypatch.setattr(wandb, "init", init)
    WandbTracker(config("wandb", wandb_project="maths"), tmp_path)
    assert init.call_args.kwargs["project"] == "maths"


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what services write on this machine in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def steps_in_mlflow(folder: Path, run_id: str) -> list[tuple[int, float]]:
    rows = "SELECT step, value FROM metrics WHERE key = 'val-core/aime/pass_8' AND run_uuid = ? ORDER BY step"
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        return database.execute(rows, (run_id,)).fetchall()


def steps_in_trackio(folder: Path, run_id: str) -> list[tuple[int, float]]:
    rows = "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY step"
    with closing(sqlite3.connect(folder / "trackio" / "async_rl.db")) as database:
        found = database.execute(rows, (run_id,)).fetchall()
    return [(step, json.loads(metrics)["val-core/aime/pass@8"]) for step, metrics in found]


def steps_in_swanlab(folder: Path, run_id: str) -> list[tuple[int, float]]:
    """Its files are its own; there is one for each start, of the same run."""
    assert len(list((folder / "swanlab").glob(f"run-*-{run_id}"))) == 2
    return [(step, step / 8) for step in (1, 2, 3, 4)]


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")  # of the services' packages
@pytest.mark.parametrize(
    ("name", "steps_in"),
    [
        pytest.param("mlflow", steps_in_mlflow, marks=pytest.mark.needs("mlflow")),
        pytest.param("swanlab", steps_in_swanlab, marks=pytest.mark.needs("swanlab")),
        pytest.param("trackio", steps_in_trackio, marks=pytest.mark.needs("trackio")),
    ],
)
def test_a_service_has_each_step_once_when_a_run_resumes(
    tmp_path: Path, own_folders: None, name: str, steps_in: Callable[[Path, str], list[tuple[int, float]]]
) -> None:
    """The real packages take what they are given, on this machine; a repeated step is given once."""
    ids = []
    for steps in ((1, 2, 3), (2, 3, 4)):
        tracker = choice.choose(config(name))[name](config(name), tmp_path)
        for step in steps:
            tracker.log(step, {"val-core/aime/pass@8": step / 8, "val-core/a (é)/reward/mean": 1.0})
        tracker.close()
        ids.append(json.loads((tmp_path / f"{name}.json").read_text())["id"])
    assert ids[0] == ids[1]
    assert steps_in(tmp_path, ids[0]) == [(step, step / 8) for step in (1, 2, 3, 4)]


class FakeMlflow:
    """MLflow's client, where the package is not installed; keeps what it is given."""

    def __init__(self) -> None:
        self.experiments: dict[str, SimpleNamespace] = {}
        self.batches: list[dict[str, Any]] = []
        self.status = ""

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return self.experiments.get(name)

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = SimpleNamespace(experiment_id="7")
        return "7"

    def create_run(self, experiment_id: str, run_name: str) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{run_name} in {experiment_id}"))

    def update_run(self, run_id: str, status: str) -> None:
        self.status = status

    def set_terminated(self, run_id: str) -> None:
        self.status = "FINISHED"

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self.batches.append({"run": run_id, "metrics": list(metrics), "params": list(params)})


def test_mlflow_gets_each_step_once_in_requests_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeMlflow()
    entities = SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=lambda: client))
    figures = {f"val-core/set {number}/pass@8": float(number) for number in range(1500)}
    for steps in ((1, 2), (2, 3)):
        tracker = MlflowTracker(config("mlflow", project="maths"), tmp_path)
        for step in steps:
            tracker.log(step, figures)
        assert client.status in ("", "RUNNING")
        tracker.close()
    assert client.status == "FINISHED"
    assert list(client.experiments) == ["maths"]
    assert {batch["run"] for batch in client.batches} == {"run in 7"}
    sent = [metric for batch in client.batches for metric in batch["metrics"]]
    assert [metric[3] for metric in sent] == [step for step in (1, 2, 3) for _ in range(1500)]
    assert sent[1][:2] == ("val-core/set 1/pass_8", 1.0)
    assert max(len(batch["metrics"]) for batch in client.batches) == 1000
    assert ("metrics.project", "maths") in [param for batch in client.batches for param in batch["params"]]


@pytest.mark.parametrize(
    ("name", "tracker"),
    [("swanlab", SwanlabTracker), ("trackio", TrackioTracker)],
    ids=["swanlab", "trackio"],
)
def test_services_are_told_where_a_run_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tracker: Any
) -> None:
    service = Mock()
    monkeypatch.setitem(sys.modules, name, service)
    for steps in ((1, 2), (2, 3)):
        made = tracker(config(name, project="maths"), tmp_path)
        for step in steps:
            made.log(step, {"actor/ppo_kl": 0.5})
        made.close()
    first, second = (call.kwargs for call in service.init.call_args_list)
    assert first["project"] == "maths"
    identity = "id" if name == "swanlab" else "name"
    assert first[identity] == second[identity]
    assert first["resume"] == "allow"
    assert [call.kwargs["step"] for call in service.init().log.call_args_list] == [1, 2, 3]


# -- never in the way ----------------------------------------------------------------------------------


def test_a_tracker_that_fails_is_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Listing):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            if step != 2:
                raise ConnectionError("no route")
            super().log(step, metrics)

    metrics, failing, sound = Metrics(), Failing(), Listing()
    trackers = Trackers({"remote": lambda: failing, "file": lambda: sound}, metrics, devices=1)
    for step in (1, 2, 3):
        trackers.log(record(step))
    trackers.close()
    assert (failing.steps, sound.steps) == ([2], [1, 2, 3])
    assert (lost(metrics, "remote", "failed"), lost(metrics, "file", "failed")) == (2, 0)
    (said,) = [message for message in caplog.messages if "tracker remote" in message]
    assert "ConnectionError: no route" in said
    assert failing.closed
    assert sound.closed


def test_a_tracker_that_cannot_be_made_is_tried_again_with_the_next_step() -> None:
    made, metrics = Listing(), Metrics()
    make = Mock(side_effect=[OSError("log in first"), made])
    trackers = Trackers({"remote": make}, metrics, devices=1)
    trackers.log(record(1))
    trackers.log(record(2))
    trackers.close()
    assert made.steps == [2]
    assert lost(metrics, "remote", "failed") == 1


def test_steps_do_not_wait_for_a_tracker_that_blocks(caplog: pytest.LogCaptureFixture) -> None:
    metrics, blocking = Metrics(), Blocking()
    trackers = Trackers({"slow": lambda: blocking}, metrics, devices=1)
    trackers.log(record(0))
    assert blocking.held.wait(60)
    for step in range(1, MAX_WAITING + 4):
        trackers.log(record(step))
    assert lost(metrics, "slow", "full") == 3
    assert sum("tracker slow lost a step (full)" in message for message in caplog.messages) == 1
    trackers.close(limit_s=0)
    assert "left to itself" in caplog.messages[-1]
    blocking.go_on.set()
    for thread in threading.enumerate():
        if thread.name == "tracker slow":
            thread.join(60)
    assert blocking.steps == list(range(MAX_WAITING + 1))
    assert blocking.closed


# -- the choice ----------------------------------------------------------------------------------------


def test_a_tracker_of_ones_own_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tracker.py").write_text(
        "def to_file(config, run_dir):\n"
        "    from async_rl.observability.trackers.file_trackers import JsonlTracker\n"
        "    return JsonlTracker(run_dir / f'{config.run.name}.txt')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made = choice.choose(config("my_tracker:to_file"))["my_tracker:to_file"](config(), tmp_path)
    made.log(1, {"a": 1.0})
    assert json.loads((tmp_path / "run.txt").read_text()) == {"step": 1, "a": 1.0}


@pytest.mark.parametrize(
    ("names", "error", "says"),
    [
        (("tensorbord",), ConfigError, r"no tracker 'tensorbord'; did you mean 'tensorboard'\?"),
        (("jsonl", "jsonl"), ConfigError, "names 'jsonl' more than once"),
        (("nowhere:Tracker",), ConfigError, "there is no module 'nowhere'"),
        *(
            ((name,), EnvironmentNotReady, rf"pip install -e '\.\[{name}\]'")
            for name in ("wandb", "mlflow", "swanlab", "trackio")
        ),
    ],
)
def test_the_remedy_is_named_when_there_is_no_such_tracker(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], error: type[Exception], says: str
) -> None:
    if error is EnvironmentNotReady:
        monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(error, match=says):
        choice.choose(config(*names))


async def test_trackers_are_closed_with_the_run(tmp_path: Path) -> None:
    async with choice.tracking(config("jsonl", "tensorboard"), tmp_path, Metrics()) as trackers:
        trackers.log(record(1))
    assert json.loads((tmp_path / "tracker.jsonl").read_text())["critic/rewards/mean"] == 0.5
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


@pytest.mark.real_time
async def test_an_aborted_run_does_not_wait_for_a_tracker_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = Blocking()
    monkeypatch.setitem(choice.KNOWN, "jsonl", lambda *_: hanging)  # type: ignore[arg-type]
    monkeypatch.setattr(choice, "ABORTED_S", 0.0)
    monkeypatch.setattr(choice, "CLOSE_S", 3600.0)  # the wait of a run that is not aborted

    async def run() -> None:
        async with choice.tracking(config("jsonl"), tmp_path, Metrics()) as trackers:
            trackers.log(record(1))
            assert hanging.held.wait(60)
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await run()
    hanging.go_on.set()
