"""Compares the data plane with the physical limit: a group to another process, an admission decision.

    python benchmarks/trajectory_queue.py [--quick] [--json FILE]

Each row alternates with its reference in one run and is shown as their ratio: absolute times are those of
this machine, ratios carry over.
"""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.codec import encode, encoded_size
from async_rl.engine_protocol import EngineFacts
from async_rl.queue.frames import read_columns
from async_rl.queue.spool import Spool
from async_rl.routing import make_trace
from async_rl.staleness import Backlog
from async_rl.types import Context, Group, Outcome, Sampled, Trajectory
from benchmarks.support.tables import Row, argument_parser, in_turns, row, show, timed, write_json

LAYERS, TOP_K, EXPERTS, GROUP = 48, 8, 128, 8
FACTS = EngineFacts(
    num_layers=LAYERS,
    moe_layers=tuple(range(LAYERS)),
    num_experts=EXPERTS,
    top_k=TOP_K,
    vocab_size=1 << 17,
    context_length=1 << 15,
)


def trajectory(tokens: int, name: str, ids: np.ndarray) -> Trajectory:
    """Builds a trajectory, half prompt, half sampled; `ids` is a stock of routing rows to cut from."""
    half = tokens // 2
    read, sampled = np.arange(half, dtype=np.int32), np.arange(tokens - half, dtype=np.int32)
    return Trajectory(
        trajectory_id=name,
        group_id="group",
        task_id="task",
        segments=(
            Context(token_ids=read),
            Sampled(
                token_ids=sampled,
                rollout_log_probs=np.full(tokens - half, -0.5, np.float32),
                weight_version=0,
                engine_id="engine-0",
                finish_reason="stop",
            ),
        ),
        trace=make_trace(
            ids[: tokens - 1],
            EXPERTS,
            0,
            moe_layers=FACTS.moe_layers,
            token_ids=np.concatenate([read, sampled])[:-1],
        ),
        outcome=Outcome(stop_reason="completed", reward=1.0),
    )


def make_ids(tokens: int) -> np.ndarray:
    """Distinct within a row, cheap to make: eight neighbours from a random start."""
    start = np.random.default_rng(0).integers(0, EXPERTS, (tokens, LAYERS, 1))
    return ((start + np.arange(TOP_K)) % EXPERTS).astype(np.uint8)


def group_of(tokens: int, ids: np.ndarray) -> Group:
    """Builds siblings with their own arrays."""
    return Group(
        group_id="group",
        task_id="task",
        trajectories=tuple(trajectory(tokens, f"{i:032x}", ids.copy()) for i in range(GROUP)),
    )


def read_frames(connection: Connection) -> None:
    """Reads the requested frames in the other process and replies when done."""
    while (message := connection.recv()) is not None:
        kind, content = message
        if kind == "frames":
            last = [read_columns(stored) for stored in content][-1]["routed_experts"][-1, -1, -1]
        else:
            last = pickle.loads(content).trajectories[-1].trace.rows[-1, -1, -1]
        connection.send(int(last))


def hand_over(spool: Spool, connection: Connection, lengths: list[int], repetitions: int) -> list[Row]:
    """Passes a group to the other process and waits for its reply."""
    rows = []
    for tokens in lengths:
        group = group_of(tokens, make_ids(tokens))
        size = encoded_size(encode(group))
        source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

        def ours(group: Group = group) -> float:
            begin = time.perf_counter()
            stored = spool.store_tree(group.trajectories)
            connection.send(("frames", stored))
            connection.recv()
            seconds = time.perf_counter() - begin
            spool.discard(stored)
            spool.delete_discarded()
            return seconds

        def pickled(group: Group = group) -> None:
            connection.send(("pickle", pickle.dumps(group, protocol=5)))
            connection.recv()

        times = in_turns(
            max(10, min(repetitions, (1 << 33) // size)),
            memcpy=timed(lambda t=target, s=source: np.copyto(t, s)),
            verified=ours,
        )
        name = f"8 x {tokens // 1024}k, {size / 1e6:.0f} MB"
        rows.append(row("put, read and verify", name, times["verified"], "memcpy", times["memcpy"]))
        slow = in_turns(3, pickle=timed(pickled))["pickle"]
        rows.append(row("pickle through a pipe", name, slow, "put, read and verify", times["verified"]))
    return rows


def decide(repetitions: int) -> list[Row]:
    """Admission and selection with 512 groups outstanding, a third of them in flight."""
    backlog = Backlog(groups_per_batch=128, max_staleness=4, staleness_policy="wait")
    for i in range(512):
        backlog.add_group(f"g{i}", i // 128)
        if i % 3:
            backlog.finish_group(f"g{i}")
    count = 1000

    def per_call(call: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            begin = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - begin) / count

        return run

    times = in_turns(
        repetitions,
        empty=per_call(lambda: None),
        admit=per_call(lambda: backlog.may_admit(lag=1)),
        wait=per_call(lambda: backlog.select_batch(4)),
        select=per_call(lambda: backlog.select_batch(0)),
    )
    assert backlog.select_batch(4) is None
    assert len(backlog.select_batch(0) or ()) == 128
    return [
        row("admission decision", "512 groups", times["admit"], "empty call", times["empty"], "<= 0.2 us"),
        row("decision to wait", "512 groups", times["wait"], "empty call", times["empty"], "<= 5 us"),
        row("decision, B = 128", "512 groups", times["select"], "empty call", times["empty"]),
    ]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller, about 15 s")
    options = parser.parse_args()
    repetitions = 20 if options.quick else 100
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="async-rl-benchmark-", dir=shared))
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=read_frames, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process raises an EOFError here
    try:
        spool = Spool(folder, max_bytes=None)
        rows = hand_over(spool, ours, [2048, 8192] if options.quick else [2048, 8192, 32768], repetitions)
        rows += decide(repetitions)
    finally:
        ours.send(None)
        process.join()
        shutil.rmtree(folder)
    show(rows, "trajectory queue")
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
