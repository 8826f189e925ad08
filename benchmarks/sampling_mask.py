"""Measures whether replaying the kept tokens makes the trainer compute what truncated sampling computed.

    python benchmarks/sampling_mask.py [--quick] [--costs] [--model NAME …] [--seeds N] [--json FILE]

A tiny MoE with random weights samples tokens on a real SGLang server in float32 under several settings of
temperature, top_p, top_k and min_p; Megatron-Core, with the same weights and the engine's routing, gives its
log-probs of the same tokens. They are compared with the log-probs by which the engine chose:

    mask      over the tokens that the engine kept
    none      over the whole vocabulary, as without replay
    shifted   over those that it kept for the next token, and the token itself

Only mask may be small. Where it is above 1e-5 nats, or shifted is not worse than mask, or none is not where
sampling is truncated, the program says so and exits with 1. At the end it prints what masks and routing each
cost the loop per sampled token, in bytes and CPU time; with --costs only that.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import msgspec
import numpy as np
import pybase64
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.engine_protocol import DiskUpdate, SamplingParams
from async_rl.engines.model_facts import facts_of, load_facts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.generate_call import CallAccount
from async_rl.engines.sglang.routing_payload import RoutingWire
from async_rl.rollout.session.tokens import GrowingMask
from async_rl.routing import make_trace
from async_rl.types import (
    Context,
    Int32Array,
    RoutingTrace,
    Sampled,
    SamplingMask,
    TrainBatch,
    Trajectory,
)
from benchmarks.real_parts import (
    BUILDERS,
    build_model,
    make_batch,
    make_trajectory,
    random_prompts,
    sample_calls,
    serving,
    trace_of,
    trainer_log_probs,
    training,
)
from benchmarks.support.tables import argument_parser, write_json
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


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    model: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    variant: str
    mean_abs: float
    """Mean |trainer - engine| over sampled tokens, nats."""
    kept: float
    """Kept tokens per position."""


def sharpen(model: Path, factor: float) -> Path:
    """Scales the output layer of a model: random weights alone give nearly uniform distributions."""
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name == "lm_head.weight":
                tensors[name] = tensors[name] * factor
        save_file(tensors, file, metadata={"format": "pt"})
    return model


async def sample(
    engine: SGLangEngine, prompts: Sequence[Int32Array], tokens: int, sampling: SamplingParams
) -> list[Trajectory]:
    """Samples one call per prompt, all at once, with masks and routing."""

    def asked(prompt: Int32Array) -> Any:
        plain = request(prompt.tolist(), tokens)
        return msgspec.structs.replace(plain, sampling=sampling, return_mask=True)

    return await sample_calls(engine, map(asked, prompts))


def with_mask(batch: TrainBatch, variant: str) -> TrainBatch:
    """Returns the batch with the masks of a variant."""
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
    with training(model, dtype="float32", temperature=temperature) as worker:
        return {
            variant: (trainer_log_probs(worker, with_mask(batch, variant)) - batch.rollout_log_probs)[
                batch.loss_mask
            ]
            for variant in VARIANTS
        }


def violations(sampling: SamplingParams, found: dict[str, float]) -> list[str]:
    """Returns the expectations that the mean differences of the variants violate."""
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


async def sample_all(
    models: Sequence[Path], prompts: int, tokens: int, logs: Path
) -> dict[SamplingParams, list[list[Trajectory]]]:
    """Samples from each of the models under each setting, with one server for all."""
    sampled: dict[SamplingParams, list[list[Trajectory]]] = {sampling: [] for sampling in SETTINGS}
    async with serving(models[0], logs, dtype="float32") as engine:
        for seed, model in enumerate(models):
            await engine.update_weights(DiskUpdate(weight_version=0, path=str(model)), flush=True)
            for sampling in SETTINGS:
                drawn = await sample(engine, random_prompts(prompts, seed=seed), tokens, sampling)
                sampled[sampling].append(drawn)
    return sampled


def measure(kind: str, seeds: int, prompts: int, tokens: int) -> tuple[list[Row], list[str]]:
    """Returns the rows of a model, and what is wrong with them."""
    rows: list[Row] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models = [
            sharpen(build_model(kind, folder / f"model_{seed}", seed=seed), _SHARPNESS[kind])
            for seed in range(seeds)
        ]
        sampled = asyncio.run(sample_all(models, prompts, tokens, folder))
        facts = load_facts(models[0])
        for sampling, by_seed in sampled.items():
            found: dict[str, list[np.ndarray]] = {variant: [] for variant in VARIANTS}
            kept: list[int] = []
            for model, trajectories in zip(models, by_seed, strict=True):
                batch = make_batch(trajectories, 0, facts)
                assert batch.sampling_mask is not None
                kept += batch.sampling_mask.counts[batch.loss_mask].tolist()
                for variant, difference in differences(model, batch, sampling.temperature).items():
                    found[variant].append(difference)
            means = {variant: float(np.abs(np.concatenate(found[variant])).mean()) for variant in VARIANTS}
            wrong += [f"{kind}: {sentence}" for sentence in violations(sampling, means)]
            rows += [
                Row(
                    model=kind,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    min_p=sampling.min_p,
                    variant=variant,
                    mean_abs=means[variant],
                    kept=float(np.mean(kept)),
                )
                for variant in VARIANTS
            ]
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


@dataclass(frozen=True)
class Cost:
    """What masks or routing add to the CPU time of a sampled token, in microseconds, and its bytes."""

    what: str
    bytes: float
    """In frames and batches."""
    arrival_us: float
    """From the text of the engine's response to the session's arrays."""
    batch_us: float
    """Into a frame on disk, and from it into the trainer's batch, with their checks."""


def loop_costs(kept: Sequence[int] = (20, 200, 4000)) -> list[Cost]:
    """Measures the CPU time that masks of so many kept tokens, and routing, add to that of a plain answer."""
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, _FACTS.vocab_size, _COST_TOKENS).astype(np.int32)
    plain = _fastest(_read_events(token_ids, None))
    batch = _fastest(_pack(token_ids, None, None), _COST_ANSWERS)
    rows = random_rows(rng, _COST_TOKENS - 1, 48, 128, 8)
    payload = pybase64.b64encode(rows.astype(np.int32).tobytes())
    wire = RoutingWire(facts=_FACTS)

    def receive_rows() -> RoutingTrace:
        return make_trace(wire.decode(memoryview(payload), len(rows)), 128, 0, moe_layers=_FACTS.moe_layers)

    trace = trace_of(receive_rows(), token_ids)
    found = [
        Cost(
            f"routing, {len(_FACTS.moe_layers)} layers, top {_FACTS.top_k}",
            trace.rows.nbytes / len(rows),
            _fastest(receive_rows),
            _fastest(_pack(token_ids, None, trace), _COST_ANSWERS) - batch,
        )
    ]
    for count in kept:
        others = rng.integers(0, _FACTS.vocab_size, (_COST_TOKENS, count - 1))
        lists = np.column_stack([others, token_ids]).tolist()
        mask = SamplingMask.of(lists)
        found.append(
            Cost(
                f"masks, {count} kept tokens",
                (mask.counts.nbytes + mask.token_ids.nbytes) / _COST_TOKENS,
                _fastest(_read_events(token_ids, lists)) - plain,
                _fastest(_pack(token_ids, mask, None), _COST_ANSWERS) - batch,
            )
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
    """Returns what a session does with the events of a call, one for each token."""
    asked = request([1, 2], _COST_TOKENS)
    if kept is not None:
        sampling = SamplingParams(top_k=len(kept[0]))
        asked = msgspec.structs.replace(asked, sampling=sampling, return_mask=True)
    events = []
    for index, token in enumerate(token_ids.tolist()):
        masks = (
            {}
            if kept is None
            else {"output_token_sampling_mask": [kept[index]], "output_token_sampling_logprobs": [-0.5]}
        )
        events.append(event([token], index + 1, **masks)[len(b"data: ") :])

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
    """Returns what stores answers and assembles a batch of them."""
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
        made = [make_trajectory(f"{number:08d}", segments, trace) for number in range(_COST_ANSWERS)]
        make_batch(made, 0, _FACTS)

    return pack


def print_costs(file: TextIO) -> None:
    """Prints what masks and routing cost the loop."""
    print("\nin the loop, per sampled token     bytes   arrival, us   batch, us", file=file)
    for cost in loop_costs():
        row = f"{cost.what:<31}{cost.bytes:>9.0f}{cost.arrival_us:>14.2f}{cost.batch_us:>12.2f}"
        print(row, file=file)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, fewer and shorter answers")
    parser.add_argument("--costs", action="store_true", help="only what masks and routing cost the loop")
    parser.add_argument("--model", nargs="+", choices=tuple(BUILDERS), default=list(BUILDERS))
    parser.add_argument("--seeds", type=int, help="models and prompts (default: 3)")
    arguments = parser.parse_args()
    seeds = arguments.seeds or (1 if arguments.quick else 3)
    prompts, tokens = (8, 32) if arguments.quick else (32, 64)
    torch.set_num_threads(1)
    report = sys.stderr if arguments.json == "-" else sys.stdout
    rows: list[Row] = []
    wrong: list[str] = []
    for kind in () if arguments.costs else arguments.model:
        found, violated = measure(kind, seeds, prompts, tokens)
        rows += found
        wrong += violated
        print(f"{kind}: {seeds} x {prompts} answers of {tokens} tokens, mean|Δ| in nats", file=report)
        header = "".join(f"{variant:>11}" for variant in VARIANTS)
        print(f"{'temp':>5}{'top_p':>7}{'top_k':>7}{'min_p':>7}{'kept':>7}{header}", file=report)
        for index in range(0, len(found), len(VARIANTS)):
            of_setting = found[index : index + len(VARIANTS)]
            first = of_setting[0]
            values = "".join(f"{row.mean_abs:>11.2e}" for row in of_setting)
            settings = f"{first.temperature:>5g}{first.top_p:>7g}{first.top_k:>7}{first.min_p:>7g}"
            print(f"{settings}{first.kept:>7.1f}{values}", file=report, flush=True)
    print_costs(report)
    write_json(arguments.json, rows)
    for sentence in wrong:
        print(f"WRONG: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
