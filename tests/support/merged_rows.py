"""Compares the rows of an interrupted trajectory: the newest answer's (replace) or the older ones (splice).

Trajectories are interrupted at equal distances, and each time the weights change a little (every tensor by a
share of its own standard deviation). Then the trainer, at the newest weights, gives its log-probs of all
tokens under each way of merging the rows:

    tokens      prompt | y1: sampled under older weights | y2: sampled after the last interruption
    off         the trainer's own choice
    replace     all rows from the last answer; with `flush` they are what y2 and its prefix were computed with
    splice      older rows where there are some: what each token was sampled with, but after a flush not what
                the engine computed the prefix of y2 with
    oracle      each segment by the trainer with that segment's weights and the rows of its own answer

With `flush` calls are aborted and the prefix cache is emptied: the engine computes the whole prefix anew when
it resumes, each segment comes from one set of weights, and the oracle is exact, 0 but for rounding. With
`in_place` keys, values and rows of the old weights stay. No single forward pass of a trainer repeats that, so
its oracle is not exact, and what it is above 0 is the price of the old cache. There the last answer holds the
old rows already: both merges give the same rows.

Δ is trainer minus rollout log-prob. For y1 it holds the honest change of the policy too, so less is not
better by itself; for y2, sampled with the trainer's own weights, all of it is error. Everything is the mean
over the tokens.

Calls are interrupted while they run, all prompts at a time: a run does not repeat to the token.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from async_rl import routing
from async_rl.engine_protocol import DiskUpdate, EngineFacts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.types import Context, Float32Array, Int32Array, RoutingTrace, Sampled, Trajectory
from benchmarks import real_parts
from tests.support.engine_calls import Call, request
from trainer.worker import TrainerWorker

Cache = Literal["flush", "in_place"]
Merge = Literal["off", "replace", "splice", "oracle"]
MERGES: tuple[Merge, ...] = ("off", "replace", "splice", "oracle")

DELTA = 0.03
"""Change of a weight at each update, as a share of the standard deviation of its tensor."""

EXACT = 1e-4
"""Nats; what float32 may differ between two programs that compute the same."""


@dataclass(frozen=True)
class Setting:
    """A kind and number of interruptions."""

    interruptions: int
    cache: Cache


NEVER = Setting(0, "flush")


_MAX_PAUSES = 30
"""How often calls are paused in place until each of them still ran at every pause: a tiny model may end its
answers before this process, on a loaded machine, gets to pause it."""


# -- what the engine does ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The tokens sampled between two interruptions."""

    sampled: Sampled
    trace: RoutingTrace
    """Rows of the whole sequence, from the answer that brought these tokens."""

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.sampled.weight_version


@dataclass(frozen=True)
class Mixed:
    """One trajectory that was interrupted between its parts."""

    prompt: Int32Array
    parts: tuple[Part, ...]

    def num_old(self, newest: int) -> int:
        """Tokens of y1: sampled before a version."""
        return sum(len(part.sampled.token_ids) for part in self.parts if part.version < newest)

    def merged(self, merge: Merge) -> Trajectory:
        """The trajectory with its rows merged, or without any for `off`."""
        trace: RoutingTrace | None = None
        if merge != "off":
            for part in self.parts:
                trace = part.trace or trace if merge == "replace" else routing.splice(trace, part.trace)
        segments = (Context(token_ids=self.prompt), *(part.sampled for part in self.parts))
        return real_parts.make_trajectory("0" * 8, segments, trace)

    def until(self, index: int) -> Trajectory:
        """Ends with one part: all before it is context, and the rows are those of its own answer."""
        before = np.concatenate([self.prompt, *(part.sampled.token_ids for part in self.parts[:index])])
        part = self.parts[index]
        return real_parts.make_trajectory("0" * 8, (Context(token_ids=before), part.sampled), part.trace)


def _part(call: Call, version: int, start: int, end: int) -> Part:
    """Tokens of a call, with the rows up to their end."""
    sampled = Sampled(
        token_ids=np.array(call.token_ids[start:end], np.int32),
        rollout_log_probs=np.array(call.log_probs[start:end], np.float32),
        weight_version=version,
        engine_id="engine-0",
        finish_reason="abort",
    )
    return Part(sampled, real_parts.trace_of(call.trace, call.sequence[: len(call.asked.input_ids) + end]))


async def roll_out(
    engine: SGLangEngine, chain: Sequence[Path], prompts: Sequence[Int32Array], tokens: int, setting: Setting
) -> list[Mixed]:
    """Sample `tokens` tokens for each prompt, with the weights of the chain one after the other."""
    await _load(engine, chain, 0)
    if setting.cache == "in_place":
        for _ in range(_MAX_PAUSES):
            found = await _pause_in_place(engine, chain, prompts, tokens, setting)
            if all(len(mixed.parts) == setting.interruptions + 1 for mixed in found):
                return found
            await _load(engine, chain, 0)
        raise RuntimeError(
            f"the engine ended an answer of {tokens} tokens before each of {_MAX_PAUSES} pauses: leave this "
            "process more of the CPU, or sample more tokens"
        )
    parts: list[list[Part]] = [[] for _ in prompts]
    sequences = list(prompts)
    for version, end in enumerate(_boundaries(tokens, setting.interruptions)):
        if version:
            await _load(engine, chain, version)
        held = [len(sequence) - len(prompt) for sequence, prompt in zip(sequences, prompts, strict=True)]
        # A call that runs on meanwhile leaves at least a token to each of those that follow.
        most = tokens - (setting.interruptions - version)
        calls = [
            Call(engine, request(sequence.tolist(), most - count, temperature=1.0))
            for sequence, count in zip(sequences, held, strict=True)
        ]
        async with asyncio.TaskGroup() as running:
            for call in calls:
                running.create_task(call.run())
            await asyncio.gather(
                *(call.has_tokens(max(1, end - n)) for call, n in zip(calls, held, strict=True))
            )
            if end < tokens:
                await engine.interrupt("abort")
        for j, call in enumerate(calls):
            parts[j].append(_part(call, version, 0, len(call.token_ids)))
            sequences[j] = np.array(call.sequence, np.int32)
    return [Mixed(prompt, tuple(found)) for prompt, found in zip(prompts, parts, strict=True)]


async def _load(engine: SGLangEngine, chain: Sequence[Path], version: int, *, flush: bool = True) -> None:
    await engine.update_weights(DiskUpdate(weight_version=version, path=str(chain[version])), flush=flush)


def _boundaries(tokens: int, interruptions: int) -> list[int]:
    """Return the number of tokens at each interruption and at the end."""
    return [tokens * (i + 1) // (interruptions + 1) for i in range(interruptions + 1)]


async def _pause_in_place(
    engine: SGLangEngine, chain: Sequence[Path], prompts: Sequence[Int32Array], tokens: int, setting: Setting
) -> list[Mixed]:
    """Run one call per prompt and change the weights while the calls are paused."""
    calls = [Call(engine, request(prompt.tolist(), tokens, temperature=1.0)) for prompt in prompts]

    async with asyncio.TaskGroup() as running:
        for call in calls:
            running.create_task(call.run())
        for version, count in enumerate(_boundaries(tokens, setting.interruptions)[:-1], start=1):
            await asyncio.gather(*(call.has_tokens(count) for call in calls))
            await engine.interrupt("in_place")
            await _load(engine, chain, version, flush=False)
            await engine.resume_generation("in_place")
    found = []
    for call in calls:
        assert call.finish is not None
        parts = (_part(call, s.weight_version, s.start, s.end) for s in call.finish.version_spans)
        found.append(Mixed(call.asked.input_ids, tuple(parts)))
    return found


# -- what the trainer makes of it -------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One way of merging, over some trajectories. In nats; Δ is trainer minus rollout."""

    y1: float
    """mean|Δ| of the tokens before the last interruption; nan when there was none."""
    y2: float
    """mean|Δ| of those after it."""
    flips: float
    """`routing_flip_ratio` between the two merges, over the rows of y1; nan without an interruption."""


def weight_chain(source: Path, folder: Path, length: int, seed: int) -> list[Path]:
    """`length` sets of weights, each the one before it plus noise; the first is `source`."""
    generator = torch.Generator().manual_seed(seed)

    def nudged(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + DELTA * tensor.std() * torch.randn(tensor.shape, generator=generator)

    chain = [source]
    for version in range(1, length):
        chain.append(real_parts.rewrite(chain[-1], folder / f"weights_{version}", nudged))
    return chain


def score(
    worker: TrainerWorker, trajectories: Sequence[Trajectory], facts: EngineFacts
) -> list[Float32Array]:
    """Trainer minus rollout log-probs of what each trajectory's segments sampled, `[n]` each."""
    batch = real_parts.make_batch(trajectories, 0, facts)
    difference = real_parts.trainer_log_probs(worker, batch) - batch.rollout_log_probs
    return [
        difference[start:end][batch.loss_mask[start:end]]
        for start, end in itertools.pairwise(batch.offsets.tolist())
    ]


def evaluate(
    chain: Sequence[Path], rolled: dict[Setting, list[Mixed]], facts: EngineFacts, dtype: str
) -> dict[tuple[Setting, Merge], Measured]:
    """Score every trajectory under every way of merging.

    Args:
        chain: The weights.
        rolled: What was sampled with them.
        facts: Of the model.
        dtype: Of the trainer.
    """
    differences: dict[tuple[Setting, Merge, int], list[Float32Array]] = defaultdict(list)
    for version, path in enumerate(chain):
        work = [job for setting, found in rolled.items() for job in _jobs(setting, found, version)]
        with real_parts.training(path, dtype=dtype) as worker:
            scores = score(worker, [trajectory for *_, trajectory in work], facts)
        for (setting, merge, number, _), found in zip(work, scores, strict=True):
            differences[setting, merge, number].append(found)
    return {
        (setting, merge): _measured(
            setting, found, [np.concatenate(differences[setting, merge, j]) for j in range(len(found))]
        )
        for setting, found in rolled.items()
        for merge in MERGES
    }


def _jobs(
    setting: Setting, rolled: Sequence[Mixed], version: int
) -> Iterator[tuple[Setting, Merge, int, Trajectory]]:
    """Return what to score with one version of the weights, the parts of a trajectory in order."""
    for number, mixed in enumerate(rolled):
        for index, part in enumerate(mixed.parts):
            if part.version == version:
                yield setting, "oracle", number, mixed.until(index)
        if version == setting.interruptions:
            for merge in MERGES[:-1]:
                yield setting, merge, number, mixed.merged(merge)


def _measured(setting: Setting, rolled: Sequence[Mixed], differences: Sequence[Float32Array]) -> Measured:
    cuts = [mixed.num_old(setting.interruptions) for mixed in rolled]
    pairs = list(zip(differences, cuts, strict=True))
    y1 = np.concatenate([d[:cut] for d, cut in pairs], dtype=np.float64)
    y2 = np.concatenate([d[cut:] for d, cut in pairs], dtype=np.float64)
    return Measured(
        y1=float(np.abs(y1).mean()) if len(y1) else math.nan,
        y2=float(np.abs(y2).mean()),
        flips=_flips(rolled, cuts),
    )


def _flips(rolled: Sequence[Mixed], num_old: Sequence[int]) -> float:
    """Over the rows that y1 was predicted from, each with the experts of its own time and the newest."""
    old, new = [], []
    for mixed, count in zip(rolled, num_old, strict=True):
        replaced, spliced = mixed.merged("replace").trace, mixed.merged("splice").trace
        assert replaced is not None
        assert spliced is not None
        first = len(mixed.prompt) - 1
        old.append(spliced.rows[first : first + count])
        new.append(replaced.rows[first : first + count])
    return routing.flip_ratio(np.concatenate(old), np.concatenate(new))
