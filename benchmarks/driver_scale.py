"""Measures what tokens and trajectories cost the driver and each rollout worker of a run.

    python benchmarks/driver_scale.py [--quick] [--json FILE] [--workers 0 1 2 4 8] [--tokens-per-event 1 8]

Each run is `async-rl train` with its own config: the real rollout manager, engine pool, SGLang client,
rollout workers as Ray actors, queue, ledger and spool. Its engines are servers of
`benchmarks.support.paced_server` in processes of their own, its trainer only takes and settles batches, and
weight updates are `in_place`. In one run answers get longer from row to row, at a pace that leaves the
machine idle time.

Costs are process CPU time with all threads. The driver's includes every process of the run that exists
once; JSON has the part of Ray's own processes too. Both are reduced by what the processes take while hardly
any token arrives (`driver_idle`, CPU seconds a second of the driver). A worker takes less time for a token
the more tokens arrive, because a read finds more of them: `--events-per-s` sets the pace. Over the lengths of
one run lines are fitted to the CPU times of the driver and of a worker: a slope per token and an intercept
per trajectory. `worker_tokens_per_s` counts tokens per CPU second of a worker, and of the driver where there
is none (`workers: 0`). The longest pause is that of the event loop which reads the events: of a worker, in
its own process, or of the driver.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.config.worker_count import TRAJECTORIES_PER_WORKER
from async_rl.engines.pool import EnginePool
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import step_record_log
from async_rl.planning.process_costs import CostRow, fit_costs
from async_rl.rollout.workers.link import connect_link, listen
from async_rl.rollout.workers.messages import Heartbeat
from async_rl.rollout.workers.metric_counts import IncrementCollector, add_increments
from async_rl.rollout.workers.worker_grants import WorkerGrants
from benchmarks.support.loop_pauses import FOLDER, longest_pauses
from benchmarks.support.paced_server import Counts, Pace
from benchmarks.support.tables import argument_parser, report, show
from tests.support.mortal_rank import PLAN

ROOT: Final = Path(__file__).parent.parent
GROUP_SIZE: Final = 8
GROUPS_PER_BATCH: Final = 32
SLOTS: Final = 128
"""Slots of an engine."""

SHOWN: Final = (
    *(
        "workers",
        "streams",
        "answer_tokens",
        "tokens_per_event",
        "driver_us_a_token",
        "driver_ms_a_trajectory",
    ),
    *(
        "driver_idle",
        "worker_tokens_per_s",
        "worker_us_an_event",
        "worker_longest_pause_cpu_ms",
        "late_share",
    ),
)
"""Columns of the table; JSON has all."""

_START_LIMIT_S: Final = 600.0
_IDLE_STEP_S: Final = 1.0
"""Seconds per token while the idle share is measured: calls without tokens would be reported as long waits"""

_SETTLE_S: Final = 2.0
"""Between a change of pace and the measurement."""


def cpu_times(driver: psutil.Process) -> np.ndarray:
    """Return CPU seconds of the driver (with all processes that exist once), the workers, and Ray itself."""
    spent = np.zeros(3)
    for process in (driver, *driver.children(recursive=True)):
        try:
            name = " ".join(process.cmdline())
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        if "ray::RolloutWorkerActor" in name:
            spent[1] += times.user + times.system
        elif "ray::" not in name:
            spent[[0, 2] if "/site-packages/ray/" in name else [0]] += times.user + times.system
    return spent


class Servers:
    """Paced servers in processes of their own."""

    def __init__(self, session: aiohttp.ClientSession, urls: list[list[str]]) -> None:
        self._session = session
        self._urls = urls

    @property
    def urls(self) -> list[str]:
        """URLs of all engines."""
        return [url for urls in self._urls for url in urls]

    async def set_pace(self, pace: Pace) -> None:
        """Let all engines answer in another way."""
        for url in self.urls:
            async with self._session.post(f"{url}/pace", data=msgspec.json.encode(pace)) as reply:
                reply.raise_for_status()

    async def counts(self) -> Counts:
        """Return the counts of all engines together."""
        found = []
        for url, *_ in self._urls:
            async with self._session.get(f"{url}/counts") as reply:
                found.append(msgspec.json.decode(await reply.read()).values())
        return Counts(*map(sum, zip(*found, strict=True)))


@contextmanager
def server_processes(num_processes: int, num_engines: int) -> Iterator[list[list[str]]]:
    """Start processes with so many engines together, and yield their URLs; they end with the block."""
    command = [sys.executable, "-m", "benchmarks.support.paced_server"]
    shares = [len(part) for part in np.array_split(np.arange(num_engines), num_processes)]
    processes = [
        subprocess.Popen([*command, str(share)], cwd=ROOT, stdout=subprocess.PIPE) for share in shares
    ]
    try:
        lines = [process.stdout.readline() for process in processes if process.stdout is not None]
        yield [msgspec.json.decode(line, type=list[str]) for line in lines]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def write_inputs(folder: Path) -> None:
    """Write the quickstart's untrained model, with a longer context, and tasks of a few words."""
    script = ROOT / "examples" / "calculator" / "make_model.py"
    subprocess.run([sys.executable, script, "model"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    path = folder / "model" / "config.json"
    config = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(config | {"max_position_embeddings": 1 << 20}))
    tasks = [
        {"id": f"{number}", "messages": [{"role": "user", "content": f"{number:064}"}]}
        for number in range(4096)
    ]
    (folder / "tasks.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, tasks)))
    (folder / "deaths.json").write_text("[]")


def run_config(folder: Path, workers: int, streams: int, longest: int, urls: Sequence[str]) -> dict[str, Any]:
    """Return the config of a run."""
    batch = GROUPS_PER_BATCH * GROUP_SIZE
    return {
        "run": {"name": "run", "dir": str(folder), "max_steps": 10**6, "drain_s": 0, "keep_trajectories": 0},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"path": str(folder / "tasks.jsonl")},
        "engine": {"urls": list(urls), "device": "cpu", "max_running_requests": SLOTS},
        "rollout": {
            "agent_loop": "benchmarks.support.loop_pauses:PausesLoop",
            "reward": "async_rl.planning.workload:no_reward",
            "group_size": GROUP_SIZE,
            "max_concurrent_trajectories": streams,
            "max_staleness": 4 + 3 * streams // batch,
            "max_context_tokens": longest + 512,
            "max_new_tokens": longest,
            "trajectory_timeout_s": 1e6,
            "num_workers": workers,
        },
        "routing": {"replay": "off"},
        "weights": {"interrupt": "in_place", "transport": "disk"},
        "trainer": {
            "worker": "tests.support.mortal_rank:MortalRank",
            "device": "cpu",
            "groups_per_batch": GROUPS_PER_BATCH,
            "checkpoint_every": 0,
        },
    }


@contextmanager
def training(folder: Path, config: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Run `async-rl train` with a config until the end of the block."""
    path = folder / "config.json"  # JSON is YAML
    path.write_text(json.dumps(config))
    environment = os.environ | {
        PLAN: str(folder / "deaths.json"),
        FOLDER: str(folder),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "output.log").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "async_rl.cli", "train", str(path)],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                children = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                for child in psutil.wait_procs(children, timeout=5)[1]:
                    child.kill()
            else:
                print((folder / "output.log").read_text()[-3000:], file=sys.stderr)
            process.wait()
            shutil.rmtree(folder / "run", ignore_errors=True)


async def measure_run(o: Namespace, folder: Path, workers: int, interval: int) -> list[CostRow]:
    """Start a run with so many workers, and measure all lengths in it."""
    streams = o.streams * max(1, workers)
    rows = []
    heartbeat_us = await measure_heartbeat() if workers else 0.0
    with server_processes(max(1, workers), max(-(-streams // SLOTS), workers)) as urls:
        async with aiohttp.ClientSession() as session:
            engines = Servers(session, urls)
            config = run_config(folder, workers, streams, max(o.lengths), engines.urls)
            await engines.set_pace(Pace(step_s=1.0, answer_tokens=1))
            await engines.set_pace(Pace(held=True))
            with training(folder, config) as process:
                driver = psutil.Process(process.pid)
                await wait_for_streams(engines, process, streams)
                await engines.set_pace(Pace(step_s=_IDLE_STEP_S))
                await asyncio.sleep(_SETTLE_S)
                before = cpu_times(driver)
                await asyncio.sleep(min(o.seconds))
                idle = (cpu_times(driver) - before) / min(o.seconds)
                for length, seconds in zip(o.lengths, o.seconds, strict=True):
                    await engines.set_pace(Pace(streams / o.events_per_s / interval, length, interval))
                    await asyncio.sleep(_SETTLE_S)
                    figures = await measure_length(engines, driver, folder / "run", idle, seconds)
                    rows.append(
                        CostRow(
                            workers=workers,
                            streams=streams,
                            answer_tokens=length,
                            heartbeat_us=heartbeat_us,
                            quick=o.quick,
                            load=os.getloadavg()[0],
                            **figures,
                        )
                    )
    return rows


async def measure_heartbeat(rounds: int = 2000) -> float:
    """Return the CPU time that a heartbeat with its answer takes the driver, in microseconds.

    Both ends of the link are here: the time ends when the answer is posted, and begins before the other end
    writes to its socket, which takes as long as the driver's write.
    """
    clock, metrics = asyncio.get_running_loop().time, Metrics()
    collector, pool = IncrementCollector(metrics), EnginePool(metrics, clock)
    async with listen("127.0.0.1") as listener, asyncio.TaskGroup() as tasks:
        connecting = tasks.create_task(connect_link("127.0.0.1", listener.port, listener.key))
        ours = await listener.accept_link()
        theirs = await connecting
        grants = WorkerGrants(
            "worker",
            {"": pool},
            ours.post,
            clock=clock,
            on_revoke=lambda version: None,
            worker_stall_s=60.0,
        )
        metrics.event_loop_lag_seconds.observe(0.001)
        metrics.sampled_tokens_total.inc()
        increments = collector.collect_increments()
        spent_s = 0.0
        for number in range(rounds):
            theirs.post(Heartbeat(number=number, increments=increments))
            begin_s = time.thread_time()
            heartbeat = await ours.receive()
            assert isinstance(heartbeat, Heartbeat)
            add_increments(heartbeat.increments, metrics)
            grants.renew(heartbeat)
            spent_s += time.thread_time() - begin_s
            await theirs.receive()
        ours.close()
        theirs.close()
    return 1e6 * spent_s / rounds


async def wait_for_streams(engines: Servers, driver: subprocess.Popen[bytes], streams: int) -> None:
    """Wait until all streams run."""
    async with asyncio.timeout(_START_LIMIT_S):
        while (running := (await engines.counts()).running) < streams:
            if driver.poll() is not None:
                raise SystemExit(f"the run ended when {running} of {streams} streams ran")
            await asyncio.sleep(0.2)


async def measure_length(
    engines: Servers, driver: psutil.Process, run_dir: Path, idle: np.ndarray, seconds: float
) -> dict[str, Any]:
    """Measure the run for a while."""
    counts, times, start_s = await engines.counts(), cpu_times(driver), time.perf_counter()
    steps, since_s = len(step_record_log(run_dir / "metrics.jsonl").read()), time.time()
    await asyncio.sleep(seconds)
    after, spent = await engines.counts(), cpu_times(driver) - times
    wall_s = time.perf_counter() - start_s
    tokens, answers = after.tokens - counts.tokens, after.answers - counts.answers
    events = max(1, after.events - counts.events)
    driver_s, worker_s, ray_s = np.maximum(0.0, spent - idle * wall_s).tolist()
    busy_s = worker_s or driver_s
    pauses = longest_pauses(run_dir.parent, since_s)
    return {
        "tokens_per_event": round(tokens / events, 2),
        "driver_us_a_token": 1e6 * driver_s / max(1, tokens),
        "driver_ms_a_trajectory": 1e3 * driver_s / max(1, answers),
        "worker_tokens_per_s": tokens / max(1e-9, busy_s),
        "driver_idle": float(idle[0]),
        "seconds": wall_s,
        "tokens": tokens,
        "trajectories": answers,
        "steps": len(step_record_log(run_dir / "metrics.jsonl").read()) - steps,
        "driver_cpu_s": driver_s,
        "ray_cpu_s": ray_s,
        "worker_cpu_s": float(spent[1]),
        "late_share": (after.late_steps - counts.late_steps) / max(1, tokens),
        "worker_us_an_event": 1e6 * busy_s / events,
        "worker_longest_pause_ms": 1e3 * pauses.longest_s,
        "worker_longest_pause_cpu_ms": 1e3 * pauses.longest_cpu_s,
    }


def main() -> None:
    parser = argument_parser(__doc__, quick="fewer streams and rows, about a minute")
    parser.add_argument("--workers", type=int, nargs="+", help="numbers of rollout workers")
    parser.add_argument("--tokens-per-event", type=int, nargs="+")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of an answer, increasing")
    parser.add_argument("--events-per-s", type=float, default=6000.0, help="of all streams together")
    parser.add_argument("--seconds", type=float, nargs="+", help="of the measurement of each length")
    parser.add_argument("--rounds", type=int, default=1, help="how often all runs are made, in turn")
    quick = parser.parse_known_args()[0].quick
    parser.set_defaults(
        workers=[0, 1] if quick else [0, 1, 2, 4, 8],
        tokens_per_event=[8] if quick else [1, 8],
        lengths=[512, 4096, 32768],
        seconds=[4.0, 5.0, 9.0] if quick else [20.0, 30.0, 60.0],
        streams=64 if quick else TRAJECTORIES_PER_WORKER,
    )
    o = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="async-rl-scale-"))
    rows: list[CostRow] = []
    try:
        write_inputs(folder)
        for _, interval, workers in product(range(o.rounds), o.tokens_per_event, o.workers):
            rows += asyncio.run(measure_run(o, folder, workers, interval))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        report(rows, "costs", o.json, columns=SHOWN)
    show(fit_costs(rows), "lines over the lengths", stderr=True)


if __name__ == "__main__":
    main()
