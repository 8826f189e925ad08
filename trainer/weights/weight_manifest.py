"""What the engines' model is made of, by its files: exported weights are held against it before they go out.

SGLang passes over a name that its model lacks, casts another dtype in silence and dies of another shape. The
folder that the engines were started from says what they have; nothing but headers is read of it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open

from async_rl.engine_protocol import TensorSpec
from async_rl.errors import WeightSyncError

_TOLD: Final = 5
"""Differences that the error names."""

_DTYPES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I32": "int32",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
"""Of safetensors, in torch's words."""

_LAYER: Final = re.compile(r"^model\.layers\.(\d+)\.")


def served_specs(model: Path) -> dict[str, TensorSpec]:
    """Name, dtype and shape of every tensor of a Hugging Face folder.

    Raises:
        WeightSyncError: When it has no safetensors, or its index names files that are not there.
    """
    index = model / "model.safetensors.index.json"
    files = (
        sorted({model / file for file in json.loads(index.read_text())["weight_map"].values()})
        if index.is_file()
        else sorted(model.glob("*.safetensors"))
    )
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise WeightSyncError(
            f"cannot tell what weights {model} has: {', '.join(missing) or '*.safetensors'} not found"
        )
    specs = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                tensor = opened.get_slice(name)
                dtype = tensor.get_dtype()
                specs[name] = TensorSpec(
                    name=name, dtype=_DTYPES.get(dtype, dtype), shape=tuple(tensor.get_shape())
                )
    return specs


def check_exported(
    exported: Iterable[TensorSpec], served: Mapping[str, TensorSpec], hf_config: Any, dtype: str
) -> None:
    """Refuse weights that are not the ones the engines have.

    Args:
        exported: What the trainer sends.
        served: What the engines' model has.
        hf_config: Of that model.
        dtype: `model.dtype`, which the engines cast all weights to that they do not keep in another one.

    Raises:
        WeightSyncError: That names the first differences.
    """
    found = list(_differences(list(exported), served, hf_config, dtype))
    if found:
        more = f"; and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
        raise WeightSyncError(
            f"the trainer's weights are not those of the model that the engines serve: "
            f"{'; '.join(found[:_TOLD])}{more}. Nothing was sent. Is model.path the folder that both were "
            f"started from?"
        )


def _differences(
    exported: list[TensorSpec], served: Mapping[str, TensorSpec], hf_config: Any, dtype: str
) -> Iterator[str]:
    tied = {"lm_head.weight"} if getattr(hf_config, "tie_word_embeddings", False) else set()
    names = [spec.name for spec in exported]
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{name} comes {count} times"
    for spec in exported:
        theirs = served.get(spec.name)
        if theirs is None:
            if spec.name not in tied:
                yield f"{spec.name} is unknown to it"
        elif spec.shape != theirs.shape:
            yield f"{spec.name} has the shape {list(spec.shape)}, expected {list(theirs.shape)}"
        elif spec.dtype not in (theirs.dtype, dtype):
            yield f"{spec.name} is {spec.dtype}, expected {' or '.join(sorted({theirs.dtype, dtype}))}"
    num_layers = hf_config.num_hidden_layers
    for name in sorted(served.keys() - set(names) - tied):
        layer = _LAYER.match(name)
        # Layers beyond the last predict further tokens, which engines load apart and do not use here.
        if not (layer and int(layer[1]) >= num_layers) and not name.endswith("rotary_emb.inv_freq"):
            yield f"{name} is missing"
