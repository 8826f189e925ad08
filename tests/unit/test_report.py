"""The first screen, progress and the summary on the terminal."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

from async_rl.cli import train
from async_rl.config import Config
from async_rl.evaluation.best_checkpoint import BestCheckpointFile
from async_rl.observability.console_report import (
    RunProgress,
    derived_bounds,
    print_header,
    print_summary,
    sparkline,
    step_line,
    write_summary,
)
from async_rl.observability.evaluation_record import Estimate, EvaluationRecord, EvaluationScore
from async_rl.observability.long_work import LongWork, show_progress
from async_rl.observability.records import StepRecord, Totals, TrajectoryCounts, summarise
from async_rl.observability.text_console import TextConsole
from tests.support.run_config import config_with

TOTALS = Totals(
    trajectories=TrajectoryCounts(dispatched=40, trained=32, in_flight=5, queued=2, dropped={"stale": 1}),
    rl_seconds=10.0,
    sampled_tokens=1000,
    engine_idle_share=0.25,
    max_staleness=4,
    routing_merge="replace",
)


def steps(number: int, **figures: float) -> list[StepRecord]:
    return [
        StepRecord(
            step=i,
            weight_version=i,
            time_s=float(i),
            trajectories=8,
            interrupted=2,
            in_flight=7,
            queued=3,
            **({"reward_mean": i / number, "ppo_kl": 0.001} | figures),
        )
        for i in range(1, number + 1)
    ]


def config(**rollout: int) -> Config:
    return config_with("run.max_steps=10", "trainer.groups_per_batch=3", rollout=rollout)


def console(*, terminal: bool = False, width: int = 100) -> tuple[TextConsole, io.StringIO]:
    file = io.StringIO()
    return TextConsole(file=file, force_terminal=terminal, width=width, color_system=None), file


def test_each_step_is_one_line_when_there_is_no_terminal(tmp_path: Path) -> None:
    out, file = console(width=40)
    progress = RunProgress(out)
    progress.start(config(), tmp_path, "http://127.0.0.1:9000")
    shown_before = len(file.getvalue().splitlines())
    progress.phase("starting 2 engines")
    progress.flow(in_flight=1, queued=0, waiting_for="a batch")
    for record in steps(3):
        progress.step(record)
    progress.stop()
    lines = file.getvalue().splitlines()[shown_before:]
    assert len(lines) == 4
    assert "starting 2 engines" in lines[0]
    assert lines[1].startswith("step  1/10 | reward 0.333 | ppo_kl 0.001 nats |")
    assert "interrupted 2/8 | in flight 7 | queued 3" in lines[3]


def evaluated(version: int, reward: float, status: str = "done", **sets: float) -> EvaluationRecord:
    def score(value: float) -> EvaluationScore:
        near = Estimate(value=value, low=value - 0.1, high=value + 0.1, tasks=4)
        parts = {"format": 0.5}
        return EvaluationScore(
            tasks=4,
            answers=8,
            reward=near,
            pass_at={"1": near},
            parts=parts,
            tokens_mean=12.0,
            truncated_share=0.25,
        )

    scores = {name: score(value) for name, value in {"all": reward, **sets}.items()}
    return EvaluationRecord(
        weight_version=version,
        status="done" if status == "done" else "missing",
        reason="" if status == "done" else status,
        duration_s=12.0,
        scores=scores if status == "done" else {},
        asked=9,
        dropped={"too_long": 1},
    )


def test_evaluations_are_lines_as_they_come(tmp_path: Path) -> None:
    out, file = console(width=40)
    progress = RunProgress(out)
    progress.start(config(), tmp_path, "http://127.0.0.1:9000")
    shown_before = len(file.getvalue().splitlines())
    records = [
        evaluated(20, 0.25, aime=0.25),
        evaluated(40, 0.0, status="no engine"),
        evaluated(60, 0.5, aime=0.5, code=0.5),
    ]
    for number, record in enumerate(records):
        progress.evaluation(record, records[:number])
    progress.stop()
    first, aime, missing, second, *both = file.getvalue().splitlines()[shown_before:]
    assert first.endswith("evaluation of version 20: 9 answers in 12 s; dropped: 1 too_long")
    assert (
        aime
        == "  aime: reward 0.250 ± 0.100 | pass@1 0.250 ± 0.100 | format 0.500 | 12 tokens | truncated 25%"
    )
    assert missing.endswith("evaluation of version 40 is missing: no engine")
    assert "evaluation of version 60" in second
    assert [line.split(" | ")[0] for line in both] == [
        "  all: reward 0.500 ± 0.100 (0.250 at version 20)",
        "  aime: reward 0.500 ± 0.100 (0.250 at version 20)",
        "  code: reward 0.500 ± 0.100",
    ]


def test_the_panel_shows_the_last_evaluation(tmp_path: Path) -> None:
    progress = RunProgress(console(terminal=True)[0])
    progress.evaluation(evaluated(20, 0.25), [])
    progress.evaluation(evaluated(40, 0.0, status="no engine"), [])
    out, file = console()
    out.print(progress.render())
    assert "reward 0.250 ± 0.100 at version 20" in file.getvalue()


def test_the_summary_shows_the_last_and_the_best_evaluation_and_its_checkpoint(tmp_path: Path) -> None:
    out, file = console()
    records = steps(2)
    evaluations = [evaluated(20, 0.75, aime=0.5), evaluated(40, 0.5, aime=0.25)]
    print_summary(out, tmp_path, records, summarise(records, TOTALS), evaluations)
    text = file.getvalue()
    assert "version 40, all/reward 0.500 ± 0.100" in text
    assert "version 20, all/reward 0.750 ± 0.100" in text
    assert "best checkpoint" not in text
    (tmp_path / "checkpoints").mkdir()
    BestCheckpointFile("aime/pass@1", tmp_path / "checkpoints", lambda: evaluations).write()
    (tmp_path / "checkpoints" / "step_00000040").mkdir()
    BestCheckpointFile("aime/pass@1", tmp_path / "checkpoints", lambda: evaluations).write()
    print_summary(out, tmp_path, records, summarise(records, TOTALS), evaluations)
    assert "of step 40, 0.25; kept by trainer.keep_best" in file.getvalue()  # 20 has no checkpoint
    assert "version 20, aime/pass@1 0.500 ± 0.100" in file.getvalue()


def panel(folder: Path, records: list[StepRecord]) -> str:
    """What a terminal shows of a run with these steps."""
    out, file = console(terminal=True)
    progress = RunProgress(out)
    progress.start(config(), folder, "http://127.0.0.1:9000")
    for record in records:
        progress.step(record)
    progress.flow(in_flight=11, queued=12, waiting_for="a batch")
    progress.stop()
    out.print(progress.render())
    return file.getvalue()


def test_the_panel_shows_step_flow_and_what_is_waited_for_when_on_a_terminal(tmp_path: Path) -> None:
    text = panel(tmp_path, steps(3))
    for shown in ("3 of 10", "11 / 12 trajectories", "a batch", "▁▄█", "2 of 8 trajectories"):
        assert shown in text


@pytest.mark.parametrize("environment", [{"FORCE_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_a_file_gets_a_line_a_step_and_a_cursor_is_never_moved(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    progress = RunProgress(train.run_console())
    progress.start(config(), Path("."), "http://127.0.0.1:9000")
    progress.step(steps(2)[0])
    progress.stop()
    shown = capsys.readouterr().out
    assert "step  1/10 | reward 0.5" in shown
    for control in ("\x1b[2K", "\x1b[?25l", "\x1b[1A"):
        assert control not in shown
    assert ("\x1b" in shown) == ("FORCE_COLOR" in environment)


def test_the_header_shows_what_differs_and_what_follows(tmp_path: Path) -> None:
    shown = config(group_size=4, max_staleness=1, max_concurrent_trajectories=10)
    out, file = console()
    print_header(out, shown, tmp_path, "http://127.0.0.1:9000")
    text = file.getvalue()
    assert "http://127.0.0.1:9000/metrics" in text
    assert "rollout.group_size" in text
    assert "rollout.temperature" not in text
    assert "engine." not in text
    assert list(derived_bounds(shown).values())[:4] == [12, 6, 24, 10]


def test_the_summary_is_written_for_programs(tmp_path: Path) -> None:
    records = steps(6)
    write_summary(tmp_path, summarise(records, TOTALS))
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["reward_last"] == pytest.approx(4 / 6)
    assert summary["trajectories"]["dropped"] == {"stale": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def summary(folder: Path, records: list[StepRecord]) -> str:
    out, file = console(width=200)  # a path is longer than a line of the usual width
    print_summary(out, folder, records, summarise(records, TOTALS))
    return file.getvalue()


def test_the_summary_shows_curve_figures_and_files(tmp_path: Path) -> None:
    text = summary(tmp_path, steps(10, kl_mismatch=2e-5))
    for shown in ("mean reward by step", "0.3 → 0.8", "1 stale", "25% of the trained", str(tmp_path)):
        assert shown in text
    assert "ppo_kl by step" in text
    assert "at most 2e-05 nats" in text
    assert "KL of routing" not in text, "it was not measured"


def test_panel_and_summary_say_that_nothing_is_learned_when_all_rewards_are_equal(tmp_path: Path) -> None:
    equal = steps(3, groups=8, groups_without_signal=8)
    for shown in (panel(tmp_path, equal), summary(tmp_path, equal)):
        assert "all rewards equal for 24 groups: nothing is learned" in " ".join(shown.split())
    better = [*equal, *steps(1, groups=8, groups_without_signal=7)]
    assert "nothing is learned" not in panel(tmp_path, better) + summary(tmp_path, better)


def test_a_sparkline_is_scaled_to_its_own_range_and_leaves_gaps() -> None:
    assert sparkline([1.0, None, 2.0, math.nan, 3.0]) == "▁ ▄ █"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([None]) == ""
    assert len(sparkline([float(i) for i in range(100)], width=40)) == 40


def test_a_step_shows_no_kl_that_nothing_has_measured():
    (one_update,) = steps(1, ppo_kl=math.nan, kl_mismatch=1.25e-7, kl_staleness=math.nan, kl_routing=0.03)
    line = step_line(one_update, 1)
    assert "ppo_kl" not in line
    assert "| rollout KL: mismatch 1e-07, routing 3e-02 |" in line
    assert "reward n/a" in step_line(steps(1, reward_mean=math.nan)[0], 1)


# -- what a command shows of work that takes long -----------------------------------------------------


class Work:
    """Work whose time passes as a test says, and what is shown of it."""

    def __init__(self, total: int | None, *, terminal: bool = False) -> None:
        self.now_s = 0.0
        self.file = io.StringIO()
        console = TextConsole(file=self.file, force_terminal=terminal, width=100, color_system=None)
        self.shown = LongWork("reading it", "rows", total, console=console, clock=lambda: self.now_s)

    def show(self, *moments: tuple[float, int]) -> list[str]:
        with self.shown:
            for self.now_s, done in moments:
                self.shown.show_done(done)
        return self.file.getvalue().splitlines()


def test_nothing_is_shown_when_work_is_short() -> None:
    assert Work(100).show((0.0, 0), (4.9, 99)) == []
    assert Work(100, terminal=True).show((0.0, 0), (0.9, 99)) == []


def test_lines_are_seconds_apart_and_rarer_later_when_there_is_no_terminal() -> None:
    every_second = [(float(second), 10 * second) for second in range(3601)]
    lines = Work(36_000).show(*every_second)
    assert lines[:2] == [
        "reading it: 50 of 36,000 rows after 5 s",
        "reading it: 100 of 36,000 rows after 10 s",
    ]
    assert 40 < len(lines) < 80
    assert Work(None).show((5.0, 1234)) == ["reading it: 1,234 rows after 5 s"]


def test_a_bar_is_shown_and_removed_when_there_is_a_terminal() -> None:
    text = "".join(Work(100, terminal=True).show((0.0, 0), (1.0, 20), (2.0, 40)))
    assert "reading it" in text
    assert "\x1b[?25h" in text, "the cursor is back"


def test_items_are_yielded_in_order_when_their_progress_is_shown() -> None:
    assert list(show_progress("abc", "reading it", "letters")) == ["a", "b", "c"]
