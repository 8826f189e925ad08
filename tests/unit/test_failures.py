"""Why attempts did not succeed: the kind of each, and one table that every reader shows."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from async_rl.cli.main import main
from async_rl.errors import (
    AgentLoopError,
    AlignmentError,
    AsyncRLError,
    EngineTimeout,
    FailureKind,
    OutOfTurns,
    PromptTooLong,
    RewardUnavailable,
    SandboxLost,
    TimeOver,
    ToolBroken,
    ToolError,
    WorkerLost,
)
from async_rl.observability.failures import describe_error, kind_of_answer, kind_of_error
from async_rl.observability.page.html_report import write_report
from async_rl.rollout.workers.messages import Failure
from async_rl.store.archive import Archive
from async_rl.store.ledger import Ledger
from async_rl.store.ledger_tables import read_attempts
from async_rl.types import StopReason, StoredTrajectory
from tests.support.finished_run import records, write_run_folder
from tests.support.trajectories import archive_failure, archive_trajectory, make_trajectory, roll_back


def without_a_sandbox() -> AsyncRLError:
    error = RewardUnavailable("reward code raised SandboxLost: no container left")
    error.failure_kind = "sandbox_lost"
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AgentLoopError("it raised KeyError"), "agent_wrong"),
        (ToolError("no such city"), "agent_wrong"),
        (ToolBroken("the index is gone"), "tool_broken"),
        (SandboxLost("no container left"), "sandbox_lost"),
        (without_a_sandbox(), "sandbox_lost"),
        (TimeOver("it ran past its limit"), "time_over"),
        (PromptTooLong("the context is full"), "context_full"),
        (OutOfTurns("it has had 3 turns"), "context_full"),
        (RewardUnavailable("the judge is gone"), "other"),
        (EngineTimeout("silent"), "other"),
        (WorkerLost("it ended"), "other"),
        (AlignmentError("too many rows", "too_many_rows"), "other"),
    ],
)
def test_an_error_keeps_its_kind_when_a_worker_reports_it(error: AsyncRLError, kind: FailureKind) -> None:
    assert kind_of_error(error) == kind
    assert kind_of_error(Failure.of(error).error) == kind


def answer(reward: float | None, stop_reason: StopReason = "completed", fault: str = "") -> StoredTrajectory:
    stored = StoredTrajectory.of(make_trajectory("a", reward=reward))
    return replace(stored, stop_reason=stop_reason, tool_fault=fault)


@pytest.mark.parametrize(
    ("scored", "kind"),
    [
        (answer(0.5), None),
        (answer(0.5, "length", "it raised"), None),
        (answer(None), None),
        (answer(0.4), "agent_wrong"),
        (answer(0.0, "failed"), "agent_wrong"),
        (answer(0.0, "length"), "context_full"),
        (answer(0.0, "max_turns"), "context_full"),
        (answer(0.0, "max_turns", "it raised"), "tool_broken"),
    ],
)
def test_a_scored_answer_fails_when_its_reward_does_not_pass(
    scored: StoredTrajectory, kind: FailureKind | None
) -> None:
    assert kind_of_answer(scored, pass_reward=0.5) == kind


def test_an_error_is_one_short_printable_line() -> None:
    assert describe_error(ToolBroken("\n  first\x1b \ud800line\nsecond")) == "first\\u001b \\ud800line"
    assert len(describe_error(ToolBroken("x" * 1000))) == 200
    assert describe_error(TimeoutError()) == "TimeoutError"


def fill(ledger: Ledger) -> None:
    """End ten attempts: four are right, five wrong, and one has lost its sandbox."""
    for number in range(4):
        ledger.record_attempt_end(None, f"right-{number}", 1)
    for number in range(5):
        ledger.record_attempt_end("agent_wrong", f"wrong-{number}", 1, "reward 0, completed")
    ledger.record_attempt_end("sandbox_lost", "lost-0", 2, "no container left")


def test_the_table_has_numbers_shares_and_the_newest_examples(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    fill(ledger)
    wrong, lost = ledger.attempts.rows()
    assert (wrong.kind, wrong.number, wrong.share) == ("agent_wrong", 5, "50%")
    assert [each.trajectory_id for each in wrong.examples] == ["wrong-4", "wrong-3", "wrong-2"]
    assert (lost.label, lost.number, lost.share) == ("sandbox lost", 1, "10%")
    assert (lost.examples[0].attempt, lost.examples[0].error) == (2, "no container left")
    ledger.close()


def test_the_table_goes_on_after_a_restart_and_is_read_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    fill(ledger)
    before = ledger.attempts.rows()
    ledger.close()
    ledger = Ledger(path)
    roll_back(ledger, 0)
    assert ledger.attempts.rows() == before == read_attempts(path).rows()
    fill(ledger)
    ledger.close()
    (wrong, lost) = read_attempts(path).rows()
    assert (wrong.number, wrong.share, lost.number) == (10, "50%", 2)
    assert [each.trajectory_id for each in wrong.examples] == ["wrong-4", "wrong-3", "wrong-2"]
    assert len(lost.examples) == 2
    with closing(sqlite3.connect(path)) as database:
        ((kept,),) = database.execute("SELECT count(*) FROM examples")
    assert kept == 5, "the file holds no other examples than the table"


def test_there_is_no_table_where_there_is_no_ledger(tmp_path: Path) -> None:
    assert read_attempts(tmp_path / "ledger.sqlite").rows() == []
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database" * 100)
    assert read_attempts(tmp_path / "ledger.sqlite").rows() == []


def test_report_and_inspect_show_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run_folder(tmp_path / "run", records(5))
    archive = Archive(folder / "trajectories.sqlite", keep=10)
    archive_trajectory(archive, make_trajectory("wrong-4", reward=0.0))
    archive_trajectory(archive, make_trajectory("right-0", reward=1.0))
    archive_failure(archive, make_trajectory("lost-0", reward=None), SandboxLost("no container left"))
    archive.close()
    ledger = Ledger(folder / "ledger.sqlite")
    fill(ledger)
    ledger.record_attempt_end("tool_broken", "broken-0", 1, "<img src=x>")
    ledger.close()

    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    for shown in ("agent wrong", "5 attempts, 45% of all", "wrong-4: reward 0, completed", "lost-0: no"):
        assert shown in out
    for failure, found in (("agent_wrong", "wrong-4"), ("sandbox_lost", "lost-0")):
        assert main(["inspect", str(folder), "--failure", failure, "--json"]) == 0
        assert [row["trajectory_id"] for row in json.loads(capsys.readouterr().out)] == [found]

    assert main(["report", str(folder)]) == 0
    html = Path(capsys.readouterr().out.strip()).read_text()
    assert "sandbox lost" in html
    assert "<code>lost-0</code> no container left" in html
    assert "<img" not in html
    assert "Why attempts did not succeed" not in write_report(folder).read_text()
