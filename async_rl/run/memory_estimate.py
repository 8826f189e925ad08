"""Whether trainer ranks and engines fit into the memory of their devices, before anything is started.

The trainer's package computes what its ranks hold (`estimate_memory(config, cuda=...)`), from config.json and
the layout. This module adds engines, compares with the size of a device, and looks for the nearest change
with which everything fits.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from async_rl.config import Config, SGLangEngines
from async_rl.engines.model_facts import load_facts, read_config
from async_rl.engines.model_files import weights_bytes
from async_rl.errors import ConfigError
from async_rl.run.placement_table import gpus_of_a_node
from async_rl.run.preflight import require_module
from async_rl.runtime.devices import detect_device
from async_rl.trainer_protocol import RankMemory, TrainerMemory

RUNTIME_BYTES: Final = 3 << 30
"""What a process takes on a GPU besides tensors: CUDA context, NCCL buffers, fragments, at most."""

HAND_OVER: Final = "hand-over"
"""The moment at which a trainer's rank and an engine's have weights on one device."""

_UNITS: Final = {"GB": 10**9, "GIB": 1 << 30, "MB": 10**6, "MIB": 1 << 20}

_MOST_RANKS: Final = 1024

Load = Callable[[Sequence[str]], Config]
"""Loads the config with further `dotted.key=value` changes; raises ConfigError when they do not fit."""


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one device holds at its fullest moment, bytes."""

    name: str
    """The ranks or the engines that hold equally much."""
    parts: dict[str, int]
    moment: str
    host: dict[str, int] = {}
    needs: int
    """The least that the device must have."""


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `80GB` or `80GiB`.

    Raises:
        ConfigError: It is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GM]i?B)", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is not a size of memory; expected one such as 80GB or 80GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def estimate_devices(config: Config, gpu: int | None) -> list[DeviceUse]:
    """Return what each trainer rank and each engine holds.

    Args:
        config: The run's config; of the policy only config.json is read, of other models the sizes of files.
        gpu: Bytes of a GPU; None estimates for the devices of this machine.

    Raises:
        ConfigError: The trainer's package refuses the config or has no estimate, or the weights of a model in
            `models` are not there and its architecture is none that the package knows.
    """
    trainer = _trainer_memory(config, gpu)
    cuda = _on_gpu(config.trainer.device, gpu)
    ranks = [_rank_use(_beside_engine(each, config, trainer, cuda=cuda), cuda=cuda) for each in trainer.ranks]
    longest = config.rollout.max_context_tokens
    uses = [*ranks, *_engine_uses("", config, longest, trainer, gpu)]
    for name in config.models:
        its = config.of_model(name)
        size = weights_bytes(its.model.path) or _trainer_memory(its, gpu).model_bytes
        memory = TrainerMemory(ranks=[], model_bytes=size)
        uses += _engine_uses(f"models.{name} ", its, longest, memory, gpu)
    return uses


def num_senders(config: Config, gpus_per_node: int) -> int:
    """Return how many trainer ranks broadcast weights; patched servers receive a bucket of each at a time.

    Args:
        config: The run's config.
        gpus_per_node: Trainer ranks on a node; 0 if they are on CPUs, and then on one.
    """
    weights, ranks = config.weights, config.trainer.num_ranks
    if weights.overlap:
        return 1  # rank 0 has the copy
    return min(weights.senders or (-(-ranks // gpus_per_node) if gpus_per_node else 1), ranks)


def version_bytes(config: Config) -> int:
    """Return the size of a weight version, bytes: the model, or its adapter; 0 if nothing says it.

    As in `estimate_devices`, config.json says it; where it does not, the files of the weights do.
    """
    try:
        memory = _trainer_memory(config, None)
    except ConfigError:
        return weights_bytes(config.model.path) if config.adapters is None else 0
    return memory.adapter_bytes or memory.model_bytes


def model_bytes(config: Config) -> int:
    """Return the size of the model in its type, bytes, as `version_bytes` finds it."""
    try:
        return _trainer_memory(config, None).model_bytes
    except ConfigError:
        return weights_bytes(config.model.path)


def nearest_change(load: Load, gpu: int) -> list[str] | None:
    """Return the fewest changes of settings that make everything fit, or None if none is found.

    Those that need no more devices come first.
    """
    config = load([])
    found: list[str] = []
    searches = [("rank", _trainer_changes(config)), ("engine", _engine_changes("engine", config))]
    searches += [
        (f"models.{name} ", _engine_changes(f"models.{name}", config.of_model(name)))
        for name in config.models
    ]
    for prefix, candidates in searches:
        if _fits(config, gpu, prefix):
            continue
        for changes in candidates:
            try:
                changed = load([*found, *changes])
                fits = _fits(changed, gpu, prefix)
            except ConfigError:
                continue
            if fits:
                found += changes
                break
        else:
            return None
    return found


def _fits(config: Config, gpu: int, prefix: str) -> bool:
    return all(use.needs <= gpu for use in estimate_devices(config, gpu) if use.name.startswith(prefix))


def _trainer_changes(config: Config) -> Iterator[list[str]]:
    """Yield changes of the trainer, the fewest first."""
    trainer, layout = config.trainer, config.trainer.layout
    kinds = ("none", "selective", "full", "offload")
    recompute = [[f"trainer.recompute={kind}"] for kind in kinds[kinds.index(trainer.recompute) + 1 :]]
    budgets, budget = [], trainer.micro_batch_tokens
    while budget // 2 >= config.rollout.max_context_tokens:
        budget //= 2
        budgets.append([f"trainer.micro_batch_tokens={budget}"])
    doubled = [2**n for n in range(1, _MOST_RANKS.bit_length())]
    split = [
        [f"trainer.layout.{key}={getattr(layout, key) * n}"]
        for n in doubled
        for key in ("ep", "pp", "tp", "cp")
        if getattr(layout, key) * n <= trainer.num_ranks
    ]
    # Without expert parallelism experts are split as everything else is.
    split += [
        [f"trainer.layout.tp={layout.tp * n}", f"trainer.layout.etp={layout.etp * n}"]
        for n in doubled
        if layout.tp * n <= trainer.num_ranks and layout.ep == 1
    ]
    more = [
        [f"trainer.num_ranks={trainer.num_ranks * n}"]
        for n in doubled
        if trainer.num_ranks * n <= _MOST_RANKS
    ]
    least = [*recompute[-1:], *budgets[-1:]]
    optimizer = list(_optimizer_changes(config))
    alone = [*recompute, *budgets, *split, *optimizer]
    if config.placement.shared and config.weights.transport == "tensor":
        alone.insert(0, ["weights.transport=disk"])  # no engine has weights beside the trainer's
    yield from alone
    saved = list(itertools.chain.from_iterable(least))
    yield from ([*saved, *change] for change in ([], *split, *optimizer))
    yield from ([*saved, *change, *optimizer[-1]] for change in split if optimizer)
    yield from more
    yield from ([*saved, *change] for change in more)
    for ranks in more:
        yield from ([*ranks, *change] for change in split)
        yield from ([*ranks, *saved, *change] for change in split)


def _optimizer_changes(config: Config) -> Iterator[list[str]]:
    """Yield settings that make the optimizer of a half-precision model smaller, or move it to the host."""
    passed, key = config.trainer.megatron, "trainer.megatron"
    if config.model.dtype == "float32" or passed.get("optimizer_cpu_offload"):
        return
    aware = [f"{key}.use_precision_aware_optimizer=true"]
    if passed.get("exp_avg_sq_dtype") != "bfloat16":
        yield [*aware, f"{key}.exp_avg_dtype=bfloat16", f"{key}.exp_avg_sq_dtype=bfloat16"]
    yield [*aware, f"{key}.optimizer_cpu_offload=true"]


def _engine_changes(key: str, config: Config) -> Iterator[list[str]]:
    if isinstance(config.engine, SGLangEngines):
        yield from ([f"{key}.tp_size={config.engine.tp_size * 2**n}"] for n in range(1, 7))


def _trainer_memory(config: Config, gpu: int | None) -> TrainerMemory:
    worker = config.trainer.worker
    require_module(worker, "trainer.worker")
    package: Any = sys.modules.get(worker.partition(":")[0].rpartition(".")[0])
    if not hasattr(package, "estimate_memory"):
        raise ConfigError(f"trainer.worker {worker!r}: its package has no function estimate_memory")
    cuda = _on_gpu(config.trainer.device, gpu)
    if cuda:  # also on a machine without a GPU
        on_gpu = msgspec.structs.replace(config.trainer, device="cuda")
        config = msgspec.structs.replace(config, trainer=on_gpu)
    if hasattr(package, "check"):
        package.check(config)
    memory: TrainerMemory = package.estimate_memory(config, cuda=cuda)
    return memory


def _on_gpu(device: str, gpu: int | None) -> bool:
    if device == "auto":
        return gpu is not None or detect_device() == "cuda"
    return device == "cuda"


def _beside_engine(rank: RankMemory, config: Config, memory: TrainerMemory, *, cuda: bool) -> RankMemory:
    """Return what a rank's device holds, with an engine's weights at the moment at which both have theirs."""
    if HAND_OVER not in rank.moments or not isinstance(config.engine, SGLangEngines):
        return rank
    of_engine = {"engine's weights": -(-memory.model_bytes // config.engine.tp_size)}
    if cuda:
        of_engine["engine's runtime"] = RUNTIME_BYTES
    moments = rank.moments | {HAND_OVER: rank.moments[HAND_OVER] | of_engine}
    return msgspec.structs.replace(rank, moments=moments)


def _rank_use(rank: RankMemory, *, cuda: bool) -> DeviceUse:
    parts = rank.moments[rank.fullest] | ({"runtime": RUNTIME_BYTES} if cuda else {})
    name = f"rank {rank.first}" if rank.first == rank.last else f"ranks {rank.first}-{rank.last}"
    return DeviceUse(name=name, parts=parts, moment=rank.fullest, host=rank.host, needs=sum(parts.values()))


def _engine_uses(
    prefix: str, config: Config, longest: int, memory: TrainerMemory, gpu: int | None
) -> Iterator[DeviceUse]:
    """Yield what a GPU of a model's engines holds, if this program starts them."""
    engine = config.engine
    if isinstance(engine, SGLangEngines) and not engine.urls and engine.urls_file is None:
        use = _engine_use(config, engine, longest, memory, gpu)
        yield msgspec.structs.replace(use, name=prefix + use.name)


def _engine_use(
    config: Config, engine: SGLangEngines, longest: int, memory: TrainerMemory, gpu: int | None
) -> DeviceUse:
    """Return what a GPU of an engine holds.

    SGLang gives its KV cache what is left of `--mem-fraction-static` after the weights. The cache must at
    least hold the longest trajectory.
    """
    facts, width = load_facts(config.model.path), 4 if config.model.dtype == "float32" else 2
    token = kv_bytes_per_token(read_config(config.model.path), engine.tp_size) * width
    longest = min(longest, engine.context_length or facts.context_length)
    parts, host = {"weights": -(-memory.model_bytes // engine.tp_size)}, {}
    if memory.adapter_bytes:
        parts["adapter"] = memory.adapter_bytes
    prefill = _prefill_tokens(gpu)
    if config.routing.from_engine and facts.is_moe:
        # SGLang's `state_capturer/base.py`: int32 of all layers, of a batch on the device and of the cache.
        row = facts.num_layers * facts.top_k * 4
        parts["routing"] = max(prefill, engine.max_running_requests) * row
    if config.weights.transport in ("distributed", "tensor") and not config.placement.shared:
        is_patched = config.weights.transport == "distributed" and engine.narrow_routing
        senders = num_senders(config, gpus_of_a_node(config)) if is_patched else 1
        parts["buckets"] = config.weights.bucket_bytes * senders
    static = sum(parts.values())
    reserve = 0
    if gpu is not None and _on_gpu(engine.device, gpu):
        reserve = gpu - int(_static_fraction(engine, gpu, prefill) * gpu)
    tokens = engine.max_total_tokens or (max(0, gpu - reserve - static) // token if gpu else longest)
    if config.placement.shared and config.adapters is not None:
        host["weights"] = parts["weights"]
    if "routing" in parts:
        host["routing"] = tokens * row
    name = "engine" if engine.num_engines == 1 else f"engines 0-{engine.num_engines - 1}"
    return DeviceUse(
        name=name + (f", each of {engine.tp_size} GPUs" if engine.tp_size > 1 else ""),
        parts=parts | {"KV cache": tokens * token, "runtime": reserve},
        moment=f"{tokens:,} tokens of KV cache, {tokens / longest:.1f} times the longest trajectory",
        host=host,
        needs=static + reserve + max(longest, engine.max_total_tokens or 0) * token,
    )


def kv_bytes_per_token(model: dict[str, Any], tp: int) -> int:
    """Return the elements of the KV cache for one token on one of `tp` ranks, from a parsed config.json."""
    layers = int(model["num_hidden_layers"])
    if model.get("kv_lora_rank"):  # latent attention keeps one compressed head on every rank
        return layers * int(model["kv_lora_rank"] + model["qk_rope_head_dim"])
    heads = int(model["num_attention_heads"])
    head = int(model.get("head_dim") or model["hidden_size"] // heads)
    return layers * 2 * max(1, int(model.get("num_key_value_heads") or heads) // tp) * head


def _prefill_tokens(gpu: int | None) -> int:
    """Return SGLang 0.5.23's `chunked_prefill_size` by the size of the GPU (`arg_groups/memory_hook.py`)."""
    size = (gpu or 0) >> 30
    return 2048 if size < 20 else 4096 if size < 60 else 8192


def _static_fraction(engine: SGLangEngines, gpu: int, prefill: int) -> float:
    """Return the share of the GPU for weights and KV cache, as given or as SGLang 0.5.23 computes it."""
    given = re.search(r"--mem-fraction-static[= ](\S+)", " ".join(engine.extra_args))
    if given:
        return float(given[1])
    # Source: sglang/srt/arg_groups/memory_hook.py, without the buffers of CUDA graphs on smaller GPUs.
    reserve = 512 + 1.5 * prefill + engine.tp_size / 8 * 1024
    return 1 - (max(reserve, 10 * 1024) if gpu > 60 << 30 else reserve) * (1 << 20) / gpu
