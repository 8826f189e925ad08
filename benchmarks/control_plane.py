"""Measures what engines and workers cost the driver without any trajectory: updates and health checks.

    python benchmarks/control_plane.py [--engines 64 256 1024] [--calls 128] [--json FILE]

The pool, the updater, the health check and the workers' leases are the real ones. Each engine has so many
calls, which rollout workers make, four engines' worth each, distributed as the pool does. Engines and workers
only answer: requests over HTTP and links are not included. CPU time is that of the process. A cost per engine
that grows with the number of engines would make large runs impossible.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.config import WeightsConfig
from async_rl.config.engine_settings import SimulatedEngines
from async_rl.engine_protocol import DiskUpdate, Engine, EngineHealth
from async_rl.engines.health import HealthWatch
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.observability.metrics import Metrics
from async_rl.rollout.workers.messages import (
    CallStarted,
    Heartbeat,
    LeasesRevoked,
    LeaseWanted,
    Message,
    RevokeLeases,
)
from async_rl.rollout.workers.relayed_leases import RelayedLeases
from async_rl.rollout.workers.worker import LEASE_S
from async_rl.trainer_protocol import Trainer
from async_rl.weights.checksums import VersionVerifier
from async_rl.weights.delta_delivery import DeltaDelivery
from async_rl.weights.engine_updater import EngineUpdater
from async_rl.weights.publisher import WeightPublisher

ENGINES_PER_WORKER: Final = 4
_TOKENS: Final = 4096


class Row(msgspec.Struct, kw_only=True):
    """The costs with one number of engines."""

    engines: int
    workers: int
    calls: int
    update_ms_an_engine: float
    """CPU time of one update, for each engine."""
    update_longest_turn_ms: float
    """The longest time in which the event loop did not come round meanwhile."""
    messages: int
    """Messages to workers in one update."""
    health_check_us_an_engine: float


class AnsweringEngine:
    """An engine that does at once what it is asked."""

    address = None

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self._version = 0

    def remote_call(self) -> AbstractContextManager[None]:
        """Implements `Engine.remote_call`."""
        return nullcontext()

    async def interrupt(self, mode: str) -> None:
        """Implements `Engine.interrupt`."""

    async def resume_generation(self, mode: str) -> None:
        """Implements `Engine.resume_generation`."""

    async def update_weights(self, update: DiskUpdate, *, flush: bool) -> None:
        """Implements `Engine.update_weights`."""
        self._version = update.weight_version

    async def health(self) -> EngineHealth:
        """Implements `Engine.health`."""
        return EngineHealth(weight_version=self._version)


class AnsweringWorker:
    """A worker that holds calls, and confirms that it begins no more."""

    def __init__(self, name: str, pool: EnginePool) -> None:
        self.num_messages = 0
        self.leases = RelayedLeases(
            name,
            {"": pool},
            self._receive,
            lease_s=LEASE_S,
            clock=time.monotonic,
            on_lease=lambda *of: None,
            probe_timeout_s=5.0,
            worker_stall_s=60.0,
        )

    def call_engine(self, number: int) -> None:
        """Begin a call."""
        key = f"{id(self):x}-{number}"
        self.leases.handle_message(LeaseWanted(lease_id=number, key=key, tokens=_TOKENS, prompt=64))
        self.leases.handle_message(CallStarted(lease_id=number, received=1))

    def renew(self) -> None:
        """Send a heartbeat."""
        self.leases.renew(Heartbeat())

    def _receive(self, message: Message) -> None:
        self.num_messages += 1
        if isinstance(message, RevokeLeases):
            answer = LeasesRevoked(number=message.number)
            asyncio.get_running_loop().call_soon(self.leases.handle_message, answer)


class AnsweringTrainer:
    """A trainer that publishes nothing."""

    async def publish(self, directory: str, weight_version: int) -> None:
        """Implements `Trainer.publish`."""
        os.makedirs(directory)


async def measure(num_engines: int, calls: int, folder: Path) -> Row:
    """Measure an update and a health check with so many engines."""
    metrics, clock = Metrics(), time.monotonic
    pool = EnginePool(metrics, clock)
    for number in range(num_engines):
        pool.add_engine(cast(Engine, AnsweringEngine(f"engine-{number}")))
        pool.serve_engine(f"engine-{number}", 0)
    num_workers = max(1, num_engines // ENGINES_PER_WORKER)
    workers = [AnsweringWorker(f"worker-{number}", pool) for number in range(num_workers)]
    order = random.Random(0)
    for number in range(1, num_engines * calls // num_workers + 1):
        for worker in order.sample(workers, num_workers):  # calls of a worker go to all engines
            worker.call_engine(number)
        await asyncio.sleep(0)
    gc.collect()
    gc.freeze()
    for worker in workers:
        worker.renew()
    config, trainer = WeightsConfig(interrupt="in_place", watch_every=None), cast(Trainer, AnsweringTrainer())
    publisher = WeightPublisher(trainer, folder, keep_versions=2)
    await publisher.publish_files(1)
    updater = EngineUpdater(
        config,
        pool=pool,
        publisher=publisher,
        deltas=cast(DeltaDelivery, None),
        sender=None,
        verifier=VersionVerifier(config, pool=pool, trainer=trainer, metrics=metrics),
        clock=clock,
    )
    before = sum(worker.num_messages for worker in workers)
    begin_s, updating = (
        time.process_time(),
        asyncio.ensure_future(updater.update_wave(pool.engines(EngineState.SERVING), 1)),
    )
    longest_s, last_s = 0.0, time.perf_counter()
    while not updating.done():
        await asyncio.sleep(0)
        longest_s, last_s = max(longest_s, time.perf_counter() - last_s), time.perf_counter()
    update_s = time.process_time() - begin_s
    assert len(updating.result()) == num_engines, "all were updated"
    messages = sum(worker.num_messages for worker in workers) - before
    for worker in workers:
        worker.renew()
    watch = HealthWatch(pool, SimulatedEngines(), metrics, clock)
    begin_s = time.process_time()
    watch.check_engines()
    health_s = time.process_time() - begin_s
    gc.unfreeze()
    return Row(
        engines=num_engines,
        workers=num_workers,
        calls=num_engines * calls,
        update_ms_an_engine=1e3 * update_s / num_engines,
        update_longest_turn_ms=1e3 * longest_s,
        messages=messages,
        health_check_us_an_engine=1e6 * health_s / num_engines,
    )


def show(rows: Sequence[Row]) -> None:
    """Print the rows."""
    table = Table(title="costs of the control plane")
    for column in Row.__struct_fields__:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        values: list[Any] = list(msgspec.structs.astuple(row))
        table.add_row(*(f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" for value in values))
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer engines")
    parser.add_argument("--engines", type=int, nargs="+", help="numbers of engines")
    parser.add_argument("--calls", type=int, default=128, help="calls of each engine")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    o = parser.parse_args()
    numbers = o.engines or ((16, 64) if o.quick else (64, 256, 1024))
    rows = []
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(asyncio.run(measure(number, o.calls, Path(folder))))
    if o.json is not None:
        o.json.write_text(json.dumps(msgspec.to_builtins(rows), indent=1))
    show(rows)


if __name__ == "__main__":
    main()
