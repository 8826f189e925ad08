"""What each rank of the trainer holds at its fullest moments, from config.json and the layout."""

from __future__ import annotations

import itertools
from math import ceil
from typing import Final, NamedTuple

from async_rl.config import Config, LayoutConfig, SGLangEngines
from async_rl.engines.model_facts import read_config
from async_rl.routing import id_dtype
from async_rl.trainer_protocol import RankMemory, TrainerMemory
from trainer.memory import activations
from trainer.memory.activations import FLOAT32, Slice
from trainer.memory.dimensions import (
    Dimensions,
    Parameters,
    adapters_of,
    chunks_of,
    dimensions_of,
    padded,
    parameters_of,
)
from trainer.passthrough import row_multiple, situation_of

_HANDED_BUCKETS: Final = 3
"""Buckets on a GPU that a rank shares with an engine's (`WeightExport.allocate_buffers`)."""

STEPPED_AT_ONCE: Final = 1 << 26
"""Elements whose moments the optimizer has copies of at a time (`trainer.megatron.sliced_adam`): 0.7 GB at
most, and enough work for a GPU that launching it does not count."""


def estimate_memory(config: Config, *, cuda: bool) -> TrainerMemory:
    """Estimates the tensors of every rank of the trainer, in the order of ranks.

    Assumptions: micro-batches are as large as they can be and all of their tokens are trained, as many follow
    each other as the schedule keeps, and routers choose all experts equally often.

    Args:
        config: The run's config; of `model.path` only config.json is read.
        cuda: Whether ranks have a GPU, with TransformerEngine for half-precision models.

    Raises:
        ConfigError: When there is no config.json.
    """
    model = dimensions_of(read_config(config.model.path))
    model = model._replace(precise_router=situation_of(config, on_gpu=cuda).precise_router)
    whole = sum(map(sum, parameters_of(model, LayoutConfig(), 0))) * element_bytes(config)
    ranks: list[RankMemory] = []
    of_stage = config.trainer.num_ranks // config.trainer.layout.pp
    for stage in range(config.trainer.layout.pp):
        first, last = stage * of_stage, (stage + 1) * of_stage - 1
        moments = _moments(config, model, stage, cuda=cuda)
        host = _on_host(config, model, stage, moments["a layer"])
        if stage == 0:
            sent = whole if config.adapters is None else _served_adapter(config, model, tp=1)
            ranks.append(_first_rank(config, model, sent, moments, host, cuda=cuda))
            first += 1
        if first <= last:
            if _may_send(config, first, last, cuda=cuda):
                moments = moments | _weight_update(config, model, moments, whole)
            ranks.append(RankMemory(first=first, last=last, moments=moments, host=host))
    tp = config.engine.tp_size if isinstance(config.engine, SGLangEngines) else 1
    return TrainerMemory(ranks=ranks, model_bytes=whole, adapter_bytes=_served_adapter(config, model, tp=tp))


def _served_adapter(config: Config, model: Dimensions, *, tp: int) -> int:
    """Return the bytes of an adapter on one of an engine's `tp` ranks; 0 if it is given whole weights."""
    if config.adapters is None:
        return 0
    sizes = adapters_of(model, LayoutConfig(tp=tp, etp=tp), 0, config.adapters, fused=False)
    return sum(map(sum, sizes)) * element_bytes(config)


def largest_micro_batch(config: Config) -> tuple[int, int]:
    """Return the tokens of the largest micro-batch, and the most micro-batches that a rank has in a row."""
    trainer, layout = config.trainer, config.trainer.layout
    longest = config.rollout.max_context_tokens
    groups = ceil(trainer.groups_per_batch / trainer.updates_per_batch)
    trajectories = groups * config.rollout.group_size * (1 + config.rollout.max_branches)
    tokens = min(max(trainer.micro_batch_tokens, longest), trajectories * longest)
    align = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    align *= row_multiple(trainer.megatron, layout.tp)
    replicas = trainer.num_ranks // (layout.tp * layout.pp * layout.cp)
    return ceil(tokens / align) * align, ceil(trajectories / replicas)


def element_bytes(config: Config) -> int:
    """Return the size of an element of the model's type."""
    return FLOAT32 if config.model.dtype == "float32" else 2


def _moments(config: Config, model: Dimensions, stage: int, *, cuda: bool) -> dict[str, dict[str, int]]:
    """Return what a rank of a stage has on its device at each moment that may be the fullest."""
    trainer, layout, e = config.trainer, config.trainer.layout, element_bytes(config)
    steady = _steady(config, model, stage)
    tokens, micro_batches = largest_micro_batch(config)
    part = Slice(
        tokens=tokens // layout.cp,
        tp=layout.tp,
        cp=layout.cp,
        etp=layout.etp,
        longest=config.rollout.max_context_tokens,
        element=e,
        fused=cuda and e < FLOAT32,
        lora=trainer.lora,
    )
    chunks = chunks_of(layout, stage, len(model.has_experts))
    flights = activations.in_flight(stage, layout.pp, layout.vpp, micro_batches)
    between = part.sequence * model.hidden * e  # hidden states between layers
    modules = trainer.megatron.get("recompute_modules", ["moe"])
    kept, working = 0, 0
    for chunk, flight in zip(chunks, flights, strict=True):
        for layer in chunk:
            experts = model.has_experts[layer]
            whole = saved = activations.layer_bytes(model, part, experts=experts)
            if trainer.recompute == "full":
                saved = between
            elif trainer.recompute == "offload":
                saved = 0
            elif trainer.recompute == "selective":
                saved -= activations.recomputed_bytes(model, part, modules, experts=experts)
            kept += flight * saved
            # Of a layer that is computed again, everything; and the gradient of its output.
            again = whole - saved + between * (saved < whole)
            working = max(working, again + activations.working_bytes(model, part, experts=experts) + between)
    if layout.tp > 1:
        kept += part.tokens * model.hidden * e  # inputs of projections, gathered into one buffer
    if trainer.recompute == "offload":
        # What stages send and receive stays for the backward pass.
        kept += sum(flights) * between * ((stage > 0) + (stage < layout.pp - 1))
    elif trainer.recompute == "full" or activations.keeps_inputs(part):
        kept += flights[0] * between  # the input of the first layer
    found = {"a layer": steady | {"activations": kept, "working": working}}
    if stage == layout.pp - 1:
        norm = activations.norm_bytes(part.sequence * model.hidden, part)
        gathered = part.tokens * model.hidden * e * (1 + (layout.tp > 1))
        logits = activations.log_prob_bytes(
            part.tokens,
            ceil(model.vocabulary / layout.tp),
            model.hidden,
            part,
            entropy=trainer.loss.entropy_bonus > 0,
            compiled=cuda,
        )
        found["log-probs"] = steady | {"activations": kept + norm + gathered, "logits": max(logits)}
    if layout.tp > 1:
        # The parts of a tensor, and they put together.
        found["export"] = steady | {"gathered": 2 * model.vocabulary * model.hidden * e}
    merged = {}
    if trainer.lora is not None and trainer.lora.sync == "merged":
        # A weight of a layer in float64, and as engines receive it.
        vocabulary = ceil(model.vocabulary / layout.tp) * model.hidden
        sizes = itertools.chain(*parameters_of(model, layout, stage))
        merged = {"merged": max(size for size in sizes if size != vocabulary) * (8 + e)}
        found["export"] = found.get("export", steady) | merged
    if copied := _step_copies(config, model, stage):
        found["optimizer step"] = steady | {"copies": copied}
    if config.placement.shared and config.weights.transport == "tensor":
        # Everything else has left the device, and an engine has its weights there (`SharedDevices`).
        gathered = {"gathered": 2 * model.vocabulary * model.hidden * e}
        buckets = {"buckets": _HANDED_BUCKETS * _bucket_bytes(config, model)} if cuda else {}
        found["hand-over"] = {"weights": steady["weights"]} | gathered | merged | buckets
    if trainer.loss.kl.coefficient:
        # Both sets of weights change places tensor by tensor.
        largest = max(itertools.chain(*parameters_of(model, layout, stage))) * e * (trainer.lora is None)
        found["reference"] = steady | {"reference": largest, "working": working}
        if stage == layout.pp - 1:
            found["reference"]["logits"] = logits.forward
    return found


def _steady(config: Config, model: Dimensions, stage: int) -> dict[str, int]:
    """Return what a rank of a stage has on its device between steps."""
    parameters = parameters_of(model, config.trainer.layout, stage)
    found = _state(config, trained_of(config, model, stage))
    if config.trainer.lora is not None:
        found["weights"] += sum(map(sum, parameters)) * element_bytes(config)
    if config.trainer.loss.advantages == "gae":
        critic = _state(config, parameters_of(model, config.trainer.layout, stage, value_head=True))
        found["critic"] = sum(critic.values())
    return found


def trained_of(config: Config, model: Dimensions, stage: int) -> Parameters:
    """Return the sizes of what a rank of a stage trains: all parameters, or adapters only."""
    layout, lora = config.trainer.layout, config.trainer.lora
    if lora is not None:
        return adapters_of(model, layout, stage, lora)
    return parameters_of(model, layout, stage)


def _state(config: Config, parameters: Parameters) -> dict[str, int]:
    """Return what a rank has of a model with these parameters and of its optimizer."""
    to = 64 if _is_distributed(config) else 1
    count, e = sum(padded(sizes, to) for sizes in parameters), element_bytes(config)
    return {
        "weights": count * e,
        "gradients": count * FLOAT32,
        "optimizer": int(_stepped(config, parameters) * optimizer_bytes(config).device),
    }


def _is_distributed(config: Config) -> bool:
    """Whether the optimizer is Megatron's distributed one."""
    layout = config.trainer.layout
    shared = config.trainer.num_ranks > layout.tp * layout.pp
    return shared or bool(config.trainer.megatron.get("use_precision_aware_optimizer"))


def _stepped(config: Config, parameters: Parameters) -> int:
    """Return how many elements a rank's optimizer updates."""
    return sum(_shards(config, parameters))


def _shards(config: Config, parameters: Parameters) -> tuple[int, int]:
    """Return how many elements a rank's optimizer updates of its dense parameters and of its experts'."""
    ranks, layout = config.trainer.num_ranks, config.trainer.layout
    dense, experts = (padded(sizes, 64 if _is_distributed(config) else 1) for sizes in parameters)
    replicas = ranks // (layout.tp * layout.pp)
    return dense // replicas, experts * layout.etp * layout.ep * layout.pp // ranks


def _step_copies(config: Config, model: Dimensions, stage: int) -> int:
    """Return what TransformerEngine's optimizer with its own main weights takes in a step beyond its state.

    In each step those are copies of moments that are not float32, of one slice of the parameters at a time
    (`trainer.megatron.sliced_adam`), and one copy of its results; in the first step copies of a parameter, of
    which it makes the main weight.

    Source: transformer_engine/pytorch/optimizers/fused_adam.py of version 2.11.0, `get_unscaled_state`,
    `_apply_scale` and `initialize_state`.
    """
    passed = config.trainer.megatron
    if not passed.get("use_precision_aware_optimizer") or passed.get("optimizer_cpu_offload"):
        return 0
    trained = [trained_of(config, model, stage)]
    if config.trainer.loss.advantages == "gae":  # one model's optimizer after the other's
        trained.append(parameters_of(model, config.trainer.layout, stage, value_head=True))
    slices = [min(shard, STEPPED_AT_ONCE) for each in trained for shard in _shards(config, each)]
    largest = max(
        min(shard, max(sizes, default=0))
        for each in trained
        for sizes, shard in zip(each, _shards(config, each), strict=True)
    )
    moments = sum(passed.get(name) == "bfloat16" for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
    copied = max(slices) * (moments * FLOAT32 + (moments > 0) * element_bytes(config))
    return max(copied, largest * (element_bytes(config) + FLOAT32))


class OptimizerBytes(NamedTuple):
    """What the optimizer takes for each element that it updates, on average."""

    device: float
    host: float
    stored: int
    """In a checkpoint, with the parameter."""


def optimizer_bytes(config: Config) -> OptimizerBytes:
    """Return the bytes of main weights and moments, by the config's type and `trainer.megatron`."""
    passed, e = config.trainer.megatron, element_bytes(config)
    moments = sum(
        2 if passed.get(name) == "bfloat16" else FLOAT32 for name in ("exp_avg_dtype", "exp_avg_sq_dtype")
    )
    own = moments + FLOAT32 * (e < FLOAT32)
    fraction = 0.0
    if passed.get("optimizer_cpu_offload"):
        fraction = float(passed.get("optimizer_offload_fraction", 1.0))
    # The host has a copy of the gradients, too.
    return OptimizerBytes((1 - fraction) * own, fraction * (own + FLOAT32), own + e)


def _on_host(config: Config, model: Dimensions, stage: int, steady: dict[str, int]) -> dict[str, int]:
    """Return what every rank of a stage has in host memory."""
    trainer = config.trainer
    layout, each = trainer.layout, optimizer_bytes(config)
    count = _stepped(config, trained_of(config, model, stage))
    if "critic" in steady:
        count += _stepped(config, parameters_of(model, layout, stage, value_head=True))
    host = {"checkpoint": count * each.stored}
    if each.host:
        host["optimizer"] = int(count * each.host)
    if trainer.recompute == "offload":
        tokens, micro_batches = largest_micro_batch(config)
        inputs = tokens // layout.cp // layout.tp * model.hidden * element_bytes(config)
        chunks = chunks_of(layout, stage, len(model.has_experts))
        flights = activations.in_flight(stage, layout.pp, layout.vpp, micro_batches)
        # One more for the norm after the last layer.
        layers = sum(len(chunk) * flight for chunk, flight in zip(chunks, flights, strict=True))
        host["activations"] = (layers + flights[-1] * (stage == layout.pp - 1)) * inputs
    if config.trainer.loss.kl.coefficient and trainer.lora is None:
        host["reference"] = steady["weights"]
    if config.placement.shared:
        copies = 1 + ("critic" in steady)
        host["offloaded"] = copies * (steady["weights"] + steady["optimizer"])
    if routing := _routing_bytes(config, model, stage):
        host["routing"] = routing
    return host


def _routing_bytes(config: Config, model: Dimensions, stage: int) -> int:
    """Return the routing rows of a rank's part of a batch: those of its trajectories, if engines sent them,
    and a copy of those that its own layers replay for its own tokens.
    """
    trainer, layout, replay = config.trainer, config.trainer.layout, config.routing.replay
    if replay == "off" or not any(model.has_experts):
        return 0
    trajectories = trainer.groups_per_batch * config.rollout.group_size * (1 + config.rollout.max_branches)
    replicas = trainer.num_ranks // (layout.tp * layout.pp * layout.cp)
    rows = ceil(trajectories / replicas) * config.rollout.max_context_tokens
    chunks = chunks_of(layout, stage, len(model.has_experts))
    own = (
        sum(model.has_experts[layer] for chunk in chunks for layer in chunk) * rows // (layout.tp * layout.cp)
    )
    sent = sum(model.has_experts) * rows if replay == "r3" else 0
    return (sent + own) * model.top_k * id_dtype(model.experts).itemsize


def _bucket_bytes(config: Config, model: Dimensions) -> int:
    """Return the size of the largest bucket of weights, if the model has several."""
    return max(config.weights.bucket_bytes, model.vocabulary * model.hidden * element_bytes(config))


def _first_rank(
    config: Config,
    model: Dimensions,
    whole: int,
    moments: dict[str, dict[str, int]],
    host: dict[str, int],
    *,
    cuda: bool,
) -> RankMemory:
    """Return rank 0, which also sends weights to the engines."""
    weights = config.weights
    if weights.transport == "distributed":
        moments = moments | _weight_update(config, model, moments, whole)
    snapshot = {"snapshot": whole} if weights.overlap else {}
    if weights.overlap and weights.snapshot == "device":
        moments = {name: parts | snapshot for name, parts in moments.items()}
    else:
        host = host | snapshot
    if weights.transport == "tensor" and not (cuda and config.placement.shared):
        host = host | {"buckets": 2 * min(whole, _bucket_bytes(config, model))}
    return RankMemory(first=0, last=0, moments=moments, host=host)


def _may_send(config: Config, first: int, last: int, *, cuda: bool) -> bool:
    """Return whether one of some ranks may be a sender, as `assign_senders` chooses them; rank 0 is one."""
    weights, num_ranks = config.weights, config.trainer.num_ranks
    if weights.transport != "distributed" or weights.overlap:
        return False
    if weights.senders is None:  # each may be the first one on its host
        return cuda
    parts = [rank * weights.senders // num_ranks for rank in range(first - 1, last + 1)]
    return parts[0] != parts[-1]


def _weight_update(
    config: Config, model: Dimensions, moments: dict[str, dict[str, int]], whole: int
) -> dict[str, dict[str, int]]:
    """Return what a sender has on its device while it broadcasts weights."""
    gathered = 2 * model.vocabulary * model.hidden * element_bytes(config)
    lasting = ("weights", "gradients", "optimizer", "critic")
    steady = {name: size for name, size in moments["a layer"].items() if name in lasting}
    buckets = 2 * min(whole, _bucket_bytes(config, model))
    return {"weight update": steady | {"gathered": gathered, "buckets": buckets}}
