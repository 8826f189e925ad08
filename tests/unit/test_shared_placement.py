"""Assignment of the GPUs that ranks share with engines."""

from __future__ import annotations

import pytest

from async_rl.errors import EnvironmentNotReady
from async_rl.placement.shared_devices import Device, assign_devices

ENGINES = [[Device("a", "2"), Device("a", "3")], [Device("b", "0"), Device("b", "1")]]


def test_neighbouring_ranks_are_on_one_node_although_ray_spreads_engines() -> None:
    engines = [[Device(node, f"{2 * number + gpu}") for gpu in (0, 1)] for number in (0, 1) for node in "ab"]
    nodes = [device.node for device in assign_devices(engines, 8)]
    assert nodes == ["a"] * 4 + ["b"] * 4


def test_ranks_are_refused_when_there_are_more_than_gpus() -> None:
    with pytest.raises(EnvironmentNotReady, match="num_ranks is 5, but the engines have 4 GPUs"):
        assign_devices(ENGINES, 5)
