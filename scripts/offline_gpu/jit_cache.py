"""Compiles SGLang's kernels for Qwen3-MoE ahead of their first use, for a GPU that is not here.

    python -m scripts.offline_gpu.jit_cache FOLDER    # FOLDER, on PYTHONPATH, has part B; CUDA_HOME has nvcc

SGLang uses a compiled kernel only where compilers, headers of the system and torch are those it was compiled
with. On another machine they differ. The copy of SGLang in FOLDER is changed to compare only the GPU, its own
sources and tvm-ffi's headers. It compiles kernels that are missing, or that it cannot load, as usual.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

ALL = "return _hash_parts([target, compilers, versions])"
LESS = "return _hash_parts([target])"
SAME_SOURCES = ("kernels", "tvm_ffi")
HEAD_SIZES = (64, 128)
KV_ROWS = (256, 512, 1024, 2048)  # bytes of a layer's keys of a token: 2 heads of 64, then 2, 4 and 8 of 128


def compare_less(folder: Path) -> None:
    """Change SGLang's copy in `folder`."""
    file = folder / "sglang/kernels/jit/utils/compile/cache.py"
    text = file.read_text()
    if text.count(ALL) + text.count(LESS) != 1:
        raise ValueError(f"{file} is not that of SGLang 0.5.23: it has no single {ALL!r}")
    file.write_text(text.replace(ALL, LESS))


def compile_kernels(major: int, minor: int) -> None:
    """Compile kernels as on a GPU of this compute capability."""
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (major, minor)
    torch.cuda.get_device_name = lambda *_: "one that is not here"

    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module
    from sglang.kernels.ops.layernorm.norm import _jit_qknorm_module
    from sglang.kernels.ops.moe.moe_align import _jit_moe_align_module
    from sglang.kernels.ops.moe.moe_topk_softmax import _jit_moe_topk_softmax_module

    half = torch.bfloat16
    activation_module(half)
    _jit_clamp_position_module(torch.int64)
    _jit_moe_align_module(torch.int32)
    for dtype in (half, torch.float32):
        _jit_moe_topk_softmax_module(dtype)
    for size in HEAD_SIZES:
        _jit_qknorm_module(size, half)
        _jit_fused_rope_module(True, size, half, half)
    for row in KV_ROWS:
        _jit_kvcache_module(row, row, 0)


def depend_on_sources_only(folder: Path) -> None:
    """Remove headers of CUDA and the system from what SGLang compares, and leftovers of the compilation."""
    import msgspec
    from sglang.kernels.jit.utils.compile import cache

    for leaf in list(folder.rglob("deps-*")):
        entries = [entry for entry in cache._read_deps(leaf) or [] if entry.root in SAME_SOURCES]
        for file in leaf.iterdir():
            if file.suffix != ".so":
                file.unlink()
        (leaf / cache._DEPS_FILE).write_bytes(msgspec.json.encode(entries))
        leaf.rename(leaf.with_name(f"deps-{cache._deps_key(entries)}"))


def main(folder: Path) -> None:
    """Write `folder/jit_cache`."""
    compare_less(folder)
    os.environ["SGLANG_JIT_CACHE_DIR"] = str(folder / "jit_cache")
    compile_kernels(9, 0)
    depend_on_sources_only(folder / "jit_cache")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
