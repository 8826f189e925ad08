"""Long answers among short ones, in virtual time: trained as often as they are sampled, within the bound."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from async_rl.errors import AsyncRLError
from async_rl.observability.metrics import value_of
from async_rl.run import recovery
from async_rl.runtime.supervision import first_error
from async_rl.types import Completion, Task
from tests.support.heavy_tail import TOKEN_S, OneAnswer, World, distance

HEAVY = {"sigma": 0.8, "most": 1000}
HEAVIER = {"sigma": 1.3, "most": 2000}
"""Answers of a median of 100 tokens: one in a hundred is longer than 640, or than 2000."""


async def train(folder: Path, steps: int = 50, **settings: object) -> World:
    world = World(folder, **{"groups_per_batch": 4, "group_size": 4, "slots": 16, **settings})
    await world.train(steps)
    return world


def masked_share(world: World) -> float:
    return sum(batch.num_masked_tokens for batch in world.batches) / sum(world.trained)


@pytest.mark.real
@pytest.mark.parametrize("staleness_policy", ["wait", "mask_tokens"])
@pytest.mark.parametrize(
    "lengths", [pytest.param(HEAVY, marks=pytest.mark.long), HEAVIER], ids=["heavy", "heavier"]
)
async def test_lengths_are_trained_as_they_are_sampled_when_the_bound_bites(
    tmp_path: Path, staleness_policy: str, lengths: dict[str, float]
) -> None:
    """The longest answers take as long as 8 or 16 versions of quick ones, the bound is 2.

    Each batch is checked against the bound in the arrays that a trainer reads.
    """
    world = await train(tmp_path, staleness_policy=staleness_policy, max_staleness=2, **lengths)
    assert len(world.batches) == 50
    assert max(max(batch.staleness) for batch in world.batches) == 2
    assert distance(OneAnswer.ended, world.trained) < 0.02
    assert world.lengths.distance == pytest.approx(distance(OneAnswer.ended, world.trained), abs=0.01)
    assert world.counts.dropped == {}
    assert (masked_share(world) > 0) == (staleness_policy == "mask_tokens")


def slow_and_quick(number: int) -> list[Task]:
    """Every fourth task takes ten times as long as the others."""
    tokens = [400 if i % 4 == 1 else 40 for i in range(number)]
    return [Task(task_id=f"t{i}", messages=[], metadata={"tokens": n}) for i, n in enumerate(tokens)]


def task_ids(number: int) -> list[str]:
    return sorted(task.task_id for task in slow_and_quick(number))


@pytest.mark.parametrize("staleness_policy", ["wait", "mask_tokens"])
async def test_slow_prompts_are_not_starved_when_answers_of_quick_ones_abound(
    tmp_path: Path, staleness_policy: str
) -> None:
    """Where stale work is dropped, slow prompts are never trained (tinker-cookbook issue 822)."""
    world = await train(
        tmp_path, tasks=slow_and_quick(64), epochs=1, staleness_policy=staleness_policy, max_staleness=1
    )
    assert world.tasks_trained == task_ids(64)
    assert (world.counts.trained, world.counts.dropped) == (256, {})
    assert sum(length > 100 for length in world.trained) == 256 // 4


async def test_slow_prompts_come_again_when_they_were_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "MAX_TASK_RETRIES", 2)
    settings = {"staleness_policy": "drop", "max_staleness": 1, "groups_per_batch": 2}
    world = await train(tmp_path, tasks=slow_and_quick(32), epochs=1, **settings)
    lost = world.counts.dropped["too_stale"] // 4
    assert lost > 0
    assert value_of(world.metrics.task_retries_total.labels("too_stale")) == lost
    assert world.tasks_trained == task_ids(32)
    assert world.pending == ()


async def test_no_prompt_is_skipped_when_a_run_ends_amid_long_answers_and_is_resumed(tmp_path: Path) -> None:
    """A run that continues behind what was dispatched would skip the long answers (NeMo-RL issue 3599)."""
    settings = {"tasks": slow_and_quick(64), "epochs": 1, "groups_per_batch": 4, "group_size": 2, "slots": 16}
    first = World(tmp_path, **settings)
    await first.train(100, kill_after_s=150 * TOKEN_S)
    assert 0 < len(first.batches) < 16
    second = World(tmp_path, step=first.trainer.step, **settings)
    await second.train(100)
    assert sorted(first.tasks_trained + second.tasks_trained) == task_ids(64)
    assert (second.counts.trained, second.counts.dropped, second.counts.in_flight) == (128, {}, 0)
    assert sum(length > 100 for length in first.trained + second.trained) == 128 // 4


async def test_batches_are_full_of_signal_when_groups_without_it_are_filtered(tmp_path: Path) -> None:
    rewards: list[dict[str, object]] = [{"reward": 1.0}, {}, {"reward": 0.0}]  # the second one's differ
    tasks = [Task(task_id=f"t{i}", messages=[], metadata=rewards[i % 3]) for i in range(30)]
    world = await train(tmp_path, 8, tasks=tasks, dynamic_filtering=True)
    assert len(world.batches) == 8
    for batch in world.batches:
        groups = [batch.rewards[i : i + 4] for i in range(0, 16, 4)]
        assert all(len(set(group)) > 1 for group in groups)
    assert world.counts.trained == 8 * 16
    assert world.counts.dropped["no_signal"] >= world.counts.trained
    assert world.counts.dropped["no_signal"] % 4 == 0


async def test_the_run_ends_with_the_remedy_when_nothing_carries_signal(tmp_path: Path) -> None:
    tasks = [Task(task_id="easy", messages=[], metadata={"reward": 1.0})]
    world = World(tmp_path, tasks=tasks, dynamic_filtering=True, max_filtered_groups=20, group_size=2)
    with pytest.raises(BaseExceptionGroup) as caught:
        await world.train(5)
    assert isinstance(first_error(caught.value), AsyncRLError)
    assert "21 groups in a row" in str(first_error(caught.value))


class FirstTimesFail:
    """A judge that is down for a while: the first two calls for every tenth task fail."""

    calls: ClassVar[dict[str, int]] = {}

    @classmethod
    async def score(cls, task: Task, completion: Completion) -> float:
        cls.calls[task.task_id] = seen = cls.calls.get(task.task_id, 0) + 1
        if task.task_id.endswith("0") and seen <= 2:
            raise ConnectionError("the judge is down")
        return float(seen)


@pytest.mark.parametrize("policy", ["train_rest", "drop", "retry"])
async def test_the_policy_decides_on_a_group_when_siblings_failed(tmp_path: Path, policy: str) -> None:
    FirstTimesFail.calls = {}
    world = World(
        tmp_path,
        tasks=[Task(task_id=f"t{i}", messages=[], metadata={"tokens": 30}) for i in range(40)],
        epochs=1,
        groups_per_batch=4,
        group_size=4,
        max_attempts=1,
        max_failed_share=1.0,
        failed_siblings=policy,
        reward=f"{__name__}:FirstTimesFail.score",
    )
    await world.train(100)
    expected = {
        "train_rest": (160 - 8, {"reward_unavailable": 8}),  # of four groups, two siblings each
        "drop": (160 - 16, {"reward_unavailable": 8, "sibling_failed": 8}),
        "retry": (160, {"reward_unavailable": 8, "sibling_failed": 8}),
    }
    assert (world.counts.trained, world.counts.dropped) == expected[policy]
    retries = value_of(world.metrics.task_retries_total.labels("sibling_failed"))
    assert retries == (4 if policy == "retry" else 0)
    assert world.pending == ()
