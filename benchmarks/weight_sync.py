"""Measures giving an engine new weights, by transport, against copying the same bytes.

    python benchmarks/weight_sync.py [--publish | --scaling] [--quick] [--json FILE]

A real SGLang server on the CPU gets the weights of a random Qwen3-MoE again and again, by each transport
alternately, as `WeightSync` does it: into an engine that runs nothing, prefix cache flushed, version read
back. The sender is `trainer.weights.weight_export`, from whole tensors in memory: gathering and renaming are
the trainer's, and every transport has them.

    publish   the engine keeps generating meanwhile: the files of `disk`
    stall     the engine generates nothing: from the first request of the update to the version read back
    held      most bytes of tensors that the sender has at a time, beside the weights
    memcpy    into memory that has been written before; loopback: one TCP connection between two threads

Columns are medians, with the smallest and the largest; bytes/s are of publish and stall together. `checksum`
is what `weights.verify=checksum` adds: the engine's sums over its weights, and the trainer's over its own.

`--publish` measures the real trainer on 1, 2 and 4 data-parallel ranks instead: a version that all owners
write, synced and renamed, against the same bytes, which as many processes write into one file each and sync.

`--scaling` measures how broadcasts grow with engines and senders. The driver's own update sends to processes
that receive as SGLang does, one bucket after the other, over links of a few MB/s.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.engine_protocol import DiskUpdate, DistributedUpdate, GroupInvite, TensorUpdate, group_of
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.server import free_port
from async_rl.planning.update_costs import broadcast_s
from async_rl.runtime.files import sync
from async_rl.weights.buckets import spec_of
from async_rl.weights.relay import BucketRelay
from benchmarks.logits_memory import PeakBytes
from benchmarks.real_parts import serving
from benchmarks.support.tables import Row, argument_parser, report, timed
from tests.support.ranks import run_ranks
from tests.support.receiving_world import Ranks, even_tensors, receiving_world
from tests.support.sglang_world import in_trainer_order
from tests.support.tiny_model import build_tiny_qwen3_moe, write_byte_tokenizer
from tests.support.trainers import started, trainer_config
from tests.support.weight_receiver import open_sockets
from trainer.megatron.weight_owners import assign_owners
from trainer.weights.weight_export import WeightExport

GROUP = "benchmark"


PACED_BYTES_PER_S = 8e6
"""What a process may send with `--scaling`: the cores are half idle then."""

PACED_BUCKET_BYTES = 1 << 18


class Times(NamedTuple):
    """Times of one update, seconds."""

    publish: float
    stall: float


class Sender:
    """The trainer's side of all transports."""

    def __init__(self, model: Path, engine: SGLangEngine, bucket_bytes: int, scratch: Path) -> None:
        self.tensors = in_trainer_order(load_file(model / "model.safetensors"))
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self._model, self._engine, self._scratch = model, engine, scratch
        self._bucket_bytes = bucket_bytes
        self._version = 0
        self._export = WeightExport(
            *[lambda: iter(self.tensors.items())] * 3,
            0,
            torch.device("cpu"),
            owners=lambda: assign_owners([(0, [spec_of(*each) for each in self.tensors.items()])], (0,)),
            group_timeout_s=300.0,
        )
        self._plan = self._export.plan_buckets(bucket_bytes)

    async def join(self) -> None:
        """Join the process group of `distributed`, which exists as long as the engine."""
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

    async def _update(
        self, kind: Callable[..., Any], beside: Awaitable[object] | None = None, **fields: Any
    ) -> Times:
        self._version += 1
        begin = time.perf_counter()
        update = self._engine.update_weights(kind(weight_version=self._version, **fields), flush=True)
        await asyncio.gather(update, *([] if beside is None else [beside]))
        return Times(0.0, time.perf_counter() - begin)

    async def disk(self) -> Times:
        """Updates through files, written while the engine continues; older files are removed."""
        folder = self._scratch / f"version_{self._version + 1}"
        begin = time.perf_counter()
        await asyncio.to_thread(self._write, folder)
        publish_s = time.perf_counter() - begin
        times = await self._update(DiskUpdate, path=str(folder))
        shutil.rmtree(folder)
        return Times(publish_s, times.stall)

    def _write(self, folder: Path) -> None:
        folder.mkdir()
        # The trainer writes from memory of its own as well.
        copied = {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.items()}
        save_file(copied, folder / "model.safetensors", metadata={"format": "pt"})
        shutil.copyfile(self._model / "config.json", folder / "config.json")

    async def distributed(self) -> Times:
        """Updates by broadcasts into the group."""
        sent = asyncio.to_thread(self._export.send_weights, [GROUP], self._bucket_bytes)
        return await self._update(DistributedUpdate, sent, group_name=GROUP, buckets=self._plan)

    async def tensor(self) -> Times:
        """Updates through shared memory: the next bucket is filled while one is loaded."""

        async def fill(number: int) -> list[bytes]:
            return await asyncio.to_thread(self._export.share_bucket, number, self._bucket_bytes, [0])

        async def find_dead(readers: Sequence[str]) -> Sequence[str]:
            return ()

        relay = BucketRelay(["engine"], len(self._plan), fill, find_dead)
        buckets = partial(relay.buckets, "engine")
        return await self._update(
            TensorUpdate, relay.fetch_buckets(), num_buckets=len(self._plan), buckets=buckets
        )

    def held(self, transport: str) -> int:
        """Return the bytes that sending needs in addition to the weights, measured without an engine."""
        with PeakBytes() as live:
            if transport == "disk":
                folder = self._scratch / "held"
                self._write(folder)
                shutil.rmtree(folder)
            elif transport == "distributed":
                self._export.send_weights([], self._bucket_bytes)
            else:
                self._export.close()
                for number in range(len(self._plan)):
                    self._export.share_bucket(number, self._bucket_bytes, [0])
        return live.peak

    def checksums(self) -> dict[str, str]:
        """Return the trainer's sums of its weights."""
        return self._export.checksums()

    def close(self) -> None:
        """Leave the group."""
        self._export.close()


def loopback(num_bytes: int) -> None:
    """Sends the same bytes through one TCP connection on this host."""
    data = memoryview(bytearray(num_bytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with socket.create_connection(listener.getsockname()) as out:
                out.sendall(data)

        sending = threading.Thread(target=serve)
        into = bytearray(1 << 20)
        sending.start()
        connection, _ = listener.accept()
        with connection:
            while connection.recv_into(into):
                pass
        sending.join()


async def measure(hidden: int, layers: int, rounds: int, bucket_bytes: int, scratch: Path) -> list[Row]:
    """Measure all transports alternately; return rows for the table."""
    model = build_tiny_qwen3_moe(
        scratch / "model",
        vocab_size=300,
        hidden_size=hidden,
        num_layers=layers,
        num_experts=16,
        expert_size=hidden,
    )
    write_byte_tokenizer(model, vocab_size=300)
    async with serving(model, scratch, dtype="float32") as engine:
        sender = Sender(model, engine, bucket_bytes, scratch)
        await sender.join()
        source, target = (fill(sender.num_bytes, dtype=torch.uint8) for fill in (torch.ones, torch.zeros))

        async def local(work: Callable[[], object]) -> Times:
            return Times(0.0, timed(work)())

        async def sums_of_engine() -> Times:
            begin = time.perf_counter()
            await engine.checksums()
            return Times(0.0, time.perf_counter() - begin)

        ways: dict[str, Callable[[], Awaitable[Times]]] = {
            "disk": sender.disk,
            "distributed": sender.distributed,
            "tensor": sender.tensor,
            "memcpy": lambda: local(lambda: target.copy_(source)),
            "loopback": lambda: local(lambda: loopback(sender.num_bytes)),
            "checksum, engine": sums_of_engine,
            "checksum, trainer": lambda: local(sender.checksums),
        }
        times: dict[str, list[Times]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, way in ways.items():
                times[name].append(await way())
        if await engine.checksums() != (sender.checksums(),):
            raise SystemExit("WRONG: the engine has not what was sent")
        rows = []
        for name, (_, *taken) in times.items():  # the first update allocates buffers and pages
            totals = [t.publish + t.stall for t in taken]
            rows.append(
                {
                    "what": name,
                    "seconds": [statistics.median(totals), min(totals), max(totals)],
                    "x memcpy": statistics.median(totals)
                    / statistics.median(t.stall for t in times["memcpy"][1:]),
                }
            )
            if name in ("disk", "distributed", "tensor"):
                rows[-1] |= {
                    "publish_s": statistics.median(t.publish for t in taken),
                    "stall_s": statistics.median(t.stall for t in taken),
                    "held_MB": sender.held(name) / 1e6,
                }
        await asyncio.gather(asyncio.to_thread(sender.close), engine.leave_weight_group(group_of(GROUP, 0)))
    return rows


class Published(NamedTuple):
    """What one rank has measured: bytes that it owns, and seconds of each round."""

    num_bytes: int
    publish_s: list[float]
    plain_s: list[float]


def publish_on_rank(rank: int, folder: Path, model: Path, ranks: int, rounds: int) -> Published:
    """Publish a version again and again on one of several ranks, and write its bytes plainly."""
    config = trainer_config(model, replay=False, num_ranks=ranks)
    meeting = folder / f"meeting of {ranks}" if ranks > 1 else None
    found = Published(0, [], [])
    with started(config, rank=rank, meeting=meeting) as worker:
        num_bytes = worker.model.bridge.owners(worker.model.chunks).bytes_of(rank)
        data, out, plain = bytes(num_bytes), folder / f"version of {ranks}", folder / f"plain {rank}"

        def write_plainly() -> None:
            plain.write_bytes(data)
            sync(plain)

        ways = (
            (found.publish_s, lambda: worker.publish(str(out), 1)),
            (found.plain_s, write_plainly),
        )
        for _ in range(rounds + 1):
            for times, work in ways:
                dist.barrier()
                times.append(timed(work)())
        return Published(num_bytes, found.publish_s[1:], found.plain_s[1:])


def measure_publishing(hidden: int, layers: int, rounds: int, scratch: Path) -> list[Row]:
    """Measure publishing on 1, 2 and 4 ranks; return rows for the table."""
    sizes = {"hidden_size": hidden, "expert_size": hidden, "num_layers": layers, "num_experts": 16}
    model = build_tiny_qwen3_moe(scratch / "model", vocab_size=300, **sizes)
    rows = []
    for ranks in (1, 2, 4):
        found: list[Published] = run_ranks(publish_on_rank, scratch, model, ranks, rounds, ranks=ranks)
        total = sum(each.num_bytes for each in found)
        publish = [max(times) for times in zip(*(each.publish_s for each in found), strict=True)]
        plain = [max(times) for times in zip(*(each.plain_s for each in found), strict=True)]
        seconds = statistics.median(publish)
        rows.append(
            {
                "what": f"publish, {ranks} ranks",
                "seconds": [seconds, min(publish), max(publish)],
                "GB/s": total / seconds / 1e9,
                "GB/s per rank": total / seconds / 1e9 / ranks,
                "largest share": max(each.num_bytes for each in found) / total,
                "x plain writes": seconds / statistics.median(plain),
            }
        )
    return rows


async def measure_scaling(receivers: int, senders: int, num_buckets: int, scratch: Path) -> Row:
    """Send buckets from some ranks to some engines, each process with a limit to what it sends.

    `limit_seconds` is what the busiest process has sent or received, by the bytes that its sockets count, at
    that rate. In Gloo's tree receivers send, too. `predicted_seconds` is what `async-rl plan` computes for
    links of which only sending is limited.
    """
    ranks = Ranks(senders, PACED_BUCKET_BYTES, even_tensors(PACED_BUCKET_BYTES, num_buckets))
    ranks.bytes_per_s = PACED_BYTES_PER_S
    async with receiving_world(scratch, ranks, [()] * receivers) as world:

        async def moved() -> list[list[int]]:
            sockets = open_sockets()
            of_ranks = [[sum(sockets[each][0] for each in own)] for own in ranks.sockets.values()]
            of_engines = [(await engine.command("moved"))["digest"] for engine in world.engines]
            return [*of_ranks, *map(json.loads, of_engines)]

        digest, before = ranks.change(), await moved()
        begin_s = time.perf_counter()
        await world.sync.update_engines(1)
        seconds = time.perf_counter() - begin_s
        assert {engine.digest for engine in world.engines} == {digest}
        own = [
            [b - a for a, b in zip(*each, strict=True)] for each in zip(before, await moved(), strict=True)
        ]
    limit_s = max(max(each) for each in own) / PACED_BYTES_PER_S
    predicted_s = broadcast_s(
        ceil(num_buckets / senders),
        PACED_BUCKET_BYTES / PACED_BYTES_PER_S,
        0.0,
        receivers=receivers,
        width=senders,
        is_tree=True,
    )
    return {
        "receivers": receivers,
        "senders": senders,
        "model_bytes": num_buckets * PACED_BUCKET_BYTES,
        "bytes_of_rank0": own[0][0],
        "most_bytes_of_a_sender": max(each[0] for each in own[:senders]),
        "seconds": seconds,
        "predicted_seconds": predicted_s,
        "limit_seconds": limit_s,
        "x limit": seconds / limit_s,
    }


def main() -> int:
    """Measure and print."""
    parser = argument_parser(__doc__, quick="a small model, 3 rounds: under a minute")
    parser.add_argument("--publish", action="store_true", help="files of 1, 2 and 4 ranks, no transports")
    parser.add_argument(
        "--scaling", action="store_true", help="1, 4, 16 engines and 1, 2, 4 senders, paced; no transports"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    hidden, layers, rounds, bucket_bytes = (256, 2, 3, 8 << 20) if options.quick else (512, 4, 7, 64 << 20)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if options.publish:
            rows = measure_publishing(hidden, layers, rounds, scratch)
        elif options.scaling:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            rows = [
                asyncio.run(measure_scaling(receivers, senders, 16 if options.quick else 64, scratch))
                for receivers in ((1, 4) if options.quick else (1, 4, 16))
                for senders in (1, 2, 4)
            ]
            rate = f"{PACED_BYTES_PER_S / 1e6:.0f} MB/s per process"
            return report(rows, f"broadcasts by Gloo at {rate}", options.json)
        else:
            rows = asyncio.run(measure(hidden, layers, rounds, bucket_bytes, scratch))
    return report(rows, f"weights of a model of {layers} layers, hidden size {hidden}", options.json)


if __name__ == "__main__":
    sys.exit(main())
