"""Random trees, interrupted and killed at random: each token is trained once, each leaf settled once."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.planning.virtual_time import run_virtual
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.runtime.supervision import Nursery
from async_rl.store.journal import JournalEntry
from async_rl.store.journal_file import JournalledTrajectory
from async_rl.store.ledger import Ledger
from async_rl.types import Group, Segment, StoredTrajectory, Trajectory
from tests.support.journals import continue_journals
from tests.support.ledgers import audit_ledger
from tests.support.sessions import Bench, simulated
from tests.support.stored_batches import assemble_batch

FIRST = 1000
"""The first of the tokens that the policy samples, which are all different."""


class Branch(NamedTuple):
    """What is played in a branch, beside the rest or before it."""

    steps: list[Any]
    beside: bool


steps = st.lists(
    st.recursive(
        st.integers(1, 4) | st.just("tool"),  # a turn of so many tokens
        lambda inner: st.builds(Branch, steps=st.lists(inner, max_size=3), beside=st.booleans()),
        max_leaves=6,
    ),
    max_size=4,
).map(lambda first: [2, *first])  # the trunk samples something


class Blow(NamedTuple):
    """What happens to the engine, so long after the one before."""

    after_s: float
    what: str


blows = st.lists(
    st.builds(
        Blow,
        after_s=st.sampled_from([0.01, 0.05, 0.12, 0.3]),
        what=st.sampled_from(["update", "update", "abort"]),
    ),
    max_size=5,
)


async def run_steps(session: RolloutSession, steps: Sequence[Any]) -> None:
    async with Nursery() as beside, session:
        for step in steps:
            if isinstance(step, Branch):
                line = run_steps(session.branch(), step.steps)
                if step.beside:
                    beside.start_task("branch", line)
                    await asyncio.sleep(0)  # it has begun
                else:
                    await line
            elif step == "tool":
                if session.last_turn is not None:
                    session.add_messages([{"role": "tool", "content": "4"}])
            else:
                await session.generate(max_new_tokens=step)


class Incarnation:
    """One incarnation of a driver: a journal, and a session that resumes what the one before left."""

    def __init__(self, folder: Path, numbers: count[int], interrupt: str) -> None:
        self.journal, self.left = continue_journals(folder, {"0" * 32})
        self.epoch = int(self.journal.directory.name)
        self.number = numbers
        self.entry = entry = self.open("0" * 32, ())
        engine = simulated(self.sample, decode_step_s=0.02)  # type: ignore[arg-type]
        self.bench = Bench(
            engine,
            entry=entry,
            open_branch_entry=self.open,
            interrupt=interrupt,  # type: ignore[arg-type]
            merge="splice",
            max_context_tokens=200,
            max_branches=50,
        )
        self.session = self.bench.session

    def sample(self, prefix: Sequence[int], rng: random.Random) -> int:
        return next(self.number)

    def open(self, name: str, inherited: Sequence[Segment]) -> JournalEntry:
        replay: JournalledTrajectory | None = self.left.pop(name, None)
        if replay is not None and inherited:
            replay = replay.after(inherited)
        return self.journal.open_entry(name, 1, replay, inherited, self.epoch)

    async def run(self, steps: Sequence[Any], blows: Sequence[Blow], until_s: float | None) -> bool:
        """Run to the end, or until the driver is killed; return whether it reached the end."""
        self.session.start([{"role": "user", "content": "hi"}])
        ended = False
        async with Nursery() as nursery:

            async def line() -> None:
                nonlocal ended
                await run_steps(self.session, steps)
                ended = True
                nursery.cancel_tasks()

            async def trouble() -> None:
                for version, blow in enumerate(blows, start=1):
                    await asyncio.sleep(blow.after_s)
                    await (self.bench.abort() if blow.what == "abort" else self.bench.bump(version))

            async def kill(after_s: float) -> None:
                await asyncio.sleep(after_s)
                self.journal.write_entries()  # the last tick; what comes later is not known
                nursery.cancel_tasks()

            nursery.start_task("line", line())
            nursery.start_task("trouble", trouble())
            if until_s is not None:
                nursery.start_task("kill", kill(until_s))
        self.journal.close()
        return ended


async def run_driver(
    folder: Path, steps: Sequence[Any], blows: Sequence[Blow], kill_s: float | None, interrupt: str
) -> tuple[list[Trajectory], set[int]]:
    """The trajectories of a tree, and the tokens that were journalled when the driver was killed."""
    numbers = count(FIRST)
    driver, journalled = Incarnation(folder, numbers, interrupt), set[int]()
    if not await driver.run(steps, blows, kill_s):
        driver = Incarnation(folder, numbers, interrupt)
        tokens = (segment.token_ids for state in driver.left.values() for segment in state.segments)
        known = driver.entry.restored
        tokens = [*tokens, *(s.token_ids for s in (known.segments if known else ()))]
        journalled = {token for ids in tokens for token in ids.tolist() if token >= FIRST}
        assert await driver.run(steps, (), None)
    assert await driver.session.close() == 0
    tree = driver.session.tree
    return [await each.finish_trajectory(each.stop_reason, {"reward": 0.5}) for each in tree], journalled


@pytest.mark.real
@settings(max_examples=60, deadline=None)
@given(
    steps,
    blows,
    st.none() | st.sampled_from([0.03, 0.1, 0.2, 0.4]),
    st.sampled_from(["abort", "in_place"]),
)
def test_every_token_is_trained_once_when_a_tree_is_interrupted_and_killed(
    steps: list[Any], blows: list[Blow], kill_s: float | None, interrupt: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree, journalled = run_virtual(run_driver(Path(folder), steps, blows, kill_s, interrupt))
        batch = assemble_batch([Group(group_id="g", trajectories=tuple(tree))], 99, "b")
        ids = [trajectory.trajectory_id for trajectory in tree]
        ledger = Ledger(Path(folder) / "ledger.sqlite")
        ledger.record_dispatch("g", "t", 0, ids[:1], 0)
        ledger.record_branches(ids[0], ids[1:])
        stored = [StoredTrajectory.of(each, path=each.trajectory_id, nbytes=1, checksum=1) for each in tree]
        ledger.record_queued("g", stored, version=0)
        ledger.record_trained(["g"], 1, "b")
        counts = audit_ledger(ledger)
        ledger.close()
    assert (counts.dispatched, counts.trained) == (len(tree), len(tree))
    assert batch.rewards.tolist() == [0.5] * len(tree)
    trained = Counter(batch.token_ids[batch.loss_mask].tolist())
    sampled = {int(token) for token in batch.token_ids if token >= FIRST}
    assert set(trained) == sampled, "what was sampled is trained, and nothing else"
    assert set(trained.values()) == {1}
    assert journalled <= sampled, "a restart loses nothing"
    for trajectory in tree:
        assert np.isfinite(trajectory.rollout_log_probs).all()
        assert (trajectory.weight_versions[trajectory.response_mask] >= 0).all()
