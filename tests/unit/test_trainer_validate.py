"""What is refused before a trainer is started: models it does not know, layouts they cannot be cut by."""

import pytest

from async_rl.cli.main import main
from async_rl.config import LayoutConfig, load_config
from async_rl.errors import ConfigError
from tests.support.run_config import config_with, write_run
from trainer.memory.dimensions import dimensions_of
from trainer.supported_values import KNOWN_MODEL_TYPES
from trainer.validate import check, check_adapters, check_layout

MODEL = dimensions_of(
    {
        "model_type": "mixtral",
        "num_hidden_layers": 6,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"tp": 2}, "without expert parallelism set etp=2"),
        ({"tp": 3, "etp": 3}, "4 attention heads in 2 groups: tp must divide the heads"),
        ({"ep": 3}, "8 experts: ep must divide them"),
        ({"pp": 4}, "6 layers: pp must divide them"),
        ({"pp": 2, "vpp": 2}, "so must pp times vpp"),
        ({"pp": 2, "first_stage_layers": 6}, "leaves 0 of the model's 6 for 1 others"),
        (
            {"pp": 2, "first_stage_layers": 1, "last_stage_layers": 4},
            "leaves 1 of the model's 6 for 0 others",
        ),
        ({"pp": 2, "vpp": 2, "first_stage_layers": 1}, "and every stage's among its vpp chunks"),
        ({"ep": 2, "etp": 2}, "has tp=1 and etp=2"),
    ],
)
def test_a_layout_is_refused_when_the_model_does_not_fit(layout, words):
    with pytest.raises(ConfigError, match=words):
        check_layout(LayoutConfig(**layout), MODEL)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ({"tp": 2, "etp": 2, "pp": 3, "vpp": 2}, MODEL),
        ({"pp": 4, "first_stage_layers": 1, "last_stage_layers": 1}, MODEL),
        ({"pp": 2, "first_stage_layers": 1, "last_stage_layers": 5}, MODEL),
        ({"pp": 2, "vpp": 2, "first_stage_layers": 2}, MODEL),
        ({"tp": 2}, MODEL._replace(experts=0)),
        ({"tp": 4, "etp": 4}, MODEL),  # two ranks share a group
        ({"tp": 2, "etp": 2}, MODEL._replace(vocabulary=97)),
    ],
)
def test_a_layout_is_taken_when_everything_divides(layout, model):
    check_layout(LayoutConfig(**layout), model)


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        (MODEL._replace(heads=12, groups=6), {"tp": 4, "etp": 4}, "divide the groups or be a multiple"),
        (MODEL._replace(vocabulary=9), {"tp": 4, "etp": 4}, "9 tokens: the last rank would hold none"),
        (MODEL._replace(experts=0), {"ep": 2}, "no experts: set ep=1"),
    ],
)
def test_a_layout_is_refused_when_another_model_does_not_fit(model, layout, words):
    with pytest.raises(ConfigError, match=words):
        check_layout(LayoutConfig(**layout), model)


@pytest.mark.parametrize(
    ("model", "overrides", "words"),
    [
        (
            {"model_type": "gemma3", "num_experts": 0},
            ["routing.replay=off"],
            f"a model of type 'gemma3'; the trainer supports {', '.join(KNOWN_MODEL_TYPES)}",
        ),
        ({"model_type": "gpt_oss"}, [], "sinks and sliding windows"),
        ({"num_attention_heads": 6}, ["trainer.num_ranks=4", "trainer.layout={tp: 4, etp: 4}"], "6 attent"),
        ({"num_attention_heads": None}, [], "does not say 'num_attention_heads'"),
    ],
)
def test_a_check_says_so_before_anything_is_started(tmp_path, capsys, model, overrides, words):
    path = write_run(tmp_path, **model)
    for command in ("check", "train"):
        assert main([command, str(path), *overrides]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_another_package_is_asked_when_it_is_started(tmp_path):
    path = write_run(tmp_path, model_type="deepseek_v2", first_k_dense_replace=1)
    assert main(["check", str(path), "trainer.worker=tests.support.recording_worker:RecordingWorker"]) == 0


def model_config(*, experts: int, dense_layers: int = 0, shared: int = 0, latent: bool = False) -> dict:
    config = {
        "model_type": "deepseek_v3" if latent else "glm4_moe" if experts else "qwen3",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 96,
        "max_position_embeddings": 512,
        "attention_bias": False,
    }
    if experts:
        config |= {
            "n_routed_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": shared,
            "first_k_dense_replace": dense_layers,
        }
    if latent:
        config |= {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    return config


@pytest.mark.parametrize(
    ("targets", "model", "words"),
    [
        (["attention", "experts"], model_config(experts=0), "has no experts: leave experts out"),
        (["mlp"], model_config(experts=4), "neither dense layers nor shared experts: leave mlp out"),
        (["attention"], model_config(experts=4, latent=True), "without q_lora_rank.*set .*sync=merged"),
    ],
)
def test_adapters_are_refused_when_the_model_lacks_their_targets(targets, model, words):
    with pytest.raises(ConfigError, match=words):
        check_adapters(with_adapters(targets), model)


@pytest.mark.parametrize(
    ("targets", "model"),
    [
        (["attention", "mlp"], model_config(experts=0)),
        (["attention", "mlp", "experts"], model_config(experts=4, dense_layers=1)),
        (["mlp"], model_config(experts=4, shared=1)),
        (["experts"], model_config(experts=4, latent=True)),
    ],
)
def test_adapters_are_taken_when_the_model_has_their_targets(targets, model):
    check_adapters(with_adapters(targets), model)
    latent = model_config(experts=4, latent=True)  # whose engines serve merged weights, or split queries
    check_adapters(with_adapters(["attention"], sync="merged"), latent)
    check_adapters(with_adapters(["attention"]), latent | {"q_lora_rank": 8})


def with_adapters(targets, sync="adapter"):
    return config_with(trainer={"lora": {"targets": targets, "sync": sync}})


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, True),
        ({"num_experts_per_tok": 1, "norm_topk_prob": False}, False),
        ({"num_experts_per_tok": 1}, False),
        ({"num_experts_per_tok": 2, "norm_topk_prob": True}, False),
        ({"num_experts_per_tok": 1, "model_type": "mixtral", "num_local_experts": 8}, True),
    ],
)
def test_a_router_that_cannot_learn_is_refused_before_the_start(tmp_path, model, refused):
    config = load_config(write_run(tmp_path, **model))
    if refused:
        with pytest.raises(ConfigError, match="every gate is 1"):
            check(config)
    else:
        check(config)
