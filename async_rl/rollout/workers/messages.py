"""The messages between the driver and rollout workers, and the link that carries them.

Messages of a link arrive whole, once and in order, or the link is lost: see `MessageNumbers`.

```
 driver                                    worker
 OpenJournal ────────────────────────────► attempts are journalled from now on
 StartAttempt ───────────────────────────► the loop starts, with what is left of an earlier run of it
         ◄──── AttemptEnded | AttemptFailed  references to its trajectories
 CancelRequest ──────────────────────────► the driver no longer wants the attempt, or the group's rewards
 EntriesReleased ────────────────────────► the journal need not have these trajectories any longer
 ScoreGroup ─────────────────────────────► the reward function of a group runs
         ◄──── GroupScored

 GrantEngines ───────────────────────────► the worker calls these engines; no message is sent for a call
 RevokeEngines ──────────────────────────► nothing more is sent to engines under the grants given so far
         ◄──── EnginesReleased ─────────── at once; again when the last calls of engines have ended

         ◄──── Heartbeat ───────────────── every tick: load of engines, reports on them, trajectories, waits
 Renewed ────────────────────────────────► answers a heartbeat: grants are valid `GRANT_S` longer
         ◄──── WorkerFailed ────────────── the error that ends the worker
```
"""

from __future__ import annotations

import logging
import math
import os
import struct
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, ClassVar, Final, Literal, Protocol

import google_crc32c
import msgspec
import numpy as np

from async_rl import codec
from async_rl import errors as errors_of
from async_rl.engine_protocol import EngineAddress
from async_rl.engines.cache_limit import LimitReason
from async_rl.engines.lease import EngineGrant
from async_rl.errors import AsyncRLError, CorruptFrame, FailureKind, WorkerLost
from async_rl.observability.failures import kind_of_error
from async_rl.rollout.attempt import AttemptEnd, user_frames
from async_rl.runtime.listeners import RepeatFilter
from async_rl.runtime.printable import without_surrogates
from async_rl.runtime.shortages import shortage_number
from async_rl.store.journal_folders import JournalClaim
from async_rl.store.progress import ProgressReport
from async_rl.types import StoredCompletion, StoredTrajectory, Task

log = logging.getLogger(__name__)
log.addFilter(RepeatFilter())


GRANT_S: Final = 10.0
"""How long a worker may call engines after a heartbeat that the driver has answered. If a driver is blocked
for longer, calls end with the tokens they have, and go on."""


class Message(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag=True, array_like=True):
    """Base class of everything that goes over a link."""

    may_wait_s: ClassVar[float] = 0.0
    """How long it may wait for another message, so that both go in one frame; order is always kept."""


# -- from the driver ---------------------------------------------------------------------------------------


class OpenJournal(Message, frozen=True, kw_only=True, eq=False):
    """Tells a worker where to write its journal; without one it keeps none."""

    folder: str


class EntriesReleased(Message, frozen=True, kw_only=True, eq=False):
    """Tells a worker that its journal need not have trajectories any longer."""

    may_wait_s: ClassVar[float] = 0.1

    trajectory_ids: tuple[str, ...]


class StartAttempt(Message, frozen=True, kw_only=True, eq=False):
    """Asks the worker to run the agent loop of a task."""

    request_id: int
    task: Task
    trajectory_id: str
    group_id: str
    attempt: int
    """The number of the attempt, from 1."""
    claim: JournalClaim = JournalClaim()
    """The number of its owner, and where what is left of an earlier run of the loop is."""


class CancelRequest(Message, frozen=True, kw_only=True, eq=False):
    """Ends an attempt or the scoring of a group, whatever its state."""

    request_id: int


class GrantEngines(Message, frozen=True, kw_only=True, eq=False):
    """Lets the worker call engines."""

    engines: tuple[GrantedEngine, ...]


class GrantedEngine(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An engine that the worker may call."""

    grant: EngineGrant
    address: EngineAddress | None
    """Where the engine takes calls; None in a simulation."""
    model: str = ""
    """A model in `models`; empty: the policy."""


class RevokeEngines(Message, frozen=True, kw_only=True, eq=False):
    """Forbids new requests to engines under the grants that were given before. Calls under way go on."""

    engines: dict[str, Revoked]
    """By id."""
    newest_version: int
    """The newest version of the policy that calls under way can report."""
    number: int
    """Repeated in the answer."""


class Revoked(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Why an engine is revoked."""

    aborts: bool = False
    """Whether the engine aborts the calls under way, whose ends are then read at once."""
    failure: str = ""
    """Why its calls are dropped; empty: they go on."""
    wrong_weights: bool = False
    """Whether their tokens are of unknown weights: `VersionMismatch`."""


class Renewed(Message, frozen=True, kw_only=True, eq=False):
    """Answers a heartbeat: all grants are valid for `GRANT_S` from the moment at which it was sent."""

    number: int
    """The heartbeat."""


class ScoreGroup(Message, frozen=True, kw_only=True, eq=False):
    """Asks the worker to score all trajectories of a group by one call."""

    request_id: int
    task: Task
    completions: tuple[StoredCompletion, ...]
    """References: what the call compares goes from worker to worker, through the run's folder."""


# -- from a worker -----------------------------------------------------------------------------------------


class EnginesReleased(Message, frozen=True, kw_only=True, eq=False):
    """Answers a `RevokeEngines`, at once, and again when calls that were under way have ended."""

    number: int
    """The revocation."""
    ended: tuple[str, ...] = ()
    """Of its engines, those whose last call has ended since the message before."""
    progress: tuple[AttemptProgress, ...] = ()
    """In the first answer: how far all trajectories are, whatever was reported of them before."""


class WorkerFailed(Message, frozen=True, kw_only=True, eq=False):
    """Reports the error that ends the worker."""

    failure: Failure
    progress: tuple[AttemptProgress, ...] = ()
    """How far all trajectories are, which go on elsewhere."""


class AttemptEnded(Message, frozen=True, kw_only=True, eq=False):
    """Reports an attempt that succeeded."""

    may_wait_s: ClassVar[float] = 0.02

    request_id: int
    end: AttemptEnd


class AttemptFailed(Message, frozen=True, kw_only=True, eq=False):
    """Reports an attempt that failed."""

    request_id: int
    failure: Failure
    trajectory: StoredTrajectory
    """A summary of what it has sampled, for display."""
    has_sampled: bool = True
    """Whether its loop has asked for an engine."""


class GroupScored(Message, frozen=True, kw_only=True, eq=False):
    """Answers a `ScoreGroup`."""

    request_id: int
    scores: tuple[TrajectoryScore, ...] = ()
    failure: Failure | None = None
    """Why the whole call failed, if it did."""


class TrajectoryScore(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The reward of one trajectory, or why it has none."""

    parts: dict[str, float] = {}
    failure: Failure | None = None


class Heartbeat(Message, frozen=True, kw_only=True, eq=False):
    """Reports once per tick what has happened since the last one, and asks to renew the grants."""

    number: int = 0
    """Counts the worker's heartbeats."""
    received: int = 0
    """The number of the last message of the driver that the worker has handled."""
    waits: tuple[LongWait, ...] = ()
    """What trajectories have been waiting for for longer than a moment."""
    increments: tuple[MetricIncrement, ...] = ()
    """What the worker's metrics counted since the last heartbeat."""
    engines: tuple[EngineUse, ...] = ()
    """The engines that it may call, or still has calls of."""
    reports: tuple[EngineReport, ...] = ()
    """What calls say against engines."""
    progress: tuple[AttemptProgress, ...] = ()
    """Progress of trajectories that changed enough to report."""
    written_claims: tuple[str, ...] = ()
    """Trajectories taken over that are complete in the worker's own journal now."""
    journal_bytes: int = 0
    """The size of the worker's journal."""


class LongWait(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A wait of a trajectory: see `runtime.waits`."""

    trajectory_id: str
    on: str
    target: str
    age_s: float
    why: str = ""


class EngineUse(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The load of an engine by the worker's calls: see `EngineLoad`. Times are ages."""

    engine_id: str
    calls: int
    tokens: int
    prefill_tokens: int
    quiet_s: float
    """Since it last made progress."""
    accepted_s: float | None
    """Since it last sent the first token of a call; None: it has sent none."""
    heard_s: float | None
    """Since it last sent anything; None: it has sent nothing."""
    payload_arrives: bool = False
    """Whether a piece of a routing payload has arrived since the last tick."""
    max_calls: float = math.inf
    """The most calls that the worker gives it at once."""
    limited_by: LimitReason = "setting"


class EngineReport(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a call says against its engine: see `EngineJudge`."""

    engine_id: str
    restart_count: int
    epoch: int
    """Of the grant: a report of an earlier epoch says nothing about this one."""
    kind: Literal["strike", "connection", "failure", "silent", "refusals"]
    """connection: the call got no connection, or lost it, for which the worker itself may be to blame.
    silent: none of its calls makes progress; those of others may.
    """
    text: str
    wrong_weights: bool = False
    """Whether a strike or failure is a `VersionMismatch`."""
    since_s: float = 0.0
    """silent, refusals: for how long."""


class AttemptProgress(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How far one trajectory of an attempt is."""

    request_id: int
    trajectory_id: str
    report: ProgressReport


class MetricIncrement(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The increment of a counter, or of a histogram's sum and buckets."""

    name: str
    labels: tuple[str, ...]
    value: float
    buckets: tuple[float, ...] = ()


class Failure(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An error that occurred on the other side of the link."""

    kind: str
    """The name of its class in `async_rl.errors`; empty for any other class."""
    text: str
    frames: str = ""
    """The lines of user code that raised its cause."""
    shortage: int | None = None
    """The `errno` if a shortage of descriptors or space was the cause, which the driver waits out."""
    failure_kind: FailureKind = "other"
    """What an attempt that it ends counts as."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an error; a user's class counts as the class of `async_rl.errors` that it derives from."""
        ours = next((c.__name__ for c in type(error).__mro__ if vars(errors_of).get(c.__name__) is c), "")
        text = str(error) if ours else f"{type(error).__name__}: {error}"
        return cls(
            kind=ours,
            text=without_surrogates(text),  # user code may quote what the policy wrote
            frames=without_surrogates(user_frames(error)),
            shortage=shortage_number(error),
            failure_kind=kind_of_error(error),
        )

    @property
    def error(self) -> AsyncRLError:
        """The error to raise on this side."""
        kind = getattr(errors_of, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, AsyncRLError):
            error = kind(self.text)
        else:
            error = AsyncRLError(f"in a rollout worker: {self.text}")
        error.failure_kind = self.failure_kind
        if self.frames:
            error.add_note(self.frames)
        if self.shortage is not None:
            error.__cause__ = OSError(self.shortage, os.strerror(self.shortage))
        return error


_CHECKSUM: Final = struct.Struct("<I")
"""The crc32c of the msgpack that follows."""

_ARRAY: Final = 1
"""The code of the msgpack extension that is an array, as a frame of `async_rl.codec`."""


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return msgspec.msgpack.Ext(_ARRAY, b"".join(codec.encode(value)))


def _unpack_array(code: int, packed: memoryview) -> Any:
    if code != _ARRAY:
        raise CorruptFrame(f"it holds an unknown extension, {code}")
    return codec.decode(packed, np.ndarray)


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_pack_array)
_Any: Final = reduce(or_, Message.__subclasses__())
_decoder: Final = msgspec.msgpack.Decoder(list[_Any], dec_hook=codec.pass_array, ext_hook=_unpack_array)  # type: ignore[valid-type]

_LIST: Final = struct.Struct(">BI")
_LIST_CODE: Final = 0xDD
"""How msgpack begins a list: `array 32`, then the number of its items."""


def pack(message: Message) -> bytes:
    """Encode a message for `encode_packed`.

    Raises:
        TypeError: The message contains something else than msgpack types, numpy scalars and arrays.
    """
    return _encoder.encode(message)


def encode_packed(messages: Sequence[bytes]) -> bytes:
    """Encode a frame of messages: a checksum, then a list in msgpack."""
    packed = b"".join((_LIST.pack(_LIST_CODE, len(messages)), *messages))
    return _CHECKSUM.pack(google_crc32c.value(packed)) + packed


def encode(message: Message) -> bytes:
    """Encode a frame of one message.

    Raises:
        TypeError: As `pack`.
    """
    return encode_packed([pack(message)])


def decode(encoded: bytes) -> list[Message]:
    """Decode a frame.

    Raises:
        WorkerLost: It is damaged, or not of messages of this program.
    """
    checksum, packed = encoded[: _CHECKSUM.size], encoded[_CHECKSUM.size :]
    if len(checksum) < _CHECKSUM.size or _CHECKSUM.unpack(checksum)[0] != google_crc32c.value(packed):
        raise WorkerLost("the link of a rollout worker delivered a damaged message")
    try:
        messages: list[Message] = _decoder.decode(packed)
    except (CorruptFrame, *codec.UNREADABLE) as error:
        raise WorkerLost(f"the link of a rollout worker delivered an invalid message: {error}") from error
    return messages


class MessageNumbers:
    """Numbers the messages that one end of a link sends, and checks the numbers of those that it receives.

    Each message arrives once, in order: the answer to `RevokeEngines` covers the grants given before it, and
    an attempt ends once. A message that arrives again is discarded. Where one is missing, the link is lost,
    because nothing else would end what waits for it.

    Example:
        >>> numbers = MessageNumbers()
        >>> numbers.is_next(1), numbers.is_next(1), numbers.is_next(2)
        (True, False, True)
    """

    def __init__(self) -> None:
        """Start with number 1 in both directions."""
        self.sent = 0
        """The number of the last message that this end has sent."""
        self.received = 0
        """The number of the last one that it has received."""

    def next_number(self) -> int:
        """Return the number of the next message that this end sends."""
        self.sent += 1
        return self.sent

    def is_next(self, number: int) -> bool:
        """Return whether a message that arrives is the next one; False if it has arrived before.

        Raises:
            WorkerLost: Messages before it are missing, or come later.
        """
        if number <= self.received:
            log.warning("message %d of a rollout worker's link has arrived again; it is discarded", number)
            return False
        if number > self.received + 1:
            raise WorkerLost(
                f"its link delivered message {number}, expected {self.received + 1}: messages are missing"
            )
        self.received = number
        return True


class Link(Protocol):
    """One end of the connection between the driver and a worker."""

    numbers: MessageNumbers
    """The numbers of messages in both directions."""
    peer_has_ended: bool = False
    """In the driver: whether the worker's process has certainly ended, set when it was ended."""
    peer_node: str = ""
    """In the driver: the address of the worker's node."""

    def post(self, message: Message) -> None:
        """Send a message without waiting; a lost link ignores it, and `receive` raises."""
        ...

    def receive_arrived(self) -> Message | None:
        """Return the next message if it has arrived; links may always return None.

        Raises:
            WorkerLost: The link is lost.
        """
        return None

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            WorkerLost: The link is lost.
        """
        ...

    def close(self) -> None:
        """Close the link; `receive` raises at both ends."""
        ...
