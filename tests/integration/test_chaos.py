"""A short fight of the real loop: see verification/chaos. `make chaos` is the long one."""

import itertools

import pytest

from verification.chaos.harness import Chaos, make_config
from verification.chaos.plan import Kind, blows

pytestmark = [pytest.mark.sglang, pytest.mark.megatron, pytest.mark.ray, pytest.mark.timeout(1800)]


@pytest.mark.long
def test_nothing_is_lost_or_trained_twice_when_processes_die_at_random(calculator, tmp_path) -> None:
    # A rank, a rollout worker and an engine; the kill of the driver comes at the end.
    kinds: tuple[Kind, ...] = (
        ("trainer rank", "SIGKILL"),
        ("rollout worker", "SIGKILL"),
        ("engine", "stuck_payload"),
    )
    config = make_config(
        tmp_path,
        calculator / "model",
        calculator / "data" / "tasks.jsonl",
        seed=2,
        num_engines=2,
        num_ranks=1,
        num_workers=1,
    )
    timeline: list[str] = []
    findings = Chaos(tmp_path, config, timeline.append).run(
        itertools.islice(blows(2, kinds), 3), seed=2, more_steps=1
    )
    violated = [finding for finding in findings if not finding.holds]
    assert not violated, "\n".join([*timeline, *map(str, violated)])
    assert len(findings) == 19  # none was left out
