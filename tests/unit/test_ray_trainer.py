"""Ranks get the frames that they read, of any node; their errors reach the callers of `RayTrainer`."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectStoreFullError,
    OutOfMemoryError,
    OwnerDiedError,
    RayError,
    RayTaskError,
)

from async_rl.config import parse_config
from async_rl.errors import CorruptFrame, NodeUnreachable, TrainerError
from async_rl.placement import frame_readers
from async_rl.placement.frame_readers import SharedFrames, map_frame
from async_rl.placement.ray_trainer import CallFrameReader, RayTrainer
from async_rl.runtime.supervision import Nursery
from async_rl.store.frames import read_columns
from async_rl.trainer_protocol import SendReport
from async_rl.types import StoredTrajectory, TakenBatch
from tests.support.stored_batches import taken_batch
from tests.support.trajectories import make_group


def failing_actor(error: Exception) -> Any:
    async def call(*_: Any) -> Any:
        raise error

    return SimpleNamespace(call_worker=SimpleNamespace(remote=call))


CONFIG = parse_config(
    {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"path": "d.jsonl"}, "engine": {}}
)


class SendingActor:
    """Sends until it is told to stop, which another thread has to tell it."""

    def __init__(self, silent: dict[str, list[int]]) -> None:
        self.report, self.stopped, self.group = SendReport(silent=silent), asyncio.Event(), ""
        self.call_worker = self

    def options(self, concurrency_group: str) -> Any:
        self.group = concurrency_group
        return self

    async def remote(self, method: str, *arguments: Any) -> Any:
        if method == "abort_weight_group":
            assert (self.group, arguments) == ("aborts", ("g",))
            return self.stopped.set()
        await self.stopped.wait()
        return self.report


async def test_ranks_that_send_are_told_to_stop_and_all_say_which_engines_are_silent() -> None:
    trainer = trainer_of([SendingActor({}), SendingActor({"g-1": [2, 1]}), SendingActor({"g-2": [2]})])
    async with Nursery() as nursery:
        sending = nursery.start_task("send", trainer.send_weights(["g", "h"], 1 << 20))
        await asyncio.sleep(0.1)
        assert not sending.done()
        await trainer.abort_weight_group("g")
    assert sending.result().silent == {"g-1": [2, 1], "g-2": [2]}


async def test_each_reader_of_a_bucket_gets_a_payload_of_the_rank_that_it_reads_from() -> None:
    def rank_actor(rank: int) -> Any:
        async def call(method: str, number: int, bucket_bytes: int, ranks: list[int]) -> list[bytes]:
            return [f"{rank}.{copy}".encode() for copy in range(ranks.count(rank))]

        return SimpleNamespace(call_worker=SimpleNamespace(remote=call))

    trainer = trainer_of([rank_actor(rank) for rank in range(3)])
    assert await trainer.share_bucket(0, 1 << 20, [2, 0, 2, 1]) == [b"2.0", b"0.0", b"2.1", b"1.0"]
    assert await trainer.share_bucket(1, 1 << 20, [0, 0]) == [b"0.0", b"0.1"]


@pytest.mark.parametrize(
    "error", [OutOfMemoryError("by the monitor"), ActorDiedError(), ActorUnavailableError("x", bytes(16))]
)
async def test_the_trainer_is_restarted_when_a_rank_dies_however_ray_calls_it(error: RayError) -> None:
    with pytest.raises(TrainerError, match="trainer rank 0 died during train_step") as failed:
        await trainer_of([failing_actor(error)]).train_step(None, 1)
    assert failed.value.restartable


def stored_on(node: str, batch: TakenBatch) -> TakenBatch:
    """The batch, with all frames on a node; "" is the run's folder."""
    there = tuple(msgspec.structs.replace(each, node=node) for each in batch.trajectories)
    return msgspec.structs.replace(batch, trajectories=there)


async def no_reader(node: str, method: str, *_: Any) -> Any:
    raise AssertionError(f"node {node} reads frames: {method}")


def trainer_of(
    ranks: list[Any], nodes: Sequence[str] = ("a",), reader: CallFrameReader = no_reader
) -> RayTrainer:
    """A trainer with ranks on these nodes; the driver is on node `here`."""
    logs = [Path(f"trainer-{rank}.log") for rank in range(len(ranks))]
    return RayTrainer(ranks, list(nodes), logs, CONFIG, "here", reader)


def four_frames(folder: Path, node: str = "here") -> TakenBatch:
    return stored_on(node, taken_batch(folder, [make_group("g", size=4)], 0))


class Reader:
    """What `FrameReaderActor` does, without Ray's store."""

    def __init__(self) -> None:
        self.frames = SharedFrames()
        self.sent: list[str] = []
        self.num_held = 0
        self.ends_after_holding = 0

    def send_frames(self, stored: list[StoredTrajectory]) -> list[Any]:
        self.sent += [each.trajectory_id for each in stored]
        return [map_frame(each.path) for each in stored]

    def hold_frames(self, objects: list[Any]) -> tuple[str, list[int]]:
        self.num_held += len(objects)
        answer = self.frames.path, [self.frames.append(data) for data in objects]
        if self.ends_after_holding:  # and another one starts
            self.ends_after_holding -= 1
            ended, self.frames = self.frames, SharedFrames()
            del ended
        return answer

    def holds(self, path: str) -> bool:
        return path == self.frames.path


def calls_of(readers: dict[str, Reader]) -> CallFrameReader:
    async def call(node: str, method: str, *arguments: Any) -> Any:
        return getattr(readers[node], method)(*arguments)

    return call


class ReadingRank:
    """Every `stride`-th trajectory is its own; it reads them where the batch says."""

    def __init__(self, first: int, stride: int) -> None:
        self.first, self.stride = first, stride
        self.read: dict[str, np.ndarray] = {}
        self.paths: dict[str, str] = {}
        self.call_worker = SimpleNamespace(remote=self.call)

    async def call(self, method: str, batch: TakenBatch, *_: Any) -> Any:
        own = tuple(range(self.first, len(batch.trajectories), self.stride))
        if method == "needed_trajectories":
            return own
        for trajectory in (batch.trajectories[index] for index in own):
            self.paths[trajectory.trajectory_id] = trajectory.path
            try:
                self.read[trajectory.trajectory_id] = read_columns(trajectory)["token_ids"]
            except CorruptFrame as error:
                return {trajectory.trajectory_id: str(error)}
        return {}


async def test_a_frame_goes_once_to_each_other_node_whose_ranks_read_it(tmp_path: Path) -> None:
    batch = taken_batch(tmp_path, [make_group("g", size=9)], 0)
    # All frames are on the driver's node, but 3 and 4, which are on node a, and 8 in the run's folder.
    trajectories = [msgspec.structs.replace(each, node="here") for each in batch.trajectories]
    trajectories[8] = msgspec.structs.replace(trajectories[8], node="")
    trajectories[4] = msgspec.structs.replace(trajectories[4], node="a")
    trajectories[3] = msgspec.structs.replace(trajectories[3], node="a")
    batch = msgspec.structs.replace(batch, trajectories=tuple(trajectories))
    # Two tensor-parallel ranks of one share on node a, one rank on b, one beside the driver.
    ranks = [ReadingRank(first, 3) for first in (0, 1, 1, 2)]
    readers = {node: Reader() for node in ("here", "a", "b")}
    trainer = trainer_of(ranks, ["here", "a", "a", "b"], calls_of(readers))
    assert await trainer.read_batch(batch) == {}
    names = batch.trajectory_ids
    assert readers["here"].sent == [names[index] for index in (1, 2, 5, 7)]
    assert readers["a"].sent == [names[3]]
    assert [readers[node].num_held for node in ("a", "b", "here")] == [2, 2, 1]
    where = {index: trajectories[index].path for index in range(9)}
    assert ranks[1].paths == ranks[2].paths
    assert set(ranks[1].paths.values()) == {readers["a"].frames.path, where[4]}
    assert set(ranks[3].paths.values()) == {readers["b"].frames.path, where[8]}
    assert set(ranks[0].paths.values()) == {where[0], where[6], readers["here"].frames.path}
    expected = {t.trajectory_id: read_columns(t)["token_ids"] for t in batch.trajectories}
    assert set().union(*(rank.read for rank in ranks)) == set(expected)
    for rank in ranks:
        assert all(np.array_equal(tokens, expected[name]) for name, tokens in rank.read.items())


async def test_nothing_is_sent_when_all_ranks_are_where_the_frames_are(tmp_path: Path) -> None:
    ranks = [ReadingRank(first, 2) for first in (0, 1)]
    for nodes, node in ((["here", "here"], "here"), (["a", "b"], "")):
        batch = four_frames(tmp_path, node)
        assert await trainer_of(ranks, nodes).read_batch(batch) == {}
        assert set().union(*(rank.read for rank in ranks)) == set(batch.trajectory_ids)


@pytest.mark.parametrize(("ends", "is_read"), [(1, True), (2, True), (3, False)])
@pytest.mark.parametrize("who", ["reader", "sender"])
async def test_frames_are_sent_again_when_their_reader_or_sender_has_ended_before_ranks_read_them(
    tmp_path: Path, who: str, ends: int, is_read: bool
) -> None:
    batch = four_frames(tmp_path)
    rank, readers, left = ReadingRank(0, 1), {"here": Reader(), "a": Reader()}, ends
    calls = calls_of(readers)

    async def call(node: str, method: str, *arguments: Any) -> Any:
        nonlocal left
        if who == "sender" and method == "hold_frames" and left:  # Ray's store has lost what it owned
            left -= 1
            error = OwnerDiedError("0" * 56, None, "")
            raise RayTaskError("hold_frames", "Traceback", error).as_instanceof_cause()
        return await calls(node, method, *arguments)

    if who == "reader":
        readers["a"].ends_after_holding = ends
    trainer = trainer_of([rank], reader=call)
    if is_read:
        assert await trainer.read_batch(batch) == {}
        assert rank.read.keys() == set(batch.trajectory_ids)
        assert readers["here"].sent == (ends + 1) * list(batch.trajectory_ids)
    else:
        with pytest.raises(TrainerError, match=r"frames were lost with their readers") as failed:
            await trainer.read_batch(batch)
        assert failed.value.restartable


async def test_a_frame_that_arrives_damaged_is_returned(tmp_path: Path) -> None:
    batch = four_frames(tmp_path)
    damaged = Path(batch.trajectories[2].path)
    damaged.write_bytes(damaged.read_bytes()[:-8] + b"\0" * 7 + b"\1")
    readers = {"here": Reader(), "a": Reader()}
    flaws = await trainer_of([ReadingRank(0, 1)], reader=calls_of(readers)).read_batch(batch)
    assert flaws.keys() == {batch.trajectory_ids[2]}
    assert readers["a"].num_held == 4


@pytest.mark.parametrize("node", ["a", "b", "here", ""])
async def test_frames_that_their_node_does_not_have_any_more_are_returned(tmp_path: Path, node: str) -> None:
    batch = four_frames(tmp_path, node)
    for missing in (0, 3):  # one for each rank
        Path(batch.trajectories[missing].path).unlink()  # as after a node has come back with an empty disk
    readers = {name: Reader() for name in ("here", "a", "b")}
    ranks = [ReadingRank(first, 2) for first in (0, 1)]
    flaws = await trainer_of(ranks, ["a", "a"], reader=calls_of(readers)).read_batch(batch)
    assert flaws.keys() == {batch.trajectory_ids[0], batch.trajectory_ids[3]}


def test_a_frame_that_there_is_no_descriptor_for_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(frame_readers, "map_file", Mock(side_effect=error))
    with pytest.raises(OSError, match="Too many open files"):
        map_frame(str(tmp_path / "frame"))


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (OSError(errno.EMFILE, "Too many open files"), NodeUnreachable),
        (ObjectStoreFullError("the store is full"), NodeUnreachable),
        (KeyError("a defect"), TrainerError),
    ],
)
async def test_only_a_node_that_may_send_later_is_waited_for(
    tmp_path: Path, cause: Exception, expected: type[Exception]
) -> None:
    async def fail(*_: Any) -> Any:
        raise RayTaskError("send_frames", "Traceback", cause)

    with pytest.raises(expected):
        await trainer_of([ReadingRank(0, 1)], reader=fail).read_batch(four_frames(tmp_path, "b"))


@pytest.mark.parametrize(("portion_s", "in_time"), [(100.0, True), (130.0, False)])
async def test_a_node_may_take_long_for_many_frames_but_not_for_a_few(
    tmp_path: Path, portion_s: float, in_time: bool
) -> None:
    batch = four_frames(tmp_path, "b")
    large = tuple(msgspec.structs.replace(each, nbytes=120 << 20) for each in batch.trajectories)
    batch = msgspec.structs.replace(batch, trajectories=large)
    readers = {name: Reader() for name in ("a", "b")}
    call, sizes = calls_of(readers), list[int]()

    async def call_slowly(node: str, method: str, *arguments: Any) -> Any:
        if method == "send_frames":
            sizes.append(len(arguments[0]))
            await asyncio.sleep(portion_s)
        return await call(node, method, *arguments)

    rank = ReadingRank(0, 1)
    trainer = trainer_of([rank], reader=call_slowly)
    if in_time:
        assert await trainer.read_batch(batch) == {}
        assert sizes == [2, 2]
        assert tuple(rank.read) == batch.trajectory_ids
    else:
        with pytest.raises(NodeUnreachable, match="node b does not send"):
            await trainer.read_batch(batch)


async def test_a_batch_waits_when_the_node_of_a_frame_is_lost(tmp_path: Path) -> None:
    async def lost(node: str, *_: Any) -> Any:
        raise NodeUnreachable(f"node {node} has left")

    trainer = trainer_of([ReadingRank(0, 1)], reader=lost)
    with pytest.raises(NodeUnreachable, match=r"node b does not send .*node b has left") as caught:
        await trainer.read_batch(four_frames(tmp_path, "b"))
    assert caught.value.node == "b"
    # Nothing waits for the driver's own node.
    with pytest.raises(TrainerError, match=r"node here: .*node here has left") as failed:
        await trainer.read_batch(four_frames(tmp_path))
    assert failed.value.restartable
