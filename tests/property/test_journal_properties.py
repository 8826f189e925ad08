"""Whatever is written and however the file ends: what is read back stood there at some moment, whole."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from async_rl.store import journal as journal_module
from async_rl.store.journal import Journal, JournalEntry
from async_rl.store.journal_file import JournalledTrajectory, read_journal
from async_rl.types import Context, Sampled, SamplingSettings, VersionSpan
from tests.support.journals import continue_journals, read_journals

NAMES = ("a", "b", "c")
Story = tuple[int, tuple[int, ...], tuple[float, ...], tuple[int, ...], tuple[Any, ...]]
"""Attempt, tokens, log-probs, versions (-1 for context), turns: all that a replay needs."""


class Step(NamedTuple):
    """One thing that happens, to one trajectory or to the journal."""

    what: Literal["prompt", "chunk", "close", "clear", "retry", "forget", "tick", "compact"]
    name: str
    count: int


steps = st.builds(
    Step,
    what=st.sampled_from(
        ["prompt", "chunk", "chunk", "chunk", "close", "clear", "retry", "forget", "tick", "tick", "compact"]
    ),
    name=st.sampled_from(NAMES),
    count=st.integers(1, 5),
)


class Call:
    """A running engine call."""

    engine_id = "engine-0"
    lag_unknown = False
    sampling = SamplingSettings()

    def __init__(self) -> None:
        self.token_ids = np.empty(0, np.int32)
        self.log_probs = np.empty(0, np.float32)
        self.versions: list[VersionSpan] = []

    def mask(self, start: int, end: int) -> None:
        return None

    def take(self, tokens: np.ndarray, version: int) -> None:
        start = len(self.token_ids)
        self.token_ids = np.concatenate([self.token_ids, tokens])
        self.log_probs = np.concatenate([self.log_probs, (-0.25 * tokens).astype(np.float32)])
        self.versions.append(VersionSpan(start=start, end=len(self.token_ids), weight_version=version))


class World:
    """A journal and the trajectories that it receives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = Journal(folder)
        self.entries: dict[str, JournalEntry] = {}
        self.told: dict[str, set[Story]] = {name: set() for name in NAMES}
        self.token = 0

    def do(self, step: Step) -> None:
        name = step.name
        if step.what == "tick":
            self.tick()
        elif step.what == "compact":
            if not self.journal._unvisited:
                self.journal._begin_pass(compact=True)
            for _ in range(min(step.count - 1, len(self.journal._unvisited))):
                self.journal._visit_entries()  # the next tick continues with what is left
            self.note_told()
        elif step.what == "forget":
            self.entries.pop(name, None)
            self.journal.remove_entries([name])
        elif step.what == "retry" or name not in self.entries:
            attempt = self.entries[name].attempt + 1 if name in self.entries else 1
            self.entries[name] = self.journal.open_entry(name, attempt)
        else:
            self.grow(self.entries[name], step)

    def tick(self) -> None:
        self.journal.write_entries()
        self.note_told()

    def note_told(self) -> None:
        for name, entry in self.entries.items():
            if (story := story_of(entry))[1]:
                self.told[name].add(story)

    def grow(self, entry: JournalEntry, step: Step) -> None:
        call = entry.call
        length = sum(len(segment.token_ids) for segment in entry.segments)
        if step.what == "prompt" and call is None:
            entry.segments.append(Context(token_ids=self.tokens(step.count)))
        elif step.what == "chunk":
            if call is None:
                entry.begin_turn(length, 16, ())
                call = entry.call = Call()
            call.take(self.tokens(step.count), step.count % 3)
        elif step.what == "clear" and call is not None:
            call.token_ids, call.log_probs = call.token_ids[:0], call.log_probs[:0]
            call.versions.clear()
            entry.call = None  # a refused answer is the end of its call
        elif step.what == "close" and call is not None:
            entry.call = None
            # The engine's own account of versions may be another than that by arrival.
            for start in range(0, len(call.token_ids), step.count):
                ids, probs = call.token_ids[start:][: step.count], call.log_probs[start:][: step.count]
                entry.segments.append(sampled(ids, probs, 3 + start))
            entry.end_turn(length + len(call.token_ids), "stop")

    def tokens(self, count: int) -> np.ndarray:
        self.token += count
        return np.arange(self.token - count, self.token, dtype=np.int32)


def sampled(ids: np.ndarray, probs: np.ndarray, version: int) -> Sampled:
    return Sampled(
        token_ids=ids,
        rollout_log_probs=probs,
        weight_version=version,
        engine_id="engine-0",
        finish_reason="stop",
    )


def story_of(entry: JournalEntry) -> Story:
    segments = list(entry.segments)
    if entry.call is not None:
        segments += journal_module._pieces(entry.call, 0)
    return told_by(entry.attempt, segments, entry._turns)


def told_by(attempt: int, segments: Any, turns: Any) -> Story:
    ids: list[int] = []
    probs: list[float] = []
    versions: list[int] = []
    for segment in segments:
        count = len(segment.token_ids)
        ids += segment.token_ids.tolist()
        is_sampled = isinstance(segment, Sampled)
        probs += segment.rollout_log_probs.tolist() if is_sampled else [0.0] * count
        versions += [segment.weight_version if is_sampled else -1] * count
    notes = tuple((t.start, t.max_new_tokens, t.stop, t.end, t.reason) for t in tuple(turns))
    return attempt, tuple(ids), tuple(probs), tuple(versions), notes


def read_back(folder: Path) -> dict[str, Story]:
    found, _ = read_journal(folder)
    return {name: told_by(state.attempt, state.segments, state.turns) for name, state in found.items()}


def file_of(folder: Path) -> Path:
    (path,) = folder.glob("journal-*")
    return path


@patch.object(journal_module, "_ENTRIES_PER_TURN", 1)
@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=40))
def test_all_that_was_written_is_read_when_the_file_is_whole(story: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for step in story:
            world.do(step)
        world.tick()
        found = read_back(world.folder)
        for name, entry in world.entries.items():
            if (now := story_of(entry))[1]:
                assert found[name] == now
        # What was forgotten may be in the file still; then it is as it was at a tick or a turn.
        assert all(found[name] in world.told[name] for name in found.keys() - world.entries.keys())
        world.journal.close()


@patch.object(journal_module, "_ENTRIES_PER_TURN", 1)
@settings(max_examples=150, deadline=None)
@given(st.lists(steps, min_size=5, max_size=40), st.floats(0, 1), st.floats(0, 1), st.integers(0, 255))
def test_a_moment_of_each_trajectory_is_read_when_the_file_is_damaged(
    story: list[Step], kept: float, place: float, value: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for step in story:
            world.do(step)
        world.tick()
        assume(world.folder.exists() and any(world.folder.iterdir()))
        data = bytearray(file_of(world.folder).read_bytes())
        data = data[: round(kept * len(data))]
        if data:
            data[min(int(place * len(data)), len(data) - 1)] = value
        file_of(world.folder).write_bytes(data)
        for name, found in read_back(world.folder).items():
            assert found in world.told[name]
        world.journal.close()


@patch.object(journal_module, "_ENTRIES_PER_TURN", 1)
@settings(max_examples=50, deadline=None)
@given(st.lists(steps, max_size=30), st.sets(st.sampled_from(NAMES)), st.integers(0, 4))
def test_those_in_flight_go_on_in_the_next_file_when_another_process_takes_over(
    story: list[Step], alive: set[str], newest: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "000001")
        for step in story:
            world.do(step)
        world.tick()
        before = read_back(world.folder)
        world.journal.close()
        second, left = continue_journals(Path(folder), alive, newest)
        assert left.keys() == before.keys() & alive
        for name, state in left.items():
            attempt, ids, probs, versions, turns = before[name]
            lowered = tuple(min(version, newest) for version in versions)
            expected = attempt, ids, probs, lowered, turns
            assert told_by(state.attempt, state.segments, state.turns) == expected
            # Nothing is restored yet, and the process is killed again.
            second.open_entry(name, attempt, state, owner_epoch=2)
        second.write_entries()
        second.close()
        again = read_journals(Path(folder))
        assert {name for name, state in again.items() if state.owner_epoch == 2} == left.keys()
        assert all(same(again[name], left[name]) for name in left)


def same(one: JournalledTrajectory, other: JournalledTrajectory) -> bool:
    return told_by(one.attempt, one.segments, one.turns) == told_by(
        other.attempt, other.segments, other.turns
    )
