"""Everything a rank holds that training changes, as plain tensors, and back again bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.utils import unwrap_model

from trainer.megatron.model import MegatronModel


def rank_state(model: MegatronModel) -> dict[str, Any]:
    """Parameters, main parameters, optimizer moments and random generators of this rank.

    Tensors are views of the live ones: write them before training goes on.
    """
    return {
        "parameters": [_parameters(chunk) for chunk in model.chunks],
        "main_parameters": _main_parameters(model),
        "optimizers": [optimizer.state_dict() for optimizer in model.inner_optimizers],
        "random": {
            "cpu": torch.get_rng_state(),
            "device": torch.cuda.get_rng_state(),
            "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
        },
    }


def restore(model: MegatronModel, state: dict[str, Any]) -> None:
    """Put `rank_state` back into a model of the same config and layout.

    Raises:
        ValueError: When names or shapes differ.
    """
    for chunk, saved in zip(model.chunks, state["parameters"], strict=True):
        _copy(_parameters(chunk), saved)
    _copy(dict(enumerate(_main_parameters(model))), dict(enumerate(state["main_parameters"])))
    for optimizer, saved in zip(model.inner_optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    random = state["random"]
    torch.set_rng_state(random["cpu"].cpu())
    if model.device.type == "cuda":
        torch.cuda.set_rng_state(random["device"].cpu())
    tensor_parallel.get_cuda_rng_tracker().set_states(
        {name: generator.cpu() for name, generator in random["megatron"].items()}
    )


def _parameters(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = unwrap_model(chunk).state_dict()
    return {name: value.detach() for name, value in state.items() if torch.is_tensor(value)}


def _main_parameters(model: MegatronModel) -> list[torch.Tensor]:
    """The float32 copies that a bfloat16 model is trained through; a float32 model is its own."""
    if model.config.params_dtype == torch.float32:
        return []
    return [
        parameter.detach()
        for optimizer in model.inner_optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


@torch.no_grad()
def _copy(into: dict[Any, torch.Tensor], saved: dict[Any, torch.Tensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in into.items()}
    saved_shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if shapes != saved_shapes:
        differing = sorted(set(shapes.items()) ^ set(saved_shapes.items()), key=str)[:3]
        raise ValueError(f"names or shapes of its parameters differ, first {differing}")
    for name, tensor in into.items():
        tensor.copy_(saved[name])
