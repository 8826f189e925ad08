"""The checker of the simulation reads rows of any version, and raises no false alarm."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from async_rl.engine_protocol import Chunk, GenerateRequest, SamplingParams
from async_rl.engines.simulated import routing_rows
from tests.support.small_run import small_run
from verification.simulation.invariant_checker import InvariantChecker, caller_is_given_up, versions_of_rows
from verification.simulation.scenario import FACTS


@pytest.mark.parametrize("newest", [0, 61, 62, 100_000])
def test_the_version_of_a_row_is_read_however_many_there_were(newest: int) -> None:
    rng = np.random.default_rng(newest)
    versions = rng.integers(max(0, newest - 50), newest + 3, 300).astype(np.int32)
    tokens = rng.integers(0, FACTS.vocab_size, 300).astype(np.int32)
    rows = routing_rows(tokens, versions, FACTS)
    assert versions_of_rows(rows, tokens, newest).tolist() == versions.tolist()


def request_of(tokens: list[int], *, number: int = 0, stop: tuple[str, ...] = ()) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{number:032x}",
        input_ids=np.array(tokens, np.int32),
        max_new_tokens=1,
        sampling=SamplingParams(stop=stop),
        return_routing=True,
    )


@pytest.mark.parametrize(
    ("sampled", "then", "continues"),
    [
        ([156, 95, 188], [284, 156, 4, 40], True),  # "284 156" ends the turn within the chunk
        ([95, 24, 156, 188], [284, 95, 24, 156, 4], True),
        ([156, 95, 188], [284, 4, 40], False),
        ([95, 188], [284, 95, 4], False),
    ],
)
async def test_what_follows_a_stop_string_in_a_chunk_is_not_kept(
    sampled: list[int], then: list[int], continues: bool
) -> None:
    checker = InvariantChecker(small_run(0), digests=False)
    request = request_of([284], stop=("4 1",))
    checker.call_begins("engine-0", request, 0, 0)
    checker.call_ends(request, [Chunk.of(sampled, [-1.0] * len(sampled))], None)
    checker.call_begins("engine-0", request_of(then), 0, 0)
    assert (checker.violations == []) == continues, checker.violations


@pytest.mark.parametrize("given_up", [False, True])
async def test_a_call_of_a_worker_that_was_given_up_counts_for_no_call_of_its_successor(
    given_up: bool,
) -> None:
    """One that is cut off samples on, while another worker continues the trajectory from the journal."""
    checker = InvariantChecker(small_run(0), digests=False)

    async def stale_call() -> None:
        caller_is_given_up.set(lambda: given_up)
        checker.call_ends(request_of([284]), [Chunk.of([95, 24], [-1.0, -1.0])], None)

    name = asyncio.current_task().get_name()  # type: ignore[union-attr]
    checker.call_begins("engine-0", request_of([284]), 0, 0)
    await asyncio.create_task(stale_call(), name=name)
    checker.call_begins("engine-1", request_of([284]), 0, 0)
    assert (checker.violations == []) == given_up, checker.violations
