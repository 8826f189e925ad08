"""`async-rl price`: which capture, what is trained before it is measured, and what is said of the prices."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from async_rl.cli import price as price_module
from async_rl.cli.main import main
from async_rl.cli.price import find_capture, price
from async_rl.config import Config, load_config
from async_rl.observability.records import StepRecord, step_record_log
from async_rl.run.captures import write_capture
from async_rl.store.kept_batches import keep_frames, keep_result, step_folder
from async_rl.trainer_protocol import LagFigures, LagMeasurement, StepResult, TrainerState
from async_rl.types import TakenBatch
from tests.support.run_config import write_run
from tests.support.stored_batches import store_batch
from tests.support.train_batches import random_batch

METRICS = {"loss": 0.5, "grad_norm": 1.0, "log_prob_diff": 0.0, "log_prob_abs_diff": 0.0}


def figures(lag: int, share: float, turn: float = 0.0) -> LagFigures:
    """Four parts of 25 tokens with one gradient, an angle away from the exact one, and a sample share."""
    one = ((1.0,) * 4,) * 4
    return LagFigures(
        lag=lag,
        tokens=(25,) * 4,
        weights=(25.0 * share,) * 4,
        squares=(25.0 * share,) * 4,
        kl=(0.25,) * 4,
        with_fresh=one,
        with_itself=one,
        with_exact=((math.cos(turn),) * 4,) * 4,
        exact_with_itself=one,
    )


STALE_IS_GOOD = LagMeasurement(lags=(figures(0, 1.0), figures(1, 0.99), figures(2, 0.98)))
STALE_IS_BAD = LagMeasurement(lags=(figures(0, 1.0), figures(1, 0.9, turn=1.3)), unknown_tokens=7)


class MeasuringTrainer:
    """Returns what the test prepared, and notes what it was called with."""

    def __init__(self, measured: LagMeasurement) -> None:
        self.measured = measured
        self.calls: list[Any] = []

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        self.calls.append(("setup", checkpoint_dir))
        return TrainerState(step=0)

    async def read_batch(self, batch: TakenBatch) -> dict[str, str]:
        return {}

    async def train_step(self, batch: TakenBatch, step: int) -> StepResult:
        self.calls.append(("train", step, batch.batch_id))
        return StepResult(step=step, metrics=METRICS)

    async def measure_lags(self, batch: TakenBatch) -> LagMeasurement:
        self.calls.append(("measure", batch.batch_id))
        return self.measured

    @asynccontextmanager
    async def open(self, config: Config, folder: Path) -> AsyncIterator[Any]:
        yield self


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three steps with a checkpoint after the first, whose third is captured; two bounds suffice."""
    monkeypatch.setattr(price_module, "BOUNDS", (0, 2))
    config, folder = load_config(write_run(tmp_path), ["engine.num_engines=2"]), tmp_path / "run"
    (folder / "checkpoints" / "step_00000001").mkdir(parents=True)
    log = step_record_log(folder / "metrics.jsonl")
    for step in (1, 2, 3):
        batch = store_batch(tmp_path / f"spool{step}", random_batch(step, lengths=(7, 12, 5, 9)))
        kept = step_folder(folder / "batches", step)
        keep_frames(batch, kept, range(4), rank=0)
        keep_result(kept, StepResult(step=step, metrics=METRICS))
        log.append(
            StepRecord(
                step=step,
                weight_version=step,
                time_s=step,
                tokens=1200,
                trained_tokens=800,
                trajectories=4,
                step_s=0.5,
                tokens_per_s=900.0,
                sync_parts={"publish": 0.1, "load": 0.1},
            )
        )
    write_capture(config, folder, 3, "it was requested", requested=True)
    return folder


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_step_is_measured_at_the_weights_before_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = MeasuringTrainer(STALE_IS_GOOD)
    assert price(run, open_trainer=trainer.open) == 0
    checkpoint = str(run / "captures" / "step_00000003" / "checkpoint" / "step_00000001")
    assert trainer.calls == [("setup", checkpoint), ("train", 2, "batch-2"), ("measure", "batch-3")]
    out = printed(capsys)
    assert "step 2: loss 0.5 (equal)" in out
    assert "step 3: loss" not in out


def prices(run: Path, measured: LagMeasurement, capsys: pytest.CaptureFixture[str], *overrides: str) -> Any:
    assert price(run, overrides, as_json=True, open_trainer=MeasuringTrainer(measured).open) == 0
    return json.loads(capsys.readouterr().out)


def test_worthless_stale_tokens_make_the_bound_0(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = prices(run, STALE_IS_BAD, capsys)
    assert found["step"] == 3
    assert found["unknown_tokens"] == 7
    assert [each["tokens"] for each in found["lags"]] == [100, 100]
    assert found["lags"][1]["worth"] == pytest.approx(0.9 * math.cos(1.3) ** 2)
    assert [each["bound"] for each in found["bounds"]] == [0, 2, 4], "4 is the run's own"
    assert found["proposal"] == {"bound": 0, "without_a_part": [0, 0, 0, 0]}
    assert "without any part of the groups" in " ".join(found["remarks"])


def test_good_stale_tokens_raise_the_bound_by_what_they_save(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = prices(run, STALE_IS_GOOD, capsys)
    rates = {each["bound"]: each["tokens_per_s"] for each in found["bounds"]}
    assert rates[0] < rates[2]
    assert found["proposal"]["bound"] > 0
    best = next(each for each in found["bounds"] if each["bound"] == found["proposal"]["bound"])
    assert best["effective_tokens_per_s"] == pytest.approx(best["tokens_per_s"] * best["worth"])


def test_the_runs_own_bound_is_compared_and_impossible_ones_are_left_out(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = prices(run, STALE_IS_GOOD, capsys, "rollout.max_staleness=3", "weights.every=3")
    assert [each["bound"] for each in found["bounds"]] == [2, 3]
    assert "means of its steps only" in found["remarks"][0]
    assert "A bound of 0 is left out: " in found["remarks"][1]
    assert "of the run's 3" in " ".join(found["remarks"]) or found["proposal"]["bound"] == 3


def test_the_table_says_what_the_json_does(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = prices(run, STALE_IS_BAD, capsys)
    assert price(run, open_trainer=MeasuringTrainer(STALE_IS_BAD).open) == 0
    out = printed(capsys)
    for each in found["lags"]:
        assert f"{each['sample_share']:.4f}" in out
        assert f"{each['worth']:.3f}" in out
    for each in found["bounds"]:
        assert f"{each['tokens_per_s']:,.0f}" in out
    assert "Proposed: rollout.max_staleness=0" in out


def test_a_step_with_one_lag_has_no_bound(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = prices(run, LagMeasurement(lags=(figures(1, 1.0),)), capsys)
    assert (len(found["lags"]), found["bounds"], found["proposal"]) == (1, [], None)
    assert "all tokens of step 3 have one lag (1)" in found["remarks"][0]


def test_a_capture_whose_run_is_gone_has_no_bound(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").unlink()
    found = prices(run, STALE_IS_GOOD, capsys)
    assert (len(found["lags"]), found["bounds"], found["proposal"]) == (3, [], None)
    assert "metrics.jsonl" in found["remarks"][0]


def test_the_newest_capture_of_a_run_is_priced(run: Path) -> None:
    folder = run / "captures" / "step_00000003"
    assert find_capture(run) == folder
    assert find_capture(folder) == folder
    config = load_config(folder / "config.yaml")
    newer = write_capture(replace(config), run, 2, "it is newer, though of an earlier step")
    assert find_capture(run) == newer


def test_a_run_without_a_capture_is_told_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["price", str(tmp_path)]) == 2
    assert f"`async-rl capture {tmp_path}` makes one" in capsys.readouterr().err
