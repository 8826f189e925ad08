"""Runs an SGLang server that returns routing as narrow ids of the MoE layers only.

    python -m async_rl.engines.sglang.narrow_launcher LAYERS NUM_EXPERTS [arguments of sglang.launch_server]

SGLang itself returns int32 ids of all layers, and keeps them as such on the device, in a host buffer as long
as its KV cache, and in each message between its processes. This launcher narrows the ids on the device at the
end of a forward pass, and everything after that carries a quarter of the bytes or less:

```
top-k ─► device buffer ─┬─ narrow ─► host buffer ─► rows of a request ─► detokenizer ─► base64 ─► HTTP
        int32, all layers   uint8 or uint16, MoE layers
```

It also installs `aborted_rows.py`, `abortable_groups.py` and `memory_gate.py`, as `cpu_launcher.py` does.

Like `cpu_launcher.py` this file is a program of its own; `server.py` only uses its names. It patches classes
of exactly one version: if another version is installed, or the source of these classes differs, the program
ends with an error message.
"""

# mypy: disable-error-code="import-untyped, no-untyped-call"
# (SGLang has no type marker.)

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any, Final

from async_rl.engines.sglang import memory_gate
from async_rl.engines.sglang.aborted_rows import SUPPORTED, hash_source, omit_aborted_rows

_SOURCE: Final = "3c426572d6a5816b7857a0103f4ebd7b1214e00ba3d2deb8c61033c83db0fc18"
"""sha256 of the sources of the classes that are patched or relied upon for narrow ids."""


def install(layers: Sequence[int], num_experts: int) -> None:
    """Patch SGLang in this process.

    Args:
        layers: The layers with experts, ascending, counted from 0.
        num_experts: Experts E of one layer: up to 256 give uint8, more give uint16.

    Raises:
        SystemExit: With the reason, when the installed SGLang is not the one that the patch was written for.
    """
    check_version()
    import torch
    from sglang.srt.state_capturer import base, routed_experts

    capturer = routed_experts.RoutedExpertsCapturer
    check_source(base.BaseHostCache, base.TopkCaptureOutput, base.BaseTopkCapturer, capturer)
    # torch supports few operations on uint16; int16 has the same bits, and nothing here computes with them.
    dtype = torch.uint8 if num_experts <= 1 << 8 else torch.int16
    first, count = layers[0], len(layers)
    together = layers[-1] - first + 1 == count
    wide_slice = capturer._get_local_slice

    def narrow_slice(self: Any, *arguments: Any) -> Any:
        wide = wide_slice(self, *arguments)
        if together:
            return wide.narrow(1, first, count).to(dtype)
        if self.async_rl_layers is None:  # kept on the device: a list would be copied there in each pass
            self.async_rl_layers = torch.tensor(layers, device=wide.device)
        return wide.index_select(1, self.async_rl_layers).to(dtype)

    class HostCache(base.BaseHostCache):  # type: ignore[misc]
        """SGLang's host buffer, pinned as before, but smaller and viewed as narrow ids."""

        buffer: Any

        def __init__(self, num_tokens: int, num_layers: int, topk_size: int, name: str, device: str) -> None:
            if name != "routed_experts":  # the capturer of sparse attention keeps its own
                super().__init__(num_tokens, num_layers, topk_size, name=name, device=device)
                return
            if layers[-1] >= num_layers:
                raise ValueError(f"layer {layers[-1]} has experts, but the model has {num_layers} layers")
            size = num_tokens * count * topk_size
            super().__init__(-(-size * dtype.itemsize // 4), 1, 1, name=name, device=device)
            self.async_rl_words = self.buffer
            self.buffer = self.buffer.view(-1).view(dtype)[:size].view(num_tokens, count, topk_size)
            self.num_tokens, self.num_layers, self.topk_size = num_tokens, count, topk_size

        def destroy(self) -> None:
            self.buffer = getattr(self, "async_rl_words", self.buffer)  # the pinned memory must be unpinned
            super().destroy()

    capturer.async_rl_layers = None
    capturer._get_local_slice = narrow_slice
    base.BaseHostCache = HostCache


def check_version() -> None:
    """End the program when another SGLang is installed."""
    installed = importlib.metadata.version("sglang")
    if installed != SUPPORTED:
        sys.exit(wrong_version(installed))


def wrong_version(installed: str) -> str:
    """Return the error message for another version."""
    return (
        f"engine.narrow_routing patches sglang {SUPPORTED}, found {installed}: install "
        f"sglang=={SUPPORTED}, or set engine.narrow_routing=false"
    )


def check_source(*classes: Any, expected: str = _SOURCE) -> None:
    """End the program when the source of the classes differs from the supported version's."""
    found = hash_source(*classes)
    if found != expected:
        names = ", ".join(f"{c.__module__}.{c.__qualname__}" for c in classes)
        sys.exit(
            f"engine.narrow_routing patches {names} as they are in sglang {SUPPORTED}, but what is installed "
            f"under that version differs (sha256 {found}, expected {expected}): reinstall sglang, or set "
            f"engine.narrow_routing=false"
        )


def _install_from_arguments() -> list[str]:
    """Patch SGLang as the command line says; return SGLang's own arguments."""
    layers, num_experts, *rest = sys.argv[1:]
    if "--device=cpu" in rest:
        from async_rl.engines.sglang import cpu_launcher  # noqa: F401  (the shims come first)
    else:
        from async_rl.engines.sglang.abortable_groups import make_groups_abortable  # it needs torch

        omit_aborted_rows()
        make_groups_abortable()
    install([int(layer) for layer in layers.split(",")], int(num_experts))
    return rest


def main() -> None:
    """Run the server until it is ended."""
    arguments = _install_from_arguments()
    if "--device=cpu" in arguments:
        from async_rl.engines.sglang import cpu_launcher

        cpu_launcher.main(arguments)
        return
    memory_gate.main(arguments)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # SGLang spawns its scheduler and detokenizer, and each imports the main module again, under this name.
    _install_from_arguments()
