"""What `async-rl check --memory` estimates for a rank is what a rank takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.config import parse_config
from tests.gpu import device
from tests.gpu.machine import ROOT
from tests.gpu.models import build, build_cut
from tests.support.train_batches import random_batch
from tests.support.trainers import started, trainer_config
from trainer.memory import estimate_memory

pytestmark = [
    pytest.mark.proof(needs="trainer", seconds=120),
    pytest.mark.filterwarnings("ignore:::megatron"),
]
RECIPES = ROOT / "examples" / "gpu"
FEW_LAYERS = 2
SMALL = {
    "hidden_size": 160,
    "intermediate_size": 448,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 20,
    "vocab_size": 2048,
    "moe_intermediate_size": 112,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}
"""Of models in a rehearsal."""


def compare(config: dict[str, Any], measure, **batch: Any) -> None:
    """Compare the most memory of a rank in two steps with the estimate of its fullest moment."""
    config = device.fitted(config)
    (rank,) = estimate_memory(parse_config(config), cuda=device.ON_GPU).ranks
    tokens = config["rollout"]["max_context_tokens"]
    with device.peak_bytes() as peak_so_far, started(config) as worker:
        for step in (1, 2):
            worker.train_on(random_batch(step, lengths=(tokens,) * 4, **batch), step)
        peak = peak_so_far()
    measure("peak", peak / 2**30, "GiB")
    measure(f"estimated peak ({rank.fullest})", rank.peak / 2**30, "GiB")
    measure("estimated over measured", rank.peak / peak, "(ratio)")
    assert rank.peak == pytest.approx(peak, rel=0.1)


@pytest.mark.proof(value=95)
def test_the_optimizer_with_small_moments_takes_what_is_estimated(tmp_path: Path, measure) -> None:
    """A step with moments in bfloat16, where optimizer and weights are nearly all, peaks as estimated."""
    passed = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16"}
    passed |= {"exp_avg_sq_dtype": "bfloat16"}
    model = build(tmp_path / "model", hidden_size=device.sized(1024, 256), num_layers=device.sized(8, 4))
    config = trainer_config(
        model, dtype="bfloat16", megatron=passed, micro_batch_tokens=256, groups_per_batch=2
    )
    config["rollout"] |= {"max_context_tokens": 128, "max_new_tokens": 64}
    compare(config, measure, layers=device.sized(8, 4), experts=16, vocab_size=512)


@pytest.mark.parametrize(
    ("recipe", "model", "experts"),
    [
        pytest.param("qwen3_4b_1gpu", "qwen3_4b", 0, marks=pytest.mark.proof(value=92)),
        pytest.param("qwen3_30b_a3b_lora_1gpu", "qwen3_30b_a3b", 128, marks=pytest.mark.proof(value=91)),
    ],
)
def test_a_recipe_for_one_gpu_takes_what_is_estimated(
    recipe: str, model: str, experts: int, tmp_path: Path, measure
) -> None:
    """The trainer of a recipe, with few layers of the model's real width, peaks as estimated."""
    sizes = device.sized({}, SMALL)
    folder = build_cut(tmp_path / "model", model, FEW_LAYERS, **sizes)
    config = yaml.safe_load((RECIPES / recipe / "config.yaml").read_text())
    config["model"]["path"] = str(folder)
    if not device.ON_GPU:
        config["rollout"] |= {"max_context_tokens": 512, "max_new_tokens": 256}
        config["trainer"] |= {"micro_batch_tokens": 512}
        config["weights"]["bucket_bytes"] = 1 << 20
    compare(
        config,
        measure,
        layers=FEW_LAYERS,
        experts=sizes.get("num_experts", experts),
        top_k=sizes.get("num_experts_per_tok", 8),
        vocab_size=sizes.get("vocab_size", 151_936),
        routing=experts > 0,
    )
