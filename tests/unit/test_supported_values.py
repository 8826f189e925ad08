"""What `async-rl check` refuses as the trainer's ranks would: values of config.json, fields of Megatron."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_rl.cli.main import main
from async_rl.config import Config, load_config
from async_rl.errors import ConfigError
from tests.support.run_config import write_run
from trainer import passthrough, supported_values
from trainer.passthrough import ALLOWED, check_megatron_settings, megatron_fields, row_multiple
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


# -- fields of Megatron ---------------------------------------------------------------------------------


EXPERTS = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128}
SHARED = EXPERTS | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 128}


def config_with(
    folder: Path, passed: Mapping[str, Any], model: Mapping[str, Any] = EXPERTS, **trainer: Any
) -> Config:
    file = write_run(folder, **model)
    changes = {"megatron": dict(passed), **trainer}
    return load_config(file, [f"trainer.{key}={json.dumps(value)}" for key, value in changes.items()])


def changed(config: Config, passed: Mapping[str, Any], **trainer: Any) -> Config:
    replaced = msgspec.structs.replace(config.trainer, megatron=dict(passed), **trainer)
    return msgspec.structs.replace(config, trainer=replaced)


def test_every_field_that_may_be_set_is_of_megatron() -> None:
    fields = megatron_fields()
    assert fields is not None
    assert fields.keys() >= ALLOWED


@pytest.mark.parametrize(
    ("passed", "words"),
    [
        ({"moe_router_dtyp": "fp32"}, "does not exist; near it are moe_router_dtype"),
        ({"moe_router_dtype": "float32"}, r"Invalid enum value 'float32'.*Literal\['fp32', 'fp64'\]"),
        ({"bucket_size": "large"}, "Expected `int | null`, got `str`"),
        ({"lr": 1}, "lr cannot be set: set trainer.optimizer instead"),
    ],
    ids=str,
)
def test_a_wrong_name_or_type_ends_check_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], passed: dict[str, Any], words: str
) -> None:
    file = write_run(tmp_path)
    assert main(["check", str(file), f"trainer.megatron={json.dumps(passed)}"]) == 2
    error = capsys.readouterr().err
    with pytest.raises(ConfigError, match=words):
        raise ConfigError(error)


def test_types_are_checked_by_the_ranks_when_megatron_is_not_installed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passthrough, "megatron_fields", lambda: None)
    config = config_with(tmp_path, {"moe_router_dtype": 1})
    check_megatron_settings(config)
    with pytest.raises(ConfigError, match=r"set trainer\.layout instead"):
        check_megatron_settings(changed(config, {"sequence_parallel": True}))


def test_fields_of_gpus_are_refused_on_a_cpu(tmp_path: Path) -> None:
    config = config_with(tmp_path, {}, device="cpu")
    values = {"moe_token_dispatcher_type": "flex", "fp8": "hybrid", "attention_backend": "flash"}
    switches = ("moe_enable_deepep", "gradient_accumulation_fusion", "moe_router_fusion")
    for name, value in {**values, **dict.fromkeys(switches, True)}.items():
        with pytest.raises(ConfigError, match=r"GPUs"):
            check_megatron_settings(changed(config, {name: value}))
        if value is True:
            check_megatron_settings(changed(config, {name: False}))


PRECISE = {"use_precision_aware_optimizer": True}
OFFLOAD = PRECISE | {"optimizer_cpu_offload": True}
FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}
DEEPEP = FLEX | {"moe_enable_deepep": True}
TWO_RANKS = {"layout": {"ep": 2}, "num_ranks": 2}
SELECTIVE = {"recompute": "selective"}
OVERLAP = {"moe_shared_expert_overlap": True}


@pytest.mark.parametrize(
    ("passed", "model", "trainer", "words"),
    [
        ({"moe_token_dispatcher_type": "allgather"}, EXPERTS, {}, "varying lengths"),
        (FLEX, EXPERTS, {}, r"set trainer\.layout\.ep above 1"),
        ({"moe_enable_deepep": True}, EXPERTS, {}, "set moe_token_dispatcher_type=flex"),
        (DEEPEP | {"moe_flex_dispatcher_backend": "hybridep"}, EXPERTS, TWO_RANKS, "names another backend"),
        (FLEX | OVERLAP, SHARED, TWO_RANKS, "with moe_token_dispatcher_type=alltoall only"),
        (OVERLAP, EXPERTS, {}, "no shared experts"),
        ({"moe_router_fusion": True}, EXPERTS, {}, r"set routing\.replay=off"),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, EXPERTS, {}, "which checkpoints do not hold"),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, EXPERTS | {"hidden_size": 192}, {}, "128 values"),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, EXPERTS, {"lora": {}}, r"rounded.*set trainer\.lora=null"),
        (OVERLAP, SHARED, {"lora": {"targets": ["mlp"]}}, r"or mlp out of trainer\.lora\.targets"),
        ({"fp8_recipe": "mxfp8"}, EXPERTS, {}, "set fp8 to"),
        ({"optimizer_cpu_offload": True}, EXPERTS, {}, "set use_precision_aware_optimizer=true"),
        (OFFLOAD | {"optimizer_offload_fraction": 1.5}, EXPERTS, {}, "at most 1"),
        (OFFLOAD | {"exp_avg_dtype": "bfloat16"}, EXPERTS, {}, "torch's AdamW, keeps its moments in float32"),
        (PRECISE | {"exp_avg_dtype": "uint8"}, EXPERTS, {}, "scales, which checkpoints do not hold"),
        ({"bucket_size": 1000}, EXPERTS, {}, r"trainer\.overlap_grad_reduce=true"),
        ({"recompute_modules": ["moe"]}, EXPERTS, {}, r"trainer\.recompute=selective"),
        ({"recompute_modules": ["mla_up_proj"]}, EXPERTS, SELECTIVE, "latent attention"),
        (OVERLAP | {"recompute_modules": ["shared_experts"]}, SHARED, SELECTIVE, "leave one of them out"),
    ],
    ids=str,
)
def test_values_that_do_not_go_together_are_refused(
    tmp_path: Path, passed: dict[str, Any], model: dict[str, Any], trainer: dict[str, Any], words: str
) -> None:
    config = config_with(tmp_path, passed, model, **trainer)
    with pytest.raises(ConfigError, match=words):
        check_megatron_settings(config, on_gpu=True)


def test_shared_devices_need_the_whole_optimizer_on_the_host(tmp_path: Path) -> None:
    config = config_with(tmp_path, OFFLOAD | {"optimizer_offload_fraction": 0.5})
    placement = msgspec.structs.replace(config.placement, shared=True)
    with pytest.raises(ConfigError, match=r"set optimizer_offload_fraction=1\.0"):
        check_megatron_settings(msgspec.structs.replace(config, placement=placement), on_gpu=True)


def test_layers_of_transformer_engine_need_half_precision(tmp_path: Path) -> None:
    config = config_with(tmp_path, {"moe_permute_fusion": True})
    float32 = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="float32"))
    with pytest.raises(ConfigError, match=r"set model\.dtype=bfloat16"):
        check_megatron_settings(float32, on_gpu=True)


def test_rows_are_a_multiple_of_what_products_in_fp8_need() -> None:
    assert row_multiple({}, 2) == 1
    assert row_multiple({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, 2) == 16
    assert row_multiple({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, 2) == 32
    assert [row_multiple({"fp8": "e4m3", "fp8_recipe": "blockwise"}, tp) for tp in (1, 2)] == [16, 128]
