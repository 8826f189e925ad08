"""A run cancelled at any await ends, and the next start loses nothing (docs/design/simulation.md)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.simulation.test_overlap import SLOW_SEND, overlapping
from tests.simulation.test_rollout_workers import with_two_workers
from tests.simulation.test_shared_devices import shared_run
from tests.support.small_run import small_run
from verification.simulation.cancellation_sweep import sweep
from verification.simulation.faults import FaultKind
from verification.simulation.scenario import Scenario

FAULTS: tuple[FaultKind, ...] = ("die_in_call", "hang", "step_fails", "partial_update")


@pytest.mark.real
@pytest.mark.parametrize("every", [4, 1])
def test_nothing_is_lost_when_a_run_is_cancelled_at_each_of_its_awaits(tmp_path: Path, every: int) -> None:
    scenario = small_run(0, FAULTS)  # two steps visit all the awaits below
    run = replace(scenario.config.run, max_steps=2)
    swept = sweep(replace(scenario, config=replace(scenario.config, run=run)), tmp_path, every=every)
    assert swept.violations == []
    met = {place.function for place in swept.places}
    assert len(swept.places) > 100
    assert met >= {
        "LeaseDispatcher.lease",
        "Lease.generate",
        "Transcript._call_engine",
        "RolloutManager._run_siblings",
        "LocalBackend._store_tree",
        "TrajectoryQueue.next_batch",
        "Journal.write_in_thread",
        "TrainLoop.run",
        "TrainerRestarts.restart_trainer",
        "EngineRepair._repair_engine",
        "EngineUpdater._load_weights",
        "WeightPublisher.publish_files",
    }
    # Each cancellation took place, and an incarnation after it came to the end.
    assert swept.ends == {("cancelled", "finished")}


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "workers": lambda: with_two_workers(small_run(0, ("kill_worker", "mute_worker"))),
    "overlap": lambda: overlapping(SLOW_SEND, "step_fails"),
    "shared devices": lambda: shared_run(0, ("refuse_memory", "die")),
    "handles": lambda: shared_run(0, ("refuse_memory", "die"), transport="tensor"),
}


@pytest.mark.parametrize(
    ("scenario", "within"),
    [
        pytest.param("workers", "WorkerBackend._keep_worker", marks=pytest.mark.real),
        pytest.param("workers", "WorkerBackend.run_attempt", marks=pytest.mark.long),
        pytest.param("workers", "LeaseDispatcher.lease", marks=pytest.mark.long),
        ("overlap", "OverlappedLoop._hand_over"),
        pytest.param("overlap", "OverlappedLoop._run_step", marks=pytest.mark.long),
        pytest.param("overlap", "WeightSync.update_from_snapshot", marks=pytest.mark.long),
        ("shared devices", "SharedDevices.hand_to_engines"),
        pytest.param("shared devices", "SharedDevices._clear_engine", marks=pytest.mark.long),
        ("handles", "SharedDevices.hand_to_engines"),
        ("handles", "WeightSync.send_current_version"),
        pytest.param("handles", "TimeSharedLoop._feed_engines", marks=pytest.mark.long),
    ],
)
def test_nothing_is_lost_when_a_run_is_cancelled_within(tmp_path: Path, scenario: str, within: str) -> None:
    swept = sweep(SCENARIOS[scenario](), tmp_path, within=within)
    assert swept.violations == []
    assert swept.ends == {("cancelled", "finished")}
