"""The parameters that memory is estimated from are those of the models, over any layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import LayoutConfig
from async_rl.engines.model_facts import ARCHITECTURES, load_facts, read_config
from async_rl.engines.model_files import check_weights
from tests.support import tiny_model
from trainer.memory import activations
from trainer.memory.activations import in_flight
from trainer.memory.dimensions import chunks_of, dimensions_of, parameters_of
from trainer.supported_values import KNOWN_MODEL_TYPES

ROOT = Path(__file__).parents[2]

MODELS: dict[str, Any] = {
    "deepseek_v3": tiny_model.build_tiny_deepseek_v3,
    "glm4_moe": tiny_model.build_tiny_glm4_moe,
    "kimi_k2": tiny_model.build_tiny_kimi_k2,
    "llama": lambda path: tiny_model.build_tiny_dense(path, "llama"),
    "mixtral": tiny_model.build_tiny_mixtral,
    "qwen2": lambda path: tiny_model.build_tiny_dense(path, "qwen2"),
    "qwen2_moe": lambda path: tiny_model.build_tiny_qwen2_moe(path, dense_layers=(1,)),
    "qwen3": tiny_model.build_tiny_qwen3,
    "qwen3_moe": lambda path: tiny_model.build_tiny_qwen3_moe(path, dense_layers=(0,)),
}


def test_every_supported_type_is_tried() -> None:
    assert set(MODELS) == set(KNOWN_MODEL_TYPES)


@pytest.mark.parametrize("kind", MODELS)
def test_a_rank_alone_has_the_parameters_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    path = MODELS[kind](tmp_path / kind)
    with safe_open(path / "model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict
    # A bias that only selects experts is a buffer.
    trained = [shape for name, shape in shapes.items() if not name.endswith("e_score_correction_bias")]
    numbers = [math.prod(shape) for shape in trained]
    parameters = parameters_of(dimensions_of(read_config(path)), LayoutConfig(), 0)
    assert sum(map(sum, parameters)) == sum(numbers)
    check_weights(path, load_facts(path))
    assert read_config(path)["architectures"] == [ARCHITECTURES[kind]]


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_ranks_of_a_layout_have_all_parameters_together(kind: str, tmp_path: Path) -> None:
    config = read_config(MODELS[kind](tmp_path / kind)) | {"num_hidden_layers": 4}
    model = dimensions_of(config)
    layout = LayoutConfig(tp=2, pp=2, vpp=2, ep=2)
    whole = parameters_of(model, LayoutConfig(ep=2), 0)
    stages = [parameters_of(model, layout, stage) for stage in range(2)]
    # Experts are shared out over ep here; etp is 1, so tensor ranks do not divide them.
    assert sum(sum(stage.experts) for stage in stages) == sum(whole.experts)
    split = sum(sum(stage.dense) for stage in stages)
    assert sum(whole.dense) / 2 < split < sum(whole.dense)


def test_chunks_are_those_of_megatron() -> None:
    assert chunks_of(LayoutConfig(pp=2, vpp=2), 1, 8) == [range(2, 4), range(6, 8)]
    assert chunks_of(LayoutConfig(pp=3, first_stage_layers=1, last_stage_layers=2), 1, 7) == [range(1, 5)]
    assert chunks_of(LayoutConfig(pp=2, first_stage_layers=1), 1, 4) == [range(1, 4)]


def test_a_stage_keeps_as_many_micro_batches_as_its_schedule_runs_ahead() -> None:
    assert [in_flight(stage, 4, 1, 8) for stage in range(4)] == [[4], [3], [2], [1]]
    assert in_flight(0, 4, 1, 2) == [2]
    assert in_flight(0, 2, 2, 8) == [3, 2]
    assert in_flight(1, 2, 2, 8) == [2, 1]


@pytest.mark.parametrize(
    ("tp", "heads"),
    [
        # The projection's output; the norm's input, in the order of heads; rotated; results.
        (2, (16 + 2 * 2) + 16 + (16 + 2) + 16),
        # One group: its heads are in order.
        (4, (8 + 2) + (8 + 1) + 8),
        # Half a group: the projection's outputs of all ranks are gathered, 32 queries, 4 keys and 4 values.
        (8, (32 + 2 * 4) + (4 + 1) + 4),
    ],
)
def test_tensor_ranks_beyond_the_groups_keep_what_they_gather(tp: int, heads: int) -> None:
    source = ROOT / "tests" / "support" / "model_configs" / "qwen3_30b_a3b.json"
    model = dimensions_of(json.loads(source.read_text(encoding="utf-8")))
    assert (model.heads, model.groups) == (32, 4)
    part = activations.Slice(tokens=64, tp=tp, cp=1, etp=1, longest=64, element=2, fused=True)
    normalisers = 64 * 32 // tp * 4
    assert activations.attention_bytes(model, part) == 64 * heads * model.head * 2 + normalisers
