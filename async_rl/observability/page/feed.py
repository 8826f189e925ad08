"""Feeds all clients of the live page: the run's state once a second, the charts after each step.

```
 loop       consumes              waits for            unblocked by      produces
 run        the run, its records  the first client     a client          messages in each client's queue
 a client   its queue             a message            run               server-sent events
```

The feed reads nothing while no client is connected. It drops a client that does not read, which it knows by
the client's full queue. A client that reconnects misses nothing: each message is complete by itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import msgspec

from async_rl import __version__
from async_rl.config import Config
from async_rl.observability.evaluation_record import EvaluationRecord
from async_rl.observability.page.charts import Section, sections
from async_rl.observability.page.tiles import Tile, tiles
from async_rl.observability.page.view import Now
from async_rl.observability.panels import RECENT, STEP_COLUMNS
from async_rl.observability.records import Figure, StepRecord
from async_rl.runtime.threads import call_in_thread
from async_rl.runtime.waits import acting, sleep_idle, waiting
from async_rl.trainer_protocol import Extreme

log = logging.getLogger(__name__)

MAX_CLIENTS: Final = 16
_QUEUED: Final = 8
"""The number of messages that a client may be behind."""


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on the page that changes with a step."""

    id: str
    """Unique to the step, to its repetition after a restart, and to the driver process."""
    tiles: Sequence[Tile] = ()
    sections: Sequence[Section] = ()
    columns: Sequence[str] = tuple(STEP_COLUMNS.values())
    """The headings of the table of steps."""
    recent: Sequence[Mapping[str, Figure]] = ()
    """Its rows, the newest first."""
    extremes: Sequence[Extreme] = ()
    """The extreme tokens of the last step."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All data of the page."""

    run: str
    version: str
    now: Now
    steps: Steps


class TooManyClients(Exception):
    """`MAX_CLIENTS` clients are connected already."""


class Client:
    """A connected reader of the live page."""

    def __init__(self, drop: Callable[[], None]) -> None:
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUED)
        self._drop = drop
        self._dropped = False

    def send(self, message: bytes | None) -> None:
        """Queue a message, or None for the end; drop the client if its queue is full."""
        if self._dropped:
            return
        try:
            self._messages.put_nowait(message)
        except asyncio.QueueFull:
            log.info("a client of the live page does not read what it is sent: dropped")
            self._dropped = True
            self._drop()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield the messages up to the end."""
        while True:
            with waiting("idle"):
                message = await self._messages.get()
            if message is None:
                return
            yield message


DescribeSteps = Callable[[Sequence[StepRecord]], Mapping[str, str]]
"""Returns what a run's steps say beside their figures, by the names of tiles."""


def no_description(records: Sequence[StepRecord]) -> Mapping[str, str]:
    """Return nothing."""
    return {}


class Feed:
    """Reads and draws a run for the clients of its live page, as the module describes."""

    def __init__(
        self,
        config: Config,
        read_status: Callable[[], Now],
        records: Callable[[], Sequence[StepRecord]],
        evaluations: Callable[[], Sequence[EvaluationRecord]] = tuple,
        *,
        describe_updates: DescribeSteps = no_description,
        refresh_s: float = 1.0,
        max_draw_share: float = 0.05,
    ) -> None:
        """Create a feed without clients.

        Args:
            config: The run's config.
            read_status: Returns the run's present state; called in the event loop.
            records: Returns the records of all steps so far.
            evaluations: Returns all evaluations so far.
            describe_updates: Returns what would make weight updates cost less, for the notes of tiles.
            refresh_s: Seconds between two messages about the run's state.
            max_draw_share: Share of the time that drawing may take: the charts of a very long run come less
                often.
        """
        self._run = config.run.name
        self._max_staleness = config.rollout.max_staleness
        self._read_status = read_status
        self._records = records
        self._evaluations = evaluations
        self._describe_updates = describe_updates
        self._refresh_s = refresh_s
        self._max_draw_share = max_draw_share
        self._driver_id = f"{time.time_ns():x}"
        self._clients: dict[Client, None] = {}
        self._watched = asyncio.Event()
        self._drawing = asyncio.Lock()
        self._steps = Steps(id="")
        self._draw_again_s = -math.inf
        self._sent_id = ""
        """The id of the steps that all clients have received."""

    @property
    def num_clients(self) -> int:
        """Return how many clients are connected."""
        return len(self._clients)

    async def run(self) -> None:
        """Send all clients what is new, for ever; an error in drawing is logged and does not end the run."""
        try:
            while True:
                with waiting("idle"):
                    await self._watched.wait()
                try:
                    await self._publish()
                except Exception:
                    log.exception("the live page cannot be drawn")
                await sleep_idle(self._refresh_s)
        finally:
            for client in self._clients:
                client.send(_event("end", b"{}"))
                client.send(None)

    @contextmanager
    def client(self, drop: Callable[[], None], known: str) -> Iterator[Client]:
        """Connect a client for the duration of the block.

        Args:
            drop: Closes the connection of a client that does not read.
            known: The id of the steps that the client has.

        Raises:
            TooManyClients: `MAX_CLIENTS` clients are connected already.
        """
        if len(self._clients) >= MAX_CLIENTS:
            raise TooManyClients
        client = Client(drop)
        if self._steps.id and known != self._steps.id:
            client.send(_steps_event(self._steps))
        self._clients[client] = None
        self._watched.set()
        try:
            with acting("page client"):
                yield client
        finally:
            del self._clients[client]
            if not self._clients:
                self._watched.clear()

    async def snapshot(self) -> bytes:
        """Return the whole page as JSON."""
        steps = await self._drawn()
        now = self._read_status()
        return _ENCODER.encode(Snapshot(run=self._run, version=__version__, now=now, steps=steps))

    async def _publish(self) -> None:
        message = _event("now", _ENCODER.encode(self._read_status()))
        for client in list(self._clients):
            client.send(message)
        if time.monotonic() < self._draw_again_s:
            return
        steps = await self._drawn()
        if steps.id != self._sent_id:
            self._sent_id = steps.id
            message = _steps_event(steps)
            for client in list(self._clients):
                client.send(message)

    async def _drawn(self) -> Steps:
        """Return the charts of all steps so far; a thread draws them once for all clients."""
        async with self._drawing:
            records, evaluations = tuple(self._records()), tuple(self._evaluations())
            key = f"{records[-1].step}.{records[-1].time_s:.3f}" if records else "0"
            key += f".{len(evaluations)}" if evaluations else ""
            steps_id = f"{self._driver_id}.{key}"
            if steps_id != self._steps.id:
                begin_s = time.monotonic()
                draw = partial(
                    draw_steps, steps_id, records, self._max_staleness, evaluations, self._describe_updates
                )
                self._steps = await call_in_thread(draw, name="page")
                end_s = time.monotonic()
                self._draw_again_s = end_s + (end_s - begin_s) / self._max_draw_share
            return self._steps


def draw_steps(
    steps_id: str,
    records: Sequence[StepRecord],
    max_staleness: int,
    evaluations: Sequence[EvaluationRecord] = (),
    describe_updates: DescribeSteps = no_description,
) -> Steps:
    """Draw everything on the page that changes with a step."""
    return Steps(
        id=steps_id,
        tiles=tiles(records, max_staleness, describe_updates(records)),
        sections=sections(records, max_staleness, evaluations),
        recent=[
            {name: getattr(record, name) for name in STEP_COLUMNS} for record in reversed(records[-RECENT:])
        ],
        extremes=records[-1].extremes if records else (),
    )


def _steps_event(steps: Steps) -> bytes:
    return b"id: " + steps.id.encode() + b"\n" + _event("steps", _ENCODER.encode(steps))


_ENCODER: Final = msgspec.json.Encoder()


def _event(name: str, data: bytes) -> bytes:
    """Return one server-sent event; JSON has no newlines that would end it."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
