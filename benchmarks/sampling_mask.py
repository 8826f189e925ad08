"""Measures whether replaying the kept tokens makes the trainer compute what truncated sampling computed.

    python benchmarks/sampling_mask.py [--quick] [--json FILE]

A tiny MoE with random weights samples tokens on a real SGLang server in float32 under several settings of
temperature, top_p, top_k and min_p; Megatron-Core, with the same weights and the engine's routing, gives its
log-probs of the same tokens. They are compared with the log-probs by which the engine chose:

    mask      over the tokens that the engine kept
    none      over the whole vocabulary, as without replay
    shifted   over those that it kept for the next token, and the token itself

Only mask may be small. Where it is above 1e-5 nats, or shifted is not worse than mask, or none is not where
sampling is truncated, the program says so and exits with 1.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.engine_protocol import SamplingParams
from async_rl.engines.model_facts import load_facts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.types import Int32Array, SamplingMask, TrainBatch, Trajectory
from benchmarks import real_parts
from benchmarks.support.tables import Row, argument_parser, report
from tests.support.engine_calls import request

VARIANTS: Final = ("mask", "none", "shifted")

SETTINGS: Final = (
    SamplingParams(top_p=0.8, top_k=20),
    SamplingParams(top_p=0.95, top_k=50),
    SamplingParams(top_k=5),
    SamplingParams(top_k=1),
    SamplingParams(min_p=0.2, top_k=100),
    SamplingParams(temperature=0.7, top_p=0.8, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.9, top_k=100),
)
_SHARPNESS: Final = {"qwen3_moe": 3.0, "deepseek_v3": 8.0}
"""By how much the output layer of each model is scaled."""

LIMIT_NATS: Final = 1e-5
"""The largest mean difference with masks, in float32."""


def sharpen(model: Path, factor: float) -> Path:
    """Scales the output layer of a model: random weights alone give nearly uniform distributions."""
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        tensors["lm_head.weight"] *= factor
        save_file(tensors, file, metadata={"format": "pt"})
    return model


async def sample(
    engine: SGLangEngine, prompts: Sequence[Int32Array], tokens: int, sampling: SamplingParams
) -> list[Trajectory]:
    """Samples one call per prompt, all at once, with masks and routing."""
    plain = [request(prompt.tolist(), tokens) for prompt in prompts]
    return await real_parts.sample_calls(
        engine, [msgspec.structs.replace(call, sampling=sampling, return_mask=True) for call in plain]
    )


def with_mask(batch: TrainBatch, variant: str) -> TrainBatch:
    """Return the batch with the masks of a variant."""
    mask = batch.sampling_mask
    assert mask is not None
    if variant == "none":
        return msgspec.structs.replace(batch, sampling_mask=None)
    if variant == "shifted":
        moved = mask.take(np.minimum(np.arange(len(mask)) + 1, len(mask) - 1))
        kept: list[list[int]] = [[]] * len(mask)
        for position in np.flatnonzero(batch.loss_mask).tolist():
            token_ids = moved[position : position + 1].token_ids.tolist()
            kept[position] = sorted({*token_ids, int(batch.token_ids[position])})
        return msgspec.structs.replace(batch, sampling_mask=SamplingMask.of(kept))
    return batch


def differences(model: Path, batch: TrainBatch, temperature: float) -> dict[str, np.ndarray]:
    """Trainer minus engine log-probs of the sampled tokens under each variant, `[n]` in nats."""
    with real_parts.training(model, dtype="float32", temperature=temperature) as worker:
        return {
            variant: (
                real_parts.trainer_log_probs(worker, with_mask(batch, variant)) - batch.rollout_log_probs
            )[batch.loss_mask]
            for variant in VARIANTS
        }


def violations(sampling: SamplingParams, found: dict[str, float]) -> list[str]:
    """Return the expectations that the mean differences of the variants violate."""
    wrong = []
    if found["mask"] > LIMIT_NATS:
        wrong.append(f"{sampling}: mean|Δ| with masks is {found['mask']:.2e}, above {LIMIT_NATS:g}")
    wrong += [
        f"{sampling}: {variant} has mean|Δ| {found[variant]:.2e}, hardly more than mask with "
        f"{found['mask']:.2e}"
        for variant in VARIANTS[1:]
        if found[variant] < 100 * max(found["mask"], 1e-8)
    ]
    return wrong


def measure(kind: str, seeds: int, prompts: int, tokens: int) -> tuple[list[Row], list[str]]:
    """Return a row for each setting, and what is wrong with them."""
    rows: list[Row] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models = [
            sharpen(real_parts.build_model(kind, folder / f"model_{seed}", seed=seed), _SHARPNESS[kind])
            for seed in range(seeds)
        ]

        async def sample_seed(engine: SGLangEngine, seed: int) -> dict[SamplingParams, list[Trajectory]]:
            drawn = real_parts.random_prompts(prompts, seed=seed)
            return {sampling: await sample(engine, drawn, tokens, sampling) for sampling in SETTINGS}

        sampled = asyncio.run(real_parts.with_each(models, folder, "float32", sample_seed))
        facts = load_facts(models[0])
        for sampling in SETTINGS:
            batches = [real_parts.make_batch(of_seed[sampling], 0, facts) for of_seed in sampled]
            found = [differences(*pair, sampling.temperature) for pair in zip(models, batches, strict=True)]
            means = {v: float(np.abs(np.concatenate([each[v] for each in found])).mean()) for v in VARIANTS}
            wrong += [f"{kind}: {sentence}" for sentence in violations(sampling, means)]
            kept = [
                batch.sampling_mask.counts[batch.loss_mask]
                for batch in batches
                if batch.sampling_mask is not None
            ]
            settings = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
            rows.append({"model": kind, **settings, "kept": float(np.concatenate(kept).mean()), **means})
    return rows, wrong


def main() -> int:
    options = argument_parser(__doc__, quick="one seed, fewer and shorter answers").parse_args()
    size = (1, 8, 32) if options.quick else (3, 32, 64)
    torch.set_num_threads(1)
    found = [measure(kind, *size) for kind in real_parts.BUILDERS]
    rows, wrong = (list(itertools.chain(*each)) for each in zip(*found, strict=True))
    return report(rows, "{} seeds x {} answers of {} tokens; nats".format(*size), options.json, wrong)


if __name__ == "__main__":
    sys.exit(main())
