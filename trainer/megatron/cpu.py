"""Runs an unmodified Megatron-Core without CUDA and without TransformerEngine.

Every entry replaces code of megatron-core 0.16.1 that assumes CUDA or TransformerEngine, with the reason
beside it. `install` replaces nothing where both are present: it then only imports Megatron-Core without the
warnings of its imports. Otherwise it rejects any other version of Megatron-Core: entries replace internals by
name, and a newer version may need more of them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from async_rl.errors import EnvironmentNotReady
from trainer.validate import megatron_version

VERSION = "0.16.1"
CPU = torch.device("cpu")

_MODULES_THAT_SAY_CUDA = (
    "optimizer.clip_grads",
    "optimizer.optimizer",
    "optimizer.grad_scaler",
    "transformer.moe.moe_utils",
    "transformer.utils",
    "utils",
    "tensor_parallel.data",
    "pipeline_parallel.schedules",
    "distributed.param_and_grad_buffer",
    "rerun_state_machine",
    "models.common.embeddings.rope_utils",
)
"""Modules of megatron.core that contain a literal `device="cuda"` in code that this trainer runs."""


_MODULES_THAT_WARN = (
    "megatron.core",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.multi_latent_attention",
    "mbridge",
)
"""Modules that this package imports and that warn at import: missing kernels, deprecated functions."""


def has_transformer_engine() -> bool:
    """Whether the fused layers can be used, which need TransformerEngine and a GPU.

    Raises:
        EnvironmentNotReady: It is installed and cannot be imported. Megatron-Core would fail later, or take
            classes that do nothing in its place.
    """
    if not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None:
        return False
    _load_transformer_engine()
    return True


def _load_transformer_engine() -> None:
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        raise EnvironmentNotReady(
            f"TransformerEngine is installed, but cannot be imported ({type(error).__name__}: {error}), as "
            "when it was built for another torch: run `make setup-gpu`, or uninstall it"
        ) from error


def fuses_layers(dtype: torch.dtype) -> bool:
    """Whether a model of this dtype is built from the fused layers of TransformerEngine.

    Their attention over packed sequences has kernels for half precision only, so a float32 model uses
    Megatron's own layers, on a GPU too.
    """
    return dtype != torch.float32 and has_transformer_engine()


def install() -> None:
    """Prepares Megatron-Core for this machine. Further calls do nothing.

    Raises:
        EnvironmentNotReady: When entries are needed and Megatron-Core is missing or has another version.
    """
    if getattr(torch, "_megatron_prepared", False):
        return
    fused = has_transformer_engine()
    if not fused:
        _check_version()
    torch._megatron_prepared = True
    if not torch.cuda.is_available():
        _replace_cuda_calls()
        # Installed, it may fail to load without a driver, and Megatron would take its optimizer and products,
        # which need a GPU. One that is already imported is left: tests emulate its layers.
        sys.modules.setdefault("transformer_engine", None)
    with _quiet_import(compiling=fused):
        if not fused:
            _fill_in_for_transformer_engine()
        if not torch.cuda.is_available():
            _replace_cuda_in_megatron()


def _check_version() -> None:
    if (version := megatron_version()) != VERSION:
        raise EnvironmentNotReady(
            f"megatron-core is {version}, but without CUDA and TransformerEngine only {VERSION} is known to "
            f"work: pip install --no-deps megatron-core=={VERSION}"
        )


@contextlib.contextmanager
def _quiet_import(*, compiling: bool) -> Iterator[None]:
    """Import Megatron-Core without its warnings and, unless `compiling`, with `torch.compile` as a no-op.

    Megatron binds `torch.compile` to its small fusions at import. On a CPU they need a C++ compiler and a
    second of compilation for every new length, and nearly every packed micro-batch has a new length.
    """
    real = torch.compile
    if not compiling:
        torch.compile = lambda model=None, **_: model if model is not None else lambda function: function
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in _MODULES_THAT_WARN:
                importlib.import_module(name)
            yield
    finally:
        torch.compile = real


def _core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


class _Stream:
    """Replaces CUDA streams and events: on a CPU all work is already complete."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or self

    def elapsed_time(self, _: _Stream) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    record = wait = wait_stream = wait_event = synchronize = _nothing


_STREAM = _Stream()


class _TorchOnCpu(types.ModuleType):
    """Replaces `torch` in some modules of Megatron; its factories treat `device="cuda"` as the CPU.

    It is a proxy per module and not a patch of torch: patched factories break `with torch.device("meta")`,
    and Hugging Face models then silently load wrong weights.
    """

    def __init__(self) -> None:
        super().__init__("torch")
        for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
            setattr(self, name, self._on_cpu(getattr(torch, name)))

    @staticmethod
    def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def create(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)  # pinned memory needs a device
            return factory(*args, **kwargs)

        return create

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _replace_cuda_calls() -> None:
    """Replace functions of torch itself."""
    cuda = torch.cuda
    # Buffers, masks, point-to-point and gather outputs are allocated on `torch.cuda.current_device()`.
    cuda.current_device = lambda: CPU
    # The all-to-all dispatcher, DDP's overlap and pipeline communication use streams and events.
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _STREAM
    cuda.stream = lambda _=None: contextlib.nullcontext()
    # Pipeline communication waits for the device.
    cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    # Seeding of model parallelism, and recomputation, save and set the state of the "CUDA" generator.
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    # Not `torch.manual_seed` itself: torch.compile refuses one function under two names.
    cuda.manual_seed = cuda.random.manual_seed = lambda seed: torch.manual_seed(seed)
    # Context parallelism and mbridge move tensors and modules with `.cuda()`.
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self

    # The optimizer sorts gradients by names such as "torch.cuda.FloatTensor".
    real_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(result, str) and caller.startswith("megatron.core.optimizer"):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = type_name


def _replace_cuda_in_megatron() -> None:
    """Replace functions of Megatron-Core on a machine without CUDA."""
    proxy = _TorchOnCpu()
    for name in _MODULES_THAT_SAY_CUDA:
        _core(name).torch = proxy
    # Megatron's setter addresses the CUDA generator by device index, and warns that the CPU state changed.
    random = _core("tensor_parallel.random")
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    logging.getLogger(random.__name__).addFilter(lambda r: "CPU RNG state changed" not in r.getMessage())
    _gather_unequal_parts()
    # Megatron converts split sizes to numbers only on a GPU; Gloo's all-to-all does not accept tensors.
    _core("transformer.moe.token_dispatcher").maybe_move_tensor_to_cpu = lambda t, as_numpy=False, **_: (
        t.numpy() if as_numpy and torch.is_tensor(t) else t
    )


def _gather_unequal_parts() -> None:
    """Supports gathering parts of unequal length, which experts with tensor parallelism need.

    Gloo gathers and scatters equal parts only, so parts are padded to the longest, or summed as a whole.
    """
    mappings = _core("tensor_parallel.mappings")
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_along_first_dim(part: torch.Tensor, group: Any, sizes: Any = None, *rest: Any) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return gather(part, group, sizes, *rest)
        rows = [int(size) for size in sizes]
        padded = part.new_zeros(max(rows), *part.shape[1:])
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in rows]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, rows, strict=True)])

    def reduce_scatter_along_first_dim(
        whole: torch.Tensor, group: Any, sizes: Any = None, *rest: Any
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return reduce_scatter(whole, group, sizes, *rest)
        summed = whole.clone()
        torch.distributed.all_reduce(summed, group=group)
        return summed.split([int(size) for size in sizes])[group.rank()].clone()

    mappings._gather_along_first_dim = gather_along_first_dim
    mappings._reduce_scatter_along_first_dim = reduce_scatter_along_first_dim


def _fill_in_for_transformer_engine() -> None:
    """Replace what TransformerEngine's layers would provide."""
    # The router tests this name, which a failed import leaves unbound.
    moe_utils = _core("transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    # Norms that are computed again ask it whether products are of eight bits (`CheckpointWithoutOutput`).
    random = _core("tensor_parallel.random")
    if not random.HAVE_TE:
        random.activation_recompute_forward = random.fp8_autocast = lambda **_: contextlib.nullcontext()
        random.FP8GlobalStateManager = types.SimpleNamespace(
            is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None
        )

    # Megatron rejects torch's norms under sequence parallelism. They only lack the attribute by which their
    # gradients are reduced over the tensor-parallel group.
    def norm(_: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> torch.nn.Module:
        kind = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}[config.normalization]
        module = kind(hidden_size, eps=eps)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module

    _core("transformer.torch_norm").WrappedTorchNorm.__new__ = norm

    # Latent attention assumes TransformerEngine when its wrappers can be imported, which is possible without
    # it, and then tests whether a layer is one of them.
    _core("transformer.multi_latent_attention").HAVE_TE = False
