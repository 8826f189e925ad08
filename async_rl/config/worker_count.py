"""How many rollout workers a run has where `rollout.num_workers` is `auto`.

`async-rl plan` requests as many: both call `workers_needed`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from async_rl.config.engine_settings import SGLangEngines, SimulatedEngines
from async_rl.config.rollout_settings import RolloutConfig
from async_rl.config.run_settings import PlacementConfig
from async_rl.config.urls_file import read_urls
from async_rl.errors import ConfigError
from async_rl.runtime.addresses import is_loopback

TRAJECTORIES_PER_WORKER: Final = 512
"""The number that one process runs at less than half a core, each at 50 tokens per second, as measured by
`benchmarks/driver_scale.py`: a rollout worker, or the driver without workers."""


_LOOPBACK: Final = "has a loopback address, which workers on other nodes cannot call"


class WorkerCount(NamedTuple):
    """A number of rollout workers, and why it is that."""

    number: int
    reason: str


def workers_needed(trajectories: int, *, one_machine: bool) -> WorkerCount:
    """Return how many rollout workers a job needs.

    Args:
        trajectories: How many run at the same time.
        one_machine: Whether the run starts Ray on the driver's machine only.

    Example:
        >>> workers_needed(256, one_machine=True).number, workers_needed(8192, one_machine=False).number
        (0, 16)
    """
    if one_machine and trajectories <= TRAJECTORIES_PER_WORKER:
        return WorkerCount(
            0, f"on one machine the driver itself runs up to {TRAJECTORIES_PER_WORKER} trajectories"
        )
    number = -(-trajectories // TRAJECTORIES_PER_WORKER)
    return WorkerCount(number, f"one per {TRAJECTORIES_PER_WORKER} of {trajectories} concurrent trajectories")


def choose_workers(
    rollout: RolloutConfig, engine: SGLangEngines | SimulatedEngines, placement: PlacementConfig
) -> WorkerCount:
    """Return the number of rollout workers of a run: the one that is set, or what `auto` chooses."""
    if rollout.num_workers != "auto":
        return WorkerCount(rollout.num_workers, "as rollout.num_workers says")
    if not isinstance(engine, SGLangEngines):
        return WorkerCount(0, "engine.kind is simulated, and workers call engines over HTTP")
    if placement.joins and any(map(_is_loopback_url, engine.urls)):
        return WorkerCount(0, f"engine.urls {_LOOPBACK}")
    if (
        placement.joins
        and engine.urls_file is not None
        and _lists_loopback(Path(engine.urls_file).absolute())
    ):
        return WorkerCount(0, f"engine.urls_file {_LOOPBACK}")
    return workers_needed(rollout.max_concurrent_trajectories, one_machine=not placement.joins)


def _is_loopback_url(url: str) -> bool:
    return is_loopback(urlsplit(url).hostname or "")


@cache
def _lists_loopback(path: Path) -> bool:
    """Whether a file of URLs has a loopback address; not if it cannot be read yet.

    It is read once: a run keeps its number of workers while servers join and leave.
    """
    try:
        return any(map(_is_loopback_url, read_urls(path)))
    except ConfigError:
        return False
