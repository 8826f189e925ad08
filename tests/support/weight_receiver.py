"""A process that receives weights as a rank of SGLang does, without a model, and an engine of such processes.

As a program it reads commands as lines of JSON, and answers each with one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import stat
import struct
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from async_rl.engine_protocol import (
    DistributedUpdate,
    EngineCapacity,
    EngineHealth,
    GroupInvite,
    WeightBucket,
    WeightUpdate,
    group_of,
)
from async_rl.engines.group_liveness import blocking_waits
from async_rl.engines.sglang.abortable_groups import GroupMember, receive
from async_rl.errors import EngineError, WeightsNotReceived, WeightSyncError


class ReceivingEngine:
    """An engine whose only work is to receive weights."""

    def __init__(self, engine_id: str, process: asyncio.subprocess.Process) -> None:
        self.engine_id = engine_id
        self.capacity = EngineCapacity()
        self.process = process
        self.weight_version = 0
        self.digest = ""
        """Of all bytes that it has received last."""
        self._turn = asyncio.Lock()

    @classmethod
    async def start(cls, engine_id: str, *arguments: str) -> ReceivingEngine:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.weight_receiver", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        return cls(engine_id, process)

    async def command(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Give a command and return its answer; one that was cancelled before is answered first."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        async with self._turn:
            try:
                self.process.stdin.write(json.dumps({"command": command} | arguments).encode() + b"\n")
                await self.process.stdin.drain()
                line = await self.process.stdout.readline()
            except ConnectionError as error:
                raise EngineError(f"{self.engine_id}: {error}") from error
        if not line:
            raise EngineError(f"{self.engine_id}: connection reset by peer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def join_weight_group(self, invite: GroupInvite) -> None:
        answer = await self.command(
            "join",
            name=group_of(invite.group_name, invite.sender),
            host=invite.host,
            port=invite.port,
            rank=invite.rank_offset,
            world_size=invite.world_size,
            backend=invite.backend,
        )
        if answer["error"]:
            raise WeightSyncError(f"{self.engine_id}: {answer['error']}")

    async def leave_weight_group(self, group_name: str) -> None:
        await self.command("leave", name=group_name)

    async def update_weights(self, update: WeightUpdate, *, flush: bool) -> None:
        if isinstance(update, DistributedUpdate):
            digest = hashlib.sha256()
            for number, buckets in enumerate(update.rounds()):
                names = [group_of(update.group_name, bucket.sender) for bucket in buckets]
                sizes = [bucket.num_bytes for bucket in buckets]
                answer = await self.command(
                    "receive", names=names, sizes=sizes, number=number, in_parts=update.is_concurrent
                )
                if answer["error"]:
                    raise WeightsNotReceived(f"{self.engine_id}: {answer['error']}")
                digest.update(answer["digest"].encode())
            self.digest = digest.hexdigest()
        self.weight_version = update.weight_version

    async def interrupt(self, mode: str) -> None: ...

    async def resume_generation(self, mode: str) -> None: ...

    async def health(self) -> EngineHealth:
        return EngineHealth(weight_version=self.weight_version, model_path="")

    async def end(self) -> None:
        """End the process, even one that was stopped."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


async def receive_weights(invites: Sequence[GroupInvite], plan: Sequence[WeightBucket]) -> str:
    """Let an engine join groups and receive buckets once; return the digest of what it has."""
    engine = await ReceivingEngine.start("engine-0")
    try:
        for invite in invites:
            await engine.join_weight_group(invite)
        update = DistributedUpdate(weight_version=1, group_name=invites[0].group_name, buckets=tuple(plan))
        await engine.update_weights(update, flush=True)
        return engine.digest
    finally:
        await engine.end()


def digest_of(plan: Sequence[WeightBucket], tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of an engine that has received these tensors."""
    digest = hashlib.sha256()
    for bucket in plan:
        data = b"".join(tensors[spec.name].contiguous().numpy().tobytes() for spec in bucket.tensors)
        digest.update(hashlib.sha256(data).hexdigest().encode())
    return digest.hexdigest()


# -- how much each process sends, and may send


def open_sockets() -> dict[int, tuple[int, int]]:
    """Return the connected TCP sockets of this process by descriptor: the bytes sent and received by each."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
            if each.family == socket.AF_INET and each.type == socket.SOCK_STREAM:
                each.getpeername()
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                found[int(name)] = struct.unpack_from("QQ", info, _BYTES_ACKED)
    return found


def children_of(rank: int, world_size: int) -> int:
    """Return to how many ranks one passes a broadcast on, in Gloo's tree."""
    return sum(rank < 1 << step and rank + (1 << step) < world_size for step in range(world_size))


def pace(sockets: Iterable[int], bytes_per_s: float) -> None:
    """Limit what is sent through each of some sockets."""
    for descriptor in sockets:
        with socket.socket(fileno=os.dup(descriptor)) as each:
            each.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, int(bytes_per_s))


_MAX_PACING_RATE: Final = 47
"""`SO_MAX_PACING_RATE`, which Python's module lacks."""

_BYTES_ACKED: Final = 120
"""Where `struct tcp_info` has `tcpi_bytes_acked`, and then `tcpi_bytes_received`."""


def main(arguments: Sequence[str]) -> None:
    """Answer commands until the input ends.

    Args:
        arguments: The signal that this process sends itself, when (`before`, `during`, `between`) and in
            which bucket; nothing for a healthy one.
    """
    fault, when, at = arguments or ("", "", "-1")
    members: dict[str, tuple[Any, GroupMember]] = {}
    rate, device = 0.0, "cpu"

    def strike() -> None:
        os.kill(os.getpid(), getattr(signal, fault))

    def join(*, name: str, host: str, port: int, rank: int, world_size: int, backend: str) -> None:
        """As `sglang.srt.utils.init_custom_process_group`."""
        nonlocal device
        device = "cuda" if backend == "nccl" else "cpu"
        timeout, before = timedelta(minutes=30), open_sockets()
        store, _, _ = next(dist.rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=timeout))
        with blocking_waits():
            group, _ = c10d._new_process_group_helper(
                world_size,
                rank,
                [],
                c10d.Backend(backend),
                c10d.PrefixStore(name, store),
                group_name=c10d.GroupName(name),
                timeout=timeout,
            )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        members[name] = group, GroupMember(group, rank)
        if rate:
            pace(set(open_sockets()) - set(before), rate)

    def take(*, names: list[str], sizes: list[int], number: int, in_parts: bool) -> str:
        data = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        if number == int(at) and when == "before":
            strike()
        if number == int(at) and when == "during":
            threading.Timer(0.005, strike).start()
        try:
            receive([members[name][1] for name in names], data, in_parts=in_parts)
        except (RuntimeError, WeightSyncError):
            for name in names:
                del members[name]
            raise
        digest = "".join(hashlib.sha256(each.cpu().numpy().tobytes()).hexdigest() for each in data)
        if number == int(at) and when == "between":
            strike()
        return digest

    def leave(*, name: str) -> None:
        group, member = members.pop(name)
        member.leave()
        dist.destroy_process_group(group)

    def limit(*, bytes_per_s: float) -> None:
        nonlocal rate
        rate = bytes_per_s

    def moved() -> str:
        return json.dumps([sum(each) for each in zip(*open_sockets().values(), strict=True)])

    commands = {"join": join, "receive": take, "leave": leave, "limit": limit, "moved": moved}
    for line in sys.stdin:
        given = json.loads(line)
        digest, error = None, ""
        try:
            digest = commands[given.pop("command")](**given)
        except (RuntimeError, WeightSyncError, KeyError) as failure:
            error = str(failure) or repr(failure)
        print(json.dumps({"digest": digest, "error": error}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
