"""What makes a step take less memory, against the plain step: an optimizer on the host, smaller moments,
parts of layers that are computed again, and a reference that changes places with the policy.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.support.live_bytes import LiveBytes
from tests.support.tiny_model import (
    build_tiny_deepseek_v3,
    build_tiny_qwen2_moe,
    build_tiny_qwen3,
    build_tiny_qwen3_moe,
)
from tests.support.train_batches import random_batch
from tests.support.trainers import gradients, started, trainer_config, weights
from trainer import worker as worker_module
from trainer.megatron import shards
from trainer.worker import TrainerWorker

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore:::megatron"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's, of an exchange that Megatron calls
]

OFFLOAD = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
MOMENTS = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bfloat16",
    "exp_avg_sq_dtype": "bfloat16",
}
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.01}
UNCLIPPED = SETTINGS | {"clip_grad": 1e3}
"""Optimizers sum the norm of the gradients in orders of their own. Its last bits, and so clipped gradients,
depend on how the processor rounds these sums."""


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3_moe(tmp_path_factory.mktemp("models") / "moe", num_layers=1)


@contextlib.contextmanager
def emulated(passed: dict[str, Any]) -> Iterator[None]:
    from tests.support import emulated_optimizers  # it imports Megatron, which the trainer prepares

    with pytest.MonkeyPatch.context() as patch:
        if "optimizer_cpu_offload" in passed:
            emulated_optimizers.offload_to_host(patch)
        elif passed:
            emulated_optimizers.take_fused_adam(patch)
        yield


@contextlib.contextmanager
def training(
    model: Path, passed: dict[str, Any], folder: Path | None = None, *, optimizer: Any = SETTINGS
) -> Iterator[TrainerWorker]:
    config = trainer_config(model, megatron=passed, dtype="bfloat16", optimizer=optimizer)
    with emulated(passed), started(config, folder) as worker:
        yield worker


def take_steps(worker: TrainerWorker, first: int, last: int) -> list[float]:
    """Returns the norms of the steps' gradients."""
    return [
        worker.train_on(random_batch(step, layers=1), step).metrics["grad_norm"]
        for step in range(first, last + 1)
    ]


def saved_parts(worker: TrainerWorker) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    parts = shards.parts_to_save(worker.model)
    return {(part.key, tuple(part.global_offset)): torch.Tensor(part.data.clone().float()) for part in parts}


@pytest.mark.parametrize(
    "more",
    [{}, {"overlap_cpu_optimizer_d2h_h2d": True}, {"optimizer_offload_fraction": 0.5}],
    ids=["whole", "overlapped", "half"],
)
def test_a_step_is_the_same_bit_for_bit_when_the_host_takes_it(moe: Path, more: dict[str, Any]) -> None:
    from tests.support.emulated_optimizers import HostTensor

    with training(moe, {}, optimizer=UNCLIPPED) as worker:
        norms, wanted, parts = take_steps(worker, 1, 3), weights(worker), saved_parts(worker)
    with training(moe, OFFLOAD | more, optimizer=UNCLIPPED) as worker:
        assert take_steps(worker, 1, 3) == pytest.approx(norms, rel=1e-6)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(worker).items())
        held = saved_parts(worker)
        assert held.keys() == parts.keys()
        assert all(torch.equal(held[key], part) for key, part in parts.items())
        (inner,) = worker.model.inner_optimizers
        moments = [state["exp_avg"] for state in inner.state.values()]
        on_host = sum(moment.numel() for moment in moments if isinstance(moment, HostTensor))
        share = on_host / sum(moment.numel() for moment in moments)
        assert share == 1 if "optimizer_offload_fraction" not in more else 0.4 < share < 0.8


def test_gradients_are_clipped_alike_when_the_host_takes_the_step(moe: Path) -> None:
    with training(moe, {}) as worker:
        take_steps(worker, 1, 1)
        parts = saved_parts(worker)
    with training(moe, OFFLOAD) as worker:
        (norm,) = take_steps(worker, 1, 1)
        assert norm > 100 * SETTINGS["clip_grad"]
        for key, part in saved_parts(worker).items():
            torch.testing.assert_close(part, parts[key], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("before", "after"), [({}, OFFLOAD), (OFFLOAD, {}), (OFFLOAD, OFFLOAD), (OFFLOAD, MOMENTS)]
)
def test_a_run_continues_when_its_optimizer_moves(
    moe: Path, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    with training(moe, before, optimizer=UNCLIPPED) as worker:
        take_steps(worker, 1, 2)
        worker.save_checkpoint(str(tmp_path), {})
        worker.saved_checkpoint(wait=True)
        take_steps(worker, 3, 3)
        wanted = weights(worker)
    with training(moe, after, tmp_path, optimizer=UNCLIPPED) as worker:
        take_steps(worker, 3, 3)
        for name, tensor in weights(worker).items():
            if after is MOMENTS:  # its moments are rounded
                torch.testing.assert_close(tensor, wanted[name], rtol=0.02, atol=1e-3)
            else:
                assert torch.equal(tensor, wanted[name]), name


def test_moments_of_bfloat16_move_weights_by_their_rounding_only(moe: Path) -> None:
    with training(moe, {}) as worker:
        before = weights(worker)
        norms, wanted = take_steps(worker, 1, 3), weights(worker)
    with training(moe, MOMENTS) as worker:
        # Gradients of the first step are the same, also clipped: nothing was rounded yet.
        found = take_steps(worker, 1, 3)
        assert found[0] == pytest.approx(norms[0], rel=1e-6)
        (inner,) = worker.model.inner_optimizers
        for state in inner.state.values():
            assert {name: tensor.dtype for name, tensor in state.items()} == {
                "exp_avg": torch.bfloat16,
                "exp_avg_sq": torch.bfloat16,
                "master_param": torch.float32,
            }
        apart, moved = (
            sum(float((tensor.detach() - other[name].detach()).norm() ** 2) for name, tensor in of.items())
            for of, other in ((weights(worker), wanted), (wanted, before))
        )
        assert 0 < apart < (0.02**2) * moved


@pytest.mark.parametrize("after", [MOMENTS, {}], ids=["same", "plain"])
def test_moments_of_bfloat16_are_saved_and_loaded_by_any_optimizer(
    moe: Path, tmp_path: Path, after: dict[str, Any]
) -> None:
    with training(moe, MOMENTS) as worker:
        take_steps(worker, 1, 2)
        worker.save_checkpoint(str(tmp_path), {})
        worker.saved_checkpoint(wait=True)
        parts = saved_parts(worker)
        take_steps(worker, 3, 3)
        wanted = weights(worker)
    with training(moe, after, tmp_path) as worker:
        held = saved_parts(worker)
        assert held.keys() == parts.keys()
        assert all(torch.equal(held[key], part) for key, part in parts.items())
        take_steps(worker, 3, 3)
        for name, tensor in weights(worker).items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0.01, atol=1e-4)


def test_the_device_holds_one_set_of_weights_while_the_reference_is_in_place(moe: Path) -> None:
    with started(trainer_config(moe, loss={"kl": {"coefficient": 0.1}})) as worker:
        reference = weights(worker)
        take_steps(worker, 1, 1)
        policy = weights(worker)
        largest = max(p.nbytes for chunk in worker.model.chunks for p in chunk.parameters())
        for _ in range(2):
            with LiveBytes() as live, worker.model.as_reference():
                pass
            assert live.peak <= largest
            with worker.model.as_reference():
                assert all(torch.equal(t, reference[name]) for name, t in weights(worker).items())
            with pytest.raises(KeyError), worker.model.as_reference():
                raise KeyError
            assert all(torch.equal(tensor, policy[name]) for name, tensor in weights(worker).items())


@pytest.mark.parametrize(
    ("build", "modules"),
    [
        (build_tiny_qwen2_moe, ["core_attn"]),
        (build_tiny_qwen2_moe, ["layernorm", "mlp", "moe"]),
        (build_tiny_qwen2_moe, ["shared_experts"]),
        (build_tiny_deepseek_v3, ["mla_up_proj"]),
    ],
    ids=["attention", "norms-and-experts", "shared-experts", "latent-attention"],
)
def test_gradients_are_equal_when_modules_are_computed_again(
    build: Any, modules: list[str], tmp_path: Path
) -> None:
    """Two layers; with routing recorded and replayed, also by routers that are called again."""
    model = build(tmp_path / "model", num_layers=2)
    experts = json.loads((model / "config.json").read_text())
    batch = random_batch(
        1, layers=2, experts=experts.get("num_experts") or experts["n_routed_experts"], routing=False
    )
    found = []
    for passed in ({}, {"recompute_modules": modules}):
        recompute = "selective" if passed else "none"
        config = trainer_config(model, replay="r2", recompute=recompute, megatron=passed)
        with started(config) as worker:
            again = [m for chunk in worker.model.chunks for m in chunk.modules() if recomputes(m)]
            assert bool(again) == bool(passed)
            worker.train_on(batch, 1)
            found.append(gradients(worker))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-7)


def recomputes(module: torch.nn.Module) -> bool:
    """Whether a module of Megatron computes something again, by its own flags."""
    flags = (
        *("checkpoint_core_attention", "recompute_input_layernorm", "recompute_mlp", "recompute_up_proj"),
        *("moe_layer_recompute", "shared_experts_recompute"),
    )
    return any(getattr(module, flag, False) for flag in flags)


RANKS: dict[str, dict[str, int]] = {"data": {}, "expert": {"ep": 2}, "tensor": {"tp": 2, "etp": 2}}
"""Layouts of two ranks, each with another part of the optimizer."""


def run_rank(rank: int, model: str, out: str) -> None:
    """Takes three steps in each layout, and the third again from the checkpoint of the other optimizer."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, layout in RANKS.items():
        for resumed in (False, True):
            for kind, passed in (("plain", {}), ("offloaded", OFFLOAD)):
                config = trainer_config(
                    Path(model),
                    num_ranks=2,
                    layout=layout,
                    megatron=passed,
                    dtype="bfloat16",
                    optimizer=SETTINGS,
                )
                other = "offloaded" if kind == "plain" else "plain"
                with emulated(passed):
                    worker = TrainerWorker(config, rank, 2, f"file://{out}/{name} {kind} {resumed}")
                    worker.setup(f"{out}/checkpoint {name} {other}" if resumed else None)
                    if not resumed:
                        take_steps(worker, 1, 2)
                        worker.save_checkpoint(f"{out}/checkpoint {name} {kind}", {})
                        worker.saved_checkpoint(wait=True)
                    take_steps(worker, 3, 3)
                    torch.save(weights(worker), f"{out}/{name} {kind} {resumed} {rank}")
                    worker.close()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_ranks_take_the_same_steps_when_their_optimizers_are_on_the_host(
    moe: Path, tmp_path: Path
) -> None:
    mp.spawn(run_rank, (str(moe), str(tmp_path)), nprocs=2)
    for name in RANKS:
        plain, *others = (
            torch.load(tmp_path / f"{name} {kind} {resumed} 0", weights_only=False)
            for resumed in (False, True)
            for kind in ("plain", "offloaded")
        )
        for other in others:
            for key, tensor in plain.items():
                # Tensor ranks sum the norm of gradients in another order, by which these are clipped.
                tolerance = 2**-7 if name == "tensor" else 0.0
                torch.testing.assert_close(other[key], tensor, rtol=tolerance, atol=tolerance * 1e-2)


def test_micro_batches_are_aligned_for_products_in_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's local layers, which are built here, compute as they always do."""
    monkeypatch.setattr(worker_module, "check_megatron_settings", lambda *_, **__: None)
    passed = {"fp8": "hybrid", "fp8_recipe": "mxfp8"}
    config = trainer_config(build_tiny_qwen3(tmp_path / "dense"), replay=False, megatron=passed)
    with started(config) as worker:
        assert worker.model.alignment == 32
