"""`async-rl check` refuses what `async-rl train` refuses, in the same words."""

from __future__ import annotations

import fcntl
import json
import socket
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from async_rl.cli.main import main
from async_rl.config import load_config
from async_rl.run.identity import check_identity
from async_rl.store.ledger import Ledger
from tests.support.run_config import write_run
from tests.support.templates_of_models import chat_of

EVALUATED = "data.validation=[{path: tasks.jsonl}]"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").touch()
    return write_run(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> tuple[int, str]:
    """Return the exit code and the words of both commands, which must agree."""
    here = [word for word in words if word == "--here"]
    code = main(["check", str(path), *here, *(overrides := [word for word in words if word not in here])])
    said = capsys.readouterr().err
    assert main(["train", str(path), *overrides]) == code != 0
    assert capsys.readouterr().err == said
    return code, said


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["engine.max_total_tokens=127"], 2, "engine.max_total_tokens is 127, below rollout.max_context_tok"),
        (["run.dir=a_file"], 2, "run.dir: cannot create the run folder a_file/tiny: Not a directory"),
        (["run.dir=.", "run.name=a_file"], 2, "cannot create the run folder a_file: File exists"),
        ([f"run.name={'a' * 300}"], 2, "run"),
        (["run.resume=must"], 2, "run.resume is must, but there is no checkpoint in"),
        (["engine.urls_file=nowhere.txt"], 2, "engine.urls_file nowhere.txt cannot be read"),
        (["engine.urls_file=a_file", "weights.transport=tensor", "engine.urls=[http://x:1]"], 2, "both set"),
        (["weights.transport=tensor", "engine.urls=[http://far:1]"], 2, "but the engine is on far: set"),
        (["metrics.targets_dir=a_file/x"], 3, "by which Prometheus finds the run (Not a directory): set"),
        (["engine.device=cuda", "engine.tp_size=3"], 2, "engine.tp_size is 3, but"),
        (
            ["engine.extra_args=[--quantization=fp8]"],
            2,
            "engine.extra_args has --quantization: engines would",
        ),
        (
            ["models={judge: {path: model, tp_size: 8}}", "engine.device=cuda"],
            2,
            "models.judge.tp_size is 8, but model has 4 attention heads in 2 groups",
        ),
        (
            [EVALUATED, "evaluation.agent_loop=nope:X"],
            2,
            "evaluation.agent_loop: agent loop 'nope:X': there is no module 'nope'",
        ),
        (
            [EVALUATED, "evaluation.agent_loop=agent_loops.tool_loop:ToolLoop"],
            2,
            "evaluation.agent_loop: agent_loops.tool_loop:ToolLoop cannot be made with {}",
        ),
        (["placement.resources_per_rank={fast: 1}"], 2, "resources_per_rank names fast, and the Ray that is"),
        (
            ["placement.shared=true", "trainer.device=cuda", "engine.device=cuda", "trainer.num_ranks=2"],
            3,
            "placement.shared",
        ),
    ],
)
def test_check_refuses_what_train_would_when_it_does_not_depend_on_the_machine(
    path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], code: int, words: str
) -> None:
    before = sorted(path.parent.rglob("*"))
    assert main(["check", str(path)]) == 0
    capsys.readouterr()
    found, said = refused(capsys, path, *overrides)
    assert found == code
    assert words in said
    assert sorted(path.parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["trainer.device=cuda"], 3, "trainer.device is cuda, but torch sees no GPU"),
        (["engine.device=cuda"], 3, "engine.device is cuda, but this machine has no GPU"),
        (["engine.urls=[http://far:1]"], 2, "the server at http://far:1 is open to other machines"),
        (["queue.spool_dir=a_file/x"], 2, "queue.spool_dir is a_file/x, but "),
        (
            ["queue.journal_dir=a_file"],
            2,
            "a_file is no folder that this process can write into: name another",
        ),
        (["weights.transport=delta", "weights.local_dir=a_file"], 2, "weights.local_dir is a_file, but "),
        (
            ["placement.resources_per_rank.CPU=100000"],
            3,
            "the run reserves 100000 CPUs (trainer ranks 100000), and this",
        ),
    ],
)
def test_check_here_refuses_what_train_would_on_this_machine(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("ASYNC_RL_ENGINE_API_KEY", raising=False)
    assert main(["check", str(path), *overrides]) == 0
    capsys.readouterr()
    found, said = refused(capsys, path, "--here", *overrides)
    assert found == code
    assert words in said


def test_check_here_refuses_an_address_that_is_in_use(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"metrics.port={server.getsockname()[1]}"
        code, said = refused(capsys, path, "--here", taken)
    assert code == 3
    assert "cannot serve metrics on" in said


def test_check_compares_with_the_run_that_it_would_continue_and_writes_nothing(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = path.parent / "runs" / "tiny"
    folder.mkdir(parents=True)
    check_identity(load_config(path), folder)
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.record_dispatch("g", "row-0", 0, ["g-0"], 0)
    ledger.flush()  # and stays open, as after a kill
    before = {each: each.read_bytes() for each in folder.rglob("*")}
    assert main(["check", str(path)]) == 0
    capsys.readouterr()
    assert main(["check", str(path), "model.dtype=float32"]) == 2
    said = capsys.readouterr().err
    assert "model.dtype = bfloat16, which is float32 now" in said
    assert {each: each.read_bytes() for each in folder.rglob("*")} == before
    ledger.close()
    assert main(["train", str(path), "model.dtype=float32"]) == 2
    assert capsys.readouterr().err == said


def test_the_folder_of_a_supervised_run_is_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = path.parent / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "epoch": 0}\n')
    code, said = refused(capsys, path)
    assert code == 2
    assert "metrics.jsonl belongs to a supervised run: set another run.name" in said
    (folder / "metrics.jsonl").write_text("{junk\n")
    code, said = refused(capsys, path)
    assert code == 2
    assert "metrics.jsonl is damaged in its first line" in said


def test_check_refuses_a_ledger_of_another_version(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder := path.parent / "runs" / "tiny").mkdir(parents=True)
    Ledger(folder / "ledger.sqlite").close()
    with sqlite3.connect(folder / "ledger.sqlite") as database:
        database.execute("UPDATE meta SET value = 1 WHERE key = 'schema'")
    database.close()
    code, said = refused(capsys, path)
    assert code == 1
    assert "ledger.sqlite has schema 1, this program writes" in said


def test_check_refuses_a_folder_in_which_another_process_runs(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path.parent / "runs" / "tiny").mkdir(parents=True)
    with (path.parent / "runs" / "tiny" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, said = refused(capsys, path)
    assert code == 2
    assert "another process runs in" in said


def test_check_tries_the_rewards_of_validation_sets(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path.parent / "val.jsonl").write_text('{"prompt": "1 + 1?"}\n')
    reward = "rollout.reward=agent_loops.rewards:last_number"
    assert main(["check", str(path), reward, "data.validation=[{path: val.jsonl}]"]) == 2
    assert "of validation set val: " in capsys.readouterr().err


def test_a_model_is_refused_when_it_has_no_tokenizer(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (path.parent / "model").glob("tokenizer*"):
        file.unlink()
    code, said = refused(capsys, path)
    assert code == 2
    assert "no tokenizer; expected one of tokenizer.json" in said


@pytest.mark.parametrize(
    ("template", "messages", "lost"),
    [
        ("qwen3", [{"role": "narrator", "content": "Once."}], "messages of the role 'narrator'"),
        (
            "in_parts",
            [{"role": "assistant", "tool_calls": [{"function": {"name": "look_up", "arguments": {}}}]}],
            "'look_up' of an assistant message with tool calls",
        ),
    ],
)
def test_a_row_is_refused_when_the_template_leaves_out_a_part_of_it(
    path: Path, capsys: pytest.CaptureFixture[str], template: str, messages: list[Any], lost: str
) -> None:
    chat_of(template).tokenizer.save_pretrained(path.parent / "model")
    asked = {"role": "user", "content": "?"}
    row = {"messages": [asked, *messages, asked], "answer": "1"}
    (path.parent / "tasks.jsonl").write_text(json.dumps(row))
    code, said = refused(capsys, path)
    assert code == 2
    assert f"tasks.jsonl:1: the chat template leaves out {lost}" in said


def test_check_warns_of_a_file_that_has_the_name_of_an_installed_module(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("statistics", "agent_loops"):
        (path.parent / f"{name}.py").touch()
    assert main(["check", str(path), "rollout.reward=agent_loops.rewards:exact_match"]) == 0
    out = capsys.readouterr().out
    assert "WARNING: the config names agent_loops.rewards:exact_match, but 'agent_loops' is " in out
    assert main(["check", str(path), "rollout.reward=statistics:mine"]) == 2
    assert f"and not {path.parent}/statistics.py: rename the file" in capsys.readouterr().err
