"""Measures what tokens and trajectories cost the driver and each rollout worker of a run.

    python benchmarks/driver_scale.py [--quick] [--json FILE] [--workers 0 1 2 4 8] [--tokens-per-event 1 8]

Each run is `async-rl train` with its own config: the real rollout manager, engine pool, SGLang client,
rollout workers as Ray actors, queue, ledger and spool. Its engines are servers of
`benchmarks.support.paced_server` in processes of their own, its trainer only takes and settles batches, and
weight updates are `in_place`. In one run answers get longer from row to row, at a pace that leaves the
machine idle time.

Costs are process CPU time with all threads. The driver's includes every process of the run that exists
once; the part of Ray's own processes is also shown alone. Both are reduced by what the processes take while
no engine decodes (`driver_idle`, CPU seconds a second of the driver). A worker takes less time for a token
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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.config.worker_count import TRAJECTORIES_PER_WORKER
from async_rl.engines.pool import EnginePool
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import step_record_log
from async_rl.planning.process_costs import CostRow, fit_costs
from async_rl.rollout.workers.link import connect_link, listen
from async_rl.rollout.workers.messages import Heartbeat
from async_rl.rollout.workers.metric_counts import IncrementCollector, add_increments
from async_rl.rollout.workers.relayed_leases import RelayedLeases
from async_rl.rollout.workers.worker import LEASE_S
from benchmarks.support.loop_pauses import FOLDER, longest_pauses
from benchmarks.support.paced_server import Counts, Pace
from benchmarks.support.tables import argument_parser, write_json
from tests.support.mortal_rank import PLAN

ROOT: Final = Path(__file__).parent.parent
SLOPE_LIMIT_US: Final = 0.01
INTERCEPT_LIMIT_MS: Final = 0.3
"""The limits of the driver's cost, per token and per trajectory."""

GROUP_SIZE: Final = 8
GROUPS_PER_BATCH: Final = 32
SLOTS: Final = 128
"""Slots of an engine."""

_START_LIMIT_S: Final = 600.0
_SETTLE_S: Final = 2.0
"""Between a change of pace and the measurement."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The runs to measure."""

    workers: tuple[int, ...]
    lengths: tuple[int, ...]
    intervals: tuple[int | None, ...]
    """Tokens per event; None lets the client choose."""
    streams: int
    """Streams for each worker."""
    events_per_s: float
    """Events a second, all streams together."""
    seconds: tuple[float, ...]
    """How long each length is measured."""
    quick: bool


class ProcessTimes(msgspec.Struct, frozen=True):
    """CPU seconds so far of the processes of one run."""

    driver: float
    workers: float
    ray: float
    """CPU seconds of Ray's own processes (raylet, GCS, dashboard, monitors), which `driver` includes."""

    def since(self, earlier: ProcessTimes) -> ProcessTimes:
        """Return what was spent since an earlier moment."""
        return ProcessTimes(
            self.driver - earlier.driver, self.workers - earlier.workers, self.ray - earlier.ray
        )


class RunProcesses:
    """The processes of one run, by what they are."""

    def __init__(self, pid: int) -> None:
        self._driver = psutil.Process(pid)

    def times(self) -> ProcessTimes:
        """Return the CPU seconds of the driver, with all processes that exist once, and of the workers."""
        driver, workers, ray = _cpu_s(self._driver), 0.0, 0.0
        for process in self._driver.children(recursive=True):
            try:
                name = " ".join(process.cmdline())
                if "ray::RolloutWorkerActor" in name:
                    workers += _cpu_s(process)
                elif "ray::" not in name:
                    spent_s = _cpu_s(process)
                    driver += spent_s
                    ray += spent_s if "/site-packages/ray/" in name else 0.0
            except psutil.NoSuchProcess:
                continue
        return ProcessTimes(driver, workers, ray)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


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
        total = Counts()
        for url, *_ in self._urls:
            async with self._session.get(f"{url}/counts") as reply:
                counts = msgspec.json.decode(await reply.read(), type=Counts)
            for name in Counts.__struct_fields__:
                setattr(total, name, getattr(total, name) + getattr(counts, name))
        return total


@contextmanager
def server_processes(num_processes: int, num_engines: int) -> Iterator[list[list[str]]]:
    """Start processes with so many engines together, and yield their URLs; they end with the block."""
    command = [sys.executable, "-m", "benchmarks.support.paced_server"]
    shares = [len(part) for part in np.array_split(np.arange(num_engines), num_processes)]
    processes = [
        subprocess.Popen([*command, "--engines", str(share)], cwd=ROOT, stdout=subprocess.PIPE)
        for share in shares
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
    with (folder / "tasks.jsonl").open("w") as file:
        for number in range(4096):
            file.write(
                json.dumps({"id": str(number), "messages": [{"role": "user", "content": f"{number:064}"}]})
            )
            file.write("\n")
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
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for name in (signal.SIGINT, signal.SIGINT):
                process.send_signal(name)
                time.sleep(0.5)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for child in psutil.wait_procs(children, timeout=10)[1]:
                child.kill()
            shutil.rmtree(folder / "run", ignore_errors=True)


async def measure_run(plan: Plan, folder: Path, workers: int, interval: int | None) -> list[CostRow]:
    """Start a run with so many workers, and measure all lengths in it."""
    streams = plan.streams * max(1, workers)
    rows = []
    heartbeat_us = await measure_heartbeat() if workers else 0.0
    with server_processes(max(1, workers), max(-(-streams // SLOTS), workers)) as urls:
        async with aiohttp.ClientSession() as session:
            engines = Servers(session, urls)
            config = run_config(folder, workers, streams, max(plan.lengths), engines.urls)
            await engines.set_pace(Pace(step_s=1.0, answer_tokens=1))
            await engines.set_pace(Pace(held=True))
            with training(folder, config) as driver:
                processes = RunProcesses(driver.pid)
                try:
                    await wait_for_streams(engines, driver, streams)
                except (RuntimeError, TimeoutError) as error:
                    log = (folder / "output.log").read_text()[-3000:]
                    raise SystemExit(
                        f"the run with {workers} workers did not start ({error}):\n{log}"
                    ) from error
                idle = await measure_idle(processes, min(plan.seconds))
                for length, seconds in zip(plan.lengths, plan.seconds, strict=True):
                    # The client may choose the interval: assume 8, which only sets the pace.
                    step_s = streams / plan.events_per_s / (interval or 8)
                    await engines.set_pace(
                        Pace(step_s=step_s, answer_tokens=length, stream_interval=interval)
                    )
                    await asyncio.sleep(_SETTLE_S)
                    row = await measure_length(engines, processes, folder / "run", idle, seconds)
                    row.workers, row.streams, row.heartbeat_us = workers, streams, heartbeat_us
                    row.answer_tokens, row.quick = length, plan.quick
                    rows.append(row)
    return rows


async def measure_heartbeat(rounds: int = 2000) -> float:
    """Return the CPU time of a heartbeat with its answer over a link, of both ends, in microseconds."""
    clock, metrics = asyncio.get_running_loop().time, Metrics()
    collector, pool = IncrementCollector(metrics), EnginePool(metrics, clock)
    async with listen("127.0.0.1") as listener, asyncio.TaskGroup() as tasks:
        connecting = tasks.create_task(connect_link("127.0.0.1", listener.port, listener.key))
        ours = await listener.accept_link()
        theirs = await connecting
        leases = RelayedLeases(
            "worker",
            {"": pool},
            ours.post,
            lease_s=LEASE_S,
            clock=clock,
            on_lease=lambda *of: None,
            probe_timeout_s=5.0,
            worker_stall_s=60.0,
        )
        metrics.event_loop_lag_seconds.observe(0.001)
        metrics.sampled_tokens_total.inc()
        increments = collector.collect_increments()
        begin_s = time.thread_time()
        for number in range(rounds):
            theirs.post(Heartbeat(number=number, increments=increments))
            heartbeat = await ours.receive()
            assert isinstance(heartbeat, Heartbeat)
            add_increments(heartbeat.increments, metrics)
            leases.renew(heartbeat)
            await theirs.receive()
        spent_s = time.thread_time() - begin_s
        ours.close()
        theirs.close()
    return 1e6 * spent_s / rounds


async def wait_for_streams(engines: Servers, driver: subprocess.Popen[bytes], streams: int) -> None:
    """Wait until all streams run."""
    async with asyncio.timeout(_START_LIMIT_S):
        while (running := (await engines.counts()).running) < streams:
            if driver.poll() is not None:
                raise RuntimeError(
                    f"it ended with {driver.returncode} when {running} of {streams} streams ran"
                )
            await asyncio.sleep(0.2)


async def measure_idle(processes: RunProcesses, seconds: float) -> ProcessTimes:
    """Return what the processes take per second while no engine decodes."""
    await asyncio.sleep(_SETTLE_S)
    start_s, before = time.perf_counter(), processes.times()
    await asyncio.sleep(seconds)
    spent, wall_s = processes.times().since(before), time.perf_counter() - start_s
    return ProcessTimes(spent.driver / wall_s, spent.workers / wall_s, spent.ray / wall_s)


async def measure_length(
    engines: Servers, processes: RunProcesses, run_dir: Path, idle: ProcessTimes, seconds: float
) -> CostRow:
    """Measure the run for a while."""
    counts, times, start_s = await engines.counts(), processes.times(), time.perf_counter()
    steps, since_s = len(step_record_log(run_dir / "metrics.jsonl").read()), time.time()
    await asyncio.sleep(seconds)
    after, spent = await engines.counts(), processes.times().since(times)
    wall_s = time.perf_counter() - start_s
    tokens, answers = after.tokens - counts.tokens, after.answers - counts.answers
    driver_s = max(0.0, spent.driver - idle.driver * wall_s)
    worker_s = max(0.0, spent.workers - idle.workers * wall_s) or driver_s
    pauses = longest_pauses(run_dir.parent, since_s)
    events = max(1, after.events - counts.events)
    return CostRow(
        workers=0,
        streams=0,
        answer_tokens=0,
        tokens_per_event=round(tokens / max(1, after.events - counts.events), 2),
        driver_us_a_token=1e6 * driver_s / max(1, tokens),
        driver_ms_a_trajectory=1e3 * driver_s / max(1, answers),
        worker_tokens_per_s=tokens / max(1e-9, worker_s),
        driver_idle=idle.driver,
        seconds=wall_s,
        tokens=tokens,
        trajectories=answers,
        steps=len(step_record_log(run_dir / "metrics.jsonl").read()) - steps,
        driver_cpu_s=driver_s,
        ray_cpu_s=spent.ray - idle.ray * wall_s,
        worker_cpu_s=spent.workers,
        late_share=(after.late_steps - counts.late_steps) / max(1, tokens),
        worker_us_an_event=1e6 * worker_s / events,
        worker_longest_pause_ms=1e3 * pauses.longest_s,
        worker_longest_pause_cpu_ms=1e3 * pauses.longest_cpu_s,
        load=os.getloadavg()[0],
    )


def show(rows: Sequence[CostRow]) -> None:
    """Print rows and lines with their limits."""
    console = Console(width=180)
    table = Table(title="costs" + " (quick: fewer streams, shorter)" * any(row.quick for row in rows))
    for column in (
        *("workers", "streams", "answer", "tokens/event", "driver µs/token", "driver ms/trajectory"),
        *("worker tokens/CPU s", "µs/event", "pause ms (CPU)", "driver idle", "trajectories"),
        *("steps", "late", "Ray ms/s"),
    ):
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(
            *(str(r.workers), f"{r.streams:,}", f"{r.answer_tokens:,}", f"{r.tokens_per_event:.1f}"),
            *(
                f"{r.driver_us_a_token:.3f}",
                f"{r.driver_ms_a_trajectory:.2f}",
                f"{r.worker_tokens_per_s:,.0f}",
            ),
            f"{r.worker_us_an_event:.1f}",
            f"{r.worker_longest_pause_ms:.0f} ({r.worker_longest_pause_cpu_ms:.0f})",
            *(f"{r.driver_idle:.3f}", f"{r.trajectories:,}", str(r.steps), f"{r.late_share:.1%}"),
            f"{1e3 * r.ray_cpu_s / r.seconds:.1f}",
        )
    console.print(table)
    without_ray = [
        msgspec.structs.replace(row, driver_cpu_s=row.driver_cpu_s - row.ray_cpu_s) for row in rows
    ]
    for fit, own in zip(fit_costs(rows), fit_costs(without_ray), strict=True):
        console.print(
            f"{fit.workers} workers, {fit.tokens_per_event:.0f} tokens per event: "
            f"{fit.driver_us_a_token:.3f} µs per token (limit {SLOPE_LIMIT_US}), "
            f"{fit.driver_ms_a_trajectory:.2f} ms per trajectory (limit {INTERCEPT_LIMIT_MS}); "
            f"without Ray's own processes {own.driver_us_a_token:.3f} µs and "
            f"{own.driver_ms_a_trajectory:.2f} ms; of a worker "
            f"{fit.worker_us_a_token:.1f} µs and {fit.worker_ms_a_trajectory:.2f} ms"
        )


def _seconds_for(lengths: Sequence[int], given: Sequence[float] | None, *, quick: bool) -> tuple[float, ...]:
    """Return how long each length is measured: longer ones longer, unless one time is given."""
    usual = (4.0, 5.0, 9.0) if quick else (20.0, 30.0, 60.0)
    seconds = tuple(given or usual)
    return tuple(seconds[min(index, len(seconds) - 1)] for index in range(len(lengths)))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer streams and rows, about a minute")
    parser.add_argument("--workers", type=int, nargs="+", help="numbers of rollout workers")
    parser.add_argument("--tokens-per-event", type=int, nargs="+", help="0 lets the client choose")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of an answer, increasing")
    parser.add_argument("--streams", type=int, help="of each worker")
    parser.add_argument("--events-per-s", type=float, help="of all streams together")
    parser.add_argument("--seconds", type=float, nargs="+", help="of each measurement, or for each length")
    parser.add_argument("--rounds", type=int, default=1, help="how often all runs are made, in turn")
    o = parser.parse_args()
    lengths = tuple(o.lengths or (512, 4096, 32768))
    plan = Plan(
        workers=tuple(o.workers or ((0, 1) if o.quick else (0, 1, 2, 4, 8))),
        lengths=lengths,
        intervals=tuple(n or None for n in o.tokens_per_event or ((8,) if o.quick else (1, 8))),
        streams=o.streams or (64 if o.quick else TRAJECTORIES_PER_WORKER),
        events_per_s=o.events_per_s or 6000.0,
        seconds=_seconds_for(lengths, o.seconds, quick=o.quick),
        quick=o.quick,
    )
    folder = Path(tempfile.mkdtemp(prefix="async-rl-scale-"))
    rows: list[CostRow] = []
    try:
        write_inputs(folder)
        for _, interval, workers in product(range(o.rounds), plan.intervals, plan.workers):
            rows += asyncio.run(measure_run(plan, folder, workers, interval))
    finally:
        write_json(o.json, rows)
        shutil.rmtree(folder, ignore_errors=True)
    show(rows)


if __name__ == "__main__":
    main()
