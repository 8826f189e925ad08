"""Compares the data plane with the physical limit: a group to another process, an admission decision.

    python benchmarks/trajectory_queue.py [--quick] [--json FILE]

Each row alternates with its reference in one run and is shown as their ratio: absolute times are those of
this machine, ratios carry over.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from timeit import timeit

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.codec import encode, encoded_size
from async_rl.engine_protocol import EngineFacts
from async_rl.routing import make_trace
from async_rl.staleness import Backlog
from async_rl.store.frames import read_columns
from async_rl.store.spool import Spool
from async_rl.types import Context, Group, Outcome, Sampled, Trajectory
from benchmarks.support.tables import Row, argument_parser, in_turns, other_process, report, row, timed
from tests.support.payload_server import make_ids

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
    """Build a trajectory, half prompt, half sampled; `ids` is a stock of routing rows to cut from."""
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


def group_of(tokens: int, ids: np.ndarray) -> Group:
    """Build siblings with their own arrays."""
    return Group(
        group_id="group",
        trajectories=tuple(trajectory(tokens, f"{i:032x}", ids.copy()) for i in range(GROUP)),
    )


def read_frames(connection: Connection) -> None:
    """Read the requested frames in the other process and reply when done."""
    while True:
        kind, content = connection.recv()
        if kind == "frames":
            last = [read_columns(stored) for stored in content][-1]["routed_experts"][-1, -1, -1]
        else:
            last = pickle.loads(content).trajectories[-1].trace.rows[-1, -1, -1]
        connection.send(int(last))


def hand_over(spool: Spool, connection: Connection, lengths: list[int], repetitions: int) -> list[Row]:
    """Passes a group to the other process and waits for its reply."""
    rows = []
    for tokens in lengths:
        group = group_of(tokens, make_ids(tokens, LAYERS, TOP_K, EXPERTS).astype(np.uint8))
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

        copy = timed(lambda t=target, s=source: np.copyto(t, s))
        times = in_turns(max(10, min(repetitions, (1 << 33) // size)), {"memcpy": copy, "ours": ours}, 2)
        name = f"8 x {tokens // 1024}k, {size / 1e6:.0f} MB"
        rows.append(row("put, read and verify", name, times["ours"], "memcpy", times["memcpy"]))
        slow = in_turns(3, {"pickle": timed(pickled)}, 2)["pickle"]
        rows.append(row("pickle through a pipe", name, slow, "put, read and verify", times["ours"]))
    return rows


def decide(repetitions: int) -> list[Row]:
    """Admission with 512 groups outstanding, a third of them in flight."""
    backlog = Backlog(groups_per_batch=128, max_staleness=4, staleness_policy="wait")
    for i in range(512):
        backlog.add_group(f"g{i}", i // 128)
        if i % 3:
            backlog.finish_group(f"g{i}")
    calls = {"empty call": lambda: None, "admission": backlog.may_admit}
    per_call = {name: partial(timeit, call, number=1000) for name, call in calls.items()}
    times = {name: found / 1000 for name, found in in_turns(repetitions, per_call, 2).items()}
    return [row("admission decision", "512 groups", times["admission"], "empty call", times["empty call"])]


def main() -> None:
    options = argument_parser(__doc__, quick="fewer and smaller, about 15 s").parse_args()
    repetitions = 20 if options.quick else 100
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="async-rl-benchmark-", dir=shared) as folder:
        spool = Spool(Path(folder), max_bytes=None)
        with other_process(read_frames) as reader:
            lengths = [2048, 8192] if options.quick else [2048, 8192, 32768]
            rows = hand_over(spool, reader, lengths, repetitions)
    report(rows + decide(repetitions), "trajectory queue", options.json)


if __name__ == "__main__":
    main()
