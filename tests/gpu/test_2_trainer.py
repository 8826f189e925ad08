"""The trainer's kernels: fused and plain, packed and single, replayed and native routing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.logits_memory import LogProbs, plain_log_probs
from benchmarks.logits_memory import measure as log_probs_at
from tests.gpu import device
from tests.gpu.models import build
from tests.support.train_batches import random_batch
from tests.support.trainers import (
    log_probs_of,
    native_rows,
    started,
    trainer_config,
)
from trainer.losses.log_probs import vocab_parallel_log_probs
from trainer.megatron.lora import adapted_weights
from trainer.megatron.sliced_adam import step_in_slices
from trainer.worker import TrainerWorker

pytestmark = [
    pytest.mark.proof(needs="trainer", seconds=60, value=30),
    pytest.mark.filterwarnings("ignore:::megatron"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "model")


def batch_of(seed: int = 0, **fields):
    return random_batch(seed, layers=4, experts=16, vocab_size=512, **fields)


@pytest.mark.proof(value=39)
def test_fused_layers_agree_with_plain_ones(model: Path, measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine's layers give the log-probs and gradients of Megatron's own."""
    batch, found = batch_of(), {}
    for fused in (True, False):
        expected = device.take_layers(monkeypatch, fused)
        with started(trainer_config(model, dtype="bfloat16")) as worker:
            layer = worker.model.chunks[0].module
            names = {type(module).__module__.split(".")[0] for module in layer.modules()}
            assert ("transformer_engine" in names) == expected
            found[fused] = log_probs_of(worker, batch), worker.train_on(batch, 1).metrics["grad_norm"]
    mask = batch.loss_mask[1:]
    difference = np.abs(found[True][0] - found[False][0])[:-1][mask]
    measure("log-probs apart, mean", float(difference.mean()), "nats")
    measure("log-probs apart, max", float(difference.max()), "nats")
    measure("gradient norms", found[True][1] / found[False][1], "(ratio)")
    assert difference.mean() < 0.02
    assert found[True][1] == pytest.approx(found[False][1], rel=0.1)


AWARE = {"use_precision_aware_optimizer": True}
SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "optimizer on the host": ({"megatron": AWARE | {"optimizer_cpu_offload": True}}, 0.01),
    "moments in bfloat16": (
        {"megatron": AWARE | {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}},
        0.02,
    ),
    "inputs of layers on the host": ({"recompute": "offload"}, 0.01),
    "modules computed again": (
        {"recompute": "selective", "megatron": {"recompute_modules": ["layernorm", "moe_act"]}},
        0.01,
    ),
    "gradients not added up by layers": ({"megatron": {"gradient_accumulation_fusion": False}}, 0.01),
    "routers in float32": ({"megatron": {"moe_router_dtype": "fp32"}}, 0.05),
    "products in fp8": ({"megatron": {"fp8": "hybrid", "fp8_recipe": "tensorwise"}}, 0.2),
}
"""Settings of the trainer, and how far gradient norms may be apart."""


@pytest.mark.proof(value=45)
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_the_same_with_settings_of_megatron(model: Path, measure, name: str) -> None:
    """Steps with `trainer.megatron` and `recompute: offload` have the gradient norms of plain steps."""
    settings, tolerance = SETTINGS[name]
    found = []
    for trainer in ({}, settings):
        config = device.fitted(trainer_config(model, dtype="bfloat16", **trainer))
        with device.peak_bytes() as peak_so_far, started(config) as worker:
            norms = [worker.train_on(batch_of(step), step).metrics["grad_norm"] for step in (1, 2, 3)]
            found.append((norms, peak_so_far()))
    (plain, before), (norms, peak) = found
    measure(f"{name}: gradient norm of the 3rd step", norms[2] / plain[2], "(ratio)")
    measure(f"{name}: peak", peak / before, "(ratio of memory)")
    assert norms == pytest.approx(plain, rel=tolerance)


@pytest.mark.proof(value=59)
def test_the_optimizer_goes_in_slices_bit_for_bit(measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of TransformerEngine's Adam in slices give the bits of whole steps, and take less memory."""
    FusedAdam = device.fused_adam(monkeypatch)
    most, sizes = 1 << 22, (1 << 24, 12345, 3 << 20)
    smaller = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    found, taken = [], []
    for sliced in (False, True):
        torch.manual_seed(0)
        params = [torch.randn(size, device=device.DEVICE).bfloat16() for size in sizes]
        optimizer = FusedAdam(
            params, lr=1e-2, weight_decay=0.1, master_weights=True, use_decoupled_grad=True, **smaller
        )
        if sliced:
            step_in_slices(optimizer, most)
        for _ in range(3):
            for param in params:
                param.decoupled_grad = torch.randn(param.shape, device=device.DEVICE)
            with device.peak_bytes() as peak:
                optimizer.step()
            last = peak()
        taken.append(last)
        found.append([*params, *(tensor for param in params for tensor in optimizer.state[param].values())])
    measure("a step at once", taken[0] / 2**20, "MiB")
    measure("in slices", taken[1] / 2**20, "MiB")
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    device.end_rehearsal()  # the kernel in torch takes memory
    assert taken[0] >= 8 * sum(sizes)
    assert taken[1] <= 10 * most + (1 << 20)


def test_adapters_are_weights_with_the_adapters_merged(model: Path, measure, tmp_path: Path) -> None:
    """Adapters on attention and grouped experts give the log-probs and gradients of merged weights."""
    lora = {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}
    batch, unclipped = batch_of(), {"optimizer": {"lr": 1e-3, "clip_grad": 1e6}}
    generator = torch.Generator().manual_seed(0)
    with started(trainer_config(model, dtype="bfloat16", lora=lora, **unclipped)) as worker:
        plain = log_probs_of(worker, batch)
        for each in adapted_weights(worker.model.chunks):
            each.b.data.copy_(torch.randn(each.b.shape, generator=generator) / 20)
        for part in worker.model.optimizer.chained_optimizers:
            part.reload_model_params()
        adapted = log_probs_of(worker, batch)
        worker.model.bridge.save_hf(worker.model.chunks, tmp_path / "merged")
        factors = {
            each.name: each.a.detach().float().clone() for each in adapted_weights(worker.model.chunks)
        }
        worker.train_on(batch, 1)
        # B's gradient is that of the weight times A's transpose: autograd's of the merged formulation.
        gradients = {each.name: each.b.main_grad.clone() for each in adapted_weights(worker.model.chunks)}
    with started(trainer_config(tmp_path / "merged", dtype="bfloat16", **unclipped)) as worker:
        merged = log_probs_of(worker, batch)
        worker.train_on(batch, 1)
        of_weights = gradients_by_name(worker)
    differences = [
        (found - 2 * of_weights[name] @ factors[name].t()).norm() / found.norm()
        for name, found in gradients.items()
        if found.norm() > 0
    ]
    measure("gradients of B apart, mean", float(torch.stack(differences).mean()), "(relative)")
    mask = np.append(batch.loss_mask[1:], False)
    effect, apart = np.abs(adapted - plain)[mask].mean(), np.abs(adapted - merged)[mask].mean()
    measure("effect of the adapters", float(effect), "nats")
    measure("log-probs apart from merged weights, mean", float(apart), "nats")
    assert apart < 0.03
    assert effect > 5 * apart
    assert torch.stack(differences).mean() < 0.1


def gradients_by_name(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    """The gradients of all weights of layers, by the names that adapters have."""
    found = {}
    for name, parameter in worker.model.chunks[0].named_parameters():
        if layer := re.search(r"decoder\.layers\.\d+\..+", name):
            short = layer[0].removesuffix(".weight")
            short = re.sub(r"\.experts\.(linear_fc[12])\.weight(\d+)$", r".experts.experts.\2.\1", short)
            found[short.replace(".local_experts.", ".experts.")] = parameter.main_grad.clone()
    return found


def test_packed_trajectories_do_not_see_each_other(model: Path, measure) -> None:
    """Flash attention over packed trajectories (thd) gives each the log-probs that it has by itself."""
    batch = batch_of(lengths=(130, 3, 257, 64, 65, 9), prompt=2)
    results = []
    for budget in (1, 100_000):
        with started(trainer_config(model, dtype="bfloat16", micro_batch_tokens=budget)) as worker:
            results.append(log_probs_of(worker, batch))
    difference = np.abs(results[0] - results[1])
    measure("log-probs apart, mean", float(difference.mean()), "nats")
    measure("log-probs apart, max", float(difference.max()), "nats")
    # Rounding in bfloat16 depends on matrix tiles; attention across trajectories would change nats.
    assert difference.mean() < 0.01
    assert difference.max() < 0.3


def test_replayed_routing_is_the_routing_that_was_recorded(model: Path, measure) -> None:
    """Replaying the trainer's own choice changes nothing; replaying another one does."""
    batch = batch_of()
    with started(trainer_config(model, dtype="bfloat16")) as worker:
        rows = native_rows(worker, batch)
        other = (rows + 1) % 16
        replayed = log_probs_of(worker, msgspec.structs.replace(batch, routed_experts=rows))
        wrong = log_probs_of(worker, msgspec.structs.replace(batch, routed_experts=other))
    with started(trainer_config(model, dtype="bfloat16", replay=False)) as worker:
        native = log_probs_of(worker, batch)
    mask = np.append(batch.loss_mask[1:], False)
    same, changed = np.abs(replayed - native)[mask].mean(), np.abs(wrong - native)[mask].mean()
    measure("own choice replayed, log-probs apart", float(same), "nats")
    measure("another choice replayed", float(changed), "nats")
    assert same < 1e-3
    assert changed > 20 * max(same, 1e-4)


def test_log_probs_on_the_gpu_are_those_of_hugging_face_on_the_host(model: Path, measure) -> None:
    """The trainer's log-probs in float32 are those that Hugging Face's model computes on the CPU."""
    from transformers import AutoModelForCausalLM

    batch = batch_of()
    with started(trainer_config(model, replay=False)) as worker:
        found = log_probs_of(worker, batch)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = np.zeros_like(found)
    for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        tokens = torch.from_numpy(batch.token_ids[begin:end].astype(np.int64))
        with torch.no_grad():
            log_probs = reference(tokens[None]).logits[0].log_softmax(-1)
        expected[begin : end - 1] = log_probs[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
    mask = np.append(batch.loss_mask[1:], False)
    difference = np.abs(found - expected)[mask]
    measure("log-probs apart, mean", float(difference.mean()), "nats")
    measure("log-probs apart, max", float(difference.max()), "nats")
    assert difference.mean() < 5e-3  # matrix products may run in TF32


@pytest.mark.parametrize("entropy", [False, True])
def test_log_probs_take_no_memory_for_the_vocabulary(measure, entropy: bool) -> None:
    """Log-probs of 32k tokens take the memory of 2k and of their hidden states, in the plain way's time."""
    at = device.sized(2048, 64), device.DEVICE, device.sized(5, 1)
    few, middle, many = (
        log_probs_at(device.sized(151_936, 4096), device.sized(tokens, tokens // 64), *at, entropy=entropy)
        for tokens in (2048, 16_384, 32_768)
    )
    for name, row in (("2k", few), ("16k", middle), ("32k", many)):
        measure(f"peak, {name} tokens", row.peak_bytes / 2**30, "GiB")
        measure(f"time, {name} tokens", row.seconds * 1000, "ms")
    assert middle.plain_peak_bytes is not None
    assert middle.ratio_time is not None
    measure("peak of the plain way, 16k tokens", middle.plain_peak_bytes / 2**30, "GiB")
    measure("time against the plain way, 16k tokens", middle.ratio_time, "(ratio of time)")
    grown, of_hidden = many.peak_bytes - few.peak_bytes, many.hidden_bytes - few.hidden_bytes
    device.end_rehearsal()
    assert grown < 1.1 * of_hidden
    assert middle.ratio_time < 1.4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_log_probs_are_those_of_the_plain_way(measure, dtype: torch.dtype) -> None:
    """Log-probs, entropies and their gradients are as near to float64 as those of autograd's softmax."""
    torch.manual_seed(0)
    rows, vocabulary = device.sized((1000, 151_936), (100, 4096))
    with torch.device(device.DEVICE):
        hidden, weight = (torch.randn(n, 256) * 0.3 for n in (rows, vocabulary))
        labels, upstream = torch.randint(0, vocabulary, (rows,)), torch.randn(rows, 2)

    def results(function: LogProbs, *inputs: torch.Tensor) -> list[torch.Tensor]:
        given = [tensor.clone().requires_grad_() for tensor in inputs]
        values = torch.stack(function(*given, labels), -1)
        gradients = torch.autograd.grad((values * upstream).sum(), given)
        return [tensor.detach().double() for tensor in (values, *gradients)]

    inputs = hidden.to(dtype), weight.to(dtype)
    exact = results(softmax_of_all, *(tensor.double() for tensor in inputs))
    ours, plain = results(vocab_parallel_log_probs, *inputs), results(plain_log_probs, *inputs)
    for name, one, other, want in zip(("values", "by hidden", "by weight"), ours, plain, exact, strict=True):
        apart, plain_apart = ((found - want).norm() / want.norm() for found in (one, other))
        measure(f"{name}, apart from float64", float(apart), "(relative)")
        assert apart < 1.1 * plain_apart + 1e-6


def softmax_of_all(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(hidden @ weight.t(), -1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
