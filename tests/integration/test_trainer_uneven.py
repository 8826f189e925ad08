"""Layouts with unequal parts of the model: four ranks give what one gives, and read its checkpoints.

- A vocabulary that the tensor ranks do not divide is padded.
- Tensor ranks beyond the number of key-value heads share one.
- Stages of longer interleaved pipelines pass on micro-batches of different lengths.
"""

import gc
from pathlib import Path

import msgspec
import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from async_rl.engines.model_facts import load_facts
from async_rl.types import SamplingMask, TrainBatch
from tests.support.tiny_model import build_tiny_dense, build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import gathered_gradients, place, started, trainer_config, weights

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.long,
    pytest.mark.timeout(600),  # four processes import everything
    pytest.mark.filterwarnings("ignore:::megatron"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

VOCABULARY = 97
"""Two parts have 49 and 48 tokens, four have 25, 25, 25 and 22."""

LAYOUTS = {
    "tensor and expert": {"tp": 4, "ep": 4},
    "tied, tensor and data": {"tp": 2},
    "interleaved pipeline": {"pp": 4, "vpp": 2},
}
RANKS = 4

RESUMED = ["tensor and expert", "tied, tensor and data"]
"""Where the vocabulary is padded."""


def build_models(out: Path) -> None:
    build_tiny_qwen3_moe(
        out / "tensor and expert", vocab_size=VOCABULARY, num_layers=2, num_heads=8, num_groups=2
    )
    # Qwen2 has biases in attention.
    build_tiny_dense(
        out / "tied, tensor and data",
        "qwen2",
        vocab_size=VOCABULARY,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    build_tiny_qwen3_moe(out / "interleaved pipeline", num_layers=8, dense_layers=(0, 3))


def config_of(parent: str, name: str, **trainer) -> dict:
    path = Path(parent) / name
    return trainer_config(path, replay=load_facts(path).is_moe, micro_batch_tokens=40, **trainer)


def batches(parent: str, name: str) -> list[TrainBatch]:
    """Two batches. Every other trajectory was sampled from few tokens, the vocabulary's last among them."""
    facts, found = load_facts(Path(parent) / name), []
    rows = {"routing": False}
    if facts.is_moe:
        rows = {"layers": facts.moe_layers, "experts": facts.num_experts, "top_k": facts.top_k}
    for seed in (0, 1):
        batch = random_batch(
            seed, vocab_size=facts.vocab_size, lengths=(13, 7, 30, 19, 5, 22, 37), group_size=7, **rows
        )
        kept: list[list[int]] = [[]] * batch.num_tokens
        for index in range(0, batch.num_trajectories, 2):
            for position in range(batch.offsets[index], batch.offsets[index + 1]):
                if batch.loss_mask[position]:
                    kept[position] = sorted({int(batch.token_ids[position]), 4, 50, facts.vocab_size - 1})
        found.append(msgspec.structs.replace(batch, sampling_mask=SamplingMask.of(kept)))
    return found


def step(worker, batch: TrainBatch, number: int) -> dict:
    metrics = worker.train_on(batch, number).metrics
    return {"metrics": metrics, "gradients": gathered_gradients(worker), "weights": weights(worker)}


def run_rank(rank: int, parent: str) -> None:
    """Takes a step in each layout and saves it, then goes on from one rank's checkpoint; in a process."""
    from trainer.worker import TrainerWorker

    torch.set_num_threads(1)
    for name, layout in LAYOUTS.items():
        seen = {}
        for purpose in ("first", "second") if name in RESUMED else ("first",):
            gc.collect()  # threads of earlier process groups wake a hundred times a second
            config = config_of(parent, name, num_ranks=RANKS, layout=layout)
            worker = TrainerWorker(config, rank, RANKS, f"file://{parent}/rendezvous {purpose} {name}")
            worker.setup(f"{parent}/{name} of one" if purpose == "second" else None)
            first, second = batches(parent, name)
            if purpose == "first":
                placed = place(worker, first)
                seen["lengths"] = {p.inputs.token_ids.shape[1] for p in placed}
                seen["first"] = step(worker, first, 1)
                if name in RESUMED:
                    worker.save_checkpoint(f"{parent}/{name} of four", {})
                    worker.publish(f"{parent}/hf {name}", 1)
            else:
                seen["resumed"] = weights(worker)
                seen["second"] = step(worker, second, 2)
            worker.close()
        torch.save(seen, f"{parent}/seen {name} {rank}")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By layout: one rank's steps, also one from the checkpoint of four; each of the four's; their export."""
    out = tmp_path_factory.mktemp("uneven")
    build_models(out)
    found = {}
    for name in LAYOUTS:
        first, second = batches(str(out), name)
        with started(config_of(str(out), name)) as worker:
            alone = {"first": step(worker, first, 1)}
            if name in RESUMED:
                worker.save_checkpoint(f"{out}/{name} of one", {})
                worker.saved_checkpoint(wait=True)
                alone["second"] = step(worker, second, 2)
        found[name] = alone
    mp.spawn(run_rank, (str(out),), nprocs=RANKS)
    for name in LAYOUTS:
        four = [torch.load(out / f"seen {name} {rank}") for rank in range(RANKS)]
        published = {}
        if name in RESUMED:
            with started(config_of(str(out), name), out / f"{name} of four") as worker:
                found[name]["resumed"] = weights(worker)
                found[name]["resumed second"] = step(worker, batches(str(out), name)[1], 2)
            published = load_file(out / f"hf {name}" / "model.safetensors")
        found[name] = found[name], four, published
    return found


def equal_steps(actual: dict, expected: dict) -> None:
    assert expected["metrics"]["grad_norm"] > 1e-2
    for key in ("loss", "grad_norm", "entropy", "log_prob_abs_diff"):
        assert actual["metrics"][key] == pytest.approx(expected["metrics"][key], abs=2e-5, rel=1e-4), key
    assert set(actual["gradients"]) == set(expected["gradients"])
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(actual["gradients"][name], gradient, atol=1e-6, rtol=1e-4, msg=name)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(actual["weights"][name], weight, atol=2e-4, rtol=0, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_equal_one_when_parts_are_not_equal(results, layout):
    alone, four, _ = results[layout]
    for rank in four:
        equal_steps(rank["first"], alone["first"])


@pytest.mark.parametrize("layout", RESUMED)
def test_checkpoints_and_exports_have_no_padding_when_parts_are_not_equal(results, layout):
    alone, four, published = results[layout]
    trained = four[0]["first"]["weights"]
    assert set(published) == set(trained) == set(alone["resumed"])
    for name, weight in trained.items():
        assert torch.equal(published[name], weight), name
        assert torch.equal(alone["resumed"][name], weight), name
    # Also moments: the next step of one rank, from the checkpoint of four, and of four, from that of one.
    equal_steps(alone["resumed second"], alone["second"])
    for rank in four:
        for name, weight in alone["first"]["weights"].items():
            assert torch.equal(rank["resumed"][name], weight), name
        equal_steps(rank["second"], alone["second"])


def test_micro_batches_keep_their_lengths_when_a_pipeline_has_more_than_two_stages(results):
    _, four, _ = results["interleaved pipeline"]
    assert four[0]["lengths"] == four[3]["lengths"]
    assert len(four[0]["lengths"]) > 1
