"""Nodes with frames are lost, or do not answer: nothing is lost or trained twice, and no frame is left."""

from pathlib import Path

import pytest

from async_rl.queue.outstanding import OutstandingGroups
from async_rl.simulation.scenario import draw, with_workers
from async_rl.simulation.simulate import simulate


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(171, id="the-doctor-waits-for-an-absent-node"),
        pytest.param(184, id="frames-are-deleted-when-a-node-is-back"),
        pytest.param(200, id="a-worker-ends-while-its-node-does-not-answer"),
    ],
)
def test_a_run_goes_on_when_nodes_with_frames_do_not_answer(seed: int, tmp_path: Path) -> None:
    outcome = simulate(seed, tmp_path, scenario=with_workers(draw(seed)))
    assert outcome.violations == ()
    assert outcome.faults.keys() & {"node_lost", "node_absent"}


def test_what_a_lost_node_had_is_sampled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reopened: list[str] = []
    restore = OutstandingGroups.restore_in_flight

    def note(self, group):
        if group.finished:
            reopened.append(group.group_id)
        restore(self, group)

    monkeypatch.setattr(OutstandingGroups, "restore_in_flight", note)
    outcome = simulate(153, tmp_path, scenario=with_workers(draw(153)))
    assert outcome.violations == ()
    assert reopened
