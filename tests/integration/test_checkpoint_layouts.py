"""A checkpoint of any layout goes on under any other: the same state bit for bit, and the same next step."""

from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.layer_specs import stored_tensors
from tests.support.ranks import run_ranks
from tests.support.tiny_model import build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import differing, started, trainer_config, weights

pytestmark = [pytest.mark.long, pytest.mark.megatron, pytest.mark.timeout(600)]

CHAIN = {
    "data, with the distributed optimizer": {},
    "tensor and sequence": {"tp": 2, "etp": 2},
    "expert": {"ep": 2},
    "pipeline": {"pp": 2},
    "interleaved pipeline": {"pp": 2, "vpp": 2},
    "tensor and expert": {"tp": 2, "ep": 2},
    "context": {"cp": 2},
}
"""Of two ranks, each resumed from the checkpoint of the one before, the first from that of a single rank."""


def config_of(model, ranks, layout):
    return trainer_config(
        model,
        replay=False,
        num_ranks=ranks,
        layout=layout,
        micro_batch_tokens=48,
        loss={"advantages": "gae"},
        critic={"lr": 1e-3},
    )


def batch(seed):
    plain = random_batch(seed, layers=4, lengths=(13, 7, 30, 19, 5, 22), group_size=6)
    none = {"routed_experts": None, "routing_valid": None, "num_experts": 0, "moe_layers": ()}
    return msgspec.structs.replace(plain, **none)


def run_rank(rank: int, model: Path, out: Path) -> dict:
    """Goes through the layouts."""
    before, found = "one", {}
    for name, layout in CHAIN.items():
        config = config_of(model, 2, layout)
        with started(config, out / before, rank=rank, meeting=out / f"meeting {name}") as worker:
            worker.save_checkpoint(f"{out}/{name}", {})
            metrics = worker.train_on(batch(1), 2).metrics
            assert worker.saved_checkpoint(wait=True).failure is None
            found[name] = metrics, weights(worker)
        before = name
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A single rank's checkpoint after a step, and what the next step gives there."""
    out = tmp_path_factory.mktemp("layouts")
    model = build_tiny_qwen3_moe(out / "model", num_layers=4, dense_layers=(0,), num_experts=4, top_k=2)
    with started(config_of(model, 1, {})) as worker:
        worker.train_on(batch(0), 1)
        worker.save_checkpoint(str(out / "one"), {"weight_version": 1})
        metrics = worker.train_on(batch(1), 2).metrics
        return {"out": out, "model": model, "metrics": metrics, "weights": weights(worker)}


@pytest.fixture(scope="module")
def chained(one):
    """What two ranks wrote and gave, by layout."""
    return run_ranks(run_rank, one["model"], one["out"])[0]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Megatron calls torch by an old name
def test_state_is_the_same_bit_for_bit_when_it_has_gone_through_other_layouts(one, chained):
    out = one["out"]
    with started(config_of(one["model"], 1, {})):
        first = stored_tensors(out / "one" / "step_00000001")
        for kind in ("exp_avg.", "exp_avg_sq.", "decoder."):
            for whose in ("", "critic."):
                keys = [key.removeprefix(whose) for key in first if key.startswith(whose)]
                assert any(key.removeprefix("optimizer.state.").startswith(kind) for key in keys)
        for name in chained:
            assert not differing(stored_tensors(out / name / "step_00000001"), first), name


def test_the_next_step_is_the_same_when_another_layout_resumes(one, chained):
    figures = ("loss", "grad_norm", "entropy", "learning_rate", "value_loss", "critic_grad_norm")
    for name, (metrics, resumed_weights) in chained.items():
        for figure in figures:
            expected = pytest.approx(one["metrics"][figure], abs=2e-5, rel=2e-5)
            assert metrics[figure] == expected, (name, figure)
        torch.testing.assert_close(resumed_weights, one["weights"], atol=2e-4, rtol=0)


def test_a_single_rank_goes_on_bit_for_bit_when_many_layouts_were_between(one, chained):
    last = list(chained)[-1]
    with started(config_of(one["model"], 1, {}), one["out"] / last) as worker:
        metrics = worker.train_on(batch(1), 2).metrics
        for figure in ("loss", "grad_norm", "value_loss", "critic_grad_norm"):
            assert metrics[figure] == one["metrics"][figure]
        assert not differing(weights(worker), one["weights"])
