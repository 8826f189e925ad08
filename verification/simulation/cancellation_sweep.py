"""Cancel a run at every await: once at each place where a task ever waits.

```
 scenario ─► run without faults, noting after each callback where its task waits ─► {place: callback}
    └──────► for each place: the same run, cancelled right after that callback, and continued to its end
```

Cancellations drawn by seeds fall where time is spent; most awaits end at once and are rarely hit.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, Final

import msgspec
from msgspec.structs import replace

import async_rl
from verification.simulation.scenario import Death, Scenario
from verification.simulation.simulate import SeedOutcome, simulate

_PRODUCT: Final = Path(async_rl.__file__).parent


class Place(msgspec.Struct, frozen=True, order=True):
    """One await of the program."""

    file: str
    """Path inside the package."""
    line: int
    function: str


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes of a run and of its cancellations."""

    places: tuple[Place, ...]
    """The awaits at which tasks waited."""
    runs: tuple[SeedOutcome, ...]
    """The run without faults, then one per callback after which a task waited at a new place."""

    @property
    def violations(self) -> list[str]:
        """Return the violations of all runs."""
        return [violation for outcome in self.runs for violation in outcome.violations]

    @property
    def ends(self) -> set[tuple[str, str]]:
        """Return how the first and the last incarnations of the cancelled runs ended."""
        return {(run.incarnations[0], run.incarnations[-1]) for run in self.runs[1:]}


def sweep(scenario: Scenario, folder: Path, *, within: str | None = None, every: int = 1) -> Sweep:
    """Cancel a run at each of its awaits.

    Args:
        scenario: Its deaths are ignored.
        folder: An empty folder, in which run folders are created.
        within: Restrict the sweep to the awaits of this function.
        every: Cancel at every so many awaits, in the order in which the run meets them.
    """
    first: dict[Place, int] = {}

    def note(step: int, task: asyncio.Task[Any]) -> None:
        for frame in _waiting(task.get_coro()):
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(_PRODUCT) and file.parent != _PRODUCT / "planning":
                name = str(file.relative_to(_PRODUCT))
                first.setdefault(Place(name, frame.f_lineno, frame.f_code.co_qualname), step)

    def run(name: str, *deaths: Death, **watched: Any) -> SeedOutcome:
        (folder / name).mkdir()
        alive = replace(scenario, deaths=deaths)
        return simulate(scenario.seed, folder / name, scenario=alive, **watched)

    undisturbed = run("undisturbed", after_turn=note)
    wanted = {step for place, step in first.items() if within is None or place.function == within}
    cancelled = [run(f"at_{step}", Death(kind="cancel", after=step)) for step in sorted(wanted)[::every]]
    return Sweep(places=tuple(sorted(first)), runs=(undisturbed, *cancelled))


def _waiting(awaited: object) -> Iterator[FrameType]:
    """Yield the frames of a suspended task, the outermost first."""
    while awaited is not None:
        if isinstance(awaited, CoroutineType) and awaited.cr_frame is not None:
            if inspect.getcoroutinestate(awaited) == inspect.CORO_SUSPENDED:
                yield awaited.cr_frame
            awaited = awaited.cr_await
        elif isinstance(awaited, AsyncGeneratorType) and awaited.ag_frame is not None:
            yield awaited.ag_frame
            awaited = awaited.ag_await
        elif isinstance(awaited, GeneratorType) and awaited.gi_frame is not None:
            # The await of an object: user code that is contained, or an awaitable that delegates.
            awaited = getattr(awaited.gi_frame.f_locals.get("self"), "work", awaited.gi_yieldfrom)
        else:  # `async for` waits for an object that does not tell its generator
            inner = [
                o for o in gc.get_referents(awaited) if isinstance(o, AsyncGeneratorType | CoroutineType)
            ]
            awaited = inner[0] if inner else None
