"""The processes that may call engines of a pool, and the wait until all send an engine nothing more.

An update revokes the grants of thousands of engines in one turn: a worker gets one message for all of its
engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from async_rl.engine_protocol import Engine
from async_rl.engines.lease import EngineGrant, EngineLoad
from async_rl.errors import EngineError
from async_rl.runtime.waits import waiting


class Revocation:
    """The revocation of a process's grants of some engines, until it has confirmed."""

    def __init__(self, holder: str) -> None:
        """Expect that a process confirms."""
        self.holder = holder
        """The process."""
        self.confirmed = asyncio.Event()
        """Set when it has acknowledged that it begins no more calls, or its grants have expired."""


async def wait_for_confirmations(revocations: Collection[Revocation], engine_id: str) -> None:
    """Wait until all of an engine's revocations are confirmed."""
    pending = [each for each in revocations if not each.confirmed.is_set()]
    if not pending:
        return
    with waiting("grants", engine_id, why=partial(_list_silent, pending)):
        for each in pending:
            await each.confirmed.wait()


def _list_silent(revocations: Collection[Revocation]) -> str:
    return ", ".join(each.holder for each in revocations if not each.confirmed.is_set())


class GrantHolder(Protocol):
    """Another process that may call engines of the pool: a rollout worker, as the driver knows it."""

    @property
    def may_call(self) -> bool:
        """Whether it can use grants now: those of a worker that has been silent for long have expired."""
        ...

    @property
    def is_silent(self) -> bool:
        """Whether it has not reported for longer than usual: nothing is known of its calls."""
        ...

    def grants(self) -> Mapping[str, EngineGrant]:
        """Return the grants that it has, by engine."""
        ...

    def grant(self, engine: Engine, grant: EngineGrant) -> None:
        """Let it call an engine."""
        ...

    def begin_revocation(self, engine_id: str, *, aborts: bool) -> Sequence[Revocation]:
        """Forbid calls under the grant of an engine that it has now; those that have begun go on.

        Args:
            engine_id: The engine.
            aborts: Whether the engine then aborts those that have begun, and waits for their ends.

        Returns:
            What to wait for; nothing when it has no grant of the engine, and no call.
        """
        ...

    def drop_calls(self, engine_id: str, kind: type[EngineError], why: str) -> None:
        """Forbid calls of an engine, and end those that have begun with errors of a kind."""
        ...

    def load_of(self, engine_id: str) -> EngineLoad | None:
        """Return what it has reported of its calls of an engine; None if it may have none."""
        ...


_MIN_DIFFERENCE: Final = 8
"""An engine is lent to holders of engines that have at least so many calls more."""


class EngineShares:
    """Which holders call which engines: as few to an engine as possible, and as evenly as possible.

    Siblings then share prefixes, and paced prefills are exact. Where there are more holders than engines,
    several share one. A change moves as few shares as it can, because a share that moves leaves cached
    prefixes behind.

    Example:
        >>> shares = EngineShares()
        >>> shares.update(["a", "b", "c"], ["x", "y"])
        >>> shares.holders_of
        {'a': ['x'], 'b': ['y'], 'c': ['x']}
        >>> shares.update(["c"], ["x", "y"])
        >>> shares.holders_of
        {'c': ['x', 'y']}
    """

    def __init__(self, *, everywhere: bool = False) -> None:
        """Begin without engines; `everywhere` lets all holders call all engines."""
        self._everywhere = everywhere
        self.holders_of: dict[str, list[Any]] = {}
        """The holders of each engine."""
        self._borrowed: list[tuple[str, Any]] = []
        """Shares beyond those: engines and holders."""
        self.weights: dict[Any, float] = {}
        """How many engines each holder has, those that it shares in part."""

    def update(self, engines: Sequence[str], holders: Sequence[Any]) -> None:
        """Share these engines among these holders."""
        self._borrowed = [each for each in self._borrowed if not self._take_back(*each)]
        before, self.holders_of = self.holders_of, {engine: [] for engine in engines}
        if self._everywhere:
            self.holders_of = {engine: list(holders) for engine in engines}
        elif len(engines) >= len(holders) > 0:
            first = {engine: mine[0] for engine, mine in before.items() if mine}
            for engine, holder in _spread(engines, holders, first).items():
                self.holders_of[engine].append(holder)
        elif engines:
            first = {holder: engine for engine, mine in before.items() for holder in mine}
            for holder, engine in _spread(holders, engines, first).items():
                self.holders_of[engine].append(holder)
        self.weights = {}
        for mine in self.holders_of.values():
            for holder in mine:
                self.weights[holder] = self.weights.get(holder, 0.0) + 1 / len(mine)

    def level(self, calls: Mapping[str, int]) -> bool:
        """Lend engines with few calls to holders of those with many, until their calls are those of the mean.

        Attempts that fan out to many calls, or wait for tools, load the engines of their worker unevenly.

        Args:
            calls: The number of calls of each engine that serves.

        Returns:
            Whether a share has changed.
        """
        if self._everywhere or len(calls) < 2:
            return False
        before, mean = list(self._borrowed), sum(calls.values()) / len(calls)
        self._borrowed = [
            (engine, holder)
            for engine, holder in self._borrowed
            if calls.get(engine, 0) < mean or not self._take_back(engine, holder)
        ]
        by_calls = sorted(calls, key=calls.__getitem__)
        for idle, busy in zip(by_calls, reversed(by_calls), strict=True):
            if 2 * calls[idle] > mean or calls[busy] - calls[idle] < _MIN_DIFFERENCE:
                break
            mine = self.holders_of[idle]
            if (
                holder := next((each for each in self.holders_of[busy] if each not in mine), None)
            ) is not None:
                mine.append(holder)
                self._borrowed.append((idle, holder))
        return before != self._borrowed

    def _take_back(self, engine: str, holder: Any) -> bool:
        if (mine := self.holders_of.get(engine)) is not None and holder in mine:
            mine.remove(holder)
        return True


def _spread(items: Sequence[Any], bins: Sequence[Any], before: Mapping[Any, Any]) -> dict[Any, Any]:
    """Spread items over bins evenly; return the bin of each, which is that of before where that is even."""
    contents: dict[Any, list[Any]] = {each: [] for each in bins}
    new: list[Any] = []
    for item in items:
        contents.get(before.get(item), new).append(item)

    def size(each: Any) -> int:
        return len(contents[each])

    for item in new:
        contents[min(bins, key=size)].append(item)
    while size(fullest := max(bins, key=size)) > size(emptiest := min(bins, key=size)) + 1:
        contents[emptiest].append(contents[fullest].pop())
    return {item: each for each, mine in contents.items() for item in mine}
