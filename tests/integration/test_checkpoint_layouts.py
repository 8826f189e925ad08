"""A checkpoint of any layout goes on under any other: the same state bit for bit, and the same next step."""

import gc
from pathlib import Path

import msgspec
import pytest
import torch
import torch.multiprocessing as mp

from tests.support.tiny_model import build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import started, trainer_config, weights

pytestmark = [
    pytest.mark.long,
    pytest.mark.megatron,
    pytest.mark.timeout(600),  # two processes import everything
    pytest.mark.filterwarnings("ignore:::megatron"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

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

HALVES = ("data, with the distributed optimizer", "tensor and sequence")
"""Those that go on in bfloat16 too, which has main parameters of its own."""


def config_of(model, ranks, layout, dtype):
    return trainer_config(
        Path(model),
        replay=False,
        dtype=dtype,
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


def run_rank(rank: int, model: str, out: str) -> None:
    """Go through the layouts; runs in a process of its own."""
    from trainer.worker import TrainerWorker

    torch.set_num_threads(1)
    for dtype, chain in (("float32", CHAIN), ("bfloat16", HALVES)):
        before = "one"
        for name in chain:
            gc.collect()  # threads of earlier process groups wake a hundred times a second
            worker = TrainerWorker(
                config_of(model, 2, CHAIN[name], dtype), rank, 2, f"file://{out}/meet {dtype} {name}"
            )
            state = worker.setup(f"{out}/{dtype} {before}")
            worker.save_checkpoint(f"{out}/{dtype} {name}", state.extra)
            metrics = worker.train_on(batch(1), 2).metrics
            assert worker.saved_checkpoint(wait=True).failure is None
            torch.save((metrics, weights(worker)), f"{out}/result {dtype} {name} {rank}")
            worker.close()
            before = name


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A single rank's checkpoint after a step, and what the next step gives there."""
    out = tmp_path_factory.mktemp("layouts")
    model = build_tiny_qwen3_moe(out / "model", num_layers=4, dense_layers=(0,), num_experts=4, top_k=2)
    result = {"out": out, "model": model}
    for dtype in ("float32", "bfloat16"):
        with started(config_of(model, 1, {}, dtype)) as worker:
            worker.train_on(batch(0), 1)
            worker.save_checkpoint(str(out / f"{dtype} one"), {"weight_version": 1})
            result[dtype] = worker.train_on(batch(1), 2).metrics, weights(worker)
    return result


@pytest.fixture(scope="module")
def chained(one):
    """What two ranks wrote and gave, by data type and layout."""
    out = one["out"]
    mp.spawn(run_rank, (str(one["model"]), str(out)), nprocs=2)
    return {
        (dtype, name): torch.load(out / f"result {dtype} {name} 0", weights_only=False)
        for dtype, chain in (("float32", CHAIN), ("bfloat16", HALVES))
        for name in chain
    }


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint but generators, as whole tensors, read by Megatron itself."""
    from megatron.core import dist_checkpointing  # not before the workers' modules have prepared it

    found = dist_checkpointing.load_plain_tensors(str(folder / "step_00000001"))
    return {key: tensor for key, tensor in found.items() if not key.startswith("random.")}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Megatron calls torch by an old name
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_is_the_same_bit_for_bit_when_it_has_gone_through_other_layouts(one, chained, dtype):
    out = one["out"]
    with started(config_of(one["model"], 1, {}, dtype)):
        first = tensors_of(out / f"{dtype} one")
        kinds = {"exp_avg.", "exp_avg_sq.", "decoder.", *(["fp32_param."] if dtype == "bfloat16" else [])}
        for kind in kinds:
            for whose in ("", "critic."):
                keys = [key.removeprefix(whose) for key in first if key.startswith(whose)]
                assert any(key.removeprefix("optimizer.state.").startswith(kind) for key in keys)
        for name in (name for kind, name in chained if kind == dtype):
            again = tensors_of(out / f"{dtype} {name}")
            assert again.keys() == first.keys()
            assert [key for key, tensor in first.items() if not torch.equal(again[key], tensor)] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_next_step_is_the_same_when_another_layout_resumes(one, chained, dtype):
    expected, expected_weights = one[dtype]
    figures = ("loss", "grad_norm", "entropy", "learning_rate", "value_loss", "critic_grad_norm")
    noise = 2e-5 if dtype == "float32" else 5e-3
    for name in (name for kind, name in chained if kind == dtype):
        metrics, resumed_weights = chained[dtype, name]
        for figure in figures:
            assert metrics[figure] == pytest.approx(expected[figure], abs=noise, rel=noise), (name, figure)
        for key, tensor in expected_weights.items():
            torch.testing.assert_close(resumed_weights[key], tensor, atol=10 * noise, rtol=0)


def test_a_single_rank_goes_on_bit_for_bit_when_many_layouts_were_between(one, chained):
    last = [name for kind, name in chained if kind == "float32"][-1]
    expected, expected_weights = one["float32"]
    with started(config_of(one["model"], 1, {}, "float32"), one["out"] / f"float32 {last}") as worker:
        metrics = worker.train_on(batch(1), 2).metrics
        assert metrics["loss"] == expected["loss"]
        for figure in ("grad_norm", "value_loss", "critic_grad_norm"):
            assert metrics[figure] == expected[figure]
        assert all(torch.equal(t, expected_weights[name]) for name, t in weights(worker).items())
