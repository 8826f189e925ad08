"""Models of `models`: engines of their own, with the machinery of the policy's, that are never updated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest.mock import AsyncMock

import pytest

from async_rl.config import Config, SGLangEngines, apply_override, load_config, parse_config
from async_rl.engine_protocol import EngineHealth
from async_rl.engines.frozen_models import FrozenModel
from async_rl.engines.lease import EngineState
from async_rl.engines.model_facts import load_facts
from async_rl.errors import ConfigError
from async_rl.observability.metrics import Metrics
from async_rl.run.preflight import check_config
from async_rl.runtime.supervision import services
from tests.support.run_config import MOE, config_with, write_run, write_weights
from verification.simulation.simulated_models import SimulatedModel

TREE: Final = {"model": {"path": "policy"}, "models": {"teacher": {"path": "big"}}}


def config_of(*overrides: str) -> Config:
    tree: dict[str, Any] = json.loads(json.dumps(TREE))
    return config_with(*overrides, **tree)


def engines_of(config: Config) -> SGLangEngines:
    assert isinstance(config.engine, SGLangEngines)
    return config.engine


SETTINGS: Final[dict[str, Callable[[Config], Any]]] = {
    "path=huge": lambda config: config.model.path,
    "dtype=float32": lambda config: config.model.dtype,
    "num_engines=3": lambda config: config.engine.num_engines,
    "urls=[http://a:1]": lambda config: engines_of(config).urls,
    "tp_size=2": lambda config: engines_of(config).tp_size,
    "num_nodes=2": lambda config: engines_of(config).num_nodes,
    "context_length=5000": lambda config: engines_of(config).context_length,
    "max_running_requests=5": lambda config: config.engine.max_running_requests,
    "max_total_tokens=700": lambda config: engines_of(config).max_total_tokens,
    "extra_args=[--schedule-policy=lpm]": lambda config: engines_of(config).extra_args,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_engines_of_a_model_have_its_settings(setting: str) -> None:
    key = setting.partition("=")[0]
    changed = config_of("models.teacher.tp_size=2", f"models.teacher.{setting}").of_model("teacher")
    tree: dict[str, Any] = {}
    apply_override(tree, setting)
    assert SETTINGS[setting](changed) == tree[key]
    assert SETTINGS[setting](config_of().of_model("teacher")) != tree[key]


def test_the_rest_of_their_settings_is_that_of_the_policys_engines() -> None:
    config = config_of("engine.stall_s=7", "engine.tp_size=4", "engine.extra_args=[--x]", "run.seed=3")
    frozen = config.of_model("teacher")
    assert (engines_of(frozen).stall_s, frozen.run.seed, frozen.routing.replay) == (7, 3, "off")
    assert (engines_of(frozen).tp_size, engines_of(frozen).extra_args) == (1, [])


def test_a_teacher_with_a_shorter_context_is_refused_at_the_start(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "config.json").write_text(json.dumps(MOE | {"max_position_embeddings": 100}))
    write_weights(tmp_path / "big")
    models = f"models={{teacher: {{path: {tmp_path / 'big'}}}}}"
    config = load_config(path, [models, "trainer.loss.teacher.model=teacher"])
    with pytest.raises(ConfigError, match="has a context of 100 tokens"):
        check_config(config)
    assert check_config(load_config(path, [models]))  # a judge may have one


def frozen_model(folder: Path, *, num_engines: int = 2) -> tuple[FrozenModel, SimulatedModel]:
    """A model on simulated engines, in the time of the running loop."""
    (folder / "config.json").write_text(json.dumps(MOE))
    tree = {
        "model": {"path": "policy"},
        "models": {"judge": {"path": str(folder), "num_engines": num_engines}},
        "engine": {
            "kind": "simulated",
            "prefill_tokens_per_s": 3000.0,
            "max_outage_s": 5.0,
        },
    }
    config = parse_config(tree).of_model("judge")
    processes = SimulatedModel("judge", config, load_facts(folder), restart_s=0.5)
    clock = asyncio.get_running_loop().time
    return FrozenModel("judge", config, processes, Metrics(), clock), processes


async def test_an_engine_with_other_weights_than_before_does_not_serve(tmp_path: Path) -> None:
    """Somebody else has changed them."""
    model, processes = frozen_model(tmp_path, num_engines=1)
    await model.start_engines()
    async with services(**model.services):
        await asyncio.sleep(0.1)
        changed = EngineHealth(weight_version=3, model_path="")
        processes.engines[0].health = AsyncMock(return_value=changed)  # type: ignore[method-assign]
        await asyncio.sleep(12.0)  # a probe
        assert not model.pool.engines(EngineState.SERVING)
        assert "its weights must not change in a run" in str(model.pool.error_of("judge-0"))


async def test_a_server_with_another_model_is_refused() -> None:
    config = config_of("models.teacher.urls=['http://127.0.0.1:1']").of_model("teacher")
    engine = AsyncMock(engine_id="teacher-0")
    engine.health.return_value = EngineHealth(weight_version=0, model_path="/models/other")
    processes = AsyncMock(**{"start_engines.return_value": [engine]})
    model = FrozenModel("teacher", config, processes, Metrics(), asyncio.get_running_loop().time)
    with pytest.raises(ConfigError, match=r"serves /models/other, but models.teacher.path is big"):
        await model.start_engines()
