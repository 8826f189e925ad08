"""Tries rewards on examples before a run, because a reward that is silently wrong trains the wrong policy.

```
 some examples of each dataset ─► reference answer as completion: scores 1, or more than nothing
                               ├► with other digits: scores less (rewards of this project)
                               └► empty completion: scores 0            and neither raises
```

A wrong score is an error for rewards of this project (`agent_loops.rewards*`), and a warning for users' ones,
which may know better. Rewards that ask a server or a judge, or that the agent loop reports, are not tried.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from decimal import Decimal
from typing import Any, Final

from async_rl.config import Config, FunctionReward
from async_rl.errors import ConfigError, EnvironmentNotReady, RewardError
from async_rl.observability.metrics import Metrics
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.types import Completion, Task

_NUM_TASKS: Final = 3
"""Examples of each dataset that a reward is tried on: the first ones, whose form the others have."""

_WHOLE_NUMBER: Final = re.compile(
    r"(?<![\d^_])(?<![\^_]\{)([0-9])((?:(?:[ ,.:'\u2019_/\u00a0\u202f]|,\\!|\{,\}|\\,)?\d)*)"
)
"""The first digit of a number or fraction in any spelling, and the rest, but no exponent: units have some."""

_OTHER_DIGIT: Final = dict(zip("0123456789", "1234567898", strict=True))
"""No digit becomes 0: the next would decide."""

_SHIPPED: Final = "agent_loops.rewards"
_OF_TESTS: Final = "agent_loops.rewards_code:"
"""Rewards whose answers are tests, which no completion can quote."""
_OF_LOOPS: Final = "agent_loops.environment:"
"""Rewards that return what the agent loop has reported."""


def try_rewards(config: Config, sets: Mapping[str, Iterable[Task]]) -> list[str]:
    """Try the rewards of tasks on some of each dataset, and on some that have no answer, if there are any.

    Messages call each dataset by its key in `sets`.

    Returns:
        One sentence for each reward.

    Raises:
        ConfigError: A reward of this project raises, or gives a wrong score.
        EnvironmentNotReady: A reward needs what this machine lacks.
    """
    return asyncio.run(_try_rewards(config, sets))


async def _try_rewards(config: Config, sets: Mapping[str, Iterable[Task]]) -> list[str]:
    async with aclosing(_Trial(config)) as trial:
        chosen: dict[str, list[tuple[str, Task]]] = {}
        counts: Counter[tuple[str, str, bool]] = Counter()
        for place, task in ((place, task) for place, tasks in sets.items() for task in tasks):
            key = (place, name := trial.rewards.name_for(task), _is_absent(task.answer))
            if counts[key] < _NUM_TASKS:
                chosen.setdefault(name, []).append((place, task))
            counts[key] += 1
        return [finding for name, some in chosen.items() for finding in await trial.try_reward(name, some)]


class _Trial:
    """Scores made-up completions with the rewards of a config."""

    def __init__(self, config: Config) -> None:
        self.rewards = Rewards(config, decode=str, metrics=Metrics(), clock=time.monotonic)
        self._declared = config.rollout.rewards

    async def aclose(self) -> None:
        await self.rewards.close()

    async def try_reward(self, name: str, tasks: list[tuple[str, Task]]) -> list[str]:
        """Try one reward on its tasks."""
        settings = self._declared.get(name, FunctionReward(function=name))
        if not isinstance(settings, FunctionReward):
            return [f"reward: {name} was not tried on examples, because it calls a server or a model"]
        function = settings.function
        if function.startswith(_OF_LOOPS):
            return [f"reward: {name} was not tried on examples, because the agent loop reports it"]
        problems = [
            f"task {task.task_id} of {place}: {problem}"
            for place, task in tasks
            for problem in await self._problems(task, function)
        ]
        if problems and function.startswith(_SHIPPED):
            raise ConfigError(
                f"reward {name}, tried on {len(tasks)} examples: {problems[0]}. Look at the answers of the "
                "dataset and at data.keys.answer"
            )
        if problems:
            return [f"WARNING: reward {name}, tried on {len(tasks)} examples: {problems[0]}"]
        return [f"reward: {name} scores {len(tasks)} reference answers and empty ones as expected"]

    async def _problems(self, task: Task, function: str) -> list[str]:
        empty = await self._score(task, "")
        if isinstance(empty, str):
            return [f"it fails for an empty completion: {empty}"]
        wrong = [f"it scores an empty completion {empty:g}, expected 0"] if empty > 0 else []
        if function.startswith(_OF_TESTS) or task.answer is None:
            return wrong
        reference = _text_of(task.answer)
        score = await self._best_score(task, reference)
        if isinstance(score, str):
            return [*wrong, f"it fails for the reference answer {reference!r:.80}: {score}"]
        if score <= empty:
            return [
                *wrong,
                f"it scores the reference answer {reference!r:.80} {score:g}, and an empty completion "
                f"{empty:g}, expected more",
            ]
        other = _with_other_digits(reference)
        if function.startswith(_SHIPPED) and other != reference:
            found = await self._best_score(task, other)
            if not isinstance(found, str) and found >= score:
                wrong.append(
                    f"it scores {other!r:.80} {found:g}, as much as the reference answer {reference!r:.80}; "
                    "expected less"
                )
        return wrong

    async def _best_score(self, task: Task, answer: str) -> float | str:
        """Return the reward of an answer, alone or in a box, or why there is none."""
        boxed = rf"\boxed{{{answer.rpartition('####')[2].strip()}}}"
        scores = [await self._score(task, text) for text in (answer, boxed)]
        return max((score for score in scores if not isinstance(score, str)), default=scores[0])

    async def _score(self, task: Task, text: str) -> float | str:
        """Return the reward of a completion, or why there is none."""
        message = {"role": "assistant", "content": text}
        completion = Completion(messages=[*task.messages, message], text=text, stop_reason="completed")
        try:
            if not self.rewards.scores_groups(task):
                return (await self.rewards.score_completion(task, completion))["reward"]
            scored = await self.rewards.score_group(task, [completion])
        except RewardError as error:
            if isinstance(error.__cause__, EnvironmentNotReady):
                raise error.__cause__ from None
            return str(error)
        return str(scored[0]) if isinstance(scored[0], RewardError) else scored[0]["reward"]


def _text_of(answer: Any) -> str:
    """Return an answer as a policy would write it: 42.0 without its fraction, and numbers of many digits."""
    if isinstance(answer, float):
        return f"{Decimal(repr(float(answer))):f}".removesuffix(".0")
    return str(Decimal(answer)) if type(answer) is int else str(answer)


def _is_absent(answer: Any) -> bool:
    """Return whether an answer is null, blank or NaN."""
    return answer is None or answer != answer or (isinstance(answer, str) and not answer.strip())


def _with_other_digits(answer: str) -> str:
    """Return an answer in which each number begins with another digit; or a word with its letters moved.

    Words of two letters may be products, as `xy`.
    """
    if answer.isalpha() and len(answer) > 2:
        return answer[1:] + answer[0]
    return _WHOLE_NUMBER.sub(lambda found: _OTHER_DIGIT[found[1]] + found[2], answer)
