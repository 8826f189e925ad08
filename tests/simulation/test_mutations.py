"""The checker can see: break the program on purpose, and some seed fails for the reason that it should."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from async_rl import routing
from async_rl.data.feeder import Feeder
from async_rl.queue import trajectory_queue
from async_rl.queue.ledger import Ledger
from async_rl.queue.spool import Spool
from async_rl.queue.trajectory_queue import TrajectoryQueue
from async_rl.rollout.session import routing_rows
from async_rl.rollout.session.transcript import Transcript
from async_rl.simulation import simulate
from async_rl.simulation.invariant_checker import InvariantChecker
from async_rl.simulation.scenario import Ending, FaultKind, Scenario, draw
from async_rl.types import RoutingTrace, TrainBatch, VersionSpan
from async_rl.weights.weight_sync import WeightSync
from tests.support.small_run import small_run

Patch = Callable[[pytest.MonkeyPatch], None]
SEEDS = 12


def settle_in_memory_only(patch: pytest.MonkeyPatch) -> None:
    """A step is settled, but the ledger's file never hears of it before the checkpoint."""

    def train(self: Ledger, group_ids: Any, step: int, batch_id: str) -> None:
        original(self, group_ids, step, batch_id)
        self._tables._changes.pop()

    original = Ledger.train
    patch.setattr(Ledger, "train", train)


def hand_out_again(patch: pytest.MonkeyPatch) -> None:
    """A settled group stays ready, is taken for a later batch again, and the ledger does not mind."""

    def settle(self: TrajectoryQueue, batch: Any, step: int) -> None:
        group = self._taken[batch.batch_id].groups[0]
        original(self, batch, step)
        self._backlog.dispatch(group.group_id, step)
        self._backlog.finish(group.group_id, step)
        self._ready[group.group_id] = group

    def train(self: Ledger, group_ids: Any, step: int, batch_id: str) -> None:
        known(self, [group_id for group_id in group_ids if group_id in self._groups], step, batch_id)

    original, known = TrajectoryQueue.settle, Ledger.train
    patch.setattr(TrajectoryQueue, "settle", settle)
    patch.setattr(Ledger, "train", train)
    patch.setattr(Spool, "free", lambda self, ref: None)


def concatenate_rows(patch: pytest.MonkeyPatch) -> None:
    """All rows of a resumed call are laid after those of the call before, and cut to fit."""

    def splice(old: RoutingTrace | None, new: RoutingTrace, *, start: int = 0) -> RoutingTrace:
        if old is None:
            return new
        both = np.concatenate([old.rows, new.rows])
        length = len(new.rows)
        spans = (VersionSpan(start=0, end=length, weight_version=new.spans[-1].weight_version),)
        return msgspec.structs.replace(new, rows=np.ascontiguousarray(both[:length]), spans=spans)

    patch.setattr(routing, "splice", splice)
    patch.setattr(routing_rows.RoutingRows, "next_start", lambda self, token_ids, engine_id, version: 0)


def shift_rows(patch: pytest.MonkeyPatch) -> None:
    """Each row stands with the token after its own."""

    def fit(trace: RoutingTrace, token_ids: Any) -> RoutingTrace:
        whole = original(trace, token_ids)
        return msgspec.structs.replace(whole, rows=np.roll(whole.rows, 1, axis=0))

    original = routing.fit
    patch.setattr(routing, "fit", fit)


def replace_nothing(patch: pytest.MonkeyPatch) -> None:
    """`replace` goes on from the rows that it has, whatever weights they are of."""
    patch.setattr(
        routing_rows.RoutingRows,
        "next_start",
        lambda self, token_ids, engine_id, version: self.num_held(token_ids),
    )
    patch.setattr(routing_rows.RoutingRows, "add_answer", _spliced(routing_rows.RoutingRows.add_answer))


def _spliced(take: Any) -> Any:
    def wrapped(self: Any, *arguments: Any, **options: Any) -> None:
        before, self._splices = self._splices, True
        take(self, *arguments, **options)
        self._splices = before

    return wrapped


def serve_unattested(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightSync, "_attest", _nothing)


async def _nothing(*_: Any, **__: Any) -> None:
    return None


def claim_newer_weights(patch: pytest.MonkeyPatch) -> None:
    """Tokens are labelled with the version that their engine serves when the call has ended."""

    def keep(self: Transcript, call: Any, lease: Any, reason: str, prompt: int) -> None:
        newest = lease.weight_version
        call.versions = [msgspec.structs.replace(span, weight_version=newest) for span in call.versions]
        if call.finish is not None:
            spans = [
                msgspec.structs.replace(span, weight_version=newest) for span in call.finish.version_spans
            ]
            call.finish = msgspec.structs.replace(call.finish, version_spans=tuple(spans))
        original(self, call, lease, reason, prompt)

    original = Transcript._append_call
    patch.setattr(Transcript, "_append_call", keep)


def forget_on_failover(patch: pytest.MonkeyPatch) -> None:
    """What a call had sampled when its engine died is thrown away."""

    def keep(self: Transcript, call: Any, lease: Any, reason: str, prompt: int) -> None:
        if reason == "failover":
            call.clear()
        original(self, call, lease, reason, prompt)

    original = Transcript._append_call
    patch.setattr(Transcript, "_append_call", keep)


def believe_any_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transcript, "_check_answer", lambda self, call, lease: call.finish is not None)


def skip_positions(patch: pytest.MonkeyPatch) -> None:
    """Every fifth task is never given out."""

    def following(self: Feeder) -> Any:
        result = original(self)
        return original(self) if result is not None and result[0] % 5 == 4 else result

    original = Feeder.next_task
    patch.setattr(Feeder, "next_task", following)


def forget_pending(patch: pytest.MonkeyPatch) -> None:
    """A damaged group is dropped, and its task is not given out again."""
    patch.setattr(Ledger, "_make_pending", lambda self, position: None)


def leave_frames(patch: pytest.MonkeyPatch) -> None:
    """Batches are never freed."""

    def free(self: Spool, ref: Any) -> None:
        if self.directory.name != "batches":
            original(self, ref)

    original = Spool.free
    patch.setattr(Spool, "free", free)


def wake_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrajectoryQueue, "_wake", lambda self: None)
    patch.setattr(simulate, "_MAX_LIFE_S", 200.0)


def lose_on_cancel(patch: pytest.MonkeyPatch) -> None:
    """Work off the loop is given up when it is cancelled, with the slabs that it has taken."""

    async def run_uncancellable(threads: Executor, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, work), None

    patch.setattr(trajectory_queue, "run_uncancellable", run_uncancellable)


class Case(NamedTuple):
    """A way to break the program, what has to happen to a run for it to show, and what is then said."""

    mutation: Patch
    expected: str
    faults: tuple[FaultKind, ...] = ()
    death: Ending | None = None
    interrupt: str = "abort"
    merge: str = "replace"

    def run(self, seed: int) -> Scenario:
        """What shows it."""
        return small_run(seed, self.faults, self.death, interrupt=self.interrupt, merge=self.merge)


CASES = (
    Case(settle_in_memory_only, "in one frame|disagree|knows nothing"),
    Case(hand_out_again, "not outstanding|trains again"),
    Case(concatenate_rows, "rows of the versions|no engine computes", merge="splice"),
    Case(shift_rows, "rows of the versions|no engine computes"),
    Case(replace_nothing, "under replace"),
    Case(serve_unattested, "attested is|the pool says"),
    Case(claim_newer_weights, "no engine said", interrupt="in_place", merge="splice"),
    Case(forget_on_failover, "does not continue", ("die_in_call", "disconnect")),
    Case(believe_any_answer, "no engine said", ("nan",)),
    Case(skip_positions, "skipped"),
    Case(forget_pending, "skipped", death="kill"),
    Case(leave_frames, "nobody owns"),
    Case(wake_nobody, "does not come to its end|StallError"),
    Case(lose_on_cancel, "nobody owns|FileExistsError", ("step_fails", "publish_fails"), "stop"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.mutation.__name__)
def test_a_seed_fails_when_the_program_is_broken(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case.mutation(monkeypatch)
    for seed in range(SEEDS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found = simulate.simulate(seed, folder, scenario=case.run(seed)).violations
        if found:
            break
    assert any(part in violation for violation in found for part in case.expected.split("|")), found


def batch_of(version: int, sampled_at: int) -> TrainBatch:
    return TrainBatch(
        batch_id="batch",
        trainer_version=version,
        trajectory_ids=("a",),
        group_index=np.zeros(1, np.int32),
        rewards=np.zeros(1, np.float32),
        offsets=np.array([0, 2]),
        token_ids=np.array([5, 6], np.int32),
        loss_mask=np.array([False, True]),
        rollout_log_probs=np.zeros(2, np.float32),
        weight_versions=np.array([-1, sampled_at], np.int32),
        routed_experts=None,
        routing_valid=None,
    )


def test_the_witness_sees_it_when_a_trajectory_is_trained_twice() -> None:
    checker = InvariantChecker(draw(0))
    checker.trains(batch_of(0, 0), 0, 1)
    assert not any("again" in violation for violation in checker.violations)
    checker.trains(batch_of(1, 1), 1, 2)
    assert "step 2 trains again what step 1 has: ['a']" in checker.violations


@pytest.mark.parametrize("too_much", [0, 1])
def test_the_witness_sees_it_when_a_token_is_too_old(too_much: int) -> None:
    scenario = draw(0)
    checker = InvariantChecker(scenario)
    version = scenario.config.rollout.max_staleness + too_much
    checker.trains(batch_of(version, 0), version, version + 1)
    late = f"trajectory a: a token of version 0 is trained at {version}"
    assert (late in checker.violations) == bool(too_much)
