"""Names that become paths, and folders of known names in places where every user may write."""

from __future__ import annotations

import json
import os
import pickle
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from async_rl.engine_protocol import EngineFacts
from async_rl.engines.model_files import check_weights
from async_rl.errors import CheckpointError, ConfigError, EnvironmentNotReady, WeightSyncError
from async_rl.placement.actors import use_private_compile_cache
from async_rl.placement.local_ray import scratch_folder
from async_rl.runtime.files import file_name, private_folder, replace_file
from async_rl.weights.delta import DeltaRefused
from async_rl.weights.weight_folder import WeightFolder
from tests.support.run_config import config_with
from trainer.checkpoints.manifest import FileRecord, Manifest, read_manifest, write_manifest
from trainer.weights.weight_manifest import served_specs

HOSTILE = ["..", ".", "", "/etc", "../other", "a/../../b", "a\n", "a\0b", "-rf", "\x1b]0;x\a", "a" * 200, "…"]
NAMES = st.text(max_size=12) | st.sampled_from(HOSTILE) | st.text("./\\a0-", max_size=5)


@settings(deadline=None, max_examples=20)
@given(NAMES)
@example("..")
@example("run\n")
@example("model-00001-of-00002.safetensors")
def test_a_name_is_refused_or_stays_in_its_folder(name: str) -> None:
    try:
        file_name(name, "a test")
    except ValueError:
        assert ".safetensors" not in name
        with pytest.raises(ConfigError, match=r"run\.name"):
            config_with(run={"name": name})
    else:
        assert name not in HOSTILE
        assert config_with(run={"name": name}).run.name == name
        assert Path("/runs", name).resolve() == Path("/runs") / name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder beside which there is a file that does not belong to it."""
    (tmp_path / "other.safetensors").write_bytes(b"not ours")
    (tmp_path / "given").mkdir()
    return tmp_path / "given"


def test_the_index_of_a_model_cannot_name_files_outside_of_its_folder(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    facts = EngineFacts(num_layers=1, moe_layers=(), num_experts=0, top_k=0, vocab_size=8, context_length=8)
    with pytest.raises(ConfigError, match=r"names the file '\.\./other\.safetensors'; expected a name"):
        check_weights(folder, facts)
    with pytest.raises(WeightSyncError, match=r"names the file '\.\./other\.safetensors'; expected a name"):
        served_specs(folder)


def test_a_checkpoint_cannot_name_files_outside_of_its_folder(folder: Path) -> None:
    manifest = Manifest(
        step=1, extra={}, layout={}, model="m", dtype="float32", optimizer_step=0, versions={}
    )
    write_manifest(
        folder, msgspec.structs.replace(manifest, files={"../other.safetensors": FileRecord(8, 0)})
    )
    with pytest.raises(CheckpointError, match=r"names the file '\.\./other\.safetensors'"):
        read_manifest(folder)


@pytest.mark.megatron
def test_the_index_of_a_checkpoint_cannot_either(folder: Path) -> None:
    from trainer.megatron import storage

    outside = {MetadataIndex("weight"): _StorageInfo("../other.safetensors", 0, 8)}
    (folder / storage.METADATA).write_bytes(pickle.dumps(Metadata({}, storage_data=outside)))
    with pytest.raises(CheckpointError, match=r"names the file '\.\./other\.safetensors'"):
        storage.read_metadata(folder)


@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_a_private_folder_is_refused_when_something_else_has_its_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "name"
    if kind == "file":
        path.write_text("")
    else:
        (tmp_path / "theirs").mkdir()
        path.symlink_to(tmp_path / ("theirs" if kind == "link" else "nothing"))
    with pytest.raises(PermissionError, match="exists and is no folder of this user"):
        private_folder(path)
    assert not (tmp_path / "nothing").exists()


@pytest.fixture
def short() -> Iterator[Path]:
    """A temporary folder with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s") as folder:
        yield Path(folder)


def test_ray_has_a_short_folder_when_that_of_tmpdir_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: Path, caplog: pytest.LogCaptureFixture
) -> None:
    socket_path = "r/session_2026-01-02_03-04-05_678901_1234567/sockets/plasma_store"
    for length, used in ((107, False), (24, False), (23, True)):
        given = short / ("x" * (length - len(str(short)) - 1))
        given.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(given))
        caplog.clear()
        scratch = scratch_folder(tmp_path / "run")
        scratch.rmdir()
        assert scratch.parent == (given if used else Path("/tmp"))
        assert len(str(scratch / socket_path)) <= 107
        assert ("too long for paths of sockets" in caplog.text) != used
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(EnvironmentNotReady, match="set TMPDIR to a folder of at most 23 bytes"):
        scratch_folder(tmp_path / "run")


def test_neither_ray_nor_compiled_code_uses_a_folder_that_another_user_made(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, short: Path
) -> None:
    tmp_path_factory.getbasetemp()  # pytest would refuse one that it makes as another user
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    with pytest.raises(EnvironmentNotReady, match=r"belongs to the user .*; remove it, or set TMPDIR"):
        scratch_folder(tmp_path / "run")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with pytest.raises(EnvironmentNotReady, match=r"belongs to the user .*set TORCHINDUCTOR_CACHE_DIR"):
        use_private_compile_cache()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_weights_are_copied_to_a_private_folder_and_not_to_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "theirs").mkdir()
    before = os.umask(0)
    try:
        copy = Path(WeightFolder(tmp_path / "ours").copy_version(str(tmp_path / "source"), 1))
    finally:
        os.umask(before)
    assert stat.S_IMODE(copy.parent.stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(DeltaRefused, match="exists and is no folder of this user"):
        WeightFolder(tmp_path / "link").copy_version(str(tmp_path / "source"), 1)
    assert list((tmp_path / "theirs").iterdir()) == []


def test_a_replaced_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / ".file.part").symlink_to(tmp_path / "kept")
    replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "kept").read_text() == "kept"
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()
