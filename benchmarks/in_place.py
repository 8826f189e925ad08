"""Measures how far `weights.interrupt: in_place` is from exact, on a real engine and a real trainer.

    python benchmarks/in_place.py [--quick] [--json FILE] [--plot FILE]

A tiny MoE with random weights learns by Adam for 8 versions, from its own answers and a reward for even
tokens, at each learning rate. Then answers are interrupted 8 times at equal distances, and each time the
engine takes the next version:

    abort       calls end, the prefix cache is flushed, calls resume: all is computed anew (exact)
    in_place    calls pause, the cache stays: later tokens attend to keys and values of older weights

The trainer computes the log-probs of the tokens between two interruptions with the version that sampled them,
so no difference is staleness. It replays the engine's experts (r3) or chooses its own (off). `mean_abs` is
mean|trainer - engine|, `k1` and `k3` estimate KL(engine | trainer) per token: what `ppo_kl_bypass` shows of
these tokens at lag 0. `policy_change` is mean|change of log-prob| of the same number of updates, without any
error of the engine: the honest staleness that an answer of that age has anyway.

Everything is in float32: what is equal is equal. The program exits with 1 if `abort` is not exact. `--plot`
draws a JSON file of before and needs matplotlib.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.engine_protocol import DiskUpdate, EngineFacts
from async_rl.engines.model_facts import load_facts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.types import Float32Array, Group, Outcome, Trajectory
from benchmarks import real_parts
from benchmarks.support.tables import argument_parser, report
from tests.support import merged_rows as merging
from tests.support.engine_calls import request
from tests.support.stored_batches import assemble_batch
from tests.support.trainers import started, trainer_config, weights

Mode = Literal["abort", "in_place"]
Replay = Literal["r3", "off"]

LEARNING_RATES: Final = (1e-6, 1e-5, 1e-4, 1e-3)
TOKENS: Final = (144, 432)
UPDATES: Final = 8
SIBLINGS: Final = 4
EXACT: Final = 1e-5
"""Nats; ten times what float32 differs between the two programs."""

_RUNNING_TOKENS: Final = 3 * real_parts.CONTEXT_LENGTH
"""What the calls of a roll-out take of the engine's cache, at most."""
_PROMPT: Final = 32


class Size(NamedTuple):
    """How much is measured."""

    seeds: int
    learning_rates: tuple[float, ...]
    tokens: tuple[int, ...]
    updates: int


FULL: Final = Size(2, LEARNING_RATES, TOKENS, UPDATES)
QUICK: Final = Size(1, (1e-4, 1e-3), (96,), 2)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens with the same number of updates within their context, over all seeds; figures in nats."""

    learning_rate: float
    weight_change: float
    """Of a version: norm of the change over the norm of the weights."""
    interrupt: Mode
    replay: Replay
    tokens: int
    """Length of the answers."""
    updates: int
    """Number of updates within the tokens' context."""
    sampled: int
    mean_abs: float
    k1: float
    k3: float
    policy_change: float


class Chain(NamedTuple):
    """Weights that followed each other."""

    learning_rate: float
    folders: list[Path]
    weight_change: float


class RollOut(NamedTuple):
    """Interrupted answers of one chain."""

    chain: int
    interrupt: Mode
    tokens: int
    answers: list[merging.Mixed]


# -- weights ----------------------------------------------------------------------------------------------


def reward_even(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Group siblings, and reward an answer by its share of even tokens."""
    groups = []
    for start in range(0, len(trajectories), SIBLINGS):
        name = f"{start:08d}"
        siblings = tuple(
            msgspec.structs.replace(
                each,
                group_id=name,
                outcome=Outcome(
                    stop_reason="completed", reward=float((next(each.sampled).token_ids % 2 == 0).mean())
                ),
            )
            for each in trajectories[start : start + SIBLINGS]
        )
        groups.append(Group(group_id=name, trajectories=siblings))
    return groups


def relative_change(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> float:
    """Return the norm of the change of all weights over their norm before."""
    moved = sum(float((new[name] - tensor).double().square().sum()) for name, tensor in old.items())
    return math.sqrt(moved / sum(float(tensor.double().square().sum()) for tensor in old.values()))


def train_chain(
    model: Path, folder: Path, groups: Sequence[Group], facts: EngineFacts, rate: float, updates: int
) -> Chain:
    """Train on one batch again and again, and write the weights after each step."""
    batch = assemble_batch(groups, 0, "batch", facts)
    folders, changes = [model], []
    config = trainer_config(model, replay="off", optimizer={"lr": rate}, micro_batch_tokens=1024)
    with started(config) as worker:
        before = weights(worker)
        for step in range(1, updates + 1):
            worker.train_on(batch, step)
            after = weights(worker)
            changes.append(relative_change(before, after))
            folders.append(write_weights(model, folder / f"weights_{step}", after))
            before = after
    return Chain(rate, folders, float(np.mean(changes)))


def write_weights(model: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a copy of a model folder with other weights."""
    shutil.copytree(model, target)
    for file in target.glob("*.safetensors"):
        kept = {name: tensors[name].contiguous() for name in load_file(file)}
        save_file(kept, file, metadata={"format": "pt"})
    return target


# -- answers ----------------------------------------------------------------------------------------------


async def roll_out_all(engine: SGLangEngine, chains: Sequence[Chain], size: Size, seed: int) -> list[RollOut]:
    """Sample the answers of each chain, length and way of interrupting."""
    found = []
    caches: dict[Mode, merging.Cache] = {"abort": "flush", "in_place": "in_place"}
    for number, chain in enumerate(chains):
        for tokens in size.tokens:
            count = min(real_parts.MAX_RUNNING, _RUNNING_TOKENS // (tokens + _PROMPT))
            prompts = real_parts.random_prompts(count, seed=seed + 1)
            for interrupt, cache in caches.items():
                setting = merging.Setting(size.updates, cache)
                answers = await merging.roll_out(engine, chain.folders, prompts, tokens, setting)
                found.append(RollOut(number, interrupt, tokens, answers))
                print(f"lr {chain.learning_rate:g}: {tokens} tokens, {interrupt}", file=sys.stderr)
    return found


# -- log-probs --------------------------------------------------------------------------------------------

Cell = tuple[int, Mode, Replay, int, int]
"""Chain, interrupt, replay, tokens, updates."""


def score_all(
    chains: Sequence[Chain], rolled: Sequence[RollOut], facts: EngineFacts
) -> tuple[dict[Cell, list[Float32Array]], dict[tuple[int, int], list[Float32Array]]]:
    """Return differences of trainer and engine by cell, and changes of the policy by chain and updates.

    The latter are of the tokens that a chain's first weights sampled, computed with each of its weights.
    """
    differences: dict[Cell, list[Float32Array]] = defaultdict(list)
    changes: dict[tuple[int, int], list[Float32Array]] = defaultdict(list)
    for number, chain in enumerate(chains):
        of_chain = [roll for roll in rolled if roll.chain == number]
        for version, folder in enumerate(chain.folders):
            cells: list[Cell | None] = []
            work: list[Trajectory] = []
            for roll in of_chain:
                for mixed in roll.answers:
                    part = mixed.until(version)
                    without = msgspec.structs.replace(part, trace=None)
                    first = msgspec.structs.replace(mixed.until(0), trace=None)
                    work += [part, without, first]
                    cells += [
                        (number, roll.interrupt, "r3", roll.tokens, version),
                        (number, roll.interrupt, "off", roll.tokens, version),
                        None,
                    ]
            with real_parts.training(folder, dtype="float32") as worker:
                scores = merging.score(worker, work, facts)
            for cell, score in zip(cells, scores, strict=True):
                if cell is not None:
                    differences[cell].append(score)
                else:
                    changes[number, version].append(score)
    return differences, changes


def make_rows(
    chains: Sequence[Sequence[Chain]],
    differences: dict[Cell, list[Float32Array]],
    changes: dict[tuple[int, int], list[Float32Array]],
) -> list[Row]:
    """Return a row for each cell; `chains` are those of each seed."""
    rows = []
    for cell, parts in sorted(differences.items()):
        number, interrupt, replay, tokens, updates = cell
        joined = np.concatenate(parts)
        mismatch = real_parts.Mismatch.of(joined)
        rows.append(
            Row(
                learning_rate=chains[0][number].learning_rate,
                weight_change=float(np.mean([of_seed[number].weight_change for of_seed in chains])),
                interrupt=interrupt,
                replay=replay,
                tokens=tokens,
                updates=updates,
                sampled=len(joined),
                mean_abs=mismatch.mean_abs,
                k1=mismatch.k1,
                k3=mismatch.k3,
                policy_change=float(np.abs(np.concatenate(changes[number, updates])).mean()),
            )
        )
    return rows


def violations(rows: Sequence[Row]) -> list[str]:
    """Return where `abort` is not exact, or `in_place` no worse after an update."""
    found = [
        f"abort is off by {row.mean_abs:.2g} nats after {row.updates} updates (lr {row.learning_rate:g}, "
        f"replay {row.replay}), expected at most {EXACT:g}"
        for row in rows
        if row.interrupt == "abort" and row.mean_abs > EXACT
    ]
    if not any(row.mean_abs > EXACT for row in rows if row.interrupt == "in_place" and row.updates):
        found.append("in_place is exact after updates: did the engine keep its cache?")
    return found


# -- the program ------------------------------------------------------------------------------------------


def measure(size: Size) -> list[Row]:
    """Measure all cells."""
    chains: list[list[Chain]] = []
    differences: dict[Cell, list[Float32Array]] = defaultdict(list)
    changes: dict[tuple[int, int], list[Float32Array]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models = [
            real_parts.build_model("qwen3_moe", folder / f"model_{seed}", seed=seed)
            for seed in range(size.seeds)
        ]
        facts = load_facts(models[0])

        async def sample() -> list[list[RollOut]]:
            rolled = []
            async with real_parts.serving(models[0], folder, dtype="float32") as engine:
                for seed, model in enumerate(models):
                    await engine.update_weights(DiskUpdate(weight_version=0, path=str(model)), flush=True)
                    prompts = real_parts.random_prompts(8, seed=seed)
                    asked = [
                        request(prompt.tolist(), 48, temperature=1.0)
                        for prompt in prompts
                        for _ in range(SIBLINGS)
                    ]
                    groups = reward_even(await real_parts.sample_calls(engine, asked))
                    chains.append(
                        [
                            train_chain(model, folder / f"{seed}_{rate:g}", groups, facts, rate, size.updates)
                            for rate in size.learning_rates
                        ]
                    )
                    rolled.append(await roll_out_all(engine, chains[-1], size, seed))
            return rolled

        for of_seed, rolled in zip(chains, asyncio.run(sample()), strict=True):
            found, changed = score_all(of_seed, rolled, facts)
            for cell, parts in found.items():
                differences[cell] += parts
            for key, parts in changed.items():
                changes[key] += parts
    return make_rows(chains, differences, changes)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the mismatch of the longest answers over the updates, and beside it over the policy's change."""
    from matplotlib import pyplot

    longest = max(row.tokens for row in rows)
    rates = sorted({row.learning_rate for row in rows})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for color, rate in enumerate(rates):
        for replay, line in (("r3", "-"), ("off", ":")):
            points = [
                row
                for row in rows
                if (row.interrupt, row.replay, row.learning_rate, row.tokens)
                == ("in_place", replay, rate, longest)
                and row.updates
            ]
            style = {"color": f"C{color}", "linestyle": line, "marker": "."}
            updates = [row.updates for row in points]
            label = f"in_place, lr {rate:g}" + ", no replay" * (replay == "off")
            left.plot(updates, [row.mean_abs for row in points], label=label, **style)
            if rate > rates[0] or len(rates) < 3:  # its flips are too few for a ratio
                right.plot(updates, [row.mean_abs / row.policy_change for row in points], **style)
    exact = [row for row in rows if (row.interrupt, row.replay, row.tokens) == ("abort", "r3", longest)]
    worst = {
        n: max(row.mean_abs for row in exact if row.updates == n) for n in {row.updates for row in exact}
    }
    left.plot(worst.keys(), worst.values(), color="black", label="abort, any lr")
    left.set(yscale="log", ylabel="|trainer - engine|, nats a token", title="mismatch at lag 0")
    right.set(ylim=(0, None), title="over the policy's change by as many updates")
    for axis in (left, right):
        axis.set_xlabel("updates within a token's context")
        axis.grid(alpha=0.25)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    figure.savefig(path)


def main() -> int:
    """Run the command. Returns 1 when `abort` is not exact."""
    parser = argument_parser(__doc__, quick="one seed, two learning rates, two updates, short answers")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the rows of --json, to here")
    options = parser.parse_args()
    if options.plot is not None:
        plot(msgspec.json.decode(Path(options.json).read_bytes(), type=list[Row]), options.plot)
        return 0
    torch.set_num_threads(1)
    rows = measure(QUICK if options.quick else FULL)
    return report(rows, "trainer against engine at equal weights; nats", options.json, violations(rows))


if __name__ == "__main__":
    sys.exit(main())
