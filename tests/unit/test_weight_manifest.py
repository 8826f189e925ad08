from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from async_rl.engine_protocol import TensorSpec
from async_rl.errors import WeightSyncError
from async_rl.weights.buckets import spec_of
from trainer.weights.weight_manifest import check_exported, served_specs

WEIGHTS = {
    "model.embed_tokens.weight": torch.zeros(8, 4, dtype=torch.bfloat16),
    "model.layers.0.mlp.gate.weight": torch.zeros(2, 4, dtype=torch.bfloat16),
    "model.layers.0.mlp.gate.e_score_correction_bias": torch.zeros(2),
    "lm_head.weight": torch.zeros(8, 4, dtype=torch.bfloat16),
}
GATE = "model.layers.0.mlp.gate.weight"


def config(tied: bool = False) -> Any:
    return SimpleNamespace(tie_word_embeddings=tied, num_hidden_layers=1)


@pytest.fixture
def served(tmp_path: Path) -> dict[str, TensorSpec]:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    return served_specs(tmp_path)


def exported(**changes: TensorSpec | None) -> list[TensorSpec]:
    specs = {name: spec_of(name, tensor) for name, tensor in WEIGHTS.items()} | changes
    return [spec for spec in specs.values() if spec is not None]


def spec(name: str, *shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_pass_when_they_are_the_served_ones_or_cast(served, dtype):
    check_exported(exported(), served, config(), dtype)
    check_exported([spec(s.name, *s.shape, dtype="float32") for s in exported()], served, config(), "float32")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda: exported(**{GATE: spec(GATE, 4, 2)}),
            r"gate.weight has the shape \[4, 2\], expected \[2, 4\]",
        ),
        (lambda: exported(**{GATE: spec(GATE, 2, 4, dtype="float16")}), "is float16, expected bfloat16"),
        (lambda: exported(**{GATE: None}), "gate.weight is missing"),
        (
            lambda: exported(new=spec("model.layers.0.mlp.gates.weight", 2, 4)),
            "gates.weight is unknown to it",
        ),
        (lambda: [*exported(), exported()[0]], "embed_tokens.weight comes 2 times"),
    ],
)
def test_weights_are_refused_when_engines_would_die_of_them_or_pass_over_them(
    served, change: Callable[[], list[TensorSpec]], words: str
):
    with pytest.raises(WeightSyncError, match=words):
        check_exported(change(), served, config(), "bfloat16")


@pytest.mark.parametrize("head", [True, False])
def test_the_head_may_come_or_not_when_it_is_tied(served, head):
    specs = exported() if head else exported(**{"lm_head.weight": None})
    without = {name: spec for name, spec in served.items() if name != "lm_head.weight"}
    for of_engine in (served, without):
        check_exported(specs, of_engine, config(tied=True), "bfloat16")
    if head:
        with pytest.raises(WeightSyncError, match=r"lm_head\.weight is unknown"):
            check_exported(specs, without, config(), "bfloat16")


def test_layers_beyond_the_last_need_not_come_when_the_folder_has_them(served):
    more = served | {"model.layers.1.eh_proj.weight": spec("model.layers.1.eh_proj.weight", 4, 8)}
    check_exported(exported(), more, config(), "bfloat16")


def test_an_index_is_followed_when_there_are_several_files(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    with pytest.raises(WeightSyncError, match=r"model-2\.safetensors not found"):
        served_specs(tmp_path)
    save_file({"b": torch.zeros(3, dtype=torch.int64)}, tmp_path / "model-2.safetensors")
    assert served_specs(tmp_path)["b"] == spec("b", 3, dtype="int64")
    with pytest.raises(WeightSyncError, match="safetensors not found"):
        served_specs(tmp_path / "nowhere")
