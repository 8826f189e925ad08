"""Tries rewards on examples before a run, because a reward that is silently wrong trains the wrong policy.

```
 some examples of each reward ─► reference answer as completion: scores 1, or more than nothing
                              └► empty completion: scores 0            and neither raises
```

A wrong score is an error for rewards of this project (`agent_loops.rewards*`), and a warning for users' ones,
which may know better. Rewards that ask a server or a judge are not tried.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import aclosing
from typing import Final

from async_rl.config import Config, FunctionReward
from async_rl.errors import ConfigError, EnvironmentNotReady, RewardError
from async_rl.observability.metrics import Metrics
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.types import Completion, Task

_NUM_TASKS: Final = 3
"""Examples that each reward is tried on: the first ones, which have the form of all others."""

_SHIPPED: Final = "agent_loops.rewards"
_OF_TESTS: Final = "agent_loops.rewards_code:"
"""Rewards whose answers are tests, which no completion can quote."""


def try_rewards(config: Config, tasks: Iterable[Task]) -> list[str]:
    """Try the rewards of tasks on some of them.

    Returns:
        One sentence for each reward.

    Raises:
        ConfigError: A reward of this project raises, or gives a wrong score.
        EnvironmentNotReady: A reward needs what this machine lacks.
    """
    return asyncio.run(_try_rewards(config, tasks))


async def _try_rewards(config: Config, tasks: Iterable[Task]) -> list[str]:
    async with aclosing(_Trial(config)) as trial:
        chosen: dict[str, list[Task]] = {}
        for task in tasks:
            some = chosen.setdefault(trial.rewards.name_for(task), [])
            if len(some) < _NUM_TASKS:
                some.append(task)
        return [finding for name, some in chosen.items() for finding in await trial.try_reward(name, some)]


class _Trial:
    """Scores made-up completions with the rewards of a config."""

    def __init__(self, config: Config) -> None:
        self.rewards = Rewards(config, decode=str, metrics=Metrics(), clock=time.monotonic)
        self._declared = config.rollout.rewards

    async def aclose(self) -> None:
        await self.rewards.close()

    async def try_reward(self, name: str, tasks: list[Task]) -> list[str]:
        """Try one reward on its tasks."""
        settings = self._declared.get(name, FunctionReward(function=name))
        if not isinstance(settings, FunctionReward):
            return [f"reward: {name} was not tried on examples, because it calls a server or a model"]
        function = settings.function
        problems = [
            f"task {task.task_id}: {problem}"
            for task in tasks
            for problem in await self._problems(task, is_test=function.startswith(_OF_TESTS))
        ]
        if problems and function.startswith(_SHIPPED):
            raise ConfigError(
                f"reward {name}, tried on {len(tasks)} examples: {problems[0]}. Look at the answers of the "
                "dataset and at data.answer_key"
            )
        if problems:
            return [f"WARNING: reward {name}, tried on {len(tasks)} examples: {problems[0]}"]
        return [f"reward: {name} scores {len(tasks)} reference answers and empty ones as expected"]

    async def _problems(self, task: Task, *, is_test: bool) -> list[str]:
        empty = await self._score(task, "")
        if isinstance(empty, str):
            return [f"it fails for an empty completion: {empty}"]
        wrong = [f"it scores an empty completion {empty:g}, expected 0"] if empty > 0 else []
        if is_test or task.answer is None:
            return wrong
        reference = str(task.answer)
        boxed = rf"\boxed{{{reference.rpartition('####')[2].strip()}}}"
        scores = [await self._score(task, text) for text in (reference, boxed)]
        numbers = [score for score in scores if not isinstance(score, str)]
        if not numbers:
            return [*wrong, f"it fails for the reference answer {reference!r:.80}: {scores[0]}"]
        if max(numbers) <= empty:
            wrong.append(
                f"it scores the reference answer {reference!r:.80} {max(numbers):g}, and an empty completion "
                f"{empty:g}, expected more"
            )
        return wrong

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
