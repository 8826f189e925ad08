"""The launcher that makes SGLang send narrow ids: when it refuses, and which processes it reaches."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.config import Config, ModelConfig, RoutingConfig, SGLangEngines
from async_rl.engines.sglang import narrow_launcher
from async_rl.engines.sglang.server import SGLangServer
from async_rl.errors import EnvironmentNotReady


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
