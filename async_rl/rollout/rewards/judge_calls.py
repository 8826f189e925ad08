"""Rewards from a judge: a further model that answers a prompt about the policy's answer.

```
 template, {question} {response} ─► prompt ─► cache, or the judge ─► its text ─► regex ─► score / scale
                                                       ▲                       │ no score
                                                       └──── a retry, sampled ◄┘
```
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakValueDictionary

from async_rl.config import JudgeReward
from async_rl.errors import RewardError
from async_rl.observability.metrics import Metrics
from async_rl.runtime.model_questions import AskModel
from async_rl.types import Completion, Task

_MAX_SHOWN: Final = 200
"""The most characters of an answer that an error shows."""

_RETRY_TEMPERATURE: Final = 1.0
"""At the temperature 0 a judge would answer the same again."""

CACHE_SIZE: Final = 10_000
"""Scores that each process keeps by prompt: some megabytes."""

_MAX_UNPARSED: Final = 10_000

PLACEHOLDERS: Final = ("question", "conversation", "response", "answer")
"""What a template may have in braces."""


class JudgeCall:
    """Implements `reward_calls._RewardCall` by asking a judge about each completion."""

    groups = False
    strict = True
    max_concurrent: int | None = None

    def __init__(self, name: str, settings: JudgeReward, ask: AskModel, metrics: Metrics) -> None:
        """Prepare to ask.

        Args:
            name: The reward.
            settings: Its settings.
            ask: Asks a model in `models`.
            metrics: Counts answers.
        """
        self._name = name
        self._settings = settings
        self._ask = ask
        self._metrics = metrics
        self._cache: OrderedDict[str, float] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._unparsed: OrderedDict[str, None] = OrderedDict()
        """Prompts whose last answer had no score."""

    async def __call__(self, task: Task, completions: Sequence[Completion]) -> Any:
        """Return the score of a completion.

        Raises:
            RewardError: The judge's answer has no score.
        """
        (completion,) = completions
        prompt = fill_template(self._settings.template, task, completion)
        lock = self._locks.setdefault(prompt, asyncio.Lock())
        async with lock:  # who asks the same waits for the answer
            if prompt in self._cache:
                self._cache.move_to_end(prompt)
                self._metrics.judge_answers_total.labels(self._name, "cached").inc()
                return self._cache[prompt]
            return await self._ask_judge(prompt)

    async def _ask_judge(self, prompt: str) -> float:
        settings = self._settings
        again = prompt in self._unparsed
        text = await self._ask(
            settings.judge,
            [{"role": "user", "content": prompt}],
            max_new_tokens=settings.max_new_tokens,
            temperature=max(settings.temperature, _RETRY_TEMPERATURE) if again else settings.temperature,
        )
        score = find_score(settings.score, text)
        if score is None:
            self._metrics.judge_answers_total.labels(self._name, "no_score").inc()
            _keep(self._unparsed, prompt, None, _MAX_UNPARSED)
            raise RewardError(
                f"asked {settings.judge!r}, and `score` finds no number in its answer {text[-_MAX_SHOWN:]!r}"
            )
        self._metrics.judge_answers_total.labels(self._name, "scored").inc()
        self._unparsed.pop(prompt, None)
        _keep(self._cache, prompt, score / settings.scale, CACHE_SIZE)
        return score / settings.scale

    async def close(self) -> None:
        """Release nothing: the engines are the run's."""


def _keep(kept: OrderedDict[str, Any], key: str, value: Any, limit: int) -> None:
    kept[key] = value
    while len(kept) > limit:
        kept.popitem(last=False)


def fill_template(template: str, task: Task, completion: Completion) -> str:
    """Return a template with what its placeholders stand for.

    All are filled at once: braces in what the policy wrote stay as they are, so that it cannot have the
    reference answer written into its own.
    """
    parts = {
        "question": "\n\n".join(str(message.get("content") or "") for message in task.messages),
        "conversation": "\n\n".join(
            f"{message['role']}: {message.get('content') or ''}" for message in completion.messages
        ),
        "response": completion.text,
        "answer": str(task.answer),
    }
    return re.sub(rf"\{{({'|'.join(PLACEHOLDERS)})\}}", lambda found: parts[found.group(1)], template)


def find_score(pattern: str, text: str) -> float | None:
    """Return the number that a pattern's last match has in its group, or as a whole.

    None without a match, and where it is no finite number: an answer is then asked for again.
    """
    found = list(re.finditer(pattern, text))
    if not found:
        return None
    last = found[-1]
    try:
        score = float(last.group(1) if last.re.groups else last.group())
    except (TypeError, ValueError):
        return None
    return score if math.isfinite(score) else None
