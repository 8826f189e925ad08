"""Layouts with unequal parts of the model: four ranks give what one gives, and read its checkpoints.

- A vocabulary that the tensor ranks do not divide is padded.
- Tensor ranks beyond the number of key-value heads share one.
- Stages of longer interleaved pipelines pass on micro-batches of different lengths.
"""

from pathlib import Path

import msgspec
import pytest
import torch

from async_rl.engines.model_facts import load_facts
from async_rl.types import SamplingMask, TrainBatch
from tests.support.ranks import run_ranks
from tests.support.tiny_model import build_tiny_dense, build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import gathered_gradients, place, started, stored_weights, trainer_config, weights

pytestmark = [pytest.mark.megatron, pytest.mark.long, pytest.mark.timeout(600)]

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


def config_of(parent: Path, name: str, **trainer) -> dict:
    path = parent / name
    return trainer_config(path, replay=load_facts(path).is_moe, micro_batch_tokens=40, **trainer)


def batches(parent: Path, name: str) -> list[TrainBatch]:
    """Two batches. Every other trajectory was sampled from few tokens, the vocabulary's last among them."""
    facts, found = load_facts(parent / name), []
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


def run_rank(rank: int, parent: Path) -> dict:
    """Take a step in each layout and save it, then go on from one rank's checkpoint."""
    seen: dict = {name: {} for name in LAYOUTS}
    for name, layout in LAYOUTS.items():
        for purpose in ("first", "second") if name in RESUMED else ("first",):
            config = config_of(parent, name, num_ranks=RANKS, layout=layout)
            checkpoints = parent / f"{name} of one" if purpose == "second" else None
            meeting = parent / f"meeting {purpose} {name}"
            first, second = batches(parent, name)
            with started(config, checkpoints, rank=rank, meeting=meeting) as worker:
                if purpose == "first":
                    placed = place(worker, first)
                    seen[name]["lengths"] = {p.inputs.token_ids.shape[1] for p in placed}
                    seen[name]["first"] = step(worker, first, 1)
                    if name in RESUMED:
                        worker.save_checkpoint(f"{parent}/{name} of four", {})
                        worker.publish(f"{parent}/hf {name}", 1)
                else:
                    seen[name]["resumed"] = weights(worker)
                    seen[name]["second"] = step(worker, second, 2)
    return seen


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By layout: one rank's steps, also one from the checkpoint of four; each of the four's; their export."""
    out = tmp_path_factory.mktemp("uneven")
    build_models(out)
    found = {}
    for name in LAYOUTS:
        first, second = batches(out, name)
        with started(config_of(out, name)) as worker:
            found[name] = {"first": step(worker, first, 1)}
            if name in RESUMED:
                worker.save_checkpoint(f"{out}/{name} of one", {})
                worker.saved_checkpoint(wait=True)
                found[name]["second"] = step(worker, second, 2)
    four, published = run_ranks(run_rank, out, ranks=RANKS), {}
    for name in RESUMED:
        with started(config_of(out, name), out / f"{name} of four") as worker:
            found[name]["resumed"] = weights(worker)
            found[name]["resumed second"] = step(worker, batches(out, name)[1], 2)
        published[name] = stored_weights(out / f"hf {name}")
    return {name: (found[name], [rank[name] for rank in four], published.get(name)) for name in LAYOUTS}


def equal_steps(actual: dict, expected: dict) -> None:
    assert expected["metrics"]["grad_norm"] > 1e-2
    for key in ("loss", "grad_norm", "entropy", "log_prob_abs_diff"):
        assert actual["metrics"][key] == pytest.approx(expected["metrics"][key], abs=2e-5, rel=1e-4), key
    assert set(actual["gradients"]) == set(expected["gradients"])
    torch.testing.assert_close(actual["gradients"], expected["gradients"], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(actual["weights"], expected["weights"], atol=2e-4, rtol=0)


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
