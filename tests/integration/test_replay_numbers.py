"""The proof by numbers, small: the benchmarks of routing replay on one server, with what must hold of them.

The server is in float32 and the trainer in float32 or bfloat16: that another precision routes some tokens
otherwise is the mismatch that replay is for, and equal ones show what is exact.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.engines.model_facts import load_facts
from async_rl.types import TrainBatch
from benchmarks import replace_vs_splice as merging
from benchmarks import routing_replay as replaying
from benchmarks.real_parts import Mismatch, build_model, make_batch, random_prompts, serving

pytestmark = [
    pytest.mark.real,
    pytest.mark.sglang,
    pytest.mark.megatron,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:::megatron"),
]

SETTINGS = [
    merging.NEVER,
    merging.Setting(1, "large", "flush"),
    merging.Setting(3, "small", "flush"),
    merging.Setting(2, "large", "in_place"),
]


@dataclass(frozen=True)
class World:
    """All that the engine had to say."""

    model: Path
    batch: TrainBatch
    """Sampled at one version."""
    chains: dict[str, list[Path]]
    mixed: dict[merging.Setting, list[merging.Mixed]]
    """Sampled at several, the calls interrupted while they ran."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("numbers")
    model = build_model("qwen3_moe", folder / "base", seed=0, dtype=torch.bfloat16)
    chains = {delta: merging.weight_chain(model, folder, delta, 4, seed=0) for delta in merging.DELTAS}

    async def roll_out() -> tuple[TrainBatch, dict[merging.Setting, list[merging.Mixed]]]:
        async with serving(model, folder, dtype="float32") as engine:
            batch = make_batch(
                await replaying.sample(engine, random_prompts(32, seed=0), 48), 0, load_facts(model)
            )
            mixed = {
                setting: await merging.roll_out(
                    engine, chains[setting.delta], random_prompts(6, seed=1), 48, setting
                )
                for setting in SETTINGS
            }
        return batch, mixed

    with ThreadPoolExecutor(1) as thread:  # a loop of its own, beside the test framework's
        batch, mixed = thread.submit(asyncio.run, roll_out()).result()
    return World(model, batch, chains, mixed)


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
    assert not replaying.violations(found)


@pytest.mark.case(41)
def test_log_probs_are_the_engines_when_precision_is_the_same_too(world: World) -> None:
    same = replaying.differences(world.model, world.batch, "float32", ("r3", "rows+1"))
    assert np.abs(same["r3"]).max() < merging.EXACT
    assert np.abs(same["rows+1"]).mean() > 0.1


def test_r2_changes_nothing_when_the_weights_are_those_it_was_recorded_with(
    found: dict[str, Mismatch],
) -> None:
    assert found["r2"] == found["off"]


@pytest.mark.case(42)
@pytest.mark.parametrize("control", ["rows+1", "rows-1", "layers", "other"])
def test_mismatch_grows_when_the_rows_are_not_those_of_the_token(
    found: dict[str, Mismatch], control: str
) -> None:
    assert found[control].mean_abs > 5 * found["off"].mean_abs
    assert found[control].k3 > 5 * found["off"].k3


@pytest.mark.case(46)
def test_mismatch_does_not_fall_when_more_rows_are_corrupted(found: dict[str, Mismatch]) -> None:
    shares = ["r3", "corrupt25", "corrupt50", "corrupt100"]
    for field in ("mean_abs", "k3"):
        values = [getattr(found[variant], field) for variant in shares]
        assert values == sorted(values)
        assert values[1] > getattr(found["off"], field)


@pytest.mark.parametrize("variant", replaying.CONTROLS)
def test_control_is_legal_and_another_routing_when_it_is_made(world: World, variant: str) -> None:
    batch = world.batch
    rows = replaying.with_rows(batch, replaying.controls(batch.num_experts)[variant]).routed_experts
    assert rows.shape == batch.routed_experts.shape
    assert rows.dtype == batch.routed_experts.dtype
    assert rows.max() < batch.num_experts
    ordered = np.sort(rows[batch.routing_valid], axis=-1)
    assert (ordered[..., 1:] != ordered[..., :-1]).all()
    changed = (rows != batch.routed_experts).any(axis=(1, 2))[batch.routing_valid].mean()
    share = {"corrupt25": 0.25, "corrupt50": 0.5}.get(variant, 1.0)
    assert changed == pytest.approx(share, abs=0.05)


def test_benchmark_speaks_up_when_its_numbers_are_wrong(found: dict[str, Mismatch]) -> None:
    r3_is_off = replaying.violations(found | {"r3": found["off"]})
    assert any("r3 is not the lowest" in sentence for sentence in r3_is_off)
    one_control_is_off = replaying.violations(found | {"layers": found["off"]})
    assert [sentence.split(":")[0] for sentence in one_control_is_off] == [
        "the control layers is not above off"
    ]


# -- mixed weights ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def merged(world: World) -> merging.Found:
    """Trainer in float32 against engine, by setting and merge."""
    measured = merging.evaluate(world.chains, world.mixed, load_facts(world.model), "float32")
    return {key: [value] for key, value in measured.items()}


@pytest.mark.case(44)
def test_each_merge_is_right_where_it_should_be_when_weights_change_under_a_trajectory(
    world: World, merged: merging.Found
) -> None:
    for setting in SETTINGS:
        off, replaced, spliced, oracle = (merged[setting, merge][0] for merge in merging.MERGES)
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
    assert not merging.violations(merged)


@pytest.mark.case(44)
def test_benchmark_speaks_up_when_a_merge_is_not_what_it_claims(merged: merging.Found) -> None:
    setting = SETTINGS[1]
    swapped = {
        (s, {"replace": "splice", "splice": "replace"}.get(merge, merge)): m
        for (s, merge), m in merged.items()
    }
    assert any(f"{setting.name}: mean|Δ| of y2 under replace" in s for s in merging.violations(swapped))
    drifted = merged | {(setting, "oracle"): [replace(merged[setting, "oracle"][0], y1=0.01)]}
    assert merging.violations(drifted) == [f"{setting.name}: mean|Δ| of y1 under oracle is 1.0e-02"]
    same = merged | {(setting, "splice"): merged[setting, "replace"]}
    assert merging.violations(same) == [f"{setting.name}: replace and splice agree"]


@pytest.mark.parametrize(("df", "expected"), [(3, 3.182), (7, 2.365), (15, 2.131), (60, 2.000)])
def test_interval_has_the_width_of_students_t_when_seeds_are_few(df: int, expected: float) -> None:
    assert merging.t_quantile(df) == pytest.approx(expected, rel=0.01)
    mean, half = merging.interval([1.0] * df + [2.0 + df])
    assert mean == pytest.approx(2.0)
    assert half == pytest.approx(expected, rel=0.01)  # the deviation is the root of the number of seeds
