"""The proof by numbers, small: routing replay and merged rows on one server, with what must hold of them.

The server is in float32 and the trainer in float32 or bfloat16: that another precision routes some tokens
otherwise is the mismatch that replay is for, and equal ones show what is exact.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.engine_protocol import DiskUpdate, SamplingParams
from async_rl.engines.model_facts import load_facts
from async_rl.types import TrainBatch
from benchmarks import routing_replay as replaying
from benchmarks import sampling_mask
from benchmarks.real_parts import Mismatch, build_model, make_batch, random_prompts, serving
from tests.support import merged_rows as merging

pytestmark = [pytest.mark.real, pytest.mark.sglang, pytest.mark.megatron, pytest.mark.timeout(600)]

SETTINGS = [merging.NEVER, merging.Setting(2, "flush"), merging.Setting(2, "in_place")]

TRUNCATED = SamplingParams(temperature=0.7, top_p=0.8, top_k=20)


@dataclass(frozen=True)
class World:
    """All that the engine had to say."""

    model: Path
    batch: TrainBatch
    """Sampled at one version."""
    chain: list[Path]
    """The weights that followed each other."""
    mixed: dict[merging.Setting, list[merging.Mixed]]
    """Sampled at several, the calls interrupted while they ran."""
    sharp: Path
    """Another model, whose distributions are less uniform."""
    truncated: TrainBatch
    """Sampled from it with `TRUNCATED`."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("numbers")
    model = build_model("qwen3_moe", folder / "base", seed=0, dtype=torch.bfloat16)
    chain = merging.weight_chain(model, folder, 3, seed=0)
    sharp = sampling_mask.sharpen(build_model("qwen3_moe", folder / "sharp", seed=0), 3.0)
    facts = load_facts(model)

    async def roll_out() -> tuple[TrainBatch, dict[merging.Setting, list[merging.Mixed]], TrainBatch]:
        async with serving(model, folder, dtype="float32") as engine:
            batch = make_batch(await replaying.sample(engine, random_prompts(32, seed=0), 48), 0, facts)
            mixed = {
                setting: await merging.roll_out(engine, chain, random_prompts(6, seed=1), 48, setting)
                for setting in SETTINGS
            }
            await engine.update_weights(DiskUpdate(weight_version=0, path=str(sharp)), flush=True)
            drawn = await sampling_mask.sample(engine, random_prompts(8, seed=0), 32, TRUNCATED)
        return batch, mixed, make_batch(drawn, 0, facts)

    with ThreadPoolExecutor(1) as thread:  # a loop of its own, beside the test framework's
        batch, mixed, truncated = thread.submit(asyncio.run, roll_out()).result()
    return World(model, batch, chain, mixed, sharp, truncated)


# -- equal weights ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(world: World) -> dict[str, Mismatch]:
    """Trainer in bfloat16 against engine, by variant."""
    differences = replaying.differences(world.model, world.batch, "bfloat16")
    return {variant: Mismatch.of(d) for variant, d in differences.items()}


@pytest.mark.case(41)
def test_log_probs_are_nearer_to_the_engines_when_its_experts_are_replayed(
    found: dict[str, Mismatch], record_property
) -> None:
    off, r3 = found["off"], found["r3"]
    record_property("mean_abs_ratio", r3.mean_abs / off.mean_abs)
    record_property("k3_ratio", r3.k3 / off.k3)
    assert r3.mean_abs < 0.8 * off.mean_abs
    assert r3.k3 < 0.25 * off.k3
    assert r3.share_above_0_1 < off.share_above_0_1
    assert found["r2"] == found["off"], "recorded with the same weights"
    assert not replaying.violations(found)


@pytest.mark.case(41)
def test_log_probs_are_the_engines_when_precision_is_the_same_too(world: World) -> None:
    same = replaying.differences(world.model, world.batch, "float32", ("r3", "rows+1"))
    assert np.abs(same["r3"]).max() < merging.EXACT
    assert np.abs(same["rows+1"]).mean() > 0.1


@pytest.mark.case(42)
def test_mismatch_grows_when_the_rows_are_not_those_of_the_token(found: dict[str, Mismatch]) -> None:
    for control in ("rows+1", "rows-1", "layers", "other"):
        assert found[control].mean_abs > 5 * found["off"].mean_abs
        assert found[control].k3 > 5 * found["off"].k3


@pytest.mark.case(46)
def test_mismatch_does_not_fall_when_more_rows_are_corrupted(found: dict[str, Mismatch]) -> None:
    shares = ["r3", "corrupt25", "corrupt50", "corrupt100"]
    for field in ("mean_abs", "k3"):
        values = [getattr(found[variant], field) for variant in shares]
        assert values == sorted(values)
        assert values[1] > getattr(found["off"], field)


def test_log_probs_of_truncated_sampling_are_the_engines_when_the_kept_tokens_are_replayed(
    world: World,
) -> None:
    differences = sampling_mask.differences(world.sharp, world.truncated, TRUNCATED.temperature)
    mean = {variant: np.abs(difference).mean() for variant, difference in differences.items()}
    assert mean["mask"] <= 1e-5
    assert 0.05 <= mean["none"] < mean["shifted"]


# -- mixed weights ----------------------------------------------------------------------------------------


@pytest.mark.case(44)
def test_each_merge_is_right_where_it_should_be_when_weights_change_under_a_trajectory(
    world: World,
) -> None:
    merged = merging.evaluate(world.chain, world.mixed, load_facts(world.model), "float32")
    for setting in SETTINGS:
        off, replaced, spliced, oracle = (merged[setting, merge] for merge in merging.MERGES)
        if setting == merging.NEVER:
            assert max(m.y2 for m in (off, replaced, spliced, oracle)) < merging.EXACT
            continue
        versions = {part.version for mixed in world.mixed[setting] for part in mixed.parts}
        assert versions == set(range(setting.interruptions + 1))
        # By the newest weights, y1 has other log-probs: the policy has changed.
        assert min(off.y1, replaced.y1, spliced.y1) > 1e-3
        if setting.cache == "flush":
            # Every segment is what the trainer computes with its weights and the rows of its answer …
            assert max(oracle.y1, oracle.y2) < merging.EXACT
            # … which for the last one is replace; splice gives its prefix other experts than the engine did.
            assert replaced.y2 < merging.EXACT
            assert spliced.y2 > 1e-3
            assert replaced.flips > 0
        else:
            # The engine kept the rows, and with them keys and values that no forward of the trainer has.
            assert replaced == spliced
            assert replaced.flips == 0
            assert oracle.y2 > 1e-3
