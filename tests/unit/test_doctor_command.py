"""`async-rl doctor` against the endpoints of a driver."""

from __future__ import annotations

import asyncio
import fcntl
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_rl.cli.main import main
from async_rl.observability.diagnosis import Cause, Diagnosis
from async_rl.observability.endpoints import serve
from async_rl.observability.metrics import Metrics
from tests.support.finished_run import records, write_run_folder


def health(state: str) -> dict[str, Any]:
    cause = Cause(
        problem="hangs",
        on="tool",
        target="search",
        age_s=99.0,
        limit_s=30.0,
        waiters=1,
        sentence="tool search does not return",
        chain=("train loop waits for a batch", "trajectory 7 waits for tool search"),
    )
    diagnosis = Diagnosis(state=state, quiet_s=99.0, causes=(cause,))  # type: ignore[arg-type]
    status = "stalled" if state == "stalled" else "ok"
    return {"status": status, "phase": "training", "step": 3, "diagnosis": msgspec.to_builtins(diagnosis)}


@pytest.mark.real_time
@pytest.mark.parametrize(("state", "code"), [("stalled", 4), ("moving", 0)])
async def test_the_chain_of_a_running_job_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str, code: int
) -> None:
    async with serve(Metrics(), "127.0.0.1", 0, lambda: health(state)) as url:
        (tmp_path / "url").write_text(url)
        for target in (url, str(tmp_path)):
            assert await asyncio.to_thread(main, ["doctor", target]) == code
            out = capsys.readouterr().out
            assert out.startswith(f"training, step 3: {state}\n")
            assert "  <- trajectory 7 waits for tool search\n" in out


def test_one_sentence_is_printed_when_nothing_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "http://127.0.0.1:9"]) == 3
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path)]) == 2
    capsys.readouterr()
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["doctor", str(tmp_path)]) == 3
        assert "it is starting, so ask again in some seconds" in capsys.readouterr().err
        (tmp_path / "url").write_text("hello")
        assert main(["doctor", str(tmp_path)]) == 3
    assert f"{tmp_path / 'url'} holds 'hello', expected http://HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://host:99999", "http://[::1", "http://a b"])
def test_what_is_no_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", url]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("INFO    async_rl.run.train_loop: step 2", "after step 2: it was stopped or killed"),
        (
            "ERROR   async_rl.run.folder: the run failed: engine-0 failed: no memory",
            "after step 2: it failed: engine-0 failed: no memory",
        ),
    ],
)
def test_when_and_how_is_said_when_the_run_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], last: str, said: str
) -> None:
    line = f"2026-01-02 03:04:05,678 {last}\n"
    folder = write_run_folder(tmp_path / "run", records(2), max_steps=30, log=line)
    (folder / "url").write_text("http://127.0.0.1:9")
    os.utime(folder / "logs" / "driver.log", (when := 1.7e9, when))
    assert main(["doctor", str(folder)]) == 0
    out = capsys.readouterr().out
    assert datetime.fromtimestamp(when).strftime(f"{folder} ended at %Y-%m-%d %H:%M:%S, ") in out
    assert said in out
    with (folder / ".lock").open("w") as lock:  # it runs again, and does not answer
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["doctor", str(folder)]) == 3
    assert "nothing listens there" in capsys.readouterr().err
