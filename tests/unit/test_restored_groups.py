"""What a queue takes over of groups that were in flight: as old as they are, and what has ended of them."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import pytest

from async_rl.errors import InvariantError
from async_rl.runtime.supervision import Nursery
from async_rl.store import frames
from async_rl.store.frames import read_columns, read_trajectories
from async_rl.store.ledger import Ledger
from async_rl.store.outstanding import frames_in_flight
from async_rl.store.progress import ProgressReport
from async_rl.store.spool import Spool
from async_rl.store.trajectory_queue import TrajectoryQueue
from async_rl.types import Completion, Group, StoredTrajectory, TakenBatch, Trajectory
from tests.support.queues import make_queue
from tests.support.trajectories import FACTS, MadeGroup, make_group, make_trajectory, roll_back

SPOOLS: WeakKeyDictionary[TrajectoryQueue, Spool] = WeakKeyDictionary()


async def read_batch(batch: TakenBatch) -> dict[str, str]:
    return frames.find_flaws(batch.trajectories)


def open_queue(
    folder: Path, step: int, *journalled: tuple[str, ProgressReport], **settings: Any
) -> TrajectoryQueue:
    ledger = Ledger(folder / "ledger.sqlite")
    roll_back(ledger, step)
    most = settings.pop("max_bytes", None)
    spool = Spool(folder / "spool", most)
    queue = make_queue(
        ledger,
        spool,
        read_batch=read_batch,
        **{"groups_per_batch": 2, "max_staleness": 1, "facts": FACTS, "version": step, **settings},
    )
    SPOOLS[queue] = spool
    flaws = frames.find_flaws(frames_in_flight(ledger, spool.directory))
    queue.groups.restore_groups(dict(journalled), flaws)
    return queue


def files(folder: Path) -> list[str]:
    """The trajectories whose frames are in the spool of a folder."""
    return sorted(path.name.rpartition("-")[0] for path in (folder / "spool").glob("*/*"))


def dispatch(queue: TrajectoryQueue, *names: str, version: int = 0) -> None:
    for name in names:
        queue.groups.dispatch_group(
            name, "task", len(queue.view().in_flight), [f"{name}-0", f"{name}-1"], version
        )


def end(queue: TrajectoryQueue, trajectory: Trajectory, *, scored: bool = True) -> StoredTrajectory:
    """Store a trajectory whose attempt has ended before its group."""
    spool, name = SPOOLS[queue], trajectory.trajectory_id
    (stored,) = spool.store_tree([trajectory])
    completion = Completion(messages=[], text="", stop_reason="completed")
    completions = {} if scored else {name: spool.store_completion(name, completion)}
    queue.groups.finish_tree(stored, completions=completions)
    return stored


async def put(queue: TrajectoryQueue, group: MadeGroup) -> None:
    await queue.put_group(group.stored_in(SPOOLS[queue].directory))
    queue.groups.flush_ledger()


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
        await put(queue, make_group(name, version=1))
    async with asyncio.timeout(60), Nursery() as nursery:
        taking = nursery.start_task("take", queue.next_batch(1))
        if waits:
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not taking.done()
            await put(queue, make_group("left", version=0))
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
    end(first, ended)
    first.groups.ledger.record_attempt("g-1", 2)
    first.close()
    queue = open_queue(tmp_path, 0)
    (left,) = queue.groups.restored
    assert left.root_ids == ("g-0", "g-1")
    assert left.attempts == {"g-1": 2}
    assert list(left.stored) == ["g-0"]
    again = left.stored["g-0"]
    assert (again.reward, again.num_turns) == (ended.reward, ended.outcome.num_turns)
    columns = read_columns(again)
    assert np.array_equal(columns["token_ids"], ended.token_ids)
    assert ended.trace is not None
    assert np.array_equal(columns["routed_experts"], ended.trace.rows)
    await put(queue, MadeGroup(group_id="g", task_id="task", trajectories=(again, other)))
    queue.close()
    assert files(tmp_path) == ["g-0", "g-1"]


async def test_a_trajectory_is_made_again_when_what_was_kept_of_it_is_damaged(tmp_path: Path) -> None:
    first = open_queue(tmp_path, 0)
    dispatch(first, "g", "h")
    damaged = end(first, make_group("g").trajectories[0])
    lost = end(first, make_group("h").trajectories[1])
    first.close()
    data = bytearray(Path(damaged.path).read_bytes())
    data[-1] ^= 1
    Path(damaged.path).write_bytes(data)
    Path(lost.path).unlink()
    Path(lost.path).with_name("orphan-1").write_bytes(b"")
    queue = open_queue(tmp_path, 0)
    assert [dict(left.stored) for left in queue.groups.restored] == [{}, {}]
    assert files(tmp_path) == []
    queue.close()


@pytest.mark.parametrize("damage", ["garbage", "another", "nbytes", "span", "version"])
async def test_a_group_alone_is_lost_when_the_ledger_has_damaged_references(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_queue(tmp_path, 0)
    dispatch(first, "g", "ready", "well")
    end(first, make_group("g").trajectories[0])
    await put(first, make_group("ready"))
    await put(first, make_group("well"))
    first.close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)) as database:
        for name in ("g-0", "ready-1"):
            ((entry,),) = database.execute("SELECT stored FROM trajectories WHERE trajectory_id = ?", [name])
            value = msgspec.msgpack.decode(entry)
            value |= {"another": {"trajectory_id": "x"}, "nbytes": {"nbytes": 10**15}}.get(damage, {})
            value["spans"][0] |= {"span": {"length": -1}, "version": {"weight_version": "x"}}.get(damage, {})
            broken = b"\xc1" if damage == "garbage" else msgspec.msgpack.encode(value)
            database.execute("UPDATE trajectories SET stored = ? WHERE trajectory_id = ?", [broken, name])
    queue = open_queue(tmp_path, 0, groups_per_batch=1)
    assert [(left.group_id, dict(left.stored)) for left in queue.groups.restored] == [("g", {})]
    queue.groups.drop_group("g", "restart")  # batches wait for it
    batch = await queue.next_batch(0)
    assert batch is not None
    assert batch.group_ids == ("well",)
    assert "trajectory g-0 is damaged" in caplog.text
    assert "trajectory ready-1 is damaged" in caplog.text
    queue.close()


@pytest.mark.parametrize("tokens", [4, 20_000])
def test_a_frame_that_the_disk_cannot_read_is_a_flaw(
    tmp_path: Path, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = make_group("g", tokens=tokens).stored_in(tmp_path / "spool").trajectories[0]
    assert (stored.nbytes > 128 << 10) is (tokens > 4), "a large frame is mapped"
    assert frames.find_flaws([stored]) == {}
    for name in ("pread", "preadv"):
        monkeypatch.setattr(os, name, Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    assert frames.find_flaws([stored]) == {"g-0": f"{stored.path} cannot be read: Input/output error"}


async def test_nothing_is_kept_of_what_was_dropped(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, 0)
    dispatch(queue, "g")
    ended = end(queue, make_group("g").trajectories[0])
    end(queue, make_group("g").trajectories[1], scored=False)
    queue.groups.drop_group("g", "error")
    with pytest.raises(InvariantError):
        queue.groups.finish_tree(ended)
    queue.groups.flush_ledger()
    assert files(tmp_path) == []
    queue.close()


async def test_a_trajectory_without_its_reward_is_left_to_the_journal_by_a_restart(tmp_path: Path) -> None:
    first = open_queue(tmp_path, 0)
    dispatch(first, "g")
    end(first, make_group("g").trajectories[0], scored=False)
    first.groups.flush_ledger()
    assert files(tmp_path) == ["g-0", "g-0-completion"]
    second = open_queue(tmp_path, 0)
    (left,) = second.groups.restored
    assert left.stored == {}
    assert files(tmp_path) == []
    second.close()


async def test_completions_are_deleted_when_the_group_is_queued(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, 0)
    dispatch(queue, "g")
    group = make_group("g")
    stored = tuple(end(queue, each, scored=False) for each in group.trajectories)
    queue.groups.flush_ledger()
    assert files(tmp_path) == ["g-0", "g-0-completion", "g-1", "g-1-completion"]
    await queue.put_group(Group(group_id="g", trajectories=stored))
    queue.groups.flush_ledger()
    assert files(tmp_path) == ["g-0", "g-1"]
    queue.close()


async def test_labels_of_versions_that_are_no_more_count_as_the_checkpoints_own(tmp_path: Path) -> None:
    first = open_queue(tmp_path, 4, max_staleness=3)
    dispatch(first, "queued", "left", version=4)
    parts = [make_trajectory(f"queued-{i}", "queued", sampled=((2, 3), (3, 6))) for i in range(2)]
    await put(first, MadeGroup(group_id="queued", task_id="task", trajectories=tuple(parts)))
    end(first, make_trajectory("left-0", "left", sampled=((3, 6),)))
    first.close()
    queue = open_queue(tmp_path, 4, max_staleness=3)
    (left,) = queue.groups.restored
    assert left.stored["left-0"].oldest_weight_version == 4
    queue.close()
    third = open_queue(tmp_path, 5, max_staleness=3)  # a later checkpoint, but 4 was gone back to
    (left,) = third.groups.restored
    await put(
        third,
        MadeGroup(
            group_id="left",
            task_id="task",
            trajectories=(left.stored["left-0"], make_trajectory("left-1", "left", sampled=((2, 5),))),
        ),
    )
    batch = await third.next_batch(5)
    assert batch is not None
    packed = read_trajectories(batch)
    versions, unknown = packed.weight_versions, packed.lag_unknown
    assert sorted(versions[versions >= 0].tolist()) == [3] * 4 + [4] * 6 + [4] * 3 + [5] * 2
    assert unknown is not None  # version 6 sampled them, or its rows are replayed with them
    assert sorted(versions[unknown].tolist()) == [3] * 4 + [4] * 9
    third.close()


async def test_the_youngest_groups_are_dropped_when_the_spool_cannot_hold_all_that_was_in_flight(
    tmp_path: Path,
) -> None:
    settings: Any = {"max_bytes": (2 << 16) + (1 << 13), "max_staleness": 5}
    first = open_queue(tmp_path, 3, **settings)
    dispatch(first, *"abcdef", version=3)
    for name in "ab":
        await put(first, make_group(name, version=3))
    first.close()
    queue = open_queue(tmp_path, 3, journalled("d-0", 2), journalled("c-0", 1), **settings)
    assert {left.group_id for left in queue.groups.restored} == {"c", "d"}
    counts = queue.groups.ledger.counts()
    assert (counts.in_flight, counts.queued, counts.dropped) == (4, 4, {"restart": 4})
    for name in "cd":
        await put(queue, make_group(name, version=3))
    queue.close()


def test_a_group_is_no_longer_left_when_it_is_dropped_before_anybody_makes_it(tmp_path: Path) -> None:
    first = open_queue(tmp_path, 0)
    dispatch(first, "a", "b")
    first.close()
    queue = open_queue(tmp_path, 0)
    assert queue.view().restored == ("a", "b")
    queue.groups.cancel_group("a", "lost")
    assert [left.group_id for left in queue.groups.restored] == ["b"]
    assert queue.groups.ledger.counts().dropped == {"lost": 2}
    queue.close()
