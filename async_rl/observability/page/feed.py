"""One producer for all who watch: the run at this moment once a second, the charts with each step.

```
 loop       consumes              waits for            unblocked by      produces
 run        the run, its records  somebody to watch    a client          messages, in each client's queue
 a client   its queue             a message            run               server-sent events
```

Nothing is looked at while nobody watches. A client whose queue is full does not read: it is dropped, and when
it comes back it is told what it has missed, for each message is whole by itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import msgspec

from async_rl import __version__
from async_rl.config import Config
from async_rl.observability.evaluation_record import EvaluationRecord
from async_rl.observability.page.charts import RECENT, Section, sections
from async_rl.observability.page.tiles import Tile, tiles
from async_rl.observability.page.view import Now
from async_rl.observability.records import Figure, StepRecord, is_finite
from async_rl.runtime.threads import call_in_thread
from async_rl.runtime.waits import acting, waiting
from async_rl.trainer_protocol import Extreme

log = logging.getLogger(__name__)

MAX_CLIENTS: Final = 16
_QUEUED: Final = 8
"""Messages that a client may be behind."""
_EVERY_S: Final = 1.0
_DRAW_SHARE: Final = 0.05
"""Of the time at most so much goes into drawing: the charts of a very long run come less often."""


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table of steps."""

    step: int
    reward: Figure
    ppo_kl: Figure
    staleness_p95: float
    tokens_per_s: float
    wait_s: float
    step_s: float
    sync_s: float


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """All that changes with a step."""

    id: str
    """Tells this from any other: of another step, of the same step done again, of another driver."""
    tiles: Sequence[Tile] = ()
    sections: Sequence[Section] = ()
    recent: Sequence[StepRow] = ()
    """Newest first."""
    extremes: Sequence[Extreme] = ()
    """Of the last step."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The whole page."""

    run: str
    version: str
    now: Now
    steps: Steps


class TooManyClients(Exception):
    """`MAX_CLIENTS` are connected."""


class Client:
    """Somebody who watches."""

    def __init__(self, drop: Callable[[], None]) -> None:
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUED)
        self._drop = drop
        self._dropped = False

    def send(self, message: bytes | None) -> None:
        """Queue a message, None for the end; who does not read is dropped."""
        if self._dropped:
            return
        try:
            self._messages.put_nowait(message)
        except asyncio.QueueFull:
            log.info("a client of the live page does not read what it is sent: dropped")
            self._dropped = True
            self._drop()

    async def messages(self) -> AsyncIterator[bytes]:
        """What it is sent, up to the end."""
        while True:
            with waiting("idle"):
                message = await self._messages.get()
            if message is None:
                return
            yield message


class Feed:
    """See the module.

    Example:
        >>> feed = Feed(config, pulse.now, lambda: run_log.records)
        >>> async with services(page=feed.run): ...
    """

    def __init__(
        self,
        config: Config,
        look: Callable[[], Now],
        records: Callable[[], Sequence[StepRecord]],
        evaluations: Callable[[], Sequence[EvaluationRecord]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is looked at yet.

        Args:
            config: Of the run.
            look: Sees the run as it is; called in the event loop.
            records: All steps so far.
            evaluations: All evaluations so far.
            clock: Monotonic seconds, of the time that drawing takes.
        """
        self._run = config.run.name
        self._max_staleness = config.rollout.max_staleness
        self._look = look
        self._records = records
        self._evaluations = evaluations
        self._clock = clock
        self._life = f"{time.time_ns():x}"
        self._clients: dict[Client, None] = {}
        self._watched = asyncio.Event()
        self._drawing = asyncio.Lock()
        self._steps = Steps(id="")
        self._draw_again_s = -math.inf
        self._told = ""
        """Id of the steps that all clients have been sent."""

    async def run(self) -> None:
        """Tell all clients what is new, for ever; what keeps the page from being drawn ends no run."""
        try:
            while True:
                with waiting("idle"):
                    await self._watched.wait()
                try:
                    await self._publish()
                except Exception:
                    log.exception("the live page cannot be drawn")
                with waiting("idle"):
                    await asyncio.sleep(_EVERY_S)
        finally:
            for client in self._clients:
                client.send(_event("end", b"{}"))
                client.send(None)

    @contextmanager
    def client(self, drop: Callable[[], None], known: str) -> Iterator[Client]:
        """Watch for as long as the block takes.

        Args:
            drop: Ends the connection of a client that does not read.
            known: Id of the steps that it has.

        Raises:
            TooManyClients: There is no room.
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
        """The whole page as JSON."""
        steps = await self._drawn()
        now = self._look()
        return _ENCODER.encode(Snapshot(run=self._run, version=__version__, now=now, steps=steps))

    async def _publish(self) -> None:
        message = _event("now", _ENCODER.encode(self._look()))
        for client in list(self._clients):
            client.send(message)
        if self._clock() < self._draw_again_s:
            return
        steps = await self._drawn()
        if steps.id != self._told:
            self._told = steps.id
            message = _steps_event(steps)
            for client in list(self._clients):
                client.send(message)

    async def _drawn(self) -> Steps:
        """The charts of all steps so far, drawn once for all who want them, in a thread."""
        async with self._drawing:
            records, evaluations = tuple(self._records()), tuple(self._evaluations())
            key = f"{records[-1].step}.{records[-1].time_s:.3f}" if records else "0"
            key += f".{len(evaluations)}" if evaluations else ""
            steps_id = f"{self._life}.{key}"
            if steps_id != self._steps.id:
                begin_s = self._clock()
                draw = partial(_draw, steps_id, records, self._max_staleness, evaluations)
                self._steps = await call_in_thread(draw, name="page")
                end_s = self._clock()
                self._draw_again_s = end_s + (end_s - begin_s) / _DRAW_SHARE
            return self._steps


def _draw(
    steps_id: str,
    records: Sequence[StepRecord],
    max_staleness: int,
    evaluations: Sequence[EvaluationRecord] = (),
) -> Steps:
    return Steps(
        id=steps_id,
        tiles=tiles(records, max_staleness),
        sections=sections(records, max_staleness, evaluations),
        recent=[_row(record) for record in reversed(records[-RECENT:])],
        extremes=records[-1].extremes if records else (),
    )


def _row(record: StepRecord) -> StepRow:
    return StepRow(
        step=record.step,
        reward=record.reward_mean,
        ppo_kl=record.ppo_kl_bypass if is_finite(record.ppo_kl_bypass) else record.ppo_kl,
        staleness_p95=record.staleness_p95,
        tokens_per_s=record.tokens_per_s,
        wait_s=record.wait_s,
        step_s=record.step_s,
        sync_s=record.sync_s,
    )


def _steps_event(steps: Steps) -> bytes:
    return b"id: " + steps.id.encode() + b"\n" + _event("steps", _ENCODER.encode(steps))


_ENCODER: Final = msgspec.json.Encoder()


def _event(name: str, data: bytes) -> bytes:
    """One server-sent event; JSON has no newlines that would end it."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
