"""Why a run is slower than expected, in plain arithmetic."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from async_rl.planning.run_comparison import TimeParts, causes_of
from async_rl.planning.run_fit import SlowEngine

BEFORE = TimeParts(
    tokens_per_s=1000.0,
    step_s=0.0005,
    handover_s=1.0,
    step_tokens=10_000,
    in_flight=64,
    tools_s=4.0,
    rewards_s=1.0,
    first_tokens_s=1.0,
    token_s=0.02,
    answer_tokens=200,
)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"tools_s": 8.0}, ["tools take 8 s of a trajectory, 4 s before"]),
        ({"rewards_s": 5.0}, ["rewards take 5 s of a trajectory, 1 s before"]),
        ({"first_tokens_s": 3.0}, ["first tokens take 3 s of a trajectory, 1 s before"]),
        ({"token_s": 0.03}, ["decoding a token takes 1.5 times as long"]),
        (
            {"token_s": 0.03, "answer_tokens": 400},
            ["decoding a token takes 1.5 times as long (answers have 400 tokens, 200 before)"],
        ),
        (
            {"answer_tokens": 100},
            ["answers have 100 tokens, 200 before: the rest of a trajectory's time brings fewer"],
        ),
        (
            {"in_flight": 40},
            ["40 trajectories are in flight, 64 before: the staleness bound or stragglers hold others back"],
        ),
        ({"step_s": 0.00075}, ["trainer steps take 1.5 times as long for a token"]),
        ({"handover_s": 3.5}, ["weight updates pause the trainer 3.5 s a step, 1 s before"]),
        ({}, []),
    ],
)
def test_a_part_is_named_when_it_became_slower(now: dict[str, float], said: list[str]) -> None:
    after = replace(BEFORE, tokens_per_s=800.0, **now)
    assert causes_of(BEFORE, after, 1000.0, []) == said
    assert causes_of(BEFORE, replace(after, tokens_per_s=1000.0), 1000.0, []) == []


def test_the_worst_part_comes_first_when_several_became_slower() -> None:
    """A token takes 0.25 ms longer, 0.15 of them in steps; tools cost two thirds of the rest."""
    after = replace(BEFORE, tokens_per_s=800.0, step_s=0.00065, tools_s=7.0, rewards_s=2.5)
    (first, second) = causes_of(BEFORE, after, 1000.0, [])
    assert first == "trainer steps take 1.3 times as long for a token"
    assert second == "tools take 7 s of a trajectory, 4 s before"
    after = replace(after, step_s=0.00056)
    first, second, third = causes_of(BEFORE, replace(after, tools_s=5.8), 1000.0, [])
    assert first.startswith("tools take 5.8 s")
    assert second.startswith("rewards take 2.5 s")
    assert third.startswith("trainer steps take 1.1 times")


def test_an_engine_is_named_when_it_is_slow_and_its_part_grew_or_not() -> None:
    slow = [SlowEngine("engine-3", "sends a first token", 4.0, 0.5)]
    said = ["engine-3 sends a first token 4.0 times as slowly as the others"]
    grown = replace(BEFORE, tokens_per_s=800.0, first_tokens_s=3.0)
    assert causes_of(BEFORE, grown, 1000.0, slow) == said
    was_slow = replace(BEFORE, first_tokens_s=3.0)
    assert causes_of(was_slow, grown, 1000.0, slow) == said


def test_rollouts_are_not_named_when_the_trainer_lost_the_time() -> None:
    """The tools are slower, too, and cost nothing: the trainer never waits for them."""
    after = replace(BEFORE, tokens_per_s=800.0, step_s=0.00075, tools_s=8.0)
    assert causes_of(BEFORE, after, 1000.0, []) == ["trainer steps take 1.5 times as long for a token"]
