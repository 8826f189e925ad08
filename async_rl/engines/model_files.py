"""Checks the weights of a Hugging Face folder by their headers: complete, whole, and of the model's size.

An engine and the trainer load the weights minutes after the start of a run. Headers take milliseconds to
read, whatever the size of the model.

**Source**: https://huggingface.co/docs/safetensors (8 bytes with the length of a JSON header, which has the
dtype, shape and data offsets of each tensor; the data follow).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from async_rl.engine_protocol import EngineFacts
from async_rl.engines.model_facts import ARCHITECTURES, read_config
from async_rl.errors import ConfigError
from async_rl.runtime.files import file_name
from async_rl.runtime.untrusted_json import UNREADABLE

_INDEX: Final = "model.safetensors.index.json"
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors library."""
_EMBEDDING: Final = "embed_tokens.weight"
_LFS_POINTER: Final = b"version https://git-lfs"


def check_weights(model_path: str | Path, facts: EngineFacts) -> None:
    """Check that a model's folder has all of its weights.

    Args:
        model_path: The Hugging Face folder.
        facts: The dimensions in its config.json.

    Raises:
        ConfigError: A file is missing, truncated or damaged, a weight is missing, or one has another shape
            than config.json says.
    """
    folder = Path(model_path)
    config = read_config(folder)
    size = (config.get("text_config") or config).get("hidden_size")
    shapes: dict[str, list[int]] = {}
    for path in _weight_files(folder):
        for name, tensor in _read_header(path).items():
            if name == "__metadata__":
                continue
            shapes[name] = shape = tensor["shape"]
            if not name.endswith(_EMBEDDING):
                continue
            for key, said, found, of in (
                ("vocab_size", facts.vocab_size, shape[0], "rows"),
                ("hidden_size", size or shape[-1], shape[-1], "columns"),
            ):
                if said != found:
                    raise ConfigError(
                        f"{folder}/config.json has {key} {said}, but {name} in {path.name} has {found} {of}: "
                        "one of the files belongs to another model"
                    )
    _check_layers(folder, list(shapes), facts.num_layers)
    quantised = config.get("quantization_config") or config.get("compression_config")
    if quantised or str(config.get("model_type")) not in ARCHITECTURES:
        return
    try:
        for name, expected in _weights_of(config, facts):
            if (found := shapes.get(name)) != expected:
                raise ConfigError(
                    f"{folder}/config.json asks for {name} with the shape {expected}, and the weights have "
                    f"{found or 'none'}: download the whole model, or the config.json that belongs to them"
                )
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{folder}/config.json lacks a dimension of the model ({error}): download it"
        ) from error


def _weights_of(config: dict[str, Any], facts: EngineFacts) -> Iterator[tuple[str, list[int]]]:
    """Yield names and shapes of the weights that show whether a model of a type in `ARCHITECTURES` is whole.

    Left out is what no tool leaves out alone: biases, and other projections of the same layer or expert.
    """
    kind, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)
    wide, narrow = heads * head, (config.get("num_key_value_heads") or heads) * head
    same = {"q_proj": [wide, hidden], "k_proj": [narrow, hidden], "o_proj": [hidden, wide]}
    if facts.latent_attention:
        same = {"o_proj": [hidden, heads * config["v_head_dim"]]}
    elif kind in ("qwen3", "qwen3_moe") or config.get("use_qk_norm"):
        same |= {"q_norm": [head], "k_norm": [head]}
    same = {f"self_attn.{name}": shape for name, shape in same.items()}
    same |= {"input_layernorm": [hidden], "post_attention_layernorm": [hidden]}
    dense = {"mlp.down_proj": [hidden, config["intermediate_size"]]}
    at, down = ("block_sparse_moe", "w2") if kind == "mixtral" else ("mlp", "down_proj")
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    sparse = {f"{at}.experts.{expert}.{down}": [hidden, width] for expert in range(facts.num_experts)}
    sparse[f"{at}.gate"] = [facts.num_experts, hidden]
    yield "model.embed_tokens.weight", [facts.vocab_size, hidden]
    for layer in range(facts.num_layers):
        for name, shape in (same | (sparse if layer in facts.moe_layers else dense)).items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", [hidden]
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", [facts.vocab_size, hidden]


def _check_layers(folder: Path, names: list[str], num_layers: int) -> None:
    """Check that there are weights of each layer; a decoder's layers have names beside its embedding."""
    for embedding in (name for name in names if name.endswith(_EMBEDDING)):
        pattern = re.compile(re.escape(embedding.removesuffix(_EMBEDDING)) + r"layers\.(\d+)\.")
        found = {int(match.group(1)) for match in map(pattern.match, names) if match}
        if found and (missing := sorted(set(range(num_layers)) - found)):
            raise ConfigError(
                f"{folder}/config.json has num_hidden_layers {num_layers}, but the weights lack the layers "
                f"{', '.join(map(str, missing[:3]))}{', …' if len(missing) > 3 else ''}: download the whole "
                "model, or the config.json that belongs to them"
            )


def weights_bytes(model_path: str | Path) -> int:
    """Return the size of a model's weights, bytes; 0 if the folder has none, as beside external engines."""
    return sum(path.stat().st_size for path in Path(model_path).glob("*.safetensors"))


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights; those of the index, if there is one."""
    index = folder / _INDEX
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if found:
            return found
        other = " (*.bin files are not read: save the model as safetensors)" * any(folder.glob("*.bin"))
        raise ConfigError(
            f"model.path is {folder}, which has a config.json and no weights: expected *.safetensors "
            f"files{other}; download the whole model"
        )
    try:
        files = msgspec.json.decode(index.read_bytes())["weight_map"].values()
        names = sorted({file_name(name, index) for name in files})
    except (*UNREADABLE, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is damaged ({error}): download it again") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"model.path is {folder}, which lacks {len(missing)} of the {len(names)} files of weights that "
            f"{_INDEX} names, such as {missing[0]}: download the whole model"
        )
    return [folder / name for name in names]


def _read_header(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file by name, once its length is right."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            header = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    except OSError as error:
        raise ConfigError(f"cannot read the weights in {path}: {error.strerror}") from error
    if _LFS_POINTER.startswith(start) and start:
        raise ConfigError(f"{path} is a pointer of Git LFS, not the weights: run `git lfs pull`")
    try:
        tensors: dict[str, Any] = msgspec.json.decode(header, type=dict[str, Any])
        end = max((t["data_offsets"][1] for name, t in tensors.items() if name != "__metadata__"), default=0)
    except (*UNREADABLE, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} ({size:,} bytes) is truncated or no safetensors file: download it again"
        ) from error
    expected = _LENGTH_BYTES + length + end
    if size != expected:
        raise ConfigError(
            f"{path} has {size:,} bytes, and its header describes {expected:,}: it is "
            f"{'truncated' if size < expected else 'damaged'}, download it again"
        )
    return tensors
