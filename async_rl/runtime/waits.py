"""Named waits: a record of which actor waits for what, and since when, for as long as the wait lasts.

```
 acting("trajectory", id)        the actor: everything started inside waits in its name
   waiting("slot")               the wait: open from `with` to the end of the block
   waiting("agent loop", name)
     waiting("chunk", engine_id)   the stream calls `renew` with every chunk
```

A context variable holds the actor. Tasks and threads inherit it, so a tool can name its wait without knowing
its trajectory. Naming a wait costs about one microsecond. `async_rl.observability.diagnosis` follows the open
waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Final, Literal, NamedTuple, Protocol, Self

import msgspec


class WaitKind(NamedTuple):
    """One thing that can be waited for; `{}` in a text stands for the target."""

    awaited: str
    """Completes "waits for ...": `a chunk of {}`."""
    fault: str
    """What is wrong when the wait lasts too long: `{} sends no more chunks`."""
    meaning: str
    """When this wait is open, for the documentation."""


WAIT_KINDS: Final[dict[str, WaitKind]] = {
    "admission": WaitKind(
        "admission",
        "admission does not open",
        "The staleness bound or the spool must let one more group in.",
    ),
    "agent loop": WaitKind(
        "agent loop {}",
        "agent loop {} awaits something of its own that does not come",
        "A user's agent loop is running, outside of any other wait.",
    ),
    "batch": WaitKind(
        "a batch",
        "no batch comes",
        "Groups that may be trained must become ready.",
    ),
    "capacity": WaitKind(
        "capacity in the spool",
        "the spool never has capacity",
        "The spool must have capacity for more bytes.",
    ),
    "checkpoint": WaitKind(
        "a checkpoint",
        "the trainer does not finish its checkpoint",
        "The trainer is writing a checkpoint.",
    ),
    "chunk": WaitKind(
        "a chunk of {}",
        "{} sends no more chunks",
        "A running engine call must send its next chunk.",
    ),
    "clean-up": WaitKind(
        "user code to clean up",
        "user code does not end after its cancellation",
        "User code was cancelled and may release what it holds.",
    ),
    "devices": WaitKind(
        "the shared devices",
        "the shared devices are not handed over",
        "Engines and trainer share devices, and the other side is using them.",
    ),
    "disk": WaitKind(
        "the disk",
        "the disk does not respond",
        "Frames are being written, read or packed.",
    ),
    "drain": WaitKind(
        "running work to end",
        "running work does not end",
        "Running work must end while the run stops.",
    ),
    "engine": WaitKind(
        "an engine that serves",
        "no engine serves",
        "An engine must become available.",
    ),
    "engine start": WaitKind(
        "the start of {}",
        "{} does not start",
        "An engine is starting.",
    ),
    "engine update": WaitKind(
        "{} to take new weights",
        "{} does not take its new weights",
        "An engine is taking new weights.",
    ),
    "evaluation": WaitKind(
        "the evaluation of a weight version",
        "an evaluation does not end",
        "A weight version is being evaluated, or an evaluation slot must become free.",
    ),
    "export": WaitKind(
        "the Hugging Face export",
        "the trainer does not finish its export",
        "The trainer is writing the Hugging Face export.",
    ),
    "first chunk": WaitKind(
        "the first chunk of {}",
        "{} does not begin to respond",
        "An engine call is queued or prefilling.",
    ),
    "frames": WaitKind(
        "the trainer to read {}",
        "the trainer does not read {}",
        "The trainer's ranks are reading the frames of a batch.",
    ),
    "hand-over": WaitKind(
        "the trainer to move {}",
        "the trainer does not move {}",
        "The trainer is moving its memory to the host or back.",
    ),
    "idle": WaitKind(
        "{}",
        "nothing wakes it",
        "Nothing is due before a signal, a quarantine or the next second.",
    ),
    "grants": WaitKind(
        "rollout workers to send nothing more to {}",
        "rollout workers do not confirm that they send nothing more to {}",
        "Workers must confirm that they begin no more calls, or their grants must expire.",
    ),
    "model": WaitKind(
        "the model {} to answer",
        "the model {} does not answer",
        "A judge, or another model in `models`, is answering.",
    ),
    "publish": WaitKind(
        "the trainer to publish {}",
        "the trainer does not publish {}",
        "The trainer is publishing its weights.",
    ),
    "reward": WaitKind(
        "reward {}",
        "reward {} does not return",
        "A reward call is running.",
    ),
    "reward queue": WaitKind(
        "a call of reward {} to end",
        "no call of reward {} ends",
        "Another call of the same reward must end first.",
    ),
    "next update": WaitKind(
        "the next weight update",
        "no weight update follows",
        "An engine that joins, or was restarted, takes the next version together with the others.",
    ),
    "node": WaitKind(
        "node {} to answer",
        "node {} does not answer",
        "A batch needs finished trajectories that are on a node.",
    ),
    "rollout worker": WaitKind(
        "a rollout worker to come up",
        "no rollout worker comes up",
        "A rollout worker is starting.",
    ),
    "routing": WaitKind(
        "its routing rows",
        "routing rows are not decoded",
        "The routing rows of a finished trajectory are being decoded.",
    ),
    "send weights": WaitKind(
        "the trainer to send weights",
        "the trainer does not send its weights",
        "The trainer is sending its weights.",
    ),
    "weight groups": WaitKind(
        "engines to join the trainer's process groups",
        "engines do not join the trainer's process groups",
        "Engines are joining the process groups in which they receive weights.",
    ),
    "slot": WaitKind(
        "a free slot",
        "no slot becomes free",
        "One of `rollout.max_concurrent_trajectories` must become free.",
    ),
    "snapshot": WaitKind(
        "the trainer to copy its weights, {}",
        "the trainer does not copy its weights, {}",
        "The trainer is copying its weights.",
    ),
    "sync lock": WaitKind(
        "another weight update to end",
        "another weight update does not end",
        "Another weight update must end first.",
    ),
    "teacher": WaitKind(
        "the teacher {} to score a trajectory",
        "the teacher {} does not score a trajectory",
        "A finished trajectory is being scored.",
    ),
    "tokeniser": WaitKind(
        "the tokeniser to read {} of messages",
        "the tokeniser does not finish {} of messages",
        "Long messages of a trajectory, or for a judge, are being tokenised in a thread.",
    ),
    "tool": WaitKind(
        "tool {}",
        "tool {} does not return",
        "A tool call is running.",
    ),
    "trackers": WaitKind(
        "the trackers to finish",
        "a tracker does not finish",
        "Trackers are writing what they hold at the end of a run.",
    ),
    "trainer lock": WaitKind(
        "the trainer to be free",
        "the trainer is not released",
        "The trainer is in use.",
    ),
    "trainer start": WaitKind(
        "the trainer to start",
        "the trainer does not start",
        "The trainer is starting.",
    ),
    "trainer step": WaitKind(
        "trainer step {}",
        "trainer step {} does not return",
        "The trainer is training a batch.",
    ),
    "trajectories": WaitKind(
        "its trajectories",
        "its trajectories do not end",
        "The siblings of a group must end.",
    ),
    "weight update": WaitKind(
        "weight version {}",
        "weight version {} does not arrive",
        "All engines are taking a weight version.",
    ),
}
"""All waits by name; the name is the label of `oldest_wait_seconds`."""


class WaitNode(NamedTuple):
    """An actor that waits, or a thing that is waited for."""

    kind: str
    id: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.id}" if self.id else self.kind


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one open wait."""

    who: WaitNode
    on: str
    target: str = ""
    age_s: float
    """Time since the wait began or was last renewed."""
    limit_s: float | None = None
    why: str | None = None
    """The reason that the awaited object gives."""


class WaitingActor(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one actor, which computes or waits."""

    who: WaitNode
    parent: WaitNode | None = None
    untouched_s: float
    """Time since the actor began, or since one of its waits ended or was renewed."""


class Waits:
    """All open waits of a run. Only the event loop's thread writes; other threads may read.

    Example:
        >>> waits = Waits(time.monotonic)
        >>> with acting("run", waits=waits), waiting("engine", why=lambda: "engine-0 updating"):
        ...     waits.open_waits()[0].why
        'engine-0 updating'
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without open waits."""
        self.clock = clock
        self.open: dict[waiting, None] = {}
        """Open waits in the order in which they began."""
        self.acting: dict[acting, None] = {}
        self.longest_s: dict[str, float] = {}
        """Longest wait that succeeded, by kind."""
        self.heard_s: dict[str, float] = {}
        """Time of the last chunk, by engine."""
        self.progressed_s = clock()

    def note_progress(self) -> None:
        """Note progress of the run: a token, the end of a trajectory, a step, or an engine that serves."""
        self.progressed_s = self.clock()

    @property
    def quiet_s(self) -> float:
        """Time since the run last made progress."""
        return self.clock() - self.progressed_s

    def open_waits(self, min_age_s: float = 0.0, *, except_on: str | None = None) -> list[Wait]:
        """Return the open waits that have lasted so long, the first begun first.

        Args:
            min_age_s: Younger waits are left out.
            except_on: A kind of waits that is left out.
        """
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
            if now - wait.since_s >= min_age_s and wait.on != except_on
        ]

    def actors(self) -> list[WaitingActor]:
        """Return all actors of the run."""
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
        """Return the age of the oldest open wait of each kind."""
        now, oldest = self.clock(), dict[str, float]()
        for wait in list(self.open):
            age_s = now - wait.since_s
            if age_s > oldest.get(wait.on, -1.0):
                oldest[wait.on] = age_s
        return oldest


class acting:
    """Make the block act in a name: waits inside it belong to this actor.

    Args:
        kind: `train loop`, `service`, `group`, `trajectory` or `run`.
        id: Distinguishes actors of one kind.
        waits: Where its waits are recorded; None inherits those of the enclosing actor.
    """

    __slots__ = ("_token", "parent", "touched_s", "waits", "who")

    def __init__(self, kind: str, id: str = "", *, waits: Waits | None = None) -> None:
        self.who = WaitNode(kind, id)
        self.parent: acting | None = None if waits is not None else _acting.get()
        self.waits: Waits = waits if waits is not None else _acting.get().waits
        self.touched_s = self.waits.clock()
        self._token: Token[acting] | None = None

    def __enter__(self) -> Self:
        self._token = _acting.set(self)
        return self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._token is not None
        _acting.reset(self._token)
        self.end()

    def begin(self) -> Self:
        """Act without a block, for what has no task of its own; `end` it."""
        self.waits.acting[self] = None
        return self

    def end(self) -> None:
        """End what `begin` began."""
        del self.waits.acting[self]


class Scope(Protocol):
    """What is around a wait and can end it early, as an `asyncio.Timeout` can."""

    def expired(self) -> bool:
        """Whether it has ended already, or will at once."""
        ...

    def reschedule(self, when: float) -> None:
        """Let it expire at a time of the event loop."""
        ...


async def sleep_idle(seconds: float) -> None:
    """Sleep, in a wait for time alone."""
    with waiting("idle"):
        await asyncio.sleep(seconds)


class waiting:
    """Record that the current actor waits for something while the block runs.

    Args:
        on: The kind of wait, a key of `WAIT_KINDS`.
        target: An engine's id, a tool's name, and so on.
        limit_s: Longest wait that is not a fault; None takes the config's limit for this kind.
        why: Returns the reason in words; called only when the wait is reported.
        scope: What is around the wait; `expire` lets it expire early.
    """

    __slots__ = ("actor", "cut", "limit_s", "on", "scope", "since_s", "target", "why")

    def __init__(
        self,
        on: str,
        target: str = "",
        limit_s: float | None = None,
        why: Callable[[], str] | None = None,
        scope: Scope | None = None,
    ) -> None:
        assert on in WAIT_KINDS, f"{on!r} is not in WAIT_KINDS"
        self.on = on
        self.target = target
        self.limit_s = limit_s
        self.why = why
        self.scope = scope
        self.cut = False
        """Whether `end` ended the wait."""

    def __enter__(self) -> Self:
        return self.begin(_acting.get())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(succeeded=kind is None)

    def begin(self, actor: acting) -> Self:
        """Wait without a block, in the name of an actor; `end` it."""
        self.actor = actor
        waits = actor.waits
        self.since_s = waits.clock()
        waits.open[self] = None
        return self

    def end(self, *, succeeded: bool = True) -> None:
        """End what `begin` began."""
        actor = self.actor
        waits = actor.waits
        del waits.open[self]
        actor.touched_s = now = waits.clock()
        if succeeded and now - self.since_s > waits.longest_s.get(self.on, 0.0):
            waits.longest_s[self.on] = now - self.since_s

    async def __aenter__(self) -> Self:
        """Support `async with asyncio.timeout(...), waiting(...):`."""
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)

    def renew(self, on: str | None = None) -> None:
        """Restart the wait's age because the run made progress; `on` changes the kind of wait."""
        waits = self.actor.waits
        now = waits.clock()
        if on is not None:
            self.on = on
        self.since_s = self.actor.touched_s = waits.progressed_s = waits.heard_s[self.target] = now

    def expire(self) -> bool:
        """Let the scope expire now; return False if there is none or it already expires."""
        if self.scope is None or self.cut or self.scope.expired():
            return False
        self.cut = True
        self.scope.reschedule(asyncio.get_running_loop().time())
        return True


class NamedLock(asyncio.Lock):
    """A lock whose acquisition is a named wait when it is contended."""

    def __init__(self, on: str) -> None:
        super().__init__()
        self._on = on

    async def acquire(self) -> Literal[True]:
        """Acquire the lock, as `asyncio.Lock.acquire` does."""
        if not self.locked():
            return await super().acquire()
        with waiting(self._on):
            return await super().acquire()


def progressed() -> None:
    """Note progress of the run that the current task belongs to."""
    _acting.get().waits.note_progress()


def heard_of(engine_id: str) -> None:
    """Note that an engine has sent something to another process of the run."""
    waits = _acting.get().waits
    waits.note_progress()
    waits.heard_s[engine_id] = waits.progressed_s


def _default_actor() -> acting:
    """Return the actor of waits outside a run: in tests and in users' own programs."""
    actor = acting.__new__(acting)
    actor.who, actor.parent, actor.waits, actor.touched_s = WaitNode("no run"), None, Waits(), 0.0
    return actor


_acting: ContextVar[acting] = ContextVar("acting", default=_default_actor())  # noqa: B039 - never written to
