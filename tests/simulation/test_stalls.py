"""Hangs of every kind in a whole run, in virtual time: each is diagnosed within a minute, some remedied."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from agent_loops.single_turn import SingleTurnLoop
from agent_loops.tools import Tool
from async_rl.config import Config
from async_rl.data.chat_format import load_chat_format
from async_rl.data.dataset import load_tasks
from async_rl.engine_protocol import Chunk, Finish, GenerateRequest, WeightUpdate
from async_rl.engines import health
from async_rl.engines.health import HealthWatch
from async_rl.engines.model_facts import load_facts
from async_rl.engines.simulated import SimulatedEngine
from async_rl.errors import StallError
from async_rl.observability.diagnosis import Diagnosis
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import Summary
from async_rl.planning.virtual_time import run_virtual
from async_rl.rollout.groups import GroupInFlight
from async_rl.rollout.manager import RolloutManager
from async_rl.rollout.session.api import Session
from async_rl.rollout.slots import Slots
from async_rl.run import doctor
from async_rl.run.inputs import RunInputs
from async_rl.run.orchestrator import Orchestrator
from async_rl.runtime.supervision import Nursery, first_error, service_of, services
from async_rl.runtime.waits import acting
from async_rl.staleness import Backlog
from async_rl.trainer_protocol import StepResult
from async_rl.types import Completion, Task
from tests.simulation.test_loop import assert_conserved, make_config
from tests.support.local_cluster import LocalCluster

MINUTE = 60.0


class Hang:
    """A point in the code that hangs from its `after`-th visit on, `times` times."""

    current: ClassVar[Hang]

    def __init__(self, after: int = 10, times: float = float("inf")) -> None:
        self.after, self.times, self.visits = after, times, 0
        self.begun = asyncio.Event()
        Hang.current = self

    async def __call__(self) -> None:
        self.visits += 1
        if self.after <= self.visits < self.after + self.times:
            self.begun.set()
            await asyncio.Future()


async def score(task: Task, completion: Completion) -> float:
    return float(len(completion.text))


async def score_for_ever(task: Task, completion: Completion) -> float:
    await Hang.current()
    return float(len(completion.text))


async def search(query: str) -> str:
    """Search the web."""
    await Hang.current()
    return "nothing"


class SearchingLoop(SingleTurnLoop):
    """Uses a tool after it answered."""

    async def run(self, task: Task, session: Session) -> None:
        await super().run(task, session)
        await Tool(search).call({"query": "x"}, timeout_s=session.tool_timeout_s)


class PatientLoop(SingleTurnLoop):
    """Takes ten minutes to think."""

    async def run(self, task: Task, session: Session) -> None:
        await asyncio.sleep(600)
        await super().run(task, session)


async def score_slowly(task: Task, completion: Completion) -> float:
    await asyncio.sleep(300)
    return 1.0


class DreamingLoop(SingleTurnLoop):
    """Awaits something that the framework does not know."""

    async def run(self, task: Task, session: Session) -> None:
        await super().run(task, session)
        await Hang.current()


class SilentEngine(SimulatedEngine):
    """Stops sending in all calls at once, until it is restarted."""

    restarted = False

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk | Finish, None]:
        async for event in super().generate(request):
            if Hang.current.visits >= Hang.current.after and not self.restarted:
                await Hang.current()
            Hang.current.visits += 1
            yield event

    def restart(self) -> None:
        self.restarted = True
        super().restart()


class StallingRun:
    """A run in virtual time that hangs at some point."""

    def __init__(self, calculator: Path, tmp_path: Path, *overrides: str, step_s: float = 0.5) -> None:
        self.config: Config = make_config(
            calculator,
            tmp_path,
            f"rollout.reward={__name__}:score",
            "rollout.tool_timeout_s=3600",
            "rollout.reward_timeout_s=3600",
            "rollout.trajectory_timeout_s=7200",
            "engine.decode_step_s=0.05",
            *overrides,
        )
        self.cluster = LocalCluster(self.config, step_s=step_s)
        self.metrics = Metrics()
        self.numbers = itertools.count()  # what engines sample follows from the names: a run repeats itself

    def make(self) -> Orchestrator:
        run_dir = Path(self.config.run.dir) / self.config.run.name
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        clock = asyncio.get_running_loop().time
        path = self.config.model.path
        tasks, chat, facts = load_tasks(self.config.data), load_chat_format(path), load_facts(path)
        inputs = RunInputs(tasks, chat, facts, lambda: f"{next(self.numbers):032x}")
        return Orchestrator(self.config, run_dir, asyncio.Event(), self.cluster, self.metrics, clock, inputs)

    async def live(self, orchestrator: Orchestrator) -> Summary:
        with acting("run", waits=orchestrator.waits):
            return await orchestrator.run()

    def run(self) -> Summary:
        """Run to the end."""

        async def main() -> Summary:
            return await self.live(self.make())

        return run_virtual(main())

    def examine(self, hang: Callable[[], Hang]) -> Diagnosis:
        """Return the diagnosis of the run one minute after it began to hang."""

        async def main() -> Diagnosis:
            begun, orchestrator = hang().begun, self.make()
            async with Nursery() as nursery:
                nursery.start_task("run", self.live(orchestrator))
                await begun.wait()
                await asyncio.sleep(MINUTE - 1)
                health = orchestrator.live_status.health()
                nursery.cancel_tasks()
            assert health["waiting_for"][0].startswith(("train loop waits for", "run waits for"))
            return checked_diagnosis(health)

        return run_virtual(main())

    def stalls(self) -> dict[str, float]:
        """Return how often the alarm was raised, by kind of wait."""
        (family,) = self.metrics.stalls_total.collect()
        return {s.labels["awaited"]: s.value for s in family.samples if s.name.endswith("_total")}


@pytest.fixture
def stalling_run(calculator: Path, tmp_path: Path) -> Callable[..., StallingRun]:
    return lambda *overrides, **options: StallingRun(calculator, tmp_path, *overrides, **options)


def checked_diagnosis(health: dict[str, Any]) -> Diagnosis:
    """Return the diagnosis; the status is `ok` exactly if it has no problem."""
    diagnosis = msgspec.convert(health["diagnosis"], Diagnosis)
    assert (health["status"] == "ok") == all(cause.problem == "none" for cause in diagnosis.causes)
    return diagnosis


def of(diagnosis: Diagnosis) -> tuple[str, str]:
    assert diagnosis.state in ("quiet", "stalled"), diagnosis.text
    assert diagnosis.quiet_s >= 45
    return diagnosis.causes[0].on, diagnosis.causes[0].target


Make = Callable[..., StallingRun]


# -- each hang by its name -----------------------------------------------------------------------------------


def test_an_engine_is_named_when_it_goes_silent(stalling_run: Make) -> None:
    run = stalling_run("engine.num_engines=1")
    run.cluster.engines[0] = SilentEngine("engine-0", run.config.engine, facts=run.cluster.engines[0].facts)
    diagnosis = run.examine(lambda: Hang(after=5))  # before any batch is full
    assert of(diagnosis)[1] == "engine-0"
    assert "engine-0: serving at version" in diagnosis.causes[0].chain[-1]
    assert (diagnosis.state, diagnosis.causes[0].problem) == ("quiet", "none")  # within its patience


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (f"rollout.reward={__name__}:score_for_ever", ("reward", f"{__name__}:score_for_ever")),
        (f"rollout.agent_loop={__name__}:SearchingLoop", ("tool", "search")),
        (f"rollout.agent_loop={__name__}:DreamingLoop", ("agent loop", f"{__name__}:DreamingLoop")),
    ],
    ids=["reward", "tool", "loop"],
)
def test_a_reward_is_named_when_it_hangs(stalling_run: Make, override: str, named: tuple[str, str]) -> None:
    """verl#1210, miles#3221: a reward without a timeout. Tools and loops hang, too."""
    assert of(stalling_run(override).examine(Hang)) == named


def test_publishing_is_named_when_a_version_never_comes(stalling_run: Make) -> None:
    """prime-rl#2912: every engine waits for a version that is never published."""
    run = stalling_run()

    async def publish(directory: str, weight_version: int) -> None:
        await Hang.current()

    run.cluster.trainer.publish = publish  # type: ignore[method-assign]
    assert of(run.examine(lambda: Hang(after=2))) == ("publish", "version 2")


def test_admission_is_named_when_it_never_opens(stalling_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyRL#1173: a few groups short of a batch, for 29 hours."""

    def closed(self: Backlog) -> bool:
        Hang.current.begun.set()
        return self.outstanding < 3 and self.next_version == 0

    monkeypatch.setattr(Backlog, "may_admit", closed)
    diagnosis = stalling_run().examine(Hang)
    assert of(diagnosis)[0] == "admission"
    assert (diagnosis.causes[0].problem, diagnosis.state) == ("deadlock", "stalled")


def test_the_run_ends_with_the_name_of_a_background_task_that_dies(stalling_run: Make) -> None:
    """prime-rl#2986: a dead background task goes unnoticed."""
    run = stalling_run()

    async def watch_engines(died: Any) -> None:
        await asyncio.sleep(1)
        raise RuntimeError("the watcher is dead")

    run.cluster.watch_engines = watch_engines  # type: ignore[method-assign]
    with pytest.raises(BaseExceptionGroup) as caught:
        run.run()
    assert service_of(first_error(caught.value)) == "watch"


# -- what is done about it -----------------------------------------------------------------------------------


def test_the_run_ends_with_the_chain_when_it_is_stalled(stalling_run: Make) -> None:
    run = stalling_run("doctor.action=end")
    step = run.cluster.trainer.train_step

    async def train_step(path: str, number: int) -> StepResult:
        if number == 3:
            await asyncio.Future()
        return await step(path, number)

    run.cluster.trainer.train_step = train_step  # type: ignore[method-assign]
    with pytest.raises(BaseExceptionGroup) as caught:
        run.run()
    error = first_error(caught.value)
    assert isinstance(error, StallError)
    assert (error.exit_code, error.on) == (4, "trainer step")
    assert "train loop waits for trainer step 3" in str(error)
    assert run.stalls() == {"trainer step": 1}


def run_with_remedy(run: StallingRun, awaited: str, limit_s: float = 3600.0) -> Summary:
    """Run to the end, with one alarm on the way; `limit_s` replaces the wait's limit."""

    async def main() -> Summary:
        orchestrator = run.make()
        orchestrator.doctor.limits_s[awaited] = limit_s
        return await run.live(orchestrator)

    summary = run_virtual(main())
    assert summary.weight_versions == run.config.run.max_steps
    assert run.stalls() == {awaited: 1}
    assert_conserved(summary)
    return summary


REPAIR = ("doctor.action=repair", "doctor.stall_s=20")


@pytest.mark.real
@pytest.mark.parametrize(
    ("override", "awaited"),
    [
        (f"rollout.agent_loop={__name__}:DreamingLoop", "agent loop"),
        (f"rollout.agent_loop={__name__}:SearchingLoop", "tool"),
        (f"rollout.reward={__name__}:score_for_ever", "reward"),
    ],
)
def test_an_attempt_is_made_again_when_it_hangs(stalling_run: Make, override: str, awaited: str) -> None:
    Hang(after=10, times=1)  # its own timeout is an hour away
    summary = run_with_remedy(stalling_run(*REPAIR, override), awaited, limit_s=20)
    assert summary.trajectories.dropped == {}


def test_calls_move_with_their_tokens_when_an_engine_is_silent(
    stalling_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hang(after=5)
    run = stalling_run(*REPAIR, "engine.stall_s=25", "engine.num_engines=1")
    run.cluster.engines[0] = SilentEngine("engine-0", run.config.engine, facts=run.cluster.engines[0].facts)

    async def never(watch: HealthWatch) -> None:
        await asyncio.Future()

    monkeypatch.setattr(HealthWatch, "watch_engines", never)
    run_with_remedy(run, "chunk")
    assert run.cluster.restarts == ["engine-0"]


def test_the_others_go_on_when_an_engine_never_ends_its_weight_update(stalling_run: Make) -> None:
    Hang(after=2, times=1)
    run = stalling_run(*REPAIR, "weights.timeout_s=3600")

    class Stuck(SimulatedEngine):
        async def update_weights(self, update: WeightUpdate, *, flush: bool) -> None:
            await Hang.current()
            await super().update_weights(update, flush=flush)

    run.cluster.engines[0] = Stuck("engine-0", run.config.engine, facts=run.cluster.engines[0].facts)
    run_with_remedy(run, "engine update", limit_s=20)
    assert run.cluster.restarts == ["engine-0"]


def test_a_lost_group_is_dropped_when_everything_waits_for_it(
    stalling_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl#7155: the whole run waits for one lost id. Its siblings have ended."""
    settle, numbers = RolloutManager._settle_group, itertools.count()

    async def forget(self: RolloutManager, work: GroupInFlight) -> None:
        if next(numbers) != 2:
            await settle(self, work)

    monkeypatch.setattr(RolloutManager, "_settle_group", forget)
    assert run_with_remedy(stalling_run(*REPAIR), "group").trajectories.dropped == {"lost": 4}


def test_slots_are_taken_back_when_they_leaked(stalling_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    release, ended = Slots.release_slot, list[str]()

    def forget(self: Slots, holder: str = "") -> None:
        if holder and holder in self.view().holders and holder not in ended:
            ended.append(holder)
        if holder not in ended[10:14]:
            release(self, holder)

    monkeypatch.setattr(Slots, "release_slot", forget)
    run_with_remedy(stalling_run(*REPAIR, "rollout.max_concurrent_trajectories=4"), "slot")


def test_the_trainer_starts_again_when_its_step_never_returns(stalling_run: Make) -> None:
    run = stalling_run(*REPAIR)
    step, hangs = run.cluster.trainer.train_step, [3]

    async def train_step(path: str, number: int) -> StepResult:
        if number in hangs:
            hangs.remove(number)
            await asyncio.Future()
        return await step(path, number)

    run.cluster.trainer.train_step = train_step  # type: ignore[method-assign]
    run_with_remedy(run, "trainer step")


def test_the_run_ends_when_there_is_no_remedy(stalling_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    Hang()
    monkeypatch.setattr(Backlog, "may_admit", lambda self: self.outstanding < 3)
    with pytest.raises(BaseExceptionGroup) as caught:
        stalling_run(*REPAIR).run()
    error = first_error(caught.value)
    assert isinstance(error, StallError)
    assert error.on == "admission"


# -- what is slow and healthy --------------------------------------------------------------------------------


def test_health_has_no_problem_while_a_run_is_healthy(stalling_run: Make) -> None:
    run = stalling_run("run.max_steps=12", step_s=1.8)

    async def main() -> set[tuple[str, str]]:
        orchestrator, seen = run.make(), set()

        async def ask() -> None:
            while True:
                await asyncio.sleep(0.1)
                diagnosis = checked_diagnosis(health := orchestrator.live_status.health())
                assert health["status"] == "ok", diagnosis.text
                assert diagnosis.state == "moving"
                assert "likely cause" not in diagnosis.text
                seen.update((cause.on, cause.problem) for cause in diagnosis.causes)

        async with services(ask=ask):
            await run.live(orchestrator)
        return seen

    seen = run_virtual(main())
    assert {problem for _, problem in seen} == {"none"}
    assert {on for on, _ in seen} > {"trainer step", "chunk"}


@pytest.mark.real
def test_no_alarm_is_raised_when_steps_tools_and_rewards_take_long(stalling_run: Make) -> None:
    run = stalling_run(
        "doctor.action=end",
        f"rollout.agent_loop={__name__}:PatientLoop",
        f"rollout.reward={__name__}:score_slowly",
        "run.max_steps=3",
        step_s=600,
    )
    run.run()
    assert run.stalls() == {}


def test_no_alarm_is_raised_when_an_engine_has_much_to_prefill(
    stalling_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang#22511: a busy engine is not a dead one."""
    for module in (health, doctor):
        monkeypatch.setattr(module, "MIN_PREFILL_TOKENS_PER_S", 0.2)
    run = stalling_run(
        "doctor.action=end",
        "engine.prefill_tokens_per_s=0.3",
        "engine.stall_s=10",
        "run.max_steps=1",
    )
    run.run()
    assert run.stalls() == {}
