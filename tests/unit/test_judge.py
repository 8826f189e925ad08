"""Judges: what they are asked, what is read from their answers, and what becomes of dead engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.config import Config, JudgeReward, parse_config
from async_rl.engine_protocol import Chunk
from async_rl.errors import ConfigError, RequestRefused, RewardError, RolloutError, VersionMismatch
from async_rl.observability.metrics import Metrics, value_of
from async_rl.rollout.model_answers import ModelAnswers
from async_rl.rollout.rewards import judge_calls
from async_rl.rollout.rewards.judge_calls import JudgeCall, fill_template, find_score
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.runtime.model_questions import ask_model, asking
from async_rl.runtime.supervision import services
from async_rl.types import Completion, Task
from tests.unit.test_frozen_models import frozen_model
from verification.simulation.breakable_engine import Fault
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
