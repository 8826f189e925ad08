"""The real scheduler in virtual time: figures that can be computed by hand, and its targets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.cli.plan import bottleneck, coarsening, scaled_job, workload_for
from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.planning.planned_job import PlannedRun, simulate, simulate_run
from async_rl.planning.workload import EndlessTasks, Workload, fluid_rate, num_engines
from tests.support.run_config import config_with

SHORT = PlannedRun(versions=4, warmup=2)


def job(*overrides: str) -> Config:
    """One engine of four slots, batches of one group of four, and no other limits."""
    tree = {
        "model": {"path": "none"},
        "data": {"path": "none.jsonl"},
        "engine": {"kind": "simulated", "num_engines": 1, "max_running_requests": 4},
        "rollout": {"group_size": 4, "max_concurrent_trajectories": 4, "max_staleness": 3},
        "weights": {"interrupt": "in_place"},
        "routing": {"replay": "off"},
        "trainer": {"groups_per_batch": 1},
    }
    return config_with(*overrides, **tree)


EQUAL = Workload(
    prompt_tokens=30,
    mean_tokens=100,
    max_tokens=100,
    sigma=0.0,
    decode_base_s=0.010,
    decode_per_call_s=0.001,
    prefill_tokens_per_s=1000.0,
    sync_s=0.0,
    train_tokens_per_s=1e9,
    shares_prompts=False,
)
"""Four answers of 100 tokens in steps of 14 ms, after 4 prompts of 30 tokens at a millisecond each."""


def test_figures_are_those_of_pencil_and_paper_when_all_answers_are_equal() -> None:
    plan = simulate(job(), EQUAL, SHORT)
    round_s = 4 * 0.030 + 100 * 0.014
    assert plan.fluid_trajectories_per_s == pytest.approx(4 / (100 * 0.014))
    assert plan.trajectories_per_s == pytest.approx(4 / round_s)
    assert plan.relative == pytest.approx(100 * 0.014 / round_s)
    assert plan.tokens_per_s == pytest.approx(400 / round_s)
    assert plan.engines_prefill == pytest.approx(0.120 / round_s)
    assert plan.engines_empty == pytest.approx(0.0, abs=1e-6)
    assert plan.trainer_idle == pytest.approx(1.0, abs=1e-3)
    assert plan.prefilled == pytest.approx(0.3)
    assert plan.dropped == 0
    assert plan.ks_lengths == 0


def test_weight_updates_cost_their_pause_when_nothing_else_does() -> None:
    plan = simulate(job(), replace(EQUAL, sync_s=0.5), SHORT)
    assert plan.engines_still == pytest.approx(0.5 / (0.12 + 1.4 + 0.5), rel=0.01)
    assert plan.relative == pytest.approx(1.4 / (0.12 + 1.4 + 0.5), rel=0.01)
    assert "Weight updates" in bottleneck(plan, job(), EQUAL)


def test_the_bottleneck_is_named_when_it_is_the_trainer_or_concurrency() -> None:
    slow = replace(EQUAL, train_tokens_per_s=4 * 130 / 3.0)  # 3 s a step
    plan = simulate(job(), slow, SHORT)
    assert plan.trajectories_per_s == pytest.approx(4 / 3.0)
    assert plan.staleness_max == 3
    assert bottleneck(plan, job(), slow).startswith("The trainer")
    config = job("rollout.max_concurrent_trajectories=2")
    plan = simulate(config, EQUAL, SHORT)
    assert "raise rollout.max_concurrent_trajectories to 4" in bottleneck(plan, config, EQUAL)


def test_prefix_is_found_and_the_tool_costs_its_time_when_answers_have_turns() -> None:
    turns = replace(EQUAL, turns=2, tool_tokens=10, tool_s=1.0)
    plan = simulate(job(), turns, SHORT)
    # Each sibling is fed its prompt, then the 10 tokens of the tool; what it sampled is in the cache.
    assert plan.prefilled == pytest.approx(0.4)
    assert plan.trajectories_per_s == pytest.approx(4 / (4 * 0.040 + 1.4 + 1.0), rel=0.02)


def test_siblings_that_wait_together_prefill_their_prompt_once_when_engines_share_it() -> None:
    plan = simulate(job(), replace(EQUAL, shares_prompts=True), SHORT)
    # The first one's 30 tokens, and the last token of each of the other three, of 400 sampled ones.
    assert plan.prefilled == pytest.approx(33 / 400)


def test_an_update_is_longer_by_the_calls_that_it_aborts() -> None:
    abort = job("weights.interrupt=abort", "rollout.max_concurrent_trajectories=8")
    none, each = (simulate(abort, replace(EQUAL, abort_call_s=s), SHORT) for s in (0.0, 0.1))
    assert none.trainer_syncs == 0
    version_s = each.seconds / SHORT.versions
    assert each.trainer_syncs * version_s == pytest.approx(8 * 0.1)  # those that wait for a slot, too


def test_tool_times_have_the_stated_mean_and_spread_and_belong_to_their_turn() -> None:
    world = replace(EQUAL, turns=4, tool_tokens=10, tool_s=20.0, tool_sigma=0.8)
    tasks = EndlessTasks(world, 1, 3, 4)
    siblings = [turns for task in range(2000) for turns in tasks.turns(task)]
    waits = np.array([[turn.wait_s for turn in turns] for turns in siblings])
    assert (waits[:, 0] == 0).all()
    tools = waits[:, 1:].ravel()
    assert tools.mean() == pytest.approx(20.0, rel=0.02)
    assert np.log(tools).std() == pytest.approx(0.8, rel=0.02)
    assert len(np.unique(tools)) == len(tools)
    assert EndlessTasks(world, 1, 3, 4).turns(1234) == siblings[4 * 1234 : 4 * 1235]
    # More siblings, turns and another mean length leave each of these times as it is.
    other = EndlessTasks(replace(world, turns=6, mean_tokens=90), 1, 3, 8).turns(1234)[2]
    assert [turn.wait_s for turn in other[:4]] == [turn.wait_s for turn in siblings[4 * 1234 + 2]]
    equal = EndlessTasks(replace(world, tool_sigma=0.0), 1, 3, 4).turns(0)[0]
    assert [turn.wait_s for turn in equal] == [0.0, 20.0, 20.0, 20.0]


def test_tool_takes_no_longer_than_its_limit_which_is_that_of_the_config() -> None:
    world = replace(EQUAL, turns=4, tool_tokens=10, tool_s=20.0, tool_sigma=1.2)
    cut = replace(world, tool_limit_s=30.0)
    free_s, cut_s = (
        np.array([turn.wait_s for task in range(500) for turn in EndlessTasks(each, 1, 3, 1).turns(task)[0]])
        for each in (world, cut)
    )
    assert free_s.max() > 100
    assert (cut_s == np.minimum(free_s, 30.0)).all()
    assert workload_for(job("rollout.tool_timeout_s=45"), None, {}).tool_limit_s == 45
    assert workload_for(job("rollout.tool_timeout_s=45"), None, {"tool_limit_s": 7}).tool_limit_s == 7


def test_plan_is_the_same_when_the_seed_is() -> None:
    seeds = [replace(SHORT, seed=seed) for seed in (1, 1, 2)]
    one, again, other = (simulate(job(), replace(EQUAL, sigma=0.8), run).seconds for run in seeds)
    assert one == again != other


def test_fluid_bound_and_lengths_are_those_of_the_formula_when_engines_are_full() -> None:
    world = Workload()
    assert fluid_rate(8, 128, world) == pytest.approx(8 * 128 / 0.01968 / world.expected_tokens)
    lengths = [n for task in range(3000) for n in EndlessTasks(world, 1, 0, 8).answers(task)]
    assert sum(lengths) / len(lengths) == pytest.approx(world.expected_tokens, rel=0.01)
    assert EndlessTasks(world, 1, 0, 8).ks_distance(lengths) < 0.012  # type: ignore[arg-type]


def test_batch_and_trainer_grow_with_the_engines_when_asked_to() -> None:
    config, workload = scaled_job(job(), EQUAL, 16, grow=True)
    assert config.engine.num_engines == 16
    assert config.rollout.max_concurrent_trajectories == 64
    assert config.trainer.groups_per_batch == 16
    assert workload.train_tokens_per_s == 16e9
    config, workload = scaled_job(job(), EQUAL, 16, grow=False)
    assert config.trainer.groups_per_batch == 1
    assert workload.train_tokens_per_s == 1e9


@pytest.mark.parametrize(("engines", "grow", "coarsen"), [(16, True, 1), (4096, True, 64), (256, False, 2)])
def test_groups_and_two_slots_remain_when_large_jobs_are_simulated_coarsely(
    engines: int, grow: bool, coarsen: int
) -> None:
    slots = "engine.max_running_requests=128", "rollout.max_concurrent_trajectories=128"
    config, _ = scaled_job(job(*slots, "trainer.groups_per_batch=2"), EQUAL, engines, grow=grow)
    assert coarsening(config) == coarsen


def test_batches_keep_their_size_when_large_jobs_are_simulated_coarsely() -> None:
    large = ("engine.max_running_requests=512", "rollout.max_concurrent_trajectories=65536")
    twelve, two = (job(*large, f"trainer.groups_per_batch={number}") for number in (12, 2))
    assert [coarsening(twelve), coarsening(two), coarsening(twelve, two)] == [4, 2, 2]


def test_a_limit_of_calls_counts_those_that_simulated_ones_stand_for() -> None:
    config = job(
        "engine.max_running_requests=64",
        "engine.max_calls=8",
        "rollout.max_concurrent_trajectories=64",
        "trainer.groups_per_batch=8",
    )
    exact, coarse = (simulate(config, EQUAL, replace(SHORT, coarsen=coarsen)) for coarsen in (1, 4))
    assert exact.running_calls == pytest.approx(8, rel=0.3)
    assert coarse.running_calls == pytest.approx(exact.running_calls, rel=0.1)


def test_masked_tokens_are_not_trained_on() -> None:
    config = job(
        "rollout.max_staleness=1",
        "rollout.staleness_policy=mask_tokens",
        "rollout.group_size=2",
    )
    work, how = replace(EQUAL, sigma=1.2, max_tokens=1000), replace(SHORT, versions=40)
    run = simulate_run(config, work, how, lambda scale: EndlessTasks(work, scale, 0, 2))
    assert sum(each.masked_tokens for each in run.records) > 0
    for each in run.records:
        sampled = each.tokens - 30 * each.trajectories
        assert each.trained_tokens == sampled - each.masked_tokens


def test_engines_of_a_file_are_counted_and_simulated(tmp_path: Path) -> None:
    file = tmp_path / "urls.txt"
    file.write_text("http://10.0.0.1:30000\nhttp://10.0.0.2:30000\n")
    config = job(f"engine.urls_file={file}", "trainer.groups_per_batch=2", "engine.max_running_requests=2")
    assert simulate(config, EQUAL, SHORT).engines == num_engines(config) == 2
    file.unlink()
    with pytest.raises(ConfigError, match=r"urls\.txt cannot be read"):
        simulate(config, EQUAL, SHORT)


def test_the_error_is_told_that_ends_a_job_before_its_plan() -> None:
    with pytest.raises(ConfigError, match=r"the simulated run ends: .*weights\.timeout_s = 300"):
        simulate(job(), replace(EQUAL, sync_s=400.0), SHORT)


def test_no_group_is_dispatched_when_members_of_an_earlier_one_have_no_slots() -> None:
    # All that the bound allows would be 40 groups, born at once and sampled one after the other.
    config = job("rollout.max_staleness=39", "rollout.max_concurrent_trajectories=8")
    plan = simulate(config, replace(EQUAL, sigma=0.5, max_tokens=400), SHORT)
    assert plan.staleness_mean < 6


@pytest.mark.real
def test_engines_stay_full_and_nothing_is_dropped_when_lengths_have_a_heavy_tail() -> None:
    config = job(
        "engine.num_engines=8",
        "engine.max_running_requests=128",
        "rollout.group_size=8",
        "rollout.max_concurrent_trajectories=1024",
        "rollout.max_staleness=5",
        "trainer.groups_per_batch=128",
    )
    plan = simulate(config, Workload(shares_prompts=False), PlannedRun(versions=10, warmup=6, coarsen=32))
    assert plan.relative >= 0.94  # 0.956 in the long run: updates and prompts take the rest
    assert plan.engines_empty < 0.01
    assert plan.dropped == 0
    assert plan.staleness_max <= 5
    assert plan.ks_lengths < 0.05  # 0.03 is what so few answers differ by


def test_tokens_are_younger_than_their_trajectories() -> None:
    """Answers begin under one version and end under another; a trajectory is as stale as its oldest token."""
    uneven = replace(EQUAL, sigma=0.8, max_tokens=400)
    plan = simulate(
        job("rollout.max_concurrent_trajectories=16", "engine.max_running_requests=16"), uneven, SHORT
    )
    assert sum(plan.token_lags) == pytest.approx(1.0)
    assert len(plan.token_lags) <= plan.staleness_max + 1
    mean = sum(lag * share for lag, share in enumerate(plan.token_lags))
    assert 0 < mean < plan.staleness_mean
