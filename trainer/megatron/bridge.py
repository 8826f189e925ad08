"""Loads Hugging Face weights into Megatron-Core and exports them again, through mbridge.

mbridge 0.15.1 expects the parameter names of the layer spec with TransformerEngine. A model built from the
local spec is presented through a view with those names; splitting and gathering tensors remains mbridge's
task. Configs come from the model's own config.json.
"""

from __future__ import annotations

import collections
import json
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mbridge.core.util import unwrap_model
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import save_file

from async_rl.errors import ConfigError
from async_rl.runtime.files import replaced_folder
from trainer.collectives import raise_on_all_ranks
from trainer.megatron.architectures import bridge_for, load_hf_config
from trainer.megatron.lora import adapted_weights, is_of_adapter
from trainer.megatron.names import portable_names

SHARD_BYTES = 4 << 30
"""Default size limit of the safetensors files that `save_hf` writes; a larger tensor gets its own file."""

_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


_REPLICATED = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
"""Projections of latent attention that tensor ranks do not split. TransformerEngine marks the weight of every
`Linear` as a part, so that a gradient norm would count these once for each rank."""


class _TransformerEngineNames:
    """Presents a model under the parameter names of the TransformerEngine spec, as far as mbridge uses it.

    Weights with adapters are presented with the adapters merged into them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.decoder = model.decoder
        state = {
            name: value
            for name, value in model.state_dict().items()
            if "_extra_state" not in name and not is_of_adapter(name)
        }
        self._names = {
            # Experts are one grouped layer.
            name: re.sub(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r".\2.weight\1", portable)
            for name, portable in portable_names(state).items()
        }
        self._state = {self._names[name]: value for name, value in state.items()}
        self._parameters = [(self._names[n], p) for n, p in model.named_parameters() if not is_of_adapter(n)]
        self._adapted = {id(each.weight): each for each in adapted_weights([model])}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._state

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters:
            adapted = self._adapted.get(id(parameter))
            yield name, parameter if adapted is None else adapted.merged()  # one at a time


class HFBridge:
    """Converts one model between Hugging Face and Megatron. Every method must be called on all ranks.

    `mbridge` is mbridge's own bridge of the model.
    """

    def __init__(self, path: str, dtype: torch.dtype, **transformer_config: Any) -> None:
        """Read config.json and build the Megatron config for the current parallel state.

        Args:
            path: Folder of the Hugging Face model.
            dtype: Type of the parameters.
            transformer_config: Fields of Megatron's `TransformerConfig` to set.

        Raises:
            ConfigError: When the folder holds no model, or one that the trainer does not support.
        """
        self.path = Path(path)
        self.shard_bytes = SHARD_BYTES
        if not (self.path / "config.json").is_file():
            raise ConfigError(
                f"model.path is {path}, but there is no config.json: name a Hugging Face model folder"
            )
        self.hf_config = load_hf_config(self.path)
        try:
            self.mbridge = bridge_for(self.hf_config, path, dtype, transformer_config)
        except ValueError as e:  # Megatron's own checks of divisibility
            if isinstance(e, ConfigError):
                raise
            raise ConfigError(f"model.path is {path}, which cannot be laid out by trainer.layout: {e}") from e

    @property
    def config(self) -> Any:
        """Megatron's `TransformerConfig`."""
        return self.mbridge.config

    def build_chunks(self) -> list[torch.nn.Module]:
        """Build this rank's chunks of the model, whose weights `load_hf` overwrites.

        Embedding and output layer may have more rows than the model has tokens (`vocab_size` of a chunk), to
        divide among the tensor ranks. The rows are 0 and stay 0.
        """
        provide = self.mbridge._model_provider([])
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns about arguments that its own specs omit
            modules = [
                provide(
                    pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                    post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                    vp_stage=stage,
                )
                for stage in ([None] if chunks is None else range(chunks))
            ]
        for module in modules:
            module.vocab_size = self.hf_config.vocab_size  # without padding
            for name, parameter in module.named_parameters():
                if name.endswith(_REPLICATED):
                    parameter.tensor_model_parallel = False
        return modules

    @torch.no_grad()
    def load_hf(self, models: list[torch.nn.Module]) -> None:
        """Load the folder's weights."""
        self.mbridge.load_weights(_views(models), str(self.path))

    @torch.no_grad()
    def export_hf(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor under its Hugging Face name, gathered from all model-parallel ranks.

        Adapters are merged into the weights. All ranks must exhaust the iterator, because gathering is
        collective. A tensor may be a view of a parameter. Of tied embeddings it yields the one of the first
        stage.
        """
        names = set[str]()
        for name, tensor in self.mbridge.export_weights(_views(models)):
            if name not in names:
                names.add(name)
                yield name, tensor
            del tensor  # frees it before the next one is gathered

    def save_hf(self, models: list[torch.nn.Module], directory: str | Path) -> None:
        """Write a complete Hugging Face folder: weights, config, tokenizer, generation config.

        A rename publishes the folder when it is complete. Rank 0 writes, and all ranks wait for it.

        Raises:
            TrainerError: On all ranks, when the folder cannot be written.
        """
        final = Path(directory)
        tensors = self.export_hf(models)
        with raise_on_all_ranks(doing=f"cannot write {final}"):
            try:
                if dist.get_rank() == 0:
                    self.write_hf(tensors, final)
            finally:
                collections.deque(tensors, maxlen=0)  # gathering is collective: all ranks iterate to the end

    def write_hf(self, tensors: Iterable[tuple[str, torch.Tensor]], directory: str | Path) -> None:
        """Write tensors with Hugging Face names into a folder as `save_hf` does, on one rank."""
        with replaced_folder(Path(directory)) as scratch:
            shards = _ShardWriter(scratch, self.shard_bytes)
            for name, tensor in tensors:
                shards.add_tensor(name, tensor)
            for name, tensor in self._prediction_weights():
                shards.add_tensor(name, tensor)
            shards.write_index()
            self._copy_companions(scratch)

    def hf_modules(self, name: str) -> list[str]:
        """Return the names of the modules in which Hugging Face has a projection.

        Args:
            name: The projection's portable name, as `decoder.layers.3.mlp.experts.experts.7.linear_fc1`.
        """
        expert = re.sub(r"\.experts\.(\d+)\.(linear_fc[12])$", r".\2.weight\1", name)
        weight = expert if expert != name else f"{name}.weight"
        names = self.mbridge._weight_name_mapping_mcore_to_hf(weight)
        return [each.removesuffix(".weight") for each in names]

    def _prediction_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the layers of multi-token prediction, which are not trained, from the model's folder.

        They are numbered after the decoder's layers. config.json declares them, and a server that uses them
        for speculative decoding expects them.
        """
        for file in sorted(self.path.glob("*.safetensors")):
            with safe_open(file, "pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a dict
                    layer = re.match(r"model\.layers\.(\d+)\.", name)
                    if layer and int(layer.group(1)) >= self.hf_config.num_hidden_layers:
                        yield name, shard.get_tensor(name)

    def _copy_companions(self, directory: Path) -> None:
        """Copy all files of the source folder but weights, and set the config's dtype."""
        for file in self.path.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHT_FILES):
                shutil.copyfile(file, directory / file.name)
        config = json.loads((self.path / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(self.mbridge.dtype).removeprefix("torch.")
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _views(models: list[torch.nn.Module]) -> list[_TransformerEngineNames]:
    return [_TransformerEngineNames(unwrap_model(model)) for model in models]


class _ShardWriter:
    """Writes tensors into safetensors files up to a size limit, with an index if there are several files."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory, self._max_bytes = directory, max_bytes
        self._shards: list[list[str]] = []
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def _flush(self) -> None:
        save_file(self._pending, self.directory / f"{len(self._shards)}.part", metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def write_index(self) -> None:
        self._flush()
        if len(self._shards) == 1:
            (self.directory / "0.part").rename(self.directory / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            file = f"model-{i + 1:05d}-of-{len(self._shards):05d}.safetensors"
            (self.directory / f"{i}.part").rename(self.directory / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self.directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
