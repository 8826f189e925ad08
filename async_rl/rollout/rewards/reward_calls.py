"""The rewards of a run: which one a task has, and how it is called within its limits.

```
 task ──► the task's own | its data source's | the default ──► a name
 name ──► function: event loop, thread or worker process | server: POST | judge: a model in `models`

 one of max_concurrent slots ──► the call, at most timeout_s ──► parts; `reward` is trained on
              ▲                             │ error or timeout
              └───────── back-off ◄─────────┘ up to max_retries; up to MAX_OUTAGE_S where no server listens
```

A reward that raises, hangs or returns an invalid value fails the trajectories that it was called for, never
the run, and never scores them 0. A failure of its infrastructure (a server, a process, a sandbox, a time
limit) is a `RewardUnavailable` and is counted apart.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import aiohttp

from async_rl.config import Config, FunctionReward, HttpReward, JudgeReward, RewardConfig
from async_rl.errors import (
    ConfigError,
    EnvironmentNotReady,
    FailureKind,
    RewardError,
    RewardUnavailable,
    SandboxLost,
)
from async_rl.observability.metrics import Metrics
from async_rl.rollout.rewards.http_rewards import (
    RewardClient,
    RewardRefused,
    RewardUnreachable,
    request_of,
)
from async_rl.rollout.rewards.judge_calls import JudgeCall
from async_rl.rollout.rewards.signatures import (
    GROUP_STYLES,
    Style,
    arguments,
    namespace_of,
    parts_of,
    refuse_signature,
    requires_numbers,
    response_of,
    style_of,
)
from async_rl.runtime.loading import load_object
from async_rl.runtime.model_questions import ask_model
from async_rl.runtime.supervision import contained
from async_rl.runtime.threads import call_in_thread
from async_rl.runtime.user_processes import ProcessScope
from async_rl.runtime.waits import waiting
from async_rl.runtime.worker_processes import WorkerProcesses, processes_asked
from async_rl.types import Completion, Task

R = TypeVar("R")

_MAX_DELAY_S: Final = 30.0
"""The longest wait between two calls."""

FIRST_DELAY_S: Final = 1.0
"""The wait before the first retry; it doubles each time."""

MAX_OUTAGE_S: Final = 300.0
"""How long a request is repeated while no server accepts connections: a server is started again within that.
It uses up no retry."""

_OUTAGE_DELAY_S: Final = 1.0
"""How often a connection to a server that is gone is tried. A refused connection costs next to nothing."""

_FAILED: Final[Mapping[str, float]] = {"reward": 0.0}
"""The parts of the reward of a trajectory whose agent failed."""

_CLEAN_UP_S: Final = 5.0
"""How long an async reward may release what it holds after it was cancelled."""


class _RewardCall(Protocol):
    """One way to score completions."""

    groups: bool
    """Whether one call scores all trajectories of a group."""
    strict: bool
    """Whether all parts must be numbers, as `signatures.parts_of` takes it."""
    max_concurrent: int | None
    """The most concurrent calls, if the implementation limits them."""

    async def __call__(self, task: Task, completions: Sequence[Completion]) -> Any:
        """Return the result as the function or server returned it."""
        ...

    async def close(self) -> None:
        """Release processes and connections."""
        ...


class Rewards:
    """Scores finished trajectories."""

    def __init__(
        self, config: Config, *, decode: Callable[[Any], str], metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        """Load the rewards that the config names; tasks may name more.

        Args:
            config: The settings of the run.
            decode: Decodes token ids to text.
            metrics: Counts calls, errors and retries.
            clock: Monotonic seconds.

        Raises:
            ConfigError: A reward cannot be loaded.
            EnvironmentNotReady: A reward needs a package that is not installed.
        """
        self._config = config
        self._decode = decode
        self._metrics = metrics
        self._clock = clock
        self._rewards: dict[str, _Reward] = {}
        self._processes = ProcessScope(
            "the rewards of the run",
            lambda kind, reason: metrics.user_processes_reaped_total.labels(kind, reason).inc(),
        )
        rollout = config.rollout
        for name in (rollout.reward, *rollout.rewards, *rollout.rewards_by_source.values()):
            self._named_reward(name)

    def name_for(self, task: Task) -> str:
        """Return the name of a task's reward.

        Raises:
            ConfigError: The task names a reward that is not declared or cannot be loaded.
        """
        rollout = self._config.rollout
        name = task.reward or rollout.rewards_by_source.get(task.data_source) or rollout.reward
        self._named_reward(name)
        return name

    def scores_groups(self, task: Task) -> bool:
        """Return whether the task's reward is called once for all trajectories of a group."""
        return self._named_reward(self.name_for(task)).call.groups

    async def score_completion(self, task: Task, completion: Completion) -> dict[str, float]:
        """Score one trajectory.

        Returns:
            The parts of its reward by name, `reward` among them.

        Raises:
            RewardError: The reward failed.
        """
        if completion.stop_reason == "failed":
            return dict(_FAILED)
        with self._processes.active():
            return await self._named_reward(self.name_for(task)).score_completion(task, completion)

    async def score_group(
        self, task: Task, completions: Sequence[Completion]
    ) -> list[dict[str, float] | RewardError]:
        """Score all trajectories of a group by one call; a failed one has an error in place of its parts."""
        ended = [each for each in completions if each.stop_reason != "failed"]
        reward = self._named_reward(self.name_for(task))
        with self._processes.active():
            scores = iter(await reward.score_group(task, ended) if ended else ())
        return [dict(_FAILED) if each.stop_reason == "failed" else next(scores) for each in completions]

    async def close(self) -> None:
        """End worker processes and connections."""
        try:
            for reward in self._rewards.values():
                await reward.call.close()
        finally:
            self._processes.end("run_ended")

    def _named_reward(self, name: str) -> _Reward:
        if name not in self._rewards:
            settings = self._settings_of(name)
            self._rewards[name] = _Reward(
                name,
                settings,
                self._make_call(name, settings),
                timeout_s=self._config.rollout.reward_timeout_s,
                metrics=self._metrics,
                clock=self._clock,
            )
        return self._rewards[name]

    def _settings_of(self, name: str) -> FunctionReward | HttpReward | JudgeReward:
        named = self._config.rollout.rewards
        if name in named:
            return named[name]
        if ":" not in name:
            known = ", ".join(sorted(named)) or "none"
            raise ConfigError(
                f"reward {name!r} is neither a dotted path nor a name of rollout.rewards (there: {known}); "
                f"write `module:function`, or add rollout.rewards.{name}: {{function: module:function}}"
            )
        rollout = self._config.rollout
        declared = (rollout.reward, *rollout.rewards_by_source.values())
        if name not in declared and not rollout.trust_examples:
            raise ConfigError(
                f"an example names the reward {name}, which the config does not declare: add "
                f"rollout.rewards: {{mine: {{function: {name}}}}} and write `mine` in the example. Or set "
                f"rollout.trust_examples: true, which lets the dataset run any code with your rights"
            )
        return FunctionReward(function=name)

    def _make_call(self, name: str, settings: FunctionReward | HttpReward | JudgeReward) -> _RewardCall:
        if isinstance(settings, HttpReward):
            return _HttpRewardCall(RewardClient(name, settings), settings.group, self._decode)
        if isinstance(settings, JudgeReward):
            return JudgeCall(name, settings, ask_model, self._metrics)
        return _LocalRewardCall(name, settings, self._config, self._decode)


class _Reward:
    """One reward, with its limits and metrics."""

    def __init__(
        self,
        name: str,
        settings: RewardConfig,
        call: _RewardCall,
        *,
        timeout_s: float,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._settings = settings
        self.call = call
        self._limit_s = settings.timeout_s or timeout_s
        self._limit_key = (
            f"rollout.rewards.{name}.timeout_s" if settings.timeout_s else "rollout.reward_timeout_s"
        )
        self._max_outage_s = MAX_OUTAGE_S if isinstance(settings, HttpReward) else 0.0
        self._max_concurrent = settings.max_concurrent or call.max_concurrent
        self._slots = asyncio.Semaphore(self._max_concurrent) if self._max_concurrent else None
        self._metrics = metrics
        self._clock = clock

    async def score_completion(self, task: Task, completion: Completion) -> dict[str, float]:
        """Score one trajectory."""
        try:
            return self._parts(await self._call_with_retries(task, [completion]))
        except RewardError as error:
            self._count([error])
            raise

    async def score_group(
        self, task: Task, completions: Sequence[Completion]
    ) -> list[dict[str, float] | RewardError]:
        """Score all trajectories of a group by one call."""
        scores: list[dict[str, float] | RewardError] = []
        try:
            returned = await self._call_with_retries(task, completions)
            results = self._read(returned, partial(_results_of_group, count=len(completions)))
        except RewardError as error:
            scores = [self._with_name(error)] * len(completions)
        else:
            for result in results:
                try:
                    scores.append(self._parts(result))
                except RewardError as error:
                    scores.append(error)
        self._count([score for score in scores if isinstance(score, RewardError)])
        return scores

    def _count(self, errors: Sequence[RewardError]) -> None:
        for error in errors:
            cause = "infrastructure" if isinstance(error, RewardUnavailable) else "reward"
            self._metrics.reward_errors_total.labels(self._name, cause).inc()

    async def _call_with_retries(self, task: Task, completions: Sequence[Completion]) -> Any:
        """Call the reward until a call succeeds or its retries are used up."""
        delay_s, last = FIRST_DELAY_S, self._settings.max_retries
        outage_end_s: float | None = None
        retry = 0
        while True:
            try:
                async with self._slot():
                    return await self._call_once(task, completions)
            except RewardRefused as error:
                kind = RewardError if error.because_of_request else RewardUnavailable
                raise kind(f"reward {self._name} refused: {error}") from error
            except RewardError as error:
                failure = error
            if isinstance(failure.__cause__, RewardUnreachable):
                outage_end_s = outage_end_s or self._clock() + self._max_outage_s
            else:
                outage_end_s = None
            if outage_end_s is not None and self._clock() < outage_end_s:
                wait_s = _OUTAGE_DELAY_S
            elif retry < last:
                asked_s = failure.after_s if isinstance(failure, RewardUnavailable) else 0.0
                wait_s = min(_MAX_DELAY_S, max(asked_s, delay_s * 2.0**retry))
                retry += 1
            else:
                break
            self._metrics.reward_retries_total.labels(self._name).inc()
            with waiting("reward", self._name, limit_s=_MAX_DELAY_S):
                await asyncio.sleep(wait_s)
        raise failure

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Take one of the concurrent calls for the block, if they are limited."""
        if self._slots is None:
            yield
            return
        with waiting(
            "reward queue", self._name, why=lambda: f"{self._max_concurrent} calls of it run at a time"
        ):
            await self._slots.acquire()
        try:
            yield
        finally:
            self._slots.release()

    async def _call_once(self, task: Task, completions: Sequence[Completion]) -> Any:
        name, limit_s, since_s = self._name, self._limit_s, self._clock()
        try:
            async with (
                asyncio.timeout(limit_s) as scope,
                waiting("reward", name, limit_s=self._settings.timeout_s, scope=scope) as wait,
            ):
                return await self.call(task, completions)
        except RewardRefused:
            raise
        except RewardUnavailable as error:
            raise RewardUnavailable(f"reward {name} is unavailable: {error}", error.after_s) from error
        except Exception as error:
            kind = RewardUnavailable if _is_infrastructure(error) else RewardError
            failure_kind: FailureKind = "sandbox_lost" if isinstance(error, SandboxLost) else "other"
            if isinstance(error, TimeoutError) and scope.expired():
                why = f"took more than {self._limit_key} = {limit_s}: raise it or make it faster"
                why = "was ended by the stall doctor: bound its own waits" if wait.cut else why
                failure_kind = "time_over"
            else:
                why = f"raised {type(error).__name__}: {error}"
            failure = kind(f"reward {name} {why}")
            failure.failure_kind = failure_kind
            raise failure from error
        finally:
            self._metrics.reward_seconds.labels(name).observe(self._clock() - since_s)

    def _parts(self, result: Any) -> dict[str, float]:
        return self._read(result, partial(parts_of, part=self._settings.part, strict=self.call.strict))

    def _read(self, returned: Any, read: Callable[[Any], R]) -> R:
        """Read what the user's code returned, which may be any object."""
        try:
            return read(returned)
        except RewardError as error:
            raise self._with_name(error) from None
        except Exception as error:  # methods of a user's class may raise anything
            raise RewardError(
                f"reward {self._name} returned an object of the type {type(returned).__name__} that cannot "
                f"be read ({type(error).__name__}: {error}), expected a number or a mapping of numbers"
            ) from error

    def _with_name(self, error: RewardError) -> RewardError:
        text = str(error)
        return error if text.startswith("reward ") else RewardError(f"reward {self._name} {text}")


def _is_infrastructure(error: BaseException | None) -> bool:
    """Return whether an error is, or was caused by, one of the system: a connection, a process, a limit.

    Clients of servers often wrap them: `openai.APIConnectionError` is caused by an `OSError`.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(
            error, OSError | MemoryError | EnvironmentNotReady | SandboxLost | aiohttp.ClientConnectionError
        ):
            return True  # TimeoutError and the death of a worker process are OSErrors
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


class _LocalRewardCall:
    """Calls a user's function: on the event loop if it is async, else in a thread or a worker process."""

    def __init__(
        self, name: str, settings: FunctionReward, config: Config, decode: Callable[[Any], str]
    ) -> None:
        self._name = name
        self._path = settings.function
        self._function = load_object(settings.function, what="reward")
        if not callable(self._function):
            raise ConfigError(f"reward {settings.function!r} is {self._function!r:.80}, expected a function")
        self._style: Style = style_of(self._function) if settings.style == "auto" else settings.style
        refuse_signature(self._function, self._style, name, settings.args)
        self.groups = self._style in GROUP_STYLES
        self.strict = requires_numbers(self._style)
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
                f"reward {name} is async and configured for {count} worker processes, which run blocking "
                f"functions only: set rollout.rewards.{name}.processes to 0"
            )
        self._workers = WorkerProcesses(settings.function, count) if count else None
        self.max_concurrent = count or None

    async def __call__(self, task: Task, completions: Sequence[Completion]) -> Any:
        texts = self._style not in ("plain", "group")
        responses = [response_of(each, self._decode) if texts else "" for each in completions]
        args, kwargs = arguments(
            self._style, task, completions, responses, args=self._args, namespace=self._namespace
        )
        if self._async:
            return await contained(self._function(*args, **kwargs), limit_s=_CLEAN_UP_S)
        if self._workers is not None:
            return await self._workers.call(*args, **kwargs)
        value = await call_in_thread(partial(self._function, *args, **kwargs), name=self._name)
        if not inspect.isawaitable(value):
            return value

        async def result() -> Any:
            return await value

        return await contained(result(), limit_s=_CLEAN_UP_S)

    async def close(self) -> None:
        if self._workers is not None:
            self._workers.close()


class _HttpRewardCall:
    """Calls a reward server by POST."""

    def __init__(self, client: RewardClient, group: bool, decode: Callable[[Any], str]) -> None:
        self._client = client
        self.groups = group
        self.strict = False
        self.max_concurrent: int | None = None
        self._decode = decode

    async def __call__(self, task: Task, completions: Sequence[Completion]) -> Any:
        responses = [response_of(completion, self._decode) for completion in completions]
        result = await self._client.post_request(request_of(task, completions, responses, group=self.groups))
        return (
            result["rewards"]
            if self.groups and isinstance(result, Mapping) and "rewards" in result
            else result
        )

    async def close(self) -> None:
        await self._client.close()


def _results_of_group(results: Any, count: int) -> Sequence[Any]:
    """Return the results of a group as a list with one result for each completion."""
    if isinstance(results, str | bytes | Mapping) or not hasattr(results, "__len__"):
        raise RewardError(
            f"returned {results!r:.200}, expected a list of {count} rewards, one for each completion"
        )
    if len(results) != count:
        raise RewardError(f"returned {len(results)} rewards, expected {count}, one for each completion")
    return list(results)
