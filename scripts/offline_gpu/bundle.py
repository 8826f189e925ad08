"""Packs folders of installed packages into files to be carried, and unpacks them without a network.

    FOLDER ─► less what is left out, and code of other GPUs ─► A.tar.xz ─► A.tar.xz.0, A.tar.xz.1, ...
                                                                    └──► A.json: SHA-256, versions

`scripts/offline-gpu.sh` calls it.

Installing needs no package but Python's own.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from scripts.offline_gpu.fatbin import reduce_library

LEFT_OUT = {
    "A": ["bin", "torch_memory_saver*_cu12.abi3.so", "onnx/backend/test"],
    "B": [
        *("bin/[!n]*", "bin/n[!i]*"),  # ninja compiles kernels; nothing else is run as a program
        "sglang/multimodal_gen",
        "sglang/test",
        "sglang/benchmark",
        "sglang/kernels/jit/benchmark",
        "sglang/srt/rust_extensions/*.so",  # gRPC, images, and a server without Python
        # Compiled for torch 2.14.1: with another one it ends the server. SGLang then uses Python for it.
        "sglang/srt/mem_cache/rust_tree_core/*.so",
    ],
    "C": ["bin", "ray/jars", "ray/dashboard/client", "ray/rllib", "ray/serve", "ray/data", "ray/llm"],
    "D": ["nvidia/nccl/include"],
}
"""Globs of what is deleted from each part: language models on one machine do without."""

ENVIRONMENT = {
    "B": """\
export PATH="$here/bin:$PATH" SGLANG_JIT_CACHE_DIR="$here/jit_cache"
export SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1  # a stand-in has no version
""",
    # torch looks for NCCL in the folder of its own first.
    "D": 'export LD_PRELOAD="$here/nvidia/nccl/lib/libnccl.so.2"\n',
}
"""What a shell sets for a part that needs more than PYTHONPATH."""


class DamagedBundle(Exception):
    """Files of a bundle are missing, differ from what was packed, or are for another Python."""


def prune(part: str, folder: Path, arch: int) -> None:
    """Delete what a part leaves out, and blank GPU code of other architectures in its libraries."""
    for pattern in LEFT_OUT[part]:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for library in folder.rglob("*.so*"):
        reduce_library(library, arch)


def pack(part: str, folder: Path, bundle: Path, made_for: dict[str, str], limit: int) -> list[Path]:
    """Write a part's manifest and files, each of at most `limit` bytes, into `bundle`; return the files."""
    bundle.mkdir(parents=True, exist_ok=True)
    for old in bundle.glob(f"{part}.*"):
        old.unlink()
    whole = bundle / f"{part}.tar.xz"
    with tarfile.open(whole, "w:xz", preset=9) as archive:
        archive.add(folder, arcname=".")
    files = []
    with whole.open("rb") as source:
        while piece := source.read(limit):
            files.append(bundle / f"{whole.name}.{len(files)}")
            files[-1].write_bytes(piece)
    whole.unlink()
    manifest = {
        "part": part,
        "made_for": made_for,
        "files": {file.name: digest(file) for file in files},
        "packages": {
            found.metadata["Name"]: found.version
            for found in importlib.metadata.distributions(path=[str(folder)])
        },
    }
    (bundle / f"{part}.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return files


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def install(bundle: Path, target: Path, parts: Sequence[str] = ()) -> list[str]:
    """Verify and unpack parts of a bundle, all by default, into `target`, beside what is there.

    Returns:
        The parts.

    Raises:
        DamagedBundle: Before anything is unpacked.
    """
    parts = parts or sorted(file.stem for file in bundle.glob("*.json"))
    manifests = {part: _read_manifest(bundle, part) for part in parts}
    if not manifests:
        raise DamagedBundle(f"{bundle} has no manifest (A.json, B.json, ...)")
    target.mkdir(parents=True, exist_ok=True)
    for part, names in manifests.items():
        whole = target / f".{part}.tar.xz"
        with whole.open("wb") as joined:
            for name in names:
                with (bundle / name).open("rb") as piece:
                    shutil.copyfileobj(piece, joined)
        with tarfile.open(whole) as archive:
            # Python before 3.11.4 has no filters. The sums are those of the manifest.
            archive.extraction_filter = getattr(tarfile, "tar_filter", None)
            archive.extractall(target)
        whole.unlink()
    settings = "".join(text for part, text in ENVIRONMENT.items() if part in parts)
    (target / "env.sh").write_text(
        f'# To be sourced.\nhere={target.resolve()}\nexport PYTHONPATH="$here${{PYTHONPATH:+:$PYTHONPATH}}"\n'
        + settings
    )
    return list(manifests)


def _read_manifest(bundle: Path, part: str) -> list[str]:
    """Return the names of a part's files, in order, all of which are as they were packed."""
    if not (bundle / f"{part}.json").exists():
        raise DamagedBundle(f"{bundle} has no part {part}: {part}.json is missing")
    manifest = json.loads((bundle / f"{part}.json").read_text())
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if (wanted := manifest["made_for"]["python"]) != here:
        raise DamagedBundle(
            f"part {part} is for Python {wanted}, and this is {here}: say PYTHON=python{wanted}"
        )
    files: dict[str, str] = manifest["files"]
    for name, expected in files.items():
        if not (bundle / name).exists():
            raise DamagedBundle(f"{bundle / name} is missing: copy it again")
        if (found := digest(bundle / name)) != expected:
            raise DamagedBundle(f"{bundle / name} has SHA-256 {found}, not {expected}: copy it again")
    return list(files)


def main(arguments: Sequence[str]) -> None:
    """Pack or install."""
    parser = argparse.ArgumentParser(description="Files for a GPU machine without a network.")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("part", choices=sorted(LEFT_OUT))
    packing.add_argument("folder", type=Path)
    packing.add_argument("bundle", type=Path)
    packing.add_argument("--python", required=True)
    packing.add_argument("--torch", required=True)
    packing.add_argument("--part-mib", type=int, default=55)
    packing.add_argument("--arch", type=int, default=90)
    installing = commands.add_parser("install")
    installing.add_argument("bundle", type=Path)
    installing.add_argument("--target", type=Path, required=True)
    installing.add_argument("--parts", nargs="*", default=())
    given = parser.parse_args(arguments)
    if given.command == "pack":
        prune(given.part, given.folder, given.arch)
        made_for = {"python": given.python, "torch": given.torch}
        for file in pack(given.part, given.folder, given.bundle, made_for, given.part_mib << 20):
            print(f"{file}  {file.stat().st_size / (1 << 20):.1f} MiB")
        return
    try:
        parts = install(given.bundle, given.target, given.parts)
        print(f"unpacked {' '.join(parts)}; in each shell: . {given.target}/env.sh")
    except DamagedBundle as error:
        sys.exit(f"offline-gpu: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
