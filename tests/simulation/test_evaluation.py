"""Evaluations beside training in virtual time: syncs fall into them, engines die in them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agent_loops.base import AgentLoop
from async_rl.config import Config
from async_rl.data.dataset import Dataset
from async_rl.engines.pool import EngineState
from async_rl.engines.simulated import SimulatedEngine
from async_rl.errors import EngineError, TrainerError
from async_rl.evaluation import evaluator, service
from async_rl.observability.evaluation_record import (
    Estimate,
    EvaluationRecord,
    best_evaluation,
    evaluation_record_log,
)
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import Summary, step_record_log
from async_rl.rollout.session.api import Session
from async_rl.run.inputs import RunInputs
from async_rl.run.orchestrator import Orchestrator
from async_rl.runtime.waits import acting
from async_rl.store.archive import FILE, ArchiveReader
from async_rl.trainer_protocol import BestCheckpoint, read_best
from async_rl.types import Completion, Task, Trajectory
from tests.support.local_cluster import LocalCluster
from tests.support.ray_runs import make_run_folder
from tests.support.run_config import MOE, config_with
from trainer.checkpoints import folder
from verification.simulation.breakable_engine import Fault
from verification.simulation.scenario import FACTS
from verification.simulation.users import SimulatedChat

WHERE = {"workers": 0}


@pytest.fixture(autouse=True, params=[0, pytest.param(2, marks=pytest.mark.long)], ids=["driver", "workers"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is one of sessions in the driver; the long lane also has them in two rollout workers."""
    monkeypatch.setitem(WHERE, "workers", request.param)


class OneTurn(AgentLoop):
    """An answer."""

    async def run(self, task: Task, session: Session) -> None:
        session.start(task.messages)
        await session.generate()


class SlowTurn(AgentLoop):
    """An answer after two minutes."""

    async def run(self, task: Task, session: Session) -> None:
        session.start(task.messages)
        await session.generate()
        await asyncio.sleep(120)


def odd(task: Task, completion: Completion) -> dict[str, float]:
    last = int(completion.text.split()[-1])
    return {"reward": float(last % 2), "length": float(len(completion.text.split()))}


def many(task: Task, completions: list[Completion]) -> list[float]:
    return [float(len(completions))] * len(completions)


def task(name: str, source: str = "") -> Task:
    return Task(task_id=name, messages=[{"role": "user", "content": "7 8 9"}], data_source=source)


EASY = [task(f"e{i}", source=("algebra", "sets")[i % 2]) for i in range(4)]
VALIDATION = [
    Dataset(name="easy", path="easy.jsonl", schema="plain", detected=False, tasks=EASY),
    Dataset(name="hard", path="hard.jsonl", schema="plain", detected=False, tasks=[task("h0")]),
]
NUM_ANSWERS = 5 * 4
SHARED = "placement.shared=true"


def make_config(folder: Path, *overrides: str, num_engines: int = 2, **evaluation: Any) -> Config:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(MOE))
    tree: dict[str, Any] = {
        "run": {"name": "run", "dir": str(folder), "max_steps": 6, "drain_s": 5},
        "model": {"path": str(folder / "model")},
        "data": {"path": "tasks.jsonl", "validation": [{"path": "easy.jsonl"}]},
        "engine": {
            "kind": "simulated",
            "num_engines": num_engines,
            "decode_step_s": 0.05,
            "mean_new_tokens": 12,
            "stall_s": 5.0,
        },
        "rollout": {
            "agent_loop": f"{__name__}:OneTurn",
            "reward": f"{__name__}:odd",
            "group_size": 2,
            "max_concurrent_trajectories": 8,
            "max_staleness": 2,
            "max_context_tokens": 160,
            "max_new_tokens": 40,
            "num_workers": WHERE["workers"],
            "worker_stall_s": 4.0,
        },
        "routing": {"replay": "off"},
        "trainer": {"groups_per_batch": 2, "checkpoint_every": 2},
        "evaluation": {"every": 2, "samples": 4, **evaluation},
    }
    return config_with(*overrides, **tree)


class World:
    """A run in virtual time, looked into."""

    def __init__(self, config: Config, *, step_s: float = 0.3) -> None:
        self.config = config
        self.cluster = LocalCluster(config, step_s=step_s)
        self.run_dir = Path(config.run.dir) / "run"
        self.heard: list[tuple[str, bool]] = []
        self.orchestrator: Orchestrator
        self.stop = asyncio.Event()
        for engine in self.cluster.engines:
            self._listen(engine)

    def _listen(self, engine: SimulatedEngine) -> None:
        """Note for each call whether it came to an engine that evaluates."""
        generate = engine.generate

        def listening(request):
            pool = self.orchestrator.pool
            standing = pool.snapshot_of(engine.engine_id)
            evaluates = standing is not None and standing.state is EngineState.EVALUATING
            self.heard.append((engine.engine_id, evaluates))
            if evaluates:
                self._evaluating_call(engine)
            return generate(request)

        engine.generate = listening  # type: ignore[method-assign]

    def lent_engines(self) -> int:
        """Engines that are lent to an evaluation and not reserved for it."""
        reserved = self.config.evaluation.engines
        evaluating = len(self.orchestrator.pool.engines(EngineState.EVALUATING))
        return max(0, evaluating - (reserved if isinstance(reserved, int) else 0))

    async def run(self, called: Callable[[SimulatedEngine], object] = lambda engine: None) -> Summary:
        """Run; `called` gets the engine of each call that is made for an evaluation."""
        self._evaluating_call = called
        loop = asyncio.get_running_loop()
        make_run_folder(self.config)
        ids = itertools.count()
        tasks = [task(f"t{i}") for i in range(50)]
        inputs = RunInputs(tasks, SimulatedChat(), FACTS, lambda: f"{next(ids):032x}", VALIDATION)
        self.orchestrator = Orchestrator(
            self.config, self.run_dir, self.stop, self.cluster, Metrics(), loop.time, inputs
        )
        with acting("run", waits=self.orchestrator.waits):
            return await self.orchestrator.run()

    @property
    def records(self) -> list[EvaluationRecord]:
        return evaluation_record_log(self.run_dir / "evaluations.jsonl").read()

    def answers(self, version: int) -> list[Trajectory]:
        reader = ArchiveReader(self.run_dir / "evaluations" / f"version_{version:08d}" / FILE)
        try:
            return [reader.read_trajectory(row.trajectory_id)[0].trajectory for row in reader.find_rows()]
        finally:
            reader.close()


def check(world: World, summary: Summary) -> None:
    """What holds whatever happened: two conservations, and every answer that was scored is of one version."""
    assert summary.trajectories.unaccounted == 0
    assert summary.staleness_max <= summary.max_staleness
    assert [r.step for r in step_record_log(world.run_dir / "metrics.jsonl").read()] == list(range(1, 7))
    assert summary.trajectories.trained == 6 * 4
    for record in world.records:
        assert record.unaccounted == 0
        if record.status == "done":
            assert record.asked == NUM_ANSWERS
    assert not world.lent_engines()


async def test_a_run_ends_when_it_is_stopped_during_its_last_evaluation(tmp_path):
    world = World(make_config(tmp_path))

    def called(engine: SimulatedEngine) -> None:
        if world.orchestrator.pool.version_of(engine.engine_id) == 6:
            world.stop.set()

    check(world, await world.run(called))
    first, second = (record.weight_version for record in world.records)
    assert first == 2
    assert second in (4, 5), "engines may have been updated before they were lent"


async def test_the_answers_of_the_newest_evaluations_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "KEPT_ANSWERS", 1)
    world = World(make_config(tmp_path))
    check(world, await world.run())
    assert [folder.name for folder in (world.run_dir / "evaluations").iterdir()] == ["version_00000006"]


async def test_no_more_answers_are_written_at_a_time_than_the_config_allows(tmp_path):
    durations = []
    for number in (64, 1):
        (tmp_path / str(number)).mkdir()
        world = World(make_config(tmp_path / str(number), max_concurrent=number))
        check(world, await world.run())
        durations.append(world.records[0].duration_s)
    assert durations[1] > 3 * durations[0]


async def test_an_answer_passes_from_the_reward_of_the_config_on(tmp_path):
    world = World(make_config(tmp_path, pass_reward=0.0))
    check(world, await world.run())
    scores = [score for record in world.records for score in record.scores.values()]
    assert min(score.reward.value for score in scores) < 1
    assert {estimate.value for score in scores for estimate in score.pass_at.values()} == {1.0}


@pytest.mark.parametrize(
    ("where", "rolling"), [(0, False), (2, True)], indirect=["where"], ids=["driver", "workers-rolling"]
)
async def test_versions_stay_pinned_when_updates_fall_into_their_evaluation(tmp_path, rolling):
    """An evaluation takes five steps' time, so that the weights move on in the middle of it."""
    config = make_config(tmp_path, f"weights.rolling={rolling}", at_start=True, max_concurrent=2)
    world = World(config, step_s=0.05)
    moved: list[int] = []

    def called(engine: SimulatedEngine) -> None:
        pool = world.orchestrator.pool
        others = (pool.version_of(e.engine_id) for e in pool.engines() if e is not engine)
        moved.append(max(others) - pool.version_of(engine.engine_id))

    check(world, await world.run(called))
    assert max(moved) > 0, "no update fell into an evaluation"
    records = world.records
    assert [r.status for r in records] == ["done"] * len(records)
    versions = [r.weight_version for r in records]
    assert versions[0] == 0
    assert versions == sorted(set(versions))
    assert versions[-1] == 6, "the last version is evaluated before the run ends"
    for record in records:
        assert record.dropped == {}
        answers = world.answers(record.weight_version)
        assert len(answers) == NUM_ANSWERS
        seen = {s.weight_version for answer in answers for s in answer.sampled}
        assert seen == {record.weight_version}
        assert set(record.scores) == {"all", "easy", "easy/algebra", "easy/sets", "hard"}
        assert record.scores["all"].parts["length"] == pytest.approx(record.scores["all"].tokens_mean)


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_the_trainers_turn_waits_for_an_evaluation_when_devices_are_shared(tmp_path, num_engines):
    config = make_config(tmp_path, SHARED, num_engines=num_engines, at_start=True, max_concurrent=1)
    world, phases = World(config), list[str]()
    step = world.cluster.trainer.train_step

    async def watched(path: str, number: int):
        pool = world.orchestrator.pool
        assert not pool.engines(EngineState.EVALUATING, EngineState.SERVING)
        return await step(path, number)

    def called(engine: SimulatedEngine) -> None:
        phases.append(world.orchestrator.devices.phases.phase)

    world.cluster.trainer.train_step = watched  # type: ignore[method-assign]
    check(world, await world.run(called))
    versions = [record.weight_version for record in world.records]
    assert {record.status for record in world.records} == {"done"}
    assert versions == sorted({0, 6, *versions})
    assert len(versions) > 2
    assert set(phases) <= {"engines", "to trainer"}
    if num_engines > 1:  # a batch was ready before the answers were
        assert "to trainer" in phases
    for record in world.records:
        answers = world.answers(record.weight_version)
        assert {s.weight_version for answer in answers for s in answer.sampled} == {record.weight_version}


async def test_an_evaluation_does_not_wait_for_a_repair_that_waits_for_the_trainer(tmp_path):
    """Its only engine fails while it ends its calls, and by then the trainer waits for the devices."""
    world = World(make_config(tmp_path, SHARED, num_engines=1, at_start=True))
    (engine,) = world.cluster.engines
    interrupt, asked = engine.interrupt, list[str]()

    async def fail_once(mode: Any) -> None:
        standing = world.orchestrator.pool.snapshot_of(engine.engine_id)
        if not asked and standing is not None and standing.state is EngineState.EVALUATING:
            asked.append(world.orchestrator.devices.phases.phase)
            world.orchestrator.devices.phases.enter_phase("to trainer")
            asyncio.get_running_loop().call_later(1.0, world.stop.set)
            raise EngineError("it does not end its calls")
        await interrupt(mode)

    engine.interrupt = fail_once  # type: ignore[method-assign]
    await world.run()
    assert asked == ["engines"]
    assert [(r.weight_version, r.status) for r in world.records] == [(0, "missing")]
    assert "any more, and the trainer waits for the devices" in world.records[0].reason


async def test_a_stop_does_not_wait_for_an_evaluation_when_devices_are_shared(tmp_path):
    """The engine that answered is given back first, and the checkpoint is written in the trainer's phase."""
    world = World(make_config(tmp_path, SHARED, max_concurrent=1, timeout_s=1e6))

    def called(engine: SimulatedEngine) -> None:
        engine.faults.append(Fault("hang", after_tokens=1))
        asyncio.get_running_loop().call_later(0.2, world.stop.set)

    summary = await world.run(called)
    assert summary.trajectories.unaccounted == 0
    assert world.records == []
    assert step_record_log(world.run_dir / "metrics.jsonl").read()[-1].step < 6
    assert not world.cluster.trainer.away


async def test_engines_that_are_kept_for_evaluation_answer_nothing_else(tmp_path):
    world = World(make_config(tmp_path, num_engines=3, engines=1, samples=4))
    check(world, await world.run())
    by_engine = {
        name: {evaluates for who, evaluates in world.heard if who == name} for name, _ in world.heard
    }
    assert by_engine == {"engine-0": {False}, "engine-1": {False}, "engine-2": {True}}
    assert [r.engines for r in world.records] == [("engine-2",)] * len(world.records)
    assert [r.weight_version for r in world.records][-1] == 6


async def test_an_answer_with_a_token_of_another_version_is_sampled_again(tmp_path):
    """The engine loads other weights by itself, as somebody from outside could make it do."""
    world = World(make_config(tmp_path, max_concurrent=1))
    answered = itertools.count()

    def called(engine: SimulatedEngine) -> None:
        if next(answered) == 3:
            loop = asyncio.get_running_loop()
            loop.call_later(0.1, setattr, engine, "_version", 99)
            loop.call_later(0.3, setattr, engine, "_version", 2)

    check(world, await world.run(called))
    first = world.records[0]
    assert (first.weight_version, first.status) == (2, "done")
    assert first.dropped == {}
    assert first.scores["all"].answers == NUM_ANSWERS
    assert next(answered) > NUM_ANSWERS * len(world.records)


@pytest.mark.parametrize(("engines", "dies"), [("shared", True), (1, True), ("shared", False)])
async def test_an_evaluation_is_missing_and_the_next_one_is_not_when_its_engine_is_lost(
    tmp_path, engines, dies
):
    """It dies, or the run's doctor or watched process quarantines it."""
    world = World(make_config(tmp_path, num_engines=3, engines=engines))
    died: list[str] = []

    def called(engine: SimulatedEngine) -> None:
        if not died:
            died.append(engine.engine_id)
            if dies:
                engine.faults.append(Fault("die", after_tokens=0))
            else:
                pool, error = world.orchestrator.pool, EngineError("its process ended")
                asyncio.get_running_loop().call_later(0.05, pool.quarantine_engine, engine.engine_id, error)

    check(world, await world.run(called))
    first, *others = world.records
    assert (first.weight_version, first.status, first.scores) == (2, "missing", {})
    assert died[0] in first.reason or "no engine" in first.reason
    assert world.cluster.restarts == died
    assert [r.status for r in others] == ["done"] * len(others)
    assert others[-1].weight_version == 6


async def test_an_evaluation_is_missing_when_it_takes_too_long_and_training_goes_on(tmp_path):
    world = World(make_config(tmp_path, timeout_s=1.0, max_concurrent=1))
    check(world, await world.run())
    assert {r.status for r in world.records} == {"missing"}
    assert "evaluation.timeout_s = 1.0" in world.records[0].reason


@pytest.mark.parametrize(("num_engines", "engines"), [(1, "shared"), (2, 1)])
async def test_a_slow_evaluation_is_no_stall(tmp_path, num_engines, engines):
    """Rollouts wait for it where it has the only engine, and so does the end of the run."""
    loop, action = f"{__name__}:SlowTurn", "doctor.action=end"
    config = make_config(tmp_path, action, num_engines=num_engines, engines=engines, agent_loop=loop)
    world = World(config)
    check(world, await world.run())
    assert {r.status for r in world.records} == {"done"}
    assert world.records[-1].duration_s > 2 * config.doctor.stall_s


async def test_answers_are_scored_together_when_the_reward_is_a_groups(tmp_path):
    reward = f"rollout.reward={__name__}:many"
    world = World(make_config(tmp_path, reward, every=0, at_start=True, max_concurrent=2))
    written: list[Path] = []

    def called(engine: SimulatedEngine) -> None:
        written.extend(completions.glob("*/*"))

    completions = world.run_dir / "evaluations" / "completions"
    completions.mkdir(parents=True)
    (completions / "of_one_that_was_killed").write_bytes(b"")
    check(world, await world.run(called))
    assert [r.scores["all"].reward.value for r in world.records] == [4.0]
    assert written, "answers wait for the others of their task in files"
    assert not completions.exists()


async def test_it_is_evaluated_again_when_the_trainer_fails_in_the_middle(tmp_path):
    """The trainer goes back to its checkpoint, and what was lent out comes back with all the others."""
    world = World(make_config(tmp_path, max_concurrent=1))
    step, failed = world.cluster.trainer.train_step, list[int]()

    async def fail_once(path: str, number: int):
        if number == 4 and not failed:
            assert world.orchestrator.pool.engines(EngineState.EVALUATING), "nothing is evaluated now"
            failed.append(number)
            raise TrainerError("the trainer broke")
        return await step(path, number)

    world.cluster.trainer.train_step = fail_once  # type: ignore[method-assign]
    summary = await world.run()
    assert failed
    assert summary.trajectories.unaccounted == 0
    assert [r.status for r in world.records] == ["done"] * len(world.records)
    assert world.records[0].weight_version in (2, 3)
    assert world.records[-1].weight_version == 6
    assert not world.lent_engines()


class KeepingTrainer:
    """Writes folders of checkpoints, and removes old ones, in the place of a cluster's trainer."""

    def __init__(self, world: World) -> None:
        self._trainer = world.cluster.trainer
        world.cluster.trainer.save_checkpoint = self.save  # type: ignore[method-assign]

    async def save(self, directory: str, extra: dict[str, Any]) -> None:
        folder.final_path(Path(directory), self._trainer.step).mkdir(parents=True)
        best = read_best(Path(directory))
        kept = set() if best is None else best.kept
        folder.remove_old_checkpoints(Path(directory), self._trainer.step, 1, None, kept)


def scored(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """Give the evaluations these rewards, in their order; the last value to all further ones."""
    real, left = evaluator.scores, list(values)

    def scores(*arguments: Any, **options: Any) -> Any:
        value = left.pop(0) if len(left) > 1 else left[0]
        found = real(*arguments, **options)
        return found | {"all": replace(found["all"], reward=Estimate(value=value))}

    monkeypatch.setattr(evaluator, "scores", scores)


@pytest.mark.parametrize("overrides", [(), (SHARED,)], ids=["plain", "shared"])
@pytest.mark.parametrize("values", [(0.9, 0.2, 0.1), (0.1, 0.2, 0.9)], ids=["first", "last"])
async def test_the_checkpoint_with_the_best_evaluation_is_kept(tmp_path, monkeypatch, overrides, values):
    """Evaluated versions get a checkpoint, and of the older ones only the best stays."""
    keep = ("trainer.keep_best=all/reward", "trainer.checkpoint_every=0", "trainer.keep_checkpoints=1")
    world = World(make_config(tmp_path, *keep, *overrides))
    KeepingTrainer(world)
    scored(monkeypatch, *values)
    check(world, await world.run())
    directory = world.run_dir / "checkpoints"
    there = {int(path.name.removeprefix("step_")) for path in directory.glob("step_*")}
    best, value = best_evaluation(world.records, "all/reward")
    assert value == 0.9
    # Those that were the best, or were being evaluated, when the last one was written stay until another is.
    assert {best.weight_version, 6} <= there
    assert len(there) <= 3
    assert read_best(directory) == BestCheckpoint(metric="all/reward", step=best.weight_version, value=0.9)
    assert best.weight_version == (world.records[0].weight_version if values[0] == 0.9 else 6)


async def test_no_checkpoint_is_kept_for_its_evaluation_when_the_config_names_no_figure(
    tmp_path, monkeypatch
):
    world = World(make_config(tmp_path, "trainer.checkpoint_every=0"))
    KeepingTrainer(world)
    scored(monkeypatch, 0.9, 0.1)
    check(world, await world.run())
    assert [path.name for path in (world.run_dir / "checkpoints").iterdir()] == ["step_00000006"]


@pytest.mark.parametrize("where", [2], indirect=True, ids=["workers"])
async def test_answers_are_written_again_when_their_worker_is_killed(tmp_path):
    world = World(make_config(tmp_path, at_start=True, engines=1))
    killed: list[str] = []

    def called(engine: SimulatedEngine) -> None:
        if not killed:
            killed.append(min(world.cluster.workers.ends))
            asyncio.get_running_loop().call_later(0.1, world.cluster.workers.kill, 0)

    check(world, await world.run(called))
    assert killed == ["evaluation-worker-0"]
    assert {r.status for r in world.records} == {"done"}
    assert [r.dropped for r in world.records] == [{}] * len(world.records)
    for record in world.records:
        lengths = [answer.num_sampled_tokens for answer in world.answers(record.weight_version)]
        assert len(lengths) == NUM_ANSWERS
        assert record.sampled_tokens >= sum(lengths)
