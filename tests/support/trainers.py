"""Trainer workers in the test process, and access to their state."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from async_rl.config import parse_config
from async_rl.types import TrainBatch
from trainer.critic import Critic
from trainer.megatron import cpu, shards
from trainer.megatron.model import MegatronModel, ValueHead
from trainer.megatron.packing import make_targets
from trainer.worker import TrainerWorker

_MANY_THREADS = 200


def trainer_config(model: Path, *, replay: bool | str = True, **trainer: Any) -> dict[str, Any]:
    """Return a whole run config as plain values; `trainer` overrides fields of its `trainer` section.

    Every step compares old log-probs with a pass of their own (`old_log_prob_abs_diff`), unless `loss` says
    otherwise.

    Args:
        model: Folder of the model.
        replay: `routing.replay`; True is r3, False off.
        trainer: Also `dtype` and `temperature`.
    """
    loss = {"check_old_log_probs_every": 1} | trainer.pop("loss", {})
    return {
        "model": {"path": str(model), "dtype": trainer.pop("dtype", "float32")},
        "data": {"path": "unused.jsonl"},
        "rollout": {"group_size": 2, "temperature": trainer.pop("temperature", 1.0)},
        "routing": {"replay": {True: "r3", False: "off"}.get(replay, replay)},
        "trainer": {"optimizer": {"lr": 1e-3}, "micro_batch_tokens": 64, "loss": loss, **trainer},
    }


def take_layers_of_transformer_engine(patch: pytest.MonkeyPatch, taken: bool) -> None:
    """Make bfloat16 models use TransformerEngine's layers or not, regardless of what is installed."""
    patch.setattr(cpu, "has_transformer_engine", lambda: taken)


@contextlib.contextmanager
def started(
    config: dict[str, Any], checkpoints: Path | None = None, *, rank: int = 0, meeting: Path | None = None
) -> Iterator[TrainerWorker]:
    """Yield a worker, set up, and close it after the block.

    It is the only rank, or one of several that come together at a `meeting`: a file, not a port, because a
    port that was free when it was picked may be taken when it is its turn.
    """
    if meeting or len(os.listdir("/proc/self/task")) > _MANY_THREADS:
        gc.collect()  # frees process groups of earlier workers in reference cycles, three threads each
    num_ranks = config["trainer"].get("num_ranks", 1)
    worker = TrainerWorker(config, rank, num_ranks, f"file://{meeting}" if meeting else "")
    try:
        worker.setup(None if checkpoints is None else str(checkpoints))
        yield worker
    finally:
        worker.close()


@contextlib.contextmanager
def trial(worker: TrainerWorker, config: dict[str, Any]) -> Iterator[None]:
    """Run the block with another config of the same model and layout, in which steps change no weight.

    This is faster than setting up another worker. If the config asks for a critic, its head is random.
    """
    kept = worker.config, worker.num_steps, worker.critic
    worker.config = parse_config(config)
    if worker.config.trainer.loss.kl.coefficient and worker.model._reference is None:
        worker.model.keep_reference()
    models = [worker.model]
    if worker.config.trainer.loss.advantages == "gae":
        worker.critic = Critic(worker.config, worker.model.device)
        models.append(worker.critic.model)
        randomise_head(worker.critic)
    try:
        with contextlib.ExitStack() as stack:
            for model in models:
                stack.enter_context(
                    mock.patch.object(model.optimizer, "step_with_ready_grads", return_value=True)
                )
            yield
    finally:
        worker.config, worker.num_steps, worker.critic = kept
        for model in models[1:]:
            model.close()


def randomise_head(critic: Critic) -> None:
    """Give the critic values, and its layers a gradient; the same in every layout."""
    for module in (module for chunk in critic.model.chunks for module in chunk.modules()):
        if isinstance(module, ValueHead):
            noise = torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(0))
            module.weight.data.copy_(noise / 10)


def critic_gradients(worker: TrainerWorker) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
    """Return this rank's parts of the critic's gradients of the last step: key, offset and values;
    collective.
    """
    assert worker.critic is not None
    with gradients_as_weights(worker.critic.model) as chunks:
        return [
            (part.key, tuple(part.global_offset), part.data.clone())
            for part in shards.parameter_parts(chunks)
        ]


def log_probs_of(worker: TrainerWorker, batch: TrainBatch) -> np.ndarray:
    """Return the trainer's log-probs of the trained tokens, at the predicting positions, `[S]`."""
    return worker.compute_old_log_probs(place(worker, batch), batch.num_tokens)[0]


def native_rows(worker: TrainerWorker, batch: TrainBatch) -> np.ndarray:
    """Return the experts that the trainer itself chooses, `[S, L_moe, K]`; for a single rank."""
    model = worker.model
    # Token ids that equal their index show where each token was placed.
    numbered = np.arange(batch.num_tokens, dtype=np.int32)
    placed = place(worker, batch)
    order = [p.inputs.token_ids[0] for p in place(worker, msgspec.structs.replace(batch, token_ids=numbered))]
    _, recorded = model.record_routing(
        [p.inputs for p in placed], lambda index, hidden: (hidden.sum(), 0, None)
    )
    ids = [inputs.routing[0].ids.cpu().numpy() for inputs in recorded]
    rows = np.zeros((batch.num_tokens, *ids[0].shape[1:]), ids[0].dtype)
    for tokens, chosen in zip(order, ids, strict=True):
        rows[tokens.cpu().numpy()] = chosen
    return rows


def place(worker: TrainerWorker, batch: TrainBatch) -> list:
    """Return this rank's micro-batches of a batch."""
    return worker.place_micro_batches(batch, make_targets(batch), range(batch.num_trajectories))


def training_state(worker: TrainerWorker, *, of_critic: bool = False) -> list[torch.Tensor]:
    """Return everything that a step needs from the previous one: parameters, main parameters and moments."""
    model = worker.critic.model if of_critic and worker.critic else worker.model
    parameters = [p.detach() for chunk in model.chunks for p in chunk.module.parameters()]
    for optimizer in model.inner_optimizers:
        parameters += [p.detach() for group in optimizer.param_groups for p in group["params"]]
        for state in optimizer.state.values():  # whose order differs when they were loaded
            parameters += [value for _, value in sorted(state.items()) if torch.is_tensor(value)]
    return parameters


def gradients(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    """Return the gradients of the last step, by parameter."""
    return {
        name: parameter.main_grad.clone()
        for chunk in worker.model.chunks
        for name, parameter in chunk.named_parameters()
    }


def gathered_gradients(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    """Return gradients of the last step under Hugging Face names, gathered from all ranks; collective."""
    with gradients_as_weights(worker.model):
        return weights(worker)


@contextlib.contextmanager
def gradients_as_weights(model: MegatronModel) -> Iterator[list[torch.nn.Module]]:
    """Give a model's trained parameters the values of their gradients, summed over all ranks; yield its
    chunks.
    """
    parameters = [p for chunk in model.chunks for p in chunk.parameters() if p.requires_grad]
    for chunk in model.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            ranks = buffer.data_parallel_group.size()
            for bucket in buffer.buckets if ranks > 1 else []:
                # With the distributed optimizer each rank has the sum of its own part only.
                parts = list(bucket.grad_data.chunk(ranks))
                own = parts[buffer.data_parallel_group.rank()].clone()
                dist.all_gather(parts, own, group=buffer.data_parallel_group)
    kept = [p.data for p in parameters]
    model.bridge._owners = None  # gradients may be of another type than weights
    try:
        for p in parameters:
            p.data = p.main_grad
        yield list(model.chunks)
    finally:
        model.bridge._owners = None
        for p, data in zip(parameters, kept, strict=True):
            p.data = data


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not the same bit for bit in both."""
    assert found.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


def stored_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a Hugging Face folder."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def weights(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    """Return the weights under their Hugging Face names."""
    return {name: tensor.clone() for name, tensor in worker.export_weights()}
