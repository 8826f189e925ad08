"""What a run needs of this machine, as `async-rl train` and `async-rl check --here` check it.

`describe_machine` is for the latter alone: what a run on GPUs needs besides Python packages.

```
driver ─► CUDA toolkit (SGLang compiles kernels) ─► TransformerEngine (the trainer's layers) ─► compile caches
```
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from async_rl.config import Config, SGLangEngines
from async_rl.engines.sglang.connect import external_keys
from async_rl.engines.sglang.server import check_sglang
from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.observability.endpoints import check_address
from async_rl.run.placement_table import check_resources, check_shared_gpus, engine_groups
from async_rl.run.preflight import check_trainer_here
from async_rl.runtime.devices import count_gpus, detect_device, finds_transformer_engine
from async_rl.runtime.files import socket_folder

MIN_DRIVER: Final = 580
"""The first driver of CUDA 13, for which requirements/gpu.txt is."""

CUDA: Final = 13

CACHES: Final = {
    "engines": ("SGLANG_CACHE_DIR", "~/.cache/sglang"),  # of Triton, FlashInfer, DeepGEMM and others as well
    "the trainer": ("TORCHINDUCTOR_CACHE_DIR", "/tmp/async-rl-compiled-{uid}"),
}
"""Where kernels are kept between starts: the variable that names the folder, and its default."""


BELOW_RAY_FOLDER: Final = len("/r/session_2026-01-02_03-04-05_678901_1234567/sockets/plasma_store")
"""The longest path of a socket of Ray below the folder that it is given, bytes."""


def ray_folder(run_dir: Path) -> Path:
    """Return the folder for the sockets and logs of a Ray that a run starts, whether it exists or not.

    It is short, because paths of sockets are limited, and the same for each incarnation of a run, so that
    the next one finds what a killed driver left.

    Raises:
        EnvironmentNotReady: There is none whose path is short enough.
    """
    name = hashlib.blake2s(f"{os.getuid()}:{run_dir.resolve()}".encode(), digest_size=4).hexdigest()
    folder = f"async-rl-{name}"
    return socket_folder(1 + len(folder) + BELOW_RAY_FOLDER) / folder


def check_machine(config: Config) -> list[str]:
    """Check what the start of a run needs of this machine; for ranks and engines only if they run here.

    Returns:
        Findings, one sentence each.

    Raises:
        ConfigError: The trainer cannot use the machine as the config says.
        EnvironmentNotReady: An address, a device, a package or a resource is missing.
    """
    check_address(config.metrics.host, config.metrics.port)
    for job in (config, *(config.of_model(name) for name in config.models)):
        if isinstance(job.engine, SGLangEngines):
            for url in job.engine.urls:
                external_keys(url)
    check_trainer_here(config)
    if config.placement.joins:
        return []
    _check_folders(config)
    folder, given = ray_folder(Path(config.run.dir) / config.run.name), tempfile.gettempdir()
    device = detect_device()
    if groups := engine_groups(config):
        wanted = getattr(config.engine, "device", "cpu")
        if wanted == "cuda" and device != "cuda":
            raise EnvironmentNotReady(
                "engine.device is cuda, but this machine has no GPU, or a torch without CUDA: set "
                "engine.device=auto or cpu"
            )
        on_gpu = "cuda" in (wanted, device) and wanted != "cpu"
        check_sglang(
            narrow=groups[0].name == "engine" and bool(getattr(config.engine, "narrow_routing", False)),
            saves_memory=config.placement.shared and on_gpu,
        )
    if device == "cuda" and config.trainer.device == "auto":
        check_shared_gpus(config)
    check_resources(config, gpus=count_gpus(), cpus=os.cpu_count() or 1)
    if folder.parent == Path(given):
        return []
    return [f"here: TMPDIR is {given}, which is too long for paths of sockets: those of Ray are in {folder}"]


def _check_folders(config: Config) -> None:
    """Check that processes here can write into the folders that each node has.

    Raises:
        ConfigError: They cannot.
    """
    named = {"queue.spool_dir": config.queue.spool_dir, "queue.journal_dir": config.queue.journal_dir}
    if config.weights.transport == "delta":
        named["weights.local_dir"] = config.weights.local_dir
    for key, name in named.items():
        if name is None:
            continue
        folder = Path(name).expanduser().absolute()
        there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{key} is {name}, but {there} is no folder that this process can write into: name another"
            )


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
