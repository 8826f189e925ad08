"""Writes the tokens of trajectories in flight to disk once per second, for a killed driver to continue.

```
 session ─segments, turns, running call─► JournalEntry ─records─► Journal ─a write per tick─► journal-000007
                                                                                                    │ killed
 session ◄── rollout.session.restore ◄── Journal.claim_trajectories ◄── JournalReader ◄─────────────┘
```

Each process that runs sessions, the driver or a rollout worker, writes a journal of its own, in its own
folder; `store.journal_folders` says how they make one journal of a run.

A session updates its entry at once; once per tick the journal visits all entries and writes their changes.
It visits a few entries in each turn of the event loop, and encodes and writes them in its own thread: neither
a tick nor a compaction blocks the loop, however much is in flight. `store.journal_file` describes the file.
When the file has grown to a multiple of what is in flight, the state is written to the next file and this one
is deleted: disk use is bounded by what is in flight.

The file is written, not synced: it survives the death of the process, and a power cut loses its end. It
contains no routing rows. They are ten times as large as the tokens, and the first call after a restart, or a
prefill without new tokens, reports all of them again.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

from async_rl.errors import SpoolFull
from async_rl.observability.metrics import Metrics
from async_rl.runtime.shortages import DISK_ERRORS, describe_disk_error, wait_out_shortage
from async_rl.store.journal_file import (
    JournalledTrajectory,
    JournalRecord,
    TurnNote,
    encode_records,
    journal_files,
)
from async_rl.store.progress import ProgressReport
from async_rl.types import (
    Float32Array,
    Int32Array,
    Sampled,
    SamplingMask,
    SamplingSettings,
    Segment,
    VersionSpan,
    root_of,
)

_COMPACT_BYTES: Final = 1 << 20
"""A smaller file is never compacted: rewriting it would not pay for a second file."""

_ENTRIES_PER_TURN: Final = 64
"""Entries that are visited in one turn of the event loop. An entry takes 2 to 10 µs, whatever its length."""

_GROWTH: Final = 4
"""A file is compacted when it has grown to this multiple of its initial size: rewriting costs a third of what
is appended, and the size of what is in flight need not be computed."""


class OpenCall(Protocol):
    """A running engine call and what it has delivered so far, which grows, or is cleared."""

    engine_id: str
    since_version: int
    """The version that the engine served when the call began: tokens that have not arrived yet may be of
    these weights."""
    versions: list[VersionSpan]

    @property
    def lag_unknown(self) -> bool:
        """As `Sampled.lag_unknown`, of all its tokens."""
        ...

    @property
    def sampling(self) -> SamplingSettings:
        """How its tokens are sampled."""
        ...

    @property
    def token_ids(self) -> Int32Array:
        """A view of its tokens, `[n] int32`; the elements of a view never change."""
        ...

    @property
    def log_probs(self) -> Float32Array:
        """A view of their log-probs, `[n] float32`, nats."""
        ...

    def mask(self, start: int, end: int) -> SamplingMask | None:
        """Return the sampling mask of tokens; None if sampling is not truncated."""
        ...


class JournalEntry:
    """The journal's view of one trajectory. Its session updates it at once; the journal reads it later."""

    def __init__(
        self,
        trajectory_id: str,
        attempt: int = 1,
        restored: JournalledTrajectory | None = None,
        inherited: Sequence[Segment] = (),
        owner_epoch: int = 0,
    ) -> None:
        """Begin empty, or as a branch with its inherited segments.

        Args:
            trajectory_id: The id of the trajectory.
            attempt: The number of this attempt, from 1.
            restored: What an earlier owner left of this attempt, beyond what is inherited. The journal
                contains it in the place of this entry's own data until `end_restoring`.
            inherited: The segments of the trajectory that this one is a branch of.
            owner_epoch: The number under which this process owns the trajectory.
        """
        self.trajectory_id = trajectory_id
        self.attempt = attempt
        self.owner_epoch = owner_epoch
        self.segments: list[Segment] = list(inherited)
        self.num_inherited = len(inherited)
        """The number of leading segments that belong to the trajectory that this one is a branch of."""
        self.call: OpenCall | None = None
        self.restored = restored
        self.unwritten = False
        """Whether the journal may lack some of what is to be restored."""
        self._left = None if restored is None else restored.progress
        self._closed = _ClosedSegments()
        self._turns: list[TurnNote] = []
        self._epoch = 0
        self._written = _Written()

    def begin_turn(self, start: int, max_new_tokens: int, stop: Sequence[str]) -> None:
        """Record that a turn of the policy begins."""
        self._turns.append(TurnNote(start=start, max_new_tokens=max_new_tokens, stop=tuple(stop)))

    def end_turn(self, end: int, reason: Literal["stop", "length"]) -> None:
        """Record that the turn is complete."""
        self._turns[-1] = msgspec.structs.replace(self._turns[-1], end=end, reason=reason)
        self._written.turns = min(self._written.turns, len(self._turns) - 1)

    @property
    def in_turn(self) -> bool:
        """Whether a turn of the policy is running."""
        return bool(self._turns) and self._turns[-1].end is None

    @property
    def oldest_version(self) -> int | None:
        """Implements `TrajectoryProgress.oldest_version`; what is to be restored counts."""
        return min(self._versions, default=None)

    @property
    def newest_version(self) -> int | None:
        """Implements `TrajectoryProgress.newest_version`."""
        return max(self._versions, default=None)

    @property
    def num_turns(self) -> int:
        """Implements `TrajectoryProgress.num_turns`."""
        return len(self._turns) - self.in_turn

    @property
    def num_tokens(self) -> int:
        """Implements `TrajectoryProgress.num_tokens`."""
        return self._own_closed.num_tokens

    @property
    def num_sampled_tokens(self) -> int:
        """Implements `TrajectoryProgress.num_sampled_tokens`."""
        running = 0 if self.call is None else len(self.call.token_ids)
        return self._own_closed.num_sampled_tokens + running

    @property
    def stage(self) -> tuple[int, ...]:
        """Equal at two moments if neither versions nor turns have changed: cheaper to compare than both."""
        call, turns = self.call, self._turns
        return (
            self._left is None,
            len(self.segments),
            len(turns),
            bool(turns) and turns[-1].end is None,
            *((-1, 0) if call is None else (call.since_version, len(call.versions))),
        )

    @property
    def owner(self) -> tuple[int, int]:
        """The owner that writes it and the attempt."""
        return self.owner_epoch, self.attempt

    @property
    def _own_closed(self) -> ProgressReport | _ClosedSegments:
        """What is to be restored, or the segments so far."""
        if self._left is not None:
            return self._left
        self._closed.add_segments(self.segments, self.num_inherited)
        return self._closed

    @property
    def _versions(self) -> Iterator[int]:
        """The oldest and the newest of its versions, and those of the running call."""
        closed = self._own_closed
        if closed.oldest_version is not None and closed.newest_version is not None:
            yield closed.oldest_version
            yield closed.newest_version
        if self.call is not None:
            yield self.call.since_version
            yield from (span.weight_version for span in self.call.versions)

    def end_restoring(self) -> None:
        """End restoring: from now on the entry holds the trajectory, not what an earlier owner left."""
        self.restored = self._left = None

    def next_record(self) -> JournalRecord | None:
        """Return what was not written yet and count it as written; None when there is nothing."""
        if self.restored is not None:
            return self.full_record() if self.unwritten else None
        call, written = self.call, self._written
        known = written.open if call is written.call else 0
        sampled = 0 if call is None else len(call.token_ids)
        known = min(known, sampled)  # fewer than before: an invalid answer was cleared
        closed = tuple(self.segments[written.segments :])
        turns = tuple(self._turns[written.turns :])
        if not closed and not turns and known == sampled and known == written.open:
            return None
        running = () if call is None else tuple(_pieces(call, known))
        record = self._record(closed, turns, open_start=known, running=running)
        self._written = _Written(written.index + 1, len(self.segments), call, sampled, len(self._turns))
        return record

    def full_record(self) -> JournalRecord | None:
        """Return the whole state in one record that begins a new epoch; None when there is nothing yet."""
        self._epoch += 1
        self._written = _Written()
        if self.restored is None:
            return self.next_record()
        self.unwritten = False
        segments = (*self.segments[: self.num_inherited], *self.restored.segments)
        record = self._record(segments, self.restored.turns)
        self._epoch += 1  # for the entry's own records, which do not continue this one
        return record

    def _record(
        self,
        segments: tuple[Segment, ...],
        turns: tuple[TurnNote, ...],
        *,
        open_start: int = 0,
        running: tuple[Sampled, ...] = (),
    ) -> JournalRecord:
        return JournalRecord(
            trajectory_id=self.trajectory_id,
            attempt=self.attempt,
            owner_epoch=self.owner_epoch,
            epoch=self._epoch,
            index=self._written.index,
            segments=segments,
            open_start=open_start,
            open=running,
            first_turn=self._written.turns,
            turns=turns,
        )


@dataclass(slots=True)
class _Written:
    """What an entry has written in its present epoch."""

    index: int = 0
    """The number of records."""
    segments: int = 0
    call: OpenCall | None = None
    """The running call of the last record."""
    open: int = 0
    """The number of its tokens."""
    turns: int = 0


class _ClosedSegments:
    """Sums over the segments of an entry, which grow in number only, so that each is visited once."""

    def __init__(self) -> None:
        self.oldest_version: int | None = None
        self.newest_version: int | None = None
        self.num_tokens = 0
        self.num_sampled_tokens = 0
        self._num_seen = 0

    def add_segments(self, segments: Sequence[Segment], num_inherited: int) -> None:
        """Add the segments that were closed since the last call; inherited ones count as tokens only."""
        for index in range(self._num_seen, len(segments)):
            segment = segments[index]
            self.num_tokens += len(segment.token_ids)
            if index < num_inherited or not isinstance(segment, Sampled):
                continue
            self.num_sampled_tokens += len(segment.token_ids)
            version = segment.weight_version
            self.oldest_version = (
                version if self.oldest_version is None else min(version, self.oldest_version)
            )
            self.newest_version = (
                version if self.newest_version is None else max(version, self.newest_version)
            )
        self._num_seen = len(segments)


class Journal:
    """The journal of one process, in a folder of its own. All methods are for the event loop's thread."""

    def __init__(self, directory: Path, metrics: Metrics | None = None, *, syncs: bool = False) -> None:
        """Write to a folder, which the first write creates.

        Args:
            directory: The folder.
            metrics: Counts what is written.
            syncs: Whether each write reaches the disk, or the server of a network file system, before it
                counts: processes of other nodes read the journal when this process hangs or its node is lost.
        """
        self._files = _JournalFiles(directory, metrics, syncs=syncs)
        self._entries: dict[str, JournalEntry] = {}
        self._branches: defaultdict[str, set[str]] = defaultdict(set)  # ids of branch entries, by root
        self._unvisited: deque[str] = deque()  # ids of the entries that the present pass has yet to visit
        self._compacting = False  # whether the present pass writes the next file
        self._waiting: deque[_Slice] = deque()  # collected, not written
        self._claims: list[str] = []  # not part of a pass yet
        self._claims_in_pass: list[str] = []
        self._written_claims: list[str] = []
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="journal"
        )  # its own: no write waits for others
        self._is_closed = False

    @property
    def directory(self) -> Path:
        """The folder."""
        return self._files.directory

    @property
    def nbytes(self) -> int:
        """The size of the current file."""
        return self._files.nbytes

    def claim_trajectories(self, states: Mapping[str, JournalledTrajectory], owner_epoch: int) -> None:
        """Take over what an earlier owner left of trajectories; the next write has all of it.

        Branches come first in the file: a reader takes what has a record of the trajectory itself as whole.
        """
        for name in sorted(states, key=lambda name: name == root_of(name)):
            state = states[name]
            entry = JournalEntry(name, state.attempt, state, owner_epoch=owner_epoch)
            entry.unwritten = True
            self._entries.pop(name, None)
            self._entries[name] = entry
            self._note_branch(name)
        self._claims += {root_of(name) for name in states}

    def pop_written_claims(self) -> list[str]:
        """Return the trajectories whose claim was written since the last call: no other journal is needed."""
        written, self._written_claims = self._written_claims, []
        return written

    def open_entry(
        self,
        trajectory_id: str,
        attempt: int = 1,
        restored: JournalledTrajectory | None = None,
        inherited: Sequence[Segment] = (),
        owner_epoch: int = 0,
    ) -> JournalEntry:
        """Return the entry of a trajectory, which replaces that of an earlier attempt; see `JournalEntry`."""
        before = self._entries.get(trajectory_id)
        entry = JournalEntry(trajectory_id, attempt, restored, inherited, owner_epoch)
        if before is not None:
            entry._epoch = before._epoch + 1
            # The file may lack changes of an entry updated meanwhile.
            entry.unwritten = restored is not None and (before.unwritten or before.restored is None)
            if before.owner != entry.owner:
                self.remove_entries([trajectory_id])  # including the branches of that attempt
        self._entries[trajectory_id] = entry
        self._note_branch(trajectory_id)
        return entry

    def remove_entries(self, trajectory_ids: Collection[str]) -> None:
        """Remove trajectories and their branches; the next compaction removes them from the file."""
        for trajectory_id in trajectory_ids:
            for name in (trajectory_id, *self._branches.pop(trajectory_id, ())):
                self._entries.pop(name, None)

    def _note_branch(self, trajectory_id: str) -> None:
        if (root := root_of(trajectory_id)) != trajectory_id:
            self._branches[root].add(trajectory_id)

    async def write_in_thread(self, before: Callable[[], None] = lambda: None) -> None:
        """Write what is new, in the journal's own thread; then compact the file if it has grown large.

        Cancelled, the next write continues where this one ended.

        Args:
            before: Called in that thread before each write: the ledger must contain the journal's
                trajectories, and those that a compaction leaves out.

        Raises:
            SpoolFull: When the disk is full. What was written before is complete and stays.
        """

        def work() -> None:
            before()
            self._append()

        loop = asyncio.get_running_loop()
        for compact in (False, True):
            if not self._unvisited:
                if compact and not self._files.has_grown:
                    break
                self._begin_pass(compact=compact)
            while not self._is_closed:
                self._visit_entries()
                await wait_out_shortage(lambda: loop.run_in_executor(self._thread, work))
                if not self._unvisited:
                    break
            self._note_written_claims()

    def write_entries(self) -> None:
        """Write what is new, in the calling thread.

        Raises:
            SpoolFull: As `write_in_thread`.
        """
        if self._is_closed:
            return
        if self._unvisited:
            self._end_pass()  # one that was cut short
        self._begin_pass(compact=False)
        self._end_pass()
        if self._files.has_grown:
            self._begin_pass(compact=True)
            self._end_pass()

    def close(self) -> None:
        """Close the file without writing. A thread that comes too late writes nothing."""
        self._thread.shutdown(wait=False)
        self._unvisited.clear()
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            self._files.close()

    def _begin_pass(self, *, compact: bool) -> None:
        """Begin to visit all entries once, for their changes or for the next file."""
        self._unvisited = deque(self._entries)
        self._compacting = compact
        self._claims_in_pass += self._claims
        self._claims = []

    def _note_written_claims(self) -> None:
        """A pass has ended and everything that it collected is in the file."""
        self._written_claims += self._claims_in_pass
        self._claims_in_pass = []

    def _visit_entries(self) -> None:
        """Collect the records of the next few entries of the present pass."""
        records: list[JournalRecord] = []
        for _ in range(min(_ENTRIES_PER_TURN, len(self._unvisited))):
            entry = self._entries.get(self._unvisited.popleft())
            if entry is None:
                continue  # removed since the pass began
            record = entry.full_record() if self._compacting else entry.next_record()
            if record is not None:
                records.append(record)
        self._waiting.append(_Slice(records, self._compacting, is_last=not self._unvisited))

    def _end_pass(self) -> None:
        """Visit the remaining entries and write what was collected, in the calling thread."""
        while True:
            self._visit_entries()
            self._append()
            if not self._unvisited:
                break
        self._note_written_claims()

    def _append(self) -> None:
        """Write what was collected, in order: whole records or none. From any thread."""
        with self._lock:
            while self._waiting and not self._is_closed:
                part = self._waiting.popleft()
                try:
                    self._files.write_slice(part)
                except BaseException:
                    self._waiting.appendleft(part)
                    raise


class _Slice(NamedTuple):
    """Records that were collected in one turn of the event loop."""

    records: list[JournalRecord]
    compacts: bool
    """Whether they belong to the next file."""
    is_last: bool
    """Whether they are the last ones of their pass."""


class _JournalFiles:
    """The current file of a journal, and the next one while a compaction is not complete."""

    def __init__(self, directory: Path, metrics: Metrics | None, *, syncs: bool) -> None:
        self.directory = directory
        self._metrics = metrics or Metrics()
        self._syncs = syncs
        self._number = 0
        self._file: _OpenFile | None = None
        self._next_file: _OpenFile | None = None
        self._began_with = 0

    @property
    def nbytes(self) -> int:
        """The size of the current file."""
        return 0 if self._file is None else self._file.nbytes

    @property
    def has_grown(self) -> bool:
        """Whether the current file is to be compacted."""
        return self.nbytes > max(_COMPACT_BYTES, _GROWTH * self._began_with)

    def close(self) -> None:
        """Close the current file, and delete one that is not complete."""
        if self._file is not None:
            self._file.close()
        if self._next_file is not None:
            self._next_file.delete()
        self._file = self._next_file = None

    def write_slice(self, part: _Slice) -> None:
        """Write records, all or none of them.

        Raises:
            SpoolFull: The disk is full.
        """
        data = encode_records(part.records)
        try:
            self._write_to_file(part, data)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            raise SpoolFull(
                f"the journal {self.directory} has {self.nbytes} bytes and no space for another "
                f"{sum(map(len, data))}: {describe_disk_error(error)}, it continues from what was written"
            ) from error
        if data:
            self._metrics.journal_bytes.set(self.nbytes)
            self._metrics.journal_written_bytes_total.inc(sum(map(len, data)))

    def _write_to_file(self, part: _Slice, data: Sequence[bytes]) -> None:
        if not part.compacts:
            if self._file is None and data:
                self._file = self._open_file()
                self._file.complete()
                self._number += 1
            if self._file is not None:
                self._file.append(data, syncs=self._syncs and part.is_last)
            return
        if self._next_file is None:
            self._next_file = self._open_file()
        self._next_file.append(data, syncs=self._syncs and part.is_last)
        if not part.is_last:
            return
        stale = journal_files(self.directory)
        self._next_file.complete()
        before, self._file, self._next_file = self._file, self._next_file, None
        self._number += 1
        self._began_with = self._file.nbytes
        # The slice is written, so it must not be written again. The next compaction deletes what stays here.
        with suppress(OSError):
            if before is not None:
                before.close()
            for path in stale:
                path.unlink()

    def _open_file(self) -> _OpenFile:
        if not self._number:  # later, the folder is gone only if nothing in it is needed any longer
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _OpenFile(self.directory / f"journal-{self._number + 1:06d}")


class _OpenFile:
    """A file of whole records that is being written. Until `complete` it has another name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f".{path.name}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._part, flags, 0o600)
        self.nbytes = 0

    def append(self, data: Sequence[bytes], *, syncs: bool) -> None:
        """Append all of the data, or nothing if the disk is full."""
        try:
            for piece in data:
                left = memoryview(piece)
                while left:
                    left = left[os.write(self._descriptor, left) :]
            if syncs:
                os.fdatasync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, self.nbytes)  # later records must not follow half a record
            raise
        self.nbytes += sum(map(len, data))

    def complete(self) -> None:
        """Give the file its name: readers find it from now on."""
        self._part.rename(self._path)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def delete(self) -> None:
        """Close and delete a file that is not complete."""
        self.close()
        self._part.unlink(missing_ok=True)


def _pieces(call: OpenCall, start: int) -> Iterator[Sampled]:
    """Yield what a running call sampled from its `start`-th token on, one piece per weight version.

    Pieces are views: nothing is copied on the event loop.
    """
    for span in call.versions:
        begin = max(span.start, start)
        if begin < span.end:
            yield Sampled(
                token_ids=call.token_ids[begin : span.end],
                rollout_log_probs=call.log_probs[begin : span.end],
                mask=call.mask(begin, span.end),
                weight_version=span.weight_version,
                engine_id=call.engine_id,
                finish_reason="abort",
                lag_unknown=call.lag_unknown,
                sampling=call.sampling,
            )
