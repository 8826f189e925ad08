"""The Ray that a run starts: where its processes look for modules, and where its sockets are."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from async_rl.config import parse_config
from async_rl.placement.actors import ActorSetup, RankActor
from async_rl.placement.local_ray import connect_ray, disconnect_ray, scratch_folder

pytestmark = [pytest.mark.real, pytest.mark.ray, pytest.mark.timeout(300)]

WORKER = """
import statistics

import megatron.core


class Worker:
    def __init__(self, config, rank, world_size, init_address):
        self.mean = statistics.mean([1, 3])

    def found(self):
        return self.mean, megatron.core.__file__
"""


async def test_a_local_file_shadows_no_package_and_a_long_tmpdir_is_avoided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    (long := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.chdir(tmp_path)
    for name in ("statistics", "megatron", "mbridge", "ray", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported by mistake')\n")
    (tmp_path / "worker_of_mine.py").write_text(WORKER)
    (tmp_path / "marker").write_text("here")
    config = parse_config({"model": {"path": "m"}, "data": {"path": "x.jsonl"}})
    scratch = scratch_folder(tmp_path / "run")
    try:
        await connect_ray(config, scratch)
        node = ray.get_runtime_context().get_node_id()
        actor = ray.remote(RankActor).options(num_cpus=0.001).remote(0.0)
        await actor.join_run.remote(ActorSetup(os.getcwd(), str(tmp_path / "marker"), "here", node), None)
        await actor.make_worker.remote("worker_of_mine:Worker", {}, 0, 1, "")
        mean, core = await actor.call_worker.remote("found")
        assert mean == 2
        assert Path(core).is_relative_to(sys.prefix) or "site-packages" in core
    finally:
        await disconnect_ray()
        shutil.rmtree(scratch, ignore_errors=True)
