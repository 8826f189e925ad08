"""Checks, by config.json alone, that the trainer supports a model and its layout, and tries the user's own
loss. Pure, and without torch unless the config names an objective of the user's.

`async-rl check` and `async-rl train` check before they start anything, and every rank checks again.
"""

from __future__ import annotations

import importlib.metadata
import math
from typing import Any

from async_rl.config import Config, LayoutConfig
from async_rl.engines.model_facts import load_facts, read_config
from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.runtime.devices import detect_device, finds_transformer_engine
from trainer.losses.trial import describe_penalty, try_loss
from trainer.memory.dimensions import Dimensions, dimensions_of
from trainer.passthrough import check_megatron_settings
from trainer.supported_values import check_model_type, check_supported_values


def check(config: Config) -> None:
    """Check that the trainer can start with the config's model, layout, loss and Megatron's settings.

    Raises:
        ConfigError: When it cannot.
        EnvironmentNotReady: When this machine has a GPU and lacks what the trainer needs to use it well.
    """
    path = config.model.path
    model = read_config(path)
    check_model_type(str(model.get("model_type")), path)
    load_facts(path)
    check_supported_values(model, path)
    for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
        if not model.get(name):
            raise ConfigError(f"{path}/config.json does not say {name!r}: download the file again")
    try:
        dimensions = dimensions_of(model)
    except KeyError as e:
        raise ConfigError(f"{path}/config.json does not say {e}: download the file again") from e
    check_layout(config.trainer.layout, dimensions)
    check_adapters(config, model)
    check_megatron_settings(config)
    try_loss(config)
    if _trains_on_gpu_here(config):
        check_fused_layers(config, None if finds_transformer_engine() else "is not installed")


def check_here(config: Config) -> None:
    """Check that ranks can start on this machine.

    Raises:
        ConfigError, EnvironmentNotReady: As for `check_device`; or Megatron-Core is missing.
    """
    check_device(config.trainer.device, has_gpu=detect_device() == "cuda")
    megatron_version()


def check_device(device: str, *, has_gpu: bool) -> None:
    """Check that a machine has the device that `trainer.device` names.

    Raises:
        EnvironmentNotReady: When CUDA is requested but not available.
        ConfigError: When the CPU is requested on a machine with a GPU.
    """
    if device == "cuda" and not has_gpu:
        raise EnvironmentNotReady(
            "trainer.device is cuda, but torch sees no GPU: set trainer.device=auto or cpu"
        )
    if device == "cpu" and has_gpu:
        raise ConfigError(
            "trainer.device is cpu, but this machine has a GPU, which Megatron-Core would use: hide it with "
            "CUDA_VISIBLE_DEVICES= or set trainer.device=auto"
        )


def megatron_version() -> str:
    """Return the version of Megatron-Core.

    Raises:
        EnvironmentNotReady: It is not installed.
    """
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as e:
        raise EnvironmentNotReady(
            "megatron-core is not installed: `make setup` installs it for a CPU, `make setup-gpu` for a GPU"
        ) from e


def describe(config: Config) -> list[str]:
    """Return what `async-rl check` says of a config that `check` has let pass, a line each."""
    found = list(describe_penalty(config))
    if _trains_on_gpu_here(config) and config.model.dtype == "bfloat16" and not finds_transformer_engine():
        found.append(
            "trainer: TransformerEngine is not installed, so layers are Megatron-Core's own, which take more "
            "time and keep more for the backward pass than `check --memory` counts: run `make setup-gpu`"
        )
    return found


def _trains_on_gpu_here(config: Config) -> bool:
    return config.trainer.device != "cpu" and detect_device() == "cuda"


def check_fused_layers(config: Config, problem: str | None) -> None:
    """Refuse to train an MoE model in bfloat16 on GPUs without TransformerEngine.

    Megatron-Core would use its own layers, which compute one expert after the other, without a message.

    Args:
        config: The run's config.
        problem: Why TransformerEngine cannot be used; None if it can.

    Raises:
        EnvironmentNotReady: It is needed and cannot be used.
    """
    needed = config.trainer.require_transformer_engine and config.model.dtype == "bfloat16"
    if problem is None or not needed or not load_facts(config.model.path).is_moe:
        return
    raise EnvironmentNotReady(
        f"TransformerEngine {problem}. Without it Megatron-Core computes the experts of a layer one after "
        "the other, many times slower: run `make setup-gpu`, or set trainer.require_transformer_engine=false "
        "to train all the same"
    )


def check_adapters(config: Config, model_config: dict[str, Any]) -> None:
    """Check that the model has what `trainer.lora.targets` names, in a form that can have adapters.

    `model_config` is its parsed config.json.

    Raises:
        ConfigError: When it does not; the message names the target and the remedy.
    """
    lora = config.trainer.lora
    if lora is None:
        return
    model = dimensions_of(model_config)
    path, targets = config.model.path, f"trainer.lora.targets is {', '.join(lora.targets)}"
    whole_queries = model.latent is not None and not model.latent.query_rank
    if "attention" in lora.targets and whole_queries and lora.sync == "adapter":
        raise ConfigError(
            f"{targets} and trainer.lora.sync is adapter, but {path} has latent attention without "
            "q_lora_rank, and SGLang loads no adapters onto q_proj and kv_a_proj_with_mqa there: set "
            "trainer.lora.sync=merged"
        )
    if "experts" in lora.targets and not any(model.has_experts):
        raise ConfigError(f"{targets}, but {path} has no experts: leave experts out, or set mlp")
    if "mlp" in lora.targets and all(model.has_experts) and not model.shared:
        raise ConfigError(f"{targets}, but {path} has neither dense layers nor shared experts: leave mlp out")


def check_layout(layout: LayoutConfig, model: Dimensions) -> None:
    """Check that a layout can split a model.

    Raises:
        ConfigError: When it cannot; the message names the setting, its value, and what it must divide.
    """
    tp, ep, etp, layers = layout.tp, layout.ep, layout.etp, len(model.has_experts)
    if model.heads % tp or (model.groups % tp and tp % model.groups):
        raise ConfigError(
            f"trainer.layout.tp is {tp}, but the model has {model.heads} attention heads in {model.groups} "
            "groups: tp must divide the heads, and divide the groups or be a multiple of them"
        )
    if (tp - 1) * math.ceil(model.vocabulary / tp) >= model.vocabulary:
        raise ConfigError(
            f"trainer.layout.tp is {tp}, but the vocabulary has {model.vocabulary} tokens: the last rank "
            "would hold none of them"
        )
    if ep > 1 and not model.experts:
        raise ConfigError(f"trainer.layout.ep is {ep}, but the model has no experts: set ep=1")
    if ep > 1 and model.experts % ep:
        raise ConfigError(
            f"trainer.layout.ep is {ep}, but the model has {model.experts} experts: ep must divide them"
        )
    if model.experts and ep == 1 and etp != tp:
        # Megatron would treat experts as dense parameters and not add up the gradients of tensor ranks.
        raise ConfigError(
            f"trainer.layout has ep=1, tp={tp} and etp={etp}: without expert parallelism set etp={tp}"
        )
    if model.experts and etp > 1 and tp == 1:
        raise ConfigError(
            f"trainer.layout has tp=1 and etp={etp}: experts can only be split where attention is; set tp "
            "above 1, or etp=1"
        )
    uneven = [n for n in (layout.first_stage_layers, layout.last_stage_layers) if n is not None]
    left, stages = layers - sum(uneven), layout.pp - len(uneven)
    fits = left > 0 and left % (stages * layout.vpp) == 0 if stages else left == 0
    if not uneven and not fits:
        raise ConfigError(
            f"trainer.layout.pp is {layout.pp} and vpp is {layout.vpp}, but the model has {layers} "
            "layers: pp must divide them, and so must pp times vpp; or set first_stage_layers, "
            "last_stage_layers"
        )
    if not fits or any(n % layout.vpp for n in uneven):
        raise ConfigError(
            f"trainer.layout has pp={layout.pp}, vpp={layout.vpp} and stages of {uneven} layers, which "
            f"leaves {left} of the model's {layers} for {stages} others: they must divide among them, "
            "and every stage's among its vpp chunks"
        )
