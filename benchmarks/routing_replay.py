"""Measures whether replaying the engine's experts makes the trainer compute what the engine computed.

    python benchmarks/routing_replay.py [--quick] [--model NAME …] [--dtype NAME …] [--seeds N] [--json FILE]

A tiny MoE with random weights samples tokens on a real SGLang server in bfloat16; Megatron-Core, with the
same weights, gives its log-probs of the same tokens under each variant of the routing:

    off         the trainer's own choice
    r2          the trainer's own choice as recorded in the pass of the old log-probs, replayed
    r3          the engine's choice
    rows+1 -1   the engine's, each row moved to the next (previous) token of its trajectory
    layers      the engine's, each layer's moved to the next layer
    other       the engine's for another trajectory
    corruptN    the engine's, with N% of the rows replaced by random experts

Only r3 may be better than off; all below r3 are controls and must be worse. Where they are not, the program
says so and exits with 1. At equal weights r2 is off by construction: it freezes what the trainer chose, and
that is not what the engine chose. --dtype is the trainer's; bfloat16 holds the weights exactly.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.engine_protocol import DiskUpdate
from async_rl.engines.model_facts import load_facts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.types import ExpertIdArray, Int32Array, TrainBatch, Trajectory
from benchmarks.real_parts import (
    BUILDERS,
    Mismatch,
    build_model,
    make_batch,
    random_prompts,
    sample_calls,
    serving,
    trainer_log_probs,
    training,
)
from benchmarks.support.tables import argument_parser, write_json
from tests.support.engine_calls import request
from trainer.worker import TrainerWorker

VARIANTS = (
    "off",
    "r2",
    "r3",
    "rows+1",
    "rows-1",
    "layers",
    "other",
    "corrupt25",
    "corrupt50",
    "corrupt100",
)
CONTROLS = VARIANTS[3:]

DTYPES = ("bfloat16", "float32")

Rows = list[ExpertIdArray]
"""Of each trajectory, `[T-1, L_moe, K]`."""

Samples = dict[str, list[np.ndarray]]
"""Trainer minus engine log-probs, by variant and seed."""


# -- sampling ---------------------------------------------------------------------------------------------


async def sample(engine: SGLangEngine, prompts: Sequence[Int32Array], tokens: int) -> list[Trajectory]:
    """Samples one call per prompt, all at once, at temperature 1."""
    asked = (request(prompt.tolist(), tokens, temperature=1.0) for prompt in prompts)
    return await sample_calls(engine, asked)


# -- the routing of each variant --------------------------------------------------------------------------


def corrupted(rows: Rows, share: float, num_experts: int, seed: int = 0) -> Rows:
    """Replaces a share of the rows of each trajectory by random experts, distinct and in range, in all
    layers.

    A larger share corrupts the rows of a smaller one and more, in the same way.
    """
    rng = np.random.default_rng(seed)
    result = []
    for original in rows:
        random = rng.random((*original.shape[:2], num_experts)).argsort(-1)[..., : original.shape[2]]
        hit = rng.permutation(len(original)) < round(share * len(original))
        result.append(np.where(hit[:, None, None], random, original).astype(original.dtype))
    return result


def others(rows: Rows) -> Rows:
    """Each trajectory with the rows of the next one, from their start again where that is shorter."""
    return [np.resize(rows[(j + 1) % len(rows)], own.shape) for j, own in enumerate(rows)]


def controls(num_experts: int) -> dict[str, Callable[[Rows], Rows]]:
    """Returns the engine's rows as each negative control changes them; all pass every check of form."""
    return {
        "rows+1": lambda rows: [np.roll(r, 1, axis=0) for r in rows],
        "rows-1": lambda rows: [np.roll(r, -1, axis=0) for r in rows],
        "layers": lambda rows: [np.roll(r, 1, axis=1) for r in rows],
        "other": others,
        "corrupt25": lambda rows: corrupted(rows, 0.25, num_experts),
        "corrupt50": lambda rows: corrupted(rows, 0.5, num_experts),
        "corrupt100": lambda rows: corrupted(rows, 1.0, num_experts),
    }


def with_rows(batch: TrainBatch, change: Callable[[Rows], Rows]) -> TrainBatch:
    """Returns the batch with other routing; the row of the token that was never fed stays unchanged."""
    assert batch.routed_experts is not None
    rows = batch.routed_experts.copy()
    bounds = [(int(a), int(b) - 1) for a, b in itertools.pairwise(batch.offsets)]
    for (start, end), new in zip(bounds, change([rows[a:b].copy() for a, b in bounds]), strict=True):
        rows[start:end] = new
    return msgspec.structs.replace(batch, routed_experts=rows)


def differences(
    model: Path, batch: TrainBatch, dtype: str, variants: Sequence[str] = VARIANTS
) -> dict[str, np.ndarray]:
    """Trainer minus engine log-probs of the sampled tokens under each variant, `[n]` in nats."""

    def against_engine(worker: TrainerWorker, batch: TrainBatch) -> np.ndarray:
        return (trainer_log_probs(worker, batch) - batch.rollout_log_probs)[batch.loss_mask]

    result = {}
    for replay in ("off", "r2"):
        if replay in variants:
            with training(model, dtype=dtype, replay=replay) as worker:
                result[replay] = against_engine(worker, batch)
    changes = {"r3": lambda rows: rows, **controls(batch.num_experts)}
    with training(model, dtype=dtype, replay="r3") as worker:
        for name, change in changes.items():
            if name in variants:
                result[name] = against_engine(worker, with_rows(batch, change))
    return {name: result[name] for name in variants}


def violations(found: dict[str, Mismatch]) -> list[str]:
    """Returns the expectations that the figures violate."""
    r3, off = found["r3"], found["off"]
    wrong = [
        f"r3 is not the lowest: its mean|Δ| is {r3.mean_abs:.5f}, that of {name} {m.mean_abs:.5f}"
        for name, m in found.items()
        if name != "r3" and m.mean_abs <= r3.mean_abs
    ]
    wrong += [
        f"the control {name} is not above off: mean|Δ| {found[name].mean_abs:.5f} and k3 "
        f"{found[name].k3:.5f}, off {off.mean_abs:.5f} and {off.k3:.5f}"
        for name in CONTROLS
        if name in found and (found[name].mean_abs <= off.mean_abs or found[name].k3 <= off.k3)
    ]
    return wrong


# -- the program ------------------------------------------------------------------------------------------


async def sample_models(
    models: Sequence[Path], prompts: int, tokens: int, logs: Path
) -> list[list[Trajectory]]:
    """Samples from each of the models, with one server for all."""
    sampled = []
    async with serving(models[0], logs, dtype="bfloat16") as engine:
        for seed, model in enumerate(models):
            await engine.update_weights(DiskUpdate(weight_version=0, path=str(model)), flush=True)
            sampled.append(await sample(engine, random_prompts(prompts, seed=seed), tokens))
    return sampled


def measure(kind: str, dtypes: Sequence[str], seeds: int, prompts: int, tokens: int) -> dict[str, Samples]:
    """Returns the differences of each trainer dtype, variant and seed."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models = [
            build_model(kind, folder / f"model_{seed}", seed=seed, dtype=torch.bfloat16)
            for seed in range(seeds)
        ]
        sampled = asyncio.run(sample_models(models, prompts, tokens, folder))
        facts = load_facts(models[0])
        result: dict[str, Samples] = {}
        for dtype in dtypes:
            by_seed = [
                differences(model, make_batch(trajectories, 0, facts), dtype)
                for model, trajectories in zip(models, sampled, strict=True)
            ]
            result[dtype] = {variant: [found[variant] for found in by_seed] for variant in VARIANTS}
    return result


def table(title: str, samples: Samples) -> str:
    """Prints a line for each variant, compared with replay off; the spread is over seeds."""
    lines = [
        title,
        f"{'variant':<12}{'mean|Δ|':>10}{'k1':>10}{'k3':>10}{'|Δ|>0.1':>9}   "
        f"{'mean|Δ| / off':<24}{'k3 / off':<24}",
    ]
    for variant, by_seed in samples.items():
        m = Mismatch.of(np.concatenate(by_seed))
        ratios = [
            _ratio([getattr(Mismatch.of(d), field) for d in by_seed], samples["off"], field)
            for field in ("mean_abs", "k3")
        ]
        lines.append(
            f"{variant:<12}{m.mean_abs:>10.5f}{m.k1:>10.5f}{m.k3:>10.5f}{m.share_above_0_1:>9.1%}   "
            f"{ratios[0]:<24}{ratios[1]:<24}".rstrip()
        )
    return "\n".join(lines)


def _ratio(values: Sequence[float], off: Sequence[np.ndarray], field: str) -> str:
    ratios = [v / getattr(Mismatch.of(d), field) for v, d in zip(values, off, strict=True)]
    spread = f" ({min(ratios):.3g} to {max(ratios):.3g})" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):.3g}{spread}"


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, fewer and shorter answers")
    parser.add_argument("--model", nargs="+", choices=tuple(BUILDERS), default=list(BUILDERS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES, help="of the trainer")
    parser.add_argument("--seeds", type=int, help="models and prompts (default: 3)")
    arguments = parser.parse_args()
    seeds = arguments.seeds or (1 if arguments.quick else 3)
    prompts, tokens = (16, 32) if arguments.quick else (64, 64)
    torch.set_num_threads(1)

    report = sys.stderr if arguments.json == "-" else sys.stdout
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for kind in arguments.model:
        for dtype, samples in measure(kind, arguments.dtype, seeds, prompts, tokens).items():
            title = (
                f"{kind}, engine bfloat16, trainer {dtype}: {seeds} x {prompts} answers of {tokens} tokens"
            )
            print(table(title, samples), end="\n\n", file=report, flush=True)
            found = {variant: Mismatch.of(np.concatenate(by_seed)) for variant, by_seed in samples.items()}
            wrong += [f"{kind} {dtype}: {sentence}" for sentence in violations(found)]
            rows += [{"model": kind, "dtype": dtype, "variant": v, **asdict(m)} for v, m in found.items()]
    write_json(arguments.json, rows)
    for sentence in wrong:
        print(f"WRONG: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
