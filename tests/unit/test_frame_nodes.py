"""Frames on other nodes: deleted there, awaited while a node is absent, lost with it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from ray.exceptions import GetTimeoutError

from async_rl.errors import DataError, NodeUnreachable, SpoolFull
from async_rl.observability.metrics import Metrics, value_of
from async_rl.placement import frame_readers
from async_rl.placement.frame_readers import FrameReaders, RayFrameReader
from async_rl.runtime.supervision import Nursery
from async_rl.store import trajectory_queue
from async_rl.store.frame_reader import LocalFrameReader
from async_rl.store.frames import find_flaws, read_completion, verify_frame
from async_rl.store.journal_folders import JournalFolders
from async_rl.store.ledger import Ledger
from async_rl.store.spool import Spool, SpoolFolder
from async_rl.types import Completion, Group, StoredTrajectory, TakenBatch
from tests.support.ledgers import audit_ledger
from tests.support.queues import make_queue
from tests.support.trajectories import FACTS, make_trajectory, roll_back
from verification.simulation.simulated_workers import SimulatedNodes

NODE = "node-1-0"


class Nodes:
    """A spool whose driver and whose worker are on nodes of their own; `again` opens it after a restart."""

    def __init__(self, folder: Path, nodes: SimulatedNodes | None = None) -> None:
        self.folder, self.disks = folder, folder / "disks"
        self.nodes = nodes or SimulatedNodes()
        self.now_s = 0.0
        self.spool = Spool(
            folder / "run" / "spool",
            None,
            node="driver",
            node_directory=self.disks,
            open_reader=lambda node: self.nodes.open_reader(node, self.disks / node, lambda: self.now_s),
        )
        self.worker = self.new_worker()

    def new_worker(self) -> SpoolFolder:
        folder = self.spool.new_folder("rollout-worker-0")
        return SpoolFolder(folder, NODE, frames=self.spool.frame_folder(folder, NODE))

    def store(self, *names: str, version: int = 0) -> tuple[StoredTrajectory, ...]:
        """Let the worker store trajectories, which the driver holds."""
        group_ids = [name.partition("-")[0] for name in names]
        stored = self.worker.store_tree(
            [
                make_trajectory(name, sampled=((4, version),), group_id=group_id)
                for name, group_id in zip(names, group_ids, strict=True)
            ]
        )
        self.spool.hold(stored)
        return stored

    def files(self, node: str = NODE) -> list[str]:
        """The trajectories whose frames are on a node."""
        found = (path for path in (self.disks / node).glob("*/*") if path.is_file())
        return sorted(path.name.rpartition("-")[0] for path in found)

    async def read_batch(self, batch: TakenBatch) -> dict[str, str]:
        """Read frames as ranks on the driver's node do."""
        for node in {entry.node for entry in batch.trajectories}:
            self.nodes.require(node, self.now_s)
        return find_flaws(batch.trajectories)

    def stay_away(self, for_s: float = 10.0) -> None:
        self.nodes.stay_away(NODE, self.now_s + for_s)

    def lose(self) -> None:
        self.nodes.lose(NODE, [self.disks / NODE])
        self.spool.nodes.ping_nodes(1.0)
        for node in self.spool.absent:
            self.spool.give_up(node)

    def again(self) -> Nodes:
        return Nodes(self.folder, self.nodes)


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def test_completions_are_in_the_folder_of_the_run_until_they_are_scored(nodes: Nodes) -> None:
    completion = Completion(messages=[], text="yes", stop_reason="completed")
    held, unheard = (nodes.worker.store_completion(name, completion) for name in ("a", "b"))
    nodes.spool.hold([held])
    nodes.store("a")
    assert (nodes.files(), held.node) == (["a"], "")
    assert Path(held.path).parent == nodes.spool.directory / nodes.worker.directory.name
    nodes.spool.end_folder(nodes.worker.directory, NODE)
    assert not Path(unheard.path).exists()
    assert read_completion(held).text == "yes"
    nodes.spool.discard([held])
    nodes.spool.delete_discarded()
    assert sorted(path.name for path in nodes.spool.directory.iterdir()) == ["000001-driver", "000002"]


def test_what_a_node_did_not_confirm_to_have_deleted_is_deleted_when_it_is_back(nodes: Nodes) -> None:
    stored = nodes.store("reported")
    nodes.worker.store_tree([make_trajectory("unreported")])
    nodes.spool.nodes.ping_nodes(1.0)
    nodes.stay_away()  # which nothing has noticed yet
    nodes.spool.discard(stored)
    nodes.spool.delete_discarded()
    nodes.spool.end_folder(nodes.worker.directory, NODE)
    nodes.now_s = 20.0
    nodes.spool.nodes.ping_nodes(1.0)  # it is back, and has answered neither
    assert (nodes.files(), nodes.spool.absent) == (["reported", "unreported"], {NODE})
    nodes.spool.nodes.ping_nodes(1.0)
    nodes.spool.delete_discarded()
    assert nodes.files() == []


def test_a_restart_deletes_on_other_nodes_what_the_ledger_does_not_name(nodes: Nodes) -> None:
    kept, _ = nodes.store("kept", "orphan")
    again = nodes.again()
    again.store("new")
    again.spool.recover_frames([kept], [])
    assert again.files() == ["kept", "new", "orphan"]  # nothing was asked of the node yet
    again.spool.nodes.ping_nodes(1.0)
    assert again.files() == ["kept", "new"]


def test_the_driver_before_deletes_nothing_of_workers_that_have_started_since(nodes: Nodes) -> None:
    kept = nodes.store("kept")
    nodes.spool.nodes.ping_nodes(1.0)
    nodes.spool.absent.add(NODE)
    nodes.spool.end_folder(nodes.worker.directory, NODE)
    again = nodes.again()  # while the one before waits for the node in a thread
    again.spool.recover_frames(kept, [])
    again.store("new")
    nodes.spool.nodes.ping_nodes(1.0)
    assert again.files() == ["kept", "new"]
    again.store("more")


def test_each_node_has_the_bound_and_what_is_to_come_is_spread_as_what_was(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    ours = here(nodes, "g-0")
    theirs = nodes.store("g-1", "g-2", "g-3")
    each = ours[0].nbytes
    nodes.spool.max_bytes = 6 * each
    nodes.spool.use_group((*ours, *theirs))  # a quarter is here, three quarters are there
    assert nodes.spool.used_bytes == 3 * each
    nodes.spool.largest_group = each
    assert nodes.spool.fits_groups(4)
    nodes.spool.largest_group = each + 1
    assert not nodes.spool.fits_groups(4)
    assert nodes.spool.describe() == f"the spool of node {NODE} holds {3 * each} of {6 * each} bytes"
    nodes.spool.use_group(nodes.store("h-0", "h-1", "h-2"))
    with pytest.raises(SpoolFull, match=rf"spool of node {NODE} holds \d+ bytes, .* exceed queue\.max_bytes"):
        nodes.spool.use_group((*here(nodes, "i-0"), *nodes.store("i-1")))
    assert nodes.spool.fits_groups(0)
    nodes.spool.use_group(here(nodes, "i-0"))
    nodes.lose()
    nodes.spool.discard(theirs)
    nodes.spool.largest_group = each
    assert nodes.spool.fits_groups(4)  # all of it here, from now on


class NodesQueue:
    """A queue over `Nodes`; batches of two groups."""

    def __init__(self, nodes: Nodes, step: int = 0) -> None:
        self.nodes, self.metrics = nodes, Metrics()
        self.ledger = Ledger(nodes.folder / "ledger.sqlite")
        roll_back(self.ledger, step)
        self.queue = make_queue(
            self.ledger,
            nodes.spool,
            groups_per_batch=2,
            max_staleness=1,
            facts=FACTS,
            version=step,
            metrics=self.metrics,
            read_batch=nodes.read_batch,
        )
        self.queue.groups.restore_groups()

    def dispatch(self, *group_ids: str) -> None:
        for position, group_id in enumerate(group_ids):
            names = [f"{group_id}-0", f"{group_id}-1"]
            self.queue.groups.dispatch_group(group_id, "task", position, names, 0)

    async def put(self, group_id: str, *stored: Sequence[StoredTrajectory]) -> None:
        trajectories = tuple(entry for part in stored for entry in part)
        await self.queue.put_group(Group(group_id=group_id, trajectories=trajectories))

    async def put_two(self, *of_g: StoredTrajectory) -> None:
        """Make two groups ready: one of these trajectories, and one on the driver's node."""
        self.dispatch("g", "h")
        await self.put("g", of_g)
        await self.put("h", here(self.nodes, "h-0"), here(self.nodes, "h-1"))

    async def put_three(self) -> list[StoredTrajectory]:
        """Make three groups ready, of the first two a trajectory each on another node; return these."""
        self.dispatch("g", "h", "i")
        there = [*self.nodes.store("g-0"), *self.nodes.store("h-0")]
        for entry in there:
            group_id = entry.trajectory_id[0]
            await self.put(group_id, [entry], here(self.nodes, f"{group_id}-1"))
        await self.put("i", here(self.nodes, "i-0"), here(self.nodes, "i-1"))
        return there

    async def next_batch(self) -> TakenBatch:
        batch = await self.queue.next_batch(0)
        assert batch is not None
        return batch

    def close(self) -> None:
        audit_ledger(self.ledger)
        self.queue.close()


@pytest.fixture
def opened(nodes: Nodes) -> Iterator[NodesQueue]:
    opened = NodesQueue(nodes)
    yield opened
    opened.close()


def here(nodes: Nodes, name: str) -> tuple[StoredTrajectory, ...]:
    """Store a trajectory on the driver's node."""
    return nodes.spool.store_tree([make_trajectory(name, sampled=((4, 0),), group_id=name.partition("-")[0])])


async def test_a_batch_waits_for_a_node_that_is_absent(opened: NodesQueue) -> None:
    queue, nodes = opened.queue, opened.nodes
    await opened.put_two(*nodes.store("g-0", "g-1"))
    nodes.stay_away()
    async with Nursery() as nursery:
        taking = nursery.start_task("take", opened.next_batch())
        while not nodes.spool.absent:  # noqa: ASYNC110  the end of a thread notifies no waiter
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not taking.done()
        nodes.now_s = 20.0
        nodes.spool.nodes.ping_nodes(1.0)
        queue.groups.follow_nodes()
        batch = await taking
    assert batch.group_ids == ("g", "h")
    assert queue.groups.ledger.counts().dropped == {}


async def test_a_group_that_its_node_has_no_space_for_waits_for_one_elsewhere(opened: NodesQueue) -> None:
    queue, nodes = opened.queue, opened.nodes
    opened.dispatch("g", "h", "i")
    g, h = nodes.store("g-0", "g-1"), nodes.store("h-0", "h-1")
    nodes.spool.max_bytes = sum(each.nbytes for each in (*g, *h[:1]))
    await opened.put("g", g)
    async with Nursery() as nursery:
        putting = nursery.start_task("put", opened.put("h", h))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not putting.done()
        await opened.put("i", here(nodes, "i-0"), here(nodes, "i-1"))
        batch = await opened.next_batch()
        assert batch.group_ids == ("g", "i")
        await queue.settle_batch(batch, 1)
    assert queue.groups.backlog.num_ready == 1


async def test_an_error_says_so_when_all_groups_wait_for_space(opened: NodesQueue) -> None:
    queue, nodes = opened.queue, opened.nodes
    opened.dispatch("g", "h", "i")
    g, h, i = (nodes.store(f"{name}-0", f"{name}-1") for name in "ghi")
    nodes.spool.max_bytes = sum(each.nbytes for each in (*g, *h[:1]))
    await opened.put("g", g)

    async def put_all() -> None:
        async with Nursery() as nursery:
            nursery.start_task("put", opened.put("h", h))
            await asyncio.sleep(0)
            nursery.start_task("put", opened.put("i", i))

    with pytest.raises(ExceptionGroup) as raised:
        await put_all()
    assert {type(error) for error in raised.value.exceptions} == {SpoolFull}
    assert "queue.max_bytes" in str(raised.value.exceptions[0])
    assert queue.groups.backlog.num_in_flight == 2


async def lose_part_of_a_group(opened: NodesQueue) -> None:
    """Make two groups ready; a node is lost that has one trajectory of one of them."""
    await opened.put_two(*opened.nodes.store("g-0"), *here(opened.nodes, "g-1"))
    opened.nodes.lose()
    opened.queue.groups.follow_nodes()


async def finish_lost_part(opened: NodesQueue) -> TakenBatch:
    """Sample the trajectory again, and take the batch."""
    (left,) = opened.queue.groups.restored
    assert (left.group_id, opened.queue.groups.backlog.oldest_version("g"), left.root_ids) == (
        "g",
        0,
        ("g-0", "g-1"),
    )
    assert left.stored.keys() == {"g-1"}
    opened.queue.groups.resume_group("g", work=None)  # type: ignore[arg-type]
    again = here(opened.nodes, "g-0")
    opened.queue.groups.finish_tree(*again)
    await opened.put("g", tuple(left.stored.values()))
    return await opened.next_batch()


async def test_only_what_was_lost_of_a_ready_group_is_sampled_again(opened: NodesQueue) -> None:
    await lose_part_of_a_group(opened)
    counts = opened.queue.groups.ledger.counts()
    assert (counts.in_flight, counts.queued, counts.dropped) == (2, 2, {})
    assert opened.queue.groups.backlog.num_ready == 1
    assert value_of(opened.metrics.attempts_restarted_total) == 1
    batch = await finish_lost_part(opened)
    assert sorted(batch.trajectory_ids) == ["g-0", "g-1", "h-0", "h-1"]
    for stored in batch.trajectories:
        verify_frame(stored)
    await opened.queue.settle_batch(batch, 1)
    assert opened.queue.groups.ledger.counts().trained == 4
    assert opened.nodes.spool.used_bytes == 0


@pytest.mark.parametrize("is_noticed", [False, True])
async def test_what_was_lost_is_sampled_again_after_a_restart(nodes: Nodes, is_noticed: bool) -> None:
    first = NodesQueue(nodes)
    if is_noticed:
        await lose_part_of_a_group(first)
    else:
        await first.put_two(*nodes.store("g-0"), *here(nodes, "g-1"))
    first.close()
    second = NodesQueue(nodes.again())
    if not is_noticed:  # no reader was asked yet, so the ledger alone names the node
        second.nodes.lose()
        second.queue.groups.follow_nodes()
    await finish_lost_part(second)
    second.close()


async def test_what_a_node_does_not_have_any_more_that_is_back_is_sampled_again(
    opened: NodesQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_queue, "MAX_DAMAGED_GROUPS", 1)
    queue = opened.queue
    for entry in await opened.put_three():
        Path(entry.path).unlink()
    assert await queue.next_batch(0, wait=False) is None
    counts = queue.groups.ledger.counts()
    assert (counts.in_flight, counts.queued, counts.dropped) == (4, 2, {})
    assert queue.groups.backlog.num_ready == 1
    assert value_of(opened.metrics.attempts_restarted_total) == 2
    oldest = queue.groups.backlog.oldest_version
    reopened = {left.group_id: (oldest(left.group_id), set(left.stored)) for left in queue.groups.restored}
    assert reopened == {"g": (0, {"g-1"}), "h": (0, {"h-1"})}
    assert await queue.wait_for_admission()  # for these groups


async def test_a_run_ends_when_a_node_loses_frames_again_and_again(
    opened: NodesQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_queue, "MAX_INCOMPLETE_BATCHES", 1)
    for entry in await opened.put_three():
        Path(entry.path).unlink()
    with pytest.raises(DataError, match=f"node {NODE} had stored"):
        await opened.queue.next_batch(0, wait=False)


def test_a_file_that_a_disk_does_not_show_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, paths = LocalFrameReader(tmp_path), [str(tmp_path / "a"), str(tmp_path / "b")]
    Path(paths[1]).touch()
    assert reader.begin_find_missing(paths)() == paths[:1]
    monkeypatch.setattr(os, "stat", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    assert reader.begin_find_missing(paths)() == []


async def test_damaged_frames_of_a_node_are_blamed_on_it(
    opened: NodesQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_queue, "MAX_DAMAGED_GROUPS", 1)
    missing, damaged = await opened.put_three()
    Path(missing.path).unlink()
    Path(damaged.path).write_bytes(b"")
    with pytest.raises(DataError, match=rf"^1 finished groups .* disk and memory of node {NODE}, and"):
        await opened.queue.next_batch(0)
    assert [left.group_id for left in opened.queue.groups.restored] == ["g"]
    assert opened.queue.groups.ledger.counts().dropped == {"corrupt": 2}


async def test_a_batch_waits_when_a_node_does_not_say_which_frames_it_has(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object) -> None:
        raise NodeUnreachable("its reader does not answer")

    async def read_batch(batch: TakenBatch) -> dict[str, str]:
        monkeypatch.setattr(nodes.nodes, "require", leave)  # once it has sent what it has
        return find_flaws(batch.trajectories)

    monkeypatch.setattr(nodes, "read_batch", read_batch)
    opened = NodesQueue(nodes)
    for entry in await opened.put_three():
        Path(entry.path).unlink()
    assert await opened.queue.next_batch(0, wait=False) is None
    assert nodes.spool.absent == {NODE}
    counts = opened.queue.groups.ledger.counts()
    assert (opened.queue.groups.backlog.num_ready, counts.dropped) == (3, {})
    opened.close()


async def test_a_group_of_a_batch_is_not_reopened(opened: NodesQueue) -> None:
    await opened.put_two(*opened.nodes.store("g-0", "g-1"))
    batch = await opened.next_batch()
    opened.nodes.lose()
    opened.queue.groups.follow_nodes()
    assert opened.queue.groups.restored == []
    await opened.queue.settle_batch(batch, 1)
    assert opened.queue.groups.ledger.counts().trained == 4


def test_labels_of_undone_versions_stay_capped_in_a_reopened_group(tmp_path: Path) -> None:
    """Group g was sampled by version 2; then a restart went back to step 1."""
    nodes = Nodes(tmp_path)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.rollback(0)
    ledger.record_dispatch("g", "task", 0, ["g-0", "g-1"], 2)
    ledger.record_queued("g", nodes.store("g-0", "g-1", version=2), version=2)
    roll_back(ledger, 1)
    ledger.record_reopened("g", ["g-0"])
    (kept,) = ledger.group("g").stored.values()
    assert (kept.trajectory_id, kept.newest_weight_version) == ("g-1", 1)
    ledger.close()


def test_a_trajectory_that_begins_again_is_not_released_by_its_earlier_end(tmp_path: Path) -> None:
    """Its first end was recorded, its frame was lost, and it began again before journals dropped it."""
    released: list[str] = []
    folders = JournalFolders(tmp_path, 1, {})
    folder = folders.add_owner("worker", released.extend)

    def begin(name: str) -> None:
        folders.record_owner(name, folders.claim_trajectory(name, ()), folder)

    for name in "abc":
        begin(name)
    folders.release_trajectories(["a", "b", "c"])
    begin("a")
    taken = folders.take_released()
    begin("b")  # while the ledger is written
    folders.notify_owners(taken)
    assert released == ["c"]


# -- the driver's side of the readers of frames on other nodes ----------------------------------------


class Node:
    """A node on which a journal takes `journal_s`, in front of a `ray.get` that counts time."""

    def __init__(self, num_journals: int, journal_s: float) -> None:
        self._ends_s = num_journals * journal_s
        self._journal_s = journal_s
        self.now_s = 0.0
        self.read_journals = SimpleNamespace(remote=lambda *_: "journals")
        number = SimpleNamespace(remote=lambda: "number")
        self.num_journals_read = SimpleNamespace(options=lambda **_: number)

    def get(self, reference: str, *, timeout: float) -> Any:
        """What `ray.get` does."""
        if reference == "number":
            return int(self.now_s / self._journal_s)
        self.now_s = min(self.now_s + timeout, self._ends_s)
        if self.now_s < self._ends_s:
            raise GetTimeoutError("not yet")
        return {"000001-driver-1": ({}, 0)}


@pytest.mark.parametrize(("journal_s", "answers"), [(100.0, True), (130.0, False)])
def test_a_node_may_take_long_for_many_journals_but_not_for_one(
    monkeypatch: pytest.MonkeyPatch, journal_s: float, answers: bool
) -> None:
    node = Node(20, journal_s)
    monkeypatch.setattr(frame_readers.ray, "get", node.get)
    readers = cast(FrameReaders, SimpleNamespace(actor_on=lambda address: node))
    wait = RayFrameReader(readers, "10.0.0.2").begin_read_journals("/journals", [], {})
    if answers:
        assert wait() == {"000001-driver-1": ({}, 0)}
        assert node.now_s == 2000.0
    else:
        with pytest.raises(NodeUnreachable, match=r"10\.0\.0\.2"):
            wait()
