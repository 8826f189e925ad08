"""How many file descriptors a config needs in the driver and in each rollout worker, at most.

A call has a connection, an agent that uses the OpenAI endpoint its
connections and pipes. A process that runs out fails in many places at once, so the limit is checked before a
start.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from async_rl.config import Config, SGLangEngines
from async_rl.errors import EnvironmentNotReady
from async_rl.runtime.descriptors import raise_descriptor_limit

_BASE: Final = 256
"""Ray, logs, database, journal, the live page, and what Python itself opens."""

_PER_ENGINE: Final = 3
"""Connections for health checks, control requests and an update."""

_PER_WORKER: Final = 4
"""The link of a rollout worker, its log, and what Ray holds of it."""


class DescriptorNeeds(msgspec.Struct, frozen=True):
    """Upper bounds by purpose."""

    driver: dict[str, int]
    worker: dict[str, int]
    """What one rollout worker needs; empty without workers."""


def descriptor_needs(config: Config, loops: tuple[Any, ...] = ()) -> DescriptorNeeds:
    """Return what a run of the config needs.

    Args:
        config: The config.
        loops: The agent loops that it uses; `descriptors_per_trajectory` of a loop is what it needs itself.
    """
    rollout, engine, workers = config.rollout, config.engine, config.num_workers
    trajectories = rollout.max_concurrent_trajectories
    calls = trajectories * (1 + rollout.max_branches)
    evaluated = config.evaluation.max_concurrent if config.data.validation else 0
    connected = 0
    if isinstance(engine, SGLangEngines):
        frozen = sum(len(model.urls) or model.num_engines for model in config.models.values())
        connected = max(engine.num_engines, len(engine.urls)) + frozen
    per_trajectory = max((getattr(loop, "descriptors_per_trajectory", 0) for loop in loops), default=0)
    driver = {
        "the program itself": _BASE,
        "calls to engines": evaluated + (0 if workers else calls) if connected else 0,
        # An attempt that asks a judge, or is scored by a teacher, has an idle connection to its engine, too.
        "calls to models": _asked(config, trajectories + evaluated) if connected and not workers else 0,
        "engines": _PER_ENGINE * connected,
        "the queue": 8,  # two threads, each with a frame; ledger and journal
        "rollout workers": _PER_WORKER * workers,
        "agents": 0 if workers else per_trajectory * trajectories,
    }
    worker = {
        "the program itself": _BASE,
        "calls to engines": config.max_attempts_per_worker * (1 + rollout.max_branches) if connected else 0,
        "calls to models": _asked(config, config.max_attempts_per_worker) if connected else 0,
        "agents": per_trajectory * config.max_attempts_per_worker,
    }
    return DescriptorNeeds(driver, worker if workers else {})


def _asked(config: Config, attempts: int) -> int:
    """Return the calls of `attempts` attempts to judges and teachers: one for each of their conversations."""
    return attempts * (1 + config.rollout.max_branches) if config.models else 0


def check_descriptors(config: Config, loops: tuple[Any, ...] = ()) -> str:
    """Raise the limit of open files as far as it goes, and check it against what the config needs.

    Returns:
        A finding for `async-rl check`.

    Raises:
        EnvironmentNotReady: The limit is too low.
    """
    limit, needs = raise_descriptor_limit(), descriptor_needs(config, loops)
    for process, need in (("the driver", needs.driver), ("each rollout worker", needs.worker)):
        if (total := sum(need.values())) > limit:
            parts = ", ".join(f"{count} for {purpose}" for purpose, count in need.items() if count)
            raise EnvironmentNotReady(
                f"{process} needs up to {total} file descriptors ({parts}), and the limit is {limit}: raise "
                f"the hard limit (ulimit -Hn, LimitNOFILE of systemd, --ulimit nofile of Docker), or lower "
                f"rollout.max_concurrent_trajectories"
            )
    return f"file descriptors: at most {sum(needs.driver.values())} of {limit}"
