"""The archive of finished trajectories: what is kept, what of it changes, and what it survives."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from unittest.mock import AsyncMock

import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.errors import AgentLoopError, ConfigError
from async_rl.observability.metrics import Metrics
from async_rl.run.recovery import RecoveredState, restore_progress
from async_rl.store.archive import Archive, ArchiveReader
from async_rl.store.ledger import Ledger
from async_rl.store.spool import Spool
from async_rl.types import StoredTrajectory
from tests.support.queues import make_queue
from tests.support.small_run import small_run
from tests.support.trajectories import (
    FACTS,
    archive_failure,
    archive_trajectory,
    make_group,
    make_trajectory,
    roll_back,
)
from verification.simulation.simulate import simulate


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trajectories.sqlite"


def ids(reader: ArchiveReader, where: str = "1") -> list[str]:
    return [row.trajectory_id for row in reader.find_rows(where)]


def test_tokens_come_back_and_routing_rows_are_counted_when_a_trajectory_is_kept(path: Path) -> None:
    trajectory = make_trajectory("a", sampled=[(3, 1), (4, 2)])
    archive = Archive(path, keep=10, clock=lambda: 100.0)
    archive_trajectory(archive, trajectory)
    archive.close()
    item, events = ArchiveReader(path).read_trajectory("a")
    assert np.array_equal(item.trajectory.token_ids, trajectory.token_ids)
    assert np.array_equal(item.trajectory.rollout_log_probs, trajectory.rollout_log_probs)
    assert item.trajectory.trace is None
    assert item.routing is not None
    assert (item.routing.rows, item.routing.invalid) == (trajectory.num_tokens - 1, 0)
    assert [event.what for event in events] == ["attempt 1 begins", "ended"]
    (row,) = ArchiveReader(path).find_rows()
    assert (row.status, row.oldest_version, row.newest_version, row.interruptions) == ("ended", 1, 2, 1)


def test_only_the_newest_are_kept_with_their_events(path: Path) -> None:
    archive = Archive(path, keep=3)
    for name in "abcde":
        archive_trajectory(archive, make_trajectory(name))
        archive.write_notes()
    archive.close()
    assert ids(ArchiveReader(path)) == ["e", "d", "c"]
    with sqlite3.connect(path) as database:
        assert {name for (name,) in database.execute("SELECT trajectory_id FROM events")} == {"c", "d", "e"}
    database.close()


def test_the_error_and_both_attempts_are_told_when_a_trajectory_is_tried_again(path: Path) -> None:
    archive = Archive(path, keep=3)
    unfinished = make_trajectory("a", reward=None, routing=False)
    for attempt, text in ((1, "agent loop x raised KeyError: 'y'"), (2, "again")):
        archive_failure(archive, unfinished, AgentLoopError(text), attempt)
    archive.dropped(["a", "never seen"], "agent_loop_error")
    archive.close()
    (row,) = ArchiveReader(path).find_rows()
    assert (row.status, row.attempt, row.reason) == ("dropped", 2, "AgentLoopError: again")
    told = [event.what for event in ArchiveReader(path).read_trajectory("a")[1]]
    assert told[1] == "attempt 1 failed: AgentLoopError: agent loop x raised KeyError: 'y'"
    assert told[2:] == [
        "attempt 2 begins",
        "attempt 2 failed: AgentLoopError: again",
        "dropped: agent_loop_error",
    ]


def test_what_was_trained_after_the_checkpoint_counts_as_dropped_when_a_run_goes_on_from_it(
    path: Path,
) -> None:
    archive = Archive(path, keep=9)
    for name, step in (("a", 1), ("b", 2), ("c", 3)):
        archive_trajectory(archive, make_trajectory(name))
        archive.trained([name], step)
    archive.close()
    archive = Archive(path, keep=9)
    archive.rollback(1)
    archive.close()
    reader = ArchiveReader(path)
    assert ids(reader, "status = 'trained'") == ["a"]
    assert ids(reader, "status = 'dropped' AND reason = 'restart' AND step IS NULL") == ["c", "b"]


def test_only_the_files_of_kept_attempts_are_there(path: Path) -> None:
    archive = Archive(path, keep=2)
    archive_failure(archive, make_trajectory("a", reward=None), AgentLoopError("once"))
    for name in "abc":
        archive_trajectory(archive, make_trajectory(name), 2)
    archive.inspected.keep(make_trajectory("of a worker that died"), 1)
    archive.write_notes()
    archive.close()
    folder = path.with_suffix("")
    assert sorted(file.name for file in folder.iterdir()) == ["b-2", "c-2", "of a worker that died-1"]
    Archive(path, keep=2).close()
    assert sorted(file.name for file in folder.iterdir()) == ["b-2", "c-2"]


def test_a_reward_that_came_after_the_file_is_shown(path: Path) -> None:
    archive = Archive(path, keep=2)
    trajectory = make_trajectory("a", reward=None)
    archive.inspected.keep(trajectory, 1)
    archive.ended(StoredTrajectory.of(trajectory).with_reward({"reward": 0.25, "style": 1.0}), 1)
    archive.close()
    item, _ = ArchiveReader(path).read_trajectory("a")
    assert (item.trajectory.reward, item.trajectory.outcome.reward_parts["style"]) == (0.25, 1.0)


def test_one_sentence_says_so_when_the_tokens_could_not_be_written(path: Path) -> None:
    archive = Archive(path, keep=2)
    archive.ended(StoredTrajectory.of(make_trajectory("a")), 1)
    archive.close()
    with pytest.raises(ConfigError, match="no tokens in the archive"):
        ArchiveReader(path).read_trajectory("a")


async def test_the_queue_tells_what_becomes_of_each(path: Path, tmp_path: Path) -> None:
    archive = Archive(path, keep=9)
    queue = make_queue(
        Ledger(tmp_path / "ledger.sqlite"),
        Spool(tmp_path / "spool", 1 << 26),
        groups_per_batch=1,
        max_staleness=1,
        facts=FACTS,
        observer=archive,
    )
    for name, members in (("g", ["a", "b"]), ("h", ["c", "d"])):
        queue.groups.dispatch_group(name, "task", 0, members, 0)
        for member in members:
            archive_trajectory(archive, make_trajectory(member, name))
    group = replace(make_group("g"), trajectories=(make_trajectory("a", "g"), make_trajectory("b", "g")))
    await queue.put_group(group.stored_in(tmp_path / "spool"))
    archive.write_notes()
    reader = ArchiveReader(path)
    assert ids(reader, "status = 'queued'") == ["b", "a"]
    batch = await queue.next_batch(0)
    assert batch is not None
    await queue.settle_batch(batch, 1)
    queue.groups.drop_group("h", "no_signal")
    archive.close()
    assert ids(reader, "status = 'trained' AND step = 1") == ["b", "a"]
    assert ids(reader, "status = 'dropped' AND reason = 'no_signal'") == ["d", "c"]
    queue.close()


def test_the_run_goes_on_when_the_archive_cannot_be_written(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive = Archive(path, keep=3)
    other = sqlite3.connect(path, timeout=0)
    other.execute("DROP TABLE events")
    archive_trajectory(archive, make_trajectory("a"))
    archive.write_notes()
    assert "some trajectories are not archived" in caplog.text
    archive_trajectory(archive, make_trajectory("b"))
    archive.close()
    other.close()
    nowhere = Archive(path.parent / "missing" / "x.sqlite", keep=3)
    archive_trajectory(nowhere, make_trajectory("a"))
    nowhere.close()


def test_one_sentence_says_so_when_there_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.keep_trajectories"):
        ArchiveReader(tmp_path / "trajectories.sqlite")
    (tmp_path / "x").write_text("no database, though it has a name" * 100)
    with pytest.raises(ConfigError, match="cannot be read"):
        ArchiveReader(tmp_path / "x")


def test_the_archive_is_rolled_back_to_the_checkpoint_of_a_restart(path: Path, tmp_path: Path) -> None:
    scenario = small_run(0)
    config = replace(scenario.config, run=replace(scenario.config.run, keep_trajectories=9))
    archive = Archive(path, keep=9)
    for name, step in (("a", 1), ("b", 2)):
        archive_trajectory(archive, make_trajectory(name))
        archive.trained([name], step)
    archive.close()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    roll_back(ledger, 1)
    ledger.close()
    metrics = Metrics()
    progress = asyncio.run(restore_progress(config.queue, tmp_path, 1, metrics))
    read_batch = AsyncMock(return_value={})
    recovered = RecoveredState(
        config, progress, tmp_path, scenario.tasks, FACTS, metrics, lambda: 0.0, read_batch
    )
    recovered.write_and_close()
    recovered.queue.close()
    assert ids(ArchiveReader(path), "status = 'trained'") == ["a"]


def test_archive_and_ledger_agree_when_a_run_was_killed_twice(tmp_path: Path) -> None:
    scenario = small_run(3, death="kill")
    config = replace(scenario.config, run=replace(scenario.config.run, keep_trajectories=500))
    outcome = simulate(3, tmp_path, scenario=replace(scenario, config=config))
    assert outcome.violations == ()
    assert outcome.incarnations.count("killed") == 2
    last = sorted(tmp_path.glob("incarnation-*"))[-1]
    reader = ArchiveReader(last / "trajectories.sqlite")
    ledger = sqlite3.connect(last / "ledger.sqlite")
    settled = dict(ledger.execute("SELECT trajectory_id, state FROM trajectories WHERE state != 'in_flight'"))
    ledger.close()
    shown = {row.trajectory_id: row.status for row in reader.find_rows() if row.trajectory_id in settled}
    assert len(shown) > 5
    assert shown == {name: settled[name] for name in shown}
    assert any(row.oldest_version != row.newest_version for row in reader.find_rows())
