"""Judges and teachers: what they are asked, what is read from answers, what scores are in the loss."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from async_rl.config import Config, ImportanceConfig, JudgeReward, LossConfig, TeacherConfig, parse_config
from async_rl.data.chat_format import check_same_tokens
from async_rl.engine_protocol import Chunk, Finish
from async_rl.engines.simulated import scored_tokens
from async_rl.errors import ConfigError, RequestRefused, RewardError, RolloutError, VersionMismatch
from async_rl.observability.metrics import Metrics, value_of
from async_rl.rollout.model_answers import ModelAnswers
from async_rl.rollout.rewards import judge_calls
from async_rl.rollout.rewards.judge_calls import JudgeCall, fill_template, find_score
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.rollout.teacher import Teacher
from async_rl.runtime.model_questions import ask_model, asking
from async_rl.runtime.supervision import services
from async_rl.store.frames import read_trajectories
from async_rl.types import Completion, Context, Group, SamplingMask, Task, Trajectory
from tests.support.stored_batches import taken_batch
from tests.support.trajectories import make_trajectory
from tests.unit.test_frozen_models import frozen_model
from trainer.losses.kl import teacher_advantages
from trainer.losses.objectives import ppo
from trainer.losses.policy_loss import SUMS, TrainedTokens, policy_sums
from trainer.losses.sequences import Sequences
from verification.simulation.breakable_engine import Fault
from verification.simulation.simulated_models import SimulatedModel, score_seed
from verification.simulation.users import SimulatedChat

TASK = Task(task_id="t", messages=[{"role": "user", "content": "2 + 2?"}], answer=4)


def completion(text: str) -> Completion:
    messages = [*TASK.messages, {"role": "assistant", "content": text}]
    return Completion(messages=messages, text=text, stop_reason="completed")


class Judge:
    """Answers in turn, and remembers what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str, int, float]] = []

    async def __call__(
        self, model: str, messages: Sequence[Any], *, max_new_tokens: int = 512, temperature: float = 0.0
    ) -> str:
        (message,) = messages
        self.asked.append((model, message["content"], max_new_tokens, temperature))
        await asyncio.sleep(0.01)
        return self.answers.pop(0)


def call_of(ask: Judge, **changed: Any) -> JudgeCall:
    config = config_of(**changed).rollout.rewards["graded"]
    assert isinstance(config, JudgeReward)
    return JudgeCall("graded", config, ask, Metrics())


def config_of(**changed: Any) -> Config:
    graded = {"kind": "judge", "judge": "judge", "template": "{question} {response}"}
    return parse_config(
        {
            "model": {"path": "policy"},
            "models": {"judge": {"path": "big"}, "other": {"path": "big"}},
            "rollout": {"reward": "graded", "rewards": {"graded": graded | changed}},
        }
    )


def test_a_template_is_filled_at_once() -> None:
    template = "{question}|{response}|{answer}|{conversation}|{other}"
    given = "{answer} {question}"  # the policy cannot have the reference written into its answer
    assert fill_template(template, TASK, completion(given)) == (
        f"2 + 2?|{given}|4|user: 2 + 2?\n\nassistant: {given}|{{other}}"
    )


@pytest.mark.parametrize(
    ("pattern", "text", "score"),
    [
        (r"-?\d+(?:\.\d+)?", "From 1 to 10 it is a 7.5", 7.5),
        (r"-?\d+(?:\.\d+)?", "none", None),
        (r"Score: (\d+)", "Score: 3? No. Score: 9, of 10", 9.0),
        (r"Score: (\S+)", "Score: nan", None),
        (r"Score: (\S+)", "Score: 1e999", None),
    ],
)
def test_the_score_is_the_last_match(pattern: str, text: str, score: float | None) -> None:
    assert find_score(pattern, text) == score


async def test_a_judge_is_asked_as_the_config_says() -> None:
    judge = Judge("Score: 5 of 10")
    call = call_of(
        judge,
        judge="other",
        template="Rate {response}!",
        score=r"Score: (\d+)",
        scale=10.0,
        max_new_tokens=9,
        temperature=0.5,
    )
    assert await call(TASK, [completion("four")]) == 0.5
    assert judge.asked == [("other", "Rate four!", 9, 0.5)]


async def test_equal_questions_are_asked_once_also_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge("1", "0", "3", "7")
    monkeypatch.setattr(judge_calls, "CACHE_SIZE", 2)
    call = call_of(judge)

    async def scores(*texts: str) -> list[float]:
        return await asyncio.gather(*(call(TASK, [completion(text)]) for text in texts))

    assert await scores("a", "a", "b", "a") == [1, 1, 0, 1]
    assert await scores("c") == [3]
    assert await scores("a", "b") == [1, 7]  # b, which was asked for longest ago, is forgotten
    assert not judge.answers


async def test_an_answer_without_a_score_is_asked_for_again_and_sampled() -> None:
    judge = Judge("I cannot tell", "well", "4")
    token = asking.set(judge)
    try:
        clock = asyncio.get_running_loop().time
        metrics = Metrics()
        rewards = Rewards(config_of(), decode=str, metrics=metrics, clock=clock)
        assert await rewards.score_completion(TASK, completion("a")) == {"reward": 4.0}
        assert [temperature for *_, temperature in judge.asked] == [0.0, 1.0, 1.0]
        judge.answers = ["well"]
        rewards = Rewards(config_of(max_retries=0), decode=str, metrics=metrics, clock=clock)
        with pytest.raises(RewardError, match="`score` finds no number in its answer 'well'"):
            await rewards.score_completion(TASK, completion("b"))
    finally:
        asking.reset(token)
    assert value_of(metrics.judge_answers_total.labels("graded", "no_score")) == 3
    assert value_of(metrics.judge_answers_total.labels("graded", "scored")) == 1


async def test_only_an_attempt_can_ask() -> None:
    with pytest.raises(RolloutError, match="ask_model is for async rewards"):
        await ask_model("judge", [])


def answers_of(folder: Path, model: Any, metrics: Metrics | None = None, **settings: int) -> ModelAnswers:
    numbers = iter(range(1 << 20))
    tree = {"model": {"path": str(folder)}, "models": {"judge": {"path": str(folder), **settings}}}
    context: Any = SimpleNamespace(
        config=parse_config(tree),
        models={"judge": model.pool.dispatcher},
        chat=SimulatedChat(),
        new_id=lambda: f"{next(numbers):032x}",
        metrics=metrics or Metrics(),
        clock=asyncio.get_running_loop().time,
    )
    return ModelAnswers(context)


QUESTION = [{"role": "user", "content": "11 12 13"}]


async def test_a_judge_is_not_asked_what_cannot_fit_into_its_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedChat, "prompt_ids", None)
    model, _ = frozen_model(tmp_path)
    answers = answers_of(tmp_path, model, context_length=1024)
    with pytest.raises(RolloutError, match=r"'judge' is asked about \d+ bytes, .* context of 1024 tokens"):
        await answers.ask("judge", [{"role": "user", "content": "x" * 10_000_000}])


async def test_a_model_answers_and_goes_on_elsewhere_with_its_tokens_when_its_engine_dies(
    tmp_path: Path,
) -> None:
    model, processes = frozen_model(tmp_path)
    await model.start_engines()
    metrics = Metrics()
    answers = answers_of(tmp_path, model, metrics)
    whole = await answers.ask("judge", QUESTION, max_new_tokens=20)
    for engine in processes.engines:
        engine.faults.append(Fault("die", after_tokens=1))
    async with services(**model.services):
        assert await answers.ask("judge", QUESTION, max_new_tokens=20) == whole
    assert value_of(metrics.model_retries_total.labels("judge")) >= 1
    assert len(whole.split()) <= 20
    with pytest.raises(ConfigError, match="the model 'critic' is asked, but models has judge"):
        await answers.ask("critic", QUESTION)

    async def refuse(request: Any) -> Any:
        raise RequestRefused("too long")
        yield

    for engine in processes.engines:
        engine.generate = refuse
    with pytest.raises(RolloutError, match="refuses what it is asked: too long"):
        await answers.ask("judge", QUESTION)


async def test_tokens_of_another_models_weights_are_no_answer(tmp_path: Path) -> None:
    """The judge's server was restarted from outside: its finish says so, after its tokens have come."""
    model, processes = frozen_model(tmp_path)
    await model.start_engines()
    answers = answers_of(tmp_path, model)
    whole = await answers.ask("judge", QUESTION, max_new_tokens=20)
    generate = {engine.engine_id: engine.generate for engine in processes.engines}

    async def restarted(request: Any) -> Any:
        for engine in processes.engines:
            engine.generate = generate[engine.engine_id]
        yield Chunk.of([7, 7, 7], [-1.0] * 3)
        raise VersionMismatch("judge-0 serves weights of version 'default'")

    for each in processes.engines:
        each.generate = restarted
    async with services(**model.services):
        assert await answers.ask("judge", QUESTION, max_new_tokens=20) == whole


# -- a teacher's scores -------------------------------------------------------------------------------


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
