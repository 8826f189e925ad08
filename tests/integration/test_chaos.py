"""A short fight of the real loop: see tests/chaos. `make chaos` is the long one."""

import itertools

import pytest

from tests.chaos.harness import Chaos, make_config
from tests.chaos.plan import DECK, blows

pytestmark = [pytest.mark.sglang, pytest.mark.megatron, pytest.mark.ray, pytest.mark.timeout(900)]


def test_every_kind_of_blow_comes_before_one_comes_again() -> None:
    dealt = list(itertools.islice(blows(7), 3 * len(DECK)))
    for start in range(0, len(dealt), len(DECK)):
        assert {(b.victim, b.how) for b in dealt[start : start + len(DECK)]} == set(DECK)
    assert dealt == list(itertools.islice(blows(7), 3 * len(DECK)))
    assert dealt != list(itertools.islice(blows(8), 3 * len(DECK)))


@pytest.mark.long
def test_nothing_is_lost_or_trained_twice_when_processes_die_at_random(calculator, tmp_path) -> None:
    # Of the seed's plan a rank and an engine; the kill of the driver comes at its end.
    plan = (blow for blow in blows(2) if blow.victim in ("trainer rank", "engine"))
    config = make_config(
        tmp_path,
        calculator / "model",
        calculator / "data" / "tasks.jsonl",
        seed=2,
        num_engines=2,
        num_ranks=1,
    )
    timeline: list[str] = []
    findings = Chaos(tmp_path, config, timeline.append).run(itertools.islice(plan, 2), seed=2, more_steps=1)
    violated = [finding for finding in findings if not finding.holds]
    assert not violated, "\n".join([*timeline, *map(str, violated)])
    assert len(findings) == 11  # none was left out
