"""Processes take a trajectory over from each other, are killed in a write, or go on without knowing it."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.observability.metrics import Metrics
from async_rl.store.journal import Journal, JournalEntry
from async_rl.store.journal_file import journal_files
from async_rl.store.journal_folders import JournalFolders, JournalReader
from async_rl.store.progress import ProgressReport
from async_rl.types import Sampled

ROOT = "a"
NAMES = (ROOT, f"{ROOT}.1")
Tokens = dict[str, tuple[int, ...]]
"""Tokens of the trajectory and of its branch."""


class Step(NamedTuple):
    """One thing that happens, to the newest process or to one of its predecessors."""

    what: Literal["sample", "tick", "report", "take over", "kill", "restart"]
    process: int
    name: str
    count: int


steps = st.builds(
    Step,
    what=st.sampled_from(["sample", "sample", "tick", "tick", "report", "take over", "kill", "restart"]),
    process=st.integers(0, 2),
    name=st.sampled_from(NAMES),
    count=st.integers(1, 200),
)


class Process:
    """A process that owns the trajectory, or has owned it."""

    def __init__(self, journal: Journal, epoch: int) -> None:
        self.journal = journal
        self.epoch = epoch
        self.entries: dict[str, JournalEntry] = {}
        self.told: list[Tokens] = [{}]
        """What it had at each of its writes."""
        self.is_alive = True
        self.is_known = True
        """Whether the present driver started it, or found something that it wrote."""
        self.safe_bytes = 0
        """What a kill cannot take back: all but its last write."""

    def sample(self, name: str, token_ids: np.ndarray) -> None:
        if name not in self.entries:
            self.entries[name] = self.journal.open_entry(name, owner_epoch=self.epoch)
        self.entries[name].segments.append(
            Sampled(
                token_ids=token_ids,
                rollout_log_probs=np.zeros(len(token_ids), np.float32),
                weight_version=0,
                engine_id="engine-0",
                finish_reason="abort",
            )
        )

    def write(self) -> None:
        self.safe_bytes = self.journal.nbytes
        self.journal.write_entries()
        now = {
            name: tuple(token for s in entry.segments for token in s.token_ids.tolist())
            for name, entry in self.entries.items()
            if entry.segments
        }
        if now:
            self.told.append(now)

    def kill(self, torn_bytes: int) -> None:
        self.journal.close()
        self.is_alive = False
        for path in journal_files(self.journal.directory):
            size = path.stat().st_size
            os.truncate(path, max(self.safe_bytes, size - torn_bytes))


class World:
    """A driver, the processes that it has started, and what each of them wrote."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.num_tokens = 0
        self.incarnation = 0
        self.processes: list[Process] = []
        self.restart()
        self.take_over()
        for name in NAMES:
            self.do(Step("sample", 0, name, 50))
        self.do(Step("tick", 0, ROOT, 1))

    def do(self, step: Step) -> None:
        process = self.processes[-1 - step.process % len(self.processes)]  # 0 is the owner
        if step.what == "take over":
            self.take_over()
        elif step.what == "restart":
            self.restart()
            self.take_over()
        elif not process.is_alive:
            pass
        elif step.what == "sample":
            first, self.num_tokens = self.num_tokens, self.num_tokens + step.count
            process.sample(step.name, np.arange(first, self.num_tokens, dtype=np.int32))
        elif step.what == "tick":
            process.write()
        elif step.what == "kill":
            process.kill(8 * step.count)
        elif process is self.processes[-1]:  # the driver hears of no other
            written = process.journal.pop_written_claims()
            self.folders.record_written(process.journal.directory, written)
            if written:
                process.safe_bytes = process.journal.nbytes
            self.folders.delete_folders(self.folders.take_unneeded())

    def restart(self) -> None:
        """Another process of the driver, which knows what is on the disk."""
        self.incarnation += 1
        self.folders = JournalFolders(self.base, self.incarnation, {})
        self.known = asyncio.run(self.folders.restore([ROOT]))
        for process in self.processes:
            process.is_known = process.told != [{}]

    def take_over(self) -> None:
        """The driver gives up the owner, which may go on, and lets another process continue."""
        if self.processes and self.incarnation == self.owner_of:
            self.folders.end_owner(self.processes[-1].journal.directory)
            self.known = {ROOT: ProgressReport(oldest_version=0)}
        claim = self.folders.claim_trajectory(ROOT, self.known.values())
        left = asyncio.run(JournalReader(Metrics()).read_claim(claim, ROOT, 1))
        found = {
            name: tuple(token for s in state.segments for token in s.token_ids.tolist())
            for name, state in left.items()
        }
        self.check(found)
        folder = self.folders.add_owner("worker", lambda names: None)
        self.folders.record_owner(ROOT, claim, folder)
        process, self.owner_of = Process(Journal(folder), claim.owner_epoch), self.incarnation
        process.journal.claim_trajectories(left, claim.owner_epoch)
        for name, state in left.items():
            entry = process.journal.open_entry(name, 1, state, owner_epoch=claim.owner_epoch)
            entry.segments.extend(state.segments)
            entry.end_restoring()
            process.entries[name] = entry
        self.processes.append(process)

    def check(self, found: Tokens) -> None:
        """All that the last owner wrote is found, less a write in which it was killed."""
        for process in reversed(self.processes):
            if process.told == [{}] or not process.is_known:
                continue  # it had written nothing: what was before counts
            if process.is_alive:
                assert found == process.told[-1]
                return
            moments = [*process.told[-2:], *(p.told[-1] for p in self.processes if p.epoch < process.epoch)]
            for name in NAMES:
                assert any(is_within(moment.get(name, ()), found.get(name, ())) for moment in moments)
                known = [moment.get(name, ()) for moment in (*process.told, *moments)]
                assert any(is_within(found.get(name, ()), each) for each in known)
            return
        assert found == {}


def is_within(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether the one is the beginning of the other."""
    return other[: len(one)] == one


@pytest.mark.real
@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=40))
def test_the_writes_of_the_last_owner_are_continued_when_earlier_ones_go_on_writing(
    story: list[Step],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for step in story:
            world.do(step)
        world.take_over()
        for process in world.processes:
            process.journal.close()
