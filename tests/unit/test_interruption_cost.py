"""What updates cost by arithmetic: by hand, and against the figures that were simulated."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from async_rl.config import Config
from async_rl.observability.records import StepRecord
from async_rl.planning.interruption_cost import (
    describe_interruption,
    describe_measured,
    interruption_cost,
    nearest_change,
)
from async_rl.planning.workload import Workload, fluid_rate
from benchmarks.support.worlds import WORLDS
from tests.support.run_config import config_with


def job(*overrides: str) -> Config:
    """Two engines of four slots, batches of two groups of four."""
    return config_with(
        *overrides,
        engine={"kind": "simulated", "num_engines": 2, "max_running_requests": 4},
        rollout={"group_size": 4, "max_concurrent_trajectories": 8, "max_staleness": 3},
        trainer={"groups_per_batch": 2},
        routing={"replay": "r3", "merge": "replace"},
        weights={"interrupt": "abort"},
    )


EQUAL = Workload(
    prompt_tokens=30,
    mean_tokens=100,
    max_tokens=100,
    sigma=0.0,
    decode_base_s=0.010,
    decode_per_call_s=0.001,
    prefill_tokens_per_s=1000.0,
    sync_s=0.5,
    train_tokens_per_s=1e9,
    shares_prompts=False,
)
"""Each engine has half of a batch: 4 answers of 100 tokens in steps of 14 ms, after 4 prompts of 30 ms."""


def test_a_version_is_that_of_pencil_and_paper() -> None:
    cost = interruption_cost(job(), EQUAL)
    # 4 calls of an engine, with 30 tokens of a prompt and half of an answer.
    assert cost.tokens == 2 * 4 * 80
    assert cost.version_s == pytest.approx(1.4 + 0.12 + 0.5 + 0.32)
    assert cost.of_in_place == pytest.approx((1.4 + 0.12 + 0.5) / cost.version_s)
    assert cost.longest == pytest.approx(1.0)
    assert cost.bound == 2
    every = interruption_cost(job("weights.every=2"), EQUAL)
    assert every.version_s == pytest.approx(1.4 + 0.12 + (0.5 + 0.32) / 2)
    assert every.bound == 3
    in_place = interruption_cost(job("weights.interrupt=in_place", "routing.merge=splice"), EQUAL)
    assert (in_place.tokens, in_place.of_in_place) == (0, 1)


def test_turns_and_shared_prompts_count_once_and_the_trainer_when_it_is_slower() -> None:
    turns = replace(EQUAL, turns=3, tool_tokens=10, tool_s=2.0, shares_prompts=True)
    # A quarter of the prompt, and 20 tokens of tools; the longest answer waits for them.
    cost = interruption_cost(job(), turns)
    prefills_s = 4 * (7.5 + 20) / 1000
    again_s = 4 * (30 + 10 + 50) / 1000
    assert cost.version_s == pytest.approx(1.4 + prefills_s + 0.5 + again_s)
    assert cost.longest == pytest.approx((1.4 + 4.0) / 1.4)
    slow = replace(EQUAL, train_tokens_per_s=2 * 4 * 130 / 10.0, publish_s=1.0)
    cost = interruption_cost(job(), slow)
    assert cost.version_s == pytest.approx(10 + 0.5 + 1.0)
    assert cost.of_in_place == 1
    change = nearest_change(job(), slow)  # which sends weights half as often
    assert change is not None
    assert change.gain == pytest.approx(11.5 / 10.75)
    assert nearest_change(job("weights.overlap=true"), slow) is None


def test_the_longest_answers_set_the_pace_when_the_bound_is_below_them() -> None:
    tail = replace(EQUAL, max_tokens=1000, sigma=1.0)
    config = job("rollout.max_staleness=1")
    cost = interruption_cost(config, tail)
    still_s = 0.12 + 0.5 + 4 * tail.mean_context / 1000
    assert cost.version_s == pytest.approx(1000 * 0.014 / 2 + still_s)
    assert cost.bound > 1
    change = nearest_change(config, tail)
    assert change is not None
    assert change.config.rollout.max_staleness == cost.bound
    assert change.overrides == (f"rollout.max_staleness={cost.bound}",)
    assert change.gain == pytest.approx(cost.version_s / interruption_cost(change.config, tail).version_s)


@pytest.mark.parametrize(
    ("overrides", "changed", "gain"),
    [
        # The bound of 3 is enough for the longest answers with every second version.
        ([], "weights.every=2", 2.34 / 1.93),
        # Of 4 that would be needed with every third version only 3 are there: half of the gain.
        (["weights.every=2"], "weights.every=3", 1 + (1.93 / (1.52 + 0.82 / 3) - 1) / 2),
        # Not even every second version is within the bound.
        (
            ["rollout.max_staleness=1", "weights.interrupt=retract"],
            "weights.interrupt=in_place routing.merge=splice",
            2.34 / 2.02,
        ),
    ],
)
def test_the_nearest_change_is_the_exact_one_while_it_helps(
    overrides: list[str], changed: str, gain: float
) -> None:
    change = nearest_change(job(*overrides), EQUAL)
    assert change is not None
    assert " ".join(change.overrides) == changed
    assert change.gain == pytest.approx(gain)
    config = change.config
    assert (config.weights.interrupt == "in_place") is ("in_place" in changed)
    assert config.routing.merge == ("splice" if "in_place" in changed else "replace")


def test_nothing_is_said_when_engines_wait_for_the_trainer_anyway() -> None:
    config = job("rollout.max_staleness=0")
    assert nearest_change(config, EQUAL) is None
    assert describe_interruption(config, EQUAL, None) == []
    assert interruption_cost(config, EQUAL).tokens == 0


def test_the_lines_say_cost_bound_and_change() -> None:
    config = job("rollout.max_staleness=1")
    lines = describe_interruption(config, EQUAL, nearest_change(config, EQUAL))
    assert "abort prefills 640 tokens again at each update, 0.80 for each sampled" in lines[0]
    assert "0.86 of what in_place would reach" in lines[0]
    assert "rollout.max_staleness=1, and with 2 none does" in lines[1]
    assert "weights.interrupt=in_place routing.merge=splice would reach 1.16 times" in lines[2]
    (unknown, bound) = describe_interruption(config, EQUAL, None, knows_speeds=False)
    assert "640 tokens" in unknown
    assert "0.86" not in unknown
    assert bound == lines[1]
    kept = job("weights.interrupt=in_place", "routing.merge=splice")
    (line,) = describe_interruption(kept, EQUAL, None)
    assert "abort, which is exact, would reach 0.86 of its rate" in line


@pytest.mark.parametrize(
    ("world", "groups", "interrupt", "every", "relative"),
    [
        ("base", 128, "abort", 1, 0.784),
        ("base", 128, "in_place", 1, 0.96),
        ("long_prompts", 128, "abort", 1, 0.643),
        ("long_prompts", 128, "in_place", 1, 0.80),
        ("long_tail", 128, "abort", 1, 0.584),
        ("long_tail", 128, "abort", 2, 0.623),
        ("long_tail", 128, "in_place", 1, 0.67),
        ("hardware", 128, "abort", 1, 0.91),
    ],
)
def test_the_arithmetic_is_near_the_simulation(
    world: str, groups: int, interrupt: str, every: int, relative: float
) -> None:
    """The figures are those of docs/reference/performance.md, "Scheduling policies"."""
    of = WORLDS[world]
    config = config_with(
        engine={"kind": "simulated", "num_engines": of.engines, "max_running_requests": of.slots},
        rollout={
            "group_size": of.group_size,
            "max_concurrent_trajectories": of.in_flight,
            "max_staleness": of.bounds[groups],
        },
        trainer={"groups_per_batch": groups},
        weights={"interrupt": interrupt, "every": every},
        routing={"replay": "off"},
    )
    cost = interruption_cost(config, of.workload)
    batch = groups * of.group_size
    fluid = fluid_rate(of.engines, of.slots, of.workload)
    assert batch / cost.version_s / fluid == pytest.approx(relative, abs=0.045)


def test_a_run_says_which_bound_and_change_would_help_when_steps_have_measured_it() -> None:
    """Versions of 4 s: 8 answers of 100 tokens on average, the longest of 1,000, and a second of updates."""
    steps = [
        StepRecord(
            step=step, tokens=1040, trained_tokens=800, trajectories=8, step_s=0.1, tokens_per_s=200.0,
            sampled_tokens_max=1000, sync_parts={"publish": 0.2, "interrupt": 0.3, "load": 0.5},
            weight_version=step, time_s=4.0 * step,
        )
        for step in range(1, 21)
    ]  # fmt: skip
    said = describe_measured(job(), steps)
    bound = int(said["staleness"].removeprefix("the longest answers ask for "))
    assert bound > 3
    assert said["throughput"].startswith(f"rollout.max_staleness={bound} would reach ")
    assert said["throughput"].endswith(" times as many (exact; tokens may be older)")
    assert "staleness" not in describe_measured(job(f"rollout.max_staleness={bound}"), steps)
    assert describe_measured(job(), steps[:5]) == {}
    assert describe_measured(job("rollout.max_staleness=0"), steps) == {}
    assert describe_measured(job("engine.urls_file=/none/urls.txt"), steps) == {}
    assert describe_measured(job(), [replace(step, sampled_tokens_max=0) for step in steps]) == {}
