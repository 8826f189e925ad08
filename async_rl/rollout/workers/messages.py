"""What driver and rollout workers tell each other, and the link that carries it.

Messages of a link arrive whole and in order, or the link is lost. All that concerns one attempt carries the
number of its `Play`: what comes of an attempt that is no more is not looked at.

```
 driver                                   worker
 Play ──────────────────────────────────► the loop starts
        ◄──── Read, Grow ────────────────  whenever the conversation grows; nobody waits
        ◄──── Write ─────────────────────  generate; one at a time of each session
 Growing ───────────────────────────────► only where the loop listens to the turn as it grows
        ◄──── Cut ───────────────────────  whoever awaited the turn was cancelled
 Wrote ─────────────────────────────────► always one for each Write
        ◄──── Ended | Failed ────────────
 Stop ──────────────────────────────────► instead: the attempt is no more
```
"""

from __future__ import annotations

from typing import Final, Literal, Protocol

import msgspec
import numpy as np

from async_rl import codec
from async_rl import errors as errors_of
from async_rl.errors import AsyncRLError, CorruptFrame, WorkerLost
from async_rl.types import Completion, Sampled, StopReason, Task, TurnRecord


class Message(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Anything that goes over a link."""


# -- from the driver ---------------------------------------------------------------------------------------


class Play(Message, frozen=True, kw_only=True, eq=False):
    """Run the agent loop of a task."""

    play: int
    task: Task
    trajectory_id: str


class Stop(Message, frozen=True, kw_only=True, eq=False):
    """An attempt is no more, whatever it does."""

    play: int


class Growing(Message, frozen=True, kw_only=True, eq=False):
    """More tokens of a turn that is being written, for those who listen."""

    play: int
    name: str
    token_ids: np.ndarray  # [n] int32


class Wrote(Message, frozen=True, kw_only=True, eq=False):
    """What came of a `Write`. Counts are of the whole session so far."""

    play: int
    name: str
    segments: tuple[Sampled, ...]
    reason: Literal["stop", "length", "cut"]
    """`cut`: the turn is not whole, because of a `Cut` or of `error`."""
    error: Failure | None = None
    num_interruptions: int = 0
    num_resumes: int = 0
    num_failovers: int = 0
    engine_s: float = 0.0


class ScoreRequest(Message, frozen=True, kw_only=True, eq=False):
    """Reward all trajectories of a group by one call."""

    ask: int
    task: Task
    completions: tuple[Completion, ...]


# -- from a worker -----------------------------------------------------------------------------------------


class Read(Message, frozen=True, kw_only=True, eq=False):
    """A session reads what the policy did not write."""

    play: int
    name: str
    token_ids: np.ndarray  # [n] int32


class Grow(Message, frozen=True, kw_only=True, eq=False):
    """A session branches, or begins another conversation."""

    play: int
    parent: str
    name: str
    inherits: bool


class Write(Message, frozen=True, kw_only=True, eq=False):
    """A session asks for a turn."""

    play: int
    name: str
    budget: int
    """Tokens, at most."""
    stop: tuple[str, ...]
    streams: bool
    """Whether somebody listens to it as it grows."""


class Cut(Message, frozen=True, kw_only=True, eq=False):
    """Nobody wants the turn any more that a session asked for; what there is of it is kept."""

    play: int
    name: str


class Report(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What the driver does not know of a session that has ended."""

    name: str
    stop_reason: StopReason
    turns: tuple[TurnRecord, ...]
    num_tool_calls: int
    num_tool_errors: int
    reward_source: str
    """Whose last words it is rewarded for."""
    parts: dict[str, float] = {}
    """Its reward; empty where that comes with its siblings'."""
    completion: Completion | None = None
    """What the reward will see, where that comes with its siblings'."""


class Ended(Message, frozen=True, kw_only=True, eq=False):
    """An attempt came to its end: it and its branches that sampled something."""

    play: int
    reports: tuple[Report, ...]


class Failed(Message, frozen=True, kw_only=True, eq=False):
    """An attempt came to nothing."""

    play: int
    failure: Failure
    report: Report


class Scored(Message, frozen=True, kw_only=True, eq=False):
    """The rewards of a group."""

    ask: int
    scores: tuple[Worth, ...] = ()
    failure: Failure | None = None
    """Of the call as a whole."""


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of one trajectory, or why there is none."""

    parts: dict[str, float] = {}
    failure: Failure | None = None


class Heartbeat(Message, frozen=True, kw_only=True, eq=False):
    """The event loop of a worker turns."""

    waits: dict[str, str] = {}
    """What trajectories have been waiting for, for longer than a moment, in words."""
    counted: tuple[Count, ...] = ()
    """What metrics counted since the last pulse."""


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """The increment of a counter, or of a histogram's buckets and sum."""

    name: str
    labels: tuple[str, ...]
    value: float
    buckets: tuple[float, ...] = ()


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error of the other side."""

    kind: str
    """Name of its class in `async_rl.errors`; empty for an error of the program."""
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """In words; where it is of a class of the user's own, as the one of ours that it is based on."""
        ours = next((c.__name__ for c in type(error).__mro__ if vars(errors_of).get(c.__name__) is c), "")
        return cls(kind=ours, text=str(error) if ours else f"{type(error).__name__}: {error}")

    @property
    def error(self) -> AsyncRLError:
        """One to raise on this side."""
        kind = getattr(errors_of, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, AsyncRLError):
            return kind(self.text)
        return AsyncRLError(f"in a rollout worker: {self.text}")


_KINDS: Final[dict[str, type[Message]]] = {kind.__name__: kind for kind in Message.__subclasses__()}


def encode(message: Message) -> list[bytes | memoryview]:
    """As one frame, in pieces; see `codec`."""
    return codec.encode(message)


def decode(frame: bytes | memoryview) -> Message:
    """Read a frame.

    Raises:
        WorkerLost: It is not a message of this program.
    """
    try:
        kind = _KINDS.get(codec.inspect(frame, verify=False).kind)
        if kind is None:
            raise WorkerLost("a frame that is no message came over the link of a rollout worker")
        return codec.decode(frame, kind)
    except CorruptFrame as error:
        raise WorkerLost(f"a damaged message came over the link of a rollout worker: {error}") from error


class Link(Protocol):
    """One end of the way between the driver and a worker."""

    def post(self, message: Message) -> None:
        """Send, without waiting. Nothing happens when the link is lost: whoever receives is told."""
        ...

    async def receive(self) -> Message:
        """The next message.

        Raises:
            WorkerLost: There is none, for ever.
        """
        ...

    def close(self) -> None:
        """Lose the link; both ends are told."""
        ...
