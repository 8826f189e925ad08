"""`async-rl check --here`: what a run on this machine's GPUs needs besides Python packages.

```
driver ─► CUDA toolkit (SGLang compiles kernels) ─► TransformerEngine (the trainer's layers) ─► compile caches
```
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from async_rl.errors import EnvironmentNotReady
from async_rl.runtime.devices import detect_device, finds_transformer_engine

MIN_DRIVER: Final = 580
"""The first driver of CUDA 13, for which requirements/gpu.txt is."""

CUDA: Final = 13

CACHES: Final = {
    "engines": ("SGLANG_CACHE_DIR", "~/.cache/sglang"),  # of Triton, FlashInfer, DeepGEMM and others as well
    "the trainer": ("TORCHINDUCTOR_CACHE_DIR", "/tmp/async-rl-compiled-{uid}"),
}
"""Where kernels are kept between starts: the variable that names the folder, and its default."""


def describe_machine() -> list[str]:
    """Return findings on this machine, one sentence each.

    Raises:
        EnvironmentNotReady: A GPU is there, and something that a run on it needs is not.
    """
    if detect_device() != "cuda":
        return ["here: no GPU, or a torch without CUDA; engines and trainer run on the CPU"]
    driver = _output(["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"])
    version = int(found.group(1)) if (found := re.match(r"(\d+)\.", driver)) else 0
    if version < MIN_DRIVER:
        raise EnvironmentNotReady(
            f"the NVIDIA driver is {driver.splitlines()[0] if driver else 'not found by nvidia-smi'}; CUDA "
            f"{CUDA} needs {MIN_DRIVER} or newer: update it"
        )
    toolkit = _output([_nvcc(), "--version"])
    release = re.search(r"release (\d+)\.(\d+)", toolkit)
    if release is None or int(release.group(1)) != CUDA:
        raise EnvironmentNotReady(
            f"the CUDA toolkit is {release.group(0) if release else 'missing: there is no nvcc'}; SGLang "
            f"compiles kernels for CUDA {CUDA} when it starts: install cuda-toolkit-{CUDA}-0, and name it in "
            "CUDA_HOME if it is not in /usr/local/cuda"
        )
    fused = (
        "can be imported"
        if finds_transformer_engine()
        else "is not installed (trainer.require_transformer_engine)"
    )
    return [
        f"here: driver and GPUs: {'; '.join(driver.splitlines())}",
        f"here: CUDA toolkit {release.group(1)}.{release.group(2)}",
        f"here: TransformerEngine {fused}",
        *(f"here: {finding}" for finding in _describe_caches()),
    ]


def _describe_caches() -> list[str]:
    findings = []
    for name, (variable, default) in CACHES.items():
        folder = Path(os.environ.get(variable) or default.format(uid=os.getuid())).expanduser()
        files = sum(1 for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
        state = f"{files:,} files" if files else "empty: the first start compiles, which takes minutes"
        findings.append(f"kernels compiled for {name}, in {folder}: {state}")
    return findings


def _nvcc() -> str:
    """Return where nvcc is, as SGLang's kernels find it."""
    home = os.environ.get("CUDA_HOME")
    candidates = [f"{home}/bin/nvcc"] if home else []
    candidates += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    return next((path for path in candidates if path and Path(path).exists()), "nvcc")


def _output(command: list[str]) -> str:
    """Return what a program prints; nothing if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
