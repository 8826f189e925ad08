"""Measures whether replaying the kept tokens makes the trainer compute what truncated sampling computed.

    python benchmarks/sampling_mask.py [--quick] [--costs] [--json FILE]

A tiny MoE with random weights samples tokens on a real SGLang server in float32 under several settings of
temperature, top_p, top_k and min_p; Megatron-Core, with the same weights and the engine's routing, gives its
log-probs of the same tokens. They are compared with the log-probs by which the engine chose:

    mask      over the tokens that the engine kept
    none      over the whole vocabulary, as without replay
    shifted   over those that it kept for the next token, and the token itself

Only mask may be small. Where it is above 1e-5 nats, or shifted is not worse than mask, or none is not where
sampling is truncated, the program says so and exits with 1. Before, it prints what masks and routing each
cost the loop per sampled token, in bytes and CPU time; with --costs only that.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pybase64
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.engine_protocol import SamplingParams
from async_rl.engines.model_facts import facts_of, load_facts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.generate_call import CallAccount
from async_rl.engines.sglang.routing_payload import RoutingWire
from async_rl.rollout.session.tokens import GrowingMask
from async_rl.routing import make_trace
from async_rl.types import Context, Int32Array, RoutingTrace, Sampled, SamplingMask, TrainBatch, Trajectory
from benchmarks import real_parts
from benchmarks.support.tables import Row, argument_parser, report, show
from tests.support.engine_calls import request
from tests.support.fake_sglang import event
from tests.support.train_batches import random_rows

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


# -- what they cost the loop ------------------------------------------------------------------------------

_FACTS: Final = facts_of(
    {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
    }
)
"""The dimensions of Qwen3-30B-A3B."""

_COST_TOKENS: Final = 512
_COST_ANSWERS: Final = 8


def loop_costs() -> list[Row]:
    """Return the CPU time that routing and masks of so many kept tokens add to a token, in microseconds.

    `arrival` is from the text of the engine's response to the session's arrays, `batch` into a frame on disk
    and from it into the trainer's batch, with their checks.
    """
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, _FACTS.vocab_size, _COST_TOKENS).astype(np.int32)
    plain = _fastest(_read_events(token_ids, None))
    batch = _fastest(_pack(token_ids, None, None), _COST_ANSWERS)
    rows = random_rows(rng, _COST_TOKENS - 1, 48, 128, 8)
    payload = pybase64.b64encode(rows.astype(np.int32).tobytes())
    wire = RoutingWire(facts=_FACTS)

    def receive_rows() -> RoutingTrace:
        return make_trace(wire.decode(memoryview(payload), len(rows)), 128, 0, moe_layers=_FACTS.moe_layers)

    trace = real_parts.trace_of(receive_rows(), token_ids)
    found: list[Row] = [
        {
            "what": f"routing, {len(_FACTS.moe_layers)} layers, top {_FACTS.top_k}",
            "bytes": trace.rows.nbytes / len(rows),
            "arrival, us": _fastest(receive_rows),
            "batch, us": _fastest(_pack(token_ids, None, trace), _COST_ANSWERS) - batch,
        }
    ]
    for count in (20, 200, 4000):
        others = rng.integers(0, _FACTS.vocab_size, (_COST_TOKENS, count - 1))
        lists = np.column_stack([others, token_ids]).tolist()
        mask = SamplingMask.of(lists)
        found.append(
            {
                "what": f"masks, {count} kept tokens",
                "bytes": (mask.counts.nbytes + mask.token_ids.nbytes) / _COST_TOKENS,
                "arrival, us": _fastest(_read_events(token_ids, lists)) - plain,
                "batch, us": _fastest(_pack(token_ids, mask, None), _COST_ANSWERS) - batch,
            }
        )
    return found


def _fastest(work: Callable[[], object], answers: int = 1) -> float:
    """CPU time of the fastest of five, in microseconds per token."""
    times = []
    for _ in range(5):
        begin_s = time.process_time()
        work()
        times.append(time.process_time() - begin_s)
    return 1e6 * min(times) / _COST_TOKENS / answers


def _read_events(token_ids: Int32Array, kept: list[list[int]] | None) -> Callable[[], None]:
    """Return what a session does with the events of a call, one for each token."""
    asked = request([1, 2], _COST_TOKENS)
    fields: list[dict[str, object]] = [{}] * len(token_ids)
    if kept is not None:
        sampling = SamplingParams(top_k=len(kept[0]))
        asked = msgspec.structs.replace(asked, sampling=sampling, return_mask=True)
        names = "output_token_sampling_mask", "output_token_sampling_logprobs"
        fields = [dict(zip(names, ([ids], [-0.5]), strict=True)) for ids in kept]
    events = [
        event([token], index + 1, **fields[index])[len(b"data: ") :]
        for index, token in enumerate(token_ids.tolist())
    ]

    def read() -> None:
        account, mask = CallAccount("engine-0", asked, _FACTS.vocab_size), GrowingMask()
        for document in events:
            account.read_event(document, None)
            chunk = account.take_chunk()
            assert chunk is not None
            if chunk.mask is not None:
                assert chunk.mask.keeps(chunk.token_ids).all()
                mask.extend(chunk.mask)
        mask.part(0, len(events) if kept is not None else 0)

    return read


def _pack(token_ids: Int32Array, mask: SamplingMask | None, trace: RoutingTrace | None) -> Callable[[], None]:
    """Return what stores answers and assembles a batch of them."""
    sampled = Sampled(
        token_ids=token_ids[1:],
        rollout_log_probs=np.full(_COST_TOKENS - 1, -0.5, np.float32),
        weight_version=0,
        engine_id="engine-0",
        finish_reason="length",
        mask=None if mask is None else mask[1:],
    )
    segments = (Context(token_ids=token_ids[:1]), sampled)

    def pack() -> None:
        made = [
            real_parts.make_trajectory(f"{number:08d}", segments, trace) for number in range(_COST_ANSWERS)
        ]
        real_parts.make_batch(made, 0, _FACTS)

    return pack


def main() -> int:
    parser = argument_parser(__doc__, quick="one seed, fewer and shorter answers")
    parser.add_argument("--costs", action="store_true", help="only what masks and routing cost the loop")
    options = parser.parse_args()
    size = (1, 8, 32) if options.quick else (3, 32, 64)
    torch.set_num_threads(1)
    show(loop_costs(), "in the loop, per sampled token", stderr=True)
    if options.costs:
        return 0
    found = [measure(kind, *size) for kind in real_parts.BUILDERS]
    rows, wrong = (list(itertools.chain(*each)) for each in zip(*found, strict=True))
    return report(rows, "{} seeds x {} answers of {} tokens; nats".format(*size), options.json, wrong)


if __name__ == "__main__":
    sys.exit(main())
