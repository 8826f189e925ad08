"""The distance of trained from sampled lengths: right, by window, and None while it would be noise."""

from __future__ import annotations

import random

import pytest

from async_rl.store.lengths import MIN_SAMPLES, LengthDrift


def exact(ended: list[int], trained: list[int]) -> float:
    """The two-sample statistic, by definition."""

    def share(values: list[int], limit: int) -> float:
        return sum(value <= limit for value in values) / len(values)

    return max(abs(share(ended, x) - share(trained, x)) for x in {*ended, *trained})


def drift_of(ended: list[int], trained: list[int], window: int = 4096) -> LengthDrift:
    drift = LengthDrift(window)
    for length in ended:
        drift.add_ended(length)
    for length in trained:
        drift.add_trained(length)
    return drift


@pytest.mark.parametrize("sigma", [0.3, 0.8, 1.5])
@pytest.mark.parametrize("kept", [0.5, 0.9, 1.0])
def test_the_distance_is_the_exact_one_when_the_longest_are_not_trained(sigma: float, kept: float) -> None:
    random_ = random.Random(1)
    ended = [int(random_.lognormvariate(8.0, sigma)) for _ in range(1000)]
    trained = sorted(ended)[: int(kept * len(ended))]
    random_.shuffle(trained)
    assert drift_of(ended, trained).distance == pytest.approx(exact(ended, trained))
    assert exact(ended, trained) == pytest.approx(1 - kept, abs=0.01)


def test_only_the_last_ones_count_when_there_are_more_than_the_window() -> None:
    long_ago, lately = [10_000] * 500, [100] * 200
    assert drift_of([*long_ago, *lately], lately, window=200).distance == 0.0
    assert drift_of([*lately, *long_ago], lately, window=200).distance == 1.0


def test_there_is_no_distance_when_there_are_too_few() -> None:
    few = [1] * (MIN_SAMPLES - 1)
    assert drift_of(few, [1] * MIN_SAMPLES).distance is None
    assert drift_of([1] * MIN_SAMPLES, few).distance is None
    assert drift_of([*few, 1], [*few, 1]).distance == 0.0
