"""A real engine and a real trainer in one program, shared by the benchmarks of routing replay.

```
folder of weights ─► SGLang server ─► calls ─► trajectories with routing ─┐
                └──► Megatron-Core, this process ─────────────────────────┴─► log-probs of the same tokens
```
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import load_file, save_file

from async_rl import routing
from async_rl.config import Config, ModelConfig, RunConfig, SGLangEngines
from async_rl.engine_protocol import DiskUpdate, EngineFacts, GenerateRequest
from async_rl.engines.model_facts import load_facts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.server import SGLangServer
from async_rl.engines.sglang.server_checks import ServerNeeds
from async_rl.types import (
    Context,
    Float32Array,
    Group,
    Int32Array,
    Outcome,
    RoutingTrace,
    Sampled,
    SamplingMask,
    Segment,
    TrainBatch,
    Trajectory,
)
from tests.support.engine_calls import Call
from tests.support.stored_batches import assemble_batch
from tests.support.tiny_model import build_tiny_deepseek_v3, build_tiny_qwen3_moe, write_byte_tokenizer
from tests.support.trainers import place, started, trainer_config
from trainer.worker import TrainerWorker

T = TypeVar("T")

VOCAB_SIZE = 300
CONTEXT_LENGTH = 2048
MAX_RUNNING = 32
_FIRST_TOKEN = 3
"""Smallest token id of random prompts; 0 to 2 are special."""

BUILDERS: dict[str, Callable[..., Path]] = {
    "qwen3_moe": build_tiny_qwen3_moe,
    "deepseek_v3": build_tiny_deepseek_v3,
}


def build_model(kind: str, path: Path, *, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """Write a tiny MoE with random weights that `dtype` holds exactly; it never samples an end token."""
    transformers.utils.logging.disable_progress_bar()
    std = {"std": 0.15} if kind == "qwen3_moe" else {}
    BUILDERS[kind](path, vocab_size=VOCAB_SIZE, hidden_size=64, seed=seed, **std)
    write_byte_tokenizer(path, vocab_size=VOCAB_SIZE)
    for name in ("config.json", "generation_config.json"):
        config = msgspec.json.decode((path / name).read_bytes())
        (path / name).write_bytes(msgspec.json.encode(config | {"eos_token_id": None}))
    if dtype != torch.float32:
        rewrite(path, path, lambda tensor: tensor.to(dtype).float())
    return path


def rewrite(source: Path, target: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Write a copy of a model folder with every tensor changed, in the order of their names."""
    if source != target:
        shutil.copytree(source, target)
    for file in sorted(source.glob("*.safetensors")):
        tensors = load_file(file)
        changed = {name: change(tensors[name]).contiguous() for name in sorted(tensors)}
        save_file(changed, target / file.name, metadata={"format": "pt"})
    return target


def random_prompts(count: int, *, seed: int, lengths: tuple[int, int] = (16, 32)) -> list[Int32Array]:
    """Return prompts of random tokens with the given lengths."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(_FIRST_TOKEN, VOCAB_SIZE, rng.integers(*lengths, endpoint=True)).astype(np.int32)
        for _ in range(count)
    ]


@contextlib.asynccontextmanager
async def serving(model: Path, logs: Path, *, dtype: str, seed: int = 0) -> AsyncIterator[SGLangEngine]:
    """Run a real SGLang server with the model of a folder during the block."""
    settings = SGLangEngines(
        max_running_requests=MAX_RUNNING, max_total_tokens=4 * CONTEXT_LENGTH, start_timeout_s=300
    )
    config = Config(
        engine=settings, model=ModelConfig(path=str(model), dtype=dtype), run=RunConfig(seed=seed)
    )
    server = SGLangServer(config, index=0, log_dir=logs)
    engine = SGLangEngine(
        "engine-0",
        server.url,
        load_facts(model),
        settings,
        ServerNeeds(routing=True),
        api_key=server.api_key,
        admin_key=server.admin_key,
        state=server.state,
    )
    await server.start()
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.close()
        await server.stop()


def trace_of(trace: RoutingTrace, token_ids: npt.ArrayLike) -> RoutingTrace:
    """Return the rows of a sequence's fed tokens, from a trace that begins with them."""
    fed = np.asarray(token_ids, np.int32)[:-1]
    version = trace.spans[0].weight_version
    return routing.make_trace(
        trace.rows[: len(fed)].copy(),  # the engine may reuse the buffer
        trace.num_experts,
        version,
        moe_layers=trace.moe_layers,
        token_ids=fed,
    )


def make_trajectory(name: str, segments: Iterable[Segment], trace: RoutingTrace | None) -> Trajectory:
    """Return a trajectory as the queue accepts it."""
    return Trajectory(
        trajectory_id=name,
        group_id=name,
        task_id=name,
        segments=tuple(segments),
        trace=trace,
        outcome=Outcome(stop_reason="completed", reward=0.0),
    )


async def sample_calls(engine: SGLangEngine, requests: Iterable[GenerateRequest]) -> list[Trajectory]:
    """Make all calls at once, and return a trajectory for each."""
    calls = [Call(engine, each) for each in requests]
    await asyncio.gather(*(call.run() for call in calls))
    return [
        make_trajectory(
            f"{number:08d}",
            (
                Context(token_ids=call.asked.input_ids),
                Sampled(
                    token_ids=np.array(call.token_ids, np.int32),
                    rollout_log_probs=np.array(call.log_probs, np.float32),
                    weight_version=0,
                    engine_id=engine.engine_id,
                    finish_reason="length",
                    mask=SamplingMask.joined(call.masks) if call.masks else None,
                ),
            ),
            trace_of(call.trace, call.sequence),
        )
        for number, call in enumerate(calls)
    ]


async def with_each(
    models: Sequence[Path], logs: Path, dtype: str, sample: Callable[[SGLangEngine, int], Awaitable[T]]
) -> list[T]:
    """Samples from each of the models, `sample` given its number, with one server for all."""
    sampled = []
    async with serving(models[0], logs, dtype=dtype) as engine:
        for number, model in enumerate(models):
            await engine.update_weights(DiskUpdate(weight_version=0, path=str(model)), flush=True)
            sampled.append(await sample(engine, number))
    return sampled


def make_batch(trajectories: Sequence[Trajectory], version: int, facts: EngineFacts) -> TrainBatch:
    """Return all trajectories as one batch, as the queue packs it."""
    groups = [Group(group_id=t.group_id, trajectories=(t,)) for t in trajectories]
    return assemble_batch(groups, version, "batch", facts)


@contextlib.contextmanager
def training(
    model: Path, *, dtype: str, replay: str = "r3", temperature: float = 1.0
) -> Iterator[TrainerWorker]:
    """Run a trainer of one rank in this process, one at a time, because Megatron's groups are global."""
    settings = {"dtype": dtype, "temperature": temperature, "micro_batch_tokens": 1024}
    with started(trainer_config(model, replay=replay, **settings)) as worker:
        yield worker


def trainer_log_probs(worker: TrainerWorker, batch: TrainBatch) -> Float32Array:
    """Return the trainer's log-probs of the sampled tokens, `[S]` at the tokens themselves, else 0.

    They are those of the update: under R2, of a second pass that replays what the first one recorded.
    """
    found, placed = worker.compute_old_log_probs(place(worker, batch), batch.num_tokens)
    if worker.config.routing.replay == "r2":
        recorded = placed

        def keep(index: int, hidden: torch.Tensor) -> tuple[torch.Tensor, int, None]:
            log_probs, _ = worker.log_probs_and_entropy(recorded[index], hidden)
            found[recorded[index].token_indices] = log_probs.cpu().numpy()
            return log_probs.sum(), 0, None

        found[:] = 0
        worker.model.run_schedule([p.inputs for p in recorded], keep, forward_only=True)
    return np.roll(found, 1)  # from the predicting positions to the tokens


@dataclass(frozen=True)
class Mismatch:
    """The difference between the trainer's and the engine's log-probs over sampled tokens.

    Source: k1 and k3: John Schulman, "Approximating KL Divergence" (2020), for KL(engine | trainer), with
    tokens of the engine's policy.
    """

    mean_abs: float
    k1: float
    k3: float
    share_above_0_1: float

    @classmethod
    def of(cls, difference: np.ndarray) -> Mismatch:
        """Compute the mismatch from trainer minus engine log-probs, `[n]` in nats."""
        d = difference.astype(np.float64)
        return cls(
            mean_abs=float(np.abs(d).mean()),
            k1=float(-d.mean()),
            k3=float((np.expm1(d) - d).mean()),
            share_above_0_1=float((np.abs(d) > 0.1).mean()),
        )
