"""`scripts/offline-gpu.sh`: splitting, verifying and unpacking a small part; reducing a made-up library."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from scripts.offline_gpu import bundle, fatbin
from scripts.offline_gpu.pins import PIN

ROOT = Path(__file__).parents[2]
LISTS = sorted((ROOT / "scripts/offline_gpu").glob("python*.txt"))
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
LIMIT = 100_000

PTX, CODE = 1, 2


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    return struct.pack("<HHIQ12xI32x", kind, 0x101, 64, len(payload), arch) + payload


def fatbin_of(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, len(body)) + body


def library(section: bytes, name: bytes = b".nv_fatbin") -> bytes:
    """Return an ELF file with one section of fatbins and one of names."""
    names = b"\0" + name + b"\0.shstrtab\0"
    where = 64 + len(section)
    table = where + len(names)
    head = bytearray(64)
    head[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", head, 0x28, table)
    struct.pack_into("<HHH", head, 0x3A, 64, 3, 2)

    def header(name_at: int, offset: int, size: int) -> bytes:
        return struct.pack("<I20xQQ24x", name_at, offset, size)

    headers = header(0, 0, 0) + header(1, 64, len(section)) + header(2 + len(name), where, len(names))
    return bytes(head) + section + names + headers


@pytest.mark.parametrize("name", fatbin.SECTIONS)
def test_only_code_of_other_gpus_is_blanked_when_a_library_is_reduced(tmp_path: Path, name: bytes) -> None:
    def section(old: bytes) -> bytes:
        several = [
            entry(PTX, 80, old),
            entry(CODE, 80, old),
            entry(CODE, 90, b"b" * 32),
            entry(PTX, 90, b"c" * 8),
        ]
        # Padding follows; the second fatbin has no code for this GPU, and may be compiled for it from PTX.
        return fatbin_of(*several) + bytes(24) + fatbin_of(entry(PTX, 80, b"d" * 16))

    file = tmp_path / "library.so"
    file.write_bytes(library(section(b"a" * 40), name))
    assert fatbin.reduce_library(file, 90) == 80
    assert file.read_bytes() == library(section(bytes(40)), name)


@pytest.mark.parametrize("content", [b"", b"text" * 40, library(b"code" * 8, b".text")])
def test_other_files_stay_as_they_are_when_they_are_reduced(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file.so"
    file.write_bytes(content)
    assert fatbin.reduce_library(file, 90) == 0
    assert file.read_bytes() == content


def test_an_unknown_format_is_refused_when_a_fatbin_is_longer_than_its_section(tmp_path: Path) -> None:
    file = tmp_path / "library.so"
    file.write_bytes(library(fatbin_of(entry(CODE, 80, b"a" * 40))[:-8]))
    with pytest.raises(ValueError, match="ends 8 bytes after its section"):
        fatbin.reduce_library(file, 90)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What pip would install of part C: a module, a program, and what is left out."""
    made = tmp_path / "C"
    for name in ("ray/core", "ray/jars", "ray-2.0.dist-info"):
        (made / name).mkdir(parents=True)
    (made / "ray/__init__.py").write_bytes(random.Random(0).randbytes(250_000))  # does not compress
    (made / "ray/core/raylet").write_text("#!/bin/sh\n")
    (made / "ray/core/raylet").chmod(0o755)
    (made / "ray/jars/ray.jar").write_text("java")
    (made / "ray-2.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.0\n")
    return made


@pytest.fixture
def packed(tmp_path: Path, folder: Path) -> Path:
    bundle.prune("C", folder, 90)
    bundle.pack("C", folder, tmp_path / "bundle", {"python": PYTHON, "torch": "2.11.0"}, LIMIT)
    return tmp_path / "bundle"


def install(packed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", ROOT / "scripts/offline-gpu.sh", "install", packed.name, *arguments],
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable},
        cwd=packed.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_part_is_what_was_packed_when_its_files_are_installed(packed: Path, folder: Path) -> None:
    pieces = sorted(packed.glob("C.tar.xz.*"))
    assert [piece.stat().st_size for piece in pieces[:-1]] == [LIMIT] * 2
    assert 0 < pieces[-1].stat().st_size <= LIMIT
    assert json.loads((packed / "C.json").read_text())["packages"] == {"ray": "2.0"}
    done = install(packed, "--target", "target")
    assert (done.returncode, done.stderr) == (0, "")
    target = packed.parent / "target"
    assert (target / "ray/__init__.py").read_bytes() == (folder / "ray/__init__.py").read_bytes()
    assert os.access(target / "ray/core/raylet", os.X_OK)
    assert not (target / "ray/jars").exists()
    shown = subprocess.run(
        ["bash", "-uc", ". target/env.sh; echo $PYTHONPATH"],
        env={"PATH": os.environ["PATH"]},
        cwd=packed.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == str(target)
    assert sorted(path.name for path in target.iterdir()) == ["env.sh", "ray", "ray-2.0.dist-info"]


def damage(packed: Path) -> None:
    piece = packed / "C.tar.xz.1"
    piece.write_bytes(piece.read_bytes()[:-1] + b"?")


def lose(packed: Path) -> None:
    (packed / "C.tar.xz.2").unlink()


def lose_manifest(packed: Path) -> None:
    (packed / "C.json").unlink()


def change_python(packed: Path) -> None:
    manifest = packed / "C.json"
    manifest.write_text(manifest.read_text().replace(f'"{PYTHON}"', '"3.1"'))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (damage, r"C\.tar\.xz\.1 has SHA-256 .*: copy it again"),
        (lose, r"C\.tar\.xz\.2 is missing: copy it again"),
        (lose_manifest, r"has no manifest"),
        (change_python, rf"part C is for Python 3\.1, and this is {re.escape(PYTHON)}"),
    ],
)
def test_nothing_is_unpacked_when_a_bundle_is_not_whole(packed: Path, harm: object, said: str) -> None:
    assert callable(harm)
    harm(packed)
    done = install(packed, "--target", "target")
    assert done.returncode == 1
    assert re.search(said, done.stderr)
    assert not (packed.parent / "target").exists()


@pytest.mark.parametrize("list_", LISTS, ids=lambda file: file.stem)
def test_every_package_of_a_bundle_is_pinned_by_hash_to_the_version_of_the_project(list_: Path) -> None:
    lines = [line for line in list_.read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert [line for line in lines if not re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line)] == []
    ours = {}
    for name in ("cpu-nodeps.txt", "cpu.txt", "dev.txt"):
        ours |= dict(PIN.findall((ROOT / "requirements" / name).read_text()))
    pinned = dict(PIN.findall(list_.read_text()))
    assert {name: version for name, version in pinned.items() if ours.get(name, version) != version} == {}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(ROOT / "scripts/offline_gpu/stand_ins")
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "sgl_kernel"}
    for name in before:
        del sys.modules[name]
    yield importlib.import_module("sgl_kernel")
    for name in [name for name in sys.modules if name.partition(".")[0] == "sgl_kernel"]:
        del sys.modules[name]
    sys.modules.update(before)


def test_stand_ins_compute_what_the_kernels_do(kernels: ModuleType) -> None:
    rows, weight = torch.randn(3, 8), torch.randn(8)
    expected = torch.nn.functional.rms_norm(rows, (8,), weight, 1e-6)
    torch.testing.assert_close(kernels.rmsnorm(rows, weight, 1e-6), expected)
    changed, residual = torch.zeros(3, 8), rows.clone()
    kernels.fused_add_rmsnorm(changed, residual, weight, 1e-6)
    torch.testing.assert_close(changed, expected)
    torch.testing.assert_close(residual, rows)
    summed = torch.empty(3, 8)
    kernels.moe_sum_reduce(torch.stack([rows, rows, weight.expand(3, 8)], 1), summed, 0.5)
    torch.testing.assert_close(summed, (2 * rows + weight) / 2)


def test_a_weak_reference_shares_memory_and_does_not_own_it(kernels: ModuleType) -> None:
    tensor = torch.arange(12.0).view(3, 4)[1:].t()
    alike = kernels.weak_ref_tensor(tensor)
    tensor[0, 0] = 7
    assert torch.equal(alike, tensor)
    assert alike.stride() == tensor.stride()
    assert alike.untyped_storage()._cdata != tensor.untyped_storage()._cdata


def test_what_a_stand_in_lacks_can_be_imported_and_names_itself_when_called(kernels: ModuleType) -> None:
    types = importlib.import_module("sgl_kernel.scalar_type")
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.scalar_type\.scalar_types\.uint4 is not in"):
        types.scalar_types.uint4()
    assert importlib.import_module("sgl_kernel.utils").is_arch_support_pdl is kernels.is_arch_support_pdl
