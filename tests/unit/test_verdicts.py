"""What the page says of a run's figures, and that Prometheus' rules say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from async_rl.observability.page import verdicts
from async_rl.observability.page.tiles import tiles
from async_rl.observability.records import StepRecord

RULES = Path(__file__).parents[2] / "monitoring" / "rules" / "async_rl.yml"


def run(number: int = 20, *, every_s: float = 10.0, **last: float) -> list[StepRecord]:
    """A healthy run, whose last step has other figures."""
    healthy = {
        "reward_mean": 0.5,
        "ppo_kl": 0.002,
        "lag0_log_prob_abs_diff": 1e-3,
        "staleness_mean": 1.0,
        "staleness_max": 2,
        "trajectories": 64,
        "groups": 8,
        "groups_without_signal": 3,
        "wait_s": 1.0,
        "step_s": 3.0,
    }
    return [
        StepRecord(**(healthy | (last if step == number else {})), step=step, weight_version=step,
                   time_s=every_s * step)
        for step in range(1, number + 1)
    ]  # fmt: skip


def words(records: list[StepRecord], bound: int | None = 4) -> dict[str, str | None]:
    return {tile.name: tile.verdict for tile in tiles(records, bound)}


def test_every_judged_figure_is_healthy_when_no_rule_speaks() -> None:
    assert words(run()) == {
        "reward": "healthy",
        "ppo-kl": "healthy",
        "mismatch": "healthy",
        "staleness": "healthy",
        "throughput": None,
        "trainer-idle": "healthy",
    }


@pytest.mark.parametrize(
    ("tile", "word", "last"),
    [
        ("ppo-kl", "look", {"ppo_kl": -0.2}),
        ("ppo-kl", "look", {"ppo_kl": 0.02}),
        ("ppo-kl", "healthy", {"ppo_kl": 0.009}),  # more than five times the median, and yet small
        ("ppo-kl", "look", {"ppo_kl": float("nan"), "ppo_kl_bypass": 0.2}),
        ("ppo-kl", None, {"ppo_kl": float("nan")}),
        ("staleness", "wrong", {"staleness_max": 5}),
        ("staleness", "healthy", {"staleness_max": 4}),
    ],
)
def test_a_figure_is_judged_by_the_last_step_when_its_rule_is(
    tile: str, word: str | None, last: dict[str, float]
) -> None:
    assert words(run(**last))[tile] == word


def test_rewards_are_wrong_when_nothing_is_learned() -> None:
    records = [*run(5), *(run(1, groups_without_signal=8) * 3)]
    (reward, *_) = tiles(records, 4)
    assert (reward.verdict, reward.note) == ("wrong", "all rewards equal for 24 groups: nothing is learned")


def test_staleness_and_waiting_are_judged_by_a_quarter_of_an_hour() -> None:
    old = {"staleness_mean": 3.9, "staleness_max": 4}
    assert words(run(**old))["staleness"] == "healthy", "a single step"
    assert words(run(1, **old) * 5)["staleness"] == "look"
    assert words(run(1, staleness_mean=0.0, staleness_max=0) * 5, 0)["staleness"] == "healthy"
    assert words(run(1, **old) * 5, None)["staleness"] is None
    assert words(run(1, wait_s=97.0) * 5)["trainer-idle"] == "look"
    assert words(run(1, wait_s=97.0) * 4)["trainer-idle"] == "healthy", "a start waits for its first batches"


def test_the_mismatch_is_compared_with_the_best_hour_of_the_day() -> None:
    hours = [0.001, 0.002, 0.0021]
    records = [
        StepRecord(step=i, weight_version=i, time_s=1800.0 * i, lag0_log_prob_abs_diff=hours[i // 2])
        for i in range(6)
    ]
    assert words(records)["mismatch"] == "look"
    assert words(records[:3])["mismatch"] == "healthy"
    rounding = run(3, every_s=3600.0, lag0_log_prob_abs_diff=9e-6)
    assert words(rounding)["mismatch"] == "healthy"


@pytest.mark.parametrize(
    ("alert", "thresholds"),
    [
        (
            "PpoKlSpike",
            [verdicts.PPO_KL_NATS, verdicts.PPO_KL_LEAST_NATS, verdicts.PPO_KL_FACTOR],
        ),
        ("MismatchGrows", [verdicts.MISMATCH_FACTOR, verdicts.MISMATCH_LEAST_NATS]),
        ("StalenessNearBound", [verdicts.STALENESS_SHARE, 0]),  # 0: only where there is a bound
        ("TrainerIdle", [verdicts.TRAINER_IDLE_SHARE]),
    ],
)
def test_thresholds_are_those_of_the_alert(alert: str, thresholds: list[float]) -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    (rule,) = (rule for rule in rules if rule.get("alert") == alert)
    assert rule["labels"]["severity"] == "warning", "which the page shows as `look`"
    compared = re.findall(r"> (?:on \(run\) )?([0-9.e-]+)", rule["expr"])
    assert [float(number) for number in compared] == [float(number) for number in thresholds]
