"""Errors of trainer ranks reach the callers of `RayTrainer` as they were raised."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from async_rl.config import parse_config
from async_rl.errors import WeightSyncError
from async_rl.placement import ray_trainer
from async_rl.placement.ray_trainer import RayTrainer


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
