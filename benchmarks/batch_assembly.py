"""Measures packing finished groups into a batch, against verl's method and against one memcpy.

    python benchmarks/batch_assembly.py [--quick] [--json FILE]

64 trajectories, 6 thousand tokens on average and 32 thousand at most, with the routing of 48 layers, top-8.
verl's method pads the int32 rows of every trajectory to the longest of the batch and removes the padding
where the trainer packs its micro-batches. It is reimplemented here in its favour: into one tensor, with
nothing sent between processes. async_rl copies each uint8 row once, to its final position.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.codec import Frame
from async_rl.queue import batching
from async_rl.queue.spool import Spool
from async_rl.types import Group
from benchmarks.trajectory_queue import FACTS, Row, in_turns, make_ids, row, show, timed, trajectory

COUNT, GROUP = 64, 8


def lengths(mean: int, longest: int) -> np.ndarray:
    """Draws log-normal lengths with that mean, the longest among them."""
    drawn = np.sort(np.random.default_rng(0).lognormal(0, 0.8, COUNT))
    drawn[:-1] *= (mean * COUNT - longest) / drawn[:-1].sum()
    drawn[-1] = longest
    return np.random.default_rng(1).permutation(drawn.clip(16, longest).astype(int))


def groups_of(sizes: np.ndarray) -> list[Group]:
    """Builds finished groups in which each trajectory has its own arrays."""
    ids = make_ids(int(sizes.max()))
    trajectories = [trajectory(int(n), f"{i:032x}", ids.copy()) for i, n in enumerate(sizes)]
    return [
        Group(group_id=f"g{i}", task_id="task", trajectories=tuple(trajectories[i : i + GROUP]))
        for i in range(0, COUNT, GROUP)
    ]


def padded_and_unpadded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Packs `[T-1, L, K]` rows into `[S, L, K]` through `[B, T_max, L, K]`, as verl does; returns bytes."""
    longest = max(len(r) for r in rows)
    padded = torch.zeros(len(rows), longest, *rows[0].shape[1:], dtype=torch.int32)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, own in enumerate(rows):
        padded[i, : len(own)] = own
        mask[i, : len(own)] = True
    packed = padded[mask]
    return packed, padded.nbytes + packed.nbytes


def measure(mean: int, longest: int, repetitions: int, folder: Path) -> list[Row]:
    """Times async_rl, a memcpy of the same bytes and verl's method alternately, then their memory."""
    groups = groups_of(lengths(mean, longest))
    wide = [torch.from_numpy(t.trace.rows.astype(np.int32)) for g in groups for t in g.trajectories]
    slab = batching.plan_batch(groups, 0, "batch", FACTS)
    batching.fill_batch(slab, groups)  # from here on its pages are warm
    packed = sum(array.nbytes for array in arrays_of(slab))
    source, target = np.ones(packed, np.uint8), np.zeros(packed, np.uint8)
    spool = Spool(folder, max_bytes=None)

    def into_a_frame() -> float:
        begin = time.perf_counter()
        planned = batching.plan_batch(groups, 0, "batch", FACTS)
        ref = spool.put_filled_frame(planned, lambda batch: batching.fill_batch(batch, groups))
        seconds = time.perf_counter() - begin
        spool.free_frame(ref)
        return seconds

    times = in_turns(
        repetitions,
        memcpy=timed(lambda: np.copyto(target, source)),
        slab=timed(lambda: batching.fill_batch(slab, groups)),
        fresh=timed(lambda: batching.assemble_batch(groups, 0, "batch", FACTS)),
        frame=into_a_frame,
    )
    theirs = in_turns(max(3, repetitions // 10), verl=timed(lambda: padded_and_unpadded(wide)))["verl"]
    padded, extra = padded_and_unpadded(wide)
    assert slab.routed_experts is not None
    fed = slab.routing_valid
    assert torch.equal(padded, torch.from_numpy(slab.routed_experts[fed].astype(np.int32)))  # the same rows
    del padded
    size = f"{COUNT} x {mean / 1000:.1f}k, {packed / 1e6:.0f} MB"
    return [
        row("into a warm slab", size, times["slab"], "memcpy", times["memcpy"], "<= 2"),
        row("into new memory", size, times["fresh"], "memcpy", times["memcpy"]),
        row("into a frame, summed", size, times["frame"], "memcpy", times["memcpy"]),
        row("verl's way", size, theirs, "into a warm slab", times["slab"], ">= 60"),
        row("verl's way", size, theirs, "into new memory", times["fresh"]),
        memory("memory of a batch (bytes)", size, Frame(slab).nbytes, packed, "<= 1.05"),
        memory("memory of verl's way (bytes)", size, extra, packed),
    ]


def memory(
    what: str, size: str, taken: int, against: int, target: str = "", reference: str = "packed bytes"
) -> Row:
    """Formats bytes, or another amount, for the columns of times."""
    ratio = taken / against
    return Row(
        what=what,
        size=size,
        p50_us=taken,
        p99_us=taken,
        reference=reference,
        reference_us=against,
        ratio=ratio,
        ratio_low=ratio,
        ratio_high=ratio,
        target=target,
    )


def arrays_of(struct: msgspec.Struct) -> list[np.ndarray]:
    """Returns the arrays of a struct."""
    values = (getattr(struct, name) for name in struct.__struct_fields__)
    return [value for value in values if isinstance(value, np.ndarray)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of the lengths, fewer rounds")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="async-rl-benchmark-", dir=shared if shared.is_dir() else None))
    try:
        rows = measure(1500, 8192, 15, folder) if options.quick else measure(6000, 32768, 50, folder)
    finally:
        shutil.rmtree(folder)
    show(rows, "batch assembly")
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))


if __name__ == "__main__":
    main()
