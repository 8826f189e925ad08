"""A sandbox backend in memory, whose time passes on the loop's clock and whose failures tests choose."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import msgspec

from agent_loops.sandboxes.protocol import ExecResult, SandboxRefused
from async_rl.errors import SandboxLost


class Service:
    """Where sandboxes are, as a service that outlives its clients has them."""

    def __init__(self) -> None:
        self.running: dict[str, str] = {}
        """The images of those that run, by name."""
        self.snapshots: set[str] = set()
        self.started: list[str] = []
        """All names that were ever started."""
        self.most = 0
        self.start_s = self.end_s = 1.0
        self.num_failing_starts = self.num_failing_ends = 0
        self.starts_at: list[float] = []


SERVICES: dict[str, Service] = {}


class MemorySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`{kind: "tests.support.memory_sandboxes:MemorySettings", service: NAME}`."""

    service: str

    def open_backend(self, run: str) -> MemoryBackend:
        return MemoryBackend(SERVICES.setdefault(self.service, Service()))


class MemoryBackend:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def __aenter__(self) -> Self:
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.sleep(0)

    async def start(self, name: str, image: str, ttl_s: float) -> None:
        service = self.service
        service.starts_at.append(asyncio.get_running_loop().time())
        service.started.append(name)
        if image == "missing":
            raise SandboxRefused("no such image")
        await asyncio.sleep(service.start_s / 2)
        if service.num_failing_starts:
            service.num_failing_starts -= 1
            raise SandboxLost("no capacity")
        service.running[name] = image
        service.most = max(service.most, len(service.running))
        await asyncio.sleep(service.start_s / 2)

    async def exec(
        self, name: str, command: str, *, timeout_s: float, stdin: bytes, max_output_bytes: int
    ) -> ExecResult:
        await asyncio.sleep(0)
        if name not in self.service.running:
            raise SandboxLost(f"{name} is gone")
        return ExecResult(exit_code=int(command == "false"), stdout=f"{name}: {command}", stderr="")

    async def read_file(self, name: str, path: str) -> bytes:
        raise FileNotFoundError(path)

    async def write_file(self, name: str, path: str, data: bytes) -> None: ...

    async def snapshot(self, name: str, snapshot: str) -> str:
        self.service.snapshots.add(snapshot)
        await asyncio.sleep(1.0)
        return snapshot

    async def end(self, name: str) -> None:
        await asyncio.sleep(self.service.end_s)
        if self.service.num_failing_ends:
            self.service.num_failing_ends -= 1
            raise SandboxLost("no answer")
        self.service.running.pop(name, None)

    async def end_snapshot(self, snapshot: str) -> None:
        self.service.snapshots.discard(snapshot)


def backend(service: str) -> dict[str, Any]:
    """The setting of a service with a new state."""
    SERVICES[service] = Service()
    return {"kind": f"{__name__}:MemorySettings", "service": service}
