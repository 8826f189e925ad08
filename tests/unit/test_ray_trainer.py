"""Ranks get the frames that they read; their errors reach the callers of `RayTrainer` as they were raised."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayTaskError

from async_rl.config import parse_config
from async_rl.errors import WeightSyncError
from async_rl.placement import ray_trainer
from async_rl.placement.actors import SharedFrames
from async_rl.placement.ray_trainer import RayTrainer
from async_rl.queue.frames import read_columns
from async_rl.trainer_protocol import StepResult
from async_rl.types import TakenBatch
from tests.support.stored_batches import taken_batch
from tests.support.trajectories import make_group


def failing_actor(error: Exception) -> Any:
    async def call(*_: Any) -> Any:
        raise RayTaskError("call_worker", "Traceback", error)

    return SimpleNamespace(call_worker=SimpleNamespace(remote=call))


async def test_an_update_without_a_receiver_is_an_error_that_the_update_handles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray_trainer, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    config = parse_config(
        {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"path": "d.jsonl"}, "engine": {}}
    )
    error = WeightSyncError("every weight-update group failed: weights-engine-0-1-2")
    trainer = RayTrainer([failing_actor(error)], ["here"], [tmp_path / "trainer-0.log"], config)
    with pytest.raises(WeightSyncError, match="every weight-update group failed"):
        await trainer.send_weights(["weights-engine-0-1-2"], 1 << 20)


class ReadingRank:
    """Every `stride`-th trajectory is its own; it reads them where the batch says."""

    def __init__(self, first: int, stride: int) -> None:
        self.first, self.stride = first, stride
        self.read: dict[str, np.ndarray] = {}
        self.paths: set[str] = set()
        self.frames = SharedFrames()
        self.num_held = 0
        self.call_worker = SimpleNamespace(remote=self.call)
        self.hold_frames = SimpleNamespace(remote=self.hold)

    async def call(self, method: str, batch: TakenBatch, *_: Any) -> Any:
        own = tuple(range(self.first, len(batch.trajectories), self.stride))
        if method == "needed_trajectories":
            return own
        for trajectory in (batch.trajectories[index] for index in own):
            self.paths.add(trajectory.path)
            self.read[trajectory.trajectory_id] = read_columns(trajectory)["token_ids"]
        return StepResult(step=1, metrics={})

    async def hold(self, objects: list[Any]) -> tuple[str, list[int]]:
        self.num_held = len(objects)
        return self.frames.path, [self.frames.append(data) for data in objects]


async def test_a_frame_goes_once_to_each_other_node_whose_ranks_read_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put: list[np.ndarray] = []

    def put_object(data: np.ndarray) -> np.ndarray:
        put.append(data)
        return data

    context = SimpleNamespace(get_node_id=lambda: "here")
    fake = SimpleNamespace(get_runtime_context=lambda: context, put=put_object)
    monkeypatch.setattr(ray_trainer, "ray", fake)
    config = parse_config(
        {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"path": "d.jsonl"}, "engine": {}}
    )
    batch = taken_batch(tmp_path, [make_group("g", size=8)], 0)
    # Two tensor-parallel ranks of one share on node a, one rank on b, one beside the driver.
    ranks = [ReadingRank(first, 3) for first in (0, 1, 1, 2)]
    logs = [tmp_path / f"trainer-{rank}.log" for rank in range(4)]
    trainer = RayTrainer(ranks, ["here", "a", "a", "b"], logs, config)
    await trainer.train_step(batch, 1)
    assert len(put) == 5  # of 8: three are read by the driver's node alone
    assert [rank.num_held for rank in ranks] == [0, 3, 0, 2]
    assert ranks[1].paths == ranks[2].paths == {ranks[1].frames.path}
    assert ranks[3].paths == {ranks[3].frames.path}
    assert ranks[0].paths == {batch.trajectories[index].path for index in (0, 3, 6)}
    expected = {t.trajectory_id: read_columns(t)["token_ids"] for t in batch.trajectories}
    assert set().union(*(rank.read for rank in ranks)) == set(expected)
    for rank in ranks:
        assert all(np.array_equal(tokens, expected[name]) for name, tokens in rank.read.items())
