"""Placement of processes in a cluster, and the message when there is no capacity."""

import os
import threading
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants

from async_rl.codec import ALIGNMENT
from async_rl.config import parse_config
from async_rl.engines.sglang.connect import check_shares_memory, external_keys, node_of
from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.placement import actors
from async_rl.placement.actors import ActorSetup, EngineActor, enter_driver_folder, interface_of
from async_rl.placement.frame_readers import SharedFrames
from async_rl.placement.local_ray import connect_ray
from async_rl.placement.placements import ClusterNode, group_by_node, no_capacity
from async_rl.runtime.addresses import is_loopback
from tests.support.run_config import config_of, write_weights


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
    lines = no_capacity("engine", {"GPU": 4, "CPU": 1, "engines": 1}, 3, "SPREAD", nodes).splitlines()
    assert lines == [
        "Ray has no capacity for 3 x engine (1 CPU, 4 GPU, 1 engines each on one node, SPREAD); 1 of 2 "
        "nodes are large enough for one:",
        "  10.0.0.1: 4 of 4 CPU free, 1 of 2 GPU free",
        "  10.0.0.2: 0.5 of 4 CPU free, 0 of 8 GPU free, 0 of 1 engines free",
    ]


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


@pytest.mark.parametrize("found", [None, "the word of another run"])
def test_an_actor_refuses_its_node_when_the_run_folder_is_not_the_drivers(tmp_path, monkeypatch, found):
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o077)
    os.umask(before)
    sign = tmp_path / ".shared"
    if found is not None:
        sign.write_text(found)
    try:
        with pytest.raises(
            EnvironmentNotReady, match=r"node 10\.0\.0\.7 does not see what the driver writes"
        ):
            enter_driver_folder(ActorSetup(str(tmp_path), str(sign), "my word", "driver"), "10.0.0.7")
        sign.write_text("my word")
        enter_driver_folder(ActorSetup(str(tmp_path), ".shared", "my word", "driver"), "10.0.0.7")
    finally:
        os.umask(before)


def test_an_actor_refuses_its_node_when_the_working_folder_is_not_there(tmp_path):
    before = os.umask(0o077)
    os.umask(before)
    try:
        with pytest.raises(EnvironmentNotReady, match=r"node 10\.0\.0\.7 has no folder"):
            enter_driver_folder(ActorSetup(str(tmp_path / "none"), "sign", "word", "driver"), "10.0.0.7")
    finally:
        os.umask(before)


def test_the_interface_is_found_when_the_address_is_in_its_network():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("127.0.0.9") == "lo"
    assert interface_of("203.0.113.9") is None


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


def test_a_node_is_found_when_all_of_them_have_loopback_addresses():
    nodes = {"a": "127.0.0.2", "b": "127.0.0.3"}
    assert [node_of(f"http://127.0.0.{i}:30000", "a", nodes) for i in (1, 2, 3)] == ["a", "a", "b"]


@pytest.mark.parametrize(
    ("node", "named"), [(OTHER, "10.0.0.7 (node otheroth)"), ("gpu-7", "gpu-7")], ids=["known", "unknown"]
)
def test_an_engine_on_another_node_is_refused_when_weights_are_sent_through_memory(node, named):
    check_shares_memory("engine-3", DRIVER, DRIVER, NODES)
    with pytest.raises(ConfigError) as caught:
        check_shares_memory("engine-3", node, DRIVER, NODES)
    assert str(caught.value) == (
        "weights.transport is tensor, which needs engines on the node of trainer rank 0, 10.0.0.1 (node "
        f"driverdr), but engine-3 is on {named}: set weights.transport=distributed (or disk), or place both "
        "on one node"
    )


@pytest.mark.parametrize(
    ("host", "own"), [("127.0.0.3", True), ("localhost", True), ("::1", True), ("10.0.0.1", False)]
)
def test_only_loopback_addresses_are_told_to_be_of_this_machine(host, own):
    assert is_loopback(host) is own


@pytest.fixture
def ray_untouched(monkeypatch):
    """Restore what starting Ray sets in this process."""
    for name in (
        *("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_TOKEN", "GLOO_SOCKET_IFNAME"),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    ):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", ray_constants.ENABLE_RAY_CLUSTER)


@pytest.mark.parametrize("error", [Exception("the node timed out."), ConnectionError("the node timed out")])
async def test_there_is_one_clear_error_when_ray_does_not_come_up(
    tmp_path, monkeypatch, ray_untouched, error
):
    def fail(**arguments):
        raise error

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(
        EnvironmentNotReady, match=r"could not start Ray on this machine: the node timed out\. "
    ):
        await connect_ray(config_of(), tmp_path)


async def test_there_is_one_clear_error_when_ray_does_not_answer(tmp_path, monkeypatch, ray_untouched):
    monkeypatch.delenv("RAY_AUTH_TOKEN")  # Ray would note, for the whole process, that there is one
    never = threading.Event()
    monkeypatch.setattr(ray, "init", lambda **arguments: never.wait())
    tree = {
        "model": {"path": "m"},
        "data": {"path": "x.jsonl"},
        "placement": {"ray_address": "10.0.0.1:6379"},
    }
    config = parse_config(tree)
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
