"""Sandboxes in containers, by the Docker Engine API on a Unix socket; Podman serves the same API.

A container waits for the end of its time to live and is removed then, so it does not outlive it even if
nobody ends it. It has no network, no capabilities, and limits of memory, processor and processes.

**Source**: https://docs.docker.com/reference/api/engine/ (create, start, exec, archive, build, commit,
remove).
"""

from __future__ import annotations

import asyncio
import io
import math
import os
import secrets
import socket
import tarfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Self
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec
from msgspec import Meta

from agent_loops.sandboxes.http_calls import HttpCalls
from agent_loops.sandboxes.listening import listening_inside
from agent_loops.sandboxes.protocol import (
    GRACE_S,
    MAX_FILE_BYTES,
    ExecResult,
    Output,
    SandboxRefused,
    limited_command,
    ran_too_long,
)
from async_rl.errors import EnvironmentNotReady, SandboxLost

_SNAPSHOTS: Final = "async-rl-snapshot"
"""The repository of the images that are snapshots."""
_IMAGE_S: Final = 1800.0
"""How long an image may take to be pulled or built."""
_END_S: Final = 20.0
"""How long the processes of a container may take to end."""
_FIRST_PROCESS: Final = (
    "read now rest </proc/uptime; end=$((${now%.*} + $1)); "
    "while read now rest </proc/uptime; [ $((left = end - ${now%.*})) -gt 0 ]; do sleep $left & wait $!; done"
)
"""Waits for the end of the time to live, also if its `sleep` is killed. A shell that waits reaps the orphans
of commands, whose parent it becomes."""
_END_PROCESSES: Final = 'case "$(cat /proc/1/cmdline 2>/dev/null)" in *%s*) echo ended; kill -9 -1;; esac'
"""Kills all but the first process and this shell, at once. In a container that shares the processes of its
host, the first one is another, and nothing is killed."""
_MAX_FRAME_BYTES: Final = 1 << 20


class ContainerSettings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="containers", tag_field="kind"
):
    """Where containers run, and with which limits."""

    socket: str = ""
    """The Unix socket; empty takes `DOCKER_HOST`, or the one of Docker or Podman that exists."""
    image: str = ""
    """The image, with `sh`, `sleep` and `timeout`; it is pulled if it is missing."""
    memory_mb: Annotated[int, Meta(ge=16)] = 1024
    cpus: Annotated[float, Meta(gt=0)] = 1.0
    max_processes: Annotated[int, Meta(ge=4)] = 256
    network: bool | str = False
    """Whether programs may reach other machines, and this one; or the name of a network of the engine."""
    user: str = ""
    """`user` or `uid:gid`; empty takes the image's."""
    runtime: str = ""
    """An OCI runtime of the engine, such as gVisor's `runsc`; empty takes its default."""

    def open_backend(self, run: str) -> ContainerBackend:
        """Return what runs the sandboxes; `run` is the name of the run, for a label."""
        return ContainerBackend(self, run)


def _found_socket() -> str:
    host = os.environ.get("DOCKER_HOST", "")
    if host.startswith("unix://"):
        return urlsplit(host).path
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    known = ("/var/run/docker.sock", "/run/podman/podman.sock", f"{runtime}/podman/podman.sock")
    if (found := next(filter(os.path.exists, known), None)) is None:
        raise EnvironmentNotReady(
            f"sandboxes: there is no container engine at {', '.join(known)}: start Docker, or `podman system "
            "service`, or name its Unix socket: backend: {kind: containers, socket: PATH}"
        )
    return found


class ContainerBackend:
    """Runs sandboxes as containers whose names are those of the sandboxes."""

    _calls: HttpCalls

    def __init__(self, settings: ContainerSettings, run: str) -> None:
        """Connect to nothing yet."""
        self._settings = settings
        self._run = run
        self._builds: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Held while an image is built, which several attempts want at once."""

    async def __aenter__(self) -> Self:
        socket = self._settings.socket or _found_socket()
        connector = aiohttp.UnixConnector(path=socket, limit=0)  # an exec holds a connection
        self._calls = HttpCalls(f"the container engine at {socket}", connector, {})
        try:
            await self._calls.request("GET", _url("/_ping"))
        except SandboxLost as error:
            await self._calls.close()
            raise EnvironmentNotReady(f"sandboxes: {error}") from error
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._calls.close()

    async def start(self, name: str, image: str, ttl_s: float) -> None:
        """Implements `SandboxBackend.start`; a missing image is pulled first."""
        settings, image = self._settings, image or self._settings.image
        if not image:
            raise SandboxRefused("no image is named: backend: {kind: containers, image: NAME}")
        seconds = math.ceil(ttl_s)
        body = {
            "Image": image,
            "Entrypoint": ["sh", "-c", _FIRST_PROCESS, name, str(seconds)],
            "Cmd": [],
            "User": settings.user,
            "Labels": {"async-rl.run": self._run, "async-rl.expires": str(round(time.time() + ttl_s))},
            "HostConfig": {
                "AutoRemove": True,
                "NetworkMode": settings.network or "none" if settings.network is not True else "bridge",
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "Memory": settings.memory_mb << 20,
                "MemorySwap": settings.memory_mb << 20,
                "NanoCpus": round(settings.cpus * 1e9),
                "PidsLimit": settings.max_processes,
                **({"Runtime": settings.runtime} if settings.runtime else {}),
            },
        }
        create = {"params": {"name": name}, "json": body}
        status, _ = await self._calls.request("POST", _url("/containers/create"), may_be=(404,), **create)
        if status == 404:
            await self._pull(image)
            await self._calls.request("POST", _url("/containers/create"), **create)
        await self._calls.request("POST", _url(f"/containers/{name}/start"), may_be=(304,))

    async def exec(
        self, name: str, command: str, *, timeout_s: float, stdin: bytes, max_output_bytes: int
    ) -> ExecResult:
        """Implements `SandboxBackend.exec`."""
        source = "/dev/null"
        if stdin:
            source = f"/tmp/.{secrets.token_hex(8)}.in"
            await self.write_file(name, source, stdin)
        body = {
            "AttachStdout": True,
            "AttachStderr": True,
            "Cmd": limited_command(command, timeout_s, source),
        }
        clock = asyncio.get_running_loop().time
        begin = clock()
        made = await self._calls.request_json("POST", _url(f"/containers/{name}/exec"), json=body)
        output = Output(max_output_bytes)
        path = f"/exec/{made['Id']}"
        try:
            async with self._calls.open_response(
                "POST",
                _url(f"{path}/start"),
                json={"Detach": False, "Tty": False},
                limit_s=timeout_s + GRACE_S,
            ) as response:
                async for descriptor, data in _frames(response.content):
                    output.add(descriptor, data)
        except SandboxLost:
            # What the command has left running may hold its output open.
            if (await self._exit_code(path)) is None:
                raise
        if (exit_code := await self._exit_code(path)) is None:
            raise SandboxLost(f"the container {name} does not end a command")
        return output.result(exit_code, timed_out=ran_too_long(exit_code, clock() - begin, timeout_s))

    async def end_processes(self, name: str) -> None:
        """Implements `SandboxBackend.end_processes`."""
        ended = await self.exec(
            name, _END_PROCESSES % name, timeout_s=_END_S, stdin=b"", max_output_bytes=_MAX_FRAME_BYTES
        )
        if ended.stdout != "ended\n":
            raise SandboxLost(f"the processes of the container {name} do not end: {ended.stderr[-500:]}")

    async def listen(self, name: str) -> socket.socket | None:
        """Implements `AgentBackend.listen`."""
        if self._settings.network:
            return None
        state = await self._calls.request_json("GET", _url(f"/containers/{name}/json"))
        try:
            return await asyncio.to_thread(listening_inside, int(state["State"]["Pid"]), name)
        except OSError as error:
            raise SandboxRefused(
                f"nothing can listen inside the container {name}: {error}. It takes root's rights, or "
                "a rootless engine of this user; else name a network: docs/guide/harness.md, 'In containers'"
            ) from error

    async def read_file(self, name: str, path: str) -> bytes:
        """Implements `SandboxBackend.read_file`."""
        where = _url(f"/containers/{name}/archive")
        status, body = await self._calls.request_file(where, path, may_be=(404,))
        if status == 404:
            await self._check_runs(name)
            raise FileNotFoundError(2, "no such file", path)
        with tarfile.open(fileobj=io.BytesIO(body)) as archive:
            member = archive.next()
            content = None if member is None else archive.extractfile(member)
            if content is None or member is None or member.size > MAX_FILE_BYTES:
                raise OSError(f"{path} is no file of at most {MAX_FILE_BYTES} bytes")
            return content.read()

    async def write_file(self, name: str, path: str, data: bytes) -> None:
        """Implements `SandboxBackend.write_file`."""
        member = tarfile.TarInfo(path.lstrip("/"))
        member.size, member.mode = len(data), 0o666
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as writer:
            writer.addfile(member, io.BytesIO(data))
        archive.seek(0)
        where = _url(f"/containers/{name}/archive")
        status, _ = await self._calls.request(
            "PUT", where, params={"path": "/"}, data=archive, may_be=(400, 403, 404, 500)
        )
        if not 200 <= status < 300:
            await self._check_runs(name)
            raise OSError(f"{path} cannot be written")

    async def build_image(self, image: str, context: bytes) -> None:
        """Implements `BuildingBackend.build_image`; the engine decides on the network of its commands."""
        async with self._builds[image]:
            status, _ = await self._calls.request("GET", _url(f"/images/{image}/json"), may_be=(404,))
            if status == 404:
                parameters = {"t": image, "forcerm": "true"}
                kind = {"Content-Type": "application/x-tar"}
                await self._make_image(image, "/build", params=parameters, data=context, headers=kind)

    async def snapshot(self, name: str, snapshot: str) -> str:
        """Implements `SandboxBackend.snapshot`."""
        parameters = {"container": name, "repo": _SNAPSHOTS, "tag": snapshot}
        await self._calls.request("POST", _url("/commit"), params=parameters, json={})
        return f"{_SNAPSHOTS}:{snapshot}"

    async def end(self, name: str) -> None:
        """Implements `SandboxBackend.end`."""
        where = _url(f"/containers/{name}")
        parameters = {"force": "true", "v": "true"}
        await self._calls.request("DELETE", where, params=parameters, may_be=(404, 409))  # 409: it is ending

    async def end_snapshot(self, snapshot: str) -> None:
        """Implements `SandboxBackend.end_snapshot`."""
        where = _url(f"/images/{_SNAPSHOTS}:{snapshot}")
        await self._calls.request("DELETE", where, params={"force": "true"}, may_be=(404,))

    async def _pull(self, image: str) -> None:
        has_tag = ":" in image.rpartition("/")[2] or "@" in image
        parameters = {"fromImage": image if has_tag else f"{image}:latest"}
        await self._make_image(image, "/images/create", params=parameters)

    async def _make_image(self, image: str, path: str, **request: Any) -> None:
        """Pull or build an image; an error is the last line of the answer."""
        _, body = await self._calls.request("POST", _url(path), limit_s=_IMAGE_S, **request)
        last = body.rstrip().rpartition(b"\n")[2]
        if b'"error"' in last:
            raise SandboxRefused(f"there is no image {image}: {last.decode(errors='replace')[-500:]}")

    async def _exit_code(self, path: str) -> int | None:
        """Return the exit code of an exec, or None while it runs."""
        state = await self._calls.request_json("GET", _url(f"{path}/json"))
        return None if state["Running"] else int(state["ExitCode"])

    async def _check_runs(self, name: str) -> None:
        """Raise SandboxLost unless the container runs."""
        state: dict[str, Any] = await self._calls.request_json("GET", _url(f"/containers/{name}/json"))
        if not state["State"]["Running"]:
            raise SandboxLost(f"the container {name} does not run any more")


def _url(path: str) -> str:
    return "http://localhost" + quote(path, safe="/:@")


async def _frames(stream: aiohttp.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the pieces of a stream with both outputs: a descriptor and bytes.

    **Source**: https://docs.docker.com/reference/api/engine/version/v1.47/#tag/Container/operation/ContainerAttach
    """
    try:
        while True:
            head = await stream.readexactly(8)
            left, descriptor = int.from_bytes(head[4:]), 2 if head[0] == 2 else 1
            while left:
                data = await stream.readexactly(min(left, _MAX_FRAME_BYTES))
                left -= len(data)
                yield descriptor, data
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise SandboxLost("the output of a command was cut short") from error
