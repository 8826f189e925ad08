"""Adds servers to a running job and removes them, as lines are added to and removed from a file.

```
 loop         consumes                waits for        unblocked by        produces
 follow_file  engine.urls_file        the next read    time                newcomers for `repair`, departures
 leaving      an engine that leaves   its calls        their end; a limit  a pool without it
```

A user edits the file. A new line becomes an engine, into which `repair` loads the current weights before it
gets calls. An engine whose line was removed drains: it gets no new calls, and running calls may end within
`DRAIN_S`; then they are aborted, and their sessions go on with their tokens on other engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from async_rl.config.urls_file import read_urls
from async_rl.engine_protocol import Engine
from async_rl.engines.pool import EnginePool
from async_rl.errors import ConfigError, EngineError
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import sleep_idle

log = logging.getLogger(__name__)

DRAIN_S: Final = 30.0
"""How long the calls of a leaving engine may go on: most end, and the rest move with their tokens."""

REREAD_S: Final = 2.0
"""Between two reads. Two equal reads in a row count: a file may be half written when it is read."""

_ABORT_LIMIT_S: Final = 20.0
"""For ending the last calls of a server that leaves, which may be gone already: longer than the grants of a
worker that is silent are valid."""


def diff_urls(known: Iterable[str], wanted: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the URLs that join, in the order of the file, and those that leave."""
    known, wanted = list(known), list(wanted)
    return [url for url in wanted if url not in known], [url for url in known if url not in wanted]


class EngineMembership:
    """Keeps the engines of a pool equal to the servers listed in a file."""

    def __init__(
        self,
        path: Path,
        pool: EnginePool,
        connect: Callable[[str, str], Engine],
        depart: Callable[[str], Awaitable[None]],
        *,
        drain_s: float = DRAIN_S,
    ) -> None:
        """Wire the parts.

        Args:
            path: The file.
            pool: The pool to which engines are added, and from which they are removed.
            connect: Creates a client from an engine id and a URL, without connecting yet.
            depart: Releases what belongs to an engine that has left the pool.
            drain_s: How long the calls of a leaving engine may go on.
        """
        self._path = path
        self._pool = pool
        self._connect = connect
        self._depart = depart
        self._drain_s = drain_s
        self._members: dict[str, str] = {}  # engine id by URL
        self._leaving: dict[str, str] = {}  # engine id by URL: one server must not be two engines
        self._refused = set[str]()  # logged once, for as long as they are in the file
        self._num_joined = 0
        self._has_read = False

    async def follow_file(self) -> None:
        """Follow the file until cancelled.

        Raises:
            ConfigError: When the first read fails. When a later one fails, also in a later call, the engines
                stay as they are.
        """
        seen: tuple[str, ...] | None = None
        if not self._has_read:
            seen = await asyncio.to_thread(read_urls, self._path)
            self._has_read = True
        async with Nursery() as leaving:
            for url, engine_id in self._leaving.items():  # an earlier call was cancelled
                leaving.start_task(f"{engine_id} leaves", self._drain_and_remove(engine_id, url))
            while True:
                await sleep_idle(REREAD_S)
                before = seen
                try:
                    seen = await asyncio.to_thread(read_urls, self._path)
                except ConfigError as error:
                    log.warning("engines stay as they are: %s", error)
                    continue
                if seen is not None and seen == before:
                    self._apply_changes(seen, leaving)

    def _apply_changes(self, wanted: tuple[str, ...], leaving: Nursery) -> None:
        self._refused &= set(wanted)
        joins, leaves = diff_urls(self._members, wanted)
        for url in joins:
            if url in self._refused or url in self._leaving:
                continue
            engine_id = f"engine-{self._num_joined}"
            try:
                engine = self._connect(engine_id, url)
            except ConfigError as error:
                log.error("engine %s at %s stays out: %s", engine_id, url, error)
                self._refused.add(url)
                continue
            self._num_joined += 1
            log.info("engine %s at %s joins", engine_id, url)
            self._members[url] = engine_id
            self._pool.add_engine(engine, newcomer=True)
        for url in leaves:
            engine_id = self._members.pop(url)
            log.info("engine %s at %s leaves", engine_id, url)
            self._leaving[url] = engine_id
            leaving.start_task(f"{engine_id} leaves", self._drain_and_remove(engine_id, url))

    async def _drain_and_remove(self, engine_id: str, url: str) -> None:
        if engine_id in self._pool:
            await self._drain_engine(engine_id)
            self._pool.remove_engine(engine_id)
        await self._depart(engine_id)
        del self._leaving[url]

    async def _drain_engine(self, engine_id: str) -> None:
        try:
            async with asyncio.timeout(self._drain_s):
                await self._pool.drain_engine(engine_id)
        except TimeoutError:
            log.info("engine %s leaves with calls under way: they move", engine_id)
            engine = self._pool.engine(engine_id)
            with suppress(EngineError, TimeoutError):  # `remove_engine` drops calls that are left
                async with asyncio.timeout(_ABORT_LIMIT_S):
                    await self._pool.interrupt_engine(engine, "abort")
