"""The command line of SGLang's servers, and what the launcher patches in them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from async_rl.config import Config, LoraConfig, ModelConfig, RoutingConfig, SGLangEngines, parse_config
from async_rl.engines.sglang import narrow_launcher
from async_rl.engines.sglang.server import SGLangServer, compilers_of
from async_rl.errors import EnvironmentNotReady
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
    launcher = "async_rl.engines.sglang." + ("memory_gate" if shared else "hidden_keys")
    assert (launcher in command) == (device == "cuda")  # the launcher for a CPU always installs both


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


# -- the launcher that makes SGLang send narrow ids ---------------------------------------------------


class Read:
    """Stands for a class that was read."""

    value = 1


class Changed:
    """Stands for what it has become."""

    value = 2


def test_the_program_ends_with_a_sentence_when_a_patched_class_is_not_the_one_that_was_read() -> None:
    with pytest.raises(SystemExit) as refused:
        narrow_launcher.check_source(Read)
    found = str(refused.value).split("sha256 ")[1].split(",")[0]
    narrow_launcher.check_source(Read, expected=found)
    with pytest.raises(SystemExit, match=r"Changed as they are in sglang 0\.5\.23.*differs"):
        narrow_launcher.check_source(Changed, expected=found)


def test_the_program_ends_with_a_sentence_when_another_version_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.24")
    with pytest.raises(SystemExit, match=r"patches sglang 0\.5\.23, found 0\.5\.24"):
        narrow_launcher.install([0], 8)


def make_server(folder: Path, *, narrow: bool, routing: bool = True) -> SGLangServer:
    config = (
        '{"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, '
    )
    config += '"mlp_only_layers": [1], "vocab_size": 10, "max_position_embeddings": 64}'
    (folder / "config.json").write_text(config)
    settings = Config(
        engine=SGLangEngines(narrow_routing=narrow, device="cpu"),
        model=ModelConfig(path=str(folder)),
        routing=RoutingConfig(replay="r3" if routing else "off"),
    )
    return SGLangServer(settings, index=0, log_dir=folder)


async def test_no_server_is_started_when_another_version_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.24")
    server = make_server(tmp_path, narrow=True)
    with pytest.raises(EnvironmentNotReady, match=r"found 0\.5\.24.*engine\.narrow_routing=false"):
        await server.start()
    assert server.pid is None


def test_layers_and_experts_are_on_the_command_line_when_the_engine_is_to_narrow(tmp_path: Path) -> None:
    command = make_server(tmp_path, narrow=True).command()
    assert command[1:6] == ["-P", "-m", "async_rl.engines.sglang.narrow_launcher", "0,2,3", "8"]
    for plain in (make_server(tmp_path, narrow=False), make_server(tmp_path, narrow=True, routing=False)):
        assert "async_rl.engines.sglang.narrow_launcher" not in plain.command()


@pytest.mark.real
@pytest.mark.sglang
def test_the_patch_is_in_place_when_a_spawned_child_imports_the_main_module_again() -> None:
    # On a GPU SGLang spawns its scheduler. The child knows the parent's arguments, and nothing else of it.
    child = """
import runpy, sys
sys.argv = ["sglang_narrow", "0,2", "300", "--device=cpu"]
from async_rl.engines.sglang import cpu_launcher
from sglang.srt.state_capturer import base, routed_experts
before = base.BaseHostCache, routed_experts.RoutedExpertsCapturer._get_local_slice
runpy.run_module("async_rl.engines.sglang.narrow_launcher", run_name="__mp_main__")
after = base.BaseHostCache, routed_experts.RoutedExpertsCapturer._get_local_slice
assert before[0] is not after[0] and before[1] is not after[1]
cache = base.BaseHostCache(5, 3, 2, name="routed_experts", device="cpu")
other = base.BaseHostCache(5, 3, 2, name="indexer_topk", device="cpu")
print(tuple(cache.buffer.shape), cache.buffer.dtype, tuple(other.buffer.shape), other.buffer.dtype)
"""
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", child], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "(5, 2, 2) torch.int16 (5, 3, 2) torch.int32"


def test_compilers_of_a_server_are_those_of_its_process_group(tmp_path: Path) -> None:
    program = str(shutil.copy("/bin/sleep", tmp_path / "ptxas"))
    inside = subprocess.Popen(["sh", "-c", f"{program} 60 & sleep 60 & wait"], start_new_session=True)
    outside = subprocess.Popen([program, "60"], start_new_session=True)
    try:
        while not compilers_of(inside.pid):
            time.sleep(0.01)
        (found,) = compilers_of(inside.pid)
        assert os.getpgid(found) == inside.pid != found
        assert compilers_of(outside.pid) == [outside.pid]
    finally:
        for process in (inside, outside):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
