"""A teacher's scores: fetched for each finished trajectory, stored with it, and what they are in the loss."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from async_rl.config import ImportanceConfig, LossConfig, TeacherConfig
from async_rl.data.chat_format import check_same_tokens
from async_rl.engine_protocol import Finish
from async_rl.engines.simulated import scored_tokens
from async_rl.errors import ConfigError, RequestRefused, RolloutError
from async_rl.observability.metrics import Metrics, value_of
from async_rl.rollout.teacher import Teacher
from async_rl.runtime.supervision import services
from async_rl.store.frames import read_trajectories
from async_rl.types import Context, Group, SamplingMask, Trajectory
from tests.support.stored_batches import taken_batch
from tests.support.trajectories import make_trajectory
from tests.unit.test_frozen_models import frozen_model
from trainer.losses.kl import teacher_advantages
from trainer.losses.objectives import ppo
from trainer.losses.policy_loss import SUMS, TrainedTokens, policy_sums
from trainer.losses.sequences import Sequences
from verification.simulation.breakable_engine import Fault
from verification.simulation.simulated_models import SimulatedModel, score_seed

NEW_ID = iter(range(1 << 20)).__next__


def teacher_of(model, metrics: Metrics | None = None) -> Teacher:
    clock = asyncio.get_running_loop().time
    context: Any = SimpleNamespace(
        models={"judge": model.pool.dispatcher},
        new_id=lambda: f"{NEW_ID():032x}",
        metrics=metrics or Metrics(),
        clock=clock,
    )
    return Teacher("judge", context)


async def started_teacher(folder: Path, num_engines: int = 2) -> tuple[Teacher, SimulatedModel]:
    model, processes = frozen_model(folder, num_engines=num_engines)
    await model.start_engines()
    return teacher_of(model), processes


def expected(trajectory: Trajectory) -> np.ndarray:
    return scored_tokens(trajectory.token_ids.tolist(), 0, score_seed("judge"))


async def test_own_sampled_tokens_are_scored_and_no_others(tmp_path: Path) -> None:
    teacher, _ = await started_teacher(tmp_path)
    trunk = make_trajectory("t", prompt=3, sampled=((4, 0),), routing=False)
    tail = Context(token_ids=np.array([7, 8], np.int32))
    branch = make_trajectory("t.1", prompt=3, sampled=((4, 0), (2, 1)), routing=False)
    segments = (*branch.segments[:2], tail, branch.segments[2], tail)
    branch = msgspec.structs.replace(branch, num_inherited=2, segments=segments)
    nothing = msgspec.structs.replace(trunk, segments=trunk.segments[:1])
    first, second, third = await teacher.score_trajectories([trunk, branch, nothing])
    own = np.array([False] * 3 + [True] * 4)
    assert np.array_equal(first.teacher_log_probs, np.where(own, expected(trunk), 0))
    own = np.array([False] * 9 + [True] * 2 + [False] * 2)
    assert np.array_equal(second.teacher_log_probs, np.where(own, expected(branch), 0))
    assert third.teacher_log_probs is None


async def test_tokens_of_truncated_sampling_have_no_score(tmp_path: Path) -> None:
    """They were sampled before the run was resumed with a teacher, whose log-probs are not of kept tokens."""
    teacher, _ = await started_teacher(tmp_path)
    trajectory = make_trajectory("t", prompt=3, sampled=((4, 0), (2, 1)), routing=False)
    prompt, truncated, after = trajectory.segments
    truncated = msgspec.structs.replace(truncated, mask=SamplingMask.of([[1, 2]] * 4))
    trajectory = msgspec.structs.replace(trajectory, segments=(prompt, truncated, after))
    (scored,) = await teacher.score_trajectories([trajectory])
    assert np.isnan(scored.teacher_log_probs[3:7]).all()
    assert np.array_equal(scored.teacher_log_probs[7:], expected(trajectory)[7:])


async def test_another_engine_scores_when_one_dies_and_the_next_one_when_all_have(tmp_path: Path) -> None:
    model, processes = frozen_model(tmp_path)
    await model.start_engines()
    metrics = Metrics()
    teacher = teacher_of(model, metrics)
    long = make_trajectory("t", prompt=300, sampled=((4, 0),), routing=False)  # a tenth of a second
    async with services(**model.services):
        scoring = asyncio.create_task(teacher.score_trajectories([long, long]))
        await asyncio.sleep(0.05)
        for index in (0, 1):
            processes.kill_engine(index, noticed=False)
        one, other = await scoring
        assert np.array_equal(one.teacher_log_probs[-4:], expected(long)[-4:])
        assert np.array_equal(one.teacher_log_probs, other.teacher_log_probs)
        processes.engines[0].faults.append(Fault("busy"))
        processes.engines[1].faults.append(Fault("busy"))
        await teacher.score_trajectories([long, long])
    assert value_of(metrics.model_retries_total.labels("judge")) >= 4


async def test_an_answer_without_scores_is_asked_for_again_and_a_refusal_is_an_error(
    tmp_path: Path,
) -> None:
    teacher, processes = await started_teacher(tmp_path, num_engines=1)
    original, asked = processes.engines[0].generate, []

    async def abort_first(request):
        asked.append(request)
        if len(asked) == 1:
            yield Finish(reason="abort", version_spans=())
            return
        if len(asked) == 3:
            raise RequestRefused("too long")
        async for event in original(request):
            yield event

    processes.engines[0].generate = abort_first
    trajectory = make_trajectory("t", routing=False)
    (scored,) = await teacher.score_trajectories([trajectory])
    assert np.array_equal(scored.teacher_log_probs[3:], expected(trajectory)[3:])
    assert len(asked) == 2
    with pytest.raises(RolloutError, match="the model 'judge' refuses what it is asked: too long"):
        await teacher.score_trajectories([trajectory])


def test_scores_are_a_column_of_the_frame_and_absent_where_nothing_was_scored(tmp_path: Path) -> None:
    scored = msgspec.structs.replace(
        make_trajectory("a", prompt=2, sampled=((2, 0),), routing=False),
        teacher_log_probs=np.array([0, 0, -1, -2], np.float32),
    )
    other = make_trajectory("b", prompt=2, sampled=((1, 0),), routing=False)

    def read(*trajectories: Trajectory, indices: tuple[int, ...] | None = None) -> list[float] | None:
        group = Group(group_id="g", trajectories=trajectories)
        taken = taken_batch(tmp_path, [group], 1)
        scores = read_trajectories(taken, indices).teacher_log_probs
        return None if scores is None else scores.tolist()

    assert read(scored, other) == pytest.approx([0, 0, -1, -2, *[np.nan] * 3], nan_ok=True)
    assert read(scored, other, indices=(0,)) == [0, 0, -1, -2, 0, 0, 0]
    assert read(other) is None


@pytest.mark.parametrize(
    ("settings", "advantages"),
    [
        ({}, [1 + 0.5, 1 - 1.0, -2.0]),
        ({"coefficient": 2.0}, [1 + 1.0, 1 - 2.0, -2.0]),
        ({"only": True}, [0.5, -1.0, 0.0]),
        ({"where": "loss"}, [1.0, 1.0, -2.0]),
        ({"where": "loss", "only": True}, [0.0, 0.0, 0.0]),
    ],
    ids=["", "coefficient", "only", "where", "where-only"],
)
def test_the_reward_of_a_token_is_what_the_teacher_finds_it_likelier(settings, advantages) -> None:
    config = msgspec.convert({"model": "teacher"} | settings, TeacherConfig)
    found = teacher_advantages(
        config,
        np.array([1, 1, -2], np.float32),
        np.array([-1.0, -0.5, -3.0], np.float32),
        np.array([-0.5, -1.5, np.nan], np.float32),  # the last one was not scored
    )
    assert found.tolist() == pytest.approx(advantages)


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_loss_has_the_gradient_of_the_reverse_kl(where: str) -> None:
    """At a token it is the difference of log-probs, times importance weight, coefficient and weight."""
    config = LossConfig(
        teacher=TeacherConfig(model="teacher", coefficient=0.5, where=where),
        importance=ImportanceConfig(high=1.5),
    )
    current = torch.tensor([-1.0, -0.5, -3.0, -1.0], requires_grad=True)
    tokens = TrainedTokens(
        old_log_probs=current.detach(),
        rollout_log_probs=torch.tensor([-1.0, -0.5, -3.0, -3.0]),  # the last ratio is truncated to 1.5
        advantages=torch.zeros(4),
        rejected=torch.tensor([0.0, 0.0, 1.0, 0.0]),
        weights=torch.tensor([1.0, 2.0, 1.0, 1.0]),
        sequences=Sequences(torch.tensor([0, 0, 1, 2]), torch.tensor([2, 1, 1])),
        teacher_log_probs=torch.tensor([-0.5, torch.nan, -1.0, -3.0]),
    )
    loss, sums = policy_sums(config, ppo, current, torch.zeros(4), tokens)
    loss.backward()
    gradient = [0.5 * -0.5, 0.0, 0.0, 0.5 * 1.5 * 2.0] if where == "loss" else [0.0] * 4
    torch.testing.assert_close(current.grad, torch.tensor(gradient))
    named = dict(zip(SUMS, sums.tolist(), strict=True))
    assert named["teacher_kl"] == pytest.approx(-0.5 + 0 - 2.0 + 2.0)


def tokenizer_of(folder: Path, *words: str) -> PreTrainedTokenizerFast:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "a"))
    fast = PreTrainedTokenizerFast(tokenizer_object=made)
    fast.save_pretrained(folder)
    return fast


def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path) -> None:
    tokenizer_of(tmp_path / "big", "a", "b", "c")
    # More tokens do not matter: the policy does not sample them.
    check_same_tokens(tokenizer_of(tmp_path / "policy", "a", "b"), tmp_path / "big")
    with pytest.raises(ConfigError, match="'d' is token 1 of the policy and none of the teacher"):
        check_same_tokens(tokenizer_of(tmp_path / "policy", "a", "d"), tmp_path / "big")
    with pytest.raises(ConfigError, match="'c' is token 1 of the policy and 2 of the teacher"):
        check_same_tokens(tokenizer_of(tmp_path / "policy", "a", "c", "b"), tmp_path / "big")
