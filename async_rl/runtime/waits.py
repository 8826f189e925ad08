"""Every wait has a name: who waits for what since when, written down while it lasts.

```
 acting("trajectory", id)        who: everything started inside waits in its name
   waiting("slot")               for what: open from `with` to the end of the block
   waiting("agent loop", name)
     waiting("chunk", engine_id)   the stream calls `renew` with every chunk
```

A task knows who it acts for by a context variable, which tasks and threads started by it inherit, so that a
tool can name its wait without being told of trajectories. To name a wait costs about a microsecond.
`async_rl.observability.diagnosis` makes chains of what is open here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Literal, NamedTuple, Self

import msgspec

Awaited = Literal[
    "admission",
    "agent loop",
    "batch",
    "checkpoint",
    "chunk",
    "devices",
    "disk",
    "drain",
    "engine",
    "engine start",
    "engine update",
    "evaluation",
    "export",
    "first chunk",
    "hand-over",
    "idle",
    "publish",
    "reward",
    "reward queue",
    "rollout worker",
    "room",
    "routing",
    "send weights",
    "slot",
    "snapshot",
    "sync lock",
    "tool",
    "trainer lock",
    "trainer start",
    "trainer step",
    "trackers",
    "trajectories",
    "turn",
    "weight update",
]
"""What can be waited for; the label of `oldest_wait_seconds`.

admission: that the staleness bound or the spool lets one more group in.
agent loop: a user's loop, less what it awaits of ours.
batch: groups that may be trained on.  trajectories: the siblings of a group.
first chunk, chunk: of an engine call, in its queue or running.
disk: frames being written, read and packed.  room: bytes in the spool.
reward queue: one of the calls that a reward may have at a time.
drain: running work while the run stops.  slot: one of `rollout.max_concurrent_trajectories`.
rollout worker: that one is up.  turn: in a rollout worker, of the policy; the driver knows what it waits for.
devices: that it is one's turn on devices that engines and trainer share.
hand-over: that the trainer has moved its memory, to the host or back.
engine: one that serves.  engine start, engine update: of a certain one.
evaluation: of a weight version, or a place in it.
publish, send weights, snapshot: by the trainer, of its weights.  weight update: of all engines.
routing: the rows of a finished trajectory.
sync lock, trainer lock: that nobody else updates engines, or uses the trainer.
trackers: that they have written what they have, at the end of a run.
idle: nothing is to be done before it (a signal, a quarantine, the next second).
"""


class WaitNode(NamedTuple):
    """Who waits, or what is waited for."""

    kind: str
    id: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.id}" if self.id else self.kind


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One open wait, at the moment of a look."""

    who: WaitNode
    on: Awaited
    target: str = ""
    age_s: float
    """Since it began, or since it was last renewed."""
    limit_s: float | None = None
    why: str | None = None
    """What the awaited thing says of itself."""


class WaitingActor(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who is at work or waits, at the moment of a look."""

    who: WaitNode
    parent: WaitNode | None = None
    untouched_s: float
    """Since it began, or since a wait of its ended or was renewed."""


class Waits:
    """All open waits of a run. Belongs to the event loop's thread; other threads may read.

    Example:
        >>> waits = Waits(time.monotonic)
        >>> with acting("run", waits=waits), waiting("engine", why=lambda: "engine-0 updating"):
        ...     waits.open_waits()[0].why
        'engine-0 updating'
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with none."""
        self.clock = clock
        self.open: dict[waiting, None] = {}
        """In the order in which they began."""
        self.acting: dict[acting, None] = {}
        self.longest_s: dict[str, float] = {}
        """By what was awaited: the longest wait that ended well."""
        self.heard_s: dict[str, float] = {}
        """By engine: when the last chunk came from it."""
        self.progressed_s = clock()

    def progress(self) -> None:
        """The run has moved: a token, the end of a trajectory, a step, an engine that serves."""
        self.progressed_s = self.clock()

    @property
    def quiet_s(self) -> float:
        """Since the run last moved."""
        return self.clock() - self.progressed_s

    def open_waits(self) -> list[Wait]:
        """What is waited for now, oldest beginning first."""
        now = self.clock()
        return [
            Wait(
                who=wait.actor.who,
                on=wait.on,
                target=wait.target,
                age_s=now - wait.since_s,
                limit_s=wait.limit_s,
                why=wait.why() if wait.why is not None else None,
            )
            for wait in list(self.open)
        ]

    def actors(self) -> list[WaitingActor]:
        """Who is there."""
        now = self.clock()
        return [
            WaitingActor(
                who=actor.who,
                parent=actor.parent.who if actor.parent is not None else None,
                untouched_s=now - actor.touched_s,
            )
            for actor in list(self.acting)
        ]

    def oldest_s(self) -> dict[str, float]:
        """Age of the oldest wait by what is awaited."""
        now, oldest = self.clock(), dict[str, float]()
        for wait in list(self.open):
            age_s = now - wait.since_s
            if age_s > oldest.get(wait.on, -1.0):
                oldest[wait.on] = age_s
        return oldest


class acting:
    """What the block does, it does in this name; waits inside are its own.

    Args:
        kind: `train loop`, `service`, `group`, `trajectory`, `run`.
        id: Tells it from others of its kind.
        waits: Where its waits are written down; None takes those of whoever started it.
    """

    __slots__ = ("_token", "parent", "touched_s", "waits", "who")

    def __init__(self, kind: str, id: str = "", *, waits: Waits | None = None) -> None:
        self.who = WaitNode(kind, id)
        self.parent: acting | None = None if waits is not None else _acting.get()
        self.waits: Waits = waits if waits is not None else _acting.get().waits
        self.touched_s = self.waits.clock()
        self._token: Token[acting] | None = None

    def __enter__(self) -> Self:
        self.waits.acting[self] = None
        self._token = _acting.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._token is not None
        _acting.reset(self._token)
        del self.waits.acting[self]


class waiting:
    """Whoever acts waits for something while the block runs.

    Args:
        on: What is awaited.
        target: Which one: an engine's id, a tool's name.
        limit_s: Longest wait that is no fault, where it is not the config's for this kind.
        why: Says in words what the awaited thing lacks; asked only when somebody looks.
        scope: The timeout around the wait; brought forward, it ends the wait as if its time were over.

    Example:
        >>> with waiting("chunk", "engine-0") as wait:
        ...     async for chunk in stream:
        ...         wait.renew()
    """

    __slots__ = ("actor", "cut", "limit_s", "on", "scope", "since_s", "target", "why")

    def __init__(
        self,
        on: Awaited,
        target: str = "",
        limit_s: float | None = None,
        why: Callable[[], str] | None = None,
        scope: asyncio.Timeout | None = None,
    ) -> None:
        self.on = on
        self.target = target
        self.limit_s = limit_s
        self.why = why
        self.scope = scope
        self.cut = False
        """Whether `end` ended it."""

    def __enter__(self) -> Self:
        self.actor = actor = _acting.get()
        waits = actor.waits
        self.since_s = waits.clock()
        waits.open[self] = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        actor = self.actor
        waits = actor.waits
        del waits.open[self]
        actor.touched_s = now = waits.clock()
        if kind is None and now - self.since_s > waits.longest_s.get(self.on, 0.0):
            waits.longest_s[self.on] = now - self.since_s

    async def __aenter__(self) -> Self:
        """As `__enter__`, so that it fits beside a timeout: `async with asyncio.timeout(…), waiting(…):`."""
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)

    def renew(self, on: Awaited | None = None) -> None:
        """Something came: the wait begins anew, as one for `on` where that has changed. The run has moved."""
        waits = self.actor.waits
        now = waits.clock()
        if on is not None:
            self.on = on
        self.since_s = self.actor.touched_s = waits.progressed_s = waits.heard_s[self.target] = now

    def end(self) -> bool:
        """Let the timeout around it expire now; False when it has none, or is expiring already."""
        if self.scope is None or self.cut:
            return False
        self.cut = True
        self.scope.reschedule(asyncio.get_running_loop().time())
        return True


class NamedLock(asyncio.Lock):
    """A lock; whoever is not let in at once waits for it by name."""

    def __init__(self, on: Awaited) -> None:
        super().__init__()
        self._on = on

    async def acquire(self) -> Literal[True]:
        """See `asyncio.Lock.acquire`."""
        if not self.locked():
            return await super().acquire()
        with waiting(self._on):
            return await super().acquire()


def progressed() -> None:
    """The run that this task belongs to has moved; see `Waits.progress`."""
    _acting.get().waits.progress()


def _nobody() -> acting:
    """Stands for whoever waits outside of a run: in tests, and in the user's own programs."""
    nobody = acting.__new__(acting)
    nobody.who, nobody.parent, nobody.waits, nobody.touched_s = WaitNode("nobody"), None, Waits(), 0.0
    return nobody


_acting: ContextVar[acting] = ContextVar("acting", default=_nobody())  # noqa: B039 - never written to
