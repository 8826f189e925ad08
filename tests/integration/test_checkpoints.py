"""Checkpoints of a real model on one rank: written in the background, complete or skipped."""

import json
import pickle
import re
import resource
import shutil
import threading
from dataclasses import replace
from pathlib import PosixPath

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from async_rl.errors import CheckpointError
from tests.support.tiny_model import build_tiny_deepseek_v3, build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import differing, started, trainer_config, weights
from trainer.checkpoints import loading, saving
from trainer.megatron import shards, storage

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def trained(two_layers, tmp_path_factory):
    """A folder with checkpoints of the steps 1 to 3, which tests copy."""
    folder = tmp_path_factory.mktemp("trained")
    with started(trainer_config(two_layers, keep_checkpoints=3)) as worker:
        for step in (1, 2, 3):
            worker.train_on(random_batch(step, layers=2), step)
            worker.save_checkpoint(str(folder), {"weight_version": step})
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "checkpoints")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.real
def test_newest_whole_checkpoint_is_taken_when_newer_ones_are_damaged(two_layers, folder):
    truncate(folder / "step_00000003" / "__0_0.distcp")
    (folder / ".step_00000004.tmp").mkdir()
    (folder / ".step_00000004.tmp" / "__0_0.distcp").write_bytes(b"left by a kill")
    with started(trainer_config(two_layers), folder) as worker:
        assert worker.num_steps == 2
        assert not (folder / ".step_00000004.tmp").exists()
        assert not (folder / "step_00000003").exists()
        (folder / "step_00000003.skipped").rename(folder / "step_00000003")
        flip(folder / "step_00000002" / "__0_0.distcp")
        found = loading.find_checkpoint(folder)
        assert found.path == folder / "step_00000001"
        assert "step_00000003/__0_0.distcp has" in found.skipped_checkpoints[0]
        assert "step_00000002/__0_0.distcp is damaged" in found.skipped_checkpoints[1]
        with pytest.raises(CheckpointError, match=r"step_00000002/__0_0.distcp is damaged"):
            loading.find_checkpoint(folder / "step_00000002")  # one that is named is not replaced by another
        (folder / "step_00000001" / "manifest.json").unlink()
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete: .*Restore one of them"):
            loading.find_checkpoint(folder)


@pytest.mark.real
def test_a_run_goes_on_when_the_generators_are_those_of_another_device(two_layers, tmp_path, monkeypatch):
    states = shards.random_state

    def of_a_gpu():
        """One more, and Megatron's as short as a GPU's; the CPU's own is the same everywhere."""
        found = states()
        first = next(name for name in found if name != "cpu")
        short = {"local_shape": (1, 16), "global_shape": (1, 16), "data": found[first].data[:, :16].clone()}
        there = {name: replace(part, **short) for name, part in found.items() if name != "cpu"}
        there["device"] = replace(there[first], key="random.device")
        return {"cpu": found["cpu"], **there}

    for name, written, read in (("gpu", of_a_gpu, states), ("cpu", states, of_a_gpu)):
        with started(trainer_config(two_layers)) as worker, monkeypatch.context() as patch:
            patch.setattr(shards, "random_state", written)
            worker.train_on(random_batch(1, layers=2), 1)
            worker.save_checkpoint(str(tmp_path / name), {})
            expected = worker.train_on(random_batch(2, layers=2), 2).metrics
            assert worker.saved_checkpoint(wait=True).failure is None
        with monkeypatch.context() as patch:
            patch.setattr(shards, "random_state", read)
            with started(trainer_config(two_layers), tmp_path / name) as worker:
                metrics = worker.train_on(random_batch(2, layers=2), 2).metrics
        assert (metrics["loss"], metrics["grad_norm"]) == (expected["loss"], expected["grad_norm"])


def test_checkpoint_is_refused_when_it_is_of_another_model_or_type(two_layers, folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"trained with model.dtype=float32, but it is bfloat16 now"):
        with started(trainer_config(two_layers, dtype="bfloat16"), folder):
            pass
    smaller = build_tiny_qwen3_moe(tmp_path / "smaller", num_layers=1)
    with pytest.raises(CheckpointError, match=r"of another model: it has decoder.layers.1.*differences"):
        with started(trainer_config(smaller), folder):
            pass
    wider = build_tiny_qwen3_moe(tmp_path / "wider", num_layers=2, num_experts=9)
    with pytest.raises(CheckpointError, match=r"of another model: .* is \(8, 32\), expected \(9, 32\)"):
        with started(trainer_config(wider), folder):
            pass


def test_training_goes_on_when_a_checkpoint_is_being_written_or_cannot_be(two_layers, tmp_path, monkeypatch):
    write, may_write = storage.write_parts, threading.Event()

    def write_later(*arguments):
        assert may_write.wait(100)
        return write(*arguments)

    monkeypatch.setattr(storage, "write_parts", write_later)
    with started(trainer_config(two_layers)) as worker:
        worker.train_on(random_batch(1, layers=2), 1)
        expected = weights(worker)
        worker.save_checkpoint(str(tmp_path), {})
        assert worker.saved_checkpoint(wait=False).writing
        worker.train_on(random_batch(2, layers=2), 2)
        assert not torch.equal(expected["lm_head.weight"], weights(worker)["lm_head.weight"])
        assert [path.name for path in tmp_path.iterdir()] == [".step_00000001.tmp"]
        may_write.set()
        saved = worker.saved_checkpoint(wait=True)
        assert (saved.step, saved.writing, saved.failure) == (1, False, None)

        (tmp_path / "file").write_text("in the way")
        worker.save_checkpoint(str(tmp_path / "file"), {})
        saved = worker.saved_checkpoint(wait=True)
        assert saved.step == 1
        assert f"cannot write checkpoint {tmp_path / 'file' / 'step_00000002'}" in saved.failure

        def fill_the_disk(folder, *arguments):
            (folder / "half").write_bytes(bytes(100))
            raise OSError("no space left on device")

        monkeypatch.setattr(storage, "write_parts", fill_the_disk)
        worker.save_checkpoint(str(tmp_path), {})
        assert "no space left on device" in worker.saved_checkpoint(wait=True).failure
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "step_00000001"]

        monkeypatch.setattr(storage, "write_parts", write)
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 10, unlimited[1]))  # a disk that is full after that
        try:
            worker.save_checkpoint(str(tmp_path), {})
            failure = worker.saved_checkpoint(wait=True).failure
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert re.search(r"File too large: rank 0 writes \d{6,} bytes, and \d+ are free", failure)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "step_00000001"]
    with started(trainer_config(two_layers), tmp_path) as worker:
        assert not differing(weights(worker), expected)


@pytest.mark.parametrize(
    "stage",
    [
        "tensors",
        "rename",
        *(pytest.param(s, marks=pytest.mark.real) for s in ("scratch", "metadata", "manifest")),
    ],
)
def test_the_checkpoint_before_stays_when_the_process_dies_in_a_save(two_layers, folder, stage, monkeypatch):
    class Killed(BaseException):
        """Nothing that runs afterwards tidies up."""

    def die(*_):
        raise Killed

    of = {
        "scratch": (storage, "write_parts"),
        "tensors": (saving, "gather_bytes"),
        "metadata": (saving, "record_file"),
        "manifest": (saving, "write_manifest"),
        "rename": (saving.folder, "publish_checkpoint"),
    }
    module, name = of[stage]
    if stage in ("metadata", "manifest"):  # after it
        done = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *arguments: (done(*arguments), die()))
    else:
        monkeypatch.setattr(module, name, die)
    with started(trainer_config(two_layers), folder) as worker:
        assert worker.num_steps == 3
        worker.train_on(random_batch(4, layers=2), 4)
        worker.save_checkpoint(str(folder), {})
        assert isinstance(worker.saver.pending_write.exception(), Killed)
    monkeypatch.undo()
    assert (folder / ".step_00000004.tmp").exists()
    with started(trainer_config(two_layers), folder) as worker:
        assert worker.num_steps == 3
    assert not (folder / ".step_00000004.tmp").exists()


@pytest.mark.real
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_weights_are_those_of_the_checkpoint_when_it_is_read_by_one_process(tmp_path, capsys, dtype):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from async_rl.cli.main import main

    model = build_tiny_deepseek_v3(tmp_path / "model")  # its experts' bias stays float32
    plain = random_batch(1, layers=2, routing=False)
    with started(trainer_config(model, dtype=dtype, replay=False)) as worker:
        worker.train_on(plain, 1)
        worker.save_checkpoint(str(tmp_path / "run" / "checkpoints"), {})
        worker.publish(str(tmp_path / "published"), 1)
    out = tmp_path / "exported"
    arguments = ["export", "--checkpoint", str(tmp_path / "run"), "--out", str(out)]
    assert main([*arguments, "--max-shard-bytes", "100000"]) == 0
    assert "the weights of step 1" in capsys.readouterr().out
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = {name: load_file(out / name) for name in set(index["weight_map"].values())}
    assert len(shards) > 2
    assert all(path.stat().st_size < 120_000 for path in out.glob("*.safetensors"))
    exported = {name: shards[file][name] for name, file in index["weight_map"].items()}
    published = load_file(tmp_path / "published" / "model.safetensors")
    assert exported.keys() == published.keys()
    for name, tensor in published.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name], tensor), name
    folders, ids = (out, tmp_path / "published", model), torch.arange(3, 40)[None]
    with torch.no_grad():
        ours, theirs, before = (AutoModelForCausalLM.from_pretrained(f)(ids).logits.float() for f in folders)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, before)
    assert main(arguments) == 2
    assert "which already exists: name a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("made", "error"),
    [
        ((print, ("made",)), r"builtins.print does not belong there"),
        # Debian's Python looks members of enumerations up.
        ((getattr, (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")), "expected Metadata"),
        ((getattr, (_MEM_FORMAT_ENCODING, "mro")), "does not belong there"),
        ((getattr, (PosixPath, "home")), "does not belong there"),
    ],
    ids=["call", "memory format", "other member", "other kind"],
)
def test_nothing_is_made_that_does_not_belong_there_when_metadata_is_read(tmp_path, made, error):
    class Foreign:
        def __reduce__(self):
            return made

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Foreign()))
    with pytest.raises(CheckpointError, match=error):
        storage.read_metadata(tmp_path)
