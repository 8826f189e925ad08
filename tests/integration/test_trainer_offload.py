"""A rank's state goes to the host and comes back, on real Megatron-Core."""

from __future__ import annotations

import sys

import pytest
import torch

from async_rl.errors import EnvironmentNotReady, TrainerError
from tests.support.memory_saver import GARBAGE, FakeMemorySaver, as_bytes
from tests.support.train_batches import random_batch
from tests.support.trainers import differing, started, trainer_config, training_state, weights
from trainer.megatron.offload import TrainerOffload, check_free_memory, memory_saver

pytestmark = [pytest.mark.real, pytest.mark.megatron]


@pytest.fixture
def saver(monkeypatch):
    fake = FakeMemorySaver()
    fake.watch(monkeypatch)
    return fake


@pytest.mark.parametrize(
    ("dtype", "in_regions"), [("float32", False), ("bfloat16", True)], ids=["emptied", "in regions"]
)
def test_steps_go_on_as_if_nothing_had_happened_when_the_state_was_away_in_between(
    two_layers, dtype, in_regions, saver
):
    batches = [random_batch(layers=2, seed=seed) for seed in range(3)]
    with started(trainer_config(two_layers, dtype=dtype)) as worker:
        for step, batch in enumerate(batches, start=1):
            worker.train_on(batch, step)
        expected = [tensor.clone() for tensor in training_state(worker)]
    with started(trainer_config(two_layers, dtype=dtype)) as worker:
        offload = TrainerOffload(worker.model, saver=saver if in_regions else None)
        for step, batch in enumerate(batches, start=1):
            offload.offload_state(keep_weights=step == 2)
            offload.offload_state()  # before the first step there are no moments yet
            offload.reload_state()
            worker.train_on(batch, step)
        found = [tensor.clone() for tensor in training_state(worker)]
    assert len(found) == len(expected) > 50
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_nothing_is_left_on_the_device_when_the_state_is_away(two_layers):
    with started(trainer_config(two_layers)) as worker:
        worker.train_on(random_batch(layers=2), 1)
        offload = TrainerOffload(worker.model)
        parameters, moments, gradients = parts(worker.model)
        before = weights(worker)
        offload.offload_state()
        held = [*parameters, *moments, *gradients]
        assert len(moments) > len(parameters)
        assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
        assert offload.num_bytes >= 3 * sum(p.numel() * p.element_size() for p in parameters)
        offload.offload_state()  # nothing of the empty storages is taken for the state
        offload.reload_state()
        offload.reload_state()
        after = weights(worker)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(not gradient.any() for gradient in gradients)


def test_all_that_is_left_are_addresses_when_the_state_is_away_in_regions(two_layers, saver):
    with started(trainer_config(two_layers, dtype="bfloat16")) as worker:
        offload = TrainerOffload(worker.model, saver=saver)
        offload.offload_state()
        offload.reload_state()
        first = sum(map(len, parts(worker.model)))
        worker.train_on(random_batch(layers=2), 1)
        offload.offload_state()  # the moments, which the step has made
        offload.reload_state()
        held = [tensor for part in parts(worker.model) for tensor in part]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in held}
        before, content = {place: as_bytes(s).clone() for place, s in storages.items()}, weights(worker)
        offload.offload_state()
        assert len(held) > first
        assert saver.paused_bytes == sum(storage.nbytes() for storage in storages.values())
        assert all((as_bytes(storage) == GARBAGE).all() for storage in storages.values())
        offload.offload_state()  # the real one ends the process when called twice
        offload.reload_state()
        offload.reload_state()
        assert saver.paused_bytes == 0
        gradients = {g.untyped_storage().data_ptr() for g in parts(worker.model)[2]}
        for place, storage in storages.items():
            expected = torch.zeros_like(before[place]) if place in gradients else before[place]
            assert torch.equal(as_bytes(storage), expected)
        assert not differing(weights(worker), content)


@pytest.mark.parametrize("in_regions", [False, True], ids=["emptied", "in regions"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_exported_while_all_the_rest_is_away(two_layers, dtype, in_regions, saver):
    with started(trainer_config(two_layers, dtype=dtype)) as worker:
        offload = TrainerOffload(worker.model, saver=saver if in_regions else None)
        worker.train_on(random_batch(layers=2), 1)
        if in_regions:  # storages that are new leave as they do without
            offload.offload_state(keep_weights=True)
            offload.reload_state()
        expected, state = weights(worker), [tensor.clone() for tensor in training_state(worker)]
        module = {p.untyped_storage().data_ptr() for c in worker.model.chunks for p in c.module.parameters()}
        offload.offload_state(keep_weights=True)
        parameters, moments, gradients = parts(worker.model)
        main = [p for p in parameters if p.untyped_storage().data_ptr() not in module]
        assert len(main) == 0 if dtype == "float32" else len(main) > 10
        assert all(is_away(tensor) for tensor in [*main, *moments, *gradients])
        assert not differing(weights(worker), expected)
        offload.offload_state(keep_weights=True)  # a second time
        assert not differing(weights(worker), expected)
        first = offload.num_bytes
        offload.offload_state()
        assert offload.num_bytes > first
        assert all(is_away(tensor) for part in parts(worker.model) for tensor in part)
        offload.offload_state(keep_weights=True)  # they are not brought back
        offload.reload_state()
        assert all(map(torch.equal, training_state(worker), state))
        offload.offload_state(keep_weights=True)
        offload.reload_state()  # a hand-over that was cut short
        assert all(map(torch.equal, training_state(worker), state))
        assert not differing(weights(worker), expected)


def is_away(tensor):
    """Whether a storage is empty, or its pages are released."""
    storage = tensor.untyped_storage()
    return not storage.nbytes() or bool((as_bytes(storage) == GARBAGE).all())


def parts(model):
    """Parameters, main parameters among them, moments and gradients."""
    every = [p for chunk in model.chunks for p in chunk.module.parameters()]
    for optimizer in model.inner_optimizers:
        every += [p for group in optimizer.param_groups for p in group["params"]]
    parameters = list({id(p): p for p in every}.values())
    moments = [
        value
        for optimizer in model.inner_optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    return parameters, moments, [buffer.grad_data for chunk in model.chunks for buffer in chunk.buffers]


# -- torch-memory-saver itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, {"sync": "adapter"}])
def test_versions_are_published_and_summed_before_the_state_is_away(two_layers, lora, tmp_path):
    with started({**trainer_config(two_layers, lora=lora), "placement": {"shared": True}}) as worker:
        for step in (1, 2):
            worker.publish(str(tmp_path / f"version_{step}"), step)
            assert worker.checksums()
            worker.offload()
            worker.reload()
            worker.train_on(random_batch(layers=2, seed=step), step)


def test_it_is_refused_when_it_cannot_work(monkeypatch):
    memory_saver.cache_clear()
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    with pytest.raises(EnvironmentNotReady, match="pip install torch-memory-saver"):
        memory_saver()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8,expandable_segments:True")
    with pytest.raises(EnvironmentNotReady, match="remove expandable_segments from it"):
        memory_saver()


def test_a_trainer_does_not_come_back_when_its_device_is_not_empty_enough():
    check_free_memory(3 << 30, 3 << 30, 80 << 30)
    with pytest.raises(TrainerError, match=r"needs 3\.0 GiB, and 2\.0 of 80\.0 GiB are free"):
        check_free_memory(3 << 30, 2 << 30, 80 << 30)
