"""Records as JSON lines, summaries and reports of runs."""

from __future__ import annotations

import fcntl
import json
import math
import re
import stat
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from async_rl.cli.main import main
from async_rl.errors import ConfigError
from async_rl.observability.page.html_report import read_run, redacted, write_report
from async_rl.observability.records import (
    StepRecord,
    Totals,
    TrajectoryCounts,
    mean,
    step_record_log,
    summarise,
)
from tests.support.finished_run import FAILURE, HOSTILE, LOG, records, write_run_folder


def record(step: int, **figures: object) -> StepRecord:
    return msgspec.convert(
        {"step": step, "weight_version": step, "time_s": float(step), **figures}, StepRecord
    )


def totals(**changes: object) -> Totals:
    counts = TrajectoryCounts(dispatched=110, trained=80, in_flight=20, queued=8, dropped={"stale": 2})
    plain = {
        "trajectories": msgspec.to_builtins(counts),
        "rl_seconds": 50.0,
        "sampled_tokens": 4000,
        "engine_idle_share": 0.25,
        "max_staleness": 4,
        "routing_merge": "replace",
    }
    return msgspec.convert(plain | changes, Totals)


def test_summary_takes_the_first_and_last_five_steps_when_there_are_more() -> None:
    summary = summarise([record(i, reward_mean=float(i)) for i in range(1, 21)], totals())
    assert (summary.reward_first, summary.reward_last) == (pytest.approx(3.0), pytest.approx(18.0))
    assert summary.weight_versions == 20


def test_summary_derives_rates_and_shares_from_the_seconds_of_training() -> None:
    times = {"wait_s": 4.0, "sync_s": 0.2, "pause_s": 0.01}
    tokens = {"trained_tokens": 60, "masked_tokens": 20, "length_ks": 0.4}
    more = {"staleness_max": 1, "routing_rows": 90, "trajectories": 10, "interrupted": 10}
    last = {"wait_s": 1.0, "sync_s": 0.4, "pause_s": 0.03, "trained_tokens": 20, "length_ks": 0.03}
    last_more = {"staleness_max": 3, "routing_rows_invalid": 2, "trajectories": 30, "interrupted": 0}
    summary = summarise([record(1, **times, **tokens, **more), record(2, **last, **last_more)], totals())
    assert summary.tokens_per_s == pytest.approx(80.0)
    assert summary.trainer_idle_share == pytest.approx(0.1)
    assert summary.engine_idle_share == 0.25
    assert summary.staleness_max == 3
    assert summary.sync.mean_s == pytest.approx(0.3)
    assert summary.sync.pause_max_s == 0.03
    assert summary.interrupted_share == pytest.approx(0.25)
    assert summary.masked_share == pytest.approx(0.2)
    assert summary.length_ks == 0.03
    routing = summary.routing
    assert (routing.merge, routing.rows_checked, routing.rows_invalid) == ("replace", 90, 2)


def test_summary_says_none_when_no_step_was_made() -> None:
    summary = summarise([], totals(rl_seconds=0.0))
    unknown = (summary.reward_first, summary.interrupted_share, summary.tokens_per_s, summary.length_ks)
    assert unknown == (None,) * 4
    assert summary.weight_versions == 0


def test_mean_leaves_out_what_is_not_a_number() -> None:
    assert mean([1.0, math.nan, None, math.inf, 3.0]) == 2.0
    assert mean([math.nan, None]) is None


def test_a_figure_is_null_in_the_file_when_it_is_not_a_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    step_record_log(path).append(record(1, reward_mean=0.5))
    step_record_log(path).append(StepRecord(step=2, weight_version=2, time_s=2.0, ppo_kl=math.nan))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert lines[0]["reward_mean"] == 0.5
    assert lines[1]["ppo_kl"] is None
    assert step_record_log(path).read()[1].ppo_kl is None


def test_records_end_at_the_last_whole_line_when_a_crash_cut_one_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    step_record_log(path).append(record(1))
    with path.open("a") as file:
        file.write('{"step": 2, "weig')
    assert [r.step for r in step_record_log(path).read()] == [1]
    step_record_log(path).append(record(2))
    assert [r.step for r in step_record_log(path).read()] == [1, 2]


@pytest.mark.parametrize("damaged", [b"{junk", b'{"step": 2}', b"\xff", b"[" * 100_000])
def test_file_line_and_remedy_are_named_when_a_later_line_is_damaged(tmp_path: Path, damaged: bytes) -> None:
    log = step_record_log(path := tmp_path / "metrics.jsonl")
    log.append(record(1))
    with path.open("ab") as file:
        file.write(b"\n" + damaged + b"\n")
    log.append(record(3))
    for use in (log.read, lambda: log.truncate_to(3)):
        with pytest.raises(
            ConfigError, match=r"metrics\.jsonl is damaged in line 3 .*: restore it, or remove"
        ):
            use()


def test_a_file_has_one_line_per_step_when_a_run_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = step_record_log(path)
    assert log.read() == []
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.9)):
        log.append(record(step, reward_mean=reward))
    assert [(r.step, r.reward_mean) for r in step_record_log(path).read()] == [(1, 0.1), (2, 0.9)]
    log.append(record(3, reward_mean=0.4))  # of an earlier version
    log.truncate_to(2)
    log.append(record(3, reward_mean=0.5))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["reward_mean"]) for line in lines] == [(1, 0.1), (2, 0.9), (3, 0.5)]


def test_a_line_is_replaced_when_its_step_is_completed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = step_record_log(path)
    log.append(record(1))
    for rewards in ((0.5, 0.123456789), (0.123456789, 0.5)):  # longer, then shorter
        for reward in rewards:
            log.append(record(2, reward_mean=reward))
            assert [r.step for r in log.read()] == [1, 2]
            assert log.read()[-1].reward_mean == reward
            assert len(path.read_text().splitlines()) == 2
    log.append(record(3))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_lost_trajectory_is_seen_when_the_counts_do_not_add_up() -> None:
    assert totals().trajectories.unaccounted == 0
    lost = TrajectoryCounts(dispatched=10, trained=4, in_flight=3, queued=0, dropped={"stale": 2})
    assert lost.unaccounted == 1


# -- the HTML report of a run in each state of a run --------------------------------------------------


class Page(HTMLParser):
    """Collects the tags and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        found = re.search(r'<script type="application/json" id="chart-data">(.*?)</script>', html)
        sections = json.loads(found[1]) if found else []
        self.charts = {chart["name"]: chart for section in sections for chart in section["charts"]}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def report(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_a_finished_run_is_one_file_with_its_curves(tmp_path: Path) -> None:
    steps = records(30)
    folder = write_run_folder(tmp_path / "run", steps, max_steps=30, log=LOG)
    page = report(folder)
    drawn = page.charts.keys()
    assert drawn >= {"reward", "ppo-kl", "kl-parts", "kl-lag", "staleness", "staleness-histogram", "lengths"}
    assert drawn >= {"idle", "throughput", "sync", "drops", "ratio", "ess", "routing"}
    assert read_run(folder).state == "finished"
    assert f"{sum(step.trajectories for step in steps):,}" in page.text
    assert "engine engine-1 is quarantined at version 75" in page.text
    assert "a detail of no interest" not in page.text
    assert "run.max_steps" in page.text
    assert "0.5.23" in page.text


def test_the_file_asks_for_nothing_else_and_runs_one_known_script(tmp_path: Path) -> None:
    page = report(write_run_folder(tmp_path / "run", records(5), log=LOG))
    for tag, attrs in page.tags:
        assert not {"src", "srcset", "action", "onclick", "onerror"} & attrs.keys(), (tag, attrs)
        assert (attrs.get("href") or "data:").startswith("data:")
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    assert [script["type"] for script in scripts] == ["application/json", "module"]
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert re.search(r"default-src 'none'.*script-src 'sha256-[\w+/=]+'", policy or "")


def test_what_a_data_set_says_stays_text(tmp_path: Path) -> None:
    page = report(write_run_folder(tmp_path / "run", records(50), log=LOG))
    assert "img" not in {tag for tag, _ in page.tags}
    assert HOSTILE in page.text
    assert HOSTILE in {series["label"] for series in page.charts["drops"]["series"]}


def test_secrets_of_the_config_are_hidden(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run", records(2))
    html = write_report(folder).read_text()
    assert "do-not-show" not in html
    assert "search_api_key" in html
    assert "max_staleness" in html
    assert redacted({"OPENAI_API_KEY": "x", "answer_key": "answer", "HF_TOKEN": "x", "max_tokens": 3}) == {
        "OPENAI_API_KEY": "(hidden)",
        "answer_key": "answer",
        "HF_TOKEN": "(hidden)",
        "max_tokens": 3,
    }


def test_a_failed_run_says_why_until_it_goes_on(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run", records(7), log=LOG + FAILURE)
    assert read_run(folder).state == "failed"
    assert "trainer failed: the GPU fell off the bus" in report(folder).text
    with (folder / "logs" / "driver.log").open("a") as file:
        file.write(LOG.splitlines(keepends=True)[1])
    assert read_run(folder).state == "stopped"


def test_a_run_is_running_while_its_driver_holds_the_folder(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run", records(7), log=LOG)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(folder).state == "running"
        assert "running" in report(folder).text


def test_a_run_without_a_step_has_a_report(tmp_path: Path) -> None:
    page = report(write_run_folder(tmp_path / "run", [], log=LOG))
    assert "No step yet" in page.text
    assert page.charts == {}
    assert "run.max_steps" in page.text


def test_the_command_writes_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run_folder(tmp_path / "run", records(2))
    out = tmp_path / "there.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_text().startswith("<!doctype html>")
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_a_folder_that_is_no_run_is_named_and_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path} is no run folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.yaml", b"a: ["),
        ("config.yaml", b"run: 3"),
        ("config.yaml", b"run: \xff"),
        ("metrics.jsonl", b'{"step": 1}\n'),
        ("evaluations.jsonl", b"[]\n"),
        ("summary.json", b"{"),
    ],
)
def test_a_damaged_file_is_named_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: bytes
) -> None:
    folder = write_run_folder(tmp_path / "run", [])
    (folder / file).write_bytes(content)
    for command in ("report", "doctor"):
        (folder / "url").write_text("http://127.0.0.1:9")
        assert main([command, str(folder)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"async-rl: {folder / file} is ")
        assert "): restore it" in said
