"""Engines and trainer on the same devices: whole runs in virtual time, with faults at every edge."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from async_rl.engines.pool import EnginePool
from async_rl.observability.records import step_record_log
from tests.support.small_run import small_run
from verification.simulation.__main__ import run_seed
from verification.simulation.faults import FaultKind
from verification.simulation.faulty_engines import FaultyEngine
from verification.simulation.scenario import Ending, Injection, Scenario, sharing, with_adapters
from verification.simulation.simulate import SeedOutcome, simulate
from verification.simulation.simulated_trainer import SimulatedTrainer

Transport = Literal["disk", "tensor"]
Held = Literal["all", "weights", "nothing"]


def shared_run(
    seed: int,
    faults: tuple[FaultKind, ...] = (),
    death: Ending | None = None,
    *,
    transport: Transport = "disk",
    **engine: int,
) -> Scenario:
    """A small run on shared devices, in which nothing else goes wrong."""
    run = small_run(seed, faults, death)
    shared = sharing(run).config
    weights = replace(shared.weights, timeout_s=20.0, transport=transport)
    return replace(run, config=replace(shared, weights=weights, engine=replace(shared.engine, **engine)))


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


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_interrupted_answers_go_on_after_the_trainers_turn(transport: Transport, tmp_path: Path) -> None:
    found = outcome_of(shared_run(0, transport=transport), tmp_path / "0")
    assert found.violations == ()
    assert found.incarnations == ("finished",)
    records = step_record_log(tmp_path / "0" / "incarnation-0" / "metrics.jsonl").read()
    assert sum(record.interrupted for record in records) > 0
    assert max(record.staleness_max for record in records) > 0
    if transport == "disk":  # batches that were ready are trained in one turn, here while files are written
        assert any(record.sync_s == 0 for record in records)
    assert records[-1].sync_s > 0


@pytest.mark.real
@pytest.mark.parametrize("transport", ["disk", "tensor"])
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
    faults: tuple[FaultKind, ...], transport: Transport, tmp_path: Path
) -> None:
    found = outcome_of(shared_run(1, faults, transport=transport), tmp_path / "0")
    assert found.violations == ()
    assert found.incarnations == ("finished",)
    assert found.faults.keys() >= set(faults[:2])


@pytest.mark.parametrize(
    "faults",
    [("die_in_update", "publish_fails"), ("hang_update", "partial_update"), ("late_error", "offload_fails")],
    ids="+".join,
)
def test_engines_or_the_trainer_may_fail_while_both_hold_weights(
    faults: tuple[FaultKind, ...], tmp_path: Path
) -> None:
    found = outcome_of(shared_run(2, faults, transport="tensor"), tmp_path / "0")
    assert found.violations == ()
    assert found.incarnations == ("finished",)
    assert found.faults.keys() == set(faults)


@pytest.mark.parametrize("death", ["kill", "cancel", "stop"])
def test_nothing_is_lost_when_a_run_that_hands_weights_over_ends_anywhere(
    death: Ending, tmp_path: Path
) -> None:
    found = outcome_of(shared_run(3, ("die", "publish_fails"), death, transport="tensor"), tmp_path / "0")
    assert found.violations == ()
    assert found.incarnations[-1] == "finished"


@pytest.mark.parametrize("num_engines", [1, 2])
def test_engines_that_were_restarted_get_weights_in_the_next_hand_over_without_files(
    num_engines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When none serves, there is no batch for another hand-over: the trainer gets the devices without one."""
    published, trained, handed = [], [], []

    def watch(name: str, seen: list[int]) -> None:
        original = getattr(SimulatedTrainer, name)

        async def watched(self: SimulatedTrainer, *arguments: Any) -> Any:
            seen.append(self.step)
            return await original(self, *arguments)

        monkeypatch.setattr(SimulatedTrainer, name, watched)

    watch("publish", published)
    watch("train_step", trained)
    watch("reload", handed)
    run = shared_run(1, transport="tensor", num_engines=num_engines)
    deaths = tuple(
        Injection(step=400 + 150 * i, kind="die", engine=i, amount=0.3) for i in range(8 * num_engines)
    )
    found = outcome_of(replace(run, injections=deaths), tmp_path / "0")
    assert found.violations == ()
    assert found.incarnations == ("finished",)
    assert found.faults["die"] > 5
    assert published == [5]  # for the user, at the end
    assert trained == [0, 1, 2, 3, 4]
    assert len(handed) > len(set(handed))


@pytest.mark.parametrize(("kept_first", "kept_then", "held"), [("all", "nothing", "all"), ("weights",) * 3])
def test_the_simulation_fails_when_both_sides_hold_more_than_weights(
    kept_first: Held, kept_then: Held, held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer keeps its moments when engines take memory for weights, or its weights to the end."""

    async def offload(self: SimulatedTrainer, keep_weights: bool = False) -> None:
        self.holds = kept_first if keep_weights else kept_then

    monkeypatch.setattr(SimulatedTrainer, "offload", offload)
    found = outcome_of(shared_run(0, transport="tensor"), tmp_path / "0")
    assert any(f"out of memory: the trainer holds {held}" in each for each in found.violations)


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
