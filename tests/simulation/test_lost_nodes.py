"""Nodes with frames are lost, or do not answer: nothing is lost or trained twice, and no frame is left."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from async_rl.store.outstanding import OutstandingGroups
from async_rl.store.spool import Spool
from tests.support.small_run import small_run
from verification.simulation.faults import FaultKind
from verification.simulation.scenario import NODES, Injection, Scenario, draw, evaluating, with_workers
from verification.simulation.simulate import simulate


def on_nodes(fault: FaultKind, step: int, *, num_workers: int) -> Scenario:
    """A run whose frames stay on the nodes of its workers, with one fault."""
    run = small_run(0)
    config = replace(
        run.config,
        rollout=replace(run.config.rollout, num_workers=num_workers),
        queue=replace(run.config.queue, spool_dir=NODES),
    )
    fault_there = Injection(step=step, kind=fault, engine=0, amount=0.5)
    constants = run.constants | {"async_rl.run.recovery.NODE_LOST_S": 5.0}
    return replace(run, config=config, constants=constants, injections=(fault_there,))


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(171, id="the-doctor-waits-for-an-absent-node", marks=pytest.mark.long),
        pytest.param(184, id="frames-are-deleted-when-a-node-is-back", marks=pytest.mark.long),
        pytest.param(200, id="a-worker-ends-while-its-node-does-not-answer"),
    ],
)
def test_a_run_goes_on_when_nodes_with_frames_do_not_answer(seed: int, tmp_path: Path) -> None:
    outcome = simulate(seed, tmp_path, scenario=with_workers(draw(seed)))
    assert outcome.violations == ()
    assert outcome.faults.keys() & {"node_lost", "node_absent"}


def test_a_node_is_kept_while_its_worker_answers_and_its_reader_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given up, it would cost everything that its worker stores until its reader is back (seed 566)."""
    given_up: list[str] = []
    monkeypatch.setattr(Spool, "give_up", lambda self, node: given_up.append(node))
    outcome = simulate(0, tmp_path, scenario=on_nodes("node_absent", 600, num_workers=1))
    assert (outcome.violations, outcome.incarnations) == ((), ("finished",))
    assert (outcome.faults["node_absent"], given_up) == (1, [])


@pytest.mark.real
@pytest.mark.parametrize("fault", ["node_lost", "node_wiped"])
def test_what_a_lost_node_had_is_sampled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: FaultKind
) -> None:
    reopened: list[str] = []
    reopen = OutstandingGroups.reopen_group

    def note(self, group_id, root_ids):
        reopen(self, group_id, root_ids)
        if self.ledger.group(group_id).stored:
            reopened.append(group_id)

    monkeypatch.setattr(OutstandingGroups, "reopen_group", note)
    for step in (1200, 2400):
        (folder := tmp_path / str(step)).mkdir()
        outcome = simulate(0, folder, scenario=on_nodes(fault, step, num_workers=2))
        assert outcome.faults[fault] == 1
        assert (outcome.violations, outcome.incarnations) == ((), ("finished",))
    assert reopened


def test_evaluations_get_their_answers_when_frames_stay_on_nodes(tmp_path: Path) -> None:
    """Their workers store no frames, so the references that they send name no node (seed 92007)."""
    scenario = replace(evaluating(on_nodes("slow", 10**6, num_workers=1)), injections=())
    outcome = simulate(0, tmp_path, scenario=scenario)
    assert outcome.violations == ()
    assert outcome.incarnations == ("finished",)
