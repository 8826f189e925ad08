"""examples/gpu: each recipe fits the model that it names onto the GPUs that it names, as its page says.

Dimensions of the models are in `tests/support/model_configs`; each file names its source.
"""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import pytest

import trainer
from async_rl.cli.main import main
from async_rl.cli.plan import computed_speeds, workload_for
from async_rl.config import Config, SGLangEngines, load_config
from async_rl.planning.update_costs import estimate_update
from async_rl.run.memory_estimate import estimate_devices, version_bytes
from async_rl.run.placement_table import placement_table
from trainer import validate

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "gpu"
NAMES = sorted(path.parent.name for path in RECIPES.glob("*/config.yaml"))
PAGE = (ROOT / "docs" / "guide" / "gpu-recipes.md").read_text(encoding="utf-8")
GPU = 80 * 10**9


def model_config(name: str) -> Path:
    model = name.rpartition("_")[0].removesuffix("_lora")
    return ROOT / "tests" / "support" / "model_configs" / f"{model}.json"


@pytest.fixture(params=NAMES)
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, list[str]]:
    """The name of a recipe, and the words of a command line: its config and a folder with its model."""
    shutil.copy(model_config(request.param), tmp_path / "config.json")
    return request.param, [str(RECIPES / request.param / "config.yaml"), f"model.path={tmp_path}"]


def load(words: list[str]) -> Config:
    return load_config(Path(words[0]), words[1:])


def test_a_recipe_fits_into_80_gb(recipe: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    _, words = recipe
    assert main(["check", *words, "--memory", "--gpu", "80GB"]) == 0
    assert "fits into 80GB with" in capsys.readouterr().out


def test_the_trainer_takes_layout_loss_and_settings_of_a_recipe(recipe: tuple[str, list[str]]) -> None:
    config = load(recipe[1])
    validate.check(config)
    layout = config.trainer.layout
    assert config.trainer.num_ranks % (layout.pp * layout.ep * layout.etp) == 0
    assert config.trainer.micro_batch_tokens >= config.rollout.max_context_tokens


def test_a_recipe_takes_as_many_gpus_as_its_name_says(recipe: tuple[str, list[str]]) -> None:
    name, words = recipe
    config = load(words)
    assert isinstance(config.engine, SGLangEngines)
    engines = config.engine.num_engines * config.engine.tp_size
    ranks = 0 if config.placement.shared else config.trainer.num_ranks
    gpus = int(name.rpartition("_")[2].removesuffix("gpu"))
    assert engines + ranks == gpus
    title, *lines = placement_table(config, 8)
    assert title.startswith(f"placement on {math.ceil(gpus / 8)} nodes with 8 GPUs")
    assert [line for line in lines if "free" in line] == ([] if gpus > 1 else lines)


def test_a_recipe_has_time_to_move_its_model_at_half_a_gigabyte_per_second(
    recipe: tuple[str, list[str]],
) -> None:
    config = load(recipe[1])
    assert isinstance(config.engine, SGLangEngines)
    limits = {
        "a start of an engine": config.engine.start_timeout_s,
        "a start of the trainer": config.trainer.start_timeout_s,
        "a version": config.weights.timeout_s,
    }
    takes_s = trainer.estimate_memory(config, cuda=True).model_bytes / 0.5e9
    assert {what: limit_s for what, limit_s in limits.items() if limit_s < takes_s} == {}


def test_a_trainer_has_time_to_restart_at_half_a_gigabyte_per_second_and_node(
    recipe: tuple[str, list[str]],
) -> None:
    """It reads the model's files, and its checkpoint twice: to compare checksums, and to load it."""
    config = load(recipe[1])
    if config.adapters is not None:
        return  # a checkpoint has megabytes
    estimate = trainer.estimate_memory(config, cuda=True)
    checkpoint_bytes = 7 * estimate.model_bytes  # weights in bfloat16 and float32, two moments in float32
    nodes = math.ceil(config.trainer.num_ranks / 8)
    takes_s = (estimate.model_bytes + 2 * checkpoint_bytes / nodes) / 0.5e9
    assert takes_s < config.trainer.start_timeout_s


def test_an_optimizer_on_the_host_has_several_cores(recipe: tuple[str, list[str]]) -> None:
    config = load(recipe[1])
    if config.trainer.megatron.get("optimizer_cpu_offload"):
        assert config.placement.resources_per_rank["CPU"] >= 8


def test_the_page_has_the_figures_of_a_recipe(recipe: tuple[str, list[str]]) -> None:
    name, words = recipe
    assert row_of(name, load(words)) in PAGE.splitlines()


def test_the_page_has_the_speeds_that_a_plan_computes(recipe: tuple[str, list[str]]) -> None:
    name, words = recipe
    config = load(words)
    workload, engine = workload_for(config, None, {}), config.engine
    speeds = computed_speeds(config, workload, "H100")
    step_s = speeds["decode_base_s"] + engine.max_running_requests * speeds["decode_per_call_s"]
    pause_s = estimate_update(config, workload, version_bytes(config), engine.num_engines, 8).pause_s
    prefill, trained = (round(speeds[f"{kind}_tokens_per_s"]) for kind in ("prefill", "train"))
    assert any(
        line.startswith(f"| `{name}` | {step_s * 1e3:.1f} ms | {prefill:,} | {trained:,} | {pause_s:.3g} s |")
        for line in PAGE.splitlines()
    )


def row_of(name: str, config: Config) -> str:
    *ranks, engine = estimate_devices(config, GPU)
    fullest = max(ranks, key=lambda use: use.needs)
    host = max(sum(use.host.values()) for use in ranks)
    slots = re.search(r"([\d,]+) tokens of KV cache", engine.moment)
    assert slots is not None
    spare = (GPU - max(use.needs for use in (*ranks, engine))) / 1e9
    return (
        f"| `{name}` | {_gb(sum(fullest.parts.values()))} | {_gb(fullest.parts['weights'])} "
        f"| {_gb(fullest.parts['gradients'])} | {_gb(fullest.parts.get('optimizer', 0))} | {_gb(host)} "
        f"| {_gb(engine.parts['weights'])} | {_gb(sum(engine.host.values()))} | {slots[1]} | {spare:.3g} GB |"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
