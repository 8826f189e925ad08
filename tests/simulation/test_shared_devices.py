"""Engines and trainer on the same devices: whole runs in virtual time, with faults at every edge."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from async_rl.engines.pool import EnginePool
from async_rl.observability.records import step_record_log
from tests.support.small_run import small_run
from verification.simulation.__main__ import run_seed
from verification.simulation.faults import FaultKind
from verification.simulation.faulty_engines import FaultyEngine
from verification.simulation.scenario import Ending, Scenario, sharing, with_adapters
from verification.simulation.simulate import SeedOutcome, simulate


def shared_run(seed: int, faults: tuple[FaultKind, ...] = (), death: Ending | None = None) -> Scenario:
    """A small run on shared devices, in which nothing else goes wrong."""
    run = small_run(seed, faults, death)
    shared = sharing(run).config
    config = replace(shared, weights=replace(shared.weights, timeout_s=20.0))
    return replace(run, config=config)


def outcome_of(scenario: Scenario, folder: Path) -> SeedOutcome:
    folder.mkdir()
    return simulate(scenario.seed, folder, scenario=scenario)


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 8), marks=pytest.mark.long)], ids=str)
def test_nothing_is_lost_stale_or_stuck_when_devices_are_shared_and_a_seed_decides_what_goes_wrong(
    seeds: range,
) -> None:
    found = {seed: run_seed(seed, ("shared",)).violations for seed in seeds}
    failed = {seed: violations for seed, violations in found.items() if violations}
    assert failed == {}, f"replay: python -m verification.simulation --shared --start {min(failed)} --seeds 1"


def test_interrupted_answers_go_on_after_the_trainers_turn(tmp_path: Path) -> None:
    found = outcome_of(shared_run(0), tmp_path / "0")
    assert found.violations == ()
    assert found.incarnations == ("finished",)
    records = step_record_log(tmp_path / "0" / "incarnation-0" / "metrics.jsonl").read()
    assert sum(record.interrupted for record in records) > 0
    assert max(record.staleness_max for record in records) > 0
    assert any(record.sync_s == 0 for record in records)  # batches that were ready are trained in one turn
    assert records[-1].sync_s > 0


@pytest.mark.real
@pytest.mark.parametrize(
    "faults",
    [
        ("die", "die_unseen"),  # also in the trainer phase, when it must wait for its restart
        ("refuse_memory", "hang_memory"),
        ("offload_fails", "reload_fails", "step_fails"),
        ("freeze", "hang_update", "publish_fails"),
    ],
    ids="+".join,
)
def test_a_run_ends_well_when_one_side_fails_in_a_hand_over(
    faults: tuple[FaultKind, ...], tmp_path: Path
) -> None:
    found = outcome_of(shared_run(1, faults), tmp_path / "0")
    assert found.violations == ()
    assert found.incarnations == ("finished",)
    assert found.faults.keys() >= set(faults[:2])


def adapted(scenario: Scenario) -> Scenario:
    return replace(scenario, config=with_adapters(scenario.config))


@pytest.mark.parametrize("faults", [(), ("die", "refuse_memory"), ("step_fails", "reload_fails")])
def test_engines_that_keep_the_models_weights_serve_each_versions_adapter(
    faults: tuple[FaultKind, ...], tmp_path: Path
) -> None:
    found = outcome_of(adapted(shared_run(0, faults)), tmp_path / "0")
    assert found.violations == ()
    assert found.incarnations == ("finished",)
    records = step_record_log(tmp_path / "0" / "incarnation-0" / "metrics.jsonl").read()
    assert max(record.weight_version for record in records) > 2
    assert sum(record.interrupted for record in records) > 0


def test_an_engine_that_has_lost_the_models_weights_never_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = []

    def quarantine_engine(self: EnginePool, engine_id: str, error: Exception, **named: bool) -> None:
        errors.append(str(error))
        original(self, engine_id, error, **named)

    original = EnginePool.quarantine_engine
    monkeypatch.setattr(EnginePool, "quarantine_engine", quarantine_engine)
    # Servers have no backup: adapters load all the same, onto whatever the device holds.
    lost = property(lambda self: False, lambda self, keeps: None)
    monkeypatch.setattr(FaultyEngine, "keeps_weights", lost, raising=False)
    found = outcome_of(adapted(shared_run(0)), tmp_path / "0")
    assert found.violations == ()
    assert any("does not have the model's weights that it had before" in error for error in errors), errors
