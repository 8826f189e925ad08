"""The manifest of the engines' weights, read from the model's files, and its comparison with exported
weights.

SGLang silently ignores a name that its model lacks, silently casts another dtype and crashes on another
shape. The folder that the engines were started from tells which tensors they have; only the headers of its
files are read.
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
from async_rl.runtime.files import file_name

_MAX_LISTED: Final = 5
"""The number of differences that the error lists."""

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
"""Names of torch's dtypes, by the names in safetensors files."""

_LAYER: Final = re.compile(r"^model\.layers\.(\d+)\.")


def served_specs(model: Path) -> dict[str, TensorSpec]:
    """Return name, dtype and shape of every tensor of a Hugging Face folder.

    Raises:
        WeightSyncError: When the folder has no safetensors files, or its index names missing files.
    """
    index = model / "model.safetensors.index.json"
    try:
        files = (
            sorted(
                {model / file_name(f, index) for f in json.loads(index.read_text())["weight_map"].values()}
            )
            if index.is_file()
            else sorted(model.glob("*.safetensors"))
        )
    except ValueError as error:
        raise WeightSyncError(str(error)) from error
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise WeightSyncError(
            f"cannot tell what weights {model} has: {', '.join(missing) or '*.safetensors'} not found"
        )
    specs = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                tensor = opened.get_slice(name)
                dtype = tensor.get_dtype()
                specs[name] = TensorSpec(
                    name=name, dtype=_DTYPES.get(dtype, dtype), shape=tuple(tensor.get_shape())
                )
    return specs


def check_exported(
    exported: Iterable[TensorSpec], served: Mapping[str, TensorSpec], hf_config: Any, dtype: str
) -> None:
    """Check that the exported weights match the engines' model.

    Args:
        exported: The tensors that the trainer sends.
        served: The tensors of the engines' model, by name.
        hf_config: The Hugging Face config of that model.
        dtype: `model.dtype`, to which engines cast all weights that they do not keep in another dtype.

    Raises:
        WeightSyncError: When they differ; the message lists the first differences.
    """
    found = list(_differences(list(exported), served, hf_config, dtype))
    if found:
        more = f"; and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        raise WeightSyncError(
            f"the trainer's weights are not those of the model that the engines serve: "
            f"{'; '.join(found[:_MAX_LISTED])}{more}. Nothing was sent. Is model.path the folder that both "
            f"were started from?"
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
        # Layers beyond the last are for multi-token prediction, which engines load separately and do not use
        # here.
        if not (layer and int(layer[1]) >= num_layers) and not name.endswith("rotary_emb.inv_freq"):
            yield f"{name} is missing"
