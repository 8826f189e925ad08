"""`trainer.megatron`: what is refused and why, and what rows of fp8 need."""

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
from trainer import passthrough
from trainer.passthrough import ALLOWED, check_megatron_settings, megatron_fields, row_multiple

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
