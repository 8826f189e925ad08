"""Records as JSON lines, summaries, and figures that are not finite."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from async_rl.errors import ConfigError
from async_rl.observability.records import (
    StepRecord,
    Totals,
    TrajectoryCounts,
    mean,
    step_record_log,
    summarise,
)


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
