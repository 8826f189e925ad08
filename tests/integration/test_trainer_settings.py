"""What the optimizer, the checkpoints and the snapshot of a real trainer take from the config."""

from typing import Any

import pytest
import torch

from tests.support.tiny_model import build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import gradients, started, trainer_config, trial, weights
from trainer import worker as worker_module
from trainer.megatron import model, process_groups
from trainer.worker import TrainerWorker

pytestmark = [pytest.mark.real, pytest.mark.megatron]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return build_tiny_qwen3_moe(tmp_path_factory.mktemp("models") / "moe", num_layers=1)


def test_the_optimizer_has_the_settings_of_the_config(moe):
    settings = {"weight_decay": 0.3, "beta2": 0.7}
    passed = {"adam_beta1": 0.8, "adam_eps": 1e-6}
    with started(trainer_config(moe, optimizer=settings, megatron=passed)) as worker:
        groups = [group for inner in worker.model.inner_optimizers for group in inner.param_groups]
        assert {(group["betas"], group["eps"]) for group in groups} == {((0.8, 0.7), 1e-6)}
        assert max(group["weight_decay"] for group in groups) == 0.3


def test_gradients_are_clipped_at_the_norm_of_the_config(moe):
    config = trainer_config(moe, optimizer={"clip_grad": 1e-3})
    with started(config) as worker, trial(worker, config):
        assert worker.train_on(random_batch(1, layers=1), 1).metrics["grad_norm"] > 1e-2
        norm = torch.stack([gradient.norm() for gradient in gradients(worker).values()]).norm()
        assert norm == pytest.approx(1e-3, rel=1e-2)


def test_checkpoints_are_kept_when_their_step_is_a_multiple(moe, tmp_path):
    with started(trainer_config(moe, keep_checkpoints=1, keep_every=2)) as worker:
        for step in (1, 2, 3, 4):
            worker.train_on(random_batch(step, layers=1), step)
            worker.save_checkpoint(str(tmp_path), {})
            worker.saved_checkpoint(wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000004"]


class SetupEnded(Exception):
    """Ends a setup where a test has seen enough."""


def test_gradients_are_summed_during_the_backward_pass_when_the_config_says_so(moe, monkeypatch):
    seen: list[dict[str, Any]] = []

    class Remembered(model.DistributedDataParallelConfig):
        def __init__(self, **options: Any) -> None:
            seen.append(options)
            raise SetupEnded

    monkeypatch.setattr(model, "DistributedDataParallelConfig", Remembered)
    monkeypatch.setattr(model.parallel_state, "get_data_parallel_world_size", lambda **options: 2)
    for wanted in (False, True):
        with pytest.raises(SetupEnded), started(trainer_config(moe, overlap_grad_reduce=wanted)):
            pass
    assert [options["overlap_grad_reduce"] for options in seen] == [False, True]


def test_the_parallel_groups_have_the_sizes_of_the_layout(moe, monkeypatch):
    seen: list[dict[str, Any]] = []

    def make_groups(**sizes: Any) -> None:
        seen.append(sizes)
        raise SetupEnded

    monkeypatch.setattr(process_groups.dist, "init_process_group", lambda *arguments, **options: None)
    monkeypatch.setattr(process_groups.parallel_state, "initialize_model_parallel", make_groups)
    layout = {"tp": 2, "pp": 4, "vpp": 5, "cp": 3, "ep": 2, "etp": 3}
    worker = TrainerWorker(trainer_config(moe, num_ranks=24, layout=layout), 0, 1, "")
    with pytest.raises(SetupEnded):
        worker.setup(None)
    (sizes,) = seen
    assert sizes["tensor_model_parallel_size"] == 2
    assert sizes["pipeline_model_parallel_size"] == 4
    assert sizes["virtual_pipeline_model_parallel_size"] == 5
    assert sizes["context_parallel_size"] == 3
    assert sizes["expert_model_parallel_size"] == 2
    assert sizes["expert_tensor_parallel_size"] == 3


def test_a_snapshot_is_kept_where_the_config_says(moe, monkeypatch):
    seen: list[str] = []

    def snapshot(*, keeps: bool, where: str) -> None:
        seen.append(where)
        raise SetupEnded

    monkeypatch.setattr(worker_module, "WeightSnapshot", snapshot)
    for where in ("host", "device"):
        worker = TrainerWorker(trainer_config(moe) | {"weights": {"snapshot": where}}, 0, 1, "")
        with pytest.raises(SetupEnded):
            worker.take_snapshot(1)
    assert seen == ["host", "device"]


@pytest.mark.parametrize(
    "change",
    [
        {"advantages": "grpo"},
        {"aggregate": "sequence_mean"},
        {"overlong_buffer_tokens": 20},
        {"old_log_probs": "rollout"},
    ],
    ids=str,
)
def test_gradients_change_with_the_loss(moe, change):
    usual = {"advantages": "dr_grpo"}
    with started(trainer_config(moe)) as worker:
        found = []
        for loss in (usual, usual | change):
            config = trainer_config(moe, loss=loss)
            config["rollout"] |= {"max_new_tokens": 25}
            with trial(worker, config):
                worker.train_on(random_batch(1, layers=1), 1)
                found.append(torch.cat([gradient.flatten() for gradient in gradients(worker).values()]))
        usual, other = found
        assert (usual - other).norm() > 0.05 * usual.norm()


def test_weights_move_by_the_learning_rate_of_the_config(moe):
    with started(trainer_config(moe, optimizer={"lr": 1e-2, "warmup_steps": 10})) as worker:
        before = weights(worker)
        worker.train_on(random_batch(1, layers=1), 1)
        after = weights(worker)
        moved = max((after[name] - tensor).abs().max().item() for name, tensor in before.items())
    assert moved == pytest.approx(1e-2 / 10, rel=0.2)  # Adam's first step


def test_a_batch_is_cut_as_the_config_says(moe, monkeypatch):
    with started(trainer_config(moe)) as worker:
        schedule, cuts = worker.model.run_schedule, []

        def run_schedule(inputs, *arguments, **options):
            cuts.append(len(inputs))
            return schedule(inputs, *arguments, **options)

        monkeypatch.setattr(worker.model, "run_schedule", run_schedule)
        for tokens in (1, 10_000):
            config = trainer_config(moe, micro_batch_tokens=tokens)
            with trial(worker, config):
                worker.train_on(random_batch(1, layers=1), 1)
    assert sorted(set(cuts)) == [1, 6]
