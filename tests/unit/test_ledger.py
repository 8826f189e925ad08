"""Who owns which trajectory: states, settlement once, restarts."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import AsyncRLError, InvariantError
from async_rl.observability.records import TrajectoryCounts
from async_rl.store.ledger import DataPosition, Ledger
from async_rl.types import StoredTrajectory
from tests.support.ledgers import audit_ledger
from tests.support.trajectories import make_trajectory, roll_back


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    ledger = Ledger(path)
    yield ledger
    with contextlib.suppress(AsyncRLError):  # another process may have gone on
        ledger.close()


def dispatch(ledger: Ledger, *positions: int, size: int = 2) -> None:
    for p in positions:
        ledger.record_dispatch(f"g{p}", f"task-{p}", p, [f"g{p}-{i}" for i in range(size)], version=0)


def queue(ledger: Ledger, *positions: int, size: int = 2) -> None:
    for p in positions:
        ledger.record_queued(f"g{p}", [stored(f"g{p}-{i}") for i in range(size)], version=0)


def stored(name: str) -> StoredTrajectory:
    return StoredTrajectory.of(make_trajectory(name), path=f"spool/{name}", nbytes=100, checksum=7)


def train(ledger: Ledger, step: int, *group_ids: str) -> None:
    ledger.record_trained(group_ids, step, f"batch-{step - 1:08d}")


def reopened(ledger: Ledger, path: Path) -> Ledger:
    """What a new process finds after the old one was killed; it wrote what was flushed."""
    ledger.flush()
    return Ledger(path)


def rows(path: Path, statement: str) -> list[tuple[Any, ...]]:
    """Run a statement on the tables that were flushed."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        return database.execute(statement).fetchall()


def test_each_transition_is_refused_when_the_state_does_not_allow_it(ledger: Ledger) -> None:
    dispatch(ledger, 0, 1, 2)
    queue(ledger, 1, 2)
    train(ledger, 1, "g1")
    before = ledger.counts()
    for forbidden in (
        lambda: dispatch(ledger, 0),
        lambda: ledger.record_dispatch("g9", "task", 9, ["g0-0"], 0),
        lambda: ledger.record_dispatch("g9", "task", 9, [], 0),
        lambda: queue(ledger, 1),
        lambda: queue(ledger, 2),
        lambda: queue(ledger, 7),
        lambda: queue(ledger, 0, size=1),
        lambda: queue(ledger, 0, size=3),
        lambda: train(ledger, 2, "g0"),
        lambda: train(ledger, 2, "g1"),
        lambda: train(ledger, 2, "g2", "g2"),
        lambda: train(ledger, 2, "g2", "g1"),
        lambda: ledger.record_dropped(["g1-0"], "error"),
        lambda: ledger.record_dropped(["g0-0", "g0-0"], "error"),
        lambda: ledger.record_dropped(["g0-0", "unknown"], "error"),
        lambda: ledger.group("g1"),
        lambda: ledger.group_of("g1-0"),
    ):
        with pytest.raises(InvariantError):
            forbidden()
    assert audit_ledger(ledger) == before


def test_an_id_is_refused_at_the_next_flush_when_it_was_settled_before(ledger: Ledger) -> None:
    dispatch(ledger, 0)
    ledger.record_dropped(["g0-0", "g0-1"], "error")
    dispatch(ledger, 0)
    with pytest.raises(InvariantError, match="dispatched twice"):
        ledger.flush()
    ledger._tables._changes.clear()  # nothing more can come of this ledger


def test_a_branch_is_counted_each_time_when_runs_of_its_trajectory_differ(ledger: Ledger, path: Path) -> None:
    """Damaged or lost frames are sampled again: the second run makes no branch, the third one does."""
    dispatch(ledger, 0)
    ledger.record_branches("g0-0", ["g0-0.1"])
    ledger.flush()
    ledger.record_dropped(["g0-0.1"], "restart")
    ledger.record_branches("g0-0", ["g0-0.1"])
    expected = TrajectoryCounts(dispatched=4, in_flight=3, queued=0, trained=0, dropped={"restart": 1})
    assert audit_ledger(ledger) == expected
    again = reopened(ledger, path)
    assert again.counts() == expected
    assert again.group("g0").in_flight == {"g0-0", "g0-0.1", "g0-1"}
    again.close()


def test_a_dispatch_never_happened_when_it_was_not_flushed_before_a_kill(ledger: Ledger, path: Path) -> None:
    dispatch(ledger, 0)
    ledger.flush()
    dispatch(ledger, 1)
    again = Ledger(path)
    assert again.rollback(0) == DataPosition(cursor=1)
    assert again.in_flight == {"g0-0", "g0-1"}
    again.close()


def test_one_of_two_drivers_ends_when_both_write_one_ledger(ledger: Ledger, path: Path) -> None:
    """Where locks do not reach other nodes, or `.lock` was deleted."""
    ledger.rollback(0)
    second = Ledger(path)
    second.rollback(0)
    dispatch(ledger, 0)
    dispatch(second, 0)
    for _ in range(2):
        with pytest.raises(AsyncRLError, match=r"another driver has written .*ledger.sqlite, so"):
            ledger.flush()
    third = Ledger(path)
    second.flush()
    with pytest.raises(AsyncRLError, match="another driver"):  # what it has loaded is old
        third.rollback(0)
    queue(second, 0)
    train(second, 1, "g0")
    assert audit_ledger(second).trained == 2
    second.close()


def test_a_checkpoint_is_refused_when_the_ledger_does_not_know_its_step(ledger: Ledger, path: Path) -> None:
    """What the checkpoint was trained on would be trained once more."""
    with pytest.raises(AsyncRLError, match=r"of step 2, but .*ledger.sqlite is new: it was deleted, or is"):
        ledger.rollback(2)
    dispatch(ledger, 0, 1)
    queue(ledger, 0, 1)
    train(ledger, 1, "g0")
    train(ledger, 2, "g1")
    ledger.rollback(1)
    with pytest.raises(AsyncRLError, match=r"knows no step after 1: .* remove the checkpoints after step 1"):
        ledger.rollback(2)
    again = reopened(ledger, path)
    with pytest.raises(AsyncRLError, match="knows no step after 1"):
        again.rollback(2)
    assert again.rollback(1).pending == (1,)
    again.close()


@pytest.mark.parametrize("content", [b"no database at all " * 300, None])
def test_one_sentence_when_the_ledger_is_damaged(ledger: Ledger, path: Path, content: bytes | None) -> None:
    dispatch(ledger, *range(200))
    ledger.close()
    if content is None:  # a part of it is
        content = path.read_bytes()
        content = content[:4096] + b"\xff" * 8192 + content[12288:]
    path.write_bytes(content)
    with pytest.raises(AsyncRLError, match=r"ledger.sqlite cannot be (opened|read): .*; restore a copy"):
        Ledger(path)


def test_tasks_are_neither_skipped_nor_repeated_when_rolled_back_to_a_step(
    ledger: Ledger, path: Path
) -> None:
    dispatch(ledger, 0, 1, 2, 3, 4, 5)
    queue(ledger, 0, 1, 2, 3)
    train(ledger, 1, "g0")
    train(ledger, 2, "g1")
    train(ledger, 3, "g2")
    ledger.record_dropped(["g4-0", "g4-1"], "error")
    again = reopened(ledger, path)
    position = again.rollback(step=1)
    # 0 was trained, 3 is queued, 4 was used up, 5 is in flight; 1 and 2 were trained too late
    assert position == DataPosition(cursor=6, pending=(1, 2))
    assert [group.group_id for group in again.outstanding()] == ["g3", "g5"]
    assert audit_ledger(again) == TrajectoryCounts(
        dispatched=12, in_flight=2, queued=2, trained=2, dropped={"error": 2, "restart": 4}
    )
    assert again.rollback(step=1) == position
    assert audit_ledger(again).dropped == {"error": 2, "restart": 4}
    again.close()


def test_a_pending_position_is_used_up_when_it_is_dispatched_anew(ledger: Ledger, path: Path) -> None:
    dispatch(ledger, 0, 1)
    queue(ledger, 0, 1)
    train(ledger, 1, "g0", "g1")
    again = reopened(ledger, path)
    assert again.rollback(0).pending == (0, 1)
    again.record_dispatch("new", "task-0", 0, ["new-0"], version=0)
    assert again.data_position() == DataPosition(cursor=2, pending=(1,))
    third = reopened(again, path)
    assert third.data_position() == DataPosition(cursor=2, pending=(1,))
    third.close()
    again.close()


@pytest.mark.parametrize(("reason", "pending"), [("error", ()), ("too_stale", ()), ("corrupt", (0,))])
def test_a_task_comes_again_when_it_was_not_at_fault(
    ledger: Ledger, reason: str, pending: tuple[int, ...]
) -> None:
    dispatch(ledger, 0)
    queue(ledger, 0)
    ledger.record_dropped(["g0-0", "g0-1"], reason)
    assert ledger.data_position().pending == pending


def test_a_group_that_was_partly_trained_comes_again_once_when_rolled_back(
    ledger: Ledger, path: Path
) -> None:
    dispatch(ledger, 0, size=3)
    ledger.record_dropped(["g0-2"], "error")
    queue(ledger, 0, size=2)
    train(ledger, 5, "g0")
    again = reopened(ledger, path)
    assert again.rollback(4).pending == (0,)
    assert audit_ledger(again).dropped == {"error": 1, "restart": 2}
    again.close()


def test_changes_wait_for_another_try_when_the_database_cannot_be_written(ledger: Ledger, path: Path) -> None:
    dispatch(ledger, 0)
    other = sqlite3.connect(path, timeout=0, isolation_level=None)
    ledger._tables._database.execute("PRAGMA busy_timeout = 0")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(AsyncRLError, match="database is locked"):
        ledger.flush()
    other.execute("ROLLBACK")
    other.close()
    assert audit_ledger(ledger).in_flight == 2


def test_what_has_ended_is_remembered_until_its_group_is_queued(ledger: Ledger, path: Path) -> None:
    dispatch(ledger, 0)
    ledger.record_attempt("g0-0", 2)
    ledger.record_finished(stored("g0-1"))
    again = reopened(ledger, path)
    group = again.group("g0")
    assert (group.stored, group.attempts, group.in_flight) == (
        {"g0-1": stored("g0-1")},
        {"g0-0": 2},
        {"g0-0", "g0-1"},
    )
    again.record_unfinished("g0-1")
    third = reopened(again, path)
    assert third.group("g0").stored == {}
    third.record_finished(stored("g0-0"))
    queue(third, 0)
    assert third.group("g0").attempts == {}
    third.flush()
    found = rows(path, "SELECT trajectory_id, attempt, reward, stored IS NULL FROM trajectories")
    assert found == [("g0-0", 2, 1.0, 0), ("g0-1", 1, 1.0, 0)]
    for forbidden in (
        lambda: third.record_attempt("g0-0", 3),
        lambda: third.record_finished(stored("g0-0")),
        lambda: third.record_unfinished("unknown"),
    ):
        with pytest.raises(InvariantError):
            forbidden()
    third.close()
    again.close()


def test_labels_of_undone_versions_are_lowered_when_it_is_rolled_back(ledger: Ledger, path: Path) -> None:
    def newest(ledger: Ledger) -> dict[str, int | None]:
        entries = [entry for group in ledger.outstanding() for entry in group.stored.values()]
        return {entry.trajectory_id: entry.newest_weight_version for entry in entries}

    dispatch(ledger, 0, 1, size=1)
    for name in ("g0-0", "g1-0"):
        entry = StoredTrajectory.of(
            make_trajectory(name, sampled=((4, 4),)), path=f"spool/{name}", nbytes=100, checksum=7
        )
        ledger.record_finished(entry)
    ledger.record_queued("g0", list(ledger.group("g0").stored.values()), version=4)
    again = reopened(ledger, path)
    roll_back(again, 3)
    third = reopened(again, path)
    roll_back(third, 5)  # what it queued itself may have labels up to 5, these frames have not
    assert newest(third) == {"g0-0": 3, "g1-0": 3}
    third.close()
    again.close()


def test_acknowledgements_and_checkpoints_agree_with_the_step_rolled_back_to(
    ledger: Ledger, path: Path
) -> None:
    dispatch(ledger, 0, 1, 2)
    queue(ledger, 0, 1, 2)
    for step in (1, 2, 3):
        train(ledger, step, f"g{step - 1}")
    ledger.record_checkpoint(2, keep=2)
    ledger.flush()
    assert rows(path, "SELECT * FROM steps WHERE step = 3") == [(3, "batch-00000002")]
    again = reopened(ledger, path)
    again.rollback(2)
    assert rows(path, "SELECT count(*) FROM steps") == [(2,)]
    assert rows(path, "SELECT * FROM checkpoints") == [(2,)]
    again.close()


def test_rows_are_folded_into_counts_when_no_kept_checkpoint_can_undo_them(
    ledger: Ledger, path: Path
) -> None:
    for step in range(1, 7):
        dispatch(ledger, step)
        ledger.record_dropped([f"g{step}-1"], "error" if step % 2 else "too_stale")
        queue(ledger, step, size=1)
        train(ledger, step, f"g{step}")
        if step % 2 == 0:
            ledger.record_checkpoint(step, keep=2)
    dispatch(ledger, 7)
    before = audit_ledger(ledger)
    assert before.trained == 6
    assert before.dropped == {"error": 3, "too_stale": 3}
    # 4 and 6 can be gone back to, so 5 and 6 have rows still, and what was dropped after the last commit
    assert rows(path, "SELECT trajectory_id FROM trajectories") == [
        ("g5-0",),
        ("g6-0",),
        ("g7-0",),
        ("g7-1",),
    ]
    assert rows(path, "SELECT group_id FROM groups") == [("g5",), ("g6",), ("g7",)]
    assert rows(path, "SELECT step FROM steps") == [(4,), (5,), (6,)]
    again = reopened(ledger, path)
    assert audit_ledger(again) == before
    assert again.data_position() == ledger.data_position()
    assert again.rollback(4) == DataPosition(cursor=8, pending=(5, 6))
    assert audit_ledger(again).dropped == {"error": 3, "too_stale": 3, "restart": 2}
    with pytest.raises(AsyncRLError, match="folded what was trained up to step 4"):
        roll_back(again, 3)
    again.close()
