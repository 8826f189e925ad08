"""The work of a planned job: how long answers are, how fast what makes them, and the loop that asks for them.

**The fluid bound.** With E engines of S slots, a decode step of base + slope · S seconds and answers of m
tokens in the mean, engines that are always full, weight updates that take no time and a trainer that is never
waited for would finish

    R = E · S / (base + slope · S) / m    trajectories a second.

Prompts cost nothing in it. Answers are lognormal and cut: m is the mean after the cut.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final, NamedTuple, overload

import numpy as np
from msgspec.structs import replace

from async_rl.config import Config, EvaluationConfig, SGLangEngines
from async_rl.config.base import Meta, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Strict
from async_rl.config.urls_file import read_urls
from async_rl.observability.records import StepRecord
from async_rl.planning.coarse_engine import MARKS, EngineSpeed, mark
from async_rl.rollout.session.api import Session
from async_rl.types import Completion, Int32Array, Task

_NUM_TASKS: Final = 1 << 40
"""As good as endless."""

WARM_UP: Final = 5
"""The first 1/5 of a run's steps precede its steady state and are left out."""

_MOST_IDLE: Final = 0.9
"""More than that is no steady state to take a speed from."""

_TRAIN_SHARE: Final = 0.9
"""A step's share of its batch's fluid generation time, where nothing says the trainer's speed."""


class Workload(Strict, frozen=True, kw_only=True):
    """What a config does not say of a job: how long answers are, and how fast engines and trainer.

    The docstrings of the fields are the help texts of the flags of `async-rl plan`.
    """

    prompt_tokens: PositiveInt = 512
    """Tokens of a prompt."""
    mean_tokens: PositiveFloat = 8192.0
    """Mean of a lognormal answer before it is cut at the longest; default: a quarter of that."""
    sigma: NonNegativeFloat = 0.8
    """Standard deviation of its logarithm; 0 makes all answers equal."""
    max_tokens: PositiveInt = 32768
    """Longest answer, all turns together; default: `rollout.max_new_tokens` for each turn."""
    turns: PositiveInt = 1
    """Turns of an answer, which are equally long."""
    tool_tokens: NonNegativeInt = 0
    """Tokens read between two turns."""
    tool_s: NonNegativeFloat = 0.0
    """Mean seconds between two turns, in which a tool runs."""
    tool_sigma: NonNegativeFloat = 0.0
    """Standard deviation of the logarithm of that time; 0 makes all equal."""
    tool_limit_s: PositiveFloat | None = None
    """Seconds after which a tool is stopped, and the next turn begins; default: `rollout.tool_timeout_s`."""
    decode_base_s: NonNegativeFloat = 0.012
    """Seconds of a decode step, whatever the number of running calls; default: computed for `--hardware`, if
    engines run on GPUs and `model.path` says the model, else 12 ms."""
    decode_per_call_s: NonNegativeFloat = 0.00006
    """Seconds that each running call adds to it; default: computed likewise, else 0.06 ms."""
    prefill_tokens_per_s: PositiveFloat = 30000.0
    """Prefill speed of an engine; default: computed likewise, else 30,000."""
    prefill_call_s: NonNegativeFloat = 0.0
    """Seconds that each call takes the engine beside its tokens."""
    call_steps: NonNegativeFloat = 0.0
    """What each call of an engine takes beside them, in decode steps: HTTP, tokenizing and waits for steps
    that have begun."""
    sync_s: NonNegativeFloat = 5.0
    """Pause of an engine in a weight update, seconds; default: computed from the following rates and the size
    of the model, if `model.path` says it, else 5."""
    abort_call_s: NonNegativeFloat = 0.0
    """Seconds that the pause is longer for each running call that an update aborts."""
    publish_s: NonNegativeFloat = 0.0
    """Seconds in which the trainer writes weights while engines continue; default: computed with the pause,
    else 0."""
    link_bytes_per_s: PositiveFloat = 45e9
    """What a trainer rank sends to engines, and what a rank of an engine receives; default: 400 Gbit/s for
    each, less what protocols take."""
    gather_bytes_per_s: PositiveFloat = 20e9
    """What a sending rank gathers from its neighbours and copies into buckets; default: a 30B model in 3 s,
    because it is gathered parameter by parameter; not measured."""
    load_bytes_per_s: PositiveFloat = 100e9
    """What a rank of an engine copies from buckets into its parameters; default: with the request, 10 ms for
    a bucket of 256 MiB; not measured."""
    update_request_s: NonNegativeFloat = 0.007
    """Seconds that a request to take buckets adds; default: as for the copies."""
    received_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the model that a rank of an engine receives; default: all, as SGLang takes every tensor whole;
    1 / tp_size for a loader that takes shards."""
    snapshot_s: NonNegativeFloat = 0.0
    """Seconds in which the trainer pauses to copy them (`weights.overlap`)."""
    train_tokens_per_s: PositiveFloat | None = None
    """Trainer speed, prompts included; default: computed likewise, else a step takes 0.9 of its batch's fluid
    generation time."""
    train_base_s: NonNegativeFloat = 0.0
    """Seconds of a trainer step of any size."""
    cache_tokens: PositiveInt | None = None
    """Tokens that the KV cache of an engine holds; default: `engine.max_total_tokens`, else no limit."""
    shares_prompts: bool = True
    """Whether siblings find their prompt in the engine's prefix cache."""
    routing_row_bytes: NonNegativeInt = 0
    """Bytes of one token's routing; default: computed from `model.path`, if it exists."""
    network_bytes_per_s: PositiveFloat = 3e9
    """What a node receives at most; default: 25 Gbit/s."""
    disk_bytes_per_s: PositiveFloat = 2e9
    """What a node writes or reads at most; default: one NVMe drive."""
    engines_per_node: PositiveFloat = 4.0
    """Engines on one node; rollout workers are spread over as many nodes (`queue.spool_dir`)."""

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated."""
        if self.decode_base_s + self.decode_per_call_s <= 0:
            raise ValueError("a decode step takes no time: raise decode_base_s or decode_per_call_s")

    def step_s(self, running: int) -> float:
        """Return the seconds of a decode step with this number of calls."""
        return self.decode_base_s + self.decode_per_call_s * running

    @property
    def trajectory_tokens(self) -> float:
        """Mean of a whole trajectory: prompt, answer and what tools say."""
        return self.prompt_tokens + self.expected_tokens + (self.turns - 1) * self.tool_tokens

    @property
    def expected_tokens(self) -> float:
        """Mean answer after the cut: the mean of min(X, c) for a lognormal X.

        Source: E[min(X, c)^n] = E[X^n] F((ln c - u - n s²)/s) + c^n (1 - F((ln c - u)/s)), with u = ln m -
        s²/2, s the standard deviation of ln X, E[X^n] = m^n exp(s² n (n - 1)/2), F the normal distribution
        function.
        """
        return self._moment(1)

    @property
    def mean_context(self) -> float:
        """Mean position of a sampled token: what calls attend to, if they run at any time.

        Long answers have more positions: their mean is E[L²] / 2 E[L] for an answer of L tokens.
        """
        before = self.prompt_tokens + (self.turns - 1) * self.tool_tokens / 2
        return before + self._moment(2) / 2 / self.expected_tokens

    @property
    def cached_calls(self) -> float | None:
        """Calls that the cache of an engine holds, at what they hold on average; None if it has no limit."""
        return None if self.cache_tokens is None else self.cache_tokens / self.mean_context

    def _moment(self, n: int) -> float:
        """The mean of the n-th power of an answer's length."""
        m, s, c = self.mean_tokens, self.sigma, float(self.max_tokens)
        if s == 0:
            return min(m, c) ** n
        z = (math.log(c / m) + s**2 / 2) / s
        return m**n * math.exp(s**2 * n * (n - 1) / 2) * _normal(z - n * s) + c**n * (1 - _normal(z))

    def share_up_to(self, tokens: float) -> float:
        """The distribution function of the answers' lengths."""
        if tokens >= self.max_tokens:
            return 1.0
        if self.sigma == 0:
            return float(tokens >= self.mean_tokens)
        return _normal((math.log(max(tokens, 1.0) / self.mean_tokens) + self.sigma**2 / 2) / self.sigma)

    def answer_tokens(self, generator: random.Random) -> int:
        """Draw the length of one answer."""
        drawn = generator.lognormvariate(math.log(self.mean_tokens) - self.sigma**2 / 2, self.sigma)
        return max(self.turns, min(round(drawn), self.max_tokens))

    def tool_time_s(self, generator: random.Random) -> float:
        """Draw the time of one tool call."""
        seconds = self.tool_s
        if seconds and self.tool_sigma:
            seconds = generator.lognormvariate(math.log(seconds) - self.tool_sigma**2 / 2, self.tool_sigma)
        return seconds if self.tool_limit_s is None else min(seconds, self.tool_limit_s)

    def train_s(self, tokens: float, sampled: float, fluid: float) -> float:
        """Return the seconds of a trainer step.

        Args:
            tokens: Tokens of the batch, prompts and tool results included.
            sampled: Tokens that engines sampled among them.
            fluid: The fluid bound of the job, trajectories a second.
        """
        if self.train_tokens_per_s is None:
            return self.train_base_s + _TRAIN_SHARE * sampled / (fluid * self.expected_tokens)
        return self.train_base_s + tokens / self.train_tokens_per_s

    def engine_speed(self, slots: int, scale: int, coarsen: int = 1) -> EngineSpeed:
        """Return the speed of an engine whose tokens and calls stand for several real ones each.

        Args:
            slots: Real calls that it decodes together.
            scale: Real tokens for each simulated one.
            coarsen: Real trajectories for each simulated one.
        """
        return EngineSpeed(
            slots=max(1, slots // coarsen),
            cache_tokens=None if self.cache_tokens is None else self.cache_tokens // (scale * coarsen),
            scale=scale,
            decode_base_s=self.decode_base_s * scale,
            decode_per_call_s=self.decode_per_call_s * scale * coarsen,
            prefill_tokens_per_s=self.prefill_tokens_per_s / scale / coarsen,
            prefill_call_s=self.prefill_call_s * coarsen,
            call_steps=self.call_steps / scale,
            update_s=self.sync_s,
            abort_call_s=self.abort_call_s * coarsen,
            shares_prompts=self.shares_prompts,
        )


def num_engines(config: Config) -> int:
    """Return the number of engines of a job, including external ones.

    Raises:
        ConfigError: `engine.urls_file` cannot be read.
    """
    engine = config.engine
    urls: Sequence[str] = engine.urls if isinstance(engine, SGLangEngines) else ()
    if engine.urls_file is not None:
        urls = read_urls(Path(engine.urls_file))
    return len(urls) or engine.num_engines


def with_engines(config: Config, engines: int) -> Config:
    """Return the config with this number of engines, which are its own."""
    engine = replace(config.engine, num_engines=engines, urls_file=None)
    if isinstance(engine, SGLangEngines):
        engine = replace(engine, urls=[])
    # Evaluations are not simulated; their engines may be more than these.
    return replace(config, engine=engine, evaluation=EvaluationConfig())


def fluid_rate(engines: int, slots: int, workload: Workload) -> float:
    """The fluid bound, trajectories a second; see the module for the formula."""
    return engines * slots / workload.step_s(slots) / workload.expected_tokens


def calibrate(config: Config, records: Sequence[StepRecord]) -> dict[str, Any]:
    """Compute lengths and speeds from a past run's steps, as fields of a `Workload`.

    The duration of a decode step follows from the measured tokens per second, while engines have calls, and
    the slots that the config keeps busy; its division into base and slope keeps the proportion of the
    defaults. Prefills count as parts of it. Engines pause for all parts of an update but `publish`.
    """
    steady = records[len(records) // WARM_UP :]
    tokens, sampled = sum(r.tokens for r in steady), sum(r.trained_tokens + r.masked_tokens for r in steady)
    trajectories = max(1, sum(r.trajectories for r in steady))
    engines, slots = num_engines(config), config.engine.max_running_requests
    running = min(slots, config.rollout.max_concurrent_trajectories / engines)
    rate = fmean(r.tokens_per_s for r in steady) / engines / (1 - _idle_share(records, len(steady)))
    updates = [r for r in steady if r.sync_parts] or steady
    updates_s = fmean(sum(r.sync_parts.values()) for r in updates)
    publish_s = fmean(r.sync_parts.get("publish", 0.0) for r in updates)
    usual = Workload()
    slower = running / rate / usual.step_s(round(running)) if rate > 0 else 1.0
    return {
        "prompt_tokens": max(1, round((tokens - sampled) / trajectories)),
        "mean_tokens": max(1.0, sampled / trajectories),
        "decode_base_s": usual.decode_base_s * slower,
        "decode_per_call_s": usual.decode_per_call_s * slower,
        "prefill_tokens_per_s": usual.prefill_tokens_per_s / slower,
        "train_tokens_per_s": tokens / max(1e-9, sum(r.step_s for r in steady)),
        "sync_s": updates_s - publish_s,
        "publish_s": publish_s,
    }


def _idle_share(records: Sequence[StepRecord], number: int) -> float:
    """Return the share of the last steps' time in which engines had no call or were paused."""
    steady = records[-number:]
    seconds = steady[-1].time_s - (records[-number - 1].time_s if number < len(records) else 0.0)
    paused_s = sum(sum(r.sync_parts.values()) - r.sync_parts.get("publish", 0.0) for r in steady)
    without_calls = steady[-1].engine_idle_share or 0.0  # of the whole run; the pauses of aborts are in it
    return min(_MOST_IDLE, max(without_calls, paused_s / max(seconds, 1e-9)))


class PlannedTurn(NamedTuple):
    """One turn of a trajectory, in simulated tokens."""

    wait_s: float
    """Seconds before it, in which a tool runs."""
    read: int
    """Tokens that are new in its prompt: the task's prompt or a tool's result."""
    sampled: int
    """0 after the last turn of a past trajectory, where a reward ran in the seconds before."""


class EndlessTasks(Sequence[Task]):
    """Tasks without an end; the order of requests changes none of them.

    Seed and index decide the answers of a task, with sibling and turn also the times of its tools.
    """

    def __init__(self, workload: Workload, scale: int, seed: int, group_size: int) -> None:
        self._workload = workload
        self._scale = scale
        self._seed = seed
        self.group_size = group_size

    def __len__(self) -> int:
        return _NUM_TASKS

    def answers(self, index: int) -> list[int]:
        """Simulated tokens of each sibling's answer."""
        generator = random.Random(self._seed * _NUM_TASKS + index)
        draws = (self._workload.answer_tokens(generator) for _ in range(self.group_size))
        return [max(self._workload.turns, round(tokens / self._scale)) for tokens in draws]

    def turns(self, index: int) -> list[list[PlannedTurn]]:
        """The turns of each sibling."""
        return [self._turns(index, *numbered) for numbered in enumerate(self.answers(index))]

    def _turns(self, index: int, sibling: int, tokens: int) -> list[PlannedTurn]:
        workload = self._workload
        tools = random.Random(f"{self._seed}/{index}/{sibling}")
        ends = [tokens * turn // workload.turns for turn in range(workload.turns + 1)]
        first = PlannedTurn(0.0, max(MARKS, workload.prompt_tokens // self._scale), ends[1])
        read = max(MARKS, workload.tool_tokens // self._scale)
        return [
            first,
            *(PlannedTurn(workload.tool_time_s(tools), read, e - b) for b, e in pairwise(ends[1:])),
        ]

    def ks_distance(self, answers: Int32Array) -> float:
        """Largest distance between the distribution function of some answers and that of all there are.

        Source: the one-sample Kolmogorov-Smirnov statistic; n answers drawn at random come to 0.87 / sqrt(n)
        in the mean.
        """
        lengths, counts = np.unique(answers, return_counts=True)
        seen = np.cumsum(counts) / len(answers)
        # A simulated length stands for all real ones that are rounded to it.
        law = np.array([self._workload.share_up_to((n + 0.5) * self._scale) for n in lengths])
        below = np.array([self._workload.share_up_to((n - 0.5) * self._scale) for n in lengths])
        return float(max(np.abs(seen - law).max(), np.abs(np.r_[0.0, seen[:-1]] - below).max()))

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return Task(
            task_id=str(index),
            messages=[],
            metadata={"number": index, "siblings": self.turns(index)},
        )


class PlannedLoop:
    """The agent loop of a plan: turns of given lengths, with tools' times in between."""

    def __init__(self) -> None:
        self._started: Counter[int] = Counter()

    async def run(self, task: Task, session: Session) -> None:
        """Implements `AgentLoop.run`."""
        number, siblings = task.metadata["number"], task.metadata["siblings"]
        sibling = self._started[number] % len(siblings)
        self._started[number] += 1
        identity = {"trajectory": number * len(siblings) + sibling + 1, "group": number + 1}
        length = 0
        for wait_s, read, sampled in siblings[sibling]:
            message = {"length": read, "stop_at": length + read + sampled}
            if wait_s:
                await asyncio.sleep(wait_s)
            if not sampled:
                return
            if length:
                session.add_messages([message])
            else:
                session.start([message | identity])
            await session.generate()
            length += read + sampled


class PlannedChat:
    """Renders the messages of `PlannedLoop`: as many tokens as they say, marked for the engine."""

    stop_token_ids: tuple[int, ...] = ()
    end_of_turn_ids = (0,)

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: Any = ()) -> Int32Array:
        """Implements `ChatFormat`."""
        return mark(**messages[0])

    def append_ids(self, messages: Sequence[dict[str, Any]], *, after_length: bool = False) -> Int32Array:
        """Implements `ChatFormat`."""
        return mark(**messages[0])

    def decode(self, token_ids: Any) -> str:
        """Implements `ChatFormat`."""
        return ""


_rewards = cycle((0.0, 1.0))


async def no_reward(task: Task, completion: Completion) -> float:
    """The reward of a plan: siblings differ, or the run would warn that nothing is learned."""
    return next(_rewards)


def _normal(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))
