"""Compares packing and padding: time and memory of a forward and backward pass over the same trajectories.

    python benchmarks/packing.py [--quick] [--json FILE]

    packed    one trajectory after the other, as many as a micro-batch's budget holds, as in the trainer
    padded    the same micro-batches, each trajectory as long as the longest beside it
    sorted    rectangles of similar lengths, the budget counts their padding: the best that padding can do

All use a small Qwen3-MoE on real Megatron-Core, float32 on a CPU, each in its own process, alternately. Times
are CPU times; memory is what the passes add to the peak of their process.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.types import TrainBatch
from benchmarks.support.tables import Row, argument_parser, in_turns, other_process, report, row
from benchmarks.trainer_step import batch_of, build_model
from tests.support.trainers import started, trainer_config
from trainer.megatron.packing import Packing, pack_micro_batch, plan_micro_batches

BUDGET = 4096


def packed(lengths: Sequence[int], offsets: np.ndarray) -> list[Packing]:
    """Packs as the trainer does."""
    (plan,) = plan_micro_batches(lengths, BUDGET, ranks=1)
    return [pack_micro_batch(micro_batch, offsets) for micro_batch in plan]


def padded(lengths: Sequence[int], offsets: np.ndarray) -> list[Packing]:
    """Pad the trainer's micro-batches to rectangles."""
    (plan,) = plan_micro_batches(lengths, BUDGET, ranks=1)
    return [rectangle(micro_batch, lengths, offsets) for micro_batch in plan]


def padded_by_length(lengths: Sequence[int], offsets: np.ndarray) -> list[Packing]:
    """Pad trajectories of similar lengths, as many as fit with their padding."""
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
        line[: lengths[j]] = pack_micro_batch((j,), offsets).source
    return Packing(source=source.ravel(), lengths=(width,) * len(members))


WAYS = {"packed": packed, "padded": padded, "sorted": padded_by_length}


def serve(way: str, model: str, batch: TrainBatch, connection: Connection) -> None:
    """Run a pass per request in the other process; reply with seconds, peak bytes and computed tokens."""
    torch.set_num_threads(1)
    lengths = np.diff(batch.offsets).tolist()
    with started(trainer_config(Path(model), replay=False)) as worker:
        packings = WAYS[way](lengths, batch.offsets)
        inputs = [worker.model.place_inputs(packing, batch.token_ids)[0] for packing in packings]

        def loss(index: int, hidden: torch.Tensor) -> tuple[torch.Tensor, int, None]:
            labels = torch.zeros(len(hidden), dtype=torch.int64)
            return worker.model.log_probs(hidden, labels, 1.0)[0].sum(), len(hidden), None

        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        connection.send(sum(len(packing.source) for packing in packings))
        while connection.recv():
            begin = time.process_time()
            worker.model.run_schedule(inputs, loss)
            seconds = time.process_time() - begin
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            connection.send((seconds, peak - resident))


def measure(model: Path, batch: TrainBatch, rounds: int) -> list[Row]:
    """Measure all ways alternately, after a warm-up round."""
    grown: dict[str, int] = {}

    def pass_s(way: str, connection: Connection) -> float:
        connection.send(True)
        seconds, grown[way] = connection.recv()
        return seconds

    with ExitStack() as stack:
        connections = {way: stack.enter_context(other_process(serve, way, str(model), batch)) for way in WAYS}
        tokens = {way: connection.recv() for way, connection in connections.items()}
        passes = {way: partial(pass_s, way, connection) for way, connection in connections.items()}
        times = in_turns(rounds, passes)
    return [
        row(way, f"{batch.num_trajectories} in {tokens[way]:,} tokens", times[way], "padded", times["padded"])
        | {"peak MB": grown[way] / 1e6, "ratio of peaks": grown[way] / grown["padded"]}
        for way in WAYS
    ]


def main() -> None:
    options = argument_parser(__doc__, quick="a smaller batch, 3 rounds in place of 5").parse_args()
    batch = batch_of(32, 128, 1024) if options.quick else batch_of(96, 256, 2048)
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(build_model(Path(scratch) / "model"), batch, 3 if options.quick else 5)
    report(rows, "packed against padded", options.json)


if __name__ == "__main__":
    main()
