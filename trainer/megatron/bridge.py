"""Loads Hugging Face weights into Megatron-Core and exports them again, through mbridge.

mbridge 0.15.1 expects the parameter names of the layer spec with TransformerEngine. A model built from the
local spec is presented through a view with those names; splitting and gathering tensors remains mbridge's
task. Configs come from the model's own config.json.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from mbridge.core.util import unwrap_model
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import save_file

from async_rl.errors import ConfigError
from async_rl.runtime.files import replaced_folder, sync
from async_rl.weights.buckets import spec_of
from trainer.collectives import all_gather_bytes, raise_on_all_ranks
from trainer.megatron.architectures import bridge_for, load_hf_config
from trainer.megatron.lora import adapted_weights, is_of_adapter
from trainer.megatron.names import portable_names
from trainer.megatron.weight_owners import WeightOwners, exchange_owners

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

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters, then the biases of routers, which Megatron has as buffers."""
        yield from self.named_parameters()
        names = {name for name, _ in self._parameters}
        for name, tensor in self._state.items():
            if "expert_bias" in name and name not in names:
                yield name, tensor


class HFBridge:
    """Converts one model between Hugging Face and Megatron. Every method must be called on all ranks.

    `mbridge` is mbridge's own bridge of the model.
    """

    def __init__(
        self, path: str, dtype: torch.dtype, *, num_senders: int | None = 1, **transformer_config: Any
    ) -> None:
        """Read config.json and build the Megatron config for the current parallel state.

        Args:
            path: Folder of the Hugging Face model.
            dtype: Type of the parameters.
            num_senders: How many ranks send weights to engines; None for one on each host.
            transformer_config: Fields of Megatron's `TransformerConfig` to set.

        Raises:
            ConfigError: When the folder holds no model, or one that the trainer does not support.
        """
        self.path = Path(path)
        self.shard_bytes = SHARD_BYTES
        self._num_senders = num_senders
        self._owners: WeightOwners | None = None
        self._sender_group: dist.ProcessGroup | None = None
        """The ranks that have the same sender as this one; None stands for all, as in torch."""
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

    def owners(self, models: list[torch.nn.Module]) -> WeightOwners:
        """Return all tensors of the export and the rank that owns each. The first call is collective."""
        if self._owners is None:
            held = [spec_of(name, tensor) for name, tensor in self._export_held(models)]
            stage = parallel_state.get_pipeline_model_parallel_rank()
            self._owners = exchange_owners(held, stage, self._num_senders)
            sender_of = self._owners.sender_of
            for sender in sorted(set(sender_of)) if len(set(sender_of)) > 1 else ():
                group = dist.new_group([rank for rank, its in enumerate(sender_of) if its == sender])
                if sender_of[dist.get_rank()] == sender:
                    self._sender_group = group
        return self._owners

    @torch.no_grad()
    def export_owned(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that this rank owns under their Hugging Face names.

        Adapters are merged into them. All ranks must exhaust the iterator, because tensor ranks gather.
        A tensor may be a view of a parameter.
        """
        owners, rank, seen = self.owners(models), dist.get_rank(), set[str]()
        for name, tensor in self._export_held(models):
            # Embeddings may be tied to an output layer of the same rank.
            if owners.rank_of[name] == rank and name not in seen:
                seen.add(name)
                yield name, tensor
            del tensor  # frees it before the next one is gathered

    def export_hf(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor under its Hugging Face name, on all ranks, from its owner.

        As `export_owned` otherwise. Of tied embeddings it yields the one of the first stage.
        """
        return self._export_from(models, range(dist.get_world_size()), None)

    def export_sent(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank's sender sends to engines, on all ranks that have this sender.

        As `export_hf` otherwise. Nothing passes between ranks of different senders but what tensor ranks
        gather.
        """
        sender_of = self.owners(models).sender_of
        mine = sender_of[dist.get_rank()]
        ranks = [rank for rank, sender in enumerate(sender_of) if sender == mine]
        return self._export_from(models, ranks, self._sender_group)

    @torch.no_grad()
    def _export_from(
        self, models: list[torch.nn.Module], ranks: Sequence[int], group: dist.ProcessGroup | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what some ranks own on each of them, who are the group. All ranks exhaust the iterator."""
        owners, rank = self.owners(models), dist.get_rank()
        stage, device = parallel_state.get_pipeline_model_parallel_rank(), next(models[0].parameters()).device
        held, step, mine = self._export_held(models), -1, torch.empty(0)
        for spec in owners.specs:
            of_stage, of_step = owners.place_of[spec.name]
            while stage == of_stage and step < of_step:
                del mine
                (_, mine), step = next(held), step + 1
            owner = owners.rank_of[spec.name]
            if owner not in ranks:
                continue
            if owner == rank:
                tensor = mine
                assert spec_of(spec.name, tensor) == spec, "parameters keep their types and shapes"
            else:
                tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            if len(ranks) > 1:
                tensor = tensor.contiguous()
                dist.broadcast(tensor, src=owner, group=group)
            yield spec.name, tensor
            del tensor
        collections.deque(held, maxlen=0)

    def _export_held(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank has under Hugging Face names, gathered from its tensor ranks: the layers of
        its stage, and of their experts its own.
        """
        bridge, mpu = self.mbridge, self.mbridge.mpu
        for view in _views(models):
            global_names = bridge._weight_name_mapping_mcore_local_to_global(view)
            for local_name, parameter in view.named_tensors():
                name = global_names[local_name]
                group, size = mpu.tp_group, mpu.tp_size
                if ".mlp.experts.linear_fc" in name:
                    group, size = mpu.etp_group, mpu.etp_size
                elif not getattr(parameter, "tensor_model_parallel", False):
                    size = 1
                whole = parameter.detach()
                if size > 1:
                    parts = [torch.empty_like(whole) for _ in range(size)]
                    dist.all_gather(parts, whole.contiguous(), group=group)
                    whole = bridge._weight_merge_across_tp(name, parts, parameter)
                    del parts
                yield from zip(*bridge._weight_to_hf_format(name, whole), strict=True)
                del whole, parameter  # frees them before the next ones are gathered

    def save_hf(self, models: list[torch.nn.Module], directory: str | Path) -> None:
        """Write a complete Hugging Face folder: weights, config, tokenizer, generation config.

        Each owner writes its own tensors into files of its own. Once all are on the disk, rank 0 writes one
        index over them, and a rename publishes the folder.

        Raises:
            TrainerError: On all ranks, when the folder cannot be written.
        """
        final, rank = Path(directory), dist.get_rank()
        doing = f"cannot write {final}"
        with ExitStack() as folder:
            scratch = Path()
            with raise_on_all_ranks(doing=doing):
                if rank == 0:
                    scratch = folder.enter_context(replaced_folder(final))
            (name,) = filter(None, all_gather_bytes(os.fsencode(scratch) if rank == 0 else b""))
            shards = _ShardWriter(Path(os.fsdecode(name)), self.shard_bytes, f"{rank}-")
            tensors = self.export_owned(models)
            with raise_on_all_ranks(doing=doing):
                try:
                    for tensor in tensors:
                        shards.add_tensor(*tensor)
                    for tensor in self._prediction_weights() if rank == 0 else ():
                        shards.add_tensor(*tensor)
                    shards.flush()
                finally:
                    collections.deque(tensors, maxlen=0)  # gathering is collective: all iterate to the end
            files = [
                file
                for written in all_gather_bytes(msgspec.msgpack.encode(shards.files))
                for file in msgspec.msgpack.decode(written, type=list[_ShardFile])
            ]
            with raise_on_all_ranks(doing=doing), folder:
                if rank == 0:
                    self._complete_folder(scratch, files)

    def write_hf(self, tensors: Iterable[tuple[str, torch.Tensor]], directory: str | Path) -> None:
        """Write tensors with Hugging Face names into a folder as `save_hf` does, on one rank."""
        with replaced_folder(Path(directory)) as scratch:
            shards = _ShardWriter(scratch, self.shard_bytes, "")
            for name, tensor in itertools.chain(tensors, self._prediction_weights()):
                shards.add_tensor(name, tensor)
            shards.flush()
            self._complete_folder(scratch, shards.files)

    def _complete_folder(self, folder: Path, files: Sequence[_ShardFile]) -> None:
        """Add to the files of all owners what they lack, on one rank."""
        _index_shards(folder, files)
        self._copy_companions(folder)

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


class _ShardFile(msgspec.Struct, frozen=True):
    """A file of tensors that was written."""

    file: str
    num_bytes: int
    """Of the file, to find one that does not reach the disk that others see."""
    weight_bytes: int
    """Of the tensors in it."""
    tensors: list[str]


class _ShardWriter:
    """Writes the tensors of one rank into safetensors files up to a size limit."""

    def __init__(self, directory: Path, max_bytes: int, prefix: str) -> None:
        self.directory, self._max_bytes, self._prefix = directory, max_bytes, prefix
        self.files: list[_ShardFile] = []
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self.flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += tensor.nbytes

    def flush(self) -> None:
        if not self._pending:
            return
        path = self.directory / f"{self._prefix}{len(self.files)}.part"
        save_file(self._pending, path, metadata={"format": "pt"})
        sync(path)
        names = list(self._pending)
        self.files.append(_ShardFile(path.name, path.stat().st_size, self._pending_bytes, names))
        self._pending, self._pending_bytes = {}, 0


def _index_shards(folder: Path, files: Sequence[_ShardFile]) -> None:
    """Name files of tensors as Hugging Face does, with an index over them if there are several.

    Raises:
        OSError: A file is not here as it was written.
    """
    for file in files:
        size = (folder / file.file).stat().st_size
        if size != file.num_bytes:
            raise OSError(f"{file.file} has {size} bytes here, and {file.num_bytes} where it was written")
    if len(files) == 1:
        (folder / files[0].file).rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, file in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / file.file).rename(folder / name)
        weight_map |= dict.fromkeys(file.tensors, name)
    index = {"metadata": {"total_size": sum(file.weight_bytes for file in files)}, "weight_map": weight_map}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n")
    sync(path)
