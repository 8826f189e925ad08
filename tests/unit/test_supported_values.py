"""`async-rl check` reads config.json as the trainer's ranks do, and refuses what they would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.cli.main import main
from async_rl.errors import ConfigError
from tests.support.run_config import write_run
from trainer import supported_values
from trainer.supported_values import KNOWN_MODEL_TYPES, check_supported_values, fields_of

YARN = {"rope_type": "yarn", "factor": 4.0}
GIVEN: list[dict[str, Any]] = [
    {},
    {"rope_scaling": None, "attention_bias": True},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "hidden_act": "gelu"},
    {"rope_scaling": YARN, "max_position_embeddings": 512},
    {"rope_parameters": {**YARN, "rope_theta": 5e5}, "max_position_embeddings": 512},
    {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 65536,
        "rope_theta": 5e5,
    },
    {"norm_topk_prob": True, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    {"quantization_config": {"quant_method": "fp8"}, "moe_layer_freq": 2, "scoring_func": "softmax"},
]


@pytest.mark.parametrize("kind", KNOWN_MODEL_TYPES)
def test_fields_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    from trainer.megatron.architectures import load_hf_config

    for given in GIVEN:
        config = {"model_type": kind, "max_position_embeddings": 4096, **given}
        (tmp_path / "config.json").write_text(json.dumps(config))
        theirs, ours = load_hf_config(tmp_path), fields_of(config)
        rope = ours.pop("rope_parameters")
        assert rope == {name: theirs.rope_parameters[name] for name in rope}
        ours.pop("rope_scaling", None)
        ours.pop("rope_theta", None)
        supported = supported_values._OF_ANY | supported_values._SUPPORTED[kind]
        for name in ours.keys() | {"norm_topk_prob", "num_experts_per_tok"}:
            lacking = supported[name][0] if name in supported else "absent"
            assert ours.get(name, "absent") == getattr(theirs, name, lacking), (name, given)


@pytest.mark.parametrize("kind", KNOWN_MODEL_TYPES)
def test_the_defaults_of_each_type_are_supported(kind: str) -> None:
    given = {"topk_group": 4} if kind in ("deepseek_v3", "kimi_k2") else {}
    check_supported_values({"model_type": kind, "max_position_embeddings": 4096, **given}, "m")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; the trainer supports only 'silu' for qwen3_moe"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"use_sliding_window": None}, "use_sliding_window = None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters.rope_type = 'yarn'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (
            {"num_experts_per_tok": 1, "norm_topk_prob": True},
            "every gate is 1 and its router has no",
        ),
    ],
)
def test_check_refuses_what_ranks_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: str
) -> None:
    path = write_run(tmp_path, **change)
    assert main(["check", str(path)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama", {"bias": True}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"rope_is_neox_style": False}),
        ("qwen2", {"original_num_attention_heads": 2}),
        ("qwen3_moe", {"compression_config": {"quant_method": "fp8"}}),
        ("qwen3_moe", {"final_logit_softcapping": 30.0}),
        ("deepseek_v3", {"swiglu_limit": 7.0, "topk_group": 4}),
        ("deepseek_v3", {"norm_topk_prob": False, "topk_group": 4}),
        ("deepseek_v3", {"topk_method": "greedy", "topk_group": 4}),
        ("llama", {"attention_bias": True}),
        ("mixtral", {"sliding_window": 4096}),
    ],
)
def test_a_field_that_the_trainer_would_not_apply_is_refused(kind: str, change: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=f"{next(iter(change))} = .*; the trainer supports only .* for {kind}"
    ):
        check_supported_values({"model_type": kind, "max_position_embeddings": 4096, **change}, "m")


def test_a_rank_refuses_in_the_same_words(tmp_path: Path) -> None:
    import torch

    from trainer.megatron.architectures import bridge_for, load_hf_config

    write_run(tmp_path, hidden_act="gelu")
    model = tmp_path / "model"
    with pytest.raises(ConfigError, match="hidden_act = 'gelu'; the trainer supports only 'silu'"):
        bridge_for(load_hf_config(model), str(model), torch.float32, {})
