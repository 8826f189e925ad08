"""Measures giving an engine new weights, by transport, against copying the same bytes.

    python benchmarks/weight_sync.py [--quick] [--json FILE]

A real SGLang server on the CPU gets the weights of a random Qwen3-MoE again and again, by each transport
alternately, as `WeightSync` does it: into an engine that runs nothing, prefix cache flushed, version read
back. The sender is `trainer.weights.weight_export`, from whole tensors in memory: gathering and renaming are
the trainer's, and every transport has them.

    publish   the engine goes on generating meanwhile: the files of `disk`
    stall     the engine generates nothing: from the first request of the update to the version read back
    held      most bytes of tensors that the sender has at a time, beside the weights
    memcpy    into memory that has been written before; loopback: one TCP connection between two threads

Columns are medians, with the smallest and the largest; bytes/s are of publish and stall together. `checksum`
is what `weights.verify=checksum` adds: the engine's sums over its weights, and the trainer's over its own.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.engine_protocol import DiskUpdate, DistributedUpdate, GroupInvite, TensorUpdate
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.server import free_port
from async_rl.weights.relay import BucketRelay
from benchmarks.real_parts import serving
from benchmarks.support.tables import argument_parser, write_json
from tests.support.live_bytes import LiveBytes
from tests.support.sglang_world import in_trainer_order
from tests.support.tiny_model import build_tiny_qwen3_moe, write_byte_tokenizer
from trainer.weights.weight_export import WeightExport

GROUP = "benchmark"


class Size(NamedTuple):
    """Sizes of the model and the measurement."""

    hidden: int
    layers: int
    rounds: int
    bucket_bytes: int


FULL = Size(hidden=512, layers=4, rounds=7, bucket_bytes=64 << 20)
QUICK = Size(hidden=256, layers=2, rounds=3, bucket_bytes=8 << 20)


class Times(NamedTuple):
    """Times of one update, seconds."""

    publish: float
    stall: float

    @property
    def total(self) -> float:
        """Brings the trainer's weights to the engine by one transport."""
        return self.publish + self.stall


class Sender:
    """The trainer's side of all transports."""

    def __init__(self, model: Path, engine: SGLangEngine, size: Size, scratch: Path) -> None:
        self.tensors = in_trainer_order(load_file(model / "model.safetensors"))
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self._model, self._engine, self._size, self._scratch = model, engine, size, scratch
        self._version = 0
        self._export = WeightExport(
            lambda: iter(self.tensors.items()),
            0,
            torch.device("cpu"),
            check=lambda specs: None,
            group_timeout_s=300.0,
        )
        self._plan = self._export.plan_buckets(size.bucket_bytes)

    async def join(self) -> None:
        """Joins the process group of `distributed`, which exists as long as the engine."""
        invite = GroupInvite(
            group_name=GROUP,
            backend="gloo",
            host="127.0.0.1",
            port=free_port("127.0.0.1"),
            world_size=2,
            rank_offset=1,
        )
        await asyncio.gather(
            asyncio.to_thread(self._export.open_group, invite), self._engine.join_weight_group(invite)
        )

    async def disk(self) -> Times:
        """Updates through files, written while the engine continues; older files are removed."""
        folder = self._scratch / f"version_{self._version + 1}"
        begin = time.perf_counter()
        await asyncio.to_thread(self._write, folder)
        published = time.perf_counter()
        await self._update(lambda version: DiskUpdate(weight_version=version, path=str(folder)))
        stalled = time.perf_counter() - published
        shutil.rmtree(folder)
        return Times(published - begin, stalled)

    def _write(self, folder: Path) -> None:
        folder.mkdir()
        # The trainer writes from memory of its own as well.
        copied = {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.items()}
        save_file(copied, folder / "model.safetensors", metadata={"format": "pt"})
        shutil.copyfile(self._model / "config.json", folder / "config.json")

    async def distributed(self) -> Times:
        """Updates by broadcasts into the group."""
        begin = time.perf_counter()
        await asyncio.gather(
            asyncio.to_thread(self._export.send_weights, [GROUP], self._size.bucket_bytes),
            self._update(
                lambda version: DistributedUpdate(
                    weight_version=version, group_name=GROUP, buckets=self._plan
                )
            ),
        )
        return Times(0.0, time.perf_counter() - begin)

    async def tensor(self) -> Times:
        """Updates through shared memory: the next bucket is filled while one is loaded."""

        async def fill(number: int) -> list[bytes]:
            return await asyncio.to_thread(self._export.share_bucket, number, self._size.bucket_bytes, 1)

        relay = BucketRelay(["engine"], len(self._plan), fill)
        begin = time.perf_counter()
        await asyncio.gather(
            relay.fetch_buckets(),
            self._update(
                lambda version: TensorUpdate(
                    weight_version=version,
                    num_buckets=len(self._plan),
                    buckets=lambda: relay.buckets("engine"),
                )
            ),
        )
        return Times(0.0, time.perf_counter() - begin)

    async def _update(self, make: Callable[[int], Any]) -> None:
        self._version += 1
        await self._engine.update_weights(make(self._version), flush=True)

    def held(self, transport: str) -> int:
        """Returns the bytes that sending needs in addition to the weights, measured without an engine."""
        with LiveBytes() as live:
            if transport == "disk":
                folder = self._scratch / "held"
                self._write(folder)
                shutil.rmtree(folder)
            elif transport == "distributed":
                self._export.send_weights([], self._size.bucket_bytes)
            else:
                self._export.close()
                for number in range(len(self._plan)):
                    self._export.share_bucket(number, self._size.bucket_bytes, 1)
        return live.peak

    async def same(self) -> bool:
        """Checks that the engine has the sent weights."""
        return await self._engine.checksums() == (self._export.checksums(),)

    async def sums_of_engine(self) -> float:
        """Returns the seconds that the engine's checksums take."""
        begin = time.perf_counter()
        await self._engine.checksums()
        return time.perf_counter() - begin

    def sums_of_trainer(self) -> float:
        """Returns the seconds that the trainer's checksums take."""
        begin = time.perf_counter()
        self._export.checksums()
        return time.perf_counter() - begin

    def close(self) -> None:
        """Leaves the group."""
        self._export.close()


def memcpy_s(num_bytes: int) -> Callable[[], float]:
    """Returns the seconds to copy the same bytes between existing pages."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)

    def copy() -> float:
        begin = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begin

    return copy


def loopback_s(num_bytes: int) -> float:
    """Returns the seconds to send the same bytes through one TCP connection on this host."""
    data = memoryview(bytearray(num_bytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with socket.create_connection(listener.getsockname()) as out:
                out.sendall(data)

        sending = threading.Thread(target=serve)
        into = bytearray(1 << 20)
        begin = time.perf_counter()
        sending.start()
        connection, _ = listener.accept()
        with connection:
            while connection.recv_into(into):
                pass
        sending.join()
        return time.perf_counter() - begin


async def measure(size: Size, scratch: Path) -> list[dict[str, Any]]:
    """Measures all transports alternately; returns rows for the table."""
    model = build_tiny_qwen3_moe(
        scratch / "model",
        vocab_size=300,
        hidden_size=size.hidden,
        num_layers=size.layers,
        num_experts=16,
        expert_size=size.hidden,
    )
    write_byte_tokenizer(model, vocab_size=300)
    times: dict[str, list[Times]] = {"disk": [], "distributed": [], "tensor": []}
    references: dict[str, list[float]] = {"memcpy": [], "loopback": []}
    sums: dict[str, list[float]] = {"checksum, engine": [], "checksum, trainer": []}
    async with serving(model, scratch, dtype="float32") as engine:
        sender = Sender(model, engine, size, scratch)
        copy = memcpy_s(sender.num_bytes)
        await sender.join()
        ways: dict[str, Callable[[], Awaitable[Times]]] = {
            "disk": sender.disk,
            "distributed": sender.distributed,
            "tensor": sender.tensor,
        }
        for number in range(size.rounds + 1):  # the first update allocates buffers and pages
            for name, way in ways.items():
                taken = await way()
                if number:
                    times[name].append(taken)
            if number:
                references["memcpy"].append(copy())
                references["loopback"].append(loopback_s(sender.num_bytes))
                sums["checksum, engine"].append(await sender.sums_of_engine())
                sums["checksum, trainer"].append(sender.sums_of_trainer())
        if not await sender.same():
            raise SystemExit("WRONG: the engine has not what was sent")
        rows = []
        for name, measured in times.items():
            rows.append(
                row(name, [t.total for t in measured], sender.num_bytes)
                | {
                    "publish_s": statistics.median(t.publish for t in measured),
                    "stall_s": statistics.median(t.stall for t in measured),
                    "held_bytes": sender.held(name),
                }
            )
        rows += [row(name, taken, sender.num_bytes) for name, taken in (references | sums).items()]
        await asyncio.gather(asyncio.to_thread(sender.close), engine.leave_weight_group(GROUP))
    memcpy = statistics.median(references["memcpy"])
    return [r | {"times_memcpy": r["seconds"] / memcpy} for r in rows]


def row(name: str, seconds: list[float], num_bytes: int) -> dict[str, Any]:
    """Returns the figures of each kind of row."""
    median = statistics.median(seconds)
    return {
        "name": name,
        "bytes": num_bytes,
        "seconds": median,
        "least_s": min(seconds),
        "most_s": max(seconds),
        "bytes_per_s": num_bytes / median,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Prints the rows as a table."""
    mb = 1e6
    lines = [f"{rows[0]['bytes'] / mb:.0f} MB of weights", ""]
    lines.append(
        f"{'':<20}{'seconds':>22}{'MB/s':>8}{'x memcpy':>10}{'publish s':>11}{'stall s':>9}{'held MB':>9}"
    )
    for r in rows:
        spread = f"{r['seconds']:.3f} ({r['least_s']:.3f}-{r['most_s']:.3f})"
        line = f"{r['name']:<20}{spread:>22}{r['bytes_per_s'] / mb:>8.0f}{r['times_memcpy']:>10.1f}"
        if "stall_s" in r:
            line += f"{r['publish_s']:>11.3f}{r['stall_s']:>9.3f}{r['held_bytes'] / mb:>9.0f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    """Measures and prints."""
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, 3 rounds: under a minute")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        rows = asyncio.run(measure(QUICK if arguments.quick else FULL, Path(scratch)))
    print(table(rows), file=sys.stderr if arguments.json == "-" else sys.stdout)
    write_json(arguments.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
