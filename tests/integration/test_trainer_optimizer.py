"""What makes a step take less memory, against the plain step: an optimizer on the host, smaller moments,
parts of layers that are computed again, and a reference that changes places with the policy.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.logits_memory import PeakBytes
from tests.support.ranks import run_ranks
from tests.support.tiny_model import (
    build_tiny_deepseek_v3,
    build_tiny_qwen2_moe,
    build_tiny_qwen3_moe,
)
from tests.support.train_batches import random_batch
from tests.support.trainers import differing, gradients, started, trainer_config, weights
from trainer.megatron import activation_offload, model, shards
from trainer.megatron.sliced_adam import step_in_slices
from trainer.worker import TrainerWorker

pytestmark = [
    pytest.mark.real,
    pytest.mark.megatron,
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
    """Return the norms of the steps' gradients."""
    return [
        worker.train_on(random_batch(step, layers=1), step).metrics["grad_norm"]
        for step in range(first, last + 1)
    ]


Tensors = dict[str, torch.Tensor]


def saved_parts(worker: TrainerWorker) -> Tensors:
    parts = shards.parts_to_save(worker.model)
    return {f"{part.key} {part.global_offset}": torch.Tensor(part.data.clone().float()) for part in parts}


@pytest.fixture(scope="module")
def plain(one_layer: Path) -> tuple[list[float], Tensors, Tensors]:
    """The norms of three steps of the plain optimizer, and its weights and checkpoint after them."""
    with training(one_layer, {}, optimizer=UNCLIPPED) as worker:
        return take_steps(worker, 1, 3), weights(worker), saved_parts(worker)


@pytest.mark.parametrize(
    "more",
    [{"overlap_cpu_optimizer_d2h_h2d": True}, {"optimizer_offload_fraction": 0.5}],
    ids=["overlapped", "half"],
)
def test_a_step_is_the_same_bit_for_bit_when_the_host_takes_it(
    one_layer: Path, plain: tuple[Any, ...], more: dict[str, Any]
) -> None:
    from tests.support.emulated_optimizers import HostTensor

    norms, wanted, parts = plain
    with training(one_layer, OFFLOAD | more, optimizer=UNCLIPPED) as worker:
        assert take_steps(worker, 1, 3) == pytest.approx(norms, rel=1e-6)
        assert not differing(weights(worker), wanted)
        assert not differing(saved_parts(worker), parts)
        (inner,) = worker.model.inner_optimizers
        moments = [state["exp_avg"] for state in inner.state.values()]
        on_host = sum(moment.numel() for moment in moments if isinstance(moment, HostTensor))
        share = on_host / sum(moment.numel() for moment in moments)
        assert share == 1 if "optimizer_offload_fraction" not in more else 0.4 < share < 0.8


def test_what_the_host_steps_is_copied_there_once(one_layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = trainer_config(one_layer, megatron=OFFLOAD, dtype="bfloat16", optimizer=SETTINGS)
    with emulated(OFFLOAD):
        pinned: list[int] = []
        pin = torch.Tensor.pin_memory

        def counting(tensor: torch.Tensor) -> torch.Tensor:
            pinned.append(tensor.numel())
            return pin(tensor)

        monkeypatch.setattr(torch.Tensor, "pin_memory", counting)
        with started(config, None) as worker:
            (inner,) = worker.model.inner_optimizers
            assert sum(pinned) == sum(
                each.numel() for group in inner.param_groups for each in group["params"]
            )


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, OFFLOAD), (OFFLOAD, {}), (OFFLOAD, MOMENTS), (MOMENTS, MOMENTS)],
    ids=["to-host", "from-host", "host-to-moments", "moments"],
)
def test_a_run_continues_when_its_optimizer_moves(
    one_layer: Path, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    with training(one_layer, before, optimizer=UNCLIPPED) as worker:
        take_steps(worker, 1, 2)
        worker.save_checkpoint(str(tmp_path), {})
        worker.saved_checkpoint(wait=True)
        parts = saved_parts(worker)
        take_steps(worker, 3, 3)
        wanted = weights(worker)
    rounded = MOMENTS in (before, after)
    with training(one_layer, after, tmp_path, optimizer=UNCLIPPED) as worker:
        if after is not MOMENTS or before is MOMENTS:
            assert not differing(saved_parts(worker), parts)
        take_steps(worker, 3, 3)
        tolerance = {"rtol": 0.02, "atol": 1e-3} if rounded else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(weights(worker), wanted, **tolerance)


def test_moments_of_bfloat16_move_weights_by_their_rounding_only(one_layer: Path) -> None:
    with training(one_layer, {}) as worker:
        before = weights(worker)
        norms, wanted = take_steps(worker, 1, 3), weights(worker)
    with training(one_layer, MOMENTS) as worker:
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


def test_steps_and_checkpoints_are_the_same_when_the_optimizer_goes_in_slices(
    one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for most in (1 << 26, 1000):
        monkeypatch.setattr(model, "step_in_slices", partial(step_in_slices, most=most))
        with training(one_layer, MOMENTS) as worker:
            take_steps(worker, 1, 2)
            with PeakBytes() as step:
                worker.model.take_optimizer_step(1e-2)
            (inner,) = worker.model.inner_optimizers
            elements = sum(param.numel() for group in inner.param_groups for param in group["params"])
            # Two copies in float32 and one in bfloat16, what the kernel in torch computes, and a few scalars.
            assert (step.peak > 8 * elements) == (most > elements)
            found.append((weights(worker), saved_parts(worker), shards.optimizer_step(worker.model)))
    (whole, parts, count), (sliced, parts_sliced, count_sliced) = found
    assert count == count_sliced == 3
    assert list(parts) == list(parts_sliced)
    assert not differing(sliced, whole)
    assert not differing(parts_sliced, parts)


def test_the_device_holds_one_set_of_weights_while_the_reference_is_in_place(one_layer: Path) -> None:
    with started(trainer_config(one_layer, loss={"kl": {"coefficient": 0.1}})) as worker:
        reference = weights(worker)
        take_steps(worker, 1, 1)
        policy = weights(worker)
        largest = max(p.nbytes for chunk in worker.model.chunks for p in chunk.parameters())
        with PeakBytes() as live, worker.model.as_reference():
            pass
        assert live.peak <= largest
        with worker.model.as_reference():
            assert not differing(weights(worker), reference)
        with pytest.raises(KeyError), worker.model.as_reference():
            raise KeyError
        assert not differing(weights(worker), policy)


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
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def recomputes(module: torch.nn.Module) -> bool:
    """Whether a module of Megatron computes something again, by its own flags."""
    flags = (
        *("checkpoint_core_attention", "recompute_input_layernorm", "recompute_mlp", "recompute_up_proj"),
        *("moe_layer_recompute", "shared_experts_recompute"),
    )
    return any(getattr(module, flag, False) for flag in flags)


def run_rank(rank: int, model: Path, out: Path) -> dict[str, Tensors]:
    """Take three steps with each optimizer, and the third again from the other's checkpoint."""
    warnings.simplefilter("ignore")
    found = {}
    for resumed in (False, True):
        for kind, passed, other in (("plain", {}, "offloaded"), ("offloaded", OFFLOAD, "plain")):
            config = trainer_config(
                model, num_ranks=2, layout={"ep": 2}, megatron=passed, dtype="bfloat16", optimizer=SETTINGS
            )
            checkpoints, meeting = out / other if resumed else None, out / f"meeting {kind} {resumed}"
            with emulated(passed), started(config, checkpoints, rank=rank, meeting=meeting) as worker:
                if not resumed:
                    take_steps(worker, 1, 2)
                    worker.save_checkpoint(str(out / kind), {})
                    worker.saved_checkpoint(wait=True)
                take_steps(worker, 3, 3)
                found[f"{kind} {resumed}"] = weights(worker)
    return found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_ranks_take_the_same_steps_when_their_optimizers_are_on_the_host(
    one_layer: Path, tmp_path: Path
) -> None:
    found, _ = run_ranks(run_rank, one_layer, tmp_path)
    plain, *others = found.values()
    assert not any(differing(other, plain) for other in others)


# -- inputs of layers that are on the host until their backward pass ----------------------------------


LAYERS, HIDDEN = 4, 32


class Elsewhere:
    """A copy of which torch knows nothing, as it knows nothing of the host's while it counts a device's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bits = np.array(tensor.detach().view(torch.uint8).numpy())
        self._dtype = tensor.dtype
        self.nbytes = self._bits.nbytes

    def to(self, device: torch.device, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        return torch.from_numpy(self._bits).clone().view(self._dtype).to(device)


@pytest.mark.parametrize("replay", ["r3", "r2"])
def test_a_step_is_the_same_when_inputs_of_layers_are_on_the_host(
    tmp_path: Path, replay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe = build_tiny_qwen3_moe(tmp_path / "moe", num_layers=LAYERS)
    kept: list[Elsewhere] = []

    def copy(tensor: torch.Tensor) -> Elsewhere:
        kept.append(Elsewhere(tensor))
        return kept[-1]

    found, peaks = [], []
    for offload in (False, True):
        config = trainer_config(
            moe, replay=replay, recompute="offload" if offload else "full", micro_batch_tokens=1024
        )
        with started(config) as worker:
            batch = random_batch(1, layers=LAYERS, lengths=(300, 280), group_size=2)
            worker.train_on(batch, 1)  # the optimizer's state
            if offload:
                monkeypatch.setattr(activation_offload, "copy_to_host", copy)
            with PeakBytes() as live:
                worker.train_on(batch, 2)
            found.append(gradients(worker))
            peaks.append(live.peak)
    assert not differing(*found)
    hidden = 580 * HIDDEN * 4
    assert len(kept) >= LAYERS
    assert {each.nbytes for each in kept} == {hidden}
    # The peak is in the backward pass of the last layer: the inputs of the others are not there then.
    assert peaks[0] - peaks[1] >= (LAYERS - 2) * hidden
