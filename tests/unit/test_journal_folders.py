"""Journals of several processes: whose records count, what is read again, and which folders are deleted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from async_rl.observability.metrics import Metrics
from async_rl.store import journal_folders
from async_rl.store.journal import Journal, JournalEntry
from async_rl.store.journal_file import JournalledTrajectory, read_journal
from async_rl.store.journal_folders import (
    JournalClaim,
    JournalFolders,
    JournalReader,
    JournalSource,
    OtherNodes,
)
from async_rl.store.ledger import Ledger
from async_rl.types import Context, Sampled
from tests.support.journals import sampled
from tests.support.trajectories import roll_back
from verification.simulation.simulated_workers import SimulatedNodes

NAME = "a" * 32
ENTRIES: dict[tuple[Journal, str], JournalEntry] = {}


def write(journal: Journal, name: str, *parts: Sampled, epoch: int, attempt: int = 1) -> None:
    """Add to a trajectory, as a session does, and write a tick."""
    entry = ENTRIES.get((journal, name)) or journal.open_entry(name, attempt, owner_epoch=epoch)
    ENTRIES[journal, name] = entry
    entry.segments.extend(parts)
    journal.write_entries()


def left_behind(folder: Path, name: str, *parts: Sampled, epoch: int, attempt: int = 1) -> Path:
    """A folder that a process left with one trajectory."""
    journal = Journal(folder)
    write(journal, name, *parts, epoch=epoch, attempt=attempt)
    journal.close()
    return folder


def claim_of(*folders: Path, oldest: int | None = 0) -> JournalClaim:
    sources = tuple(JournalSource(folder=str(folder)) for folder in folders)
    return JournalClaim(owner_epoch=99, sources=sources, oldest_version=oldest)


def read(claim: JournalClaim, attempt: int = 1) -> tuple[dict[str, JournalledTrajectory], float]:
    """What is left according to a claim, and how many attempts began anew."""
    metrics = Metrics()
    left = asyncio.run(JournalReader(metrics).read_claim(claim, NAME, attempt))
    anew = metrics.registry.get_sample_value("async_rl_attempts_restarted_total")
    assert anew is not None
    return left, anew


def lengths(left: dict[str, JournalledTrajectory]) -> dict[str, int]:
    return {name.removeprefix(NAME): state.num_tokens for name, state in left.items()}


def test_branches_of_an_owner_before_are_gone_when_the_owner_has_taken_another_course(tmp_path: Path) -> None:
    first = Journal(tmp_path / "000001-w0-1")
    for name in (NAME, f"{NAME}.1"):
        write(first, name, sampled(5), epoch=1)
    first.close()
    second = left_behind(tmp_path / "000001-w1-2", NAME, sampled(6), epoch=2, attempt=2)
    assert lengths(read(claim_of(first.directory, second), attempt=2)[0]) == {"": 6}
    branch = left_behind(tmp_path / "000001-w2-3", f"{NAME}.2", sampled(1), epoch=3, attempt=3)
    assert lengths(read(claim_of(first.directory, second, branch), attempt=3)[0]) == {".2": 1}


def test_an_attempt_begins_anew_when_nothing_of_it_is_left_or_it_is_older_than_is_known(
    tmp_path: Path,
) -> None:
    folder = left_behind(tmp_path / "000001-w0-1", NAME, sampled(5, 3), sampled(2, 4), epoch=1)
    assert read(claim_of(tmp_path / "gone", oldest=3)) == ({}, 1.0)  # its node is lost
    assert read(claim_of(folder, oldest=3), attempt=2) == ({}, 0.0)
    assert read(claim_of(folder, oldest=4)) == ({}, 0.0)  # its group is admitted as of version 4
    assert lengths(read(claim_of(folder, oldest=3))[0]) == {"": 7}
    assert read(JournalClaim(owner_epoch=7)) == ({}, 0.0)


def test_undone_versions_stay_undone_when_a_second_restart_reads_the_same_journal(tmp_path: Path) -> None:
    """The run went back from version 7 to 4, then to 6, and was killed before it wrote anything anew."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.rollback(0)
    base = tmp_path / "journal"
    left_behind(base / f"{ledger.incarnation:06d}-driver-1", NAME, sampled(5, 4), sampled(2, 7), epoch=1)
    roll_back(ledger, 4)
    roll_back(ledger, 6)
    ledger.close()
    ledger = Ledger(tmp_path / "ledger.sqlite")  # as the next process finds it
    folders = JournalFolders(base, ledger.incarnation, ledger.restarts)
    known = asyncio.run(folders.restore([NAME]))
    assert (known[NAME].oldest_version, known[NAME].newest_version) == (4, 4)
    claim = folders.claim_trajectory(NAME, known.values())
    (state,) = read(claim)[0].values()
    spans = [(s.weight_version, s.lag_unknown) for s in state.segments if isinstance(s, Sampled)]
    assert spans == [(4, False), (4, True)]
    ledger.close()


def test_owners_are_newer_than_all_of_earlier_processes(tmp_path: Path) -> None:
    """Also when an earlier one wrote nothing under its number yet: it may still do so."""
    epochs: list[int] = []
    for _ in range(3):
        ledger = Ledger(tmp_path / "ledger.sqlite")
        ledger.rollback(0)
        folders = JournalFolders(tmp_path / "journal", ledger.incarnation, ledger.restarts)
        epochs += [folders.claim_trajectory(NAME, []).owner_epoch for _ in range(2)]
        ledger.close()
    assert epochs == sorted(set(epochs))


class Owner:
    """A process that runs sessions, as the driver knows it."""

    def __init__(self, folders: JournalFolders, name: str) -> None:
        self.released: list[str] = []
        self.folder = folders.add_owner(name, self.released.extend)


def two_owners(base: Path) -> tuple[JournalFolders, Owner, Owner]:
    """Two processes, of which the first has written five tokens of the trajectory."""
    folders = JournalFolders(base, 1, {})
    first, second = Owner(folders, "w0"), Owner(folders, "w1")
    begun = folders.claim_trajectory(NAME, [])
    folders.record_owner(NAME, begun, first.folder)
    left_behind(first.folder, NAME, sampled(5), epoch=begun.owner_epoch)
    return folders, first, second


def test_a_folder_is_deleted_when_its_process_has_ended_and_others_have_all_of_it(tmp_path: Path) -> None:
    folders, first, second = two_owners(tmp_path)
    folders.record_owner("b" * 32, folders.claim_trajectory("b" * 32, []), first.folder)
    folders.end_owner(first.folder)
    assert folders.take_unneeded() == []
    claim = folders.claim_trajectory(NAME, [read_journal(first.folder)[0][NAME].progress])
    assert [source.folder for source in claim.sources] == [str(first.folder)]
    folders.record_owner(NAME, claim, second.folder)
    folders.release_trajectories(["b" * 32])
    folders.notify_owners(folders.take_released())
    assert folders.take_unneeded() == []  # the other worker has read it, and not written yet
    folders.record_written(second.folder, [NAME])
    (unneeded,) = folders.take_unneeded()
    assert unneeded == first.folder
    folders.delete_folders([unneeded])
    assert not first.folder.exists()
    assert folders.take_unneeded() == []
    folders.release_trajectories([f"{NAME}.1", NAME])
    assert second.released == []  # the ledger has not been flushed
    folders.notify_owners(folders.take_released())
    assert second.released == [NAME]


def test_a_process_that_goes_on_elsewhere_keeps_a_trajectory_until_the_other_has_written_it(
    tmp_path: Path,
) -> None:
    """It had no space for the frame, and runs on."""
    folders, first, second = two_owners(tmp_path)
    claim = folders.claim_trajectory(NAME, [read_journal(first.folder)[0][NAME].progress])
    folders.record_owner(NAME, claim, second.folder)
    folders.record_written(first.folder, [NAME])  # what it had claimed itself, late
    assert (first.released, second.released) == ([], [])
    folders.end_owner(second.folder)
    assert folders.take_unneeded() == []
    folders.record_written(second.folder, [NAME])
    assert (first.released, second.released) == ([NAME], [])


def test_journals_of_other_nodes_are_read_and_deleted_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run went back to version 3, and one of the nodes is gone."""
    here, there = tmp_path / "driver", tmp_path / "node-1-0"
    left_behind(here / "000001-w0-1", NAME, sampled(5), epoch=1)
    newest = left_behind(there / "000001-w1-2", NAME, sampled(7, version=4), epoch=2)
    settled = left_behind(there / "000001-w1-3", "b" * 32, sampled(5), epoch=3)
    nodes = SimulatedNodes()
    others = OtherNodes(
        lambda: ["driver", "node-1-0", "node-gone"],
        lambda node: nodes.open_reader(node, None, lambda: 0.0),
    )
    nodes.lose("node-gone", [])
    folders = JournalFolders(here, 2, {2: 3}, node="driver", others=others)
    known = asyncio.run(folders.restore([NAME]))
    assert (known[NAME].num_sampled_tokens, known[NAME].newest_version) == (7, 3)
    assert "node-gone does not answer" in caplog.text
    assert newest.exists()
    assert not settled.exists()
    assert not list(here.iterdir())
    claim = folders.claim_trajectory(NAME, known.values())
    assert folders.node_of(claim) == "node-1-0"
    assert [(Path(source.folder).name, source.newest_version) for source in claim.sources] == [
        (newest.name, 3)
    ]
    folders.record_owner(NAME, claim, owner := folders.add_owner("w0", lambda names: None, "driver"))
    folders.record_written(owner, [NAME])
    folders.delete_folders(folders.take_unneeded())
    assert not newest.exists()


def test_a_process_drops_an_attempt_that_failed_when_the_next_one_runs_elsewhere(tmp_path: Path) -> None:
    folders = JournalFolders(tmp_path, 1, {})
    first, second = Owner(folders, "w0"), Owner(folders, "w1")
    for owner in (first, second, second):
        folders.record_owner(NAME, folders.claim_trajectory(NAME, []), owner.folder)
    assert (first.released, second.released) == ([NAME], [])


def test_a_journal_is_read_again_when_its_process_replaces_the_file_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "000001-w0-1")
    write(journal, NAME, sampled(5), epoch=1)
    honest = journal_folders.read_journal

    def read_late(folder: Path) -> tuple[dict[str, JournalledTrajectory], int]:
        (path,) = folder.iterdir()
        monkeypatch.setattr(journal_folders, "read_journal", honest)
        path.rename(path.with_name("journal-000002"))
        raise FileNotFoundError(path)

    monkeypatch.setattr(journal_folders, "read_journal", read_late)
    assert lengths(read(claim_of(journal.directory))[0]) == {"": 5}
    journal.close()


@pytest.mark.real_time  # journals are read in a thread
async def test_attempts_that_wait_for_a_journal_share_a_read_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number:032x}" for number in range(20)]
    journal = Journal(tmp_path / "000001-w0-1")
    for name in names:
        write(journal, name, sampled(5), epoch=1)
    journal.close()
    reads: list[Path] = []
    honest = journal_folders.read_journal
    monkeypatch.setattr(
        journal_folders, "read_journal", lambda folder: reads.append(folder) or honest(folder)
    )

    reader, claim = JournalReader(Metrics()), claim_of(journal.directory)
    found = await asyncio.gather(*(reader.read_claim(claim, name, 1) for name in names))
    assert [list(left) for left in found] == [[name] for name in names]
    assert len(reads) <= 2
    (segment,) = found[0][names[0]].segments
    assert segment.token_ids.base is None, "a view would keep the whole file in memory"


def test_contexts_and_turns_are_kept_when_a_state_is_copied(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "000001-w0-1")
    entry = journal.open_entry(NAME, owner_epoch=1)
    entry.segments.append(Context(token_ids=np.arange(3, dtype=np.int32)))
    entry.begin_turn(3, 16, ("x",))
    entry.segments.append(sampled(4))
    entry.end_turn(7, "stop")
    journal.write_entries()
    journal.close()
    (left,) = read(claim_of(journal.directory))[0].values()
    assert [len(segment.token_ids) for segment in left.segments] == [3, 4]
    assert [(turn.start, turn.end, turn.stop) for turn in left.turns] == [(3, 7, ("x",))]
    assert (left.progress.num_turns, left.progress.in_turn) == (1, False)
