"""Runs an SGLang server on a CPU that SGLang has no kernels for, by shims that each give their reason.

This file is a program of its own, started by `async_rl.engines.sglang.server`, or run by `narrow_launcher.py`
in the same process. Of `async_rl` it imports what patches SGLang in its processes, and no other module
imports it: SGLang is loaded in the server's processes only. The shims apply to SGLang's scheduler and
detokenizer because those are forked from this process, see `main`.

The shims patch internals of exactly one version; on any other the program ends with an error message.

Needs in the environment: `SGLANG_USE_CPU_ENGINE=1` (else SGLang looks for a GPU) and `OMP_NUM_THREADS=1`
(OpenMP threads that spin against the server's other processes cost a factor of ten).
"""

# mypy: disable-error-code="import-untyped, no-untyped-call"
# (SGLang has no type marker, and torch.library no annotations.)

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import logging
import multiprocessing
import os
import socket
import sys
import types
from collections.abc import Iterator
from typing import Any, NoReturn

SUPPORTED = "0.5.23"

_installed = importlib.metadata.version("sglang")
if _installed != SUPPORTED:
    sys.exit(
        f"The CPU shims fit sglang {SUPPORTED}, found {_installed}: install sglang=={SUPPORTED}, or run "
        f"the engines on a GPU (engine.device=cuda)"
    )

# SGLang compiles its grouped top-k (DeepSeek's) where it is first called: 40 s on a CPU, in the middle of a
# request, for a few operations on small tensors.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch  # noqa: E402
from transformers.utils.import_utils import is_torchvision_available  # noqa: E402


class _StandIn(types.ModuleType):
    """Stands in for a package that is not there: importable, and loud when a function of it is called."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__: list[str] = []
        self._reason = reason
        sys.modules[name] = self
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(f"{self.__name__}.{name} {self._reason}")

        return missing


_StandIn("sgl_kernel", "has no CPU build; this model needs a GPU engine")

# SGLang imports torchvision for the image transforms of some models, whichever model it serves. `make setup`
# leaves it out: beside a CPU build of torch, PyPI's torchvision, a CUDA build, cannot be imported, and
# transformers then cannot load any model. transformers must find out first that it is not there.
if not is_torchvision_available():
    for _name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        _StandIn(_name, "is not installed; this model needs torchvision")

from sglang.kernels.ops.elementwise import elementwise  # noqa: E402
from sglang.srt.lora import deepseek_mla_correction as absorbed_adapter  # noqa: E402
from sglang.srt.lora import layers as lora_layers  # noqa: E402
from sglang.srt.lora.backend import torch_backend as lora_backend  # noqa: E402
from sglang.srt.mem_cache.pool_host import common as host_pool  # noqa: E402
from sglang.srt.models.deepseek_common import attention_backend_handler as mla  # noqa: E402

from async_rl.engines.sglang import hidden_keys, memory_gate  # noqa: E402
from async_rl.engines.sglang.abortable_groups import make_groups_abortable  # noqa: E402
from async_rl.engines.sglang.aborted_rows import omit_aborted_rows  # noqa: E402

# --enable-return-routed-experts keeps its rows in a CUDA-pinned host buffer on any device. Without CUDA,
# plain memory is sufficient.
host_pool.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, device, pin_memory, allocator, **_: torch.empty(
    dims, dtype=dtype
)


def _gate_by_torch(
    hidden: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, out: torch.Tensor, *, do_add: bool
) -> None:
    """Qwen2-MoE's gated shared expert: SGLang has a Triton kernel for it and no CPU branch."""
    gated = torch.sigmoid(hidden.float() @ weight.float()).unsqueeze(-1).to(shared.dtype) * shared
    if do_add:
        out.add_(gated)
    else:
        out.copy_(gated)


elementwise._launch_fused_gate_sigmoid_mul = _gate_by_torch

# DeepSeek's latent attention: the torch backend has no path that expands the latent cache, so always take
# the absorbed one.
mla.AttentionBackendRegistry.register("torch_native", lambda *_: mla.AttnForwardMethod.MLA)


class _TorchWithoutPinning(types.ModuleType):
    """Stands in for `torch` in SGLang's LoRA modules, which create pinned tensors even without CUDA."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *values: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.tensor(*values, **options)

    def zeros(self, *sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.zeros(*sizes, **options)


# Adapters: the torch backend of SGLang's LoRA pins what it copies to a device, and torch refuses to pin where
# there is none. The first two lines replace what pins new tensors, the third what pins existing ones.
lora_layers.torch = _TorchWithoutPinning("torch")
lora_backend.torch = _TorchWithoutPinning("torch")
torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def _adapted_parts(attention: Any) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield for each adapter of a batch: its tokens, A `[rank, latent]`, and scaled B `[heads, out, rank]` of
    `kv_b_proj`.
    """
    projection, start = attention.kv_b_proj, 0
    batch = projection.lora_backend.batch_info
    for slot, length in zip(batch.weight_indices_cpu.tolist(), batch.seg_lens_cpu.tolist(), strict=True):
        tokens = slice(start, start + length)
        start += length
        if rank := int(batch.lora_ranks_cpu[slot]):
            b = projection.B_buffer[slot, :, :rank] * batch.scalings_cpu[slot]
            yield tokens, projection.A_buffer[slot, :rank], b.view(attention.num_local_heads, -1, rank)


def _add_to_queries(attention: Any, queries: torch.Tensor, absorbed: torch.Tensor) -> torch.Tensor:
    """Add `queries B_k A`, `[tokens, heads, latent]`; `queries` are those that are not rotated."""
    for tokens, a, b in _adapted_parts(attention):
        b_k = b[:, : attention.qk_nope_head_dim]
        absorbed[tokens] += torch.einsum("thd,hdr,rl->thl", queries[tokens], b_k, a)
    return absorbed


def _add_to_values(attention: Any, attended: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Add `attended A^T B_v^T`, `[tokens, heads * value]`; `attended` is `[tokens, heads, latent]`."""
    for tokens, a, b in _adapted_parts(attention):
        b_v = b[:, attention.qk_nope_head_dim :]
        output[tokens] += torch.einsum("thl,rl,hvr->thv", attended[tokens], a, b_v).flatten(1)
    return output


# Adapters of latent attention: SGLang has Triton kernels for `kv_b_proj`, which is absorbed into the products
# before and after attention, and no CPU branch.
absorbed_adapter.apply_q_correction = _add_to_queries
absorbed_adapter.apply_v_correction = _add_to_values


# `torch.distributed.rendezvous` is a function of that name.
_meeting: Any = importlib.import_module("torch.distributed.rendezvous")
_create_store = _meeting._create_c10d_store


def _store_on_its_host(
    hostname: str, port: int, rank: int, world_size: int, timeout: Any, use_libuv: bool = True
) -> Any:
    """Let the store of the server's own ranks listen on its host only, not on all interfaces."""
    if rank != 0:
        return _create_store(hostname, port, rank, world_size, timeout, use_libuv)
    with socket.create_server((hostname, port)) as listener:
        return _meeting.TCPStore(
            hostname,
            port,
            world_size,
            is_master=True,
            timeout=timeout,
            use_libuv=use_libuv,
            master_listen_fd=listener.detach(),
        )


_meeting._create_c10d_store = _store_on_its_host


# Aborted requests that say so end without routing, so that an update does not move it for nothing.
omit_aborted_rows()
make_groups_abortable()


def main(arguments: list[str]) -> None:
    """Run the server with these arguments until it is ended."""
    # SGLang asks for "spawn", because a CUDA context does not survive a fork. Here there is no CUDA context,
    # and no other thread when the children start: a fork shares the imports, which are most of the start-up
    # time (20 s with "spawn" on two cores, 10 s with "fork") and a quarter of the memory.
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None

    # It warns of each of the twenty models that need a GPU's kernels.
    logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)

    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    if "--skip-server-warmup" in arguments:
        # Without a warm-up it asks before the server listens: it has no effect but a traceback in the log.
        http_server._freeze_gc_after_server_warmup = lambda _: None
    try:
        given = prepare_server_args(arguments)
        hidden_keys.install(given)
        memory_gate.install(given)
        run_server(given)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
