"""Runs with a teacher, whose engines die, refuse calls and come back, in virtual time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from async_rl.engines.simulated import scored_tokens
from tests.simulation.test_loop import make_config, run
from tests.support.local_cluster import LocalCluster
from verification.simulation.__main__ import run_seed
from verification.simulation.simulated_models import score_seed


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 8), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("kinds", [("models",), ("models", "workers")], ids="+".join)
def test_every_trained_token_has_its_score_when_a_seed_decides_what_goes_wrong(
    kinds: tuple[str, ...], seeds: range
) -> None:
    failed = {seed: found.violations for seed in seeds if (found := run_seed(seed, kinds)).violations}
    assert failed == {}


async def test_a_teacher_is_never_updated(calculator: Path, tmp_path: Path) -> None:
    models = f"models={{teacher: {{path: {calculator / 'model'}, num_engines: 2}}}}"
    config = make_config(calculator, tmp_path, models, "trainer.loss.teacher.model=teacher")
    cluster = LocalCluster(config, step_s=0.02)
    summary = await run(config, cluster)
    assert summary.weight_versions == 6
    for engine in cluster.models["teacher"].engines:
        assert (await engine.health()).weight_version == 0
    assert {(await engine.health()).weight_version for engine in cluster.engines} == {6}
    for batch in cluster.trainer.batches:
        assert batch.teacher_log_probs is not None
        for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
            wanted = scored_tokens(batch.token_ids[start:end].tolist(), 0, score_seed("teacher"))
            sampled = batch.loss_mask[start:end]
            assert np.array_equal(batch.teacher_log_probs[start:end], np.where(sampled, wanted, 0))
