"""Compares the rows of an interrupted trajectory: the newest answer's (replace) or the older ones (splice).

    python benchmarks/replace_vs_splice.py [--quick] [--seeds N] [--dtype NAME] [--json FILE]

Trajectories are interrupted 0, 1, 3 or 7 times at equal distances, and each time the weights change a little
(every tensor by a share of its own standard deviation, `small` or `large`). Then the trainer, at the newest
weights, gives its log-probs of all tokens under each way of merging the rows:

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
old rows already: both merges give the same rows, and the program checks it.

Δ is trainer minus rollout log-prob. For y1 it holds the honest change of the policy too, so less is not
better by itself; for y2, sampled with the trainer's own weights, all of it is error. Everything is the mean
over the tokens of a seed (another model, other weights, other prompts), then over the seeds, with the half
width of its 95% interval; `s-r` is the paired difference, splice minus replace.

Calls are interrupted while they run, all prompts of a seed at a time: a run does not repeat to the token.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl import routing
from async_rl.engine_protocol import DiskUpdate, EngineFacts
from async_rl.engines.model_facts import load_facts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.types import Context, Float32Array, Int32Array, RoutingTrace, Sampled, Trajectory
from benchmarks.real_parts import (
    build_model,
    make_batch,
    make_trajectory,
    random_prompts,
    rewrite,
    serving,
    trace_of,
    trainer_log_probs,
    training,
)
from benchmarks.support.tables import argument_parser, write_json
from tests.support.engine_calls import Call, request
from trainer.worker import TrainerWorker

Cache = Literal["flush", "in_place"]
Merge = Literal["off", "replace", "splice", "oracle"]
MERGES: tuple[Merge, ...] = ("off", "replace", "splice", "oracle")

DELTAS = {"small": 0.003, "large": 0.03}
"""Change of a weight at each update, as a share of the standard deviation of its tensor."""

EXACT = 1e-4
"""Nats; what float32 may differ between two programs that compute the same."""


@dataclass(frozen=True)
class Setting:
    """A kind and number of interruptions."""

    interruptions: int
    delta: str
    cache: Cache

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"{self.interruptions} {self.delta} {self.cache}" if self.interruptions else "0"


NEVER = Setting(0, "small", "flush")


def settings(interruptions: Sequence[int]) -> list[Setting]:
    """Without an interruption, which is one setting, and all combinations of the others."""
    caches: tuple[Cache, ...] = ("flush", "in_place")
    return [NEVER, *(Setting(*way) for way in itertools.product(interruptions, DELTAS, caches))]


_MAX_PAUSES = 30
"""How often calls are paused in place until each of them still ran at every pause: a tiny model may end its
answers before this process, on a loaded machine, gets to pause it."""


# -- what the engine does ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The tokens sampled between two interruptions."""

    token_ids: Int32Array
    log_probs: Float32Array
    version: int
    trace: RoutingTrace
    """Rows of the whole sequence, from the answer that brought these tokens."""


@dataclass(frozen=True)
class Mixed:
    """One trajectory that was interrupted between its parts."""

    prompt: Int32Array
    parts: tuple[Part, ...]

    @property
    def token_ids(self) -> Int32Array:
        """`[T]`."""
        return np.concatenate([self.prompt, *(part.token_ids for part in self.parts)])

    def num_old(self, newest: int) -> int:
        """Tokens of y1: sampled before a version."""
        return sum(len(part.token_ids) for part in self.parts if part.version < newest)

    def merged(self, merge: Merge) -> Trajectory:
        """The trajectory with its rows merged, or without any for `off`."""
        trace: RoutingTrace | None = None
        if merge != "off":
            join = routing.replace if merge == "replace" else routing.splice
            for part in self.parts:
                trace = join(trace, part.trace)
        context = Context(token_ids=self.prompt)
        return make_trajectory("0" * 8, (context, *map(_segment, self.parts)), trace)

    def until(self, index: int) -> Trajectory:
        """Ends with one part: all before it is context, and the rows are those of its own answer."""
        before = np.concatenate([self.prompt, *(part.token_ids for part in self.parts[:index])])
        part = self.parts[index]
        return make_trajectory("0" * 8, (Context(token_ids=before), _segment(part)), part.trace)


def _segment(part: Part) -> Sampled:
    return Sampled(
        token_ids=part.token_ids,
        rollout_log_probs=part.log_probs,
        weight_version=part.version,
        engine_id="engine-0",
        finish_reason="abort",
    )


def _part(call: Call, version: int) -> Part:
    return Part(
        token_ids=np.array(call.token_ids, np.int32),
        log_probs=np.array(call.log_probs, np.float32),
        version=version,
        trace=trace_of(call.trace, call.sequence),
    )


async def roll_out(
    engine: SGLangEngine,
    chain: Sequence[Path],
    prompts: Sequence[Int32Array],
    tokens: int,
    setting: Setting,
) -> list[Mixed]:
    """Sample `tokens` tokens for each prompt, with the weights of the chain one after the other."""
    await engine.update_weights(DiskUpdate(weight_version=0, path=str(chain[0])), flush=True)
    if setting.cache == "in_place":
        for _ in range(_MAX_PAUSES):
            found = await _pause_in_place(engine, chain, prompts, tokens, setting)
            if all(len(mixed.parts) == setting.interruptions + 1 for mixed in found):
                return found
            await engine.update_weights(DiskUpdate(weight_version=0, path=str(chain[0])), flush=True)
        raise RuntimeError(
            f"the engine ended an answer of {tokens} tokens before each of {_MAX_PAUSES} pauses: leave this "
            "process more of the CPU, or sample more tokens"
        )
    parts: list[list[Part]] = [[] for _ in prompts]
    sequences = list(prompts)
    for version, end in enumerate(_boundaries(tokens, setting.interruptions)):
        if version:
            update = DiskUpdate(weight_version=version, path=str(chain[version]))
            await engine.update_weights(update, flush=True)
        held = [len(sequence) - len(prompt) for sequence, prompt in zip(sequences, prompts, strict=True)]
        # A call that runs on meanwhile leaves at least a token to each of those that follow.
        most = tokens - (setting.interruptions - version)
        calls = [
            Call(engine, request(sequence.tolist(), most - count, temperature=1.0))
            for sequence, count in zip(sequences, held, strict=True)
        ]
        await _abort_after(engine, calls, [max(1, end - n) for n in held], last=end == tokens)
        for j, call in enumerate(calls):
            parts[j].append(_part(call, version))
            sequences[j] = np.array(call.sequence, np.int32)
    return [Mixed(prompt, tuple(found)) for prompt, found in zip(prompts, parts, strict=True)]


def _boundaries(tokens: int, interruptions: int) -> list[int]:
    """Returns the number of tokens at each interruption and at the end."""
    return [tokens * (i + 1) // (interruptions + 1) for i in range(interruptions + 1)]


async def _abort_after(
    engine: SGLangEngine, calls: Sequence[Call], counts: Sequence[int], *, last: bool
) -> None:
    """Runs calls concurrently and aborts all of them once each has its tokens."""

    async def abort() -> None:
        await asyncio.gather(*(call.has_tokens(n) for call, n in zip(calls, counts, strict=True)))
        if not last:
            await engine.interrupt("abort")

    await asyncio.gather(abort(), *(call.run() for call in calls))


async def _pause_in_place(
    engine: SGLangEngine,
    chain: Sequence[Path],
    prompts: Sequence[Int32Array],
    tokens: int,
    setting: Setting,
) -> list[Mixed]:
    """Runs one call per prompt and changes the weights while the calls are paused."""
    calls = [Call(engine, request(prompt.tolist(), tokens, temperature=1.0)) for prompt in prompts]

    async def pause() -> None:
        for version, count in enumerate(_boundaries(tokens, setting.interruptions)[:-1], start=1):
            await asyncio.gather(*(call.has_tokens(count) for call in calls))
            await engine.interrupt("in_place")
            update = DiskUpdate(weight_version=version, path=str(chain[version]))
            await engine.update_weights(update, flush=False)
            await engine.resume_generation("in_place")

    await asyncio.gather(pause(), *(call.run() for call in calls))
    return [Mixed(call.asked.input_ids, tuple(_parts_of_one_answer(call))) for call in calls]


def _parts_of_one_answer(call: Call) -> Iterator[Part]:
    """The tokens of each weight version, with the rows up to their end."""
    assert call.finish is not None
    whole = call.trace
    for span in call.finish.version_spans:
        yield Part(
            token_ids=np.array(call.token_ids[span.start : span.end], np.int32),
            log_probs=np.array(call.log_probs[span.start : span.end], np.float32),
            version=span.weight_version,
            trace=trace_of(whole, call.sequence[: len(call.asked.input_ids) + span.end]),
        )


# -- what the trainer makes of it -------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One way of merging, over the trajectories of one seed. In nats; Δ is trainer minus rollout."""

    y1: float
    """mean|Δ| of the tokens before the last interruption; nan when there was none."""
    y2: float
    """mean|Δ| of those after it."""
    ppo_kl_bypass: float
    """Mean of rollout minus trainer over all, as the trainer reports it where it takes the rollout log-probs
    for the old ones. Recomputed old log-probs replay the same rows: that ppo_kl is 0 under every merge."""
    flips: float
    """`routing_flip_ratio` between the two merges, over the rows of y1; nan without an interruption."""


def weight_chain(source: Path, folder: Path, delta: str, length: int, seed: int) -> list[Path]:
    """`length` sets of weights, each the one before it plus noise; the first is `source`."""
    generator = torch.Generator().manual_seed(seed)

    def nudged(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator)
        return tensor + DELTAS[delta] * tensor.std() * noise

    chain = [source]
    for version in range(1, length):
        chain.append(rewrite(chain[-1], folder / f"{delta}_{version}", nudged))
    return chain


def score(
    worker: TrainerWorker, trajectories: Sequence[Trajectory], facts: EngineFacts
) -> list[Float32Array]:
    """Trainer minus rollout log-probs of what each trajectory's segments sampled, `[n]` each."""
    batch = make_batch(trajectories, 0, facts)
    difference = trainer_log_probs(worker, batch) - batch.rollout_log_probs
    return [
        difference[start:end][batch.loss_mask[start:end]]
        for start, end in itertools.pairwise(batch.offsets.tolist())
    ]


def evaluate(
    chains: dict[str, list[Path]], rolled: dict[Setting, list[Mixed]], facts: EngineFacts, dtype: str
) -> dict[tuple[Setting, Merge], Measured]:
    """Score every trajectory under every way of merging.

    Args:
        chains: The weights of each delta; all begin with the same.
        rolled: What was sampled with them.
        facts: Of the model.
        dtype: Of the trainer.
    """
    differences: dict[tuple[Setting, Merge, int], list[Float32Array]] = defaultdict(list)
    for delta, chain in chains.items():
        for version, path in enumerate(chain):
            work = [
                job
                for setting, found in rolled.items()
                if setting.delta == delta
                for job in _jobs(setting, found, version)
            ]
            if work:
                with training(path, dtype=dtype) as worker:
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
    """Returns what to score with one version of the weights, the parts of a trajectory in order."""
    for number, mixed in enumerate(rolled):
        for index, part in enumerate(mixed.parts):
            if part.version == version:
                yield setting, "oracle", number, mixed.until(index)
        if version == setting.interruptions:
            for merge in MERGES[:-1]:
                yield setting, merge, number, mixed.merged(merge)


def _measured(setting: Setting, rolled: Sequence[Mixed], differences: Sequence[Float32Array]) -> Measured:
    cuts = [mixed.num_old(setting.interruptions) for mixed in rolled]
    y1 = np.concatenate([d[:cut] for d, cut in zip(differences, cuts, strict=True)], dtype=np.float64)
    y2 = np.concatenate([d[cut:] for d, cut in zip(differences, cuts, strict=True)], dtype=np.float64)
    return Measured(
        y1=float(np.abs(y1).mean()) if len(y1) else math.nan,
        y2=float(np.abs(y2).mean()),
        ppo_kl_bypass=float(-np.concatenate([y1, y2]).mean()),
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


# -- many seeds -------------------------------------------------------------------------------------------


def t_quantile(df: int) -> float:
    """The 97.5% quantile of Student's t, good to 1% from 3 degrees of freedom on.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.5.
    """
    z = 1.959964
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean over the seeds, and the half width of its 95% interval (nan for one seed)."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, math.nan
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    return mean, t_quantile(count - 1) * deviation / math.sqrt(count)


@dataclass(frozen=True)
class Size:
    """The amount of sampling per seed and setting."""

    interruptions: tuple[int, ...]
    trajectories: int
    tokens: int


FULL = Size((1, 3, 7), trajectories=8, tokens=64)
QUICK = Size((1, 3), trajectories=4, tokens=32)

Found = dict[tuple[Setting, Merge], list[Measured]]
"""By setting and merge, one a seed."""


async def roll_out_seeds(
    worlds: Sequence[dict[str, list[Path]]], size: Size, dtype: str, logs: Path
) -> list[dict[Setting, list[Mixed]]]:
    """Samples for all seeds on one server."""
    result = []
    async with serving(worlds[0]["small"][0], logs, dtype=dtype) as engine:
        for seed, chains in enumerate(worlds):
            prompts = random_prompts(size.trajectories, seed=seed)
            rolled = {}
            for setting in settings(size.interruptions):
                chain = chains[setting.delta]
                rolled[setting] = await roll_out(engine, chain, prompts, size.tokens, setting)
            result.append(rolled)
    return result


def measure(size: Size, seeds: int, dtype: str) -> Found:
    """Samples and scores all seeds."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        worlds = []
        for seed in range(seeds):
            base = build_model("qwen3_moe", folder / f"seed_{seed}" / "base", seed=seed)
            length = max(size.interruptions) + 1
            worlds.append({delta: weight_chain(base, base.parent, delta, length, seed) for delta in DELTAS})
        rolled = asyncio.run(roll_out_seeds(worlds, size, dtype, folder))
        facts = load_facts(worlds[0]["small"][0])
        found: Found = defaultdict(list)
        for chains, of_seed in zip(worlds, rolled, strict=True):
            for key, measured in evaluate(chains, of_seed, facts, dtype).items():
                found[key].append(measured)
    return dict(found)


def violations(found: Found) -> list[str]:
    """Returns the violations of what must hold in float32."""
    wrong = []
    for setting in dict.fromkeys(setting for setting, _ in found):
        values = {
            (merge, field): [getattr(m, field) for m in found[setting, merge]]
            for merge in MERGES
            for field in ("y1", "y2")
        }
        exact = [("replace", "y2"), ("oracle", "y2"), ("oracle", "y1")] if setting.cache == "flush" else []
        wrong += [
            f"{setting.name}: mean|Δ| of {field} under {merge} is {max(values[merge, field]):.1e}"
            for merge, field in exact
            if max(values[merge, field]) > EXACT  # nan, where there is no y1, is not above
        ]
        same = values["replace", "y2"] == values["splice", "y2"]
        if setting.interruptions and same == (setting.cache == "flush"):
            wrong.append(f"{setting.name}: replace and splice {'agree' if same else 'differ'}")
    return wrong


# -- the program ------------------------------------------------------------------------------------------


def table(found: Found, title: str) -> str:
    """Two blocks: log-probs before and after the last interruption, and what the trainer reports of both."""

    def cell(values: Sequence[float]) -> str:
        mean, half = interval(values)
        return "-" if math.isnan(mean) else f"{_number(mean)} ±{_number(half)}"

    def column(setting: Setting, merge: Merge, field: str) -> list[float]:
        return [getattr(m, field) for m in found[setting, merge]]

    def paired(setting: Setting, field: str) -> list[float]:
        pairs = zip(column(setting, "splice", field), column(setting, "replace", field), strict=True)
        return [splice - replace for splice, replace in pairs]

    ways = list(dict.fromkeys(setting for setting, _ in found))
    lines = [title]
    for field, heading in (
        ("y1", "mean|Δ| of y1, sampled before the last interruption"),
        ("y2", "mean|Δ| of y2, sampled after it"),
        ("ppo_kl_bypass", "ppo_kl_bypass, the mean of rollout minus trainer log-probs, of all tokens"),
    ):
        names = [*MERGES, "s-r"]
        lines += ["", heading, f"{'':<18}{'flips':<8}" + "".join(f"{name:<20}" for name in names)]
        for setting in ways:
            cells = [cell(column(setting, merge, field)) for merge in MERGES] + [cell(paired(setting, field))]
            flips, _ = interval(column(setting, "replace", "flips"))
            shown = "-" if math.isnan(flips) else f"{flips:.1%}"
            line = f"{setting.name:<18}{shown:<8}" + "".join(f"{text:<20}" for text in cells)
            lines.append(line.rstrip())
    return "\n".join(lines)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.4f}" if abs(value) >= 5e-4 else f"{value:.0e}"


def json_rows(found: Found, dtype: str) -> list[dict[str, Any]]:
    """Returns a row for each setting, merge and seed; figures that do not exist are null."""
    return [
        {"setting": setting.name, "merge": merge, "dtype": dtype, "seed": seed, **asdict(measured)}
        for (setting, merge), by_seed in found.items()
        for seed, measured in enumerate(by_seed)
    ]


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="3 seeds, fewer and shorter answers")
    parser.add_argument("--seeds", type=int, help="models, weights and prompts (default: 8)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of both programs"
    )
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    seeds = arguments.seeds or (3 if arguments.quick else 8)
    torch.set_num_threads(1)

    found = measure(size, seeds, arguments.dtype)
    title = (
        f"qwen3_moe, {arguments.dtype} in both programs, {seeds} seeds x {size.trajectories} trajectories of "
        f"{size.tokens} tokens; nats, mean ± 95% interval over the seeds"
    )
    report = sys.stderr if arguments.json == "-" else sys.stdout
    print(table(found, title), file=report)
    write_json(arguments.json, json_rows(found, arguments.dtype))
    wrong = violations(found) if arguments.dtype == "float32" else []
    for sentence in wrong:
        print(f"WRONG: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
