"""A trajectory and its branches in queue, ledger and journal: together or not at all, each counted once."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from async_rl.rollout.groups import GroupInFlight
from async_rl.store.frames import find_flaws
from async_rl.store.journal import Journal, JournalEntry
from async_rl.store.ledger import Ledger
from async_rl.store.outstanding import frames_in_flight
from async_rl.store.spool import Spool
from async_rl.store.trajectory_queue import TrajectoryQueue
from async_rl.types import Context, Sampled, Segment, StoredTrajectory, Task, Trajectory
from tests.support.journals import continue_journals
from tests.support.queues import make_queue
from tests.support.trajectories import MadeGroup, make_trajectory


def open_queue(folder: Path) -> TrajectoryQueue:
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.rollback(0)
    spool = Spool(folder / "spool", None)
    queue = make_queue(ledger, spool, groups_per_batch=1, max_staleness=1)
    queue.groups.restore_groups(flaws=find_flaws(frames_in_flight(ledger, spool.directory)))
    return queue


def tree(root: str, *branches: str) -> list[Trajectory]:
    """A trunk whose first segments each branch inherits: its prompt and one turn."""
    trunk = make_trajectory(root, "g", sampled=((4, 0), (2, 1)), routing=False)
    own = [make_trajectory(name, "g", sampled=((3, 1),), routing=False) for name in branches]
    return [
        trunk,
        *(replace(b, segments=(*trunk.segments[:2], *b.segments[1:]), num_inherited=2) for b in own),
    ]


def group_of(*trajectories: Trajectory) -> MadeGroup:
    return MadeGroup(group_id="g", task_id="t", trajectories=trajectories)


def stored_in(folder: Path, *trajectories: Trajectory) -> tuple[StoredTrajectory, ...]:
    return group_of(*trajectories).stored_in(folder / "spool").trajectories


async def test_a_tree_is_made_again_when_not_all_of_it_was_kept(tmp_path: Path) -> None:
    first = open_queue(tmp_path)
    first.groups.dispatch_group("g", "t", 0, ["a", "b", "c"], 0)
    first.groups.ledger.record_branches("b", ["b.1"])
    _, branch = stored_in(tmp_path, *tree("a", "a.1"))
    first.groups.finish_tree(*stored_in(tmp_path, *tree("a", "a.1")))
    first.close()
    second = open_queue(tmp_path)
    (left,) = second.groups.restored
    assert left.root_ids == ("a", "b", "c")
    assert sorted(left.stored) == ["a", "a.1"]
    # The loop of `b` runs again and takes another course: another branch, and one that the ledger knows less.
    second.groups.finish_tree(*stored_in(tmp_path, *tree("b", "b.2")))
    counts = second.groups.ledger.counts()
    assert (counts.dropped, counts.in_flight) == ({"restart": 1}, 5)
    second.close()
    Path(branch.path).write_bytes(b"")
    third = open_queue(tmp_path)
    assert third.groups.restored[0].stored.keys() == {"b", "b.2"}
    third.close()


def sampled(count: int, version: int) -> Sampled:
    (_, segment) = make_trajectory("x", sampled=((count, version),), routing=False).segments
    assert isinstance(segment, Sampled)
    return segment


def test_the_journal_has_branches_of_the_attempt_that_runs_and_forgets_them_with_their_trunk(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "000001")
    prefix: tuple[Segment, ...] = tree("a")[0].segments[:2]
    for root, attempt in (("a", 1), ("b", 1), ("c", 1)):
        journal.open_entry(root, attempt).segments.extend(prefix)
        journal.open_entry(f"{root}.1", attempt, inherited=prefix).segments.append(sampled(2, 0))
    journal.write_entries()
    journal.open_entry("b", 2).segments.extend(prefix)  # tried again: its branch was of the other attempt
    journal.remove_entries(["c"])
    journal.open_entry("d")  # nothing is said in it yet, but in another conversation of its
    journal.open_entry("d.1").segments.extend(prefix)
    journal.write_entries()
    journal.close()
    _, left = continue_journals(tmp_path, ["a", "b", "d"])
    assert {name: state.num_tokens for name, state in left.items()} == {"a": 7, "a.1": 9, "b": 7, "d.1": 7}
    after = left["a.1"].after(prefix)
    assert after is not None
    assert after.num_tokens == 2
    assert left["a.1"].after([Context(token_ids=prefix[0].token_ids + 1), prefix[1]]) is None
    entry = JournalEntry("a.1", 1, after, prefix)
    assert (entry.num_sampled_tokens, entry.oldest_version, entry.newest_version) == (2, 0, 0)


def test_a_group_is_as_old_as_its_oldest_branch_that_a_restart_has_not_come_to_yet() -> None:
    group = GroupInFlight("g", Task(task_id="t", messages=[]), 0, ["a", "b"], "wait")
    old, young = JournalEntry("a.1"), JournalEntry("a")
    old.segments.append(sampled(1, 2))
    young.segments.append(sampled(1, 5))
    progress = {"a": young, "a.1": old}
    group.begin_attempt("a", progress)
    assert group.oldest_version() == 2
    # Sampled anew, it has nothing of its own yet.
    progress["a.1"] = JournalEntry("a.1", inherited=young.segments)
    assert group.oldest_version() == 5
    group.end_sibling("a", [StoredTrajectory.of(each) for each in tree("a", "a.1")])
    assert (group.num_finished_siblings, group.running) == (1, ["b"])
    group.end_sibling("b", [StoredTrajectory.of(each) for each in tree("b")])
    assert [t.trajectory_id for t in group.trajectories] == ["a", "a.1", "b"]
    assert group.sampled_lengths() == {"a": 6, "a.1": 3, "b": 6}
