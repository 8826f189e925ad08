"""Measures whether replaying the engine's experts makes the trainer compute what the engine computed.

    python benchmarks/routing_replay.py [--quick] [--json FILE]

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
that is not what the engine chose. The trainer is in bfloat16, which holds the weights exactly, and float32.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.engines.model_facts import load_facts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.types import ExpertIdArray, Int32Array, TrainBatch, Trajectory
from benchmarks import real_parts
from benchmarks.support.tables import Row, argument_parser, report
from tests.support.engine_calls import request
from trainer.worker import TrainerWorker

VARIANTS = ("off", "r2", "r3", "rows+1", "rows-1", "layers", "other", "corrupt25", "corrupt50", "corrupt100")
CONTROLS = VARIANTS[3:]

DTYPES = ("bfloat16", "float32")

Rows = list[ExpertIdArray]
"""Of each trajectory, `[T-1, L_moe, K]`."""


# -- sampling ---------------------------------------------------------------------------------------------


async def sample(engine: SGLangEngine, prompts: Sequence[Int32Array], tokens: int) -> list[Trajectory]:
    """Samples one call per prompt, all at once, at temperature 1."""
    asked = (request(prompt.tolist(), tokens, temperature=1.0) for prompt in prompts)
    return await real_parts.sample_calls(engine, asked)


# -- the routing of each variant --------------------------------------------------------------------------


def corrupted(rows: Rows, share: float, num_experts: int, seed: int = 0) -> Rows:
    """Replace a share of the rows of each trajectory by random experts, distinct and in range, in all
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
    """Return the engine's rows as each negative control changes them; all pass every check of form."""
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
    """Return the batch with other routing; the row of the token that was never fed stays unchanged."""
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
        return (real_parts.trainer_log_probs(worker, batch) - batch.rollout_log_probs)[batch.loss_mask]

    result = {}
    for replay in ("off", "r2"):
        if replay in variants:
            with real_parts.training(model, dtype=dtype, replay=replay) as worker:
                result[replay] = against_engine(worker, batch)
    changes = {"r3": lambda rows: rows, **controls(batch.num_experts)}
    with real_parts.training(model, dtype=dtype, replay="r3") as worker:
        for name, change in changes.items():
            if name in variants:
                result[name] = against_engine(worker, with_rows(batch, change))
    return {name: result[name] for name in variants}


def violations(found: dict[str, real_parts.Mismatch]) -> list[str]:
    """Return the expectations that the figures violate."""
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


def measure(kind: str, seeds: int, prompts: int, tokens: int) -> tuple[list[Row], list[str]]:
    """Return a row for each dtype of the trainer and variant, and what is wrong with them."""
    rows: list[Row] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models = [
            real_parts.build_model(kind, folder / f"model_{seed}", seed=seed, dtype=torch.bfloat16)
            for seed in range(seeds)
        ]

        async def sample_seed(engine: SGLangEngine, seed: int) -> list[Trajectory]:
            return await sample(engine, real_parts.random_prompts(prompts, seed=seed), tokens)

        sampled = asyncio.run(real_parts.with_each(models, folder, "bfloat16", sample_seed))
        facts = load_facts(models[0])
        for dtype in DTYPES:
            by_seed = [
                differences(model, real_parts.make_batch(trajectories, 0, facts), dtype)
                for model, trajectories in zip(models, sampled, strict=True)
            ]
            found = {v: real_parts.Mismatch.of(np.concatenate([d[v] for d in by_seed])) for v in VARIANTS}
            wrong += [f"{kind} {dtype}: {sentence}" for sentence in violations(found)]
            rows += [
                {
                    "model": kind,
                    "dtype": dtype,
                    "variant": variant,
                    **asdict(m),
                    "k3 / off": m.k3 / found["off"].k3,
                }
                for variant, m in found.items()
            ]
    return rows, wrong


def main() -> int:
    options = argument_parser(__doc__, quick="one seed, fewer and shorter answers").parse_args()
    size = (1, 16, 32) if options.quick else (3, 64, 64)
    torch.set_num_threads(1)
    found = [measure(kind, *size) for kind in real_parts.BUILDERS]
    rows, wrong = (list(itertools.chain(*each)) for each in zip(*found, strict=True))
    title = "{} seeds x {} answers of {} tokens, engine in bfloat16; nats".format(*size)
    return report(rows, title, options.json, wrong)


if __name__ == "__main__":
    sys.exit(main())
