"""CPU costs of the driver and of rollout workers, as `benchmarks/driver_scale.py` measures them, and the load
that a planned job puts on them.

```
 rows of the benchmark's JSON ─► fit_costs ─► ProcessCosts ─┐
                      a JobPlan (trajectories/s, tokens/s) ─┴► process_load ─► ProcessLoad
```

A process's load is its CPU seconds per second: it cannot exceed 1, and above `MAX_LOAD` calls wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from async_rl.errors import ConfigError
from async_rl.planning.planned_job import FRAME_BYTES, JobPlan
from async_rl.planning.workload import Workload
from async_rl.rollout.workers.worker import TICK_S
from async_rl.types import Float64Array

MEASURED_COSTS: Final = Path(__file__).with_name("measured_costs.json")
"""Rows of the benchmark on two otherwise idle cores (load 0.4 to 1.0); `async-rl plan --costs` reads those of
another machine."""

MAX_LOAD: Final = 0.5
"""Load up to which a process answers without noticeable waits, and recovers from pauses."""

_EVENT_BYTES: Final = 300
"""One event of a stream beside its tokens: JSON of `meta_info`, and HTTP's chunk."""

_TOKEN_BYTES: Final = 40
"""One token in an event: its id twice and a log-prob."""


class CostRow(msgspec.Struct, kw_only=True):
    """Costs of one number of workers at one length of answers, as the benchmark measures them."""

    workers: int
    streams: int
    answer_tokens: int
    tokens_per_event: float
    driver_us_a_token: float
    """The driver's CPU time over all tokens."""
    driver_ms_a_trajectory: float
    """The same CPU time over all trajectories."""
    worker_tokens_per_s: float
    """Per CPU second of a worker; of the driver where there is none."""
    driver_idle: float
    """The driver's CPU seconds a second without tokens, not part of the other figures."""
    seconds: float
    tokens: int
    trajectories: int
    steps: int
    driver_cpu_s: float
    """Excludes what the process takes when it is idle."""
    worker_cpu_s: float
    ray_cpu_s: float = 0.0
    """CPU seconds of Ray's own processes, which `driver_cpu_s` includes."""
    late_share: float
    """Share of the tokens that came late because a server or a reader was behind."""
    heartbeat_us: float = 0.0
    """CPU time that a heartbeat and its answer take the driver."""
    worker_us_an_event: float = 0.0
    """CPU time of a worker for one event of a stream, all of its work together."""
    worker_longest_pause_ms: float = 0.0
    """The longest time for which the event loop of a worker did not come round, other load included."""
    worker_longest_pause_cpu_ms: float = 0.0
    """The most CPU time that it took without coming round."""
    load: float = 0.0
    """The machine's load average at the end."""
    quick: bool = False
    """Whether streams were fewer and measurements shorter."""


class ProcessCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver and a worker cost: a line over the lengths of answers."""

    workers: int
    """Number of workers in the measurement; 0: tokens are received in the driver."""
    tokens_per_event: float
    driver_us_a_token: float
    driver_ms_a_trajectory: float
    driver_idle: float
    worker_us_a_token: float
    """CPU time of a worker; of the driver where there is none. So is the next field."""
    worker_ms_a_trajectory: float
    driver_idle_a_worker: float = 0.0
    """What each worker adds to `driver_idle`: its heartbeats."""


class ProcessLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a job demands of the processes beside its engines and trainer, and of links and disks."""

    workers: int
    """Rollout workers; 0 if the driver receives all tokens itself."""
    driver_load: float
    """CPU seconds per second of the driver with `workers` workers."""
    worker_load: float
    """CPU seconds a second of each worker."""
    network_bytes_per_s: float
    """What the busiest worker receives, or the driver without workers: events and routing rows."""
    frame_nodes: int
    """Nodes that keep frames: with `queue.spool_dir` those of the workers, otherwise that of the run."""
    disk_bytes_per_s: float
    """What each of them writes: frames of finished trajectories."""


def read_costs(path: Path = MEASURED_COSTS) -> list[ProcessCosts]:
    """Read the rows of a benchmark's JSON and fit them, those of all numbers of workers above 0 together.

    Raises:
        ConfigError: The file cannot be read, or has no rows.
    """
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[CostRow])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"--costs {path}: {error}; expected the file of `python benchmarks/driver_scale.py --json`"
        ) from error
    if not rows:
        raise ConfigError(f"--costs {path}: no rows; expected those of `benchmarks/driver_scale.py --json`")
    return fit_costs([msgspec.structs.replace(row, workers=min(row.workers, 1)) for row in rows])


def fit_costs(rows: Sequence[CostRow]) -> list[ProcessCosts]:
    """Fit CPU times by tokens and trajectories, for each number of workers and size of events.

    Least squares of the CPU time of a trajectory over its mean number of tokens, weighted by the number of
    trajectories; a negative coefficient is set to 0. A worker's time, with answers of one length only, is all
    counted by tokens.
    """
    found = []
    for workers, interval in sorted({(row.workers, round(row.tokens_per_event)) for row in rows}):
        run = [r for r in rows if (r.workers, round(r.tokens_per_event)) == (workers, interval)]
        events = np.array([[r.tokens, r.trajectories] for r in run], float)
        cpu_s = np.array([r.driver_cpu_s for r in run])
        line = _fit_line(events, cpu_s)
        worker_s = np.array([r.tokens / r.worker_tokens_per_s if r.worker_tokens_per_s else 0.0 for r in run])
        worker_line = _fit_line(events, worker_s)
        if len({r.answer_tokens for r in run}) == 1:
            worker_line = np.array([worker_s.sum() / max(1.0, events[:, 0].sum()), 0.0])
        found.append(
            ProcessCosts(
                workers=workers,
                tokens_per_event=interval,
                driver_us_a_token=1e6 * float(line[0]),
                driver_ms_a_trajectory=1e3 * float(line[1]),
                driver_idle=float(np.mean([r.driver_idle for r in run])),
                worker_us_a_token=1e6 * float(worker_line[0]),
                worker_ms_a_trajectory=1e3 * float(worker_line[1]),
                driver_idle_a_worker=1e-6 * float(np.mean([r.heartbeat_us for r in run])) / TICK_S,
            )
        )
    return found


def _fit_line(events: Float64Array, cpu_s: Float64Array) -> Float64Array:
    """Return seconds per token and per trajectory; `events` has the numbers of both in each row."""
    weights = 1 / np.sqrt(np.maximum(events[:, 1], 1.0))
    line = np.asarray(np.linalg.lstsq(events * weights[:, None], cpu_s * weights, rcond=None)[0], np.float64)
    if line.min() < 0:  # the other one alone then fits best
        kept = int(line.argmax())
        alone = events[:, kept] * weights
        line = np.zeros(2)
        line[kept] = alone @ (cpu_s * weights) / (alone @ alone)
    return line


def process_load(
    plan: JobPlan,
    workload: Workload,
    costs: Sequence[ProcessCosts],
    workers: int,
    *,
    frame_nodes: int = 1,
) -> ProcessLoad:
    """Compute what a planned job demands.

    Args:
        plan: Its rates, as engines and trainer alone allow them.
        workload: Its lengths.
        costs: Measured costs; the largest events are assumed.
        workers: The number of rollout workers: that of the config, or as `workers_needed` says.
        frame_nodes: The number of nodes that keep frames of finished trajectories.
    """
    tokens_per_s, finished_per_s = plan.tokens_per_s, plan.trajectories_per_s
    chosen = choose_costs(costs, with_workers=bool(workers)) or choose_costs(costs, with_workers=not workers)
    assert chosen is not None, "costs have at least one row"
    event_bytes = _EVENT_BYTES / max(1.0, chosen.tokens_per_event) + _TOKEN_BYTES
    wire_bytes = event_bytes + workload.routing_row_bytes * 4 / 3
    stored = (FRAME_BYTES + workload.routing_row_bytes) * workload.trajectory_tokens
    return ProcessLoad(
        workers=workers,
        driver_load=driver_load(chosen, tokens_per_s, finished_per_s, workers),
        worker_load=worker_load(chosen, tokens_per_s, finished_per_s, workers),
        network_bytes_per_s=wire_bytes * tokens_per_s / max(1, workers),
        frame_nodes=frame_nodes,
        disk_bytes_per_s=stored * finished_per_s / frame_nodes,
    )


def choose_costs(costs: Sequence[ProcessCosts], *, with_workers: bool) -> ProcessCosts | None:
    """Return the costs with the largest events, and of those the most workers, if there are any."""
    fitting = [cost for cost in costs if bool(cost.workers) is with_workers]
    return max(fitting, key=lambda cost: (cost.tokens_per_event, cost.workers), default=None)


def driver_load(
    costs: ProcessCosts, tokens_per_s: float, trajectories_per_s: float, workers: int = 0
) -> float:
    """Return the CPU seconds a second that the driver takes."""
    by_tokens = 1e-6 * costs.driver_us_a_token * tokens_per_s
    idle = costs.driver_idle + costs.driver_idle_a_worker * workers
    return idle + by_tokens + 1e-3 * costs.driver_ms_a_trajectory * trajectories_per_s


def worker_load(costs: ProcessCosts, tokens_per_s: float, trajectories_per_s: float, workers: int) -> float:
    """Return the CPU seconds per second that each worker takes; 0 without workers."""
    by_tokens = 1e-6 * costs.worker_us_a_token * tokens_per_s
    by_trajectories = 1e-3 * costs.worker_ms_a_trajectory * trajectories_per_s
    return (by_tokens + by_trajectories) / workers if workers else 0.0
