"""Routing through partial rollouts, on simulated engines: their rows name token, position and version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import numpy as np
import pytest

from async_rl.config import SimulatedEngines
from async_rl.engine_protocol import Chunk, EngineFacts, Finish, GenerateRequest, Retraction
from async_rl.errors import AlignmentError, EngineBusy, EngineError, LocalShortage
from async_rl.types import Context, Sampled, StoredTrajectory, Trajectory, VersionSpan
from tests.support.scripted import Script, ScriptedEngine, sampled
from tests.support.sessions import FACTS, PROMPT, Bench, Watched, row_versions, rows_under, simulated
from tests.support.trajectories import verify
from verification.simulation.breakable_engine import BreakableEngine, Fault

LONG = {"max_context_tokens": 512, "max_new_tokens": 200}


class Recorded(BreakableEngine):
    """Remembers what it was asked and how it ended."""

    always_full = False
    mute = False
    """Whether answers come without rows, as those of a connection that breaks at its end."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.finished: list[tuple[GenerateRequest, Finish]] = []
        self.refusals: list[EngineError] = []
        """Errors with which the next recoveries fail."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk | Finish, None]:
        if self.refusals and not request.max_new_tokens:
            raise self.refusals.pop()
        if self.always_full:
            request = msgspec.structs.replace(request, routing_start=0)
        async for event in super().generate(request):
            if isinstance(event, Finish):
                event = msgspec.structs.replace(event, routing=None) if self.mute else event
                self.finished.append((request, event))
            yield event

    @property
    def asked(self) -> list[int]:
        return [request.routing_start for request, _ in self.finished]

    @property
    def rows(self) -> int:
        return sum(finish.routing.num_rows for _, finish in self.finished if finish.routing is not None)


def recorded(policy: Watched, engine_id: str = "engine-0", **config: Any) -> Recorded:
    return Recorded(engine_id, SimulatedEngines(**config), seed=1, policy=policy, facts=FACTS)


async def interrupted(bench: Bench, policy: Watched, lengths: list[int]) -> Trajectory:
    """One turn, brought to the next version whenever the sequence gets to one of the lengths."""
    bench.start()
    async with asyncio.TaskGroup() as group:
        turn = group.create_task(bench.session.generate())
        for version, length in enumerate(lengths, start=1):
            await policy.reaches(length)
            await bench.bump(version)
        await turn
    return await bench.finish()


async def first_turn(bench: Bench) -> None:
    """One turn, and the answer of a tool to it."""
    await bench.begin()
    bench.session.add_messages([{"role": "tool", "content": "4"}])


async def turn_without_rows(bench: Bench, engine: Recorded) -> None:
    """One turn whose answer comes without rows."""
    bench.start()
    engine.mute = True
    await bench.session.generate()
    engine.mute = False


def assert_whole(trajectory: Trajectory, versions: Any) -> None:
    """Every row is there, is what its version makes of its token, and is claimed to be of that version."""
    trace = trajectory.trace
    assert trace is not None
    verify(trace, trajectory.token_ids, FACTS.moe_layers)
    assert trace.valid.all()
    assert np.array_equal(trace.rows, rows_under(trajectory, versions))
    assert row_versions(trace) == np.broadcast_to(versions, len(trace.rows)).tolist()


# -- replace and splice ---------------------------------------------------------------------------------


@pytest.mark.case(10, 11)
@pytest.mark.parametrize("aborts", [1, 3])
async def test_all_rows_are_of_the_last_version_when_replaced(aborts: int) -> None:
    policy = Watched(stop_at=[60])
    bench = Bench(simulated(policy), **LONG)
    trajectory = await interrupted(bench, policy, [PROMPT + 4 * (i + 1) for i in range(aborts)])
    assert trajectory.outcome.num_interruptions == aborts
    assert [s.weight_version for s in trajectory.sampled] == list(range(aborts + 1))
    assert all(len(s.token_ids) >= 4 for s in trajectory.sampled)
    assert_whole(trajectory, aborts)
    assert not np.array_equal(trajectory.trace.rows, rows_under(trajectory, 0))  # the marks do differ
    assert bench.counted("routing_mixed_versions_total") == 0


@pytest.mark.parametrize(
    ("settings", "moved"),
    [({}, [False, True]), ({"flip_sample": 1.0}, [True, True]), ({"merge": "splice"}, [True, True])],
)
async def test_aborted_calls_return_rows_only_when_they_are_used(settings: dict, moved: list[bool]) -> None:
    policy = Watched(stop_at=[60])
    engine = recorded(policy)
    await interrupted(Bench(engine, **settings, **LONG), policy, [PROMPT + 10])
    assert [finish.reason for _, finish in engine.finished] == ["abort", "stop"]
    assert [finish.routing is not None for _, finish in engine.finished] == moved


async def test_tokens_are_as_old_as_their_lease_when_an_aborted_call_reports_no_versions() -> None:
    """The client leaves the connection where unneeded rows begin; a server may report versions after them."""

    def unreported(asked: GenerateRequest) -> Script:
        chunk, finish = sampled(5, "abort", 0, prompt=PROMPT, rows=False)
        return [chunk, msgspec.structs.replace(finish, version_spans=())]

    bench = scripted(unreported, lambda r: sampled(3, "stop", 1, prompt=PROMPT + 5))
    await bench.session.generate()
    trajectory = await bench.finish()
    assert [(s.weight_version, len(s.token_ids)) for s in trajectory.sampled] == [(0, 5), (1, 3)]


@pytest.mark.case(12, 20)
async def test_rows_are_of_the_version_that_first_fed_them_when_spliced() -> None:
    policy = Watched(stop_at=[60])
    bench = Bench(simulated(policy), merge="splice", **LONG)
    trajectory = await interrupted(bench, policy, [PROMPT + 4, PROMPT + 9, PROMPT + 20])
    first, *others = trajectory.sampled
    # The last token of a call is first fed by the next one: the boundary row is the new version's.
    versions = [0] * (PROMPT + len(first.token_ids) - 1)
    for segment in others:
        versions += [segment.weight_version] * len(segment.token_ids)
    assert_whole(trajectory, versions)
    assert StoredTrajectory.of(trajectory).oldest_weight_version == 0


@pytest.mark.case(10, 12)
@pytest.mark.parametrize("merge", ["replace", "splice"])
async def test_nothing_is_lost_when_an_abort_meets_the_queue(merge: str) -> None:
    """The resumed call waits behind another one and is aborted there: no tokens, no rows, no harm."""
    policy = Watched(stop_at=[60])
    engine = recorded(policy, max_running_requests=1)
    bench = Bench(engine, merge=merge, **LONG)
    other = Bench(engine, max_context_tokens=512, max_new_tokens=199)  # its own pool: it goes first
    bench.start()
    other.start()
    async with asyncio.TaskGroup() as group:
        group.create_task(bench.session.generate())
        await policy.reaches(PROMPT + 5)
        group.create_task(other.session.generate())
        await policy.reaches(PROMPT + 8)
        await bench.abort()
        seen = 512 - PROMPT - bench.session.remaining_tokens
        assert seen >= 5
        await policy.reaches(PROMPT + 30)  # only the other can get there
        await bench.abort()
        assert bench.session.remaining_tokens == 512 - PROMPT - seen
    empty = [a for a, finish in engine.finished if finish.routing is None and not finish.version_spans]
    assert [asked.max_new_tokens for asked in empty] == [199, 200 - seen]
    trajectory = await bench.finish()
    assert [len(s.token_ids) for s in trajectory.sampled] == [seen, 60 - PROMPT - seen]
    assert_whole(trajectory, 0)


@pytest.mark.case(17)
@pytest.mark.parametrize("fault", ["die", "hang"])
async def test_no_token_and_no_row_comes_twice_when_a_stream_breaks(fault: Any) -> None:
    policy = Watched(stop_at=[40])
    first, second = simulated(policy, "engine-0"), simulated(policy, "engine-1")
    plain = Bench(second, **LONG)
    await plain.begin()
    whole = await plain.finish()
    first.faults.append(Fault(fault, after_tokens=6))
    bench = Bench(first, second, **LONG)
    await bench.begin()
    trajectory = await bench.finish()
    assert [len(s.token_ids) for s in trajectory.sampled] == [6, 27]
    assert [s.engine_id for s in trajectory.sampled] == ["engine-0", "engine-1"]
    assert trajectory.outcome.num_failovers == 1
    assert [e.engine_id for e in bench.pool.engines() if bench.pool.error_of(e.engine_id)] == ["engine-0"]
    assert np.array_equal(trajectory.token_ids, whole.token_ids)
    assert len(trajectory.rollout_log_probs) == 40
    assert_whole(trajectory, 0)


SCRIPTED = EngineFacts(
    num_layers=1, moe_layers=(0,), num_experts=8, top_k=2, vocab_size=512, context_length=1024
)


def scripted(*scripts: Script, **changes: Any) -> Bench:
    bench = Bench(ScriptedEngine(scripts=scripts), facts=SCRIPTED, **changes)  # type: ignore[arg-type]
    bench.start()
    return bench


def gone(request: GenerateRequest) -> list[Any]:
    return [EngineError("gone")]


@pytest.mark.case(13)
@pytest.mark.parametrize(
    ("rows", "versions", "valid"),
    [
        ([True, False, True], [2] * 21, 21),
        ([True, False], [0] * 11, 11),
        ([False, True], [1] * 16, 16),
        ([False], [], 0),
    ],
)
async def test_the_last_rows_count_when_some_answers_had_none(
    rows: list[bool], versions: list[int], valid: int
) -> None:
    calls = [
        lambda r, i=i, has=has: sampled(
            5, "abort" if i < len(rows) - 1 else "stop", i, prompt=PROMPT + 5 * i, rows=has
        )
        for i, has in enumerate(rows)
    ]
    bench = scripted(*calls, gone)
    # The recovery finds an engine that dies, and then one that is always interrupted.
    spare = [lambda r: sampled(0, "abort", 9, prompt=1, rows=False)] * 4
    bench.pool.add_engine(ScriptedEngine("engine-1", spare))  # type: ignore[arg-type]
    await bench.session.generate()
    bench.pool.serve_engine("engine-1", 0)
    trajectory = await bench.finish()
    trace = trajectory.trace
    wanted = trajectory.num_tokens - 1
    assert len(trace.rows) == wanted == PROMPT + 5 * len(rows) - 1
    assert row_versions(trace) == versions + [-1] * (wanted - valid)
    assert trace.valid.tolist() == [True] * valid + [False] * (wanted - valid)
    assert int((~trace.valid).sum()) == wanted - valid
    assert (trace.rows[trace.valid][:, 0, 0] == np.array(versions, np.uint8)).all()


@pytest.mark.case(15)
async def test_a_trajectory_is_rejected_when_its_rows_are_sequences_laid_end_to_end() -> None:
    bench = scripted(
        lambda r: sampled(5, "abort", 0, prompt=PROMPT),
        # An engine, or a client, that appends: 11 rows of the first answer, then 15 of the second.
        lambda r: sampled(4, "stop", 1, prompt=PROMPT + 5 + 11),
    )
    await bench.session.generate()
    with pytest.raises(AlignmentError, match="26 routing rows for 16 tokens, expected at most 15"):
        await bench.finish()
    assert bench.counted("replay_rejected_total", reason="too_many_rows") == 1


@pytest.mark.case(15)
async def test_a_trajectory_is_rejected_when_an_engine_sends_one_row_too_many() -> None:
    policy = Watched(stop_at=[20])
    engine = simulated(policy)
    engine.faults.append(Fault("wrong_rows"))
    bench = Bench(engine, **LONG)
    await bench.begin()
    with pytest.raises(AlignmentError, match="20 routing rows, expected 19"):
        await bench.finish()


# -- versions -------------------------------------------------------------------------------------------


@pytest.mark.case(18)
@pytest.mark.parametrize("interrupt", ["abort", "retract"])
async def test_a_mixture_raises_the_alarm_when_an_update_did_not_flush(interrupt: Any) -> None:
    """The control of the tests above: without the flush a prefill finds pages of the old weights."""
    policy = Watched(stop_at=[60, 120])
    bench = Bench(simulated(policy), interrupt=interrupt, **LONG)
    await first_turn(bench)
    async with asyncio.TaskGroup() as group:
        group.create_task(bench.session.generate())
        await policy.reaches(80)
        await bench.bump(1, flush=False)
    trajectory = await bench.finish()
    versions = row_versions(trajectory.trace)
    assert set(versions) == {0, 1}
    assert bench.counted("routing_mixed_versions_total") == 1
    assert np.array_equal(trajectory.trace.rows, rows_under(trajectory, versions))  # reported correctly


@pytest.mark.case(18)
async def test_rows_are_of_one_version_when_a_retracted_call_goes_on() -> None:
    policy = Watched(stop_at=[90])
    bench = Bench(simulated(policy), interrupt="retract", **LONG)
    trajectory = await interrupted(bench, policy, [PROMPT + 40])
    assert [s.weight_version for s in trajectory.sampled] == [0, 1]
    assert trajectory.outcome.num_interruptions == trajectory.outcome.num_resumes == 1
    assert_whole(trajectory, 1)
    assert bench.counted("routing_mixed_versions_total") == 0


@pytest.mark.case(18)
async def test_rows_are_fetched_again_when_an_answer_mixes_versions() -> None:
    spans = (VersionSpan(start=0, end=2, weight_version=0), VersionSpan(start=2, end=5, weight_version=1))

    def mixed(request: GenerateRequest) -> list[Any]:
        chunk, finish = sampled(5, "stop", 1, prompt=PROMPT)
        return [chunk, msgspec.structs.replace(finish, version_spans=spans)]

    bench = scripted(mixed, lambda r: sampled(0, "length", 1, prompt=len(r.input_ids)))
    await bench.session.generate()
    trajectory = await bench.finish()
    assert bench.counted("routing_mixed_versions_total") == 1
    assert bench.counted("routing_payloads_total", kind="recovery") == 1
    assert bench.engines[0].decoded == 1  # type: ignore[attr-defined]
    assert row_versions(trajectory.trace) == [1] * (PROMPT + 4)


@pytest.mark.case(19)
@pytest.mark.parametrize("merge", ["replace", "splice"])
async def test_rows_and_versions_are_right_when_an_update_was_refused_its_flush(merge: str) -> None:
    policy = Watched(stop_at=[60])
    engine = simulated(policy)
    engine.faults.append(Fault("refuse_flush"))
    bench = Bench(engine, merge=merge, **LONG)
    trajectory = await interrupted(bench, policy, [PROMPT + 20])
    assert engine.faults == []
    assert [s.weight_version for s in trajectory.sampled] == [0, 1]
    old = 0 if merge == "replace" else PROMPT + len(next(trajectory.sampled).token_ids) - 1
    assert_whole(trajectory, [0] * old + [1] * (59 - old))
    assert bench.counted("routing_mixed_versions_total") == 0


@pytest.mark.case(20)
async def test_old_rows_keep_their_version_when_weights_change_in_place() -> None:
    policy = Watched(stop_at=[60])
    bench = Bench(simulated(policy), merge="splice", interrupt="in_place", **LONG)
    trajectory = await interrupted(bench, policy, [PROMPT + 10, PROMPT + 30])
    lengths = [len(s.token_ids) for s in trajectory.sampled]
    assert [s.weight_version for s in trajectory.sampled] == [0, 1, 2]
    assert sum(lengths) == 60 - PROMPT
    # Row i samples token i + 1, under that token's version.
    versions = [0] * (PROMPT - 1) + [v for v, n in enumerate(lengths) for _ in range(n)]
    assert_whole(trajectory, versions)
    assert bench.counted("routing_mixed_versions_total") == 0


@pytest.mark.case(20)
async def test_the_versions_of_rows_are_those_of_tokens_when_an_engine_does_not_know_them() -> None:
    """Most engines report the weights of sampled tokens, but not of rows."""
    spans = (VersionSpan(start=0, end=2, weight_version=0), VersionSpan(start=2, end=5, weight_version=1))

    def two(request: GenerateRequest) -> list[Any]:
        chunk, finish = sampled(5, "stop", 1, prompt=PROMPT)
        return [chunk, msgspec.structs.replace(finish, version_spans=spans)]

    bench = scripted(two, merge="splice", interrupt="in_place")
    await bench.session.generate()
    trajectory = await bench.finish()
    assert row_versions(trajectory.trace) == [0] * (PROMPT + 1) + [1] * 3
    assert StoredTrajectory.of(trajectory).oldest_weight_version == 0


# -- retractions ----------------------------------------------------------------------------------------


def retracted(*found: Retraction, count: int = 20, start: int = 0, updates: tuple[int, ...] = ()) -> Script:
    """A call that was retracted; `updates` says how many tokens it had at each weight update."""
    chunk, finish = sampled(count, "stop", len(updates), prompt=PROMPT, start=start)
    edges = [0, *updates, count]
    spans = tuple(
        VersionSpan(start=edges[i], end=edges[i + 1], weight_version=i) for i in range(len(edges) - 1)
    )
    return lambda request: [chunk, msgspec.structs.replace(finish, version_spans=spans, retractions=found)]


def at(tokens: int, at_most: int | None = None, count: int = 1) -> Retraction:
    return Retraction(at_least=tokens, at_most=tokens if at_most is None else at_most, count=count)


@pytest.mark.parametrize("interrupt", ["abort", "retract", "in_place"])
@pytest.mark.parametrize(
    ("found", "marked", "counted"),
    [
        ((), (), 0),
        ((at(5),), ((0, PROMPT + 4),), 1),  # the 5th token was fed first after it, so its row is exact
        ((at(5), at(9)), ((0, PROMPT + 8),), 2),
        ((at(5, 12),), ((0, PROMPT + 11),), 1),
        ((at(5, count=3),), ((0, PROMPT + 4),), 3),
        ((at(0),), (), 0),  # no token was sampled with what it dropped
    ],
)
async def test_rows_before_a_retraction_count_as_recomputed(
    interrupt: Any, found: tuple[Retraction, ...], marked: tuple, counted: int
) -> None:
    merge = "splice" if interrupt == "in_place" else "replace"
    bench = scripted(retracted(*found), interrupt=interrupt, merge=merge, max_new_tokens=32)
    await bench.session.generate()
    assert (await bench.finish()).trace.recomputed == marked
    assert bench.counted("engine_retractions_total", engine="engine-0") == counted


@pytest.mark.parametrize(
    ("found", "marked", "counted"),
    [
        ((at(6),), (), 0),
        ((at(6, count=2),), (), 0),  # two updates, and no token between them
        ((at(4, 9),), (), 0),
        ((at(4, 9, count=2),), ((0, PROMPT + 8),), 1),
        ((at(3), at(6)), (), 1),  # its rows were recomputed again, under the new weights
        ((at(6), at(8)), ((0, PROMPT + 7),), 1),
        ((), (), 0),  # it was still queued
    ],
)
async def test_a_retraction_by_a_weight_update_is_none_for_memory(
    found: tuple[Retraction, ...], marked: tuple, counted: int
) -> None:
    bench = scripted(retracted(*found, updates=(6,)), interrupt="retract", max_new_tokens=32)
    await bench.session.generate()
    trace = (await bench.finish()).trace
    assert trace.recomputed == marked
    assert row_versions(trace) == [1] * (PROMPT + 19)
    assert bench.counted("engine_retractions_total", engine="engine-0") == counted


async def test_rows_are_of_the_weights_of_their_recomputation_when_others_were_loaded_in_place() -> None:
    script = retracted(at(10), updates=(4, 8, 15))
    bench = scripted(script, interrupt="in_place", merge="splice", max_new_tokens=32)
    await bench.session.generate()
    trace = (await bench.finish()).trace
    assert row_versions(trace) == [2] * (PROMPT + 14) + [3] * 5
    assert trace.recomputed == ((0, PROMPT + 9),)


async def test_only_rows_of_the_retracted_call_count_as_recomputed() -> None:
    """Those before its delta were fetched earlier, and are what sampled."""
    engine = recorded(Watched(stop_at=[20, 60]))
    bench = Bench(engine, **LONG)
    await first_turn(bench)
    engine.faults.append(Fault("retract", after_tokens=10))
    await bench.session.generate()
    trajectory = await bench.finish()
    assert engine.asked == [0, 19]
    assert_whole(trajectory, 0)
    prompt = len(engine.finished[1][0].input_ids)
    assert trajectory.trace.recomputed == ((19, prompt + 11 - 1),)
    assert bench.counted("engine_retractions_total", engine="engine-0") == 1


# -- what is asked for ----------------------------------------------------------------------------------


async def converse(bench: Bench, turns: int) -> Trajectory:
    bench.start()
    for turn in range(turns):
        if turn:
            bench.session.add_messages([{"role": "tool", "content": "4"}])
        await bench.session.generate()
    return await bench.finish()


LENGTHS_AFTER_TURNS = [20, 41, 57, 80, 99]


@pytest.mark.case(21, 23)
@pytest.mark.parametrize("merge", ["replace", "splice"])
async def test_deltas_are_the_full_fetch_over_five_turns(merge: str) -> None:
    policy = Watched(stop_at=LENGTHS_AFTER_TURNS)
    delta, full = recorded(policy), recorded(policy)
    full.always_full = True
    found = await converse(Bench(delta, merge=merge, **LONG), 5)
    expected = await converse(Bench(full, merge=merge, **LONG), 5)
    assert np.array_equal(found.token_ids, expected.token_ids)
    assert found.trace.rows.tobytes() == expected.trace.rows.tobytes()
    assert found.trace.spans == expected.trace.spans
    assert found.trace.prefix_hash == expected.trace.prefix_hash
    assert_whole(found, 0)
    # Every row came once, where the full fetch sends most of them again and again.
    assert delta.asked == [0, *(length - 1 for length in LENGTHS_AFTER_TURNS[:-1])]
    assert delta.rows == LENGTHS_AFTER_TURNS[-1] - 1
    assert full.asked == [0] * 5
    assert full.rows == sum(length - 1 for length in LENGTHS_AFTER_TURNS)


async def test_everything_is_fetched_again_when_the_weights_changed_between_turns() -> None:
    policy = Watched(stop_at=LENGTHS_AFTER_TURNS)
    engine = recorded(policy)
    bench = Bench(engine, **LONG)
    await first_turn(bench)
    await bench.bump(1)
    await bench.session.generate()
    assert engine.asked == [0, 0]
    assert_whole(await bench.finish(), 1)


async def test_a_delta_is_not_enough_when_the_engine_recomputed_what_came_before() -> None:
    """`retract` takes new weights in mid-call; rows of earlier turns are of the old ones then."""
    policy = Watched(stop_at=[30, 70])
    engine = recorded(policy)
    bench = Bench(engine, interrupt="retract", **LONG)
    await first_turn(bench)
    async with asyncio.TaskGroup() as group:
        group.create_task(bench.session.generate())
        await policy.reaches(50)
        await bench.bump(1)
    assert engine.asked == [0, 29]
    trajectory = await bench.finish()
    assert engine.asked == [0, 29, 0]
    assert bench.counted("routing_payloads_total", kind="recovery") == 1
    assert_whole(trajectory, 1)


@pytest.mark.parametrize("merge", ["replace", "splice"])
async def test_rows_are_fetched_again_when_an_answer_leaves_a_gap(merge: str) -> None:
    bench = scripted(
        lambda r: sampled(5, "stop", 0, prompt=PROMPT, start=3),  # asked from 0
        lambda r: sampled(0, "length", 0, prompt=len(r.input_ids)),
        merge=merge,
    )
    await bench.session.generate()
    trace = (await bench.finish()).trace
    assert row_versions(trace) == [0] * (PROMPT + 4)
    assert [r.routing_start for r in bench.engines[0].requests] == [0, 0]  # type: ignore[attr-defined]
    assert bench.engines[0].decoded == 1  # type: ignore[attr-defined]


@pytest.mark.case(22)
@pytest.mark.parametrize("merge", ["replace", "splice"])
@pytest.mark.parametrize("place", [None, 0, PROMPT - 1, PROMPT + 3])
async def test_everything_is_fetched_again_when_one_token_of_the_history_was_edited(
    merge: str, place: int | None
) -> None:
    policy = Watched(stop_at=LENGTHS_AFTER_TURNS)
    engine = recorded(policy)
    bench = Bench(engine, merge=merge, **LONG)
    await first_turn(bench)
    if place is not None:
        edit(bench, place)
    await bench.session.generate()
    trajectory = await bench.finish()
    assert engine.asked == [0, 19 if place is None else 0]
    assert bench.counted("replay_rejected_total", reason="wrong_prefix") == (place is not None)
    assert_whole(trajectory, 0)


@pytest.mark.case(22)
async def test_rows_are_recovered_when_the_history_was_edited_after_the_last_turn() -> None:
    policy = Watched(stop_at=LENGTHS_AFTER_TURNS)
    bench = Bench(simulated(policy), **LONG)
    await bench.begin()
    edit(bench, 2)
    assert_whole(await bench.finish(), 0)
    assert bench.counted("routing_payloads_total", kind="recovery") == 1


def edit(bench: Bench, place: int) -> None:
    """Change a token of the history behind the session's back, as a re-tokenised prompt would."""
    tokens = bench.session.transcript.tokens
    tokens.token_ids[place] = 5
    begin = 0
    for index, segment in enumerate(tokens.segments):
        end = begin + len(segment.token_ids)
        if begin <= place < end:
            token_ids = tokens.token_ids[begin:end].copy()
            tokens.segments[index] = msgspec.structs.replace(segment, token_ids=token_ids)
        begin = end
    assert isinstance(tokens.segments[0], Context | Sampled)


# -- the end --------------------------------------------------------------------------------------------


@pytest.mark.case(24)
@pytest.mark.parametrize("limit", [40, 41, 50])
async def test_tokens_and_rows_agree_when_the_context_is_full(limit: int) -> None:
    policy = Watched(stop_at=[20])
    bench = Bench(simulated(policy), max_context_tokens=limit, max_new_tokens=200)
    await first_turn(bench)
    async with asyncio.TaskGroup() as group:
        turn = group.create_task(bench.session.generate())
        await policy.reaches(30)
        await bench.bump(1)
    assert turn.result().finish_reason == "length"
    trajectory = await bench.finish()
    parts = (trajectory.token_ids, trajectory.rollout_log_probs, trajectory.response_mask)
    assert {len(part) for part in (*parts, trajectory.weight_versions)} == {limit}
    assert len(trajectory.trace.rows) == limit - 1
    assert trajectory.response_mask.sum() == trajectory.num_sampled_tokens == limit - PROMPT - 3
    assert (trajectory.rollout_log_probs[~trajectory.response_mask] == 0).all()
    assert (trajectory.rollout_log_probs[trajectory.response_mask] < 0).all()
    assert_whole(trajectory, 1)


@pytest.mark.case(25)
@pytest.mark.parametrize(
    ("merge", "bumped", "start"),
    [("replace", False, 19), ("splice", False, 19), ("replace", True, 0), ("splice", True, 19)],
)
async def test_missing_rows_are_recovered_without_a_token_when_the_last_call_had_none(
    merge: str, bumped: bool, start: int
) -> None:
    policy = Watched(stop_at=LENGTHS_AFTER_TURNS)
    engine = recorded(policy)
    bench = Bench(engine, merge=merge, **LONG)
    await first_turn(bench)
    engine.mute = True
    await bench.session.generate()
    engine.mute = False
    if bumped:
        await bench.bump(1)
    left = bench.session.remaining_tokens
    trajectory = await bench.finish()
    recovery, finish = engine.finished[-1]
    assert (recovery.max_new_tokens, recovery.routing_start, finish.version_spans) == (0, start, ())
    assert trajectory.num_tokens == LENGTHS_AFTER_TURNS[1] == 512 - left
    assert_whole(trajectory, [0] * start + [int(bumped)] * (40 - start))
    assert bench.counted("routing_payloads_total", kind="recovery") == 1
    # The engine caches whole pages of 16: what it had to prefill again, or under other weights, is not exact.
    assert finish.cached_tokens == (0 if bumped else 32)
    assert trajectory.trace.recomputed == ((max(start, finish.cached_tokens), 40),)
    assert sum(end - start for start, end in trajectory.trace.recomputed) == 40 - max(
        start, finish.cached_tokens
    )


@pytest.mark.parametrize(
    ("cached", "version", "marked"), [(14, 0, ()), (13, 0, ((13, 14),)), (14, 1, ((0, 14),))]
)
async def test_recovered_rows_are_exact_only_when_they_were_cached_under_the_same_weights(
    cached: int, version: int, marked: tuple
) -> None:
    def recover(asked: GenerateRequest) -> Script:
        (finish,) = sampled(0, "length", version, prompt=len(asked.input_ids))
        return [msgspec.structs.replace(finish, cached_tokens=cached)]

    bench = scripted(lambda r: sampled(15 - PROMPT, "stop", 0, prompt=PROMPT, rows=False), recover)
    await bench.session.generate()
    assert (await bench.finish()).trace.recomputed == marked


async def test_rows_are_recovered_from_the_engine_that_has_them_cached() -> None:
    engine = recorded(Watched(stop_at=[33]))
    bench = Bench(engine, **LONG)
    await turn_without_rows(bench, engine)
    idle = recorded(Watched(stop_at=[33]), "engine-1")
    bench.pool.add_engine(idle)
    bench.pool.serve_engine("engine-1", 0)
    async with (
        bench.pool.dispatcher.lease("b", 400),
        bench.pool.dispatcher.lease("c", 390),
    ):  # one on each: engine-1 has less load
        trajectory = await bench.finish()
    assert (len(engine.finished), len(idle.finished)) == (2, 0)
    assert trajectory.trace.recomputed == (), "whole pages of 16 tokens are cached"


@pytest.mark.parametrize("error", [LocalShortage("no descriptor"), EngineBusy("engine-0 answered 429")])
async def test_rows_are_recovered_however_often_no_descriptor_or_busy_engines_keep_it_waiting(
    error: EngineError,
) -> None:
    engine = recorded(Watched(stop_at=[55]))
    bench = Bench(engine, **LONG)
    await turn_without_rows(bench, engine)
    engine.refusals = [error] * 10
    trajectory = await bench.finish()
    assert engine.refusals == []
    assert_whole(trajectory, 0)


async def test_rows_are_recovered_however_often_updates_and_loans_interrupt_that() -> None:
    """When interruptions counted among its four attempts, two versions were enough to lose the rows."""
    engine = recorded(Watched(stop_at=[55]), prefill_tokens_per_s=60.0)
    bench = Bench(engine, **LONG)
    await turn_without_rows(bench, engine)
    async with asyncio.TaskGroup() as group:
        ending = group.create_task(bench.finish())
        for version in range(1, 6):
            await asyncio.sleep(0.1)  # the prefill takes longer
            await bench.abort()
            await asyncio.sleep(0.1)
            await bench.bump(version)
    assert [finish.reason for _, finish in engine.finished[1:]] == ["abort"] * 10 + ["length"]
    assert_whole(ending.result(), 5)
    assert ending.result().trace.recomputed == ((0, ending.result().num_tokens - 1),)


async def test_siblings_never_share_an_array() -> None:
    policy = Watched(stop_at=[20])
    engine = simulated(policy)
    traces = []
    for _ in range(2):
        bench = Bench(engine, **LONG)
        await bench.begin()
        traces.append((await bench.finish()).trace)
    assert np.array_equal(traces[0].rows, traces[1].rows)
    assert not np.shares_memory(traces[0].rows, traces[1].rows)


# -- flips ----------------------------------------------------------------------------------------------


def flips(bench: Bench) -> tuple[float, float]:
    """How often, and how much in all."""
    return bench.counted("routing_flip_ratio_count"), bench.counted("routing_flip_ratio_sum")


@pytest.mark.parametrize("merge", ["replace", "splice"])
async def test_flips_are_measured_when_a_trajectory_is_of_the_sample(merge: str) -> None:
    policy = Watched(stop_at=[60])
    bench = Bench(simulated(policy), merge=merge, flip_sample=1.0, **LONG)
    trajectory = await interrupted(bench, policy, [PROMPT + 10, PROMPT + 30])
    # One version further on, the marks are 7 experts further on: none of two is the same. Only the last rows
    # that an update replaced are kept until the end.
    assert flips(bench) == ((1, 1.0) if merge == "replace" else (2, 2.0))
    versions = row_versions(trajectory.trace)
    assert np.array_equal(trajectory.trace.rows, rows_under(trajectory, versions))
    assert set(versions) == ({2} if merge == "replace" else {0, 1, 2})


async def test_the_rows_of_a_cancelled_attempt_are_freed_before_its_loop_has_ended() -> None:
    policy = Watched(stop_at=[60])
    bench = Bench(simulated(policy), **LONG)
    await bench.begin()
    bench.session.abandon()
    with pytest.raises(RuntimeError, match="closed session"):
        await bench.session.generate()
    assert bench.counted("routing_payloads_total", kind="recovery") == 0
    assert_whole(await bench.finish(), 0)  # they are fetched again
    assert bench.counted("routing_payloads_total", kind="recovery") == 1


async def test_everything_is_fetched_again_and_no_flip_counted_when_the_next_turn_runs_elsewhere() -> None:
    policy = Watched(stop_at=LENGTHS_AFTER_TURNS)
    first, second = recorded(policy), recorded(policy, "engine-1")
    bench = Bench(first, second, flip_sample=1.0, **LONG)
    await first_turn(bench)
    bench.pool.quarantine_engine("engine-0", EngineError("gone"))
    await bench.session.generate()
    assert_whole(await bench.finish(), 0)
    assert (first.asked, second.asked) == ([0], [0])
    assert flips(bench) == (0, 0)


@pytest.mark.parametrize(("surplus", "found"), [(0, (1, 0.5)), (20, (0, 0))])
async def test_the_share_of_flipped_experts_is_that_of_the_sampled_tokens_only(
    surplus: int, found: tuple[int, float]
) -> None:
    """Versions 0 and 1 are marked by the experts (0, 1) and (1, 2): half of the old ones are kept.

    Replaced rows that are too many cannot be compared; the trajectory is whole without that.
    """
    bench = scripted(
        lambda r: sampled(5, "abort", 0, prompt=PROMPT + surplus),
        lambda r: sampled(3, "stop", 1, prompt=PROMPT + 5),
        flip_sample=1.0,
    )
    await bench.session.generate()
    assert row_versions((await bench.finish()).trace) == [1] * (PROMPT + 7)
    assert flips(bench) == found
