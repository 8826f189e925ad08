"""Adapters in the format of PEFT: gathered from all ranks layer by layer, and written as a folder of two.

```
adapter_config.json          rank, alpha, target modules
adapter_model.safetensors    base_model.model.<projection>.lora_A.weight  [rank, in]
                             base_model.model.<projection>.lora_B.weight  [out, rank]
```

Hugging Face has queries, keys and values, and gate and up, as projections of their own. Each gets the rows of
B that are its own, and a copy of the A that they share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import save_file

from async_rl.config import LoraConfig
from async_rl.runtime.files import replaced_folder
from trainer.collectives import gather_bytes
from trainer.megatron import shards
from trainer.megatron.bridge import HFBridge

PREFIX: Final = "base_model.model."
"""What PEFT puts before the names of the model's own modules."""

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"


class _FactorPart(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of a factor."""

    key: str
    shape: tuple[int, ...]
    """The shape of the whole factor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    data: bytes


@torch.no_grad()
def export_adapter(chunks: Sequence[torch.nn.Module], bridge: HFBridge) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all factors under PEFT's names, on the host, on rank 0, and nothing on the others.

    All ranks must exhaust the iterator, because gathering is collective.
    """
    of_layers: dict[int, list[_FactorPart]] = {}
    for part in shards.parts_held_once(chunks):
        layer = re.search(r"\.layers\.(\d+)\.", part.key)
        if layer:
            of_layers.setdefault(int(layer[1]), []).append(_packed(part))
    for layer in range(bridge.config.num_layers):
        messages = gather_bytes(msgspec.msgpack.encode(of_layers.pop(layer, [])))
        parts = [part for each in messages for part in msgspec.msgpack.decode(each, type=list[_FactorPart])]
        yield from _under_peft_names(_assembled(parts), bridge)


def write_adapter(
    tensors: Iterable[tuple[str, torch.Tensor]], directory: str | Path, lora: LoraConfig, base: str
) -> None:
    """Write a folder that PEFT and engines load; a rename publishes it when it is complete. On one rank.

    Args:
        tensors: What `export_adapter` yields.
        directory: The folder; one of that name is replaced.
        lora: Rank and scale.
        base: Path of the model that the adapter belongs to.
    """
    # Projections that share an A have a copy each.
    found = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
    modules = sorted({name.rsplit(".", 3)[1] for name in found})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with replaced_folder(Path(directory)) as scratch:
        save_file(found, scratch / WEIGHTS_NAME, metadata={"format": "pt"})
        (scratch / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")


def _packed(part: shards.TensorPart) -> _FactorPart:
    # A copy, because torch cannot resize storages that NumPy has seen, as `offload` does on a CPU.
    copied = part.data.detach().to("cpu", copy=True).contiguous()
    data = copied.reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(part.dtype).removeprefix("torch.")
    return _FactorPart(
        part.key, tuple(part.global_shape), tuple(part.global_offset), tuple(part.local_shape), dtype, data
    )


def _assembled(parts: Iterable[_FactorPart]) -> dict[str, torch.Tensor]:
    """Return the whole factors, by key."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        dtype = getattr(torch, part.dtype)
        whole = found.setdefault(part.key, torch.empty(part.shape, dtype=dtype))
        place = tuple(slice(a, a + n) for a, n in zip(part.offsets, part.sizes, strict=True))
        whole[place] = torch.frombuffer(bytearray(part.data), dtype=dtype).view(part.sizes)
    return found


def _under_peft_names(
    factors: dict[str, torch.Tensor], bridge: HFBridge
) -> Iterator[tuple[str, torch.Tensor]]:
    for key, a in factors.items():
        name, _, letter = key.rpartition(".lora_")
        if letter != "A":
            continue
        b = [
            factors[each]
            for each in (f"{name}.lora_B", f"{name}.lora_B_w", f"{name}.lora_B_v")
            if each in factors
        ]
        if name.endswith("linear_qkv"):
            b = _queries_keys_values(b[0], bridge)
        for module, own in zip(bridge.hf_modules(name), b, strict=True):
            yield f"{PREFIX}{module}.lora_A.weight", a
            yield f"{PREFIX}{module}.lora_B.weight", own


def _queries_keys_values(b: torch.Tensor, bridge: HFBridge) -> list[torch.Tensor]:
    """Split the rows of Megatron's fused projection, in which each group has its queries, key and value."""
    config = bridge.config
    groups, size = config.num_query_groups, config.kv_channels
    by_group = b.view(groups, -1, size, b.shape[1])
    queries = by_group.shape[1] - 2
    return [part.reshape(-1, b.shape[1]) for part in by_group.split([queries, 1, 1], dim=1)]
