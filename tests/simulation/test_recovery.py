"""Runs whose driver is killed, in virtual time: what was sampled is kept, and everything is settled once."""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import pytest

from async_rl.data.chat_format import ChatFormat
from async_rl.engines.model_facts import load_facts
from async_rl.engines.simulated import SimulatedCall
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import TrajectoryCounts
from async_rl.planning.virtual_time import VirtualTimeLoop
from async_rl.rollout.session.api import Session
from async_rl.run.inputs import RunInputs
from async_rl.run.orchestrator import Orchestrator
from async_rl.runtime.supervision import first_error
from async_rl.store.journal_file import JournalledTrajectory
from async_rl.store.ledger import Ledger
from async_rl.types import Completion, Sampled, Task, TrainBatch
from tests.support.journals import read_journals
from tests.support.ledgers import audit_ledger
from tests.support.local_cluster import CheckingTrainer, LocalCluster
from tests.support.run_config import config_with, write_run
from verification.simulation.users import SimulatedChat

TICK_S, TOKEN_S = 0.25, 0.05


class Asks:
    """Two turns with a tool in between."""

    async def run(self, task: Task, session: Session) -> None:
        session.start(task.messages)
        await session.generate()
        await asyncio.sleep(0.3)
        session.add_messages([{"role": "tool", "content": "7 8 9"}])
        await session.generate()


def reward(task: Task, completion: Completion) -> float:
    return 1.0


class Killed(KeyboardInterrupt):
    """Leaves the loop where it is, between two callbacks. Asyncio lets no other exception through."""


class Incarnation(NamedTuple):
    """What is left of one process."""

    folder: Path
    cluster: LocalCluster
    metrics: Metrics
    by_tick: list[dict[str, list[int]]]
    """What engines had sampled before each tick of the journal: the text of each trajectory's last call."""
    error: BaseException | None
    journal: dict[str, JournalledTrajectory]
    accounts: TrajectoryCounts
    unfinished: frozenset[str]
    num_undone: int
    """Trajectories of the steps after its newest checkpoint."""
    trained: dict[str, tuple[list[int], list[float]]]
    """Tokens and log-probs by trajectory."""

    def counted(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(f"async_rl_{name}") or 0.0

    @property
    def left(self) -> dict[str, JournalledTrajectory]:
        """What the journal has of trajectories that have not ended."""
        return {name: self.journal[name] for name in self.unfinished if name in self.journal}


class World:
    """A run folder through several incarnations."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        write_run(folder)
        self.root = folder
        self.folder = folder / "incarnation-0"
        self.incarnations: list[Incarnation] = []
        self.num_ids: Counter[str] = Counter()
        self.callers: dict[str, str] = {}
        tree: dict[str, Any] = {
            "run": {"max_steps": 6},
            "model": {"path": str(folder / "model")},
            "data": {"path": str(folder / "tasks.jsonl"), "shuffle": False},
            "engine": {"kind": "simulated", "decode_step_s": TOKEN_S, "mean_new_tokens": 16},
            "rollout": {
                "agent_loop": f"{__name__}:Asks",
                "reward": f"{__name__}:reward",
                "group_size": 2,
                "max_concurrent_trajectories": 8,
                "max_staleness": 2,
                "max_context_tokens": 200,
                "max_new_tokens": 60,
            },
            "queue": {"journal_s": TICK_S},
            "trainer": {"groups_per_batch": 2, "checkpoint_every": 2},
        }
        self.config = config_with(*overrides, **tree)
        self.trajectories_per_step = self.config.trainer.groups_per_batch * self.config.rollout.group_size

    def new_id(self) -> str:
        """Engines draw tokens by the id of a call, which must not depend on the order of tasks."""
        task = asyncio.current_task()
        assert task is not None
        caller = task.get_name()
        self.num_ids[caller] += 1
        name = uuid.uuid5(uuid.NAMESPACE_OID, f"{caller}, id {self.num_ids[caller]}").hex
        self.callers[name] = caller.removeprefix("trajectory ")
        return name

    def live(
        self,
        kill: Callable[[float, LocalCluster], bool] = lambda now, cluster: False,
        loop_class: type[VirtualTimeLoop] = VirtualTimeLoop,
    ) -> Incarnation:
        """One process, until the run has ended or `kill` says so; the next one continues from its folder."""
        (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        cluster, metrics = LocalCluster(self.config, step_s=0.4), Metrics()
        trained = watch(cluster.trainer)
        lengths: dict[SimulatedCall, int] = {}  # of all calls, as of the callback before
        by_tick: list[dict[str, list[int]]] = [{}]
        killed = False
        here = self.folder

        def after_step(_: Any) -> None:
            nonlocal killed
            if killed:
                return
            if loop.time() >= len(by_tick) * TICK_S:
                by_tick.append(
                    {
                        self.callers[call.request.request_id.partition("-")[0]]: call.tokens[:num_tokens]
                        for call, num_tokens in lengths.items()
                        if num_tokens > len(call.request.input_ids)
                    }
                )
            calls = [*lengths, *(call for engine in cluster.engines for call in engine._calls)]
            lengths.update((call, len(call.tokens)) for call in calls)
            if kill(loop.time(), cluster):
                killed = True
                self.folder = self.root / f"incarnation-{len(self.incarnations) + 1}"
                shutil.copytree(here, self.folder)
                raise Killed

        loop = loop_class(after_step=after_step)
        chat = cast(ChatFormat, SimulatedChat())
        inputs = RunInputs(TASKS, chat, load_facts(self.config.model.path), self.new_id)
        run = Orchestrator(self.config, here, asyncio.Event(), cluster, metrics, loop.time, inputs)
        main = loop.create_task(run.run(), name=f"incarnation {len(self.incarnations)}")
        error: BaseException | None = None
        try:
            loop.run_until_complete(main)
        except Killed:
            main.cancel()  # its remaining tasks write to a folder that no test reads any more
            with pytest.raises(asyncio.CancelledError):
                loop.run_until_complete(main)
        except ExceptionGroup as group:
            error = first_error(group)
        loop.close()
        ledger = Ledger(self.folder / "ledger.sqlite")
        checkpoints = (self.folder / "checkpoints").rglob("latest.json")
        saved = max((json.loads(path.read_text())["step"] for path in checkpoints), default=0)
        incarnation = Incarnation(
            folder=self.folder,
            cluster=cluster,
            metrics=metrics,
            by_tick=by_tick,
            error=error,
            journal=read_journals(self.folder / "journal"),
            accounts=audit_ledger(ledger),
            unfinished=ledger.in_flight.difference(*(group.stored for group in ledger.outstanding())),
            num_undone=ledger.counts().trained - self.trajectories_per_step * saved,
            trained=trained,
        )
        ledger.close()
        self.incarnations.append(incarnation)
        return incarnation


TASKS = tuple(
    Task(task_id=f"t{i}", messages=[{"role": "user", "content": f"{20 + i} 11 12 13"}]) for i in range(40)
)


def watch(trainer: CheckingTrainer) -> dict[str, tuple[list[int], list[float]]]:
    """Fill as batches are trained: a batch's memory is another one's after its step."""
    seen: dict[str, tuple[list[int], list[float]]] = {}
    check = trainer.check

    def check_and_keep(batch: TrainBatch) -> None:
        check(batch)
        for name, (begin, end) in zip(batch.trajectory_ids, pairwise(batch.offsets.tolist()), strict=True):
            seen[name] = (
                batch.token_ids[begin:end].tolist(),
                batch.rollout_log_probs[begin:end].tolist(),
            )

    trainer.check = check_and_keep  # type: ignore[method-assign]
    return seen


def at(moment: float) -> Callable[[float, LocalCluster], bool]:
    return lambda now, cluster: now >= moment


def tokens_of(left: JournalledTrajectory) -> list[int]:
    return np.concatenate([segment.token_ids for segment in left.segments]).tolist()


def assert_kept(world: World) -> None:
    """Whatever a journal ever knew of a trajectory that was trained later is the beginning of it."""
    for number, incarnation in enumerate(world.incarnations):
        known = incarnation.left
        for later in world.incarnations[number + 1 :]:
            for name, (tokens, _) in later.trained.items():
                if name in known:
                    begin = tokens_of(known[name])
                    assert tokens[: len(begin)] == begin


def assert_journalled(incarnation: Incarnation, tick: int) -> None:
    """Whatever engines had sampled before a tick of an unfinished trajectory is in the journal."""
    known = incarnation.by_tick[tick]
    for name in known.keys() & incarnation.unfinished:
        assert tokens_of(incarnation.journal[name])[: len(known[name])] == known[name]


def assert_settled_once(world: World, given_up: int = 0) -> None:
    last = world.incarnations[-1]
    lines = (last.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, world.config.run.max_steps + 1))
    assert last.error is None
    assert last.cluster.trainer.step == world.config.run.max_steps
    accounts = last.accounts
    assert accounts.trained == world.config.run.max_steps * 4
    # Nothing else is dropped than the steps after a checkpoint.
    restarted = given_up + sum(incarnation.num_undone for incarnation in world.incarnations[:-1])
    assert accounts.dropped == ({"restart": restarted} if restarted else {})
    steps: dict[int, tuple[str, ...]] = {}
    for incarnation in world.incarnations:  # a later incarnation trains a step after its checkpoint again
        for batch in incarnation.cluster.trainer.batches:
            steps = {n: names for n, names in steps.items() if n < batch.trainer_version}
            steps[batch.trainer_version] = batch.trajectory_ids
    trained = [name for names in steps.values() for name in names]
    assert len(trained) == len(set(trained)) == accounts.trained


@pytest.mark.parametrize("moment", [pytest.param(0.6, marks=pytest.mark.long), 2.1])
def test_sampling_goes_on_from_the_tokens_seen_when_the_driver_was_killed(
    tmp_path: Path, moment: float
) -> None:
    world = World(tmp_path)
    first = world.live(at(moment))
    left = first.left
    last_tick = int(moment / TICK_S)
    assert len(first.by_tick) == last_tick + 1
    assert len(first.by_tick[last_tick].keys() & first.unfinished) >= 7
    assert_journalled(first, last_tick)
    sampled = sum(state.num_sampled_tokens for state in left.values())
    assert sampled > 50
    second = world.live()
    assert second.counted("resumed_tokens_total") == sampled
    assert second.counted("resume_discarded_tokens_total") == 0
    assert second.counted("trajectories_dispatched_total") == second.accounts.dispatched
    assert second.accounts.dropped == {}
    trained = second.trained
    resumed = [name for name in left if name in trained]
    assert resumed
    for name in resumed:
        probs = [
            segment.rollout_log_probs if isinstance(segment, Sampled) else 0 * segment.token_ids
            for segment in left[name].segments
        ]
        expected = np.concatenate(probs).astype(np.float32).tolist()
        assert trained[name][1][: len(expected)] == expected
    assert_kept(world)
    assert_settled_once(world)


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize(
    "moments",
    [
        (2.1, 0.9, 3.3),
        *(pytest.param(each, marks=pytest.mark.long) for each in [(0.01, 4.7), (5.2, 0.3, 0.02, 2.6)]),
    ],
)
def test_nothing_is_lost_when_the_driver_is_killed_again_and_again(
    tmp_path: Path, moments: Sequence[float], journal: bool
) -> None:
    world = World(
        tmp_path, "rollout.max_concurrent_trajectories=3", *([] if journal else ["queue.journal_s=null"])
    )
    for moment in moments:
        killed = world.live(at(moment))
        if journal:
            assert_journalled(killed, -1)
    world.live()
    if journal:
        assert_kept(world)
    assert_settled_once(world)


def test_the_bound_holds_for_resumed_work_when_the_checkpoint_lacks_the_versions_that_sampled_it(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, "trainer.checkpoint_every=3", "rollout.max_staleness=1", "run.max_steps=8")

    def a_tick_has_journalled_tokens_of_the_newest_weights(now: float, cluster: LocalCluster) -> bool:
        calls = [call for engine in cluster.engines for call in engine._calls]
        longest = max((call.sampled_versions.count(5) for call in calls), default=0)
        return cluster.trainer.step == 5 and longest > TICK_S / TOKEN_S + 1

    first = world.live(a_tick_has_journalled_tokens_of_the_newest_weights)
    assert_journalled(first, -1)
    sampled = [s for state in first.left.values() for s in state.segments if isinstance(s, Sampled)]
    assert max(segment.weight_version for segment in sampled) > 3
    second = world.live()  # the trainer refuses what is too old, and labels that are ahead of it
    assert min(batch.trainer_version for batch in second.cluster.trainer.batches) == 3
    assert second.counted("resumed_tokens_total") > 0
    assert second.accounts.dropped == {"restart": 2 * 4}
    assert_settled_once(world)


def test_a_group_is_given_up_when_its_task_is_no_longer_in_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    first = world.live(at(1.0))
    monkeypatch.setattr(f"{__name__}.TASKS", TASKS[::-1])
    second = world.live()
    assert second.accounts.dropped == {"restart": first.accounts.in_flight}
    assert second.counted("resumed_tokens_total") == 0
    assert_settled_once(world, given_up=first.accounts.in_flight)


class Straggles:
    """The second sibling of each group ends at once; any other never does, before a restart or after."""

    begun: ClassVar[Counter[str]] = Counter()

    async def run(self, task: Task, session: Session) -> None:
        Straggles.begun[task.task_id] += 1
        number = Straggles.begun[task.task_id]
        session.start(task.messages)
        await session.generate(max_new_tokens=1)
        if number != 2:
            await asyncio.Future()


@pytest.mark.parametrize("moments", [(3.0,), (2.0, 2.0)])
def test_a_group_goes_without_its_stragglers_at_the_same_time_when_the_driver_is_killed_meanwhile(
    tmp_path: Path, moments: Sequence[float]
) -> None:
    Straggles.begun = Counter()
    world = World(
        tmp_path,
        f"rollout.agent_loop={__name__}:Straggles",
        "rollout.min_group_size=1",
        "rollout.straggler_wait_s=6",
        "rollout.trajectory_timeout_s=1000000",
        "trainer.groups_per_batch=1",
        "trainer.loss.advantages=reinforce++",
        "run.max_steps=1",
    )
    ended: list[float] = []

    def watch_steps(now: float, cluster: LocalCluster) -> bool:
        if cluster.trainer.step == 1 and not ended:
            ended.append(now)
        return now > 30.0  # a group that waits for ever must not hang the test

    for moment in moments:
        world.live(at(moment))
    last = world.live(watch_steps)
    assert last.error is None
    assert last.accounts.dropped["straggler"] >= 1
    assert ended[0] == pytest.approx(6.5 - sum(moments), abs=2 * TICK_S * len(moments) + 0.6)


class BusyThreads(VirtualTimeLoop):
    """Work in threads takes time: the journal's, or that of all others, as when large groups are packed."""

    journal_s, others_s = 0.0, 0.0

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        of_journal = getattr(executor, "_thread_name_prefix", "") == "journal"
        work_s = self.journal_s if of_journal else self.others_s

        async def work() -> Any:
            await asyncio.sleep(work_s)
            return await super(BusyThreads, self).run_in_executor(executor, func, *args)

        return self.create_task(work())


class SlowJournal(BusyThreads):
    """A write takes most of a tick, as when much is in flight."""

    journal_s = 0.15


class SlowOthers(BusyThreads):
    others_s = 0.6


@pytest.mark.parametrize(("loop_class", "moment"), [(SlowJournal, 2.2), (SlowOthers, 6.2)])
def test_no_more_than_a_tick_is_lost_when_threads_are_busy(
    tmp_path: Path, loop_class: type[VirtualTimeLoop], moment: float
) -> None:
    first, tick = World(tmp_path).live(at(moment), loop_class), int(moment / TICK_S)
    assert len(first.by_tick[tick].keys() & first.unfinished) >= 4
    assert_journalled(first, tick)  # of 2.0 s, which was written until 2.15 s
