"""What a weight update is expected to take: by hand, for large models, and against paced runs."""

from __future__ import annotations

import shutil
from math import ceil
from pathlib import Path

import pytest
from msgspec.structs import replace

from async_rl.config import SGLangEngines, load_config
from async_rl.planning.update_costs import broadcast_s, estimate_update
from async_rl.planning.workload import Workload
from async_rl.run.memory_estimate import version_bytes
from tests.support.run_config import config_with

ROOT = Path(__file__).parents[2]
BUCKET = 1 << 16
RATES = Workload(
    link_bytes_per_s=10 * BUCKET,
    gather_bytes_per_s=20 * BUCKET,
    load_bytes_per_s=50 * BUCKET,
    disk_bytes_per_s=25 * BUCKET,
    update_request_s=0.1,
)


@pytest.mark.parametrize(
    ("overrides", "received_share", "parts", "pause_s"),
    [
        # Two senders, of which an engine takes a bucket each in 48 rounds.
        ([], 1.0, {"gather": 2.4, "send": 9.6, "load": 1.92 + 4.8}, 16.32 + 2.4 / 48),
        # Each sender sends half of the model, of which an engine's rank takes an eighth.
        ([], 0.125, {"gather": 2.4, "send": 4.8, "load": 0.24 + 4.8}, 9.84 + 2.4 / 48),
        (["weights.overlap=true"], 1.0, {"gather": 4.8, "send": 9.6, "load": 11.52}, 21.12 + 4.8 / 96),
        # Servers that are not patched take each bucket in groups of their own, one after the other.
        (["routing.replay=off"], 1.0, {"gather": 2.4, "send": 38.4, "load": 11.52}, 49.92 + 2.4 / 96),
        (["weights.transport=tensor"], 1.0, {"gather": 4.8, "load": 9.6}, 9.6 + 4.8 / 96),
        (
            ["weights.transport=tensor", "weights.interrupt=abort", "placement.shared=true"],
            1.0,
            {"gather": 4.8, "load": 1.92 + 9.6},
            11.52 + 4.8 / 96,
        ),
        (["weights.transport=disk"], 1.0, {"publish": 1.92, "load": 3.84}, 3.84),
        (["weights.transport=delta"], 1.0, {"publish": 0.192, "load": 0.0}, 0.0),
    ],
)
def test_parts_and_pause_are_those_of_pencil_and_paper(
    overrides: list[str], received_share: float, parts: dict[str, float], pause_s: float
) -> None:
    """96 buckets, from 16 ranks on two nodes to 4 engines of two GPUs."""
    config = config_with(
        *overrides,
        engine={"kind": "sglang", "device": "cuda", "tp_size": 2, "narrow_routing": True},
        trainer={"device": "cuda", "num_ranks": 16},
        weights={"transport": "distributed", "bucket_bytes": BUCKET},
    )
    found = estimate_update(config, replace(RATES, received_share=received_share), 96 * BUCKET, 4, 8)
    assert found.parts == pytest.approx(parts, abs=0.002)  # host memory takes 0.6 ms
    assert found.pause_s == pytest.approx(pause_s, abs=0.002)


@pytest.mark.parametrize("name", ["qwen3_30b_a3b_8gpu", "qwen3_235b_a22b_128gpu", "deepseek_v3_512gpu"])
def test_the_page_has_the_pauses_of_large_models(name: str, tmp_path: Path) -> None:
    model = ROOT / "tests" / "support" / "model_configs" / f"{name.rpartition('_')[0]}.json"
    shutil.copy(model, tmp_path / "config.json")
    recipe = ROOT / "examples" / "gpu" / name / "config.yaml"
    config = load_config(recipe, [f"model.path={tmp_path}"])
    engine, num_bytes = config.engine, version_bytes(config)
    assert isinstance(engine, SGLangEngines)
    found = estimate_update(config, Workload(), num_bytes, engine.num_engines, 8)
    cells = [
        f"`{name}`",
        f"{num_bytes / 1e9:,.0f} GB",
        f"{ceil(config.trainer.num_ranks / 8)}",
        f"{engine.num_engines} of {engine.tp_size} GPUs",
        *(f"{seconds:.1f} s" for seconds in (*found.parts.values(), found.pause_s)),
    ]
    page = (ROOT / "docs" / "design" / "weight-updates.md").read_text(encoding="utf-8")
    assert f"| {' | '.join(cells)} |" in page.splitlines()


@pytest.mark.parametrize(
    ("receivers", "senders", "seconds"),
    [
        (1, 1, 2.10),
        (1, 4, 0.517),
        (4, 1, 6.28),
        (4, 4, 1.55),
        (16, 1, 10.4),
        (16, 4, 2.60),
    ],
)
def test_broadcasts_take_what_paced_runs_have_measured(receivers: int, senders: int, seconds: float) -> None:
    """`benchmarks/weight_sync.py --scaling`: 64 buckets of 256 KiB at 8 MB/s, reception unlimited."""
    predicted_s = broadcast_s(
        64 // senders, (1 << 18) / 8e6, 0.0, receivers=receivers, width=senders, is_tree=True
    )
    assert predicted_s == pytest.approx(seconds, rel=0.25)
