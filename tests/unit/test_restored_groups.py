"""What a queue takes over of groups that were in flight: as old as they are, and what has ended of them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.errors import InvariantError
from async_rl.queue.batching import read_trajectories
from async_rl.queue.frames import read_columns
from async_rl.queue.ledger import Ledger
from async_rl.queue.progress import ProgressReport
from async_rl.queue.spool import Spool
from async_rl.queue.trajectory_queue import TrajectoryQueue
from async_rl.runtime.supervision import Nursery
from async_rl.types import Group, StoredTrajectory, Trajectory
from tests.support.trajectories import FACTS, make_group, make_trajectory


def open_queue(
    folder: Path, step: int, *journalled: tuple[str, ProgressReport], **settings: Any
) -> TrajectoryQueue:
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.rollback(step)
    most = settings.pop("max_bytes", None)
    queue = TrajectoryQueue(
        ledger,
        Spool(folder / "spool", most),
        **{"groups_per_batch": 2, "max_staleness": 1, "facts": FACTS, "version": step, **settings},
    )
    queue.restore_groups(dict(journalled))
    return queue


def dispatch(queue: TrajectoryQueue, *names: str, version: int = 0) -> None:
    for name in names:
        queue.dispatch_group(name, "task", len(queue.view().in_flight), [f"{name}-0", f"{name}-1"], version)


async def keep(queue: TrajectoryQueue, trajectory: Trajectory) -> None:
    queue.finished.add_tree(trajectory)
    assert await queue.finished.store_pending() == [trajectory.trajectory_id]


def journalled(name: str, *versions: int) -> tuple[str, ProgressReport]:
    return name, ProgressReport(
        oldest_version=min(versions), newest_version=max(versions), num_sampled_tokens=2 * len(versions)
    )


@pytest.mark.parametrize(("versions", "waits"), [((0, 1), True), ((1,), False), ((5,), False), ((), False)])
async def test_a_batch_waits_for_a_group_that_is_due_by_what_the_journal_has_of_it(
    tmp_path: Path, versions: tuple[int, ...], waits: bool
) -> None:
    first = open_queue(tmp_path, 0)
    dispatch(first, "left")
    first.close()
    queue = open_queue(tmp_path, 1, *([journalled("left-1", *versions)] if versions else []))
    dispatch(queue, "a", "b", version=1)
    for name in "ab":
        await queue.put_group(make_group(name, version=1))
    async with Nursery() as nursery:
        taking = nursery.start_task("take", queue.next_batch(1))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert taking.done() is not waits
        if waits:
            await queue.put_group(make_group("left", version=0))
    batch = taking.result()
    assert batch is not None
    assert ("left" in batch.group_ids) is waits
    queue.close()


async def test_a_trajectory_that_has_ended_is_there_after_a_restart_until_its_group_is_queued(
    tmp_path: Path,
) -> None:
    first = open_queue(tmp_path, 0)
    dispatch(first, "g")
    ended, other = make_group("g").trajectories
    await keep(first, ended)
    first.start_attempt("g-1", 2)
    first.close()
    queue = open_queue(tmp_path, 0)
    (left,) = queue.restored_groups
    assert left.trajectory_ids == ("g-0", "g-1")
    assert left.attempts == {"g-1": 2}
    assert list(left.finished) == ["g-0"]
    again = left.finished["g-0"]
    assert (again.reward, again.num_turns) == (ended.reward, ended.outcome.num_turns)
    columns = read_columns(again)
    assert np.array_equal(columns["token_ids"], ended.token_ids)
    assert ended.trace is not None
    assert np.array_equal(columns["routed_experts"], ended.trace.rows)
    await queue.put_group(Group(group_id="g", task_id="task", trajectories=(again, other)))
    queue.close()
    assert sorted(path.name for path in (tmp_path / "spool").iterdir()) == ["g-0", "g-1"]


async def test_a_trajectory_is_made_again_when_what_was_kept_of_it_is_damaged(tmp_path: Path) -> None:
    first = open_queue(tmp_path, 0)
    dispatch(first, "g", "h")
    await keep(first, make_group("g").trajectories[0])
    await keep(first, make_group("h").trajectories[1])
    first.close()
    kept = tmp_path / "spool"
    data = bytearray((kept / "g-0").read_bytes())
    data[-1] ^= 1
    (kept / "g-0").write_bytes(data)
    (kept / "h-1").unlink()
    (kept / "orphan").write_bytes(b"")
    queue = open_queue(tmp_path, 0)
    assert [dict(left.finished) for left in queue.restored_groups] == [{}, {}]
    assert list(kept.iterdir()) == []
    queue.close()


async def test_nothing_is_kept_of_what_was_dropped(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, 0)
    dispatch(queue, "g")
    ended = make_group("g").trajectories[0]
    await keep(queue, ended)
    queue.drop_group("g", "error")
    with pytest.raises(InvariantError):
        queue.finished.add_tree(ended)
    assert await queue.finished.store_pending() == []
    queue.flush_ledger()
    assert list((tmp_path / "spool").iterdir()) == []
    queue.close()


@pytest.mark.parametrize("how", ["put", "drop"])
async def test_nothing_is_left_of_what_was_settled_while_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    queue = open_queue(tmp_path, 0)
    dispatch(queue, "g")
    group = make_group("g")
    queue.finished.add_tree(group.trajectories[0])
    put, begun, go = Spool.write_trajectory, threading.Event(), threading.Event()

    def put_slowly(self: Spool, trajectory: Trajectory) -> StoredTrajectory:
        begun.set()
        go.wait(10)
        return put(self, trajectory)

    monkeypatch.setattr(Spool, "write_trajectory", put_slowly)
    async with Nursery() as nursery:
        keeping = nursery.start_task("keep", queue.finished.store_pending())
        await asyncio.to_thread(begun.wait, 10)
        if how == "put":
            await queue.put_group(group)
        else:
            queue.drop_group("g", "error")
        go.set()
    assert keeping.result() == []
    queue.close()
    left = sorted(path.name for path in (tmp_path / "spool").iterdir())
    assert left == (["g-0", "g-1"] if how == "put" else [])


async def test_labels_of_versions_that_are_no_more_count_as_the_checkpoints_own(tmp_path: Path) -> None:
    first = open_queue(tmp_path, 4, max_staleness=3)
    dispatch(first, "queued", "left", version=4)
    parts = [make_trajectory(f"queued-{i}", "queued", sampled=((2, 3), (3, 6))) for i in range(2)]
    await first.put_group(Group(group_id="queued", task_id="task", trajectories=tuple(parts)))
    await keep(first, make_trajectory("left-0", "left", sampled=((3, 6),)))
    first.close()
    queue = open_queue(tmp_path, 4, max_staleness=3)
    (left,) = queue.restored_groups
    assert left.finished["left-0"].oldest_weight_version == 4
    queue.close()
    third = open_queue(tmp_path, 5, max_staleness=3)  # a later checkpoint, but 4 was gone back to
    (left,) = third.restored_groups
    await third.put_group(
        Group(
            group_id="left",
            task_id="task",
            trajectories=(left.finished["left-0"], make_trajectory("left-1", "left", sampled=((2, 5),))),
        )
    )
    batch = await third.next_batch(5)
    assert batch is not None
    packed = read_trajectories(batch)
    versions, undone = packed.weight_versions, packed.undone
    assert sorted(versions[versions >= 0].tolist()) == [3] * 4 + [4] * 6 + [4] * 3 + [5] * 2
    assert undone is not None
    assert versions[undone].tolist() == [4] * 9  # so that no figure takes them for tokens of version 4
    third.close()


async def test_the_youngest_groups_are_dropped_when_the_spool_cannot_hold_all_that_was_in_flight(
    tmp_path: Path,
) -> None:
    settings: Any = {"max_bytes": (2 << 16) + (1 << 13), "max_staleness": 5}
    first = open_queue(tmp_path, 3, **settings)
    dispatch(first, *"abcdef", version=3)
    for name in "ab":
        await first.put_group(make_group(name, version=3))
    first.close()
    queue = open_queue(tmp_path, 3, journalled("d-0", 2), journalled("c-0", 1), **settings)
    assert {left.group_id for left in queue.restored_groups} == {"c", "d"}
    counts = queue.statistics()
    assert (counts.in_flight, counts.queued, counts.dropped) == (4, 4, {"restart": 4})
    for name in "cd":
        await queue.put_group(make_group(name, version=3))
    queue.close()


def test_a_group_is_no_longer_left_when_it_is_dropped_before_anybody_makes_it(tmp_path: Path) -> None:
    first = open_queue(tmp_path, 0)
    dispatch(first, "a", "b")
    first.close()
    queue = open_queue(tmp_path, 0)
    assert queue.view().restored == ("a", "b")
    queue.cancel_group("a", "lost")
    assert [left.group_id for left in queue.restored_groups] == ["b"]
    assert queue.statistics().dropped == {"lost": 2}
    queue.close()
