"""The sandboxes of one process: starts, lends and ends them, and keeps some ready.

```
 pool ── a ready one ──┐                       ┌── end of the block
 start ── recorded ────┴─► open(): the block ──┼── end of the attempt, if the block is stuck ──► end,
   │ fails: back-off, then SandboxLost         └── time to live                              repeated
   └── cancelled caller: goes on, and what it starts is ended
```

Starts and ends run in tasks of the opener, never in the caller's: an agent loop may be cancelled at any
await, and no sandbox is lost by that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Self

from agent_loops.sandboxes.leftovers import end_leftovers, release_command
from agent_loops.sandboxes.local import LocalSandboxBackend
from agent_loops.sandboxes.log import Record, SandboxLog
from agent_loops.sandboxes.protocol import AgentBackend, BuildingBackend, SandboxRefused, ShellSandbox
from agent_loops.sandboxes.settings import parse_backend
from async_rl.errors import ConfigError, SandboxLost
from async_rl.rollout.session.api import Session
from async_rl.runtime.files import private_folder
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.user_processes import ReleasedBy, call_at_scope_end, run_folder
from async_rl.runtime.waits import sleep_idle, waiting

log = logging.getLogger(__name__)

_FIRST_DELAY_S: Final = 0.5
_MAX_DELAY_S: Final = 30.0
_END_S: Final = 60.0
"""The time limit of one attempt to end a sandbox."""
_END_TRIES: Final = 5
_CLOSE_S: Final = 60.0
"""How long the end of a run waits for the ends of its sandboxes; the reaper continues after it."""
_SWEEP_S: Final = 60.0
"""Between two signs of life in the log, and looks for what others have left."""


class _Lease:
    """A sandbox that is being started or used, and whether it is still wanted."""

    def __init__(self, opener: Sandboxes) -> None:
        self._opener = opener
        self.box: ShellSandbox | None = None
        self.is_over = False
        self.retire: asyncio.TimerHandle | None = None
        """Replaces it in its pool while it has half of its time left."""

    def end(self) -> None:
        """End the sandbox now, or as soon as it has started."""
        self.is_over = True
        if self.box is not None:
            self._opener.end_sandbox(self.box.name)


class _Pool:
    """Sandboxes of one image that wait to be used, the oldest first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.leases: list[_Lease] = []
        self.changed = asyncio.Event()


class Sandboxes:
    """Lends sandboxes to the attempts of a process: an async context manager, entered for the whole run.

    `docs/guide/sandboxes.md` has a loop that uses it.
    """

    def __init__(
        self,
        backend: str | Mapping[str, Any] = "local",
        *,
        pool: int | Mapping[str, int] = 0,
        max_open: int = 0,
        ttl_s: float = 3600.0,
        start_s: float = 120.0,
        max_output_bytes: int = 65_536,
        folder: Path | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            backend: `local`, or `{kind: …}` with the fields of the settings of that kind.
            pool: How many sandboxes wait ready: of the default image, or by image.
            max_open: The most sandboxes at a time, those in pools included; 0 is no limit.
            ttl_s: The time to live of a sandbox, seconds; longer than a trajectory.
            start_s: How long a start is repeated before its attempt fails.
            max_output_bytes: How much is kept of each output of a command.
            folder: Where the log is; by default in the folder of the run.

        Raises:
            ConfigError: A setting or an environment variable is wrong or missing.
            EnvironmentNotReady: The package of a service is not installed.
        """
        self._given = {"kind": backend} if isinstance(backend, str) else dict(backend)
        settings = parse_backend(backend)
        sizes = {"": pool} if isinstance(pool, int) else dict(pool)
        for name, value in (("ttl_s", ttl_s), ("start_s", start_s), ("max_output_bytes", max_output_bytes)):
            if value <= 0:
                raise ConfigError(f"sandboxes: {name} is {value}; expected more than 0")
        if min(sizes.values(), default=0) < 0 or max_open < 0:
            raise ConfigError(f"sandboxes: pool is {pool}, max_open {max_open}; expected at least 0")
        if max_open and sum(sizes.values()) >= max_open:
            raise ConfigError(
                f"sandboxes: the pools hold {sum(sizes.values())} and max_open is {max_open}; it must be "
                "more, because others start beside the pools"
            )
        self._sizes = {image: size for image, size in sizes.items() if size}
        self._max_open, self._start_s = max_open, start_s
        self._max_output_bytes = max_output_bytes
        self._folder = folder
        run = run_folder()
        self._backend: Any = settings.open_backend("" if run is None else run.name)
        self._nursery: Nursery | None = None
        self.ttl_s = ttl_s
        """The time to live of a sandbox."""
        self.runs_agents = isinstance(self._backend, AgentBackend)
        """Whether its sandboxes may run whole agents."""
        self.builds_images = isinstance(self._backend, BuildingBackend)
        self.has_images = not isinstance(self._backend, LocalSandboxBackend)

    async def __aenter__(self) -> Self:
        """Reach the backend, begin to fill the pools, and end what earlier processes of the run have left.

        Raises:
            EnvironmentNotReady: The backend cannot be reached.
        """
        await self._backend.__aenter__()
        try:
            folder = self._folder or _default_folder()
            path = folder / f"{secrets.token_hex(8)}.jsonl"
            self._log = await asyncio.to_thread(_new_log, path, self._given)
            self._hold = ReleasedBy(release_command(path))
            await self._hold.__aenter__()
        except BaseException:
            await self._backend.__aexit__(None, None, None)
            raise
        self._live: dict[str, asyncio.TimerHandle | None] = {}
        """What may exist, and what ends its time to live; None while it starts."""
        self._not_ended: set[str] = set()
        """What could not be ended, and is tried again at the end."""
        self._snapshots: set[str] = set()
        self._closing = False
        self._slots = asyncio.Semaphore(self._max_open or 1 << 30)
        self._pools = {image: _Pool(size) for image, size in self._sizes.items()}
        self._nursery = await Nursery().__aenter__()
        self._services = [self._nursery.start_task("sandbox leftovers", self._sweep())]
        for image, pool in self._pools.items():
            self._services.append(self._nursery.start_task("sandbox pool", self._fill_pool(image, pool)))
        return self

    async def __aexit__(self, *error: object) -> None:
        """End all sandboxes and snapshots; what does not end within a minute is left to the reaper."""
        nursery, self._closing = self._nursery, True
        assert nursery is not None
        for service in self._services:
            service.cancel()
        for name in [name for name, timer in self._live.items() if timer is not None]:
            self.end_sandbox(name)  # those that are starting end when they have started
        for name in self._not_ended:
            nursery.start_task(f"end of {name}", self._end(name))
        for name in self._snapshots:
            nursery.start_task(f"end of snapshot {name}", self._end_snapshot(name))
        try:
            async with asyncio.timeout(_CLOSE_S):
                await nursery.__aexit__(None, None, None)
        except TimeoutError:
            pass
        finally:
            self._nursery = None
            await self._backend.__aexit__(None, None, None)
            if self._log.num_live:
                log.warning("%d sandboxes have not ended; the reaper tries again", self._log.num_live)
            else:
                await self._hold.__aexit__(None, None, None)
            self._log.close()

    @asynccontextmanager
    async def open(self, session: Session | None = None, *, image: str = "") -> AsyncIterator[ShellSandbox]:
        """Lend a sandbox to a block, from a pool or started for it; it ends after the block.

        If the block is stuck when its attempt is over, the sandbox ends then.

        Args:
            session: Its `status` tells that a sandbox is being started.
            image: An image of the backend, or what `ShellSandbox.snapshot` returned; empty is the default.

        Raises:
            SandboxLost: None could be started for `start_s`: fails the attempt, which is repeated.
        """
        leases: list[_Lease] = []

        def end() -> None:
            for lease in leases:
                lease.end()

        forget = call_at_scope_end(end)
        try:
            status = "" if session is None else session.status
            if session is not None:
                session.status = "starting a sandbox"
            box = await self._borrow(leases, image)
            if session is not None:
                session.status = status
            yield box
        finally:
            forget()
            end()

    async def build_image(self, image: str, context: bytes) -> None:
        """Build an image as `BuildingBackend.build_image` does, where the backend `builds_images`."""
        await self._backend.build_image(image, context)

    def end_sandbox(self, name: str) -> None:
        """Begin to end a sandbox, without waiting for it."""
        if name not in self._live:
            return
        if (timer := self._live.pop(name)) is not None:
            timer.cancel()
        assert self._nursery is not None
        work = self._end(name)
        try:
            self._nursery.start_task(f"end of {name}", work)
        except RuntimeError:  # the run's end has taken too long: it stays in the log
            work.close()

    async def _borrow(self, leases: list[_Lease], image: str) -> ShellSandbox:
        pool = self._pools.get(image) if self._nursery is not None else None
        while pool is not None and pool.leases:
            lease = pool.leases.pop(0)
            pool.changed.set()
            if lease.retire is not None:
                lease.retire.cancel()
            leases.append(lease)
            if lease.box is not None and await self._answers(lease.box):
                return lease.box
            lease.end()
        leases.append(lease := _Lease(self))
        return await self._start(lease, image, self._start_s)

    async def _answers(self, box: ShellSandbox) -> bool:
        try:
            return (await box.exec("true", timeout_s=10)).exit_code == 0
        except SandboxLost as error:
            log.info("a sandbox was gone before it was used: %s", error)
            return False

    async def _start(self, lease: _Lease, image: str, patience_s: float | None) -> ShellSandbox:
        """Start a sandbox in a task of its own, which goes on if this is cancelled; None tries it once."""
        if self._nursery is None or self._closing:
            raise RuntimeError(
                "these sandboxes are not open: enter `Sandboxes` in the agent loop's __aenter__"
            )
        started: asyncio.Future[ShellSandbox] = asyncio.get_running_loop().create_future()
        self._nursery.start_task("start of a sandbox", self._start_for(lease, image, patience_s, started))
        try:
            async with asyncio.timeout(patience_s):
                return await started
        except TimeoutError as error:
            raise SandboxLost(f"a sandbox did not start within start_s = {patience_s:g}: raise it") from error

    async def _start_for(
        self, lease: _Lease, image: str, patience_s: float | None, started: asyncio.Future[ShellSandbox]
    ) -> None:
        try:
            box = await self._start_patiently(lease, image, patience_s)
        except SandboxLost as error:
            if not started.done():
                started.set_exception(error)
            return
        lease.box = box
        if lease.is_over or self._closing:
            lease.end()
        if not started.done():
            started.set_result(box)

    async def _start_patiently(self, lease: _Lease, image: str, patience_s: float | None) -> ShellSandbox:
        clock = asyncio.get_running_loop().time
        until_s, delay_s = clock() + (patience_s or 0.0), _FIRST_DELAY_S
        while True:
            try:
                return await self._start_once(image)
            except SandboxLost as error:
                final = isinstance(error, SandboxRefused) or lease.is_over or self._closing
                if final or clock() + delay_s > until_s:
                    raise
                log.info("a sandbox did not start, which is repeated in %g s: %s", delay_s, error)
            await sleep_idle(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    async def _start_once(self, image: str) -> ShellSandbox:
        await self._slots.acquire()
        if self._closing:
            self._slots.release()
            raise SandboxLost("the run ends")
        name = f"async-rl-{secrets.token_hex(8)}"
        self._live[name] = None
        try:
            await asyncio.to_thread(self._log.begin, self._record(name))
            await self._backend.start(name, image, self.ttl_s)
        except asyncio.CancelledError:
            raise  # the run's end has taken too long: it stays in the log
        except SandboxLost:
            self.end_sandbox(name)
            raise
        except Exception as error:  # a full disk, or an answer that nobody expects
            self.end_sandbox(name)
            raise SandboxLost(f"a sandbox did not start: {type(error).__name__}: {error}") from error
        loop = asyncio.get_running_loop()
        self._live[name] = loop.call_later(self.ttl_s, self._end_expired, name)
        return ShellSandbox(
            self._backend, name, max_output_bytes=self._max_output_bytes, take_snapshot=self._take_snapshot
        )

    def _end_expired(self, name: str) -> None:
        log.warning("sandbox %s has lived for %g s (ttl_s) and is ended", name, self.ttl_s)
        self.end_sandbox(name)

    async def _end(self, name: str) -> None:
        delay_s = _FIRST_DELAY_S
        try:
            for _ in range(_END_TRIES):
                try:
                    async with asyncio.timeout(_END_S):
                        await self._backend.end(name)
                    await asyncio.to_thread(self._log.end, name)
                    self._not_ended.discard(name)
                    return
                except Exception as error:  # no answer, a full disk, or an answer that nobody expects
                    problem = error
                await sleep_idle(delay_s)
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
            self._not_ended.add(name)
            log.warning("sandbox %s cannot be ended now: %s: %s", name, type(problem).__name__, problem)
        finally:
            self._slots.release()

    async def _take_snapshot(self, name: str) -> str:
        snapshot = secrets.token_hex(8)
        self._snapshots.add(snapshot)
        await asyncio.to_thread(self._log.begin, self._record(snapshot, is_snapshot=True))
        image: str = await self._backend.snapshot(name, snapshot)
        return image

    async def _end_snapshot(self, snapshot: str) -> None:
        try:
            await self._backend.end_snapshot(snapshot)
            await asyncio.to_thread(self._log.end, snapshot)
        except SandboxLost as error:
            log.warning("the snapshot %s cannot be removed: %s", snapshot, error)

    def _record(self, name: str, *, is_snapshot: bool = False) -> Record:
        return Record(begin=name, expires_s=time.time() + self.ttl_s, is_snapshot=is_snapshot)

    async def _fill_pool(self, image: str, pool: _Pool) -> None:
        """Start a sandbox whenever the pool has too few, one after the other; after a failure wait longer."""
        delay_s = _FIRST_DELAY_S
        while True:
            while len(pool.leases) < pool.size:
                lease = _Lease(self)
                try:
                    await self._start(lease, image, None)
                except SandboxLost as error:
                    log.warning("a sandbox of the pool did not start; again in %g s: %s", delay_s, error)
                    await sleep_idle(delay_s)
                    delay_s = min(2 * delay_s, _MAX_DELAY_S)
                    continue
                except asyncio.CancelledError:
                    lease.end()
                    raise
                delay_s = _FIRST_DELAY_S
                loop = asyncio.get_running_loop()
                lease.retire = loop.call_later(self.ttl_s / 2, self._retire, pool, lease)
                pool.leases.append(lease)
            pool.changed.clear()
            with waiting("idle"):
                await pool.changed.wait()

    def _retire(self, pool: _Pool, lease: _Lease) -> None:
        pool.leases.remove(lease)
        pool.changed.set()
        lease.end()

    async def _sweep(self) -> None:
        while True:
            await end_leftovers(self._log.path.parent, self._log.path)
            await sleep_idle(_SWEEP_S)
            try:
                await asyncio.to_thread(self._log.touch)
            except OSError as error:
                log.warning("the log of sandboxes cannot be touched: %s", error)


def _default_folder() -> Path:
    if (run := run_folder()) is not None:
        return run / "sandboxes"
    return private_folder(Path(tempfile.gettempdir(), f"async-rl-sandboxes-{os.getuid()}"))


def _new_log(path: Path, backend: dict[str, Any]) -> SandboxLog:
    path.parent.mkdir(parents=True, exist_ok=True)
    return SandboxLog(path, backend)
