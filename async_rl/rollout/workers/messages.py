"""The messages between the driver and rollout workers, and the link that carries them.

Messages of a link arrive whole and in order, or the link is lost. All messages of one attempt carry the
`request_id` of its `StartAttempt`; messages of an attempt that has been cancelled are ignored.

```
 driver                                    worker
 StartAttempt ───────────────────────────► the loop starts
         ◄──── AppendContext, OpenBranch ─ whenever the conversation grows; neither side waits
         ◄──── WriteTurn ───────────────── generate; one at a time for each session
 TurnGrown ──────────────────────────────► only if the loop listens to the turn as it grows
         ◄──── CancelTurn ──────────────── the task that awaited the turn was cancelled
 TurnWritten ────────────────────────────► exactly one for each WriteTurn
         ◄──── AttemptEnded | AttemptFailed
 ServingChanged ─────────────────────────► the serving clock stops or runs, see `ServingClock`
 CancelRequest ──────────────────────────► the driver no longer wants the attempt, or the group's rewards
 ScoreGroup ─────────────────────────────► the reward function of a group runs
         ◄──── GroupScored
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
    """Base class of everything that goes over a link."""


# -- from the driver ---------------------------------------------------------------------------------------


class StartAttempt(Message, frozen=True, kw_only=True, eq=False):
    """Asks the worker to run the agent loop of a task."""

    request_id: int
    task: Task
    trajectory_id: str


class ServingChanged(Message, frozen=True, kw_only=True, eq=False):
    """Tells a worker whether some engine serves."""

    paused: bool
    """Whether none does, so that time counts against no limit."""


class CancelRequest(Message, frozen=True, kw_only=True, eq=False):
    """Ends an attempt or the scoring of a group, whatever its state."""

    request_id: int


class TurnGrown(Message, frozen=True, kw_only=True, eq=False):
    """Carries more tokens of a turn that is being written."""

    request_id: int
    trajectory_id: str
    token_ids: np.ndarray  # [n] int32


class TurnWritten(Message, frozen=True, kw_only=True, eq=False):
    """Answers a `WriteTurn`. Counts are of the whole session so far."""

    request_id: int
    trajectory_id: str
    segments: tuple[Sampled, ...]
    reason: Literal["stop", "length", "cancelled"]
    """`cancelled`: the turn is incomplete, because of a `CancelTurn` or of `error`."""
    error: Failure | None = None
    num_interruptions: int = 0
    num_resumes: int = 0
    num_failovers: int = 0
    engine_s: float = 0.0


class ScoreGroup(Message, frozen=True, kw_only=True, eq=False):
    """Asks the worker to score all trajectories of a group by one call."""

    request_id: int
    task: Task
    completions: tuple[Completion, ...]


# -- from a worker -----------------------------------------------------------------------------------------


class AppendContext(Message, frozen=True, kw_only=True, eq=False):
    """Appends tokens to a session that the policy did not write."""

    request_id: int
    trajectory_id: str
    token_ids: np.ndarray  # [n] int32


class OpenBranch(Message, frozen=True, kw_only=True, eq=False):
    """Opens a branch of a session, or another conversation."""

    request_id: int
    parent_id: str
    trajectory_id: str
    inherits: bool
    """Whether it begins with everything of its parent; a conversation begins empty."""


class WriteTurn(Message, frozen=True, kw_only=True, eq=False):
    """Asks the driver to write one turn of a session."""

    request_id: int
    trajectory_id: str
    budget: int
    """The most tokens of the turn."""
    stop: tuple[str, ...]
    streams: bool
    """Whether the loop listens to the turn as it grows."""


class CancelTurn(Message, frozen=True, kw_only=True, eq=False):
    """Cancels the turn that a session asked for; tokens sampled so far are kept."""

    request_id: int
    trajectory_id: str


class SessionReport(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What only the worker knows of a session that has ended."""

    trajectory_id: str
    stop_reason: StopReason
    turns: tuple[TurnRecord, ...]
    num_tool_calls: int
    num_tool_errors: int
    reward_source: str
    """The trajectory for whose completion it is rewarded."""
    parts: dict[str, float] = {}
    """Its reward; empty if the whole group is scored by one call."""
    completion: Completion | None = None
    """What the group's reward function will receive."""


class AttemptEnded(Message, frozen=True, kw_only=True, eq=False):
    """Reports an attempt that succeeded: its session, and the branches that sampled something."""

    request_id: int
    reports: tuple[SessionReport, ...]


class AttemptFailed(Message, frozen=True, kw_only=True, eq=False):
    """Reports an attempt that failed."""

    request_id: int
    failure: Failure
    report: SessionReport


class GroupScored(Message, frozen=True, kw_only=True, eq=False):
    """Answers a `ScoreGroup`."""

    request_id: int
    scores: tuple[TrajectoryScore, ...] = ()
    failure: Failure | None = None
    """Why the whole call failed, if it did."""


class TrajectoryScore(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of one trajectory, or why it has none."""

    parts: dict[str, float] = {}
    failure: Failure | None = None


class Heartbeat(Message, frozen=True, kw_only=True, eq=False):
    """Shows that the worker's event loop responds."""

    waits: dict[str, str] = {}
    """What trajectories have been waiting for longer than a moment for, in words."""
    increments: tuple[MetricIncrement, ...] = ()
    """What the worker's metrics counted since the last heartbeat."""


class MetricIncrement(msgspec.Struct, frozen=True, kw_only=True):
    """The increment of a counter, or of a histogram's sum and buckets."""

    name: str
    labels: tuple[str, ...]
    value: float
    buckets: tuple[float, ...] = ()


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error that occurred on the other side of the link."""

    kind: str
    """The name of its class in `async_rl.errors`; empty for any other class."""
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an error; a user's class counts as the class of `async_rl.errors` that it derives from."""
        ours = next((c.__name__ for c in type(error).__mro__ if vars(errors_of).get(c.__name__) is c), "")
        return cls(kind=ours, text=str(error) if ours else f"{type(error).__name__}: {error}")

    @property
    def error(self) -> AsyncRLError:
        """The error to raise on this side."""
        kind = getattr(errors_of, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, AsyncRLError):
            return kind(self.text)
        return AsyncRLError(f"in a rollout worker: {self.text}")


_KINDS: Final[dict[str, type[Message]]] = {kind.__name__: kind for kind in Message.__subclasses__()}


def encode(message: Message) -> list[bytes | memoryview]:
    """Encode a message as one frame, in pieces, with `async_rl.codec`."""
    return codec.encode(message)


def decode(frame: bytes | memoryview) -> Message:
    """Decode a frame.

    Raises:
        WorkerLost: The frame is not a message of this program.
    """
    try:
        kind = _KINDS.get(codec.inspect(frame, verify=False).kind)
        if kind is None:
            raise WorkerLost("the link of a rollout worker delivered a frame that is not a message")
        return codec.decode(frame, kind)
    except CorruptFrame as error:
        raise WorkerLost(f"the link of a rollout worker delivered a damaged message: {error}") from error


class Link(Protocol):
    """One end of the connection between the driver and a worker."""

    def post(self, message: Message) -> None:
        """Send a message without waiting; a lost link ignores it, and `receive` raises."""
        ...

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            WorkerLost: The link is lost.
        """
        ...

    def close(self) -> None:
        """Close the link; `receive` raises at both ends."""
        ...
