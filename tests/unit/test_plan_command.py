"""`async-rl plan`: its output, its use of a past run, and its error messages."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from async_rl.cli.main import main
from async_rl.cli.plan import calibrate
from async_rl.config import load_config
from async_rl.observability.records import StepRecord, step_record_log
from tests.support.run_config import write_run

QUICK = ["--versions", "2", "--warmup", "1", "--prompt-tokens", "8"]


def past_run(folder: Path) -> list[StepRecord]:
    """Ten steps of 4 trajectories with a prompt of 20 tokens and 30 sampled tokens; the first is slower."""
    records = [
        StepRecord(
            step=step,
            weight_version=step,
            time_s=10.0 * step,
            trajectories=4,
            tokens=200,
            trained_tokens=120,
            step_s=50.0 if step == 1 else 2.0,
            sync_s=1.0,
            pause_s=0.25,
            tokens_per_s=64.0,
        )
        for step in range(1, 11)
    ]
    folder.mkdir()
    for record in records:
        step_record_log(folder / "metrics.jsonl").append(record)
    return records


def test_there_is_a_plan_for_each_number_of_engines_as_a_table_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", str(write_run(tmp_path)), *QUICK]
    assert main([*command, "engine.max_running_requests=2", "--engines", "1", "2"]) == 0
    out = capsys.readouterr().out
    assert "answers lognormal, mean 8, sigma 0.8, cut at 32" in out
    assert "\n1 engines: " in out
    assert "\n2 engines: " in out
    assert main([*command, "--sigma", "0", "--mean-tokens", "16", "--json", "--engines", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workload"]["mean_tokens"] == 16
    (plan,) = found["plans"]
    assert plan["engines"] == 2
    assert 0 < plan["relative"] <= 1
    # 3 layers with 8 experts, two a token: 6 bytes of rows beside 14 of the packed token.
    assert plan["batch_bytes"] == 2 * 2 * (8 + 16) * (14 + 6)
    assert plan["bottleneck"]


def test_queue_is_named_when_the_plan_needs_a_larger_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_run(tmp_path))
    rows = ["--routing-row-bytes", "100000", "--sigma", "0"]
    assert main(["plan", path, "queue.max_bytes=1048576", *rows, *QUICK, "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["queue_bytes_peak"] > 1 << 20
    assert "queue.max_bytes = 1 MB" in plan["bottleneck"]


def test_overlap_is_advised_when_the_trainer_stands_still_for_weight_updates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_run(tmp_path))
    command = ["plan", path, *QUICK, "--versions", "8", "--publish-s", "5", "--train-base-s", "10"]
    still: list[float] = []
    for overlap, advised in (("false", True), ("true", False)):
        assert main([*command, f"weights.overlap={overlap}"]) == 0
        out = capsys.readouterr().out
        assert ("weights.overlap=true" in out) is advised
        line = next(line for line in out.splitlines() if "during weight updates" in line)
        still.append(float(line.split()[-2].removesuffix("%")))
    assert still[1] < still[0] / 2


def test_speeds_and_lengths_are_those_of_its_later_steps_when_a_past_run_is_given(tmp_path: Path) -> None:
    config = load_config(
        write_run(tmp_path), ["engine.num_engines=2", "rollout.max_concurrent_trajectories=16"]
    )
    figures = calibrate(config, past_run(tmp_path / "past"))
    assert figures["prompt_tokens"] == 20
    assert figures["mean_tokens"] == 30
    assert figures["train_tokens_per_s"] == 100
    assert figures["sync_s"] == 0.25
    assert figures["publish_s"] == 0.75
    # 8 calls on each engine make 32 tokens a second: a step of 0.25 s.
    assert figures["decode_base_s"] + 8 * figures["decode_per_call_s"] == pytest.approx(0.25)
    distributed = msgspec.structs.replace(
        config, weights=msgspec.structs.replace(config.weights, transport="distributed")
    )
    assert calibrate(distributed, past_run(tmp_path / "again"))["sync_s"] == 1.0


def test_flag_counts_when_a_past_run_says_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_run(tmp_path))
    past_run(tmp_path / "past")
    arguments = ["plan", path, "--from", str(tmp_path / "past"), *QUICK, "--json"]
    assert main(arguments) == 0
    workload = json.loads(capsys.readouterr().out)["workload"]
    assert (workload["mean_tokens"], workload["prompt_tokens"]) == (30, 8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "damaged"], "damaged/metrics.jsonl is damaged in line 2"),
        (["--engines", "0"], "--engines 0: expected at least 1"),
        (["--train-tokens-per-s", "nan"], "train_tokens_per_s is nan, expected a finite number"),
        (["--mean-tokens", "0"], "mean_tokens is 0.0: Expected `float` > 0.0"),
        (["--versions", "0"], "versions is 0: Expected `int` >= 1"),
    ],
)
def test_one_sentence_and_exit_code_2_when_there_is_nothing_to_plan(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    path = str(write_run(tmp_path))
    past_run(tmp_path / "damaged")
    log = tmp_path / "damaged" / "metrics.jsonl"
    log.write_text(log.read_text().replace('{"step":2', "{", 1))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", path, *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("async-rl: ")
    assert len(err.splitlines()) == 1
    assert said in err
