"""Which checkpoints there are, which are whole and which stay; no model."""

from pathlib import Path

import msgspec
import pytest

from async_rl.errors import CheckpointError
from async_rl.trainer_protocol import BEST_FILE, BestCheckpoint, read_best
from trainer.checkpoints import folder
from trainer.checkpoints.manifest import Manifest, find_flaw, read_manifest, record_file, write_manifest

FILES = {"a": b"a" * 1000, "b": b"b" * 2000, "c": b"c"}


def make(path: Path, step: int = 1, name: str | None = None) -> Path:
    made = path / (name or f"step_{step:08d}")
    made.mkdir(parents=True)
    for file, data in FILES.items():
        (made / file).write_bytes(data)
    manifest = Manifest(
        step=step,
        extra={},
        layout={"num_ranks": 1},
        model="m",
        dtype="float32",
        optimizer_step=step,
        versions={},
        files={file: record_file(made / file) for file in FILES},
    )
    write_manifest(made, manifest)
    return made


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_every_damage_is_found_by_one_of_the_ranks(tmp_path, num_ranks):
    def found(path):
        return [find_flaw(path, share=rank, of=num_ranks) for rank in range(num_ranks)]

    assert not any(found(make(tmp_path, 1)))
    for step, file in enumerate(FILES, start=2):
        path = make(tmp_path, step)
        data = bytearray(FILES[file])
        data[-1] ^= 1
        (path / file).write_bytes(data)
        assert [told for told in found(path) if told] == [
            f"{path / file} is damaged: its checksum is not that of the manifest"
        ]
        (path / file).write_bytes(data[:-1])
        assert set(found(path)) == {f"{path / file} has {len(data) - 1} bytes, the manifest says {len(data)}"}
        (path / file).unlink()
        assert all(f"{path / file} is missing" in told for told in found(path))


def test_no_manifest_and_half_of_one_are_flaws(tmp_path):
    path = make(tmp_path)
    data = (path / "manifest.json").read_bytes()
    for end in range(0, len(data) - 2, 37):
        (path / "manifest.json").write_bytes(data[:end])
        assert "cannot be read" in find_flaw(path)
    (path / "manifest.json").unlink()
    assert find_flaw(path) == f"{path} has no manifest.json: it was never completed"
    (path / "manifest.json").write_bytes(data.replace(b'"format": 2', b'"format": 7'))
    with pytest.raises(CheckpointError, match=r"format 7; this version reads format 2"):
        read_manifest(path)


def test_newest_ones_and_every_nth_stay_when_more_are_written(tmp_path):
    for step in (10, 20, 30, 40, 50):
        make(tmp_path, step)
    removed = folder.remove_old_checkpoints(tmp_path, 50, keep=2, every=20)
    assert sorted(path.name for path in removed) == ["step_00000010", "step_00000030"]
    assert [folder.step_of(path) for path in folder.checkpoints_newest_first(tmp_path)] == [50, 40, 20]
    folder.remove_old_checkpoints(tmp_path, 20, keep=1, every=None)  # the run was set back: later ones go
    assert [folder.step_of(path) for path in folder.checkpoints_newest_first(tmp_path)] == [20]


def test_what_is_the_best_or_may_become_it_stays_when_more_are_written(tmp_path):
    for step in (10, 20, 30, 40, 50):
        make(tmp_path, step)
    best = BestCheckpoint(metric="all/reward", step=10, value=0.5, evaluating=30)
    (tmp_path / BEST_FILE).write_bytes(msgspec.json.encode(best))
    found = read_best(tmp_path)
    assert found == best
    folder.remove_old_checkpoints(tmp_path, 50, keep=1, every=None, others=found.kept)
    assert [folder.step_of(path) for path in folder.checkpoints_newest_first(tmp_path)] == [50, 30, 10]
    (tmp_path / BEST_FILE).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"best\.json is damaged"):
        read_best(tmp_path)
    assert read_best(tmp_path / "none") is None


def test_checkpoint_appears_by_a_rename_and_leftovers_go(tmp_path):
    old = make(tmp_path, 7)
    (old / "a").write_bytes(b"of an earlier start")
    make(tmp_path, 7, ".step_00000007.tmp")
    make(tmp_path, 8, ".step_00000008.tmp")
    (tmp_path / "latest").write_text("of somebody else")
    assert folder.publish_checkpoint(tmp_path, 7) == old
    assert (old / "a").read_bytes() == FILES["a"]
    assert [path.name for path in folder.remove_leftovers(tmp_path)] == [".step_00000008.tmp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000007"]


def test_what_was_skipped_is_no_checkpoint_any_more(tmp_path):
    """It may be readable again at the next start, when other steps have been trained in its place."""
    old, newer, newest = (make(tmp_path, step) for step in (2, 4, 6))
    (tmp_path / "step_00000006.skipped").mkdir()
    aside = folder.set_aside_newer(tmp_path, old)
    assert [path.name for path in aside] == ["step_00000006.skipped", "step_00000004.skipped"]
    assert all((path / "manifest.json").exists() for path in aside)
    assert folder.checkpoints_newest_first(tmp_path) == [old]
    assert folder.remove_leftovers(tmp_path) == []
    assert not newer.exists()
    assert not newest.exists()
