"""`trainer.megatron` in a real rank: what has an effect, what leaves gradients as they are, what resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.config import LayoutConfig
from async_rl.errors import ConfigError
from tests.support.ranks import run_ranks
from tests.support.tiny_model import (
    build_tiny_deepseek_v3,
    build_tiny_glm4_moe,
    build_tiny_mixtral,
    build_tiny_qwen2_moe,
    build_tiny_qwen3,
)
from tests.support.train_batches import random_batch
from tests.support.trainers import (
    differing,
    gathered_gradients,
    gradients,
    started,
    trainer_config,
    training_state,
    weights,
)
from trainer.megatron.layout import accumulate_in_place, fields_of, transformer_config
from trainer.megatron.model import (
    DistributedDataParallelConfig,
    MegatronOptimizerConfig,
    TransformerConfig,
)
from trainer.passthrough import ALLOWED

pytestmark = [pytest.mark.real, pytest.mark.megatron, pytest.mark.timeout(600)]

CHOSEN = {
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_dtype",
    "moe_shared_expert_overlap",
    "moe_token_dispatcher_type",
    "optimizer_offload_fraction",
    "recompute_modules",
}
"""What the trainer sets and the config may set otherwise."""


def one_step(model: Path, passed: dict[str, Any], **trainer: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of a step."""
    with started(trainer_config(model, megatron=passed, **trainer)) as worker:
        worker.train_on(random_batch(1, layers=1), 1)
        return gradients(worker)


def test_whatever_the_trainer_sets_is_owned_or_may_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    of_latent = [kind for kind in TransformerConfig.__subclasses__() if kind.__name__.startswith("MLA")]
    for kind in (TransformerConfig, *of_latent, DistributedDataParallelConfig, MegatronOptimizerConfig):

        def remember(self: Any, __init__: Any = kind.__init__, **fields: Any) -> None:
            seen.update(fields)
            __init__(self, **fields)

        monkeypatch.setattr(kind, "__init__", remember)
    build: Any
    for build in (build_tiny_qwen3, build_tiny_mixtral, build_tiny_qwen2_moe, build_tiny_glm4_moe):
        with started(trainer_config(build(tmp_path / build.__name__), replay=False)):
            for recompute in ("full", "selective"):
                seen |= transformer_config(LayoutConfig(), recompute, True, fused=True).keys()
    with started(trainer_config(build_tiny_deepseek_v3(tmp_path / "deepseek"), replay=False)):
        pass
    assert {"rotary_base", "grad_reduce_in_fp32", "adam_beta2", "moe_router_topk"} <= seen
    assert seen & ALLOWED <= CHOSEN


def test_fields_of_the_model_and_of_the_optimizer_have_an_effect(one_layer: Path) -> None:
    plain = one_step(one_layer, {}, dtype="bfloat16")
    passed = {"moe_router_dtype": "fp32", "apply_wd_to_qk_layernorm": True}
    config = trainer_config(one_layer, megatron=passed, dtype="bfloat16", optimizer={"weight_decay": 0.1})
    with started(config) as worker:
        worker.train_on(random_batch(1, layers=1), 1)
        found = gradients(worker)
        decayed = {
            tuple(parameter.shape): group["weight_decay"] > 0
            for inner in worker.model.inner_optimizers
            for group in inner.param_groups
            for parameter in group["params"]
            if parameter.ndim == 1
        }
    assert decayed == {(16,): True, (32,): False}  # norms of queries and keys, and of layers
    apart = {name for name, gradient in plain.items() if not torch.equal(gradient, found[name])}
    assert any("router" in name for name in apart)
    for name, gradient in plain.items():  # by what the rounding of gates to bfloat16 explains
        assert (gradient - found[name]).norm() <= 0.05 * gradient.norm(), name


@pytest.fixture(scope="module")
def plain(one_layer: Path) -> dict[str, torch.Tensor]:
    return one_step(one_layer, {})


@pytest.mark.parametrize(
    ("passed", "exact"),
    [
        ({"deterministic_mode": True}, True),
        ({"moe_router_dtype": "fp32"}, True),  # the model is float32
        ({"gradient_accumulation_fusion": False, "moe_permute_fusion": False}, True),
        ({"bias_activation_fusion": True}, False),
        ({"moe_router_dtype": "fp64"}, False),
    ],
    ids=str,
)
def test_gradients_are_equal_when_a_field_only_changes_how_they_are_computed(
    one_layer: Path, plain: dict[str, torch.Tensor], passed: dict[str, Any], exact: bool
) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(one_step(one_layer, passed), plain, **tolerance)


LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {
        "overlap_grad_reduce": True,
        "megatron": {"bucket_size": 1000, "pad_buckets_for_high_nccl_busbw": True},
    },
    "expert": {"layout": {"ep": 2}, "megatron": {"moe_shared_expert_overlap": True}},
    "pipeline": {"layout": {"pp": 2}, "megatron": {"deallocate_pipeline_outputs": True}},
}
"""Of two ranks."""


def run_rank(rank: int, model: Path, out: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for name, trainer in LAYOUTS.items():
        config = trainer_config(model, num_ranks=2, **trainer)
        with started(config, rank=rank, meeting=out / name) as worker:
            worker.train_on(random_batch(1, layers=2), 1)
            found[name] = gathered_gradients(worker)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one rank and the first of two found; two layers with shared experts."""
    out = tmp_path_factory.mktemp("ranks")
    model = build_tiny_qwen2_moe(out / "model", num_layers=2)
    two, _ = run_ranks(run_rank, model, out)
    with started(trainer_config(model)) as worker:
        worker.train_on(random_batch(1, layers=2), 1)
        return two | {"one": gathered_gradients(worker)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_have_the_gradients_of_one_when_fields_are_passed(
    name: str, ranks: dict[str, dict[str, Any]]
) -> None:
    torch.testing.assert_close(ranks[name], ranks["one"], rtol=1e-4, atol=1e-6)


def test_a_rank_refuses_what_check_would(one_layer: Path) -> None:
    for passed, words in (
        ({"moe_router_dtyp": "fp32"}, "near it are moe_router_dtype"),
        ({"moe_permute_fusion": True}, "works on GPUs only"),
        ({"num_layers": 3}, "num_layers cannot be set: the trainer decides it"),
    ):
        with pytest.raises(ConfigError, match=words), started(trainer_config(one_layer, megatron=passed)):
            pass


def test_a_run_continues_with_other_fields(one_layer: Path, tmp_path: Path) -> None:
    batches = [random_batch(seed, layers=1) for seed in (1, 2)]
    with started(trainer_config(one_layer)) as worker:
        worker.train_on(batches[0], 1)
        worker.save_checkpoint(str(tmp_path), {})
        worker.saved_checkpoint(wait=True)
        worker.train_on(batches[1], 2)
        wanted = weights(worker), training_state(worker)
    passed = {"moe_router_dtype": "fp32", "deterministic_mode": True}
    with started(trainer_config(one_layer, megatron=passed), tmp_path) as worker:
        assert worker.num_steps == 1
        worker.train_on(batches[1], 2)
        assert not differing(weights(worker), wanted[0])
        assert all(torch.equal(*pair) for pair in zip(training_state(worker), wanted[1], strict=True))


def test_weight_gradients_are_added_up_by_the_layers_of_transformer_engine_unless_refused() -> None:
    chunk = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    chunk[0].fuse_wgrad_accumulation = False  # as TransformerEngine's layers have it
    accumulate_in_place(chunk)
    assert chunk[0].fuse_wgrad_accumulation is True
    assert not hasattr(chunk[1], "fuse_wgrad_accumulation")
    # Megatron's own output layer would ask for Apex.
    assert fields_of(TransformerConfig, {"gradient_accumulation_fusion": True}) == {}
