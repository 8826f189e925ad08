"""Placement of processes in a cluster, and the message when there is no capacity."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray
from ray._private import ray_constants

from async_rl.codec import ALIGNMENT
from async_rl.config import to_builtins
from async_rl.engines.sglang.connect import check_shares_memory, external_keys, node_of
from async_rl.errors import ConfigError, EnvironmentNotReady, WeightSyncError
from async_rl.placement import actors, placements
from async_rl.placement.actors import ActorSetup, EngineActor, enter_driver_folder
from async_rl.placement.frame_readers import SharedFrames
from async_rl.placement.local_ray import connect_ray
from async_rl.placement.placements import ClusterNode, Placements, group_by_node, no_capacity
from async_rl.placement.shared_devices import Device, assign_devices, ranks_on
from async_rl.run.placement_table import (
    check_resources,
    check_shared_gpus,
    placement_table,
    processes_per_node,
)
from async_rl.runtime.devices import bind_to_numa_node
from tests.support.run_config import MOE, config_of, config_with, write_weights


@pytest.mark.parametrize(
    ("nodes", "order"),
    [
        ("a", [0]),
        ("abab", [0, 2, 1, 3]),
        ("abbcbb", [1, 2, 4, 5, 0, 3]),  # the fullest first: groups of 2 and 4 do not straddle it
        ("cbcb", [0, 2, 1, 3]),  # not by name
    ],
)
def test_ranks_of_a_node_are_neighbours_when_places_are_mixed(nodes, order):
    assert group_by_node(list(nodes)) == order


def test_the_refusal_names_what_was_asked_and_what_each_node_has_when_there_is_no_capacity():
    nodes = [
        ClusterNode("10.0.0.1", {"CPU": 4, "memory": 1e9, "GPU": 2}, {"CPU": 4, "GPU": 1}),
        ClusterNode("10.0.0.2", {"CPU": 4, "GPU": 8, "engines": 1}, {"CPU": 0.5}),
    ]
    asked, *free = no_capacity("engine", {"GPU": 4, "CPU": 1, "engines": 1}, 3, "SPREAD", nodes).splitlines()
    assert "3 x engine (1 CPU, 4 GPU, 1 engines each" in asked
    assert free == [
        "  10.0.0.1: 4 of 4 CPU free, 1 of 2 GPU free",
        "  10.0.0.2: 0.5 of 4 CPU free, 0 of 8 GPU free, 0 of 1 engines free",
    ]


async def test_a_process_that_does_not_start_is_said_to_ask_for_what_its_node_may_lack(monkeypatch):
    group = SimpleNamespace(id=SimpleNamespace(hex=lambda: "abc"), ready=partial(asyncio.sleep, 0))
    monkeypatch.setattr(placements, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(
        placements, "placement_group_table", lambda _: {"bundles_to_node_id": {0: "a0", 1: "b0"}}
    )
    monkeypatch.setattr(placements, "node_addresses", lambda: {"a0": "10.0.0.1"})
    monkeypatch.setattr(
        placements, "available_resources_per_node", lambda: {"a0": {"CPU": 1, "CPU_group_0_abc": 3}}
    )
    monkeypatch.setattr(
        placements, "alive_nodes", lambda: [ClusterNode("10.0.0.1", {"CPU": 12, "GPU": 2}, {"CPU": 1})]
    )
    engines = Placements(
        "engine", {"GPU": 2}, 2, "SPREAD", asked_beside={"CPU": 4}, num_beside=2, remedy="buy one"
    )
    await engines.wait_ready(1)
    ranks = engines.placements_beside([0, 0, 1])
    asks, node = (await ranks.why_missing("rank 1", 1)).splitlines()
    assert "rank 1 asks for 4 CPU on node 10.0.0.1, where 3 CPU of the run's reservation is free" in asks
    assert node == "  10.0.0.1: 1 of 12 CPU free, 0 of 2 GPU free"
    assert "on a node that is lost" in await ranks.why_missing("rank 2", 2)


def test_frames_are_read_by_their_path_and_go_with_their_owner():
    frames = SharedFrames()
    path = Path(frames.path)
    for data in (b"some rows" * 1000, b"more rows" * 10):
        begin = frames.append(data)
        assert begin % ALIGNMENT == 0
        assert path.read_bytes()[begin : begin + len(data)] == data
    number = int(path.name)
    del frames
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


@pytest.fixture
def umask_stays() -> Iterator[None]:
    before = os.umask(0o077)
    os.umask(before)
    yield
    os.umask(before)


@pytest.mark.parametrize("found", [None, "the word of another run"])
def test_an_actor_refuses_its_node_when_the_folders_are_not_the_drivers(
    tmp_path, monkeypatch, umask_stays, found
):
    monkeypatch.chdir(tmp_path)
    sign = tmp_path / ".shared"
    if found is not None:
        sign.write_text(found)
    with pytest.raises(EnvironmentNotReady, match=r"node 10\.0\.0\.7 does not see what the driver writes"):
        enter_driver_folder(ActorSetup(str(tmp_path), str(sign), "my word", "driver"), "10.0.0.7")
    sign.write_text("my word")
    enter_driver_folder(ActorSetup(str(tmp_path), ".shared", "my word", "driver"), "10.0.0.7")
    with pytest.raises(EnvironmentNotReady, match=r"node 10\.0\.0\.7 has no folder"):
        enter_driver_folder(ActorSetup(str(tmp_path / "none"), "sign", "word", "driver"), "10.0.0.7")


def test_a_server_beyond_this_machine_is_refused_when_there_is_no_key_for_it(monkeypatch):
    monkeypatch.delenv("ASYNC_RL_ENGINE_API_KEY", raising=False)
    monkeypatch.delenv("ASYNC_RL_ENGINE_ADMIN_KEY", raising=False)
    assert external_keys("http://127.0.0.7:30000") == (None, None)
    with pytest.raises(ConfigError, match=r"http://10\.0\.0\.7:30000 is open to other machines"):
        external_keys("http://10.0.0.7:30000")
    monkeypatch.setenv("ASYNC_RL_ENGINE_API_KEY", "k")
    assert external_keys("http://10.0.0.7:30000") == ("k", None)


NODES = {"driver" * 9: "10.0.0.1", "other" * 9: "10.0.0.7"}
DRIVER, OTHER = NODES


@pytest.mark.parametrize(
    ("url", "node"),
    [
        ("http://127.0.0.1:30000", DRIVER),
        ("http://localhost:30000", DRIVER),
        ("http://10.0.0.1:30000", DRIVER),
        ("http://10.0.0.7:30000", OTHER),
        ("http://10.0.0.8:30000", "10.0.0.8"),
        ("http://gpu-7:30000", "gpu-7"),
    ],
)
def test_a_url_says_which_node_a_server_is_on_when_it_can(url, node):
    assert node_of(url, DRIVER, NODES) == node


@pytest.mark.parametrize(
    ("node", "named"),
    [(OTHER, r"10\.0\.0\.7 \(node otheroth\)"), ("gpu-7", "gpu-7")],
    ids=["known", "unknown"],
)
def test_an_engine_on_another_node_is_refused_when_weights_are_sent_through_memory(node, named):
    check_shares_memory("engine-3", DRIVER, DRIVER, NODES)
    with pytest.raises(ConfigError, match=f"10.0.0.1 .*engine-3 is on {named}: set weights.transport"):
        check_shares_memory("engine-3", node, DRIVER, NODES)


@pytest.fixture
def ray_untouched(monkeypatch):
    """Restore what starting Ray sets in this process."""
    for name in (
        *("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_TOKEN", "GLOO_SOCKET_IFNAME"),
        *("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_gcs_server_port_wait_time_s"),
    ):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", ray_constants.ENABLE_RAY_CLUSTER)


@pytest.mark.parametrize("error", [Exception("the node timed out."), ConnectionError("the node timed out")])
async def test_there_is_one_clear_error_when_ray_does_not_come_up(
    tmp_path, monkeypatch, ray_untouched, error
):
    monkeypatch.setattr(ray, "init", Mock(side_effect=error))
    with pytest.raises(EnvironmentNotReady, match=r"not start Ray on this machine: the node timed out\. "):
        await connect_ray(config_of(), tmp_path)


@pytest.mark.real_time
async def test_there_is_one_clear_error_when_ray_does_not_answer(tmp_path, monkeypatch, ray_untouched):
    monkeypatch.delenv("RAY_AUTH_TOKEN")  # Ray would note, for the whole process, that there is one
    never = threading.Event()
    monkeypatch.setattr(ray, "init", lambda **arguments: never.wait())
    config = config_with("placement.ray_address='10.0.0.1:6379'")
    with pytest.raises(EnvironmentNotReady, match=r"could not join the Ray cluster at 10.0.0.1:6379 in 0 s"):
        await connect_ray(config, tmp_path, limit_s=0.05)
    never.set()


async def test_an_engines_copy_of_the_weights_is_where_the_config_says(tmp_path, monkeypatch):
    monkeypatch.setattr(actors, "die_with_parent", lambda: None)
    monkeypatch.setattr(actors, "node_address", lambda: "127.0.0.1")
    (tmp_path / "published").mkdir()
    write_weights(tmp_path / "published")
    config = {"model": {"path": "m"}, "weights": {"local_dir": str(tmp_path / "mine")}}
    actor = EngineActor(lambda *arguments, **options: None, config, 0, str(tmp_path / "logs"))
    copy = await actor.copy_version(str(tmp_path / "published"), 1)
    assert Path(copy).is_relative_to(tmp_path / "mine")


@pytest.mark.parametrize(
    ("free", "together", "size"),
    [
        ([8, 8], 8, 8),
        ([4, 4, 4, 4], 8, 4),  # engines hold half of each node: two nodes for each group
        ([16], 8, 8),
        ([6, 6, 6], 8, 2),  # only 12 would fit in units of 4
        ([7, 8, 1], 4, 1),  # only one by one do they all fit
        ([0, 0], 8, 8),  # full: they wait for whole nodes
        ([], 8, 1),
    ],
)
def test_as_many_neighbours_share_a_node_as_fit_on_one(free, together, size):
    nodes = [{"GPU": float(gpus), "CPU": 64.0} for gpus in free]
    total = [{"GPU": 8.0, "CPU": 64.0}] * len(free)
    assert processes_per_node({"GPU": 1, "CPU": 0.001}, 16, together, nodes, total) == size


def lay_out(*overrides: str, gpus: int = 8) -> list[str]:
    """Return the table of a config, without its title."""
    return placement_table(config_with(*overrides), gpus)[1:]


def test_check_shows_ranks_first_and_engines_on_what_is_left():
    assert lay_out("trainer={num_ranks: 16, layout: {ep: 8}}", "engine={num_engines: 8, tp_size: 2}") == [
        "  nodes 1-2: 8 ranks each (0-15)",
        "  nodes 3-4: 4 engines each (0-7)",
    ]
    engines, teacher = "engine={num_engines: 3, tp_size: 2}", "models={teacher: {path: t, tp_size: 4}}"
    assert lay_out("trainer={num_ranks: 4, layout: {tp: 4}}", engines, teacher) == [
        "  node 1: 4 ranks (0-3); 1 engine (2); 2 GPUs free",
        "  node 2: 2 engines (0-1); 1 teacher (0)",
    ]


def test_check_says_when_groups_span_nodes_and_engines_do():
    wide = "engine={num_engines: 2, tp_size: 16, num_nodes: 2}"
    title, *lines = placement_table(config_with("trainer={num_ranks: 32, layout: {ep: 16}}", wide), 8)
    assert title.endswith("on 8 nodes with 8 GPUs; groups of 16 ranks span nodes, in parts of 8:")
    assert lines == ["  nodes 1-4: 8 ranks each (0-31)", "  nodes 5-8: 1 part of engine each (0-1)"]
    (line,) = placement_table(config_with("engine.tp_size=16"), 8)
    assert "needs 16 GPUs of one node, and nodes have 8: raise engine.num_nodes" in line


def test_an_engine_on_several_nodes_is_refused_where_it_cannot_be_divided_or_reached():
    with pytest.raises(ConfigError, match=r"engine.num_nodes is 2 and engine.tp_size is 3"):
        config_with("engine={tp_size: 3, num_nodes: 2}")
    with pytest.raises(ConfigError, match=r"models.judge.num_nodes is 2 and models.judge.tp_size is 1"):
        config_with("models={judge: {path: j, num_nodes: 2}}")
    with pytest.raises(ConfigError, match=r"weights\.transport is tensor"):
        config_with("engine={tp_size: 2, num_nodes: 2}", "weights.transport=tensor")


def machine(root: Path, node: int, cores: str) -> None:
    """Write what the kernel and the driver say of a GPU at a NUMA node."""
    gpu, device = root / "proc/driver/nvidia/gpus/0000:1b:00.0", root / "sys/bus/pci/devices/0000:1b:00.0"
    nodes = root / "sys/devices/system/node/node1"
    for folder in (gpu, device, nodes):
        folder.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t A GPU\nGPU UUID: \t GPU-12-34\n")
    (device / "numa_node").write_text(f"{node}\n")
    (nodes / "cpulist").write_text(f"{cores}\n")


@pytest.fixture
def affinity() -> Iterator[list[int]]:
    """The cores of this process, which it has again afterwards."""
    before = os.sched_getaffinity(0)
    yield sorted(before)
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), before)


def test_all_threads_are_bound_to_the_cores_beside_a_gpu(tmp_path: Path, affinity: list[int]) -> None:
    first, others = affinity[0], affinity[1:]
    if not others:
        pytest.skip("one core")
    machine(tmp_path, 1, f"{first},900-901")
    waits, seen = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (seen.set(), waits.wait()))
    thread.start()
    seen.wait()
    assert bind_to_numa_node("12-34", tmp_path) == {first}
    assert os.sched_getaffinity(0) == os.sched_getaffinity(thread.native_id or 0) == {first}
    waits.set()
    thread.join()


@pytest.mark.parametrize(
    ("node", "cores", "uuid"), [(-1, "0", "12-34"), (1, "900-901", "12-34"), (1, "0", "56")]
)
def test_nothing_is_bound_where_no_node_is_known(tmp_path, affinity, node, cores, uuid) -> None:
    machine(tmp_path, node, cores)
    assert bind_to_numa_node(uuid, tmp_path) == frozenset()
    assert sorted(os.sched_getaffinity(0)) == affinity


@pytest.mark.megatron
def test_a_rank_is_bound_to_the_cores_beside_its_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    from trainer.megatron import process_groups
    from trainer.worker import TrainerWorker

    class Started(Exception):
        """Ends the set-up of a rank where it would meet the others."""

    found: list[str] = []
    worker = sys.modules[TrainerWorker.__module__]
    monkeypatch.setattr(process_groups, "bind_to_numa_node", found.append)
    monkeypatch.setattr(worker, "start_process_groups", Mock(side_effect=Started))
    for name in ("check_megatron_settings", "check_fused_layers", "try_loss"):
        monkeypatch.setattr(worker, name, lambda *_, **__: None)
    gpu = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        set_device=lambda _: None,
        current_device=lambda: 0,
        get_device_properties=lambda _: SimpleNamespace(uuid="12-34"),
    )
    monkeypatch.setattr(torch, "cuda", gpu)
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    config = to_builtins(config_with(f"model.path={tmp_path}"))
    with pytest.raises(Started):
        TrainerWorker(config, 0, 1, "127.0.0.1:1").setup(None)
    assert found == ["12-34"]


def test_a_node_that_has_left_is_an_error_that_a_restart_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements, "node_addresses", lambda: {"a0": "10.0.0.1", "b0": "10.0.0.2"})
    assert placements.addresses_of(["b0", "a0", "b0"]) == ["10.0.0.2", "10.0.0.1", "10.0.0.2"]
    with pytest.raises(EnvironmentNotReady, match=r"these nodes have left Ray's cluster: c0, d0"):
        placements.addresses_of(["d0", "a0", "c0"])


@pytest.mark.parametrize(
    ("overrides", "gpus", "said"),
    [
        ((), 2, None),
        (("trainer.num_ranks=2", "engine.tp_size=2"), 3, r"reserves 4 GPUs \(trainer ranks 2, engines 2\)"),
        (
            ("trainer.num_ranks=2", "placement.shared=true", "weights.interrupt=abort", "engine.tp_size=2"),
            2,
            None,
        ),
        (
            ("trainer.num_ranks=9", "engine.num_engines=9", "placement.resources_per_rank={GPU: 0.1}"),
            9,
            "reserves 9.9 GPUs",
        ),
        (("trainer.num_ranks=9", "engine.num_engines=9"), 0, None),  # on the CPU
        (
            (
                "trainer.num_ranks=3",  # of which any engine may have two
                "placement={shared: true, resources_per_rank: {CPU: 1.5, GPU: 1}}",
                *("weights.interrupt=abort", "engine={num_engines: 2, tp_size: 2}"),
            ),
            4,
            r"reserves 6 CPUs \(trainer ranks 6\)",
        ),
        (
            (
                "placement.resources_per_engine={CPU: 3}",
                "rollout.num_workers=2",
                "placement.resources_per_rollout_worker={CPU: 1}",
            ),
            2,
            "5 CPUs",
        ),
    ],
)
def test_a_run_is_refused_when_it_reserves_more_than_the_machine_has(overrides, gpus, said):
    config = config_with(*overrides)
    if said is None:
        check_resources(config, gpus=gpus, cpus=4)
        return
    with pytest.raises(EnvironmentNotReady, match=said):
        check_resources(config, gpus=gpus, cpus=4)


# -- assignment of the GPUs that ranks share with engines ---------------------------------------------


ENGINES = [[Device("a", "2"), Device("a", "3")], [Device("b", "0"), Device("b", "1")]]


def test_neighbouring_ranks_are_on_one_node_although_ray_spreads_engines() -> None:
    engines = [[Device(node, f"{2 * number + gpu}") for gpu in (0, 1)] for number in (0, 1) for node in "ab"]
    nodes = [device.node for device in assign_devices(engines, 8)]
    assert nodes == ["a"] * 4 + ["b"] * 4


def test_each_gpu_of_an_engine_has_a_rank_that_hands_it_weights() -> None:
    """Engines are restarted on the GPUs that they had; ranks do not follow them to others."""
    ranks = assign_devices(ENGINES, 4, all_of_them=True)
    assert [ranks_on(engine, ranks) for engine in ENGINES] == [[0, 1], [2, 3]]
    assert ranks_on([Device("b", "1"), Device("a", "2")], ranks) == [3, 0]
    with pytest.raises(WeightSyncError, match=r"no trainer rank is on .*'7'"):
        ranks_on([Device("a", "7")], ranks)
    with pytest.raises(EnvironmentNotReady, match=r"set trainer\.num_ranks=4, or weights\.transport=disk"):
        assign_devices(ENGINES, 3, all_of_them=True)


@pytest.mark.parametrize(("transport", "refused"), [("disk", False), ("tensor", True)])
def test_gpus_without_a_rank_are_refused_when_ranks_hand_weights_over(transport: str, refused: bool) -> None:
    config = config_with(
        "placement.shared=true",
        "weights.interrupt=abort",
        f"weights.transport={transport}",
        "trainer.num_ranks=2",
        engine={"kind": "sglang", "tp_size": 4},
    )
    with pytest.raises(EnvironmentNotReady, match="have 4 GPUs, each") if refused else nullcontext():
        check_shared_gpus(config)


def test_ranks_are_refused_when_there_are_more_than_gpus() -> None:
    with pytest.raises(EnvironmentNotReady, match="num_ranks is 5, but the engines have 4 GPUs"):
        assign_devices(ENGINES, 5)
