"""A whole run whose calls are aborted again and again: nothing is lost, and nothing depends on it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from async_rl.engine_protocol import Chunk
from async_rl.engines.model_facts import load_facts
from async_rl.engines.simulated import SimulatedEngine, routing_rows
from async_rl.observability.records import Summary
from async_rl.planning.virtual_time import run_virtual
from async_rl.types import Completion, Task, TrainBatch
from tests.simulation.test_loop import assert_conserved, make_config, run
from tests.support.local_cluster import CheckingTrainer, LocalCluster

STEPS = 4
GROUPS = 4


class Scores:
    """A reward that is a function of the text, and remembers what it gave to each task."""

    given: ClassVar[dict[str, set[float]]] = {}

    @classmethod
    def score(cls, task: Task, completion: Completion) -> float:
        reward = zlib.crc32(completion.text.encode()) % 1000 / 1000
        cls.given.setdefault(task.task_id, set()).add(reward)
        return reward


def greedy(prefix: Sequence[int], rng: random.Random) -> int | None:
    """A function of the prefix alone: neither weights nor calls change what is said."""
    drawn = zlib.crc32(np.array(prefix, np.int32).tobytes())
    return None if drawn % 16 == 0 else 3 + drawn // 16 % 50


class Restless(SimulatedEngine):
    """Aborts every call after so many chunks of it; 0 leaves them alone."""

    every = 0

    async def _deliver(self, call: Any, chunk: Chunk) -> tuple[Chunk, ...]:
        chunks = await super()._deliver(call, chunk)
        if self.every and call.num_sampled % self.every == 0:
            call.aborted = True
            call.changed.set()
        return chunks


def live(calculator: Path, folder: Path, *, every: int, merge: str) -> tuple[Summary, list[Seen]]:
    """One run, to its end."""
    Scores.given = {}
    config = make_config(
        calculator,
        folder,
        f"run.max_steps={STEPS}",
        "data.shuffle=false",
        f"routing.merge={merge}",
        "rollout.group_size=2",
        "rollout.max_concurrent_trajectories=8",
        f"rollout.reward={__name__}:Scores.score",
    )
    cluster = LocalCluster(config, step_s=0.02, policy=greedy)
    for engine in cluster.engines:
        engine.__class__ = Restless
        engine.every = every  # type: ignore[attr-defined]
    seen = watch(cluster.trainer)
    return run_virtual(run(config, cluster)), seen


@pytest.fixture(scope="module")
def undisturbed(calculator: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[float]]:
    """The reward of each task in a run without an abort but those of weight updates."""
    live(calculator, tmp_path_factory.mktemp("undisturbed"), every=0, merge="replace")
    return Scores.given


class Seen(NamedTuple):
    """One trajectory as the trainer gets it."""

    tokens: np.ndarray
    versions: np.ndarray
    rows: np.ndarray
    valid: np.ndarray


def watch(trainer: CheckingTrainer) -> list[Seen]:
    """What a trainer will be given; copied, because a batch's memory is another one's after its step."""
    seen: list[Seen] = []
    check = trainer.check

    def check_and_keep(batch: TrainBatch) -> None:
        check(batch)
        for begin, end in pairwise(batch.offsets.tolist()):
            arrays = batch.token_ids, batch.weight_versions, batch.routed_experts, batch.routing_valid
            seen.append(Seen(*(array[begin:end].copy() for array in arrays if array is not None)))

    trainer.check = check_and_keep  # type: ignore[method-assign]
    return seen


@pytest.mark.case(47)
@pytest.mark.parametrize(("every", "merge"), [(1, "replace"), (3, "splice"), (7, "replace")])
def test_nothing_is_lost_and_no_reward_changes_when_calls_are_aborted_all_the_time(
    calculator: Path, tmp_path: Path, undisturbed: dict[str, set[float]], every: int, merge: str
) -> None:
    summary, seen = live(calculator, tmp_path, every=every, merge=merge)
    assert_conserved(summary)
    assert summary.trajectories.trained == STEPS * GROUPS * 2
    assert summary.trajectories.dropped == {}
    # Rows are T - 1, all of them there, and each of the weights that the law of the merge says.
    facts = load_facts(str(calculator / "model"))
    assert len(seen) == STEPS * GROUPS * 2
    for tokens, versions, rows, valid in seen:
        assert valid.tolist() == [True] * (len(tokens) - 1) + [False]
        if merge == "replace":
            expected = [np.full(len(tokens) - 1, versions[-1], np.int32)]
        else:  # the prompt may have been fed by a call that was aborted before its first token
            first = versions[versions >= 0][0]
            expected = [np.where(versions < 0, v, versions)[1:] for v in range(first + 1)]
        assert any(np.array_equal(rows[:-1], routing_rows(tokens[:-1], each, facts)) for each in expected)
    cut = np.mean([(one.versions >= 0).sum() > every for one in seen])
    assert cut > 0.2
    assert summary.interrupted_share is not None
    assert summary.interrupted_share >= cut
    # Rewards are those of a run in peace; siblings say the same.
    both = Scores.given.keys() & undisturbed.keys()
    assert len(both) >= STEPS * GROUPS
    assert {task: Scores.given[task] for task in both} == {task: undisturbed[task] for task in both}
    assert all(len(rewards) == 1 for rewards in Scores.given.values())
    assert len({reward for rewards in Scores.given.values() for reward in rewards}) > len(both) // 2
