"""One session becomes several: what each inherits, what it owns, and how it ends."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from async_rl.errors import PromptTooLong
from async_rl.rollout.session.api import Turn
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.runtime.supervision import Nursery
from async_rl.types import Sampled, StoredTrajectory, TurnReward
from tests.support.sessions import FACTS, PROMPT, Bench, Watched, row_versions, rows_under, simulated


def make(stop_at: tuple[int, ...] = (12, 16, 20, 24), **rollout: object) -> tuple[Bench, Watched]:
    """Turns end where a sequence gets to one of these lengths; four branches are allowed."""
    policy = Watched(stop_at)
    bench = Bench(simulated(policy, decode_step_s=0.0), **{"max_branches": 4, **rollout})
    bench.start()
    return bench, policy


async def ends_of(bench: Bench) -> dict[str, object]:
    bench.session.end_session()
    assert await bench.session.close() == 0
    return {
        s.trajectory_id[32:]: await s.finish_trajectory(s.stop_reason, {"reward": 1.0})
        for s in bench.session.tree
    }


async def test_a_branch_reads_what_it_inherits_and_owns_what_it_samples() -> None:
    bench, _ = make()
    await bench.session.generate()
    bench.session.add_tool_result("4")
    async with bench.session.branch() as other:
        await other.generate()
        bench.session.add_messages([{"role": "user", "content": "?"}])
        await bench.session.generate()
    ends = await ends_of(bench)
    root, branch = ends[""], ends[".1"]
    assert branch.token_ids[:12].tolist() == root.token_ids[:12].tolist()
    assert branch.num_inherited_tokens == 12
    assert [len(s.token_ids) for s in branch.sampled] == [1]  # after 12 + 3
    assert root.num_inherited == 0
    assert [len(s.token_ids) for s in root.sampled] == [5, 3]  # after 12 + 5: both messages together
    # What it reads is true: the policy's own log-probs and versions, and rows of the whole text.
    inherited = [s for s in branch.segments[: branch.num_inherited] if isinstance(s, Sampled)]
    assert np.array_equal(inherited[0].rollout_log_probs, next(root.sampled).rollout_log_probs)
    for trajectory in (root, branch):
        assert trajectory.trace.valid.all()
        versions = row_versions(trajectory.trace)
        assert np.array_equal(trajectory.trace.rows, rows_under(trajectory, versions, FACTS))


async def test_a_branch_has_the_turns_of_its_whole_conversation_and_notes_of_its_own() -> None:
    bench, _ = make()
    await bench.session.generate()
    bench.session.annotate(plan="both")
    bench.session.add_tool_result("no", error=True)
    async with bench.session.branch() as other:
        with pytest.raises(RuntimeError, match="of this session"):
            other.annotate(plan="mine")
        turn = await other.generate()
        other.annotate(score=0.5, path=[1])
        other.annotate(score=1.5)
        assert other.messages[-1] == {"role": "assistant", "content": turn.text}
        assert (turn.weight_versions, turn.num_interruptions) == ((0,), 0)
    branch = (await ends_of(bench))[".1"]
    assert [turn.metadata for turn in branch.turns] == [{"plan": "both"}, {"score": 1.5, "path": [1]}]
    assert [(turn.start, turn.end) for turn in branch.turns] == [(PROMPT, 12), (15, 16)]
    assert (branch.outcome.num_turns, branch.outcome.num_tool_errors) == (2, 1)


async def test_rewards_of_turns_belong_to_the_conversation_that_sampled_them() -> None:
    bench, _ = make()
    with pytest.raises(RuntimeError, match="before a turn"):
        bench.session.reward_turn(1.0)
    await bench.session.generate()
    bench.session.reward_turn(np.float32(1))
    bench.session.reward_turn(np.array(0.5))
    async with bench.session.branch() as other:
        with pytest.raises(RuntimeError, match="of this session"):
            other.reward_turn(1.0)
        other.add_messages([{"role": "user", "content": "?"}])
        await other.generate()
        other.reward_turn(-2.0)
    for wrong in (float("nan"), "1", None, True, 1e300, np.array([1.0])):
        with pytest.raises(ValueError, match="expected a finite number"):
            bench.session.reward_turn(wrong)  # type: ignore[arg-type]
    ends = await ends_of(bench)
    root, branch = ends[""], ends[".1"]
    assert (root.reward, branch.reward) == (2.5, -1.0)
    assert root.turn_rewards == (TurnReward(end=12, reward=1.5),)
    assert branch.turn_rewards == (TurnReward(end=branch.turns[-1].end, reward=-2.0),)
    unscored = StoredTrajectory.of(branch)
    scored = unscored.with_reward({"reward": 3.0, "correct": 1.0})
    assert (scored.reward, scored.reward_parts["turn_rewards"]) == (1.0, -2.0)


async def test_no_trajectory_comes_of_a_branch_that_samples_nothing_or_raises() -> None:
    bench, _ = make()
    await bench.session.generate()
    async with bench.session.branch() as other:
        other.add_messages([])

    async def fail() -> None:
        async with bench.session.branch() as other:
            await other.generate()
            async with other.branch() as leaf:
                await leaf.generate()
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    async with bench.session.branch() as other:
        await other.generate()
    assert list(await ends_of(bench)) == ["", ".3"]


async def test_a_block_ends_when_a_budget_of_its_own_is_used_up() -> None:
    bench, _ = make(max_turns=3, max_context_tokens=40)
    await bench.session.generate()
    async with bench.session.branch() as turns:
        while True:
            await turns.generate()
    async with bench.session.branch() as tokens:
        await tokens.generate()
        tokens.add_messages([{"role": "user", "content": "?"}] * 20)

    async def overfill_the_other() -> None:
        async with bench.session.branch() as innocent:
            await innocent.generate()
            bench.session.add_messages([{"role": "user", "content": "?"}] * 20)

    with pytest.raises(PromptTooLong):
        await overfill_the_other()
    assert {name: end.outcome.stop_reason for name, end in (await ends_of(bench)).items()} == {
        "": "length",
        ".1": "max_turns",
        ".2": "length",
    }


async def test_lines_are_written_side_by_side_when_each_has_its_block() -> None:
    bench, _ = make(max_turns=2)

    async def play(session: RolloutSession) -> None:
        async with session:
            while True:
                await session.generate()

    lines = [bench.session, bench.session.branch(), bench.session.branch()]
    await asyncio.gather(*map(play, lines))
    ends = await ends_of(bench)
    assert [end.outcome.stop_reason for end in ends.values()] == ["max_turns"] * 3
    assert [end.num_inherited_tokens for end in ends.values()] == [0, PROMPT, PROMPT]


async def test_misuse_is_refused_before_it_changes_anything() -> None:
    bench, policy = make(stop_at=(40,), max_branches=1)
    session = bench.session
    branch = session.branch()
    with pytest.raises(RuntimeError, match="a branch is open inside its block"):
        await branch.generate()
    with pytest.raises(RuntimeError, match=r"rollout\.max_branches = 1 allows no further"):
        session.branch()
    reached = policy.reaches(10)
    async with Nursery() as nursery:
        nursery.start_task("one", session.generate())
        await reached
        for call in (session.generate(), _call(session.add_messages, []), _call(session.branch)):
            with pytest.raises(RuntimeError, match="while a turn is being written"):
                await call
    with pytest.raises(ValueError, match="expects JSON values"):
        session.annotate(x=object())
    with pytest.raises(ValueError, match="bytes of JSON, expected at most 4096"):
        session.annotate(x="." * 5000)
    await session.close()
    with pytest.raises(RuntimeError, match="on a closed session"):
        session.add_messages([])


async def test_a_leaked_turn_is_taken_away_when_its_block_ends() -> None:
    bench, policy = make(stop_at=())
    started: list[asyncio.Task[Turn]] = []
    async with Nursery() as nursery:

        async def leave_too_early() -> None:
            async with bench.session.branch() as other:
                started.append(nursery.start_task("leaked", other.generate()))
                await policy.reaches(PROMPT + 2)

        with pytest.raises(RuntimeError, match="ended while a turn was being written"):
            await leave_too_early()
        await bench.session.generate()
    assert started[0].cancelled()
    assert list(await ends_of(bench)) == [""]


async def test_sessions_that_a_loop_forgot_are_counted_and_their_writers_taken_away_at_its_end() -> None:
    bench, policy = make(stop_at=())
    forgotten = bench.session.branch()
    async with Nursery() as nursery:
        await forgotten.__aenter__()
        writing = nursery.start_task("forgotten", forgotten.generate())
        await policy.reaches(PROMPT + 2)
        assert await bench.session.close() == 1
        assert writing.cancelled()
    assert bench.session.tree == (bench.session,)


async def _call(function, *arguments):  # type: ignore[no-untyped-def]
    return function(*arguments)


async def test_a_branch_cannot_begin_when_the_attempt_has_ended() -> None:
    bench = Bench(simulated(Watched()), max_branches=1)
    bench.start()
    other = bench.session.branch()
    bench.session.refuse_calls()
    with pytest.raises(RuntimeError, match="after the attempt had ended"):
        async with other:
            await other.generate()
