"""The audit of a run's files passes a run of the simulation and notices what is changed in its files."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.small_run import small_run
from verification import audit_run
from verification.diary import Trained, trained
from verification.simulation.simulate import simulate

STEPS, TWICE, STALE, AGREE, POSITIONS, ACCOUNTS, CHECKPOINT = audit_run.CHECKS


class Files:
    """The folder of a run and the diary beside it."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = max(folder.glob("incarnation-*"))
        self.diary = folder / "diary.jsonl"

    def execute(self, statement: str) -> None:
        with closing(sqlite3.connect(self.run_dir / "ledger.sqlite", isolation_level=None)) as database:
            assert database.execute(statement).rowcount

    def change_last_step(self, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
        """Let `change` change the entry of the last step; it gets that of the step before, too."""
        entries = [json.loads(line) for line in self.diary.read_bytes().splitlines()]
        before, last = [entry for entry in entries if entry["type"] == "trained"][-2:]
        change(last, before)
        self.diary.write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    def violated(self) -> list[str]:
        return [check for check, holds, _ in audit_run.audit(self.run_dir, self.diary) if not holds]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose driver was killed twice, so that steps were undone, and that ended with open groups."""
    folder = tmp_path_factory.mktemp("finished")
    outcome = simulate(0, folder, scenario=small_run(0, death="kill"))
    assert outcome.incarnations == ("killed", "killed", "finished"), outcome
    return folder


@pytest.fixture
def files(finished: Path, tmp_path: Path) -> Files:
    return Files(shutil.copytree(finished, tmp_path / "copy"))


def test_all_checks_hold_when_nothing_was_changed(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert files.diary.read_bytes().count(b'"trained"') > 5  # some steps were undone
    words = [str(files.run_dir), "--diary", str(files.diary), "--steps", "5", "--max-staleness", "2"]
    code = audit_run.main(words)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert [line[:8].strip() for line in printed.splitlines()] == ["held"] * len(audit_run.CHECKS)


@pytest.mark.parametrize(
    ("option", "check"), [(("--steps", "6"), STEPS), (("--max-staleness", "0"), STALE)], ids=str
)
def test_a_line_says_it_when_the_run_is_not_what_was_expected(
    option: tuple[str, str], check: str, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit_run.main([str(files.run_dir), "--diary", str(files.diary), *option]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [check in line for line in lines if line.startswith("VIOLATED")] == [True]


def repeat_position(last: dict[str, Any], before: dict[str, Any]) -> None:
    last["group_ids"][0] = before["group_ids"][0]


def repeat_trajectory(last: dict[str, Any], before: dict[str, Any]) -> None:
    last["trajectory_ids"][0] = before["trajectory_ids"][0]


def exceed_bound(last: dict[str, Any], before: dict[str, Any]) -> None:
    last["oldest"][0] = last["version"] - 3


def forget_oldest(last: dict[str, Any], before: dict[str, Any]) -> None:
    last["oldest"].pop()


def know_the_future(last: dict[str, Any], before: dict[str, Any]) -> None:
    last["oldest"][0] = last["version"] + 1


def lag_behind(last: dict[str, Any], before: dict[str, Any]) -> None:
    last["version"] -= 1


@pytest.mark.parametrize(
    ("change", "violated"),
    [
        (repeat_position, [TWICE, POSITIONS]),  # and the position in its place was skipped
        (repeat_trajectory, [TWICE, AGREE]),
        (exceed_bound, [STALE]),
        (forget_oldest, [STALE]),
        (know_the_future, [STALE]),
        (lag_behind, [STEPS]),
    ],
)
def test_it_is_noticed_when_a_step_was_wrong(
    change: Callable[[dict[str, Any], dict[str, Any]], None], violated: list[str], files: Files
) -> None:
    files.change_last_step(change)
    assert files.violated() == violated


@pytest.mark.parametrize(
    ("statement", "violated"),
    [
        ("DELETE FROM trajectories WHERE trajectory_id = (SELECT max(trajectory_id) FROM trajectories "
         "WHERE state = 'trained')", [AGREE, ACCOUNTS]),
        ("DELETE FROM trajectories WHERE trajectory_id = (SELECT max(trajectory_id) FROM trajectories "
         "WHERE state = 'queued')", [ACCOUNTS]),
        ("DELETE FROM trajectories WHERE group_id = (SELECT max(group_id) FROM trajectories "
         "WHERE state = 'queued')", [POSITIONS, ACCOUNTS]),
        ("UPDATE trajectories SET step = step - 1 WHERE state = 'trained' AND step = 5", [AGREE]),
        ("UPDATE folded SET number = number - 1 WHERE state = 'trained'", [AGREE, ACCOUNTS]),
        ("UPDATE folded SET reason = 'stale' WHERE reason = 'restart'", [ACCOUNTS]),
        ("DELETE FROM groups WHERE position = (SELECT min(position) FROM groups)", [ACCOUNTS]),
        ("UPDATE meta SET value = 1000 WHERE key = 'cursor'", [POSITIONS]),
        ("INSERT INTO pending VALUES (0, 't', 0)", [POSITIONS]),
    ],
)  # fmt: skip
def test_it_is_noticed_when_the_ledger_is_wrong(statement: str, violated: list[str], files: Files) -> None:
    files.execute(statement)
    assert files.violated() == violated


def test_it_is_noticed_when_the_ledger_is_older_than_the_checkpoint(files: Files) -> None:
    newest = max(int(path.name[5:]) for path in files.run_dir.glob("checkpoints/step_*"))
    files.execute(f"DELETE FROM steps WHERE step >= {newest}")
    assert files.violated() == [AGREE, CHECKPOINT]


@pytest.mark.parametrize(
    ("pattern", "violated"),
    [
        ("diary.jsonl", [STEPS, TWICE, STALE, AGREE, POSITIONS, CHECKPOINT]),
        ("incarnation-2/ledger.sqlite", [TWICE, AGREE, POSITIONS, ACCOUNTS, CHECKPOINT]),
        ("incarnation-2/checkpoints/step_*", [CHECKPOINT]),
        ("incarnation-2/metrics.jsonl", [STEPS]),
        ("incarnation-2/summary.json", [STALE, ACCOUNTS]),
    ],
)
@pytest.mark.parametrize("emptied", [False, True])
def test_a_check_fails_when_its_subject_is_missing(
    pattern: str, violated: list[str], emptied: bool, files: Files
) -> None:
    (path,) = files.diary.parent.glob(pattern)
    if path.is_dir():
        path.rmdir()
    else:
        path.write_bytes(b"") if emptied else path.unlink()
    assert files.violated() == violated


def test_a_seed_fails_when_the_audit_of_its_files_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget_groups(*arguments: Any) -> Trained:
        return replace(trained(*arguments), group_ids=())

    monkeypatch.setattr("verification.simulation.simulated_trainer.trained", forget_groups)
    outcome = simulate(0, tmp_path, scenario=small_run(0))
    assert [TWICE in violation for violation in outcome.violations] == [True, False]
