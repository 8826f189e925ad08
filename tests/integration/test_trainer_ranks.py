"""Two ranks on Gloo give what one rank gives, in every layout."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from async_rl.errors import AlignmentError
from tests.support.tiny_model import build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import started, trainer_config, weights

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(300),  # two processes import everything and come up twelve times, for all tests
    pytest.mark.filterwarnings("ignore:::megatron"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LAYOUTS = {
    "data": {},
    "expert": {"ep": 2},
    "tensor and sequence": {"tp": 2, "etp": 2},
    "tensor, sequence and expert": {"tp": 2, "ep": 2},
    "pipeline": {"pp": 2},
    "context": {"cp": 2},
}


def batches():
    """An odd number of trajectories, so that one data-parallel rank has an empty micro-batch."""
    lengths = (13, 7, 30, 19, 5, 22, 37)
    return [random_batch(seed, layers=4, lengths=lengths, group_size=7) for seed in (0, 1)]


def run_rank(rank: int, model: str, addresses: dict[str, str], out: str) -> None:
    """Train two steps in every layout; runs in a process of its own."""
    from trainer.worker import TrainerWorker

    torch.set_num_threads(1)
    for name, layout in LAYOUTS.items():
        config = trainer_config(
            Path(model), num_ranks=2, layout=layout, micro_batch_tokens=40, recompute="full"
        )
        worker = TrainerWorker(config, rank, 2, addresses[name])
        worker.setup(None)
        metrics = [worker.train_on(batch, step).metrics for step, batch in enumerate(batches(), 1)]
        worker.save_checkpoint(f"{out}/checkpoints {name}", {})
        trained = weights(worker)
        worker.close()
        resumed = TrainerWorker(config, rank, 2, addresses[f"{name} again"])
        state = resumed.setup(f"{out}/checkpoints {name}")
        same = {key: torch.equal(tensor, trained[key]) for key, tensor in weights(resumed).items()}
        refusal = ""
        if name == "data":  # a row that only one of the two ranks looks at
            broken = batches()[0]
            broken.routed_experts[3] = 200
            try:
                resumed.train_on(broken, 3)
            except AlignmentError as e:
                refusal = str(e)
        resumed.publish(f"{out}/hf {name}", 2)
        resumed.close()
        torch.save((metrics, trained, state.step, same, refusal), f"{out}/{name} {rank}")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of one rank, and of two ranks in every layout."""
    out = tmp_path_factory.mktemp("ranks")
    model = build_tiny_qwen3_moe(out / "model", num_layers=4)
    # Files, not ports: a port that was free when it was picked may be taken when it is its turn.
    names = [key for name in LAYOUTS for key in (name, f"{name} again")]
    addresses = {key: f"file://{out}/rendezvous-{i}" for i, key in enumerate(names)}
    ranks = mp.spawn(run_rank, (str(model), addresses, str(out)), nprocs=2, join=False)
    with started(trainer_config(model, micro_batch_tokens=40)) as worker:
        metrics = [worker.train_on(batch, step).metrics for step, batch in enumerate(batches(), 1)]
        reference = metrics, weights(worker)
    while not ranks.join():
        pass
    return (
        reference,
        {name: [torch.load(out / f"{name} {rank}") for rank in range(2)] for name in LAYOUTS},
        out,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_equal_one_when_laid_out(results, layout):
    (metrics, trained), laid_out, _ = results
    for rank_metrics, rank_weights, *_ in laid_out[layout]:
        for expected, actual in zip(metrics, rank_metrics, strict=True):
            for key in expected.keys() - {"step_s"}:
                assert actual[key] == pytest.approx(expected[key], abs=2e-5, rel=1e-4, nan_ok=True), key
        assert set(rank_weights) == set(trained)
        for name, expected in trained.items():
            torch.testing.assert_close(rank_weights[name], expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_come_back_when_two_ranks_resume(results, layout):
    for _, _, step, same, _ in results[1][layout]:
        assert step == 2
        assert all(same.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_folder_is_written_when_two_ranks_publish(results, layout):
    from safetensors.torch import load_file

    published = load_file(results[2] / f"hf {layout}" / "model.safetensors")
    _, trained, *_ = results[1][layout][0]
    assert set(published) == set(trained)
    assert all(torch.equal(published[name], tensor) for name, tensor in trained.items())


def test_both_ranks_refuse_when_one_finds_a_wrong_row(results):
    refusals = [refusal for *_, refusal in results[1]["data"]]
    assert all("expert id 200" in refusal for refusal in refusals)
