"""What the watch of weights finds on a real SGLang server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from async_rl.config import WeightsConfig
from async_rl.engine_protocol import DiskUpdate
from async_rl.engines.pool import EnginePool
from async_rl.errors import EngineError
from async_rl.observability.metrics import Metrics
from async_rl.trainer_protocol import Trainer
from async_rl.weights.checksums import VersionVerifier
from tests.support.scripted import RecordingTrainer

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("has_sums", [True, False])
async def test_weights_that_stay_are_found_by_sums_and_by_the_canary(
    sglang_world: Any, has_sums: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, metrics, trainer = sglang_world.engine(), Metrics(), RecordingTrainer()
    pool = EnginePool(metrics, lambda: 0.0)
    config = WeightsConfig(watch_every=1)
    verifier = VersionVerifier(config, pool=pool, trainer=cast(Trainer, trainer), metrics=metrics)
    if not has_sums:

        async def refuse() -> Any:
            raise EngineError("404 for /weights_checker")

        monkeypatch.setattr(engine, "checksums", refuse)

    async def load(version: int, path: Path) -> float | None:
        trainer.checksum_seed = version  # the trainer's weights change with every version
        await engine.interrupt("abort")
        await engine.update_weights(DiskUpdate(weight_version=version, path=str(path)), flush=True)
        await verifier.expect_version(version)
        await verifier.verify_version(engine, version, from_files=True)
        labels = {"engine": "engine-0"}
        return metrics.registry.get_sample_value("async_rl_served_weights_unchanged", labels)

    await engine.wait_ready()
    try:
        old, new = sglang_world.weights
        assert [await load(version, old) for version in (1, 2, 3)] == [0, 1, 1]
        assert "serves the weights of version 1: no log-prob of a fixed text" in caplog.text
        assert ("serves the weights of version 1: no checksum" in caplog.text) == has_sums
        assert await load(4, new) == 0
        assert await load(5, old) == 0
        assert await load(6, old) == 1
    finally:
        await engine.close()
