"""Writes the tokens of trajectories in flight to disk once per second, for a killed driver to continue.

```
 session ─segments, turns, running call─► JournalEntry ─records─► Journal ─a write per tick─► journal-000007
                                                                                                    │ killed
 session ◄───────────── rollout.session.restore ◄───────────── Journal.restore ◄────────────────────┘
```

A session updates its entry at once; once per tick the journal visits all entries and writes their changes.
It visits a few entries in each turn of the event loop, and encodes and writes them in its own thread: neither
a tick nor a compaction blocks the loop, however much is in flight. `queue.journal_file` describes the file.
When the file has grown to a multiple of what is in flight, the state is written to the next file and this one
is deleted: disk use is bounded by what is in flight.

The file is written, not synced: it survives the death of the process, and a power cut loses its end. It
contains no routing rows. They are ten times as large as the tokens, and the first call after a restart, or a
prefill without new tokens, reports all of them again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from async_rl.errors import SpoolFull
from async_rl.observability.metrics import Metrics
from async_rl.queue.journal_file import (
    JournalledTrajectory,
    JournalRecord,
    TurnNote,
    cut_pieces,
    encode_records,
    file_number,
    interrupted_trajectory,
    journal_files,
    read_journal,
)
from async_rl.runtime.shortages import wait_out_shortage
from async_rl.types import (
    Float32Array,
    Int32Array,
    Sampled,
    Segment,
    VersionSpan,
    cap_versions,
    root_of,
)

log = logging.getLogger(__name__)

_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

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
    def token_ids(self) -> Int32Array:
        """A view of its tokens, `[n] int32`; the elements of a view never change."""
        ...

    @property
    def log_probs(self) -> Float32Array:
        """A view of their log-probs, `[n] float32`, nats."""
        ...


class JournalEntry:
    """The journal's view of one trajectory. Its session updates it at once; the journal reads it later.

    Example:
        >>> entry.begin_turn(7, max_new_tokens=16, stop=())
        >>> entry.call = call  # it grows
        >>> entry.segments.append(segment)  # what is kept of the call when it has ended
        >>> entry.end_turn(12, "stop")
    """

    def __init__(
        self,
        trajectory_id: str,
        attempt: int = 1,
        restored: JournalledTrajectory | None = None,
        inherited: Sequence[Segment] = (),
    ) -> None:
        """Begin empty, or as a branch with its inherited segments.

        Args:
            trajectory_id: The id of the trajectory.
            attempt: The number of this attempt, from 1.
            restored: What an earlier process left of this attempt, beyond what is inherited. The journal
                contains it in the place of this entry's own data until `end_restoring`.
            inherited: The segments of the trajectory that this one is a branch of.
        """
        self.trajectory_id = trajectory_id
        self.attempt = attempt
        self.segments: list[Segment] = list(inherited)
        self.num_inherited = len(inherited)
        """The number of leading segments that belong to the trajectory that this one is a branch of."""
        self.call: OpenCall | None = None
        self._leased_versions: list[int] = []
        """The versions of calls that another process has made since its last report, the running one last."""
        self._is_leased = False
        """Whether the last of them runs."""
        self.restored = restored
        self.unwritten = False
        """Whether the journal may lack some of what is to be restored."""
        self._turns: list[TurnNote] = []
        self._epoch = 0
        self._index = 0
        self._written_segments = 0
        self._written_call: OpenCall | None = None
        self._written_open = 0
        self._written_turns = 0

    def begin_turn(self, start: int, max_new_tokens: int, stop: Sequence[str]) -> None:
        """Record that a turn of the policy begins."""
        self._turns.append(TurnNote(start=start, max_new_tokens=max_new_tokens, stop=tuple(stop)))

    def end_turn(self, end: int, reason: Literal["stop", "length"]) -> None:
        """Record that the turn is complete."""
        self._turns[-1] = msgspec.structs.replace(self._turns[-1], end=end, reason=reason)
        self._written_turns = min(self._written_turns, len(self._turns) - 1)

    @property
    def in_turn(self) -> bool:
        """Whether a turn of the policy is running."""
        return bool(self._turns) and self._turns[-1].end is None

    @property
    def versions(self) -> Iterator[int]:
        """The versions that sampled its own tokens, including the running call and what is to be restored."""
        known = self._own
        yield from (s.weight_version for s in known if isinstance(s, Sampled))
        yield from self._leased_versions
        if self.call is not None:
            yield self.call.since_version
            yield from (span.weight_version for span in self.call.versions)

    @property
    def num_turns(self) -> int:
        """The number of turns that have ended."""
        return sum(turn.end is not None for turn in self._turns)

    @property
    def num_sampled_tokens(self) -> int:
        """The number of its own sampled tokens, including the running call and what is to be restored."""
        closed = sum(len(s.token_ids) for s in self._own if isinstance(s, Sampled))
        return closed + (len(self.call.token_ids) if self.call is not None else 0)

    @property
    def state_to_continue(self) -> JournalledTrajectory:
        """The state that another run of the agent loop can continue, when the session has ended."""
        inherited, own = self.segments[: self.num_inherited], self._own
        return interrupted_trajectory(
            self.trajectory_id,
            self.attempt,
            (*inherited, *own),
            [] if self.call is None else list(_pieces(self.call, 0)),
            self._turns if self.restored is None else self.restored.turns,
        )

    @property
    def _own(self) -> Sequence[Segment]:
        return self.segments[self.num_inherited :] if self.restored is None else self.restored.segments

    def begin_remote_call(self, weight_version: int) -> None:
        """Record that another process begins a call, whose tokens it will report later."""
        self._leased_versions.append(weight_version)
        self._is_leased = True

    def end_remote_call(self) -> None:
        """Record that the call has ended; until the next report it counts for the trajectory's age."""
        self._is_leased = False

    def apply_record(self, record: JournalRecord, num_inherited: int) -> None:
        """Take over what another process reports of the trajectory that it samples.

        Args:
            record: The next record of that process's entry.
            num_inherited: The number of its leading segments that are inherited.
        """
        if record.index == 0:
            self.restored = None
            self.segments.clear()
            self._turns.clear()
            self._begin_epoch()
        self._leased_versions = self._leased_versions[-1:] if self._is_leased else []
        self.num_inherited = num_inherited
        self.segments.extend(record.segments)
        self._turns[record.first_turn :] = record.turns
        self._written_turns = min(self._written_turns, record.first_turn)
        before = self.call if isinstance(self.call, _ReportedCall) and record.open_start else None
        self.call = _ReportedCall.extended(before, record.open_start, record.open)

    def end_restoring(self) -> None:
        """End restoring: from now on the entry holds the trajectory, not what an earlier process left."""
        self.restored = None

    def next_record(self) -> JournalRecord | None:
        """Return what was not written yet and count it as written; None when there is nothing."""
        if self.restored is not None:
            return self.full_record() if self.unwritten else None
        call = self.call
        known = self._written_open if call is self._written_call else 0
        sampled = 0 if call is None else len(call.token_ids)
        known = min(known, sampled)  # fewer than before: an invalid answer was cleared
        closed = tuple(self.segments[self._written_segments :])
        turns = tuple(self._turns[self._written_turns :])
        if not closed and not turns and known == sampled and known == self._written_open:
            return None
        return self._write(closed, known, turns)

    def full_record(self) -> JournalRecord | None:
        """Return the whole state in one record that begins a new epoch; None when there is nothing yet."""
        self._begin_epoch()
        if self.restored is None:
            return self.next_record()
        self.unwritten = False
        record = JournalRecord(
            trajectory_id=self.trajectory_id,
            attempt=self.attempt,
            epoch=self._epoch,
            index=0,
            segments=(*self.segments[: self.num_inherited], *self.restored.segments),
            open_start=0,
            open=(),
            first_turn=0,
            turns=self.restored.turns,
        )
        self._epoch += 1  # for the entry's own records, which do not continue this one
        return record

    def _begin_epoch(self) -> None:
        """Let the next record begin with the whole state."""
        self._epoch += 1
        self._index = self._written_segments = self._written_open = self._written_turns = 0
        self._written_call = None

    def _write(
        self, closed: tuple[Segment, ...], open_start: int, turns: tuple[TurnNote, ...]
    ) -> JournalRecord:
        record = JournalRecord(
            trajectory_id=self.trajectory_id,
            attempt=self.attempt,
            epoch=self._epoch,
            index=self._index,
            segments=closed,
            open_start=open_start,
            open=() if self.call is None else tuple(_pieces(self.call, open_start)),
            first_turn=self._written_turns,
            turns=turns,
        )
        self._index += 1
        self._written_segments = len(self.segments)
        self._written_turns = len(self._turns)
        self._written_call = self.call
        self._written_open = 0 if self.call is None else len(self.call.token_ids)
        return record


class _ReportedCall:
    """A running call of another process, as far as its reports go. Elements of views never change."""

    def __init__(self, engine_id: str, since_version: int) -> None:
        self.engine_id = engine_id
        self.since_version = since_version
        self.versions: list[VersionSpan] = []
        self._token_ids = np.empty(256, np.int32)
        self._log_probs = np.empty(256, np.float32)
        self._length = 0

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._length

    @property
    def token_ids(self) -> Int32Array:
        """A view of its tokens, `[n] int32`."""
        return self._token_ids[: self._length]

    @property
    def log_probs(self) -> Float32Array:
        """A view of their log-probs, `[n] float32`, nats."""
        return self._log_probs[: self._length]

    def add_piece(self, piece: Sampled) -> None:
        """Append tokens of one version. Buffers grow by half: a token is copied a few times at most."""
        begin, end = self._length, self._length + len(piece.token_ids)
        if end > len(self._token_ids):
            capacity = max(end, len(self._token_ids) * 3 // 2)
            self._token_ids = np.concatenate([self.token_ids, np.empty(capacity - begin, np.int32)])
            self._log_probs = np.concatenate([self.log_probs, np.empty(capacity - begin, np.float32)])
        self._token_ids[begin:end] = piece.token_ids
        self._log_probs[begin:end] = piece.rollout_log_probs
        self._length = end
        version, start = piece.weight_version, begin
        if self.versions and self.versions[-1].weight_version == version:
            start = self.versions.pop().start
        self.versions.append(VersionSpan(start=start, end=end, weight_version=version))

    @classmethod
    def extended(
        cls, before: _ReportedCall | None, start: int, pieces: Sequence[Sampled]
    ) -> _ReportedCall | None:
        """Return the call with its first `start` tokens and further pieces; None without tokens."""
        if before is not None and len(before) == start:
            for piece in pieces:
                before.add_piece(piece)
            return before
        whole = [*cut_pieces([] if before is None else list(_pieces(before, 0)), start), *pieces]
        if not whole:
            return None
        call = cls(whole[0].engine_id, min(piece.weight_version for piece in whole))
        for piece in whole:
            call.add_piece(piece)
        return call


class Journal:
    """The journal of a run, in its own folder. All methods are for the event loop's thread.

    Example:
        >>> journal = Journal(Path("journal"), metrics=metrics)
        >>> restored = journal.restore(in_flight_ids, newest_version=step)
        >>> entry = journal.open_entry(trajectory_id, restored=restored.get(trajectory_id))
        >>> await journal.write_in_thread(before=ledger.flush)  # once per second
        >>> journal.remove_entries([trajectory_id])  # it is stored elsewhere, or settled
    """

    def __init__(self, directory: Path, metrics: Metrics | None = None) -> None:
        """Open the folder; nothing is read or written before `restore`."""
        self._directory = directory
        self._metrics = metrics
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._entries: dict[str, JournalEntry] = {}
        self._branches: defaultdict[str, set[str]] = defaultdict(set)  # ids of branch entries, by root
        self._unvisited: deque[str] = deque()  # ids of the entries that the present pass has yet to visit
        self._compacting = False  # whether the present pass writes the next file
        self._waiting: deque[_Slice] = deque()  # collected, not written
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="journal"
        )  # its own: no write waits for others
        self._number = max((file_number(path) for path in journal_files(directory)), default=0)
        self._file: _OpenFile | None = None
        self._next_file: _OpenFile | None = None  # of a compaction that is not complete
        self._began_with = 0

    @property
    def nbytes(self) -> int:
        """The size of the current file."""
        return 0 if self._file is None else self._file.nbytes

    def restore(self, alive: Collection[str], newest_version: int) -> dict[str, JournalledTrajectory]:
        """Read what an earlier process left, drop what is no longer in flight, and continue in a new file.

        Args:
            alive: The trajectories in flight; their branches are in flight with them.
            newest_version: The version of the checkpoint that the run continues from. The restart undoes
                later versions: their tokens count as sampled by this one, as old as they can be, so that the
                bound holds.

        Returns:
            The trajectories by id; `open_entry` takes them as `restored`.

        Raises:
            SpoolFull: When the disk has no space for the new file; the old one stays.
        """
        found, lost = read_journal(self._directory)
        if lost:
            log.warning(
                "%d records of the journal are damaged; their trajectories continue from earlier tokens", lost
            )
        if self._metrics is not None:
            self._metrics.journal_corrupt_records_total.inc(lost)
        left = {
            name: msgspec.structs.replace(state, segments=cap_versions(state.segments, newest_version))
            for name, state in found.items()
            if (root := root_of(name)) in alive and found.get(root, state).attempt == state.attempt
        }
        self._entries = {name: JournalEntry(name, state.attempt, state) for name, state in left.items()}
        for name in left:
            self._note_branch(name)
        self._begin_pass(compact=True)
        self._end_pass()
        return left

    def open_entry(
        self,
        trajectory_id: str,
        attempt: int = 1,
        restored: JournalledTrajectory | None = None,
        inherited: Sequence[Segment] = (),
    ) -> JournalEntry:
        """Return the entry of a trajectory, which replaces that of an earlier attempt; see `JournalEntry`."""
        before = self._entries.get(trajectory_id)
        entry = JournalEntry(trajectory_id, attempt, restored, inherited)
        if before is not None:
            entry._epoch = before._epoch + 1
            # The file may lack changes of an entry updated meanwhile.
            entry.unwritten = restored is not None and (before.unwritten or before.restored is None)
            if before.attempt != attempt:
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

        Cancelled, the next write goes on where this one ended.

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
                if compact and not self._has_grown:
                    break
                self._begin_pass(compact=compact)
            while True:
                self._visit_entries()
                await wait_out_shortage(lambda: loop.run_in_executor(self._thread, work))
                if not self._unvisited:
                    break

    def write_entries(self) -> None:
        """Write what is new, in the calling thread.

        Raises:
            SpoolFull: As `write_in_thread`.
        """
        if self._unvisited:
            self._end_pass()  # one that was cut short
        self._begin_pass(compact=False)
        self._end_pass()
        if self._has_grown:
            self._begin_pass(compact=True)
            self._end_pass()

    def close(self) -> None:
        """Close the file without writing. A thread that comes too late writes nothing."""
        self._thread.shutdown(wait=False)
        self._unvisited.clear()
        with self._lock:
            self._waiting.clear()
            if self._file is not None:
                self._file.close()
            if self._next_file is not None:
                self._next_file.delete()
            self._file = self._next_file = None

    @property
    def _has_grown(self) -> bool:
        return self.nbytes > max(_COMPACT_BYTES, _GROWTH * self._began_with)

    def _begin_pass(self, *, compact: bool) -> None:
        """Begin to visit all entries once, for their changes or for the next file."""
        self._unvisited = deque(self._entries)
        self._compacting = compact

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
                return

    def _append(self) -> None:
        """Write what was collected, in order: whole records or none. From any thread."""
        with self._lock:
            while self._waiting:
                part = self._waiting.popleft()
                try:
                    self._write(part)
                except BaseException:
                    self._waiting.appendleft(part)
                    raise

    def _write(self, part: _Slice) -> None:
        data = encode_records(part.records)
        try:
            self._write_to_file(part, data)
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            raise SpoolFull(
                f"the journal {self._directory} has {self.nbytes} bytes and no space for another "
                f"{sum(map(len, data))}: the disk is full; free some and start the run again, it goes on "
                "from what was written"
            ) from error
        if self._metrics is not None:
            self._metrics.journal_bytes.set(self.nbytes)
            self._metrics.journal_written_bytes_total.inc(sum(map(len, data)))

    def _write_to_file(self, part: _Slice, data: Sequence[bytes]) -> None:
        if not part.compacts:
            assert self._file is not None, "restore has opened a file"
            self._file.append(data)
            return
        if self._next_file is None:
            self._next_file = _OpenFile(self._directory / f"journal-{self._number + 1:06d}")
        self._next_file.append(data)
        if not part.is_last:
            return
        stale = journal_files(self._directory)
        self._next_file.complete()
        if self._file is not None:
            self._file.close()
        self._file, self._next_file = self._next_file, None
        self._number += 1
        self._began_with = self._file.nbytes
        for path in stale:
            path.unlink()


class _Slice(NamedTuple):
    """Records that were collected in one turn of the event loop."""

    records: list[JournalRecord]
    compacts: bool
    """Whether they belong to the next file."""
    is_last: bool
    """Whether they are the last ones of their pass."""


class _OpenFile:
    """A file of whole records that is being written. Until `complete` it has another name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f".{path.name}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._part, flags, 0o600)
        self.nbytes = 0

    def append(self, data: Sequence[bytes]) -> None:
        """Append all of the data, or nothing if the disk is full."""
        try:
            for piece in data:
                left = memoryview(piece)
                while left:
                    left = left[os.write(self._descriptor, left) :]
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
                weight_version=span.weight_version,
                engine_id=call.engine_id,
                finish_reason="abort",
            )
