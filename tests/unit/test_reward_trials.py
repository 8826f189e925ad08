"""`async-rl check` tries rewards on examples of the dataset."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from agent_loops import rewards
from async_rl.errors import ConfigError
from async_rl.run.reward_trials import try_rewards
from async_rl.types import Completion, Task
from tests.support.run_config import config_of
from tests.support.scripted_session import make_task

HERE = "tests.unit.test_reward_trials"


def always(task: Task, completion: Completion) -> float:
    return 1.0


def by_presence(task: Task, completion: Completion) -> float:
    return float(bool(completion.text))


def by_length(task: Task, completions: list[Completion]) -> list[float]:
    return [len(completion.text) / 100 for completion in completions]


def broken(task: Task, completion: Completion) -> float:
    raise KeyError("ground_truth")


def findings(reward: str, *answers: Any, **rollout: Any) -> list[str]:
    tasks = {"dataset train": [make_task(answer=answer) for answer in answers]}
    return try_rewards(config_of(reward=reward, **rollout), tasks)


@pytest.mark.parametrize(
    ("reward", "answers"),
    [
        ("agent_loops.rewards:last_number", ("4", 5, "so it is\n#### 1,000")),
        ("agent_loops.rewards:last_number", ("10 000", 42.0, "25 m^2")),
        ("agent_loops.rewards:exact_match", ("yes", 42.0, 1e-05)),
        ("agent_loops.rewards_math:math_answer", (r"\$18", "$18", r"\frac{1}{2}", "so\n#### 72")),
        ("agent_loops.rewards_math:math_answer", ("no", "Paris", "$x^2+1$")),
        (f"{HERE}:by_length", ("long", "longer")),
    ],
)
def test_a_reward_that_gives_reference_answers_more_than_empty_ones_is_right(
    reward: str, answers: tuple[Any, ...]
) -> None:
    tried = min(len(answers), 3)
    assert findings(reward, *answers) == [
        f"reward: {reward} scores {tried} reference answers and empty ones as expected"
    ]


@pytest.mark.parametrize(
    ("reward", "answer", "words"),
    [
        ("agent_loops.rewards:last_number", None, "the task has no answer: set data.keys.answer"),
        ("agent_loops.rewards:last_number", "four", "has no number"),
        ("agent_loops.rewards:exact_match", "", "the task has no answer"),
        ("agent_loops.rewards_math:math_answer", "?", "cannot be read as mathematics"),
        ("agent_loops.rewards_math:math_answer", ["4"], "is a list; expected text or a number"),
    ],
)
def test_answers_that_a_shipped_reward_cannot_score_are_refused(reward: str, answer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        findings(reward, answer)


@pytest.mark.parametrize(
    ("train", "validation", "words"),
    [
        (["4"] * 9 + [None], [], "tried on 4 examples: task .* of dataset t: .* the task has no answer"),
        (["4"] * 9 + [" ", math.nan], [], "tried on 5 examples: task .* of dataset t: "),
        (["4"] * 9, ["four"], "tried on 4 examples: task .* of validation set v: .* has no number"),
    ],
)
def test_each_dataset_is_tried_and_all_tasks_are_searched_for_missing_answers(
    train: list[Any], validation: list[Any], words: str
) -> None:
    named = {"dataset t": train, "validation set v": validation}
    sets = {name: [make_task(answer=answer) for answer in answers] for name, answers in named.items()}
    with pytest.raises(ConfigError, match=words):
        try_rewards(config_of(reward="agent_loops.rewards:last_number"), sets)


@pytest.mark.parametrize(
    ("answer", "other"),
    [("10 000", "20 000"), (r"\frac{9}{10}", r"\frac{8}{20}"), ("3 m^2", "4 m^2"), ("Paris", "arisP")],
)
def test_a_shipped_reward_that_scores_a_wrong_answer_as_high_is_refused(
    monkeypatch: pytest.MonkeyPatch, answer: str, other: str
) -> None:
    monkeypatch.setattr(rewards, "last_number", by_presence)
    with pytest.raises(ConfigError, match=f"it scores '{re.escape(repr(other)[1:-1])}' 1, as much as"):
        findings("agent_loops.rewards:last_number", answer)


@pytest.mark.parametrize(
    ("function", "words"),
    [("always", "scores an empty completion 1"), ("broken", "KeyError: 'ground_truth'")],
)
def test_a_users_reward_is_only_warned_about(function: str, words: str) -> None:
    (finding,) = findings(f"{HERE}:{function}", "4", "5")
    assert finding.startswith(f"WARNING: reward {HERE}:{function}, tried on 2 examples: task ")
    assert words in finding


def test_rewards_that_call_servers_or_models_are_not_tried() -> None:
    named = {"remote": {"kind": "http", "url": "http://127.0.0.1:1/score"}}
    assert findings("remote", "4", rewards=named) == [
        "reward: remote was not tried on examples, because it calls a server or a model"
    ]
