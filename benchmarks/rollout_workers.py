"""Measures what agent loops cost the driver: without workers, with one and with two, alternately.

    python benchmarks/rollout_workers.py [--quick] [--json FILE]

Trajectories of three turns of 16 tokens on simulated engines that take no time, 64 at once. The engines are
in the process that calls them, so that of a worker's calls the driver sees only messages. Between two turns
the loop computes for so many milliseconds, as a parser or a checker of the user's would. Reported
are processor time of the driver a turn and turns a second; ratios are of the same round, with their smallest
and largest. With two cores for three processes only the driver's processor time says something: what a turn
takes on the wall is bounded by the cores that loops may use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, cast

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.config import Config, SimulatedEngines, parse_config
from async_rl.data.chat_format import ChatFormat
from async_rl.engines.pool import EnginePool
from async_rl.engines.simulated import SimulatedEngine
from async_rl.errors import EnvironmentNotReady
from async_rl.observability.metrics import Metrics
from async_rl.queue.spool import Spool, SpoolFolder
from async_rl.rollout.attempt import Attempt
from async_rl.rollout.session.api import Session
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.workers.backend_choice import choose_backend
from async_rl.rollout.workers.link import connect_link, listen
from async_rl.rollout.workers.messages import Link
from async_rl.rollout.workers.worker import RolloutWorker
from async_rl.rollout.workers.worker_backend import WorkerSpec
from async_rl.runtime.processes import die_with_parent
from async_rl.runtime.supervision import Nursery
from async_rl.types import Completion, Task
from verification.simulation.scenario import FACTS
from verification.simulation.users import SimulatedChat

TURNS = 3
CONCURRENT = 64
CHAT = cast(ChatFormat, SimulatedChat())
PROMPT = " ".join(str(5 + number % 300) for number in range(256))


class Computing:
    """Three turns; computes after each of them."""

    async def run(self, task: Task, session: Session) -> None:
        """Implements `AgentLoop.run`."""
        session.start(task.messages)
        for _ in range(TURNS):
            await session.generate(max_new_tokens=16)
            end_s = time.thread_time() + task.metadata["compute_s"]
            while time.thread_time() < end_s:
                pass
            session.add_messages([{"role": "user", "content": "7 8 9"}])


async def reward(task: Task, completion: Completion) -> float:
    """Nothing."""
    return 0.0


class Cost(msgspec.Struct):
    """The cost of one run."""

    cpu_us: float
    """Processor time of the driver for each turn."""
    turns_per_s: float


def config_of(workers: int) -> Config:
    """Return the config of a run with this many workers."""
    return parse_config(
        {
            "model": {"path": "unused"},
            "data": {"path": "unused"},
            "engine": {"kind": "simulated", "decode_step_s": 0.0, "prefill_tokens_per_s": 1e9},
            "rollout": {
                "agent_loop": "benchmarks.rollout_workers:Computing",
                "reward": "benchmarks.rollout_workers:reward",
                "max_context_tokens": 1024,
                "max_new_tokens": 16,
                "num_workers": workers,
            },
            "routing": {"replay": "off"},
        }
    )


def make_engines(config: Config) -> list[SimulatedEngine]:
    """Return the engines of one process."""
    assert isinstance(config.engine, SimulatedEngines)
    return [SimulatedEngine(f"engine-{i}", config.engine, seed=i, facts=FACTS) for i in range(4)]


def work(workers: int, folder: Path, port: int, key: bytes) -> None:
    """The process of a worker."""

    async def run() -> None:
        config, ids = config_of(workers), count()
        engines = {engine.engine_id: engine for engine in make_engines(config)}
        worker = RolloutWorker(
            config,
            chat=CHAT,
            facts=FACTS,
            connect=lambda engine_id, address: engines[engine_id],
            new_id=lambda: f"{next(ids):032x}",
            metrics=Metrics(),
            clock=time.monotonic,
            frames=SpoolFolder(folder),
        )
        await worker.run(await connect_link("127.0.0.1", port, key))

    die_with_parent()
    asyncio.run(run())


@asynccontextmanager
async def open_worker(workers: int, spec: WorkerSpec) -> AsyncIterator[Link]:
    """Start a worker, which ends with the block."""
    async with listen("127.0.0.1") as listener:
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=work, args=(workers, spec.frames, listener.port, listener.key))
        process.start()

        async def watch() -> None:
            await ended(process)
            raise EnvironmentNotReady(f"it ended with code {process.exitcode} before it was there")

        async with Nursery() as nursery:
            nursery.start_task("start of a worker", watch())
            link = await listener.accept_link()
            nursery.cancel_tasks()
    try:
        yield link
    finally:
        link.close()
        await ended(process)
        link.peer_has_ended = True


async def ended(process: SpawnProcess) -> None:
    """Wait until it has."""
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process.sentinel, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(process.sentinel)
    process.join()


RunTrajectories = Callable[[float, int], Awaitable[Cost]]
"""Runs a number of trajectories whose loops compute for some seconds after each turn."""


@asynccontextmanager
async def rollouts(workers: int, folder: Path) -> AsyncIterator[RunTrajectories]:
    """Start engines and a rollout backend with this many workers, and a spool in a folder."""
    spool = Spool(folder / str(workers), None)
    config, metrics, ids = config_of(workers), Metrics(), count()
    pool = EnginePool(metrics, time.monotonic)
    for engine in make_engines(config):
        pool.add_engine(engine)
        pool.serve_engine(engine.engine_id, 0)
    context = SessionContext(
        chat=CHAT,
        rollout=config.rollout,
        metrics=metrics,
        clock=time.monotonic,
        serving_clock=pool.serving_clock,
        calls=pool,
        facts=FACTS,
        routing=config.routing,
        interrupt="abort",
        new_id=lambda: f"{next(ids):032x}",
    )
    backend = choose_backend(config, context, pool, spool, lambda spec: open_worker(workers, spec))

    async def run_attempts(task: Task, number: int) -> None:
        for _ in range(number):
            attempt = Attempt(task, f"{next(ids):032x}", "g", 1, started_s=0.0)
            spool.discard((await backend.run_attempt(attempt)).trajectories)

    async def cost(compute_s: float, trajectories: int) -> Cost:
        messages = [{"role": "user", "content": PROMPT}]
        task = Task(task_id="t", messages=messages, metadata={"compute_s": compute_s})
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        async with Nursery() as slots:
            for slot in range(CONCURRENT):
                slots.start_task(f"slot {slot}", run_attempts(task, trajectories // CONCURRENT))
        await asyncio.to_thread(spool.delete_discarded)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        turns = trajectories * TURNS
        return Cost(cpu_us=1e6 * cpu_s / turns, turns_per_s=turns / wall_s)

    async with backend:
        yield cost


async def compare(rounds: int, trajectories: int) -> list[dict[str, Any]]:
    """Alternate between no, one and two workers, after a round to warm up."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = [await stack.enter_async_context(rollouts(workers, folder)) for workers in range(3)]
        for run_trajectories in settings:
            await run_trajectories(0.0, CONCURRENT)
        rows = []
        for compute_ms in (0.0, 2.0):
            found: list[list[Cost]] = [[] for _ in settings]
            for _ in range(rounds):
                for run_trajectories, costs in zip(settings, found, strict=True):
                    costs.append(await run_trajectories(compute_ms / 1e3, trajectories))
            rows += [row(compute_ms, workers, costs, found[0]) for workers, costs in enumerate(found)]
    return rows


def row(compute_ms: float, workers: int, costs: list[Cost], here: list[Cost]) -> dict[str, Any]:
    """Medians, and ratios to the driver that plays all itself."""
    ratios = [cost.cpu_us / own.cpu_us for cost, own in zip(costs, here, strict=True)]
    return {
        "compute_ms": compute_ms,
        "workers": workers,
        "driver_cpu_us_per_turn": round(statistics.median(c.cpu_us for c in costs)),
        "of_no_worker": round(statistics.median(ratios), 2),
        "smallest": round(min(ratios), 2),
        "largest": round(max(ratios), 2),
        "turns_per_s": round(statistics.median(c.turns_per_s for c in costs)),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer trajectories and rounds")
    parser.add_argument("--json", help="write the rows here as well")
    options = parser.parse_args()
    rows = asyncio.run(compare(3, 128) if options.quick else compare(7, 1024))
    print(
        f"{'user code a turn':>18}{'workers':>9}{'driver CPU a turn':>19}{'of 0 workers':>22}{'turns/s':>10}"
    )
    for row in rows:
        spread = f"{row['of_no_worker']} ({row['smallest']} to {row['largest']})"
        print(
            f"{row['compute_ms']:>15} ms{row['workers']:>9}{row['driver_cpu_us_per_turn']:>16} us"
            f"{spread:>22}{row['turns_per_s']:>10}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
