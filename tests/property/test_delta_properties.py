"""A folder that follows by deltas is the trainer's bit for bit, and a damaged delta is noticed."""

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from async_rl.weights import delta
from async_rl.weights.delta import DeltaRefused, DeltaWriter
from async_rl.weights.weight_folder import WeightFolder
from trainer.weights.weight_export import raw_of

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
SPECIAL = {  # NaNs with payloads, -0.0, infinities, the smallest number that is not 0
    2: (0x7FC1, 0xFFC1, 0x8000, 0x0000, 0x7F80, 0x0001, 0x7E01),
    4: (0x7FC00001, 0xFF800001, 0x80000000, 0, 0x7F800000, 1),
}


@st.composite
def pairs(draw):
    """Tensors of two versions, by name."""
    old, new = {}, {}
    for index in range(draw(st.integers(0, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        size = torch.empty(shape, dtype=dtype).nbytes
        top = 1 if dtype == torch.bool else 255
        before = bytearray(draw(st.lists(st.integers(0, top), min_size=size, max_size=size)))
        after = bytearray(before)
        for place in draw(st.sets(st.integers(0, size - 1), max_size=20)) if size else ():
            after[place] = draw(st.integers(0, top))
        width = dtype.itemsize
        if size and width in SPECIAL and dtype.is_floating_point:
            after[:width] = draw(st.sampled_from(SPECIAL[width])).to_bytes(width, "little")
        for tensors, data in ((old, before), (new, after)):
            flat = torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
            tensors[f"t{index}"] = flat.view(dtype).reshape(shape)
    return old, new


def raws(tensors):
    return ((name, tensor.element_size(), raw_of(tensor)) for name, tensor in tensors.items())


def written(old, new, root: Path) -> tuple[Path, Path]:
    """The folder of the old tensors, and the delta to the new ones, written by two ranks."""
    shutil.rmtree(root, ignore_errors=True)
    (root / "base").mkdir(parents=True)
    save_file(old, root / "base" / "model.safetensors")
    for rank in range(2):
        writer, file, own = DeltaWriter(), root / "delta" / f"{rank}.delta", sorted(old)[rank::2]
        assert not writer.write_delta(raws({name: old[name] for name in own}), file, None, 1)
        assert writer.write_delta(raws({name: new[name] for name in own}), file, 1, 2, num_files=2)
    return root / "base", root / "delta"


FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FEW
@given(pairs(), st.sampled_from((1, 3, 1 << 22)))
def test_the_result_is_the_new_version_bit_for_bit_when_a_delta_is_applied(tmp_path, pair, stretch):
    old, new = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "_ELEMENTS", stretch)
        base, path = written(old, new, tmp_path / "run")
        folder = WeightFolder(tmp_path / "host")
        folder.copy_version(str(base), 1)
        got = load_file(Path(folder.apply_delta(str(path))) / "model.safetensors")
    assert got.keys() == new.keys()
    for name, tensor in new.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert raw_of(got[name]).tobytes() == raw_of(tensor).tobytes()
    assert [folder.name for folder in (tmp_path / "host").iterdir()] == ["version_2"]


@FEW
@given(pairs(), st.booleans(), st.data())
def test_a_delta_is_refused_when_any_bit_of_it_or_of_the_base_is_flipped(tmp_path, pair, of_base, data):
    base, path = written(*pair, tmp_path / "run")
    folder = WeightFolder(tmp_path / "host")
    held = Path(folder.copy_version(str(base), 1))
    file = (
        held / "model.safetensors" if of_base else path / data.draw(st.sampled_from(["0.delta", "1.delta"]))
    )
    damaged = bytearray(file.read_bytes())
    size = sum(tensor.nbytes for tensor in pair[0].values()) if of_base else len(damaged)
    if not size:
        return
    damaged[len(damaged) - 1 - data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(damaged)
    with pytest.raises(DeltaRefused) as refused:
        folder.apply_delta(str(path))
    assert refused.value.reason == ("base" if of_base else "damaged")
    assert of_base or raws_of(held) == raws_of(base)  # it stays, for whole files to replace


def test_a_delta_is_refused_when_a_file_of_it_is_missing(tmp_path):
    """Its tensors would stay those of the version before, without a sum that says so."""
    old = {name: torch.zeros(4) for name in "ab"}
    base, path = written(old, {name: torch.ones(4) for name in "ab"}, tmp_path / "run")
    (path / "1.delta").unlink()
    folder = WeightFolder(tmp_path / "host")
    folder.copy_version(str(base), 1)
    with pytest.raises(DeltaRefused, match="others are missing"):
        folder.apply_delta(str(path))


def raws_of(folder: Path) -> dict[str, bytes]:
    return {
        name: raw_of(tensor).tobytes() for name, tensor in load_file(folder / "model.safetensors").items()
    }
