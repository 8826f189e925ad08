"""The command line of an SGLang server."""

import json
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from async_rl.config import LoraConfig, parse_config
from async_rl.engines.sglang.server import SGLangServer
from tests.support.run_config import MOE, config_with

OPTIONS: Final = {
    "model.dtype=float32": "--dtype=float32",
    "engine.device=cuda": "--device=cuda",
    "engine.tp_size=2": "--tp-size=2",
    "engine.num_nodes=2": "--nnodes=2",
    "engine.host=127.0.0.2": "--host=127.0.0.2",
    "engine.context_length=5000": "--context-length=5000",
    "engine.max_running_requests=5": "--max-running-requests=5",
    "engine.max_total_tokens=7000": "--max-total-tokens=7000",
    "engine.extra_args=[--schedule-policy=lpm]": "--schedule-policy=lpm",
}


def command_of(folder: Path, *overrides: str) -> list[str]:
    """Return the command of a server with these settings, on a CPU unless they say otherwise."""
    (folder / "config.json").write_text(json.dumps(MOE))
    config = config_with(*overrides, model={"path": str(folder)}, engine={"device": "cpu"})
    return SGLangServer(config, index=0, log_dir=folder).command()


@pytest.mark.parametrize("override", OPTIONS)
def test_a_setting_is_on_the_command_line_when_it_differs_from_its_default(
    tmp_path: Path, override: str
) -> None:
    before = "engine.tp_size=1" if override == "engine.tp_size=2" else "engine.tp_size=2"
    assert OPTIONS[override] not in command_of(tmp_path, before)
    assert OPTIONS[override] in command_of(tmp_path, before, override)


def server_of(folder: Path, device: str, *, shared: bool, adapters: LoraConfig | None = None) -> SGLangServer:
    """Return a server of a run that may share devices with a trainer, which may send adapters."""
    config = parse_config({"model": {"path": str(folder)}, "engine": {"device": device}})
    placement, trainer = (
        replace(config.placement, shared=shared),
        replace(config.trainer, lora=adapters, device=device),
    )
    return SGLangServer(replace(config, placement=placement, trainer=trainer), index=0, log_dir=folder)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_server_has_a_gate_where_it_shares_its_device(tmp_path: Path, device: str, shared: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    command = server_of(tmp_path, device, shared=shared).command()
    gate = "async_rl.engines.sglang.memory_gate"
    assert (gate in command) == (shared and device == "cuda")  # the launcher for a CPU always installs it
    assert ("sglang.launch_server" in command) == (not shared and device == "cuda")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("adapters", [None, LoraConfig()])
def test_a_server_keeps_its_weights_where_it_shares_its_device_and_loads_adapters(
    tmp_path: Path, shared: bool, adapters: LoraConfig | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    server = server_of(tmp_path, "cuda", shared=shared, adapters=adapters)
    keeps = shared and adapters is not None
    assert ("--enable-weights-cpu-backup" in server.command()) == keeps
    assert ("TMS_RETAIN_CPU_BACKUP" in server.environment(tmp_path)) == keeps


def test_a_server_loads_the_model_of_the_config(tmp_path: Path) -> None:
    assert f"--model-path={tmp_path}" in command_of(tmp_path)


@pytest.mark.parametrize("seed", [0, 20261128, 2**62 - 1])
def test_engines_have_seeds_of_their_own_that_numpy_takes(tmp_path: Path, seed: int) -> None:
    config = parse_config({"model": {"path": str(tmp_path)}, "run": {"seed": seed}})
    servers = [SGLangServer(config, index=index, log_dir=tmp_path) for index in range(3)]
    words = [word for server in servers for word in server.command() if word.startswith("--random-seed=")]
    found = {int(word.partition("=")[2]) for word in words}
    assert len(found) == 3
    assert all(0 <= each < 2**32 for each in found)
