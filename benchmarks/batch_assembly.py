"""Measures making a batch of stored trajectories and reading a rank's share of it, against one memcpy.

    python benchmarks/batch_assembly.py [--quick] [--json FILE]

64 trajectories, 6 thousand tokens on average and 32 thousand at most, with the routing of 48 layers, top-8.
The driver decides by summaries and verifies each frame; a rank maps the frames of its share and copies each
row once. verl's method pads the int32 rows of every trajectory to the longest of the batch and removes the
padding where the trainer packs its micro-batches. It is reimplemented here in its favour: into one tensor,
with nothing sent between processes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.queue.batching import read_trajectories
from async_rl.queue.packing import Packer, StoredGroup
from async_rl.queue.spool import Spool
from async_rl.types import Group, TakenBatch
from benchmarks.trajectory_queue import FACTS, Row, in_turns, make_ids, row, show, trajectory

COUNT, GROUP = 64, 8
PACKER = Packer(max_staleness=1, staleness_policy="wait", min_group_size=1, facts=FACTS, metrics=None)


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


def stored_batch(spool: Spool, groups: list[Group]) -> tuple[list[StoredGroup], TakenBatch]:
    """Stores groups; returns them and the batch that they make."""
    stored = [
        StoredGroup(group_id=group.group_id, trajectories=spool.store_tree(group.trajectories))
        for group in groups
    ]
    batch = PACKER.pack_groups(0, stored).batch
    assert batch is not None
    return stored, batch


def measure(mean: int, longest: int, repetitions: int, folder: Path) -> list[Row]:
    """Times async_rl, a memcpy of the same bytes and verl's method alternately, then their memory."""
    groups = groups_of(lengths(mean, longest))
    wide = [torch.from_numpy(t.trace.rows.astype(np.int32)) for g in groups for t in g.trajectories]
    spool = Spool(folder, max_bytes=None)
    stored, batch = stored_batch(spool, groups)
    whole = read_trajectories(batch)
    packed = sum(array.nbytes for array in arrays_of(whole))
    source, target = np.ones(packed, np.uint8), np.zeros(packed, np.uint8)
    shares = {ranks: range(0, COUNT, ranks) for ranks in (1, 8)}

    def put() -> float:
        begin = time.process_time()
        written = [spool.store_tree(group.trajectories) for group in groups]
        seconds = time.process_time() - begin
        for group in written:
            spool.discard(group)
        spool.delete_discarded()
        return seconds

    times = in_turns(
        repetitions,
        memcpy=cpu_time(lambda: np.copyto(target, source)),
        put=put,
        decide=cpu_time(lambda: PACKER.pack_groups(0, stored)),
        all=cpu_time(lambda: read_trajectories(batch)),
        share=cpu_time(lambda: read_trajectories(batch, shares[8])),
    )
    theirs = in_turns(max(3, repetitions // 10), verl=cpu_time(lambda: padded_and_unpadded(wide)))["verl"]
    padded, extra = padded_and_unpadded(wide)
    assert whole.routed_experts is not None
    fed = whole.routing_valid
    assert torch.equal(padded, torch.from_numpy(whole.routed_experts[fed].astype(np.int32)))  # the same rows
    del padded
    size = f"{COUNT} x {mean / 1000:.1f}k, {packed / 1e6:.0f} MB"
    read = sum(batch.trajectories[index].nbytes for index in shares[8])
    return [
        row("driver: decide", size, times["decide"], "memcpy", times["memcpy"], "<= 0.1"),
        row("node: encode and write", size, times["put"], "memcpy", times["memcpy"]),
        row("one rank reads all", size, times["all"], "memcpy", times["memcpy"]),
        row("one of 8 ranks reads its share", size, times["share"], "memcpy", times["memcpy"]),
        row("verl's way", size, theirs, "one rank reads all", times["all"]),
        memory("frames (bytes)", size, batch.nbytes, packed, "<= 1.05", "packed bytes"),
        memory("frames that one of 8 ranks maps (bytes)", size, read, packed, "<= 0.15"),
        memory("references in the driver (bytes)", size, len(msgspec.msgpack.encode(batch)), packed),
        memory("memory of verl's way (bytes)", size, extra, packed),
    ]


def cpu_time(work: Callable[[], Any]) -> Callable[[], float]:
    """Returns the CPU seconds of all threads that the work takes."""

    def run() -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    return run


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
