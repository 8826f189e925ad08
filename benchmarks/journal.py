"""Measures what the journal costs a run, and how long a killed run takes to resume.

python benchmarks/journal.py [--quick] [--json FILE]

The measured loop is the real one (orchestrator, manager, sessions, queue, ledger) on simulated engines.
Without the journal, groups in flight are not written at all, finished siblings included. Runs with and
without it alternate in one process; a ratio is of two neighbouring runs. CPU time is that of all threads;
other load on the machine affects only the wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from async_rl.config import Config, SimulatedEngines, parse_config
from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import Engine, EngineFacts
from async_rl.engines.simulated import SimulatedEngine
from async_rl.errors import EngineError
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import FIGURES
from async_rl.queue.batching import read_trajectories
from async_rl.queue.journal import Journal
from async_rl.queue.journal_folders import JournalFolders, read_trees
from async_rl.queue.spool import no_other_nodes
from async_rl.rollout.session.tokens import GrowingArray
from async_rl.run.orchestrator import Cluster, Orchestrator, RunInputs
from async_rl.runtime.short_pauses import short_pauses
from async_rl.trainer_protocol import Saved, StepResult, Trainer, TrainerState
from async_rl.types import (
    Context,
    Float32Array,
    Int32Array,
    Sampled,
    SamplingSettings,
    TakenBatch,
    Task,
    VersionSpan,
)
from verification.simulation.users import SimulatedChat

FACTS = EngineFacts(
    num_layers=4, moe_layers=(0, 1, 2, 3), num_experts=16, top_k=2, vocab_size=512, context_length=4096
)
TASKS = tuple(
    Task(task_id=f"t{i}", messages=[{"role": "user", "content": " ".join(["7"] * 60)}], answer="8")
    for i in range(64)
)


class Row(msgspec.Struct, kw_only=True):
    """One line of the table."""

    what: str
    measured: str
    reference: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    target: str = ""


class Reader:
    """A trainer that reads its batch and learns nothing."""

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """Implements `Trainer.setup`."""
        return TrainerState(step=0)

    async def read_batch(self, taken: TakenBatch) -> dict[str, str]:
        """Implements `Trainer.read_batch`."""
        self._batch = read_trajectories(taken)
        return {}

    async def train_step(self, taken: TakenBatch, step: int) -> StepResult:
        """Implements `Trainer.train_step`."""
        batch = self._batch
        counts = {"tokens": batch.num_tokens, "trained_tokens": int(batch.loss_mask.sum())}
        rows = {"routing_rows": 0.0, "routing_rows_invalid": 0.0, "step_s": 0.0}
        return StepResult(step=step, metrics=dict.fromkeys(FIGURES, 0.0) | counts | rows)

    async def publish(self, directory: str, weight_version: int) -> None:
        """Implements `Trainer.publish`."""
        await asyncio.to_thread(Path(directory).mkdir, parents=True, exist_ok=True)

    async def checksums(self) -> dict[str, str]:
        """Implements `Trainer.checksums`."""
        return {}

    async def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """Implements `Trainer.save_checkpoint`."""

    async def saved_checkpoint(self, wait: bool) -> Saved:
        """Implements `Trainer.saved_checkpoint`."""
        return Saved()

    async def close(self) -> None:
        """Implements `Trainer.close`."""


class InProcess(Cluster):
    """A cluster whose engines and trainer are in this process."""

    weight_backend = "gloo"
    node = ""
    open_frame_reader = staticmethod(no_other_nodes)

    def __init__(self, config: Config) -> None:
        assert isinstance(config.engine, SimulatedEngines)
        self._engines = [
            SimulatedEngine(f"engine-{i}", config.engine, facts=FACTS)
            for i in range(config.engine.num_engines)
        ]

    async def start_engines(self) -> list[Engine]:
        """Implements `Cluster.start_engines`."""
        return list(self._engines)

    async def start_trainer(self) -> Trainer:
        """Implements `Cluster.start_trainer`."""
        return cast(Trainer, Reader())

    async def restart_engine(self, engine_id: str) -> None:
        """Implements `Cluster.restart_engine`."""
        raise EngineError(f"{engine_id} failed in a benchmark")

    async def watch_engines(self, died: Callable[[str, EngineError], None]) -> None:
        """Implements `Cluster.watch_engines`."""
        await asyncio.Future()

    async def open_port(self) -> tuple[str, int]:
        """Implements `Cluster.open_port`."""
        return "127.0.0.1", 0


class Cost(msgspec.Struct):
    """CPU and wall time of one run."""

    wall_s: float
    cpu_s: float
    tokens: float
    journal_bytes: float


def live(folder: Path, *, journal: bool, steps: int, decode_step_s: float) -> Cost:
    """Runs the loop once."""
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    (run_dir / "checkpoints").mkdir()
    config = parse_config(
        {
            "run": {"max_steps": steps, "drain_s": 0},
            "model": {"path": str(run_dir)},
            "data": {"path": "unused"},
            "engine": {
                "kind": "simulated",
                "num_engines": 2,
                "max_running_requests": 64,
                "decode_step_s": decode_step_s,
                "prefill_tokens_per_s": 1e6,
                "mean_new_tokens": 120,
            },
            "rollout": {
                "group_size": 8,
                "max_concurrent_trajectories": 128,
                "max_staleness": 2,
                "max_new_tokens": 400,
                "max_context_tokens": 512,
            },
            "queue": {"journal_s": 1.0 if journal else None},
            "trainer": {"groups_per_batch": 8, "checkpoint_every": 0},
        }
    )
    ids = iter(range(1 << 40))
    metrics = Metrics()

    async def run() -> None:
        inputs = RunInputs(TASKS, cast(ChatFormat, SimulatedChat()), FACTS, lambda: f"{next(ids):032x}")
        cluster = InProcess(config)
        await Orchestrator(config, run_dir, asyncio.Event(), cluster, metrics, time.monotonic, inputs).run()

    wall_s, cpu_s = time.perf_counter(), time.process_time()
    asyncio.run(run())
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    shutil.rmtree(run_dir)

    def value(name: str) -> float:
        return metrics.registry.get_sample_value(f"async_rl_{name}") or 0.0

    return Cost(wall_s, cpu_s, value("sampled_tokens_total"), value("journal_written_bytes_total"))


def compare(folder: Path, repetitions: int, steps: int) -> list[Row]:
    """Compares the loop at full speed with and without the journal, alternately."""
    live(folder, journal=True, steps=2, decode_step_s=0.0)  # to warm up
    pairs: list[tuple[Cost, Cost]] = []
    for turn in range(repetitions):
        order = (True, False) if turn % 2 else (False, True)
        costs = {journal: live(folder, journal=journal, steps=steps, decode_step_s=0.0) for journal in order}
        pairs.append((costs[True], costs[False]))
    rate = np.array([(a.tokens / a.wall_s) / (b.tokens / b.wall_s) for a, b in pairs])
    cpu = np.array([(a.cpu_s / a.tokens) / (b.cpu_s / b.tokens) for a, b in pairs])
    ours, theirs = (np.median([c.tokens / c.wall_s for c in costs]) for costs in zip(*pairs, strict=True))
    cpu_ours, cpu_theirs = (
        np.median([1e6 * c.cpu_s / c.tokens for c in costs]) for costs in zip(*pairs, strict=True)
    )
    written = np.median([a.journal_bytes / a.tokens for a, _ in pairs])
    per_s = np.median([a.journal_bytes / a.wall_s for a, _ in pairs])
    return [
        row("tokens/s of the loop, 128 in flight", f"{ours:,.0f}", f"none: {theirs:,.0f}", rate, ">= 0.97"),
        row("processor time a token", f"{cpu_ours:.1f} us", f"none: {cpu_theirs:.1f} us", cpu, "<= 1.03"),
        Row(
            what="written",
            measured=f"{written:.1f} B a sampled token, {per_s / 1e6:.2f} MB/s",
            reference="id and log-prob: 8 B",
            ratio=float(written / 8),
        ),
    ]


def pace(folder: Path, repetitions: int, steps: int) -> Row:
    """Measures the load added to one core at the quickstart's pace, about 1,000 tokens/s."""
    shares = []
    for _ in range(repetitions):
        ours, theirs = (
            live(folder, journal=journal, steps=steps, decode_step_s=0.11) for journal in (True, False)
        )
        shares.append(ours.cpu_s / ours.wall_s - theirs.cpu_s / theirs.wall_s)
        tokens_per_s = ours.tokens / ours.wall_s
    return Row(
        what=f"at {tokens_per_s:,.0f} tokens/s, 128 in flight",
        measured=f"{100 * float(np.median(shares)):.2f}% of a core",
        reference="none",
        target="<= 3%",
    )


def resume(folder: Path, counts: list[int], tokens: int, repetitions: int) -> list[Row]:
    """Measures the time from a killed run's folder to restored trajectories."""
    rows = []
    for count in counts:
        directory = folder / f"journal-of-{count}"
        journal = Journal(directory / "000001-driver-1")
        names = [f"{i:032x}" for i in range(count)]
        for name in names:
            entry = journal.open_entry(name)
            entry.segments += [Context(token_ids=np.arange(200, dtype=np.int32)), sampled(tokens)]
        journal.write_entries()
        size = journal.nbytes
        journal.close()
        times = {"ours": np.empty(repetitions), "read": np.empty(repetitions)}
        for turn in range(repetitions):
            (path,) = directory.glob("*/journal-*")
            begin = time.perf_counter()
            path.read_bytes()
            middle = time.perf_counter()
            folders = JournalFolders(directory, incarnation=2, restarts={2: 0})
            known = asyncio.run(folders.restore(names))  # by the driver, at its start
            left = read_trees(path.parent, names)  # by a process that goes on with them
            times["ours"][turn], times["read"][turn] = time.perf_counter() - middle, middle - begin
            assert len(left) == len(known) == count
            assert known[names[0]].num_sampled_tokens == tokens
        rows.append(
            row(
                f"take over {count} trajectories of {tokens} tokens, {size / 1e6:.1f} MB",
                f"{1e3 * np.median(times['ours']):.1f} ms",
                f"read the file: {1e3 * np.median(times['read']):.1f} ms",
                times["ours"] / times["read"],
            )
        )
    return rows


class GrowingCall:
    """A running engine call, as a transcript keeps it."""

    engine_id = "engine-0"
    since_version = 0
    lag_unknown = False
    sampling = SamplingSettings()

    def __init__(self, tokens: int) -> None:
        self._token_ids, self._log_probs = GrowingArray(np.int32), GrowingArray(np.float32)
        self.add_tokens(tokens)

    @property
    def token_ids(self) -> Int32Array:
        """Returns a view of the tokens."""
        return self._token_ids.values

    @property
    def log_probs(self) -> Float32Array:
        """Returns a view of their log-probs."""
        return self._log_probs.values

    def mask(self, start: int, end: int) -> None:
        """Returns no mask: sampling is not truncated."""

    def add_tokens(self, count: int) -> None:
        """Adds what an engine delivers."""
        self._token_ids.extend(np.arange(count))
        self._log_probs.extend(np.full(count, -0.5))
        self.versions = [VersionSpan(start=0, end=len(self._token_ids), weight_version=0)]


async def longest_turn(work: Awaitable[None]) -> np.ndarray:
    """Returns the longest time in which the event loop ran nothing else: by the clock and of the processor.

    In milliseconds. Other load affects the first; the second is without waits for the interpreter lock.
    """
    gap, running = np.zeros(2), True

    async def beat() -> None:
        nonlocal gap
        last = np.array([time.perf_counter(), time.thread_time()])
        while running:
            await asyncio.sleep(0)
            now = np.array([time.perf_counter(), time.thread_time()])
            gap, last = np.maximum(gap, now - last), now

    beating = asyncio.ensure_future(beat())
    await asyncio.sleep(0)
    await work
    running = False
    await beating
    return 1e3 * gap


def block(folder: Path, calls: int, tokens: int, repetitions: int) -> list[Row]:
    """Measures how long the event loop is blocked by ticks and by a compaction."""

    async def measure() -> list[Row]:
        journal = Journal(folder / f"journal-of-{tokens}")
        before = resident_bytes()
        running = []
        for number in range(calls):
            running.append(GrowingCall(tokens - 50 * repetitions))
            journal.open_entry(f"{number:032x}").call = running[-1]
        per_token = (resident_bytes() - before) / sum(len(call.token_ids) for call in running)
        begin = time.perf_counter()
        # All of it is new, and the file is large after that: it is written twice.
        twice = await longest_turn(journal.write_in_thread())
        twice_s = time.perf_counter() - begin
        ticks = []
        for _ in range(repetitions):
            for call in running:
                call.add_tokens(50)
            ticks.append(await longest_turn(journal.write_in_thread()))
        idle = await longest_turn(asyncio.to_thread(time.sleep, twice_s))
        journal.close()
        what = f"{calls:,} calls of {tokens:,} tokens"
        reference = f"nothing written: {idle[0]:.1f} ms, {idle[1]:.1f} ms"
        return [
            Row(what=f"{what}: memory", measured=f"{per_token:.1f} B a token", reference="8 B"),
            *(
                Row(
                    what=f"{what}: longest turn of the event loop, {written}",
                    measured="{:.1f} ms, {:.1f} ms of processor time".format(*times),
                    reference=reference,
                    target="<= 10 ms",
                )
                for written, times in (
                    ("50 tokens of each written", np.median(ticks, axis=0)),
                    ("all written, and compacted", twice),
                )
            ),
        ]

    async def measure_in_a_run() -> list[Row]:
        with short_pauses():  # as every process of a run
            return await measure()

    return asyncio.run(measure_in_a_run())


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sampled(count: int) -> Sampled:
    """Returns the tokens of one call."""
    return Sampled(
        token_ids=np.arange(count, dtype=np.int32),
        rollout_log_probs=np.full(count, -0.5, np.float32),
        weight_version=0,
        engine_id="engine-0",
        finish_reason="abort",
    )


def row(what: str, measured: str, reference: str, ratios: np.ndarray, target: str = "") -> Row:
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return Row(
        what=what,
        measured=measured,
        reference=reference,
        ratio=float(middle),
        ratio_low=float(low),
        ratio_high=float(high),
        target=target,
    )


def show(rows: list[Row]) -> None:
    """Prints the rows as a table."""
    table = Table(title="journal")
    for column in ("", "with it", "reference", "ratio", "quartiles", "target"):
        table.add_column(column, justify="right" if column in ("ratio", "quartiles") else "left")
    for r in rows:
        ratio = "" if r.ratio is None else f"{r.ratio:.3f}"
        quartiles = "" if r.ratio_low is None else f"{r.ratio_low:.3f}-{r.ratio_high:.3f}"
        table.add_row(r.what, r.measured, r.reference, ratio, quartiles, r.target)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller, a little over a minute")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="async-rl-benchmark-"))
    try:
        rows = compare(folder, 3 if options.quick else 15, 6 if options.quick else 12)
        rows.append(pace(folder, 1 if options.quick else 3, 1 if options.quick else 3))
        rows += resume(folder, [256, 2048], 1000, 5 if options.quick else 20)
        rows += block(folder, 8192, 2048 if options.quick else 16384, 5 if options.quick else 10)
    finally:
        shutil.rmtree(folder)
    show(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(msgspec.to_builtins(rows), indent=1))


if __name__ == "__main__":
    main()
