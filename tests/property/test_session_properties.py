"""Whatever happens to a trajectory on its way: its routing rows are T-1 and true, or flagged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import groupby
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl import routing
from async_rl.engine_protocol import (
    Chunk,
    EngineCapacity,
    Finish,
    GenerateRequest,
    InterruptMode,
    RoutingPayload,
)
from async_rl.engines.simulated import routing_rows
from async_rl.errors import AlignmentError, EngineError, PromptTooLong
from async_rl.planning.virtual_time import run_virtual
from async_rl.routing import fit, make_trace, splice
from async_rl.types import NEVER_COMPUTED, RoutingTrace, StoredTrajectory, Trajectory, VersionSpan
from tests.support.sessions import FACTS, Bench, row_versions
from tests.support.trajectories import make_rows, verify


class Step(NamedTuple):
    """The result of one engine call."""

    tokens: int
    end: Literal["stop", "abort", "die"]
    rows: bool
    update: Literal["none", "within", "after"]


class Tool(NamedTuple):
    """What the agent loop does between two turns."""

    messages: int
    edit: int | None
    """Where a token of the history is changed, if one is."""


class World(NamedTuple):
    """Everything that is left to chance."""

    merge: Literal["replace", "splice"]
    interrupt: InterruptMode
    steps: list[Step]
    tools: list[Tool]
    recoveries: list[bool]
    """Whether each call for rows alone brings some."""
    knows_versions: bool
    """Whether engines report the weight version of each row."""
    honours_start: bool
    measures_flips: bool
    max_context_tokens: int


steps = st.builds(
    Step,
    tokens=st.integers(0, 6),
    end=st.sampled_from(["stop", "stop", "abort", "abort", "die"]),
    rows=st.booleans() | st.just(True),
    update=st.sampled_from(["none", "none", "within", "after"]),
)
tools = st.builds(Tool, messages=st.integers(1, 3), edit=st.none() | st.none() | st.integers(0, 12))
modes = st.sampled_from(
    [("replace", "abort"), ("replace", "retract"), ("splice", "abort"), ("splice", "in_place")]
)
worlds = st.builds(
    lambda mode, **others: World(merge=mode[0], interrupt=mode[1], **others),
    mode=modes,
    steps=st.lists(steps, max_size=8),  # more without a token would be given up
    tools=st.lists(tools, max_size=4),
    recoveries=st.lists(st.booleans(), max_size=4),
    knows_versions=st.booleans(),
    honours_start=st.booleans(),
    measures_flips=st.booleans(),
    max_context_tokens=st.integers(8, 60),
)


class Fate:
    """An engine that follows a list of steps, at last stopping each turn after one token.

    Its rows name token, position and version as those of a simulated engine do.
    """

    def __init__(self, engine_id: str, world: World) -> None:
        self.engine_id = engine_id
        self.capacity = EngineCapacity()
        self.world = world
        self.steps = list(world.steps)
        self.recoveries = list(world.recoveries)
        self.version = 0
        self.bench: Bench | None = None
        self.spoil: Callable[[RoutingPayload], RoutingPayload] = lambda payload: payload

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk | Finish]:
        if request.max_new_tokens == 0:
            rows = self.recoveries.pop(0) if self.recoveries else True
            yield self._finish(request, [], [self.version] * len(request.input_ids), "length", rows)
            return
        step = self.steps.pop(0) if self.steps else Step(1, "stop", True, "none")
        count = min(step.tokens, request.max_new_tokens)
        versions = [self.version] * count
        if step.update == "within" and self.world.interrupt != "abort" and count > 1:
            self._update()
            versions[count // 2 :] = [self.version] * (count - count // 2)
        tokens = [20 + (11 * len(request.input_ids) + 5 * i) % 400 for i in range(count)]
        if tokens:
            yield Chunk.of(tokens, [-0.5] * count)
        if step.end == "die":
            assert self.bench is not None
            loop = asyncio.get_running_loop()
            loop.call_soon(self.bench.pool.rejoin_engine, self.engine_id)
            loop.call_soon(self.bench.pool.serve_engine, self.engine_id, self.version)
            raise EngineError("gone")
        if self.world.interrupt == "in_place":  # what was fed before an update stays
            first = versions[0] if versions else self.version
            fed = [first] * (len(request.input_ids) - 1) + versions
        else:
            fed = [self.version] * (len(request.input_ids) - 1 + count)
        full = count == request.max_new_tokens
        reason = "length" if full else "abort" if step.end == "abort" or not count else "stop"
        yield self._finish(request, tokens, fed, reason, step.rows, versions)
        if step.update == "after":
            self._update()

    def _finish(
        self,
        request: GenerateRequest,
        tokens: list[int],
        fed: list[int],
        reason: Any,
        rows: bool,
        versions: list[int] | None = None,
    ) -> Finish:
        start = request.routing_start if self.world.honours_start else 0
        sequence = np.array([*request.input_ids.tolist(), *tokens], np.int32)[:-1]
        data = np.array([sequence, fed[: len(sequence)]], np.int32)[:, start:]
        payload = RoutingPayload(
            data=data.tobytes(), num_rows=data.shape[1], weight_version=self.version, start=start
        )
        return Finish(
            reason=reason,
            version_spans=spans_of(versions or []),
            routing=self.spoil(payload) if rows else None,
        )

    def _update(self) -> None:
        assert self.bench is not None
        self.version += 1
        self.bench.pool.serve_engine(self.engine_id, self.version)

    def decode_routing(self, payload: RoutingPayload) -> RoutingTrace:
        fed = np.frombuffer(payload.data, np.int32).reshape(2, -1)
        return routing.make_trace(
            routing_rows(fed[0], fed[1], FACTS, start=payload.start),
            FACTS.num_experts,
            payload.weight_version,
            moe_layers=FACTS.moe_layers,
            row_versions=fed[1] if self.world.knows_versions else None,
        )


def spans_of(versions: list[int]) -> tuple[VersionSpan, ...]:
    spans, start = [], 0
    for version, run in groupby(versions):
        end = start + len(list(run))
        spans.append(VersionSpan(start=start, end=end, weight_version=version))
        start = end
    return tuple(spans)


async def live(world: World, engine: Fate) -> Trajectory:
    """A trajectory with as many turns as fit into the context."""
    bench = Bench(
        engine,  # type: ignore[arg-type]
        merge=world.merge,
        interrupt=world.interrupt,
        flip_sample=float(world.measures_flips),
        max_context_tokens=world.max_context_tokens,
        max_new_tokens=16,
    )
    engine.bench = bench
    await bench.begin()
    try:
        for tool in world.tools:
            bench.session.add_messages([{"role": "tool", "content": "4"}] * tool.messages)
            if tool.edit is not None:
                edit(bench, tool.edit)
            if not bench.session.remaining_tokens:
                break
            await bench.session.generate()
    except PromptTooLong:
        pass  # the trajectory ends as it is, as the manager lets it
    return await bench.finish()


def edit(bench: Bench, place: int) -> None:
    tokens = bench.session.transcript.tokens
    place %= len(tokens)
    tokens.token_ids[place] += 1
    begin = 0
    for index, segment in enumerate(tokens.segments):
        end = begin + len(segment.token_ids)
        copy = tokens.token_ids[begin:end].copy()
        tokens.segments[index] = msgspec.structs.replace(segment, token_ids=copy)
        begin = end


@pytest.mark.case(13, 20, 21, 24)
@settings(max_examples=300, deadline=None)
@given(worlds)
def test_rows_are_one_less_than_tokens_and_true_or_flagged(world: World) -> None:
    engine = Fate("engine-0", world)
    trajectory = run_virtual(live(world, engine))
    trace = trajectory.trace
    assert trace is not None
    verify(trace, trajectory.token_ids, FACTS.moe_layers)
    assert len(trace.rows) == trajectory.num_tokens - 1
    assert trajectory.num_tokens <= world.max_context_tokens
    versions = np.array(row_versions(trace), np.int32)
    assert len(versions) == len(trace.rows)
    assert np.array_equal(trace.valid, versions != NEVER_COMPUTED)
    # Each row is what the version that it claims computes for its token.
    fed = trajectory.token_ids[:-1]
    expected = routing_rows(fed, versions, FACTS)
    assert np.array_equal(trace.rows[trace.valid], expected[trace.valid])
    # What is missing is missing at the end; and all that predicts a sampled token is there, if it could be.
    count = int(trace.valid.sum())
    assert trace.valid[:count].all()
    if all(world.recoveries):
        assert count >= np.flatnonzero(trajectory.response_mask).max(initial=0)
    known = versions[trace.valid]
    assert (np.diff(known) >= 0).all()
    if world.merge == "replace":
        assert len(set(known.tolist())) <= 1
    # Versions partition the sampled tokens, and age goes by the oldest of them.
    sampled = trajectory.weight_versions[trajectory.response_mask]
    assert (sampled >= 0).all()
    assert StoredTrajectory.of(trajectory).oldest_weight_version == (sampled.min() if len(sampled) else None)


@pytest.mark.case(15)
@settings(max_examples=200, deadline=None)
@given(worlds, st.integers(0, 5))
def test_sequences_laid_end_to_end_are_never_used(world: World, spoiled: int) -> None:
    """One answer comes with the rows of the one before it in front of its own."""
    world = world._replace(honours_start=False)
    engine = Fate("engine-0", world)
    payloads: list[RoutingPayload] = []

    def concatenate(payload: RoutingPayload) -> RoutingPayload:
        payloads.append(payload)
        if len(payloads) - 1 != spoiled:
            return payload
        before = payloads[-2] if len(payloads) > 1 else payload
        parts = [np.frombuffer(part.data, np.int32).reshape(2, -1) for part in (before, payload)]
        both = np.concatenate(parts, axis=1)
        return msgspec.structs.replace(payload, data=both.tobytes(), num_rows=both.shape[1])

    engine.spoil = concatenate
    try:
        trajectory = run_virtual(live(world, engine))
    except AlignmentError as error:
        reason = error.reason
    else:
        reason = "wrong_prefix"
        trace = trajectory.trace
        assert trace is not None
        expected = routing_rows(trajectory.token_ids[:-1], np.array(row_versions(trace), np.int32), FACTS)
        assert np.array_equal(trace.rows[trace.valid], expected[trace.valid])
        if len(payloads) <= spoiled:
            return  # nothing was spoiled
        if world.merge == "replace" and len(payloads) - 1 > spoiled:
            return  # replaced without ever being looked at
    assert engine.bench is not None
    assert engine.bench.counted("replay_rejected_total", reason=reason) >= 1


# -- routing rows over random interruptions ------------------------------------------------------------


calls = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6)
"""Per engine call: tokens sampled, and whether rows came with them."""


TEXT = np.arange(100, dtype=np.int32)
LAYERS = (0, 2)


def reported(num_tokens: int, version: int, start: int = 0) -> RoutingTrace:
    rows = make_rows(num_tokens - 1, seed=version)[start:]
    return make_trace(rows, 8, version, moe_layers=LAYERS, token_ids=TEXT[: num_tokens - 1])


def version_of(trace: RoutingTrace) -> list[int]:
    return [span.weight_version for span in trace.spans for _ in range(span.start, span.end)]


@given(st.integers(1, 4), calls, st.booleans())
def test_each_row_is_of_the_first_response_that_covered_it_when_spliced(
    prompt: int, calls: list[tuple[int, bool]], fit_between: bool
) -> None:
    tokens = prompt
    merged: RoutingTrace | None = None
    expected: list[tuple[int, np.ndarray]] = []
    for version, (sampled, has_rows) in enumerate(calls):
        tokens += sampled
        if not has_rows:
            continue
        new = reported(tokens, version)
        merged = splice(merged, new)
        expected += [(version, row) for row in new.rows[len(expected) :]]
        if fit_between:
            merged = fit(merged, TEXT[:tokens]) if merged is not None else None
    if merged is None:
        assert not expected
        return
    fitted = fit(merged, TEXT[:tokens])
    verify(fitted, TEXT[:tokens], LAYERS)
    missing = tokens - 1 - len(expected)
    assert version_of(fitted) == [v for v, _ in expected] + [NEVER_COMPUTED] * missing
    for row, (_, wanted) in zip(fitted.rows, expected, strict=False):
        assert np.array_equal(row, wanted)
