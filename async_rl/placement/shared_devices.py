"""Which GPU each rank shares with an engine (`placement.shared`).

Ray gives the GPUs to the engines, which are started first. A rank takes none: it goes to the node of an
engine and sees that engine's GPU. Numbers go along, so that the ranks on the GPUs of one engine, which are
near each other, are neighbours too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_rl.errors import EnvironmentNotReady


class Device(msgspec.Struct, frozen=True):
    """A GPU that an engine has."""

    node: str
    gpu: str
    """As CUDA_VISIBLE_DEVICES names it on that node."""


def assign(engines: Sequence[Sequence[Device]], num_ranks: int) -> list[Device]:
    """The GPU of each rank: those of engine 0 in their order, then those of engine 1.

    Raises:
        EnvironmentNotReady: When there are more ranks than GPUs.
    """
    devices = [device for engine in engines for device in engine]
    if num_ranks > len(devices):
        raise EnvironmentNotReady(
            f"placement.shared: trainer.num_ranks is {num_ranks}, but the engines have {len(devices)} GPUs "
            "to share: a rank needs one of its own; raise engine.num_engines or engine.tp_size, or lower "
            "trainer.num_ranks"
        )
    return devices[:num_ranks]


def beside(device: Device | None) -> dict[str, Any]:
    """Options of an actor that goes where a GPU is, and takes nothing of it from Ray; None has none."""
    if device is None:
        return {}
    return {"num_gpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(device.node, soft=False)}
