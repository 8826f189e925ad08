"""The HTML report of a run in each state of a run."""

from __future__ import annotations

import fcntl
import json
import re
import stat
from html.parser import HTMLParser
from pathlib import Path

import pytest

from async_rl.cli.main import main
from async_rl.observability.page.html_report import read_run, redacted, write_report
from tests.support.finished_run import FAILURE, HOSTILE, LOG, records, write_run_folder


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
