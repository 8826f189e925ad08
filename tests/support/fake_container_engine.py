"""A fake of the Docker Engine API on a Unix socket, as far as sandboxes use it."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from agent_loops.harness.place import UNPACKED
from tests.support.fake_machines import FakeMachines


@asynccontextmanager
async def fake_container_engine(folder: Path) -> AsyncIterator[tuple[str, FakeMachines]]:
    """Serve in a folder; yield the socket and the containers."""
    machines, socket = FakeMachines(folder), str(folder / "engine.sock")
    runner = web.AppRunner(_application(machines), handle_signals=False, shutdown_timeout=0.0)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    try:
        yield socket, machines
    finally:
        await runner.cleanup()


def faulty(machines: FakeMachines) -> Any:
    """Middleware that fails the requests that a test chose."""

    @web.middleware
    async def fail(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        status = machines.fault_of(f"{request.method} {request.path}")
        if status == 0:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if status is not None:
            return web.json_response({"message": "a fault"}, status=status)
        return await handler(request)

    return fail


def _application(machines: FakeMachines) -> web.Application:
    execs: list[dict[str, Any]] = []

    def name_of(request: web.Request) -> str:
        name = request.match_info["name"]
        if name not in machines.requested:
            raise web.HTTPNotFound(text='{"message": "No such container"}')
        return name

    async def ping(request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def create(request: web.Request) -> web.Response:
        body = await request.json()
        if body["Image"] == "missing":
            raise web.HTTPNotFound(text='{"message": "No such image"}')
        machines.make(request.query["name"], body, body["Image"])
        return web.json_response({"Id": request.query["name"]}, status=201)

    async def pull(request: web.Request) -> web.Response:
        return web.Response(text='{"status": "pulling"}\n{"error": "not found"}\n')

    async def start(request: web.Request) -> web.Response:
        name_of(request)
        return web.Response(status=204)

    async def inspect(request: web.Request) -> web.Response:
        name_of(request)
        return web.json_response({"State": {"Running": True, "Pid": os.getpid()}})

    async def new_exec(request: web.Request) -> web.Response:
        execs.append({"name": name_of(request), "body": await request.json(), "code": None})
        return web.json_response({"Id": str(len(execs) - 1)}, status=201)

    async def run_exec(request: web.Request) -> web.StreamResponse:
        entry = execs[int(request.match_info["id"])]
        if any("/proc/1/cmdline" in word for word in entry["body"]["Cmd"]):  # its processes are this host's
            machines.end_processes(entry["name"])
            code, out, err = -9, b"ended\n", b""
        else:
            code, out, err = await machines.run(entry["name"], *entry["body"]["Cmd"])
        entry["code"] = code if code >= 0 else 128 - code
        response = web.StreamResponse(headers={"Content-Type": "application/vnd.docker.raw-stream"})
        response.force_close()
        await response.prepare(request)
        for descriptor, data in ((1, out), (2, err)):
            for begin in range(0, len(data), 40_000):
                part = data[begin : begin + 40_000]
                await response.write(bytes([descriptor, 0, 0, 0]) + len(part).to_bytes(4, "big") + part)
        return response

    async def exec_state(request: web.Request) -> web.Response:
        code = execs[int(request.match_info["id"])]["code"]
        return web.json_response({"Running": code is None, "ExitCode": code})

    async def get_archive(request: web.Request) -> web.Response:
        path = machines.path(name_of(request), request.query["path"])
        if not path.exists():
            raise web.HTTPNotFound(text='{"message": "Could not find the file"}')
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(path, path.name)
        return web.Response(body=buffer.getvalue(), content_type="application/x-tar")

    async def put_archive(request: web.Request) -> web.Response:
        folder = machines.path(name_of(request), request.query["path"])
        with tarfile.open(fileobj=io.BytesIO(await request.read())) as archive:
            try:
                archive.extractall(folder, **UNPACKED)
            except OSError as error:
                return web.json_response({"message": str(error)}, status=500)
        return web.Response()

    async def commit(request: web.Request) -> web.Response:
        assert request.query["container"] in machines.requested
        machines.keep(request.query["container"], f"{request.query['repo']}:{request.query['tag']}")
        return web.json_response({"Id": "sha256:1"}, status=201)

    async def remove(request: web.Request) -> web.Response:
        assert request.query["force"] == "true"
        return web.Response(status=204 if machines.remove(request.match_info["name"]) else 404)

    async def remove_image(request: web.Request) -> web.Response:
        return web.Response(status=200 if machines.remove_image(request.match_info["name"]) else 404)

    application = web.Application(middlewares=[faulty(machines)], client_max_size=1 << 25)
    application.add_routes(
        [
            web.get("/_ping", ping),
            web.post("/containers/create", create),
            web.post("/images/create", pull),
            web.post("/containers/{name}/start", start),
            web.get("/containers/{name}/json", inspect),
            web.post("/containers/{name}/exec", new_exec),
            web.post("/exec/{id}/start", run_exec),
            web.get("/exec/{id}/json", exec_state),
            web.get("/containers/{name}/archive", get_archive),
            web.put("/containers/{name}/archive", put_archive),
            web.post("/commit", commit),
            web.delete("/containers/{name}", remove),
            web.delete("/images/{name}", remove_image),
        ]
    )
    return application
