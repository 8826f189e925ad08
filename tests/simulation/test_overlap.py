"""Weight updates during the next step, in virtual time, under faults and cancellations."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from async_rl.errors import TrainerError
from async_rl.observability.records import StepRecord, step_record_log
from tests.support.small_run import small_run
from verification.simulation.faults import FaultKind
from verification.simulation.scenario import Injection, Scenario
from verification.simulation.simulate import SeedOutcome, simulate
from verification.simulation.simulated_trainer import SimulatedTrainer

SLOW_SEND = {"train_s": 0.3, "update_s": 0.4}
"""The next step ends before the weights are published and loaded, and waits with its own."""

SLOWEST_SEND = {"train_s": 0.3, "update_s": 1.6}
"""The next step ends before, however long its batch takes to be sampled."""

SLOW_STEP = {"train_s": 2.0, "update_s": 0.1}


def overlapping(speeds: dict[str, float], *faults: FaultKind, transport: str = "disk") -> Scenario:
    """A small run without checkpoints in between; faults happen one after the other."""
    scenario = small_run(0)
    weights = replace(scenario.config.weights, overlap=True, transport=transport)
    return replace(
        scenario,
        config=replace(
            scenario.config, weights=weights, trainer=replace(scenario.config.trainer, checkpoint_every=0)
        ),
        speeds=replace(scenario.speeds, **speeds),
        injections=tuple(
            Injection(step=200 + 150 * i, kind=kind, engine=i, amount=0.5) for i, kind in enumerate(faults)
        ),
    )


def run(scenario: Scenario, folder: Path) -> tuple[SeedOutcome, list[StepRecord]]:
    outcome = simulate(scenario.seed, folder, scenario=scenario)
    return outcome, step_record_log(folder / "incarnation-0" / "metrics.jsonl").read()


@pytest.mark.parametrize(
    "transport", ["disk", "distributed", pytest.param("tensor", marks=pytest.mark.long), "delta"]
)
def test_a_step_does_not_wait_for_the_sending_of_the_one_before(tmp_path: Path, transport: str) -> None:
    outcome, records = run(overlapping(SLOW_STEP, transport=transport), tmp_path)
    assert outcome.violations == ()
    assert [record.weight_version for record in records] == [1, 2, 3, 4, 5]
    for record in records:
        assert record.handover_s == pytest.approx(0.1 / 4)  # the copy, and nothing else
        assert record.sync_s > record.handover_s
    # No batch was there to begin the next step with in the one or other place; where it was, all was hidden.
    assert sum(record.sync_hidden_s for record in records) > 0
    assert all(record.sync_hidden_s <= before.sync_s for before, record in pairwise(records))


def test_only_versions_that_engines_take_are_copied(tmp_path: Path) -> None:
    scenario = overlapping(SLOW_SEND)
    config = scenario.config
    weights, rollout = replace(config.weights, every=2), replace(config.rollout, max_staleness=2)
    outcome, records = run(
        replace(scenario, config=replace(config, weights=weights, rollout=rollout)), tmp_path
    )
    assert outcome.violations == ()
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    assert [record.step for record in records if record.handover_s > 0] == [2, 4, 5]


def test_one_copy_is_on_its_way_at_a_time_when_sending_takes_longer_than_a_step(tmp_path: Path) -> None:
    outcome, records = run(overlapping(SLOW_SEND), tmp_path)
    assert outcome.violations == ()  # the checker looks whether a copy is overwritten while it is read
    assert max(record.handover_s for record in records) > 0.4 / 4  # it waited for the one before


@pytest.mark.parametrize(
    "transport",
    ["disk", "tensor", *(pytest.param(each, marks=pytest.mark.long) for each in ("distributed", "delta"))],
)
@pytest.mark.parametrize(("dying", "speeds"), [("train_step", SLOWEST_SEND), ("giving", SLOW_STEP)])
def test_nothing_is_lost_when_the_trainer_dies_while_weights_are_on_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dying: str, speeds: dict[str, float], transport: str
) -> None:
    """It dies in the step or while sending; whichever fails first, the other is still running."""
    giving = {
        "disk": "publish",
        "distributed": "send_weights",
        "tensor": "share_bucket",
        "delta": "publish_delta",
    }[transport]
    busy: list[str] = []
    deaths = [TrainerError("trainer rank 0 died"), TrainerError("and once more")]

    def watch(method: str, *, dies: bool) -> None:
        original = getattr(SimulatedTrainer, method)

        async def watched(self: SimulatedTrainer, *arguments: Any) -> Any:
            busy.append(method)
            try:
                answer = await original(self, *arguments)
                if dies and len(busy) == 2 and deaths:
                    raise deaths.pop()
                return answer
            finally:
                busy.remove(method)

        monkeypatch.setattr(SimulatedTrainer, method, watched)

    watch("train_step", dies=dying == "train_step")
    watch(giving, dies=dying == "giving")
    outcome, records = run(overlapping(speeds, transport=transport), tmp_path)
    assert outcome.violations == ()
    assert not deaths
    assert outcome.incarnations == ("finished",)  # the trainer came back in the same incarnation
    assert [record.step for record in records] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("fault", ["die", "publish_fails", "partial_update"])
def test_nothing_is_lost_when_engines_or_their_weights_fail_beside_a_step(
    tmp_path: Path, fault: FaultKind
) -> None:
    outcome, records = run(overlapping(SLOW_SEND, *[fault] * 4), tmp_path)
    assert outcome.violations == ()
    assert outcome.faults == {fault: 4}
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
