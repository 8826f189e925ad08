"""A rank's state goes to the host and comes back, on real Megatron-Core."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_model import build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import started, trainer_config, training_state, weights
from trainer.megatron.offload import Offload

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore:::megatron")]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return build_tiny_qwen3_moe(tmp_path_factory.mktemp("models") / "moe", num_layers=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_go_on_as_if_nothing_had_happened_when_the_state_was_away_in_between(moe, dtype):
    batches = [random_batch(layers=2, seed=seed) for seed in range(3)]
    with started(trainer_config(moe, dtype=dtype)) as worker:
        for step, batch in enumerate(batches, start=1):
            worker.train_on(batch, step)
        expected = [tensor.clone() for tensor in training_state(worker)]
    with started(trainer_config(moe, dtype=dtype)) as worker:
        offload = Offload(worker.model)
        for step, batch in enumerate(batches, start=1):
            offload.offload()  # before the first step there are no moments yet
            offload.reload()
            worker.train_on(batch, step)
        found = [tensor.clone() for tensor in training_state(worker)]
    assert len(found) == len(expected) > 50
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_nothing_is_left_on_the_device_when_the_state_is_away(moe):
    with started(trainer_config(moe)) as worker:
        worker.train_on(random_batch(layers=2), 1)
        model, offload = worker.model, Offload(worker.model)
        parameters = [p for chunk in model.chunks for p in chunk.module.parameters()]
        moments = [
            value
            for optimizer in model.inner_optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value)
        ]
        gradients = [buffer.grad_data for chunk in model.chunks for buffer in chunk.buffers]
        before = weights(worker)
        offload.offload()
        held = [*parameters, *moments, *gradients]
        assert len(moments) > len(parameters)
        assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
        assert offload.num_bytes >= 3 * sum(p.numel() * p.element_size() for p in parameters)
        offload.offload()  # nothing of the empty storages is taken for the state
        offload.reload()
        offload.reload()
        after = weights(worker)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(not gradient.any() for gradient in gradients)


def test_the_worker_trains_again_when_its_devices_were_lent_out(moe):
    with started({**trainer_config(moe), "placement": {"shared": True}}) as worker:
        worker.offload()
        worker.offload()
        worker.reload()
        worker.reload()
        assert worker.train_on(random_batch(layers=2), 1).metrics["grad_norm"] > 0
