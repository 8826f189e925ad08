"""The journal's file: a sequence of codec frames, one per record, and the trajectories that they add up to.

A record contains what is new of one trajectory. It is numbered within its *epoch*, so that a damaged record
ends the journal of its trajectory there: the next one does not continue what is known. Number 0 begins anew:
with another attempt, after a restored trajectory took another course, or in a file that was compacted. A
record that is cut short at the end of a file was being written when the process died.

A trajectory that continues in another process has an owner with a higher number there. Of the files of
several processes, only the records of its newest owner count (`read_tree`, `store.journal_folders`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np

from async_rl import codec
from async_rl.errors import CorruptFrame
from async_rl.runtime.shortages import is_shortage
from async_rl.store.progress import ProgressReport
from async_rl.types import Context, Sampled, SamplingMask, Segment, cap_versions, root_of

log = logging.getLogger(__name__)

_MAGIC: Final = b"ASYNCRL\0"

_PIECE_BYTES: Final = 1 << 18
"""The size of a write: enough that the call costs little, and copied in less than 0.1 ms."""


class TurnNote(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `Session.generate`: its request and its end."""

    start: int
    """The number of the trajectory's tokens before it."""
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    end: int | None = None
    """The number of the trajectory's tokens after it; None while it runs."""
    reason: Literal["stop", "length"] = "length"


class JournalRecord(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What is new of one trajectory."""

    trajectory_id: str
    attempt: int
    owner_epoch: int = 0
    """The number of the owner that writes it; a process that takes the trajectory over has a higher one."""
    epoch: int
    """Grows whenever the trajectory is written anew, from its beginning."""
    index: int
    """The number of this record in its epoch, consecutive."""
    segments: tuple[Context | Sampled, ...]
    """The segments closed since the last record; they are final."""
    open_start: int
    """The number of the running call's tokens that earlier records hold and that still count."""
    open: tuple[Sampled, ...]
    """What the running call has sampled since, one piece per weight version."""
    first_turn: int
    turns: tuple[TurnNote, ...]
    """The turns from the `first_turn`-th on, which replace what was known of them."""


class JournalledTrajectory(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The state of one trajectory according to the journal."""

    trajectory_id: str
    attempt: int
    owner_epoch: int = 0
    segments: tuple[Segment, ...]
    turns: tuple[TurnNote, ...] = ()

    @property
    def owner(self) -> tuple[int, int]:
        """The owner that wrote it and the attempt: a branch counts with its root only."""
        return self.owner_epoch, self.attempt

    def capped(self, newest_version: int | None) -> JournalledTrajectory:
        """Return the state as it counts after a restart that has undone later versions; None undid none."""
        if newest_version is None:
            return self
        return msgspec.structs.replace(self, segments=cap_versions(self.segments, newest_version))

    def copied(self) -> JournalledTrajectory:
        """Return the same with arrays of its own, so that the file that it was read from can be freed."""
        copies: list[Segment] = []
        for segment in self.segments:
            token_ids = segment.token_ids.copy()
            token_ids.flags.writeable = False
            if isinstance(segment, Context):
                copies.append(msgspec.structs.replace(segment, token_ids=token_ids))
                continue
            log_probs, mask = segment.rollout_log_probs.copy(), segment.mask
            log_probs.flags.writeable = False
            if mask is not None:
                mask = SamplingMask(counts=mask.counts.copy(), token_ids=mask.token_ids.copy())
            copies.append(
                msgspec.structs.replace(segment, token_ids=token_ids, rollout_log_probs=log_probs, mask=mask)
            )
        return msgspec.structs.replace(self, segments=tuple(copies))

    def after(self, prefix: Sequence[Segment]) -> JournalledTrajectory | None:
        """Return the state beyond these segments; None when it does not begin with their tokens.

        Where the tokens are divided into segments does not matter, except at the end.
        """
        wanted = np.concatenate([segment.token_ids for segment in prefix])
        count = end = 0
        while end < len(wanted) and count < len(self.segments):
            end += len(self.segments[count].token_ids)
            count += 1
        found = [segment.token_ids for segment in self.segments[:count]]
        if end != len(wanted) or not np.array_equal(np.concatenate(found), wanted):
            return None
        return msgspec.structs.replace(self, segments=self.segments[count:])

    @property
    def num_tokens(self) -> int:
        """The number of tokens, context and sampled together."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def num_sampled_tokens(self) -> int:
        """The number of tokens that the policy wrote."""
        return sum(len(s.token_ids) for s in self.segments if isinstance(s, Sampled))

    @property
    def oldest_weight_version(self) -> int | None:
        """The smallest version among the sampled tokens, or None when nothing was sampled."""
        return min((s.weight_version for s in self.segments if isinstance(s, Sampled)), default=None)

    @property
    def progress(self) -> ProgressReport:
        """How far the trajectory is; inherited tokens count as its own, which only makes it older."""
        versions = [s.weight_version for s in self.segments if isinstance(s, Sampled)]
        return ProgressReport(
            oldest_version=min(versions, default=None),
            newest_version=max(versions, default=None),
            in_turn=bool(self.turns) and self.turns[-1].end is None,
            num_turns=sum(turn.end is not None for turn in self.turns),
            num_tokens=self.num_tokens,
            num_sampled_tokens=self.num_sampled_tokens,
        )


def read_journal(directory: Path) -> tuple[dict[str, JournalledTrajectory], int]:
    """Read the journal in a folder; return the trajectories by id and the number of damaged records.

    Branches of an earlier attempt are left out.
    """
    states: dict[str, _State] = {}
    lost = 0
    for path in journal_files(directory):
        for record in _read_file(path):
            if record is None:
                lost += 1
            else:
                states.setdefault(record.trajectory_id, _State()).apply(record)
    known = {name: state.journalled(name) for name, state in states.items()}
    return {
        name: state
        for name, state in known.items()
        if state.segments and known.get(root_of(name), state).owner == state.owner
    }, lost


def _read_file(path: Path) -> Iterable[JournalRecord | None]:
    """Return the records of a file; None, as for a damaged stretch, if the file system does not give it.

    Raises:
        FileNotFoundError: A compaction has removed the file.
        OSError: There is no descriptor.
    """
    try:
        return read_journal_records(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        if is_shortage(error):
            raise
        log.warning("%s cannot be read: %s; what only it has is sampled again", path, error.strerror)
        return [None]


def read_journal_records(data: bytes) -> Iterator[JournalRecord | None]:
    """Yield the records of a file in order, None for each damaged stretch. A torn end is left out."""
    view = memoryview(data)
    position = 0
    while position < len(data):
        try:
            head = codec.inspect(view[position:], verify=False)
        except CorruptFrame:
            # Its length cannot be trusted: search for the next frame. Without one, the record was cut short.
            position = _next_frame(data, position + codec.ALIGNMENT)
            if position < len(data):
                yield None
            continue
        try:
            yield codec.decode(view[position:], JournalRecord)
        except CorruptFrame:
            yield None
        position += -(-head.nbytes // codec.ALIGNMENT) * codec.ALIGNMENT


class _State:
    """The state of one trajectory after the records so far."""

    def __init__(self) -> None:
        self.owner_epoch = self.attempt = self.epoch = self.next = -1
        self.segments: list[Segment] = []
        self.turns: list[TurnNote] = []
        self._open: list[Sampled] = []

    def apply(self, record: JournalRecord) -> None:
        """Apply a record that continues the known state or begins anew; ignore any other."""
        if record.owner_epoch < self.owner_epoch:
            return  # of an owner that has lost the trajectory
        if record.index == 0 or record.attempt > self.attempt:
            self.owner_epoch, self.attempt = record.owner_epoch, record.attempt
            self.epoch, self.next = record.epoch, 0
            self.segments, self.turns, self._open = [], [], []
        known = self.owner_epoch, self.attempt, self.epoch, self.next
        if (record.owner_epoch, record.attempt, record.epoch, record.index) != known:
            return  # a record before it is damaged: the trajectory ends there
        self.next += 1
        self.segments += record.segments
        self._open = [*cut_pieces(self._open, record.open_start), *record.open]
        self.turns = [*self.turns[: record.first_turn], *record.turns]

    def journalled(self, trajectory_id: str) -> JournalledTrajectory:
        """Return the state; what the running call had sampled becomes segments of an aborted call."""
        whole, end = [*self.segments, *_joined(self._open)], 0
        for index, segment in enumerate(whole):
            if isinstance(segment, Sampled) and not np.isfinite(segment.rollout_log_probs).all():
                whole = whole[:index]  # the session would have refused this answer at its end
                break
            end += len(segment.token_ids)
        return JournalledTrajectory(
            trajectory_id=trajectory_id,
            attempt=self.attempt,
            owner_epoch=self.owner_epoch,
            segments=tuple(whole),
            turns=tuple(_until(turn, end) for turn in self.turns if turn.start <= end),
        )


def _until(turn: TurnNote, end: int) -> TurnNote:
    """Return a turn that has tokens up to `end` only."""
    return turn if turn.end is None or turn.end <= end else msgspec.structs.replace(turn, end=None)


def cut_pieces(pieces: Sequence[Sampled], length: int) -> Iterator[Sampled]:
    """Yield the first `length` tokens of a call that is written in pieces."""
    for piece in pieces:
        if length <= 0:
            return
        yield _shortened(piece, length)
        length -= len(piece.token_ids)


def _shortened(piece: Sampled, length: int) -> Sampled:
    if length >= len(piece.token_ids):
        return piece
    return msgspec.structs.replace(
        piece,
        token_ids=piece.token_ids[:length],
        rollout_log_probs=piece.rollout_log_probs[:length],
        mask=None if piece.mask is None else piece.mask[:length],
    )


def _joined(pieces: Sequence[Sampled]) -> list[Sampled]:
    """Return one segment per weight version of a call that was written in pieces."""
    runs: list[list[Sampled]] = []
    for piece in pieces:
        if runs and runs[-1][0].weight_version == piece.weight_version:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [
        msgspec.structs.replace(
            run[0],
            token_ids=np.concatenate([piece.token_ids for piece in run]),
            rollout_log_probs=np.concatenate([piece.rollout_log_probs for piece in run]),
            mask=None
            if run[0].mask is None
            else SamplingMask.joined([piece.mask for piece in run if piece.mask is not None]),
        )
        for run in runs
    ]


def encode_records(records: Sequence[JournalRecord]) -> list[bytes]:
    """Encode records as frames, each aligned as its arrays must be, joined into pieces for one write each.

    Joining holds the interpreter lock, so a piece has at most `_PIECE_BYTES`, or one record.
    """
    pieces: list[bytes] = []
    waiting: list[bytes | memoryview] = []
    nbytes = 0
    for record in records:
        frame = codec.encode(record)
        size = codec.encoded_size(frame)
        if nbytes and nbytes + size > _PIECE_BYTES:
            pieces.append(b"".join(waiting))
            waiting, nbytes = [], 0
        padding = -size % codec.ALIGNMENT
        waiting += [*frame, bytes(padding)]
        nbytes += size + padding
    return [*pieces, b"".join(waiting)] if nbytes else pieces


def _next_frame(data: bytes, position: int) -> int:
    """Return where the next frame may begin, or the end of the data."""
    while (found := data.find(_MAGIC, position)) >= 0:
        if found % codec.ALIGNMENT == 0:
            return found
        position = found + 1
    return len(data)


def journal_files(directory: Path) -> list[Path]:
    """Return the journal's files in the order in which they were begun; there are several after a crash."""
    ours = (path for path in directory.glob("journal-*") if path.name.removeprefix("journal-").isdecimal())
    return sorted(ours, key=file_number)


def file_number(path: Path) -> int:
    """Return the number in the name of a journal file."""
    return int(path.name.removeprefix("journal-"))
