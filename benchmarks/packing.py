"""Compares packing and padding: time and memory of a forward and backward pass over the same trajectories.

    python benchmarks/packing.py [--quick] [--json FILE]

    packed    one trajectory after the other, as many as a micro-batch's budget holds, as in the trainer
    padded    the same micro-batches, each trajectory as long as the longest beside it
    sorted    rectangles of similar lengths, the budget counts their padding: the best that padding can do

All use a small Qwen3-MoE on real Megatron-Core, float32 on a CPU, each in its own process, alternately. Times
are CPU times; memory is what the passes add to the peak of their process.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.types import TrainBatch
from benchmarks.support.tables import Row, argument_parser, row, show, write_json
from benchmarks.trainer_step import batch_of, build_model
from tests.support.trainers import started, trainer_config
from trainer.megatron.packing import MicroBatch, Packing, pack_micro_batch, plan_micro_batches

BUDGET = 4096


def packed(lengths: Sequence[int], offsets: np.ndarray) -> list[Packing]:
    """Packs as the trainer does."""
    (plan,) = plan_micro_batches(lengths, BUDGET, ranks=1)
    return [pack_micro_batch(micro_batch, offsets) for micro_batch in plan]


def padded(lengths: Sequence[int], offsets: np.ndarray) -> list[Packing]:
    """Pads the trainer's micro-batches to rectangles."""
    (plan,) = plan_micro_batches(lengths, BUDGET, ranks=1)
    return [rectangle(micro_batch.trajectories, lengths, offsets) for micro_batch in plan]


def padded_by_length(lengths: Sequence[int], offsets: np.ndarray) -> list[Packing]:
    """Pads trajectories of similar lengths, as many as fit with their padding."""
    left = sorted(range(len(lengths)), key=lambda j: -lengths[j])
    rectangles = []
    while left:
        rows = max(1, BUDGET // lengths[left[0]])
        rectangles.append(rectangle(left[:rows], lengths, offsets))
        left = left[rows:]
    return rectangles


def rectangle(members: Sequence[int], lengths: Sequence[int], offsets: np.ndarray) -> Packing:
    """Lays trajectories side by side, padded to the longest."""
    width = max(lengths[j] for j in members)
    source = np.full((len(members), width), -1, np.int64)
    for line, j in zip(source, members, strict=True):
        line[: lengths[j]] = pack_micro_batch(MicroBatch((j,)), offsets).source
    return Packing(source=source.ravel(), lengths=(width,) * len(members))


WAYS = {"packed": packed, "padded": padded, "sorted": padded_by_length}


def serve(way: str, model: str, batch: TrainBatch, connection: Connection) -> None:
    """Runs a pass per request in the other process; replies with seconds, peak bytes and computed tokens."""
    torch.set_num_threads(1)
    lengths = np.diff(batch.offsets).tolist()
    with started(trainer_config(Path(model), replay=False)) as worker:
        packings = WAYS[way](lengths, batch.offsets)
        inputs = [worker.model.place_inputs(packing, batch.token_ids)[0] for packing in packings]

        def loss(index: int, hidden: torch.Tensor) -> tuple[torch.Tensor, int, None]:
            labels = torch.zeros(len(hidden), dtype=torch.int64)
            return worker.model.log_probs(hidden, labels, 1.0)[0].sum(), len(hidden), None

        before = resident()
        connection.send(sum(len(packing.source) for packing in packings))
        while connection.recv():
            begin = time.process_time()
            worker.model.run_schedule(inputs, loss)
            seconds = time.process_time() - begin
            connection.send((seconds, peak() - before))


def resident() -> int:
    """Returns the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """Returns the peak of the resident bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(model: Path, batch: TrainBatch, rounds: int) -> list[Row]:
    """Measures both methods alternately, after a warm-up round."""
    context = multiprocessing.get_context("spawn")
    connections: dict[str, Connection] = {}
    processes = []
    for way in WAYS:
        connections[way], theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(way, str(model), batch, theirs), daemon=True))
        processes[-1].start()
        theirs.close()  # so that the end of the process raises an EOFError here
    tokens = {way: connection.recv() for way, connection in connections.items()}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    grown = dict.fromkeys(WAYS, 0)
    for round_ in range(-1, rounds):
        for way, connection in connections.items():
            connection.send(True)
            took, grown[way] = connection.recv()
            if round_ >= 0:
                seconds[way].append(took)
    for connection, process in zip(connections.values(), processes, strict=True):
        connection.send(False)
        process.join()
    times = {way: np.array(took) for way, took in seconds.items()}
    size = {way: f"{batch.num_trajectories} in {tokens[way]} tokens" for way in WAYS}
    return [
        *(row(way, size[way], times[way], "padded", times["padded"]) for way in WAYS),
        *(memory(f"memory of {way} (bytes)", size[way], grown[way], grown["padded"]) for way in WAYS),
    ]


def memory(what: str, size: str, taken: int, against: int) -> Row:
    """Returns a row of bytes, in the columns of times."""
    ratio = taken / against
    return Row(
        what=what,
        size=size,
        p50_us=taken,
        p99_us=taken,
        reference="padded",
        reference_us=against,
        ratio=ratio,
        ratio_low=ratio,
        ratio_high=ratio,
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller batch, 3 rounds in place of 5")
    options = parser.parse_args()
    batch = batch_of(32, 128, 1024) if options.quick else batch_of(96, 256, 2048)
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(build_model(Path(scratch) / "model"), batch, 3 if options.quick else 5)
    show(rows, "packed against padded")
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
