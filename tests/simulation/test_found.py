"""What seeds have found, as runs that do not depend on what seeds draw; see docs/design/simulation.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from async_rl.errors import AsyncRLError
from async_rl.store.ledger import Ledger
from async_rl.store.trajectory_queue import TrajectoryQueue
from tests.support.small_run import small_run
from verification.simulation.scenario import Scenario
from verification.simulation.simulate import simulate


def violations(scenario: Scenario, folder: Path) -> tuple[str, ...]:
    folder.mkdir()
    return simulate(scenario.seed, folder, scenario=scenario).violations


def test_no_checkpoint_claims_a_step_when_the_disk_was_full_as_it_was_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = 0

    async def settle(self: TrajectoryQueue, batch: Any, step: int) -> Any:
        nonlocal settled
        settled += 1
        with pytest.MonkeyPatch.context() as patch:
            if settled == 3:
                patch.setattr(Ledger, "flush", refuse)
            return await original(self, batch, step)

    def refuse(self: Ledger, *, durable: bool = False) -> None:
        raise AsyncRLError("the ledger cannot be written; is the disk full?")

    original = TrajectoryQueue.settle_batch
    monkeypatch.setattr(TrajectoryQueue, "settle_batch", settle)
    # Of the injected faults only that a disk was full, for a moment, is wanted: an excuse for the error.
    assert violations(small_run(0, ("disk_full",)), tmp_path / "0") == ()
    assert settled > 5


@pytest.mark.real
@pytest.mark.parametrize(
    ("interrupt", "merge", "num_workers"),
    [
        ("abort", "replace", 0),
        pytest.param("abort", "replace", 2, marks=pytest.mark.long),
        pytest.param("retract", "replace", 0, marks=pytest.mark.long),
        pytest.param("in_place", "splice", 0, marks=pytest.mark.long),
    ],
)
def test_no_token_counts_at_lag_0_of_weights_that_the_trainer_has_gone_back_from(
    interrupt: str, merge: str, num_workers: int, tmp_path: Path
) -> None:
    """The trainer goes back to version 0 or 3 while calls go on under later versions, and groups wait.

    Seen in a chaos run: 0.056 nats at lag 0, of tokens that undone weights had sampled or routed.
    """
    for seed in (0, 6):
        run = small_run(seed, ("step_fails",), interrupt=interrupt, merge=merge)
        config = replace(
            run.config,
            run=replace(run.config.run, max_steps=8),
            engine=replace(run.config.engine, mean_new_tokens=60, decode_step_s=0.05),  # over several updates
            rollout=replace(
                run.config.rollout,
                max_staleness=4,
                max_concurrent_trajectories=24,
                num_workers=num_workers,
            ),
            trainer=replace(run.config.trainer, checkpoint_every=3),
        )
        seldom = tuple(replace(each, step=500 * i) for i, each in enumerate(run.injections, start=1))
        assert violations(replace(run, config=config, injections=seldom), tmp_path / str(seed)) == ()
