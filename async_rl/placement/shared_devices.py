"""Assigns to each trainer rank the GPU of an engine (`placement.shared`).

Ray assigns the GPUs to the engines, which start first. A rank requests none: it runs in the placement of an
engine, which reserves CPUs for its ranks too, and sees a GPU of that engine. Ranks follow the order of the
engines' GPUs on each node, so that neighbouring ranks use GPUs that are close to each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from async_rl.errors import WeightSyncError
from async_rl.placement.placements import group_by_node
from async_rl.run.placement_table import require_shared_gpus


class Device(msgspec.Struct, frozen=True):
    """A GPU that Ray has assigned to an engine."""

    node: str
    gpu: str
    """Its name in CUDA_VISIBLE_DEVICES on that node."""


def ranks_on(devices: Sequence[Device], ranks: Sequence[Device]) -> list[int]:
    """Return for each GPU of an engine the rank on it, given the GPU of each rank.

    Raises:
        WeightSyncError: One has none: Ray has given a restarted engine another GPU.
    """
    rank_on = {device: rank for rank, device in enumerate(ranks)}
    if missing := [device for device in devices if device not in rank_on]:
        raise WeightSyncError(f"no trainer rank is on {missing[0]}, which an engine has: restart the run")
    return [rank_on[device] for device in devices]


def assign_devices(
    engines: Sequence[Sequence[Device]], num_ranks: int, *, all_of_them: bool = False
) -> list[Device]:
    """Return the GPU of each rank: node by node, there those of one engine after those of another.

    Neighbouring ranks exchange the most data, and Ray spreads engines over nodes one by one.

    Raises:
        EnvironmentNotReady: There are more ranks than GPUs; or, with `all_of_them`, more GPUs than ranks.
    """
    devices = [device for engine in engines for device in engine]
    require_shared_gpus(num_ranks, len(devices), all_of_them=all_of_them)
    return [devices[index] for index in group_by_node([device.node for device in devices])[:num_ranks]]
