"""The queue: who waits for what, what a batch says of itself, cancellation, restart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from async_rl.errors import AsyncRLError, CorruptFrame, DataError, InvariantError, SpoolFull
from async_rl.observability.metrics import Metrics, value_of
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import Waits, acting
from async_rl.staleness import Backlog
from async_rl.store import frames, trajectory_queue
from async_rl.store.frames import read_trajectories, verify_frame
from async_rl.store.ledger import Ledger
from async_rl.store.spool import Spool
from async_rl.types import StoredTrajectory, TakenBatch
from tests.support.ledgers import audit_ledger
from tests.support.loop_blockers import loop_blockers
from tests.support.queues import make_queue
from tests.support.trajectories import FACTS, MadeGroup, make_group, make_trajectory, roll_back


async def read_batch(batch: TakenBatch) -> dict[str, str]:
    """Verify the frames of a batch as ranks do."""
    return await asyncio.to_thread(frames.find_flaws, batch.trajectories)


OPEN: list[Run] = []


class Run:
    """A queue on a folder; `again` opens the next one after a crash."""

    def __init__(self, folder: Path, step: int = 0, max_bytes: int = 64 << 20, **settings: Any) -> None:
        self.folder, self.settings = folder, settings
        self.ledger = Ledger(folder / "ledger.sqlite")
        roll_back(self.ledger, step)
        self.spool = Spool(folder / "spool", max_bytes)
        self.queue = make_queue(
            self.ledger,
            self.spool,
            read_batch=read_batch,
            **{"groups_per_batch": 2, "max_staleness": 1, "facts": FACTS, "version": step, **settings},
        )
        self.queue.groups.restore_groups()
        self.position = self.ledger.data_position()
        self.next = self.position.cursor
        OPEN.append(self)

    def close(self) -> None:
        OPEN.remove(self)
        self.queue.close()

    def dispatch(self, name: str, size: int = 2, version: int = 0) -> None:
        self.queue.groups.dispatch_group(
            name, f"task-{name}", self.next, [f"{name}-{i}" for i in range(size)], version
        )
        self.next += 1

    async def ready(self, *names: str, version: int = 0, **others: int) -> None:
        for name in names:
            self.dispatch(name, version=version)
            await self.put(make_group(name, version=version, **others))

    async def put(self, group: MadeGroup) -> None:
        """Store the trajectories of a group and put it."""
        await self.queue.put_group(await asyncio.to_thread(group.stored_in, self.spool.directory))
        await asyncio.to_thread(self.queue.groups.flush_ledger)

    async def take(self, version: int = 0) -> TakenBatch:
        batch = await self.queue.next_batch(version)
        assert batch is not None
        return batch

    def frame_of(self, name: str) -> StoredTrajectory:
        """The frame of the first trajectory of a queued group."""
        return next(iter(self.ledger.group(name).stored.values()))

    @property
    def files(self) -> list[str]:
        """The files in the spool."""
        return sorted(path.name.rpartition("-")[0] for path in self.spool.directory.glob("*/*"))

    def again(self, step: int = 0) -> Run:
        return Run(self.folder, step, **self.settings)


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    """Close what a test has opened, after it has ended."""
    yield
    while OPEN:
        OPEN[0].close()


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path)
    yield run
    audit_ledger(run.ledger)


@asynccontextmanager
async def held(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> AsyncIterator[Callable[[], None]]:
    """Calls of a method wait in their thread; the block begins when asked to, and ends by letting them go."""
    original, go = getattr(owner, name), threading.Event()

    def slow(*arguments: Any, **named: Any) -> Any:
        assert go.wait(30)
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, slow)
    try:
        yield go.set
    finally:
        go.set()


@asynccontextmanager
async def named_waits() -> AsyncIterator[Callable[[], dict[str, str | None]]]:
    """What is waited for in the block, and what that says of itself."""
    waits = Waits()
    with acting("test", waits=waits):
        yield lambda: {wait.on: wait.why for wait in waits.open_waits()}


async def settled() -> None:
    """Let everybody run until all wait."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """Let everybody run, threads too, until something holds."""
    while not condition():  # noqa: ASYNC110  the end of a thread notifies no waiter
        await asyncio.sleep(0)


def damage(stored: StoredTrajectory) -> None:
    with open(stored.path, "r+b") as file:
        file.seek(stored.nbytes - 1)
        last = file.read(1)[0]
        file.seek(stored.nbytes - 1)
        file.write(bytes([last ^ 1]))


async def test_a_group_goes_through_the_whole_queue(run: Run) -> None:
    assert await run.queue.wait_for_admission()
    await run.ready("a", "b", "c")
    batch = await run.take(0)
    assert (batch.group_ids, batch.staleness) == (("a", "b"), (0, 0, 0, 0))
    assert batch.trajectory_ids == ("a-0", "a-1", "b-0", "b-1")
    assert (batch.lengths, batch.num_tokens, batch.num_sampled_tokens) == ((7, 8, 7, 8), 30, 18)
    assert (batch.rewards, batch.resumes) == ((1.0,) * 4, (0,) * 4)
    assert (batch.routing_rows, batch.routing_rows_invalid) == (26, 0)
    packed = read_trajectories(batch)
    assert packed.trajectory_ids == batch.trajectory_ids
    assert np.diff(packed.offsets).tolist() == list(batch.lengths)
    await run.queue.settle_batch(batch, 1)
    counts = run.queue.groups.ledger.counts()
    assert (counts.trained, counts.queued, counts.in_flight, counts.dropped) == (4, 2, 0, {})
    assert (run.queue.groups.backlog.num_ready, run.files) == (1, ["c-0", "c-1"])
    assert run.spool.used_bytes == sum(path.stat().st_size for path in run.spool.directory.glob("*/*"))
    with pytest.raises(CorruptFrame, match="does not exist"):
        read_trajectories(batch)
    with pytest.raises(InvariantError, match="settled already"):
        await run.queue.settle_batch(batch, 1)


async def test_admission_opens_when_engines_serve_the_next_version_and_not_before(run: Run) -> None:
    await run.ready("a", "b", "c", "d")
    async with named_waits() as waited, Nursery() as nursery:
        admitted = nursery.start_task("feeder", run.queue.wait_for_admission())
        await settled()
        assert not admitted.done()
        assert waited()["admission"] == (
            "4 groups are outstanding, all that a batch of 2 and a staleness of 1 allow while engines "
            "serve version 0"
        )
        batch = await run.take(0)
        await run.queue.settle_batch(batch, 1)
        await settled()
        assert not admitted.done()
        run.queue.advance_version(1)
        assert await admitted
        assert waited() == {}


async def test_put_waits_for_a_step_when_the_spool_is_full(tmp_path: Path) -> None:
    run = Run(tmp_path, max_bytes=384 << 10, max_staleness=5)
    await run.ready("a", "b", tokens=6000)
    run.dispatch("c")
    async with named_waits() as waited, Nursery() as nursery:
        put = nursery.start_task("put", run.put(make_group("c", tokens=6000)))
        batch = await run.take()
        await until(lambda: "capacity" in waited())
        assert waited()["capacity"] == f"a step must free some of {run.spool.used_bytes} bytes in the spool"
        assert run.queue.groups.backlog.num_in_flight == 1
        await run.queue.settle_batch(batch, 1)
        await put
    assert run.queue.groups.backlog.num_ready == 1


@pytest.mark.parametrize("settled_before", [False, True])
async def test_put_fails_clearly_when_the_spool_is_too_small_for_one_batch(
    tmp_path: Path, settled_before: bool
) -> None:
    run = Run(tmp_path, max_bytes=256 << 10)
    if settled_before:
        await run.ready("a", "b")
        await run.queue.settle_batch(await run.take(), 1)
    await run.ready("c", tokens=6000)
    run.dispatch("d")
    with pytest.raises(SpoolFull, match="raise it"):
        async with asyncio.timeout(60):
            await run.put(make_group("d", tokens=6000))
    assert run.queue.groups.ledger.counts().in_flight == 2


async def test_a_group_without_space_waits_while_another_one_is_about_to_be_dispatched(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, max_bytes=256 << 10, groups_per_batch=3)
    await run.ready("a", tokens=6000)
    run.dispatch("b")
    async with named_waits() as waited:
        putting = asyncio.ensure_future(run.put(make_group("b", tokens=6000)))
        await until(lambda: putting.done() or "capacity" in waited())
    assert run.queue.admits  # the batch needs a third group
    assert not putting.done()
    run.queue.set_tasks_left(False)
    with pytest.raises(SpoolFull, match="raise it"):
        await putting


async def test_a_group_without_space_stays_in_flight_when_the_run_is_stopped(tmp_path: Path) -> None:
    run = Run(tmp_path, max_bytes=256 << 10)
    await run.ready("a", tokens=6000)
    run.dispatch("b")
    run.queue.stop()
    async with Nursery() as nursery:
        putting = nursery.start_task("put", run.put(make_group("b", tokens=6000)))
        await settled()
        assert not putting.done()
        putting.cancel()
    assert run.queue.groups.backlog.num_in_flight == 1


async def test_take_waits_for_the_straggler_that_would_grow_too_old(tmp_path: Path) -> None:
    run = Run(tmp_path, max_staleness=1)
    run.dispatch("old", version=0)
    await run.ready("a", version=0)
    await run.ready("b", version=0)
    await run.queue.settle_batch(await run.take(0), 1)
    run.queue.advance_version(1)
    await run.ready("c", "d", version=1)
    async with named_waits() as waited, Nursery() as nursery:
        taking = nursery.start_task("trainer", run.queue.next_batch(1))
        await settled()
        assert waited()["batch"] == (
            "1 of 1 groups in flight must go before the 2 ready ones, or they would grow older than 1"
        )
        assert run.queue.view().due == ("old",)
        await run.put(make_group("old", version=0))
        batch = await taking
    assert batch is not None
    assert batch.group_ids == ("old", "c")
    assert batch.staleness == (1, 1, 0, 0)


async def test_take_goes_on_when_the_group_that_it_waits_for_is_lost(tmp_path: Path) -> None:
    """Nothing waits for an id that will not come any more (verl issue 7155)."""
    run = Run(tmp_path, max_staleness=1, groups_per_batch=1)
    run.dispatch("lost", version=0)
    run.queue.advance_version(1)
    await run.ready("a", version=1)
    async with Nursery() as nursery:
        taking = nursery.start_task("trainer", run.queue.next_batch(1))
        await settled()
        assert not taking.done()
        run.queue.groups.drop_trajectories(["lost-0"], "engine_error")
        await settled()
        assert not taking.done()  # its sibling may still come
        run.queue.groups.drop_trajectories(["lost-1"], "engine_error")
        batch = await taking
    assert batch is not None
    assert batch.group_ids == ("a",)


async def test_a_restart_admits_no_more_than_the_bound_allows(tmp_path: Path) -> None:
    """What an earlier process left counts, or recovery inflates the capacity (AReaL issue 1388)."""
    first = Run(tmp_path)
    await first.ready("a", "b")
    first.dispatch("c")
    first.dispatch("d")
    assert not first.queue.admits
    first.close()
    second = first.again()
    assert not second.queue.admits
    await second.queue.settle_batch(await second.take(0), 1)
    assert not second.queue.admits
    second.queue.advance_version(1)
    for name in "ef":
        assert second.queue.admits
        second.dispatch(name, version=1)
    assert not second.queue.admits


@pytest.mark.real_time  # a call waits in its thread
async def test_the_counts_of_a_scrape_agree_while_a_batch_is_being_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics()
    run = Run(tmp_path, metrics=metrics)
    await run.ready("a", "b")
    batch = await run.take()
    async with held(monkeypatch, run.ledger, "flush") as go:
        async with Nursery() as nursery:
            settling = nursery.start_task("settle", run.queue.settle_batch(batch, 1))
            await settled()
            assert not settling.done()
            assert run.queue.groups.ledger.counts().trained == 4
            assert value_of(metrics.trajectories_trained_total) == 4
            go()


async def test_a_trajectory_above_the_bound_is_never_handed_out(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.ready("a", "b")
    monkeypatch.setattr(Backlog, "overdue", lambda self, version: [])
    monkeypatch.setattr(Backlog, "select_batch", lambda self, version: ["a", "b"])
    with pytest.raises(InvariantError, match=r"staleness 2 exceeds rollout\.max_staleness = 1"):
        await run.queue.next_batch(2)
    assert run.queue.groups.backlog.num_ready == 2


class Work:
    """A group in flight as the queue sees it, its age and lengths at the test's will."""

    def __init__(self, oldest: int | None = None, **lengths: int) -> None:
        self.age, self.sampled, self.cancelled = oldest, lengths, False

    def oldest_version(self) -> int | None:
        return self.age

    def sampled_lengths(self) -> dict[str, int]:
        return self.sampled

    def straggled_s(self) -> float:
        return 0.0

    def cancel(self) -> None:
        self.cancelled = True


async def test_take_does_not_wait_for_a_group_that_is_younger_than_its_dispatch(run: Run) -> None:
    """A group may wait for an engine until newer weights are served: its age is that of its tokens."""
    run.queue.groups.dispatch_group("old", "task", 0, ["old-0"], 0, Work(oldest=1))
    run.queue.groups.dispatch_group("idle", "task", 1, ["idle-0"], 0, Work(oldest=None))
    run.next = 2
    await run.ready("c", "d", version=1)
    run.queue.advance_version(1)
    assert (await run.take(1)).group_ids == ("c", "d")


async def test_groups_that_are_due_are_given_up_when_batches_do_not_wait(tmp_path: Path) -> None:
    asked: list[int] = []

    def retry_task(position: int, reason: str) -> bool:
        asked.append(position)
        return True

    run = Run(tmp_path, staleness_policy="drop", groups_per_batch=1, retry_task=retry_task)
    due, waiting = Work(oldest=0, **{"due-0": 77}), Work(oldest=None)
    run.queue.groups.dispatch_group("due", "task", 0, ["due-0", "due-1"], 0, due)
    run.queue.groups.dispatch_group("waiting", "task", 1, ["waiting-0"], 0, waiting)
    run.next = 2
    run.queue.advance_version(1)
    await run.ready("fresh", version=1)
    batch = await run.take(1)
    assert batch.group_ids == ("fresh",)
    assert (due.cancelled, waiting.cancelled) == (True, False)
    counts = run.queue.groups.ledger.counts()
    assert (counts.dropped, run.queue.groups.backlog.num_in_flight) == ({"too_stale": 2}, 1)
    assert (asked, run.ledger.data_position().pending) == ([0], (0,))
    audit_ledger(run.ledger)


@pytest.mark.parametrize("staleness_policy", ["wait", "drop"])
async def test_a_batch_that_is_not_waited_for_costs_no_group_in_flight(
    tmp_path: Path, staleness_policy: str
) -> None:
    run = Run(tmp_path, staleness_policy=staleness_policy, groups_per_batch=1)
    assert await run.queue.next_batch(0, wait=False) is None  # there is nothing
    due = Work(oldest=0, **{"due-0": 77})
    run.queue.groups.dispatch_group("due", "task", 0, ["due-0"], 0, due)
    run.next = 1
    run.queue.advance_version(1)
    await run.ready("fresh", version=1)
    assert await run.queue.next_batch(1, wait=False) is None
    assert not due.cancelled
    run.queue.groups.cancel_group("due", "test")
    batch = await run.queue.next_batch(1, wait=False)
    assert batch is not None
    assert batch.group_ids == ("fresh",)


async def mixed(run: Run, name: str, *ages: tuple[tuple[int, int], ...]) -> None:
    """Put a group; each trajectory of (tokens, version) spans."""
    ids = [f"{name}-{i}" for i in range(len(ages))]
    run.queue.groups.dispatch_group(name, "task", run.next, ids, 0)
    run.next += 1
    trajectories = tuple(make_trajectory(i, name, sampled=spans) for i, spans in zip(ids, ages, strict=True))
    await run.put(MadeGroup(group_id=name, task_id="task", trajectories=trajectories))


async def test_only_tokens_within_the_bound_are_trained_when_older_ones_are_masked(tmp_path: Path) -> None:
    run = Run(tmp_path, staleness_policy="mask_tokens", min_group_size=2)
    run.queue.advance_version(3)
    await mixed(run, "a", ((4, 0), (2, 3)), ((5, 2),))
    await mixed(run, "b", ((3, 1), (1, 2), (1, 3)), ((2, 1),), ((2, 3),))
    batch = await run.take(3)
    assert batch.trajectory_ids == ("b-0", "b-2", "a-0", "a-1")  # b would lose b-1 before a loses any
    assert batch.staleness == (1, 0, 0, 1)
    assert batch.num_masked_tokens == 3 + 4
    packed = read_trajectories(batch)
    assert packed.weight_versions[packed.loss_mask].min() == 2
    assert packed.loss_mask.sum() == batch.num_sampled_tokens - batch.num_masked_tokens
    await run.queue.settle_batch(batch, 4)
    counts = run.queue.groups.ledger.counts()
    assert (counts.trained, counts.dropped) == (4, {"too_stale": 1})
    audit_ledger(run.ledger)


async def test_branches_are_no_siblings_when_masking_leaves_one_attempt(tmp_path: Path) -> None:
    run = Run(tmp_path, staleness_policy="mask_tokens", min_group_size=2, groups_per_batch=1)
    run.queue.advance_version(3)
    run.queue.groups.dispatch_group("a", "task", run.next, ["a-0", "a-1"], 0)
    run.next += 1
    run.ledger.record_branches("a-0", ["a-0.1"])
    ages = {"a-0": ((4, 3),), "a-0.1": ((5, 3),), "a-1": ((4, 0),)}
    tree = tuple(make_trajectory(name, "a", sampled=spans) for name, spans in ages.items())
    await run.put(MadeGroup(group_id="a", task_id="task", trajectories=tree))
    await mixed(run, "b", ((4, 3),), ((5, 3),))
    batch = await run.take(3)
    assert batch.group_ids == ("b",)
    assert run.queue.groups.ledger.counts().dropped == {"too_stale": 3}


async def test_what_was_masked_away_stays_dropped_when_the_batch_comes_again(tmp_path: Path) -> None:
    """After a crash the trainer may take the group at an older version: settled is settled."""
    first = Run(tmp_path, staleness_policy="mask_tokens", groups_per_batch=1)
    first.queue.advance_version(3)
    await mixed(first, "a", ((4, 1),), ((4, 1), (5, 3)))
    assert (await first.take(3)).trajectory_ids == ("a-1",)
    first.ledger.flush()
    second = first.again(step=2)
    batch = await second.take(2)
    assert batch.trajectory_ids == ("a-1",)
    await second.queue.settle_batch(batch, 3)
    counts = second.queue.groups.ledger.counts()
    assert (counts.trained, counts.dropped) == (1, {"too_stale": 1})
    audit_ledger(second.ledger)


async def test_lengths_of_all_that_ended_are_compared_with_those_of_what_was_trained(tmp_path: Path) -> None:
    first = Run(tmp_path, groups_per_batch=50, max_staleness=3)
    await first.ready(*(f"g{i}" for i in range(50)))
    run = first.again()  # a restart counts what an earlier process saw end
    await run.queue.settle_batch(await run.take(), 1)
    assert run.queue.groups.lengths.distance == 0.0
    ids = [f"lost-{i}" for i in range(100)]
    run.queue.groups.dispatch_group("lost", "task", 50, ids, 0, Work(0, **dict.fromkeys(ids, 1000)))
    run.queue.groups.drop_trajectories(ids[:50], "error")
    assert run.queue.groups.lengths.distance == pytest.approx(50 / 150)
    run.queue.groups.drop_group("lost", "straggler")
    assert run.queue.groups.lengths.distance == pytest.approx(100 / 200)


async def test_a_group_sampled_by_older_weights_than_was_said_is_dropped_not_trained(run: Run) -> None:
    run.queue.advance_version(3)
    run.dispatch("a", version=3)
    await run.put(make_group("a", version=1))
    await run.ready("b", "c", version=3)
    batch = await run.take(3)
    assert batch.group_ids == ("b", "c")
    assert run.queue.groups.ledger.counts().dropped == {"too_stale": 2}


@pytest.mark.real_time  # threads are told from the loop
async def test_a_dropped_group_is_deleted_in_a_thread_and_its_space_is_free_at_once(run: Run) -> None:
    await run.ready("a", "b", "c")
    used = run.spool.used_bytes
    with loop_blockers() as blockers:
        blockers.start()
        run.queue.groups.drop_group("c", "error")
        assert run.spool.used_bytes == used - sum(
            path.stat().st_size for path in run.spool.directory.glob("*/c-*")
        )
        crashed = [group.group_id for group in Ledger(run.folder / "ledger.sqlite").outstanding()]
        assert "c" in crashed
        assert "c-0" in run.files  # no restart may find a queued group without its frames
        blockers.places.clear()  # those of the crash
        await run.ready("d")
        blockers.stop()
    assert not blockers.places
    assert run.files == ["a-0", "a-1", "b-0", "b-1", "d-0", "d-1"]
    assert [group.group_id for group in Ledger(run.folder / "ledger.sqlite").outstanding()] == ["a", "b", "d"]


async def test_a_dropped_group_keeps_its_frames_while_the_drop_cannot_be_written(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.ready("a", "b", "c")
    stored = run.frame_of("c")
    run.queue.groups.drop_group("c", "error")
    with monkeypatch.context() as patch:
        patch.setattr(run.ledger, "flush", Mock(side_effect=AsyncRLError("no ledger")))
        with pytest.raises(AsyncRLError, match="no ledger"):
            run.queue.groups.flush_ledger()
    verify_frame(stored)
    run.queue.groups.flush_ledger()
    with pytest.raises(CorruptFrame):
        verify_frame(stored)


async def test_the_run_ends_with_the_cause_when_nothing_written_can_be_read_back(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_queue, "MAX_DAMAGED_GROUPS", 3)
    await run.ready("a", "b", "c")
    damage(run.frame_of("a"))
    assert (await run.take()).group_ids == ("b", "c")  # a batch begins the count again
    run.queue.advance_version(1)
    await run.ready("d", "e", "f", "g")
    for name in "defg":
        damage(run.frame_of(name))
    with pytest.raises(DataError, match=r"groups in a row cannot be read back .* the last one: .*; check"):
        await run.queue.next_batch(1)


async def test_a_trajectory_that_sampled_nothing_has_no_age(run: Run) -> None:
    run.dispatch("a", size=1)
    empty = make_trajectory("a-0", "a", sampled=((0, 0),))
    await run.put(MadeGroup(group_id="a", task_id="task", trajectories=(empty,)))
    await run.ready("b")
    assert (await run.take(1)).staleness == (0, 1, 1)


async def test_no_call_waits_any_more_when_the_queue_is_stopped(run: Run) -> None:
    for name in "abcd":
        run.dispatch(name)
    async with named_waits() as waited, Nursery() as nursery:
        admitted = nursery.start_task("feeder", run.queue.wait_for_admission())
        taken = nursery.start_task("trainer", run.queue.next_batch(0))
        await settled()
        assert waited().keys() == {"admission", "batch"}
        run.queue.stop()
    assert (admitted.result(), taken.result()) == (False, None)
    await run.put(make_group("a"))  # what is in flight is kept
    assert run.queue.groups.backlog.num_ready == 1


async def test_the_last_batches_are_handed_out_when_the_data_has_ended(run: Run) -> None:
    await run.ready("a", "b", "c")
    run.dispatch("d")
    run.queue.end_data()
    assert not await run.queue.wait_for_admission()
    await run.queue.settle_batch(await run.take(0), 1)
    async with Nursery() as nursery:
        taken = nursery.start_task("trainer", run.queue.next_batch(1))
        await settled()
        assert not taken.done()  # d may still come
        run.queue.groups.drop_group("d", "error")
        assert await taken is None
    assert run.queue.groups.ledger.counts().queued == 2


@pytest.mark.real_time  # a call waits in its thread
async def test_groups_are_ready_again_when_take_is_cancelled_while_it_packs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.ready("a", "b", "c")
    async with held(monkeypatch, frames, "verify_frame") as go:
        async with Nursery() as nursery:
            taking = nursery.start_task("take", run.queue.next_batch(0))
            await settled()
            with pytest.raises(InvariantError, match="the trainer has"):
                run.queue.groups.drop_group("a", "error")
            taking.cancel()
            go()
    assert taking.cancelled()
    assert run.queue.groups.backlog.num_ready == 3
    monkeypatch.undo()
    assert (await run.take(0)).group_ids == ("a", "b")


async def test_finished_work_is_kept_when_the_driver_dies(tmp_path: Path) -> None:
    first = Run(tmp_path)
    await first.ready("a", "b", "c")
    first.dispatch("d")
    first.ledger.flush()
    taken = await first.take(0)  # by a trainer that will not finish its step

    second = first.again()
    assert second.position.pending == ()
    counts = second.queue.groups.ledger.counts()
    assert (counts.queued, counts.in_flight, counts.dropped) == (6, 2, {})
    (left,) = second.queue.groups.restored
    assert (left.group_id, left.position, left.root_ids) == ("d", 3, ("d-0", "d-1"))
    batch = await second.take(0)
    assert batch.trajectory_ids == taken.trajectory_ids
    await second.queue.settle_batch(batch, 1)

    third = second.again(step=0)  # the checkpoint of step 1 was not written
    assert third.position.pending == (0, 1)
    assert third.queue.groups.backlog.num_ready == 1
    audit_ledger(third.ledger)


async def test_a_damaged_or_lost_frame_of_an_earlier_process_is_found_with_its_batch(tmp_path: Path) -> None:
    """A start does not read all that is ready."""
    first = Run(tmp_path)
    await first.ready("a", "b", "c", "d")
    refs = {name: first.frame_of(name) for name in "abc"}
    damage(refs["a"])
    Path(refs["b"].path).unlink()
    make_group("orphan").stored_in(first.spool.directory)

    second = first.again()
    assert second.queue.groups.ledger.counts().dropped == {}
    assert (await second.take()).group_ids == ("c", "d")
    assert second.ledger.data_position().pending == (0, 1)
    assert second.queue.groups.ledger.counts().dropped == {"corrupt": 4}
    second.queue.groups.flush_ledger()
    assert second.files == ["c-0", "c-1", "d-0", "d-1"]
    audit_ledger(second.ledger)


async def test_frames_are_found_when_the_run_was_moved(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    first = Run(tmp_path / "here")
    await first.ready("a", "b")
    first.close()
    moved = Run((tmp_path / "here").rename(tmp_path / "there"))
    batch = await moved.take()
    assert read_trajectories(batch).num_trajectories == 4
