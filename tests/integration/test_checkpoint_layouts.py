"""A checkpoint continues under any layout of either layer spec."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.integration.test_checkpoint_specs import FIGURES
from tests.integration.test_checkpoint_specs import config_of as spec_config
from tests.support.emulated_layers import spawn_with_transformer_engine
from tests.support.layer_specs import layers_of, stored_tensors
from tests.support.tiny_model import build_tiny_deepseek_v3, build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import differing, gathered_gradients, started, weights

pytestmark = [pytest.mark.long, pytest.mark.megatron, pytest.mark.timeout(600)]

MODELS = {
    "qwen3_moe": partial(
        build_tiny_qwen3_moe,
        num_layers=4,
        dense_layers=(0,),
        num_experts=4,
        vocab_size=97,  # two tensor ranks have 49 and 48
    ),
    "deepseek_v3": partial(build_tiny_deepseek_v3, num_layers=4, vocab_size=97),
}
LAYOUTS = {
    "tensor": {"tp": 2, "etp": 2},
    "interleaved pipeline": {"pp": 2, "vpp": 2},
    "expert": {"ep": 2},
    "tensor and expert": {"tp": 2, "ep": 2},
    "context": {"cp": 2},
    "data": {},
}
SPECS = ("transformer_engine", "local")
CHAIN = [(spec, layout) for layout in LAYOUTS for spec in SPECS]
"""Of two ranks, each resumed from the checkpoint of the one before, the first from that of a single rank."""


def config_of(model: Path, ranks: int, layout: dict) -> dict:
    return spec_config(model, num_ranks=ranks, layout=layout, micro_batch_tokens=48)


def batch(seed: int):
    return random_batch(seed, layers=4, routing=False, group_size=6)


def run_rank(rank: int, out: Path) -> None:
    """Goes through the layouts; runs in a process of its own."""
    torch.set_num_threads(1)
    for model in MODELS:
        before = "one"
        for spec, layout in CHAIN:
            name = f"{layout} {spec}"
            config, meeting = config_of(out / model, 2, LAYOUTS[layout]), out / f"meeting {model} {name}"
            source = out / f"{model} {before}"
            with layers_of(spec), started(config, source, rank=rank, meeting=meeting) as worker:
                worker.save_checkpoint(str(out / f"{model} {name}"), {})
                metrics = worker.train_on(batch(2), 2).metrics
                assert worker.saved_checkpoint(wait=True).failure is None
                found = metrics, gathered_gradients(worker), weights(worker)
            torch.save(found, out / f"{model} {name} {rank}.pt")
            before = name


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """A single rank's checkpoint, and those of all layouts, with what another step gives."""
    out = tmp_path_factory.mktemp("layouts")
    for name, build in MODELS.items():
        build(out / name)
        with layers_of("local"), started(config_of(out / name, 1, {})) as worker:
            worker.train_on(batch(1), 1)
            worker.save_checkpoint(str(out / f"{name} one"), {})
            metrics = worker.train_on(batch(2), 2).metrics
            torch.save((metrics, gathered_gradients(worker), weights(worker)), out / f"{name} one.pt")
            assert worker.saved_checkpoint(wait=True).failure is None
    spawn_with_transformer_engine(run_rank, out, ranks=2)
    return out


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Megatron calls torch by an old name
@pytest.mark.parametrize("model", MODELS)
def test_state_is_the_same_bit_for_bit_when_it_has_gone_through_layouts_of_both_specs(ran, model):
    with started(config_of(ran / model, 1, {})):
        first = stored_tensors(ran / f"{model} one" / "step_00000001")
        for spec, layout in CHAIN:
            again = stored_tensors(ran / f"{model} {layout} {spec}" / "step_00000001")
            assert not differing(again, first), (spec, layout)


@pytest.mark.parametrize("model", MODELS)
def test_a_single_rank_goes_on_bit_for_bit_when_many_layouts_were_between(ran, model):
    expected, _, trained = torch.load(ran / f"{model} one.pt")
    spec, layout = CHAIN[-1]
    last = ran / f"{model} {layout} {spec}"
    with layers_of("local"), started(config_of(ran / model, 1, {}), last) as worker:
        metrics = worker.train_on(batch(2), 2).metrics
        assert [metrics[figure] for figure in FIGURES] == [expected[figure] for figure in FIGURES]
        assert not differing(weights(worker), trained)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_the_next_step_is_the_same_when_another_layout_of_either_spec_resumes(ran, model, layout):
    """Bit for bit between specs, and within rounding of a single rank."""
    (fused, *of_fused), (local, *of_local) = (torch.load(ran / f"{model} {layout} {s} 0.pt") for s in SPECS)
    alone, *_ = torch.load(ran / f"{model} one.pt")
    for figure in FIGURES:
        assert fused[figure] == pytest.approx(local[figure], rel=1e-6), figure
        assert local[figure] == pytest.approx(alone[figure], rel=0.02, abs=1e-3), figure
    for found, expected in zip(of_fused, of_local, strict=True):
        assert not differing(found, expected)
