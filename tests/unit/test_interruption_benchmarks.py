"""The arithmetic of `benchmarks/in_place.py` and `benchmarks/async_vs_sync.py`, and what they keep."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from async_rl.config import load_config
from async_rl.types import Context, Sampled, Trajectory
from benchmarks import async_vs_sync, in_place
from benchmarks.async_vs_sync import QUICK, SCHEMES, RunRow, Scheme, missing, reached_s, smoothed, table
from benchmarks.in_place import Chain, make_rows, relative_change, reward_even, violations
from benchmarks.real_parts import make_trajectory
from benchmarks.support.calculator_runs import CONFIG
from benchmarks.support.kept_rows import KeptRows

# -- in_place.py ------------------------------------------------------------------------------------------


def test_siblings_are_rewarded_for_even_tokens() -> None:
    def answer(name: str, *tokens: int) -> Trajectory:
        sampled = Sampled(
            token_ids=np.array(tokens, np.int32),
            rollout_log_probs=np.zeros(len(tokens), np.float32),
            weight_version=0,
            engine_id="engine-0",
            finish_reason="length",
        )
        return make_trajectory(name, (Context(token_ids=np.array([7], np.int32)), sampled), None)

    groups = reward_even([answer(str(number), 2, 4, 5, number) for number in range(8)])
    assert [len(group.trajectories) for group in groups] == [4, 4]
    assert [each.outcome.reward for each in groups[0].trajectories] == [0.75, 0.5, 0.75, 0.5]
    assert {each.group_id for each in groups[1].trajectories} == {groups[1].group_id}
    assert groups[0].group_id != groups[1].group_id


def test_the_change_of_weights_is_that_of_all_tensors_together() -> None:
    old = {"a": torch.tensor([3.0]), "b": torch.tensor([[0.0, 4.0]])}
    new = {"a": torch.tensor([3.0]), "b": torch.tensor([[0.5, 4.0]])}
    assert relative_change(old, new) == pytest.approx(0.1)


def rows_of(in_place_off: float, abort_off: float) -> list[in_place.Row]:
    """One learning rate and length, no update and one, of two seeds."""

    def tokens(*differences: float) -> list[np.ndarray]:
        return [np.array(differences, np.float32)]

    differences = {
        (0, "abort", "r3", 9, 0): tokens(0.0, 0.0),
        (0, "abort", "r3", 9, 1): tokens(abort_off, -abort_off),
        (0, "in_place", "r3", 9, 0): tokens(0.0, 0.0),
        (0, "in_place", "r3", 9, 1): [*tokens(in_place_off), *tokens(-3 * in_place_off)],
    }
    changes = {(0, 0): tokens(0.0, 0.0), (0, 1): tokens(0.5, -0.1)}
    chains = [[Chain(1e-4, [], 0.01)], [Chain(1e-4, [], 0.03)]]
    return make_rows(chains, differences, changes)


def test_rows_join_the_seeds_and_compare_with_the_change_of_the_policy() -> None:
    found = {(row.interrupt, row.updates): row for row in rows_of(0.1, 0.0)}
    row = found["in_place", 1]
    assert row.sampled == 2
    assert row.mean_abs == pytest.approx(0.2)
    assert row.k1 == pytest.approx(0.1)
    assert row.k3 == pytest.approx((math.expm1(0.1) - 0.1 + math.expm1(-0.3) + 0.3) / 2, rel=1e-5)
    assert row.policy_change == pytest.approx(0.3)
    assert row.weight_change == pytest.approx(0.02)
    assert found["abort", 1].mean_abs == 0


def test_it_is_wrong_when_abort_is_not_exact_or_in_place_is() -> None:
    assert violations(rows_of(0.1, 1e-7)) == []
    (said,) = violations(rows_of(0.1, 1e-3))
    assert "abort is off by 0.001 nats after 1 updates" in said
    (said,) = violations(rows_of(0.0, 0.0))
    assert "in_place is exact" in said


# -- async_vs_sync.py -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda each: f"{each.name}-{each.max_staleness}")
def test_each_scheme_is_a_valid_config_with_slots_for_a_whole_batch(scheme: Scheme) -> None:
    config = load_config(CONFIG, scheme.overrides())
    batch = config.trainer.groups_per_batch * config.rollout.group_size
    assert config.rollout.max_staleness == scheme.max_staleness
    assert config.rollout.max_concurrent_trajectories == batch
    assert config.engine.num_engines * config.engine.max_running_requests == batch
    assert config.engine.num_engines == config.trainer.num_ranks == (2 if scheme.shares_cores else 1)
    if scheme.max_staleness:
        assert config.weights.interrupt == scheme.name
    assert set(QUICK) <= set(SCHEMES)


def run_row(scheme: Scheme, seed: int = 0, seconds: float = 10.0, **fields: object) -> RunRow:
    rewards = [0.5, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0]
    row = RunRow(
        scheme=scheme,
        seed=seed,
        steps=7,
        warm=True,
        load=1.0,
        seconds=seconds,
        trainer_idle=0.5,
        engines_idle=0.25,
        step_s=1.0,
        sync_s=0.1,
        staleness=1.0,
        interrupted=0.5,
        mismatch=1e-7,
        rewards=list(rewards),
        ends_s=[float(step) for step in range(1, 8)],
    )
    return replace(row, **fields)


def test_a_reward_is_reached_when_the_mean_of_five_steps_is() -> None:
    row = run_row(Scheme("abort", 1))
    assert smoothed(row.rewards)[0] == 0.5
    assert smoothed(row.rewards)[4] == pytest.approx(0.82)
    assert reached_s(row) == 6.0
    assert reached_s(replace(row, rewards=[0.5] * 7)) is None
    assert reached_s(replace(row, rewards=[1.0] * 7)) == 5.0  # not before five steps


def test_lines_compare_seeds_of_the_same_number_with_colocated() -> None:
    whole, split = Scheme("colocated"), Scheme("abort", 2)
    rows = [
        run_row(whole, 0, 10.0),
        run_row(split, 0, 8.0),
        run_row(whole, 1, 20.0),
        run_row(split, 1, 12.0, rewards=[0.0] * 7),
    ]
    first, second = table(rows)
    assert first["over colocated"] == [1.0, 1.0, 1.0]
    assert second["seconds"] == [10.0, 8.0, 12.0]
    assert second["over colocated"] == pytest.approx([0.7, 0.6, 0.8])
    assert second["s to reward 0.9"] is None, "one seed has not reached it"
    assert first["s to reward 0.9"] == [6.0, 6.0, 6.0]
    assert (second["trainer idle"], second["seeds"]) == (0.5, 2)
    lines = async_vs_sync.markdown([first, second]).splitlines()
    assert {line.count("|") for line in lines} == {9}
    assert "| abort | 2 | 10 (8 to 12) | 0.70 (0.60 to 0.80) | 50% | 25% | no | 1e-07 |" in lines


def test_only_what_is_missing_is_run_when_a_benchmark_is_continued(tmp_path: Path) -> None:
    schemes = [Scheme("colocated"), Scheme("abort", 1)]
    file = tmp_path / "new" / "rows.jsonl"
    kept = KeptRows(file, RunRow)
    assert list(missing(kept.rows, schemes, (0, 1), 7, warm=True)) == [
        (schemes[0], 0),
        (schemes[1], 0),
        (schemes[0], 1),
        (schemes[1], 1),
    ]
    kept.append(run_row(schemes[0]))
    kept.append(run_row(schemes[1], 1, mismatch=None))
    with file.open("ab") as killed:
        killed.write(b'{"scheme": ')
    again = KeptRows(file, RunRow)
    assert again.rows == kept.rows
    assert list(missing(again.rows, schemes, (0, 1), 7, warm=True)) == [(schemes[1], 0), (schemes[0], 1)]
    assert len(list(missing(again.rows, schemes, (0, 1), 8, warm=True))) == 4, "other steps are other runs"
    again.append(run_row(schemes[1]))
    assert len(KeptRows(file, RunRow).rows) == 3


def test_two_neighbouring_cores_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_vs_sync.os, "sched_getaffinity", lambda _: {1, 4, 5, 9})
    assert async_vs_sync.two_cores() == (4, 5)
    monkeypatch.setattr(async_vs_sync.os, "sched_getaffinity", lambda _: {1, 4})
    with pytest.raises(SystemExit, match=r"expected two neighbours"):
        async_vs_sync.two_cores()
