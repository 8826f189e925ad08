"""Creates the trackers that a config names, and closes them at the end of the run."""

from __future__ import annotations

import difflib
import importlib.util
from asyncio import CancelledError
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from async_rl.config import Config
from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.observability.metrics import Metrics
from async_rl.observability.trackers.file_trackers import ConsoleTracker, JsonlTracker, TensorBoardTracker
from async_rl.observability.trackers.names import count_devices
from async_rl.observability.trackers.tracker import CLOSE_S, Tracker, Trackers
from async_rl.runtime.loading import load_object
from async_rl.runtime.threads import call_in_thread
from async_rl.runtime.waits import waiting

Maker = Callable[[Config, Path], Tracker]
"""Creates a tracker from a config and a run folder; `metrics.trackers` may name one by dotted path."""

ABORTED_S = 2.0
"""The longest wait for trackers after the second Ctrl-C, in seconds."""


# The client of a service takes a second or more to import, and tens of megabytes: only runs that use it pay.


def _wandb(config: Config, run_dir: Path) -> Tracker:
    from async_rl.observability.trackers.wandb import WandbTracker

    return WandbTracker(config, run_dir)


def _mlflow(config: Config, run_dir: Path) -> Tracker:
    from async_rl.observability.trackers.mlflow import MlflowTracker

    return MlflowTracker(config, run_dir)


def _swanlab(config: Config, run_dir: Path) -> Tracker:
    from async_rl.observability.trackers.swanlab import SwanlabTracker

    return SwanlabTracker(config, run_dir)


def _trackio(config: Config, run_dir: Path) -> Tracker:
    from async_rl.observability.trackers.trackio import TrackioTracker

    return TrackioTracker(config, run_dir)


SERVICES: Mapping[str, Maker] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "trackio": _trackio,
}
"""By the name of the package that each needs, and of the extra that has it."""

KNOWN: Mapping[str, Maker] = {
    "console": lambda _, __: ConsoleTracker(),
    "jsonl": lambda _, run_dir: JsonlTracker(run_dir / "tracker.jsonl"),
    "tensorboard": lambda _, run_dir: TensorBoardTracker(run_dir / "tensorboard"),
    **SERVICES,
}


def choose(config: Config) -> dict[str, Maker]:
    """Return functions that create the trackers of a config, by name.

    Raises:
        ConfigError: A name is unknown or occurs twice, or a dotted path cannot be loaded.
        EnvironmentNotReady: A package is missing.
    """
    names = config.metrics.trackers
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"metrics.trackers names {twice[0]!r} more than once: leave one")
    for name in names:
        if name in SERVICES and importlib.util.find_spec(name) is None:
            raise EnvironmentNotReady(
                f"metrics.trackers names {name}, which is not installed: run `pip install -e '.[{name}]'` in "
                "async_rl's checkout, or take another tracker"
            )
    return {name: _maker(name) for name in names}


def _maker(name: str) -> Maker:
    if name in KNOWN:
        return KNOWN[name]
    if ":" in name:
        made: Maker = load_object(name, what="tracker")
        return made
    close = difflib.get_close_matches(name, KNOWN, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(KNOWN)}"
    raise ConfigError(
        f"metrics.trackers: there is no tracker {name!r}; {hint} One of your own is a dotted path "
        "`module:Class`"
    )


@asynccontextmanager
async def tracking(config: Config, run_dir: Path, metrics: Metrics) -> AsyncIterator[Trackers]:
    """Run the trackers of a run during the block; at its end, give them a limited time to write out.

    Raises:
        ConfigError: The config names a tracker that does not exist.
        EnvironmentNotReady: A package is missing.
    """
    makers = {name: partial(maker, config, run_dir) for name, maker in choose(config).items()}
    trackers = Trackers(makers, metrics, count_devices(config))
    limit_s = CLOSE_S
    try:
        yield trackers
    except CancelledError:
        limit_s = ABORTED_S
        raise
    finally:
        if makers:
            with waiting("trackers"):
                await call_in_thread(lambda: trackers.close(limit_s), name="closing trackers")
