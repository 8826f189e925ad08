"""Servers that join and leave a running job, as the lines of a file come and go.

```
 loop     consumes                waits for             unblocked by      produces
 run      engine.urls_file        the next look         time              newcomers (for `repair`), departures
 leaving  an engine that leaves   its calls             they end; a limit a pool without it
```

A user edits the file; nothing is asked of the job. A line that is new becomes an engine, which `repair`
brings to the current weights before it is sent anything. One that is gone drains: no new calls, and those
that run may end within `engine.drain_s`; then they are aborted, and their sessions go on elsewhere with the
tokens they have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from async_rl.engine_protocol import Engine
from async_rl.engines.pool import EnginePool
from async_rl.errors import ConfigError, EngineError
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import waiting

log = logging.getLogger(__name__)

REREAD_S: Final = 2.0
"""Between two looks. What two of them in a row see counts: a file may be half written when it is read."""

_ABORT_LIMIT_S: Final = 10.0
"""For the last calls of a server that leaves: it may be gone already."""


def read_urls(path: Path) -> tuple[str, ...]:
    """The URLs in a file.

    Raises:
        ConfigError: When it cannot be read, or not understood.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engine.urls_file {path} cannot be read: {error}") from error
    return parse_urls(text, str(path))


def parse_urls(text: str, name: str) -> tuple[str, ...]:
    """The URLs of a file: one a line, without repeats; empty lines and what follows a # are left out.

    Raises:
        ConfigError: Which line is none, and what one looks like.
    """
    urls: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        url = line.partition("#")[0].strip().rstrip("/")
        if not url:
            continue
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{name}:{number}: {url!r} is no URL of a server, as http://10.0.0.7:30000 is")
        urls[url] = None
    return tuple(urls)


def changes(known: Iterable[str], wanted: Iterable[str]) -> tuple[list[str], list[str]]:
    """What joins, in the order of the file, and what leaves."""
    known, wanted = list(known), list(wanted)
    return [url for url in wanted if url not in known], [url for url in known if url not in wanted]


class Membership:
    """See the module.

    Example:
        >>> members = Membership(Path("servers.txt"), pool, cluster.connect_engine, depart, drain_s=30)
        >>> async with services(members=members.run): ...
    """

    def __init__(
        self,
        path: Path,
        pool: EnginePool,
        connect: Callable[[str, str], Engine],
        depart: Callable[[str], Awaitable[None]],
        *,
        drain_s: float,
    ) -> None:
        """Wire the parts.

        Args:
            path: The file.
            pool: Where engines are added and taken out.
            connect: Makes a client of an engine id and a URL; connects to nothing yet.
            depart: Lets go of an engine that has left the pool.
            drain_s: How long its calls may go on.
        """
        self._path = path
        self._pool = pool
        self._connect = connect
        self._depart = depart
        self._drain_s = drain_s
        self._members: dict[str, str] = {}  # engine id by URL
        self._refused = set[str]()  # told once, for as long as they are in the file
        self._num_joined = 0

    async def run(self) -> None:
        """Never returns.

        Raises:
            ConfigError: When the file cannot be read, or not understood, at the first look; later ones keep
                who is there.
        """
        seen = await asyncio.to_thread(read_urls, self._path)
        async with Nursery() as leaving:
            while True:
                with waiting("idle"):
                    await asyncio.sleep(REREAD_S)
                before = seen
                try:
                    seen = await asyncio.to_thread(read_urls, self._path)
                except ConfigError as error:
                    log.warning("engines stay as they are: %s", error)
                    continue
                if seen == before:
                    self._follow(seen, leaving)

    def _follow(self, wanted: tuple[str, ...], leaving: Nursery) -> None:
        self._refused &= set(wanted)
        joins, leaves = changes(self._members, wanted)
        for url in joins:
            if url in self._refused:
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
            self._pool.add(engine, newcomer=True)
        for url in leaves:
            engine_id = self._members.pop(url)
            log.info("engine %s at %s leaves", engine_id, url)
            leaving.start_task(f"{engine_id} leaves", self._see_off(engine_id))

    async def _see_off(self, engine_id: str) -> None:
        try:
            async with asyncio.timeout(self._drain_s):
                await self._pool.drain(engine_id)
        except TimeoutError:
            log.info("engine %s leaves with calls under way: they move", engine_id)
            engine = next(e for e in self._pool.engines() if e.engine_id == engine_id)
            with suppress(EngineError, TimeoutError):  # those that it does not end are dropped next
                async with asyncio.timeout(_ABORT_LIMIT_S):
                    await engine.interrupt("abort")
        self._pool.remove(engine_id)
        await self._depart(engine_id)
