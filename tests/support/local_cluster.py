"""A cluster inside the test's own event loop: simulated engines and a trainer that only checks and counts."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from async_rl.config import Config, SimulatedEngines
from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import Engine
from async_rl.engines.model_facts import load_facts
from async_rl.errors import EngineError, TrainerError
from async_rl.observability.records import FIGURES
from async_rl.store.frames import find_flaws, read_trajectories
from async_rl.store.spool_nodes import no_other_nodes
from async_rl.trainer_protocol import Saved, StepResult, Trainer, TrainerState
from async_rl.types import TakenBatch, TrainBatch
from verification.simulation.breakable_engine import BreakableEngine
from verification.simulation.simulated_models import SimulatedModel
from verification.simulation.simulated_workers import SimulatedWorkers
from verification.simulation.users import SimulatedChat


class CheckingTrainer:
    """Consumes batches as a trainer does, and fails on any that violates an invariant."""

    def __init__(self, config: Config, step_s: float = 0.0) -> None:
        self.config = config
        self.step_s = step_s
        self.batches: list[TrainBatch] = []
        self.step = 0
        self.figures: dict[str, float] = {}  # of every step
        self.fail_at: int | None = None
        self.resumed = False
        self.saved = Saved()
        self.away = False
        """Whether its state is on the host, if devices are shared."""

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        self.resumed = self.resumed or bool(self.batches)
        self.step = 0
        path = Path(checkpoint_dir or "") / "latest.json"
        if checkpoint_dir and path.exists():
            self.step = msgspec.json.decode(path.read_bytes())["step"]
            self.resumed = True
        return TrainerState(step=self.step)

    async def read_batch(self, batch: TakenBatch) -> dict[str, str]:
        return await asyncio.to_thread(find_flaws, batch.trajectories)

    async def train_step(self, taken: TakenBatch, step: int) -> StepResult:
        batch = read_trajectories(taken)
        assert step == self.step + 1
        self.check(batch)
        assert not self.away
        await asyncio.sleep(self.step_s)
        if self.fail_at == step:
            raise TrainerError("the trainer broke")
        self.batches.append(batch)
        self.step = step
        trained = int(batch.loss_mask.sum())
        zeros = dict.fromkeys(FIGURES, 0.0)
        rows = 0 if batch.routing_valid is None else batch.num_tokens - batch.num_trajectories
        return StepResult(
            step=step,
            metrics=zeros
            | {
                "tokens": batch.num_tokens,
                "trained_tokens": trained,
                "routing_rows": rows,
                "routing_rows_invalid": 0,
                "step_s": self.step_s,
            }
            | self.figures,
        )

    def check(self, batch: TrainBatch) -> None:
        assert batch.trainer_version == self.step
        assert len(set(batch.trajectory_ids)) == batch.num_trajectories
        sampled = batch.weight_versions[batch.loss_mask]
        assert len(sampled)
        assert sampled.min() >= batch.trainer_version - self.config.rollout.max_staleness
        assert sampled.max() <= batch.trainer_version
        assert np.isfinite(batch.rollout_log_probs).all()
        if batch.routing_valid is not None:
            last = batch.offsets[1:] - 1
            assert not batch.routing_valid[last].any()
            inner = np.ones(batch.num_tokens, bool)
            inner[last] = False
            # Every row that predicts a sampled token is there.
            feeds_sampled = np.zeros(batch.num_tokens, bool)
            feeds_sampled[:-1] = batch.loss_mask[1:]
            assert batch.routing_valid[feeds_sampled & inner].all()

    async def checksums(self) -> dict[str, str]:
        return {"weights": str(self.step)}

    async def publish_delta(self, path: str, base: int | None, weight_version: int) -> bool:
        return False

    async def publish(self, directory: str, weight_version: int) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)

    async def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "latest.json").write_bytes(msgspec.json.encode({"step": self.step}))

    async def saved_checkpoint(self, wait: bool) -> Saved:
        return self.saved

    async def offload(self, keep_weights: bool = False) -> None:
        self.away = True

    async def reload(self) -> None:
        self.away = False

    async def close(self) -> None: ...


class LocalCluster:
    """Implements `async_rl.run.cluster.Cluster` in this process."""

    weight_backend = "gloo"
    abortable_servers = True
    node = ""
    other_nodes = staticmethod(tuple)
    open_frame_reader = staticmethod(no_other_nodes)

    def __init__(
        self, config: Config, step_s: float = 0.0, policy: Any = None, chat: ChatFormat | None = None
    ) -> None:
        """Start nothing yet; `chat` is that of rollout workers, by default one without a tokenizer."""
        assert isinstance(config.engine, SimulatedEngines)
        facts = load_facts(config.model.path)
        self.engines = [
            BreakableEngine(f"engine-{i}", config.engine, seed=config.run.seed, facts=facts, policy=policy)
            for i in range(config.engine.num_engines)
        ]
        self.trainer = CheckingTrainer(config, step_s)
        self.restarts: list[str] = []
        self.left: list[str] = []
        self.models: dict[str, SimulatedModel] = {}
        self.workers = SimulatedWorkers(
            config.run.seed,
            chat or cast(ChatFormat, SimulatedChat()),
            cast(list[Engine], self.engines),
            facts,
            delay_s=lambda: 0.001,
        )
        self.rollout_worker = self.workers.open

    def engines_of(self, model: str) -> SimulatedModel:
        config = self.trainer.config
        if model not in self.models:
            self.models[model] = SimulatedModel(model, config.of_model(model), self.engines[0].facts)
            self.workers.add_engines(self.models[model].engines)
        return self.models[model]

    def ranks_beside(self, engine_id: str) -> tuple[int, ...]:
        return ()

    async def start_engines(self) -> list[Engine]:
        return [] if self.trainer.config.engine.urls_file else list(self.engines)

    async def place_trainer(self) -> None: ...

    async def start_trainer(self) -> Trainer:
        return self.trainer  # type: ignore[return-value]

    def connect_engine(self, engine_id: str, url: str) -> Engine:
        first = self.engines[0]
        joined = BreakableEngine(
            engine_id, first._config, seed=len(self.engines), facts=first.facts, policy=first._policy
        )
        self.engines.append(joined)
        return joined

    async def disconnect_engine(self, engine_id: str) -> None:
        self.left.append(engine_id)

    async def stop_engine(self, engine_id: str) -> None:
        next(e for e in self.engines if e.engine_id == engine_id).die()

    async def restart_engine(self, engine_id: str) -> None:
        self.restarts.append(engine_id)
        next(e for e in self.engines if e.engine_id == engine_id).restart()

    async def watch_engines(self, died: Callable[[str, EngineError], None]) -> None:
        await asyncio.Future()

    def local_folder(self, engine_id: str) -> None: ...

    async def open_port(self, rank: int) -> tuple[str, int]:
        return "127.0.0.1", 0
