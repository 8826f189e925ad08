"""`async-rl train` from checks to summary, without processes: its folder, signals and exit codes."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from async_rl.cli.train import train
from async_rl.config import Config, load_config
from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.observability.console_report import RunProgress
from async_rl.observability.page.html_report import read_run
from async_rl.observability.records import (
    StepRecord,
    Summary,
    Totals,
    TrajectoryCounts,
    step_record_log,
    summarise,
)
from async_rl.runtime.files import is_locked
from async_rl.runtime.supervision import Nursery, cut_by, services
from tests.support.run_config import write_run


def two_steps(run_dir: Path) -> Summary:
    records = [StepRecord(step=i, weight_version=i, time_s=float(i), reward_mean=0.5) for i in (1, 2)]
    for record in records:
        step_record_log(run_dir / "metrics.jsonl").append(record)
    totals = Totals(
        trajectories=TrajectoryCounts(dispatched=8, trained=8, in_flight=0, queued=0),
        rl_seconds=2.0,
        sampled_tokens=10,
        engine_idle_share=0.0,
        max_staleness=4,
        routing_merge="replace",
    )
    return summarise(records, totals)


Launch = Callable[[Config, Path, asyncio.Event, RunProgress], Awaitable[Summary]]


def launching(work: Callable[[asyncio.Event], Awaitable[None]]) -> Launch:
    """A run that does some work, which may wait for its stop, and has made two steps."""

    async def launch(config: Config, run_dir: Path, stop: asyncio.Event, progress: RunProgress) -> Summary:
        await work(stop)
        return two_steps(run_dir)

    return launch


async def finishes(config: Config, run_dir: Path, stop: asyncio.Event, progress: RunProgress) -> Summary:
    return two_steps(run_dir)


def test_a_run_leaves_config_summary_and_report_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = write_run(tmp_path), tmp_path / "runs" / "tiny"
    with pytest.raises(ConfigError, match=r"data\.path"):
        train(path, ["data.path=/nowhere.jsonl"], finishes)
    assert not folder.parent.exists()
    assert train(path, ["run.seed=7"], finishes) == 0
    assert load_config(folder / "config.yaml") == load_config(path, ["run.seed=7"])
    assert json.loads((folder / "summary.json").read_text())["reward_last"] == 0.5
    assert {"logs", "checkpoints", "hf", "report.html"} <= {p.name for p in folder.iterdir()}
    assert json.loads((folder / "versions.json").read_text())["python"] == platform.python_version()
    assert str(folder) in capsys.readouterr().out
    assert '<span class="chip stopped">' in (folder / "report.html").read_text()  # after 2 of its steps


def test_files_are_the_users_alone_when_the_umask_is_open(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    folder = tmp_path / "runs" / "tiny"

    async def write_files(stop: asyncio.Event) -> None:
        for name in ("spool", "weights"):
            (folder / name).mkdir()
            (folder / name / "file").write_text("prompts and answers")

    before = os.umask(0o000)
    try:
        folder.mkdir(mode=0o777, parents=True)  # as an earlier version left it
        assert train(path, [], launching(write_files)) == 0
        assert os.umask(0o000) == 0o000  # as it was
    finally:
        os.umask(before)
    modes = {p.relative_to(folder): p.stat().st_mode & 0o777 for p in [folder, *folder.rglob("*")]}
    assert Path("spool/file") in modes
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


def test_a_folder_without_checkpoints_is_refused_when_resume_is_must(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    with pytest.raises(ConfigError, match=r"run\.resume is must, but there is no checkpoint in .*tiny"):
        train(path, ["run.resume=must"], finishes)
    (tmp_path / "runs" / "tiny" / "checkpoints" / "step_00000002").mkdir(parents=True)
    assert train(path, ["run.resume=must"], finishes) == 0
    with pytest.raises(ConfigError, match=r"run\.resume=auto"):
        train(path, ["run.resume=never"], finishes)


def test_nothing_is_started_when_a_line_of_the_records_is_damaged(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    assert train(path, [], finishes) == 0
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(lines[0] + lines[1][:20] + b"\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is damaged in line 2"):
        train(path, [], finishes)


@pytest.mark.parametrize(("name", "kind"), [("spool", "folder"), ("logs", "folder"), ("url", "file")])
def test_a_folder_is_refused_in_which_something_else_has_the_name_of_what_a_run_keeps(
    tmp_path: Path, name: str, kind: str
) -> None:
    path, folder = write_run(tmp_path), tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    if kind == "folder":
        (folder / name).write_bytes(b"")
    else:
        (folder / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name} is no {kind}, as which a run keeps it"):
        train(path, [], finishes)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_run_starts_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    path = write_run(tmp_path)
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    assert train(path, [], finishes) == 0
    assert "has no locks: do not start a second process there" in caplog.text
    assert not is_locked(tmp_path / "runs" / "tiny" / ".lock")


@pytest.mark.parametrize("file", ["/.lock", "/.config.yaml.part", "/versions.json", "/driver.log"])
def test_one_sentence_when_the_disk_is_full_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    path = write_run(tmp_path)
    opened = io.open

    def full(name: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if str(name).endswith(file) and mode != "r":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(name, mode, *arguments, **named)

    monkeypatch.setattr(io, "open", full)
    monkeypatch.setattr("builtins.open", full)
    with pytest.raises(EnvironmentNotReady, match=r"cannot write into .*/tiny.*: No space left on device"):
        train(path, [], finishes)
    monkeypatch.undo()
    assert train(path, [], finishes) == 0


@pytest.mark.parametrize(
    ("error", "code"), [(EnvironmentNotReady("no Ray here"), 3), (KeyError("of our own making"), 1)]
)
def test_service_cause_and_log_are_named_when_a_service_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    async def fails() -> None:
        raise error

    async def serve(stop: asyncio.Event) -> None:
        async with services(steady=asyncio.Event().wait), Nursery() as nursery:  # type: ignore[arg-type]
            nursery.start_task("trainer", fails())

    assert train(write_run(tmp_path), [], launching(serve)) == code
    log = tmp_path / "runs" / "tiny" / "logs" / "driver.log"
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("async-rl: trainer failed: ")
    assert str(error) in last
    assert last.endswith(f"log: {log}")
    assert "Traceback" in log.read_text()
    run = read_run(log.parents[1])
    assert run.state == "failed"
    assert str(error) in run.events[-1].text


@pytest.mark.parametrize(
    ("number", "code", "repeats"),
    [(signal.SIGINT, 130, 0), (signal.SIGTERM, 143, 2)],  # as `timeout` and Slurm send it
)
def test_the_first_signal_drains_and_still_sums_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int, repeats: int
) -> None:
    async def drain(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await stop.wait()
        for _ in range(repeats):
            seen = asyncio.Event()
            os.kill(os.getpid(), number)
            asyncio.get_running_loop().call_soon(seen.set)
            await seen.wait()

    assert train(write_run(tmp_path), [], launching(drain)) == code
    assert (tmp_path / "runs" / "tiny" / "summary.json").exists()
    assert f"{number.name}: stopping" in capsys.readouterr().out


def test_the_first_signal_ends_a_start_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def start(stop: asyncio.Event) -> None:
        async with cut_by(stop):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

    assert train(write_run(tmp_path), [], launching(start)) == 143
    assert not (tmp_path / "runs" / "tiny" / "summary.json").exists()
    assert "async-rl: SIGTERM ended the start; log: " in capsys.readouterr().err


def test_nothing_is_started_when_the_port_of_the_page_is_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentNotReady, match=rf"127\.0\.0\.1:{port} .*set metrics.port to a free"):
            train(write_run(tmp_path), [f"metrics.port={port}"], finishes)
    assert not (tmp_path / "runs").exists()


def test_the_process_ends_when_a_call_of_the_start_still_runs() -> None:
    program = """
import asyncio, sys, threading
from async_rl.runtime.threads import call_until_cancelled, exit_despite_threads, LastingThread
async def main():
    begun = threading.Event()
    def hang():
        begun.set()
        threading.Event().wait()
    call = asyncio.ensure_future(call_until_cancelled(hang, name="hang", thread=LastingThread("hang")))
    await asyncio.to_thread(begun.wait)
    call.cancel()
    await asyncio.wait([call])
asyncio.run(main())
import atexit
atexit.register(lambda: print("not reached"))
print("buffered")
exit_despite_threads(143)
sys.exit(143)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "buffered\n", "")


def test_the_second_signal_aborts_and_cleans_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cleaned = []

    async def abort(stop: asyncio.Event) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await stop.wait()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            cleaned.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    assert train(write_run(tmp_path), [], launching(abort)) == 130
    assert cleaned == [signal.default_int_handler]  # a third Ctrl-C ends the process the hard way
    assert not (tmp_path / "runs" / "tiny" / "summary.json").exists()
    assert "aborted by SIGINT" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
