"""Weights by deltas in virtual time: engines follow, and load whole files where they cannot."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from async_rl.weights.delta import DeltaRefused
from tests.simulation.test_overlap import SLOW_STEP, overlapping
from verification.simulation.faults import FaultKind
from verification.simulation.faulty_engines import SimulatedFolder
from verification.simulation.simulate import simulate


def delivered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *faults: FaultKind, overlap: bool = False
) -> list[str]:
    """What became of each delta in a run in which nothing was found wrong."""
    seen: list[str] = []

    async def apply_delta(self: SimulatedFolder, path: str) -> str:
        try:
            result = await original(self, path)
        except DeltaRefused as error:
            seen.append(error.reason)
            raise
        seen.append("applied")
        return result

    original = SimulatedFolder.apply_delta
    monkeypatch.setattr(SimulatedFolder, "apply_delta", apply_delta)
    scenario = overlapping(SLOW_STEP, *faults, transport="delta")
    weights = replace(scenario.config.weights, overlap=overlap)
    scenario = replace(scenario, config=replace(scenario.config, weights=weights))
    outcome = simulate(scenario.seed, folder, scenario=scenario)
    assert outcome.violations == ()  # also: an engine reads files of another version than requested
    assert outcome.incarnations == ("finished",)
    assert outcome.faults == ({faults[0]: len(faults)} if faults else {})
    return seen


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("faults", [(), ("publish_fails",) * 2])
def test_engines_follow_by_deltas_when_their_hosts_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: tuple[FaultKind, ...], overlap: bool
) -> None:
    assert set(delivered(tmp_path, monkeypatch, *faults, overlap=overlap)) == {"applied"}


def test_whole_files_are_loaded_when_an_engine_was_restarted_since_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(delivered(tmp_path, monkeypatch, *("die",) * 3)) == {"applied", "base"}
