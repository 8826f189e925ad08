"""The rewards of a run: which one a task has, and a call of it with its limits.

```
 task ──► row's own | its data source's | the default ──► a name ──► function: loop, thread or worker process
                                                                     server:   POST
              a place of max_concurrent ──► the call, timeout_s ──► parts, of which `reward` is trained on
                    ▲                            │ raised, too late
                    └────────── back-off ◄───────┘ up to max_retries
```

A reward that raises, hangs or returns nonsense fails what it was called for, never the run.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, Protocol

from async_rl.config import Config, FunctionReward, HttpReward, RewardConfig
from async_rl.errors import ConfigError, RewardError
from async_rl.observability.metrics import Metrics
from async_rl.rollout.rewards.http_rewards import HttpAsker, Refused, Unavailable, request_of
from async_rl.rollout.rewards.signatures import (
    GROUP_STYLES,
    Style,
    arguments,
    namespace_of,
    parts_of,
    response_of,
    strictly,
    style_of,
)
from async_rl.runtime.loading import load_object
from async_rl.runtime.threads import call_in_thread
from async_rl.runtime.waits import waiting
from async_rl.runtime.worker_processes import WorkerProcesses, processes_asked
from async_rl.types import Completion, Task

_MAX_DELAY_S: Final = 30.0
"""Longest wait between two calls."""


class _RewardCall(Protocol):
    """One way to have completions scored."""

    groups: bool
    """Whether it scores all of a group at once."""
    strict: bool
    """See `reward_styles.parts_of`."""
    num_places: int | None
    """Most calls at a time, where it has an opinion."""

    async def __call__(self, task: Task, completions: Sequence[Completion]) -> Any:
        """The result as it comes."""
        ...

    async def close(self) -> None:
        """Let go of what it holds."""
        ...


class Rewards:
    """Scores what trajectories came to.

    Example:
        >>> rewards = Rewards(config, decode=chat.decode, metrics=metrics, clock=time.monotonic)
        >>> parts = await rewards.score(task, completion)
        >>> await rewards.close()
    """

    def __init__(
        self, config: Config, *, decode: Callable[[Any], str], metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        """Load what the config names; rows may name more.

        Args:
            config: Of the run.
            decode: Text of tokens.
            metrics: Of the run.
            clock: Monotonic seconds.

        Raises:
            ConfigError: A reward cannot be loaded.
            EnvironmentNotReady: One needs a package that is not installed.
        """
        self._config = config
        self._decode = decode
        self._metrics = metrics
        self._clock = clock
        self._rewards: dict[str, _Reward] = {}
        rollout = config.rollout
        for name in (rollout.reward, *rollout.rewards, *rollout.rewards_by_source.values()):
            self._of(name)

    def name_for(self, task: Task) -> str:
        """Which reward a task has.

        Raises:
            ConfigError: The row names one that cannot be loaded.
        """
        rollout = self._config.rollout
        name = task.reward or rollout.rewards_by_source.get(task.data_source) or rollout.reward
        self._of(name)
        return name

    def scores_groups(self, task: Task) -> bool:
        """Whether the task's reward is called once for all trajectories of a group."""
        return self._of(self.name_for(task)).call.groups

    async def score(self, task: Task, completion: Completion) -> dict[str, float]:
        """Named numbers for one trajectory, `reward` among them.

        Raises:
            RewardError: It comes to nothing.
        """
        return await self._of(self.name_for(task)).score(task, completion)

    async def score_group(
        self, task: Task, completions: Sequence[Completion]
    ) -> list[dict[str, float] | RewardError]:
        """The same for all of a group, by one call; an error in the place of each that comes to nothing."""
        return await self._of(self.name_for(task)).score_group(task, completions)

    async def close(self) -> None:
        """End worker processes and connections."""
        for reward in self._rewards.values():
            await reward.call.close()

    def _of(self, name: str) -> _Reward:
        if name not in self._rewards:
            self._rewards[name] = _Reward(name, self._settings(name), self)
        return self._rewards[name]

    def _settings(self, name: str) -> FunctionReward | HttpReward:
        named = self._config.rollout.rewards
        if name in named:
            return named[name]
        if ":" not in name:
            known = ", ".join(sorted(named)) or "none"
            raise ConfigError(
                f"reward {name!r} is neither a dotted path nor a name of rollout.rewards (there: {known}); "
                f"write `module:function`, or add rollout.rewards.{name}: {{function: module:function}}"
            )
        return FunctionReward(function=name)

    def _call_of(self, name: str, settings: FunctionReward | HttpReward) -> _RewardCall:
        if isinstance(settings, HttpReward):
            return _HttpRewardCall(HttpAsker(name, settings), settings.group, self._decode)
        return _LocalRewardCall(name, settings, self._config, self._decode)


class _Reward:
    """One reward, its limits and its counts."""

    def __init__(self, name: str, settings: FunctionReward | HttpReward, rewards: Rewards) -> None:
        self._name = name
        self._settings: RewardConfig = settings
        self.call = rewards._call_of(name, settings)
        self._limit_s = settings.timeout_s or rewards._config.rollout.reward_timeout_s
        self._limit_key = (
            f"rollout.rewards.{name}.timeout_s" if settings.timeout_s else "rollout.reward_timeout_s"
        )
        places = settings.max_concurrent or self.call.num_places
        self._places = asyncio.Semaphore(places) if places else None
        self._num_places = places
        self._metrics = rewards._metrics
        self._clock = rewards._clock

    async def score(self, task: Task, completion: Completion) -> dict[str, float]:
        """See `Rewards.score`."""
        try:
            return self._parts(await self._result(task, [completion]))
        except RewardError:
            self._metrics.reward_errors_total.labels(self._name).inc()
            raise

    async def score_group(
        self, task: Task, completions: Sequence[Completion]
    ) -> list[dict[str, float] | RewardError]:
        """See `Rewards.score_group`."""
        scores: list[dict[str, float] | RewardError] = []
        try:
            results = _each(await self._result(task, completions), len(completions))
        except RewardError as error:
            scores = [self._named(error)] * len(completions)
        else:
            for result in results:
                try:
                    scores.append(self._parts(result))
                except RewardError as error:
                    scores.append(error)
        failed = sum(isinstance(score, RewardError) for score in scores)
        self._metrics.reward_errors_total.labels(self._name).inc(failed)
        return scores

    async def _result(self, task: Task, completions: Sequence[Completion]) -> Any:
        """What the reward says, after as many calls as it takes and may."""
        delay_s, last = self._settings.retry_delay_s, self._settings.max_retries
        for retry in range(last + 1):
            try:
                async with self._place():
                    return await self._once(task, completions)
            except Refused as error:
                raise RewardError(f"reward {self._name} refused: {error}") from error
            except (RewardError, Unavailable) as error:
                failure = error
            if retry < last:
                self._metrics.reward_retries_total.labels(self._name).inc()
                asked_s = failure.after_s if isinstance(failure, Unavailable) else 0.0
                wait_s = min(_MAX_DELAY_S, max(asked_s, delay_s * 2.0**retry))
                with waiting("reward", self._name, limit_s=_MAX_DELAY_S):
                    await asyncio.sleep(wait_s)
        if isinstance(failure, Unavailable):
            raise RewardError(f"reward {self._name} cannot be had: {failure}") from failure
        raise failure

    def _place(self) -> Any:
        return (
            nullcontext()
            if self._places is None
            else _ConcurrencySlot(self._places, self._name, self._num_places)
        )

    async def _once(self, task: Task, completions: Sequence[Completion]) -> Any:
        name, limit_s, since_s = self._name, self._limit_s, self._clock()
        try:
            async with (
                asyncio.timeout(limit_s) as scope,
                waiting("reward", name, limit_s=self._settings.timeout_s, scope=scope) as wait,
            ):
                return await self.call(task, completions)
        except (Refused, Unavailable):
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and scope.expired():
                why = f"took more than {self._limit_key} = {limit_s}: raise it or make it faster"
                why = "was ended by the stall doctor: bound its own waits" if wait.cut else why
            else:
                why = f"raised {type(error).__name__}: {error}"
            raise RewardError(f"reward {name} {why}") from error
        finally:
            self._metrics.reward_seconds.labels(name).observe(self._clock() - since_s)

    def _parts(self, result: Any) -> dict[str, float]:
        try:
            return parts_of(result, part=self._settings.part, strict=self.call.strict)
        except RewardError as error:
            raise self._named(error) from None

    def _named(self, error: RewardError) -> RewardError:
        text = str(error)
        return error if text.startswith("reward ") else RewardError(f"reward {self._name} {text}")


class _ConcurrencySlot:
    """One of the calls that a reward has at a time."""

    def __init__(self, places: asyncio.Semaphore, name: str, limit: int | None) -> None:
        self._places, self._name, self._limit = places, name, limit

    async def __aenter__(self) -> None:
        with waiting("reward queue", self._name, why=lambda: f"{self._limit} calls of it run at a time"):
            await self._places.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._places.release()


class _LocalRewardCall:
    """A function of the user's: on the loop where it is async, else in a thread or a worker process."""

    def __init__(
        self, name: str, settings: FunctionReward, config: Config, decode: Callable[[Any], str]
    ) -> None:
        self._name = name
        self._path = settings.function
        self._function = load_object(settings.function, what="reward")
        if not callable(self._function):
            raise ConfigError(f"reward {settings.function!r} is {self._function!r:.80}, expected a function")
        self._style: Style = style_of(self._function) if settings.style == "auto" else settings.style
        self.groups = self._style in GROUP_STYLES
        self.strict = strictly(self._style)
        self._args = settings.args
        self._namespace = namespace_of(config, settings.args)
        self._decode = decode
        self._async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004 - an object with an async `__call__`
        )
        asked = settings.processes
        count = processes_asked(self._function) if asked is None else asked
        if count and self._async:
            raise ConfigError(
                f"reward {name} is async and is to run in {count} worker processes, which is for blocking "
                f"functions: set rollout.rewards.{name}.processes to 0"
            )
        self._workers = WorkerProcesses(settings.function, count) if count else None
        self.num_places = count or None

    async def __call__(self, task: Task, completions: Sequence[Completion]) -> Any:
        texts = self._style not in ("plain", "group")
        responses = [response_of(each, self._decode) if texts else "" for each in completions]
        args, kwargs = arguments(
            self._style, task, completions, responses, args=self._args, namespace=self._namespace
        )
        if self._async:
            return await self._function(*args, **kwargs)
        if self._workers is not None:
            return await self._workers.call(*args, **kwargs)
        value = await call_in_thread(partial(self._function, *args, **kwargs), name=self._name)
        return await value if inspect.isawaitable(value) else value

    async def close(self) -> None:
        if self._workers is not None:
            self._workers.close()


class _HttpRewardCall:
    """A server that is asked by POST."""

    def __init__(self, asker: HttpAsker, group: bool, decode: Callable[[Any], str]) -> None:
        self._asker = asker
        self.groups = group
        self.strict = False
        self.num_places: int | None = None
        self._decode = decode

    async def __call__(self, task: Task, completions: Sequence[Completion]) -> Any:
        responses = [response_of(completion, self._decode) for completion in completions]
        result = await self._asker.ask(request_of(task, completions, responses, group=self.groups))
        return (
            result["rewards"]
            if self.groups and isinstance(result, Mapping) and "rewards" in result
            else result
        )

    async def close(self) -> None:
        await self._asker.close()


def _each(results: Any, count: int) -> Sequence[Any]:
    """Results of a group, one a trajectory."""
    if isinstance(results, str | bytes | Mapping) or not hasattr(results, "__len__"):
        raise RewardError(f"returned {results!r:.200}, expected a list of {count} rewards, one a completion")
    if len(results) != count:
        raise RewardError(f"returned {len(results)} rewards, expected {count}, one a completion")
    return list(results)
