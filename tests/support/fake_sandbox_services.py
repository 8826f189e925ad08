"""Fakes of E2B's and Daytona's APIs, as far as sandboxes use them; both want the key `KEY`."""

from __future__ import annotations

import base64
import json
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.fake_container_engine import faulty
from tests.support.fake_machines import FakeMachines

KEY = "sk-a-secret-key"


@asynccontextmanager
async def fake_e2b(folder: Path) -> AsyncIterator[tuple[str, FakeMachines]]:
    """Serve both the API and the agents inside sandboxes; yield the address and the sandboxes."""
    machines = FakeMachines(folder)
    async with _served(_e2b(machines)) as url:
        yield url, machines


@asynccontextmanager
async def fake_daytona(folder: Path) -> AsyncIterator[tuple[str, FakeMachines]]:
    """Serve both the API and the agents inside sandboxes; yield the address and the sandboxes."""
    machines = FakeMachines(folder)
    async with _served(_daytona(machines)) as url:
        yield url, machines


@asynccontextmanager
async def _served(application: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(application, handle_signals=False, shutdown_timeout=0.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _uploaded(request: web.Request) -> bytes:
    form = await request.post()
    field = form["file"]
    assert isinstance(field, web.FileField)
    return field.file.read()


def _e2b(machines: FakeMachines) -> web.Application:
    def check_key(request: web.Request) -> None:
        if request.headers.get("X-API-KEY") != KEY:
            raise web.HTTPUnauthorized(text=f"no access with {request.headers.get('X-API-KEY')}")

    def inside(request: web.Request) -> str:
        key = request.headers["E2b-Sandbox-Id"]
        if key not in machines.requested:
            raise web.HTTPBadGateway(text='{"message": "The sandbox was not found"}')
        assert request.headers["X-Access-Token"] == f"token of {key}"
        return key

    async def create(request: web.Request) -> web.Response:
        check_key(request)
        body = await request.json()
        if body["templateID"] == "missing":
            raise web.HTTPNotFound(text="no such template")
        key = f"i{machines.num_made}"
        machines.make(key, body, body["templateID"])
        made = {"sandboxID": key, "templateID": "base", "clientID": "c", "envdVersion": "0.5.7"}
        return web.json_response({**made, "envdAccessToken": f"token of {key}", "domain": None}, status=201)

    async def list_all(request: web.Request) -> web.Response:
        check_key(request)
        wanted = dict(urllib.parse.parse_qsl(request.query.get("metadata", "")))
        found = [
            {"sandboxID": key}
            for key, body in machines.requested.items()
            if wanted.items() <= body["metadata"].items()
        ]
        return web.json_response(found)

    async def get(request: web.Request) -> web.Response:
        check_key(request)
        return web.Response(status=200 if request.match_info["id"] in machines.requested else 404)

    async def remove(request: web.Request) -> web.Response:
        check_key(request)
        return web.Response(status=204 if machines.remove(request.match_info["id"]) else 404)

    async def snapshot(request: web.Request) -> web.Response:
        check_key(request)
        name = (await request.json())["name"]
        machines.keep(request.match_info["id"], f"team/{name}:default")
        return web.json_response({"snapshotID": f"team/{name}:default", "names": []}, status=201)

    async def remove_template(request: web.Request) -> web.Response:
        check_key(request)
        known = machines.remove_image(f"team/{request.match_info['id']}:default")
        return web.Response(status=200 if known else 404)

    async def start_process(request: web.Request) -> web.StreamResponse:
        key, data = inside(request), await request.read()
        assert request.headers["Content-Type"] == "application/connect+json"
        assert data[0] == 0
        assert int.from_bytes(data[1:5], "big") == len(data) - 5
        process = json.loads(data[5:])["process"]
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await response.prepare(request)

        async def send(flags: int, message: dict[str, Any]) -> None:
            encoded = json.dumps(message).encode()
            await response.write(bytes([flags]) + len(encoded).to_bytes(4, "big") + encoded)

        await send(0, {"event": {"start": {"pid": 7}}})
        code, out, err = await machines.run(key, process["cmd"], *process["args"])
        for name, output in (("stdout", out), ("stderr", err)):
            for begin in range(0, len(output), 32_768):
                part = base64.b64encode(output[begin : begin + 32_768]).decode()
                await send(0, {"event": {"data": {name: part}}})
        await send(0, {"event": {"keepalive": {}}})
        end = {"exited": code >= 0, "status": "exit status"}
        await send(0, {"event": {"end": {**end, **({"exitCode": max(code, -1)} if code else {})}}})
        await send(2, {})
        return response

    async def read(request: web.Request) -> web.Response:
        path = machines.path(inside(request), request.query["path"])
        return web.Response(body=path.read_bytes()) if path.exists() else web.Response(status=404)

    async def write(request: web.Request) -> web.Response:
        path = machines.path(inside(request), request.query["path"])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            return web.Response(status=400)
        path.write_bytes(await _uploaded(request))
        return web.json_response([{"name": path.name, "path": request.query["path"], "type": "file"}])

    application = web.Application(middlewares=[faulty(machines)], client_max_size=1 << 25)
    application.add_routes(
        [
            web.post("/v2/sandboxes", create),
            web.get("/v2/sandboxes", list_all),
            web.get("/sandboxes/{id}", get),
            web.delete("/sandboxes/{id}", remove),
            web.post("/sandboxes/{id}/snapshots", snapshot),
            web.delete("/templates/{id}", remove_template),
            web.post("/process.Process/Start", start_process),
            web.get("/files", read),
            web.post("/files", write),
        ]
    )
    return application


def _daytona(machines: FakeMachines) -> web.Application:
    starting: set[str] = set()

    @web.middleware
    async def check_key(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            raise web.HTTPUnauthorized(text=f"no access with {request.headers.get('Authorization')}")
        answer: web.StreamResponse = await handler(request)
        return answer

    def described(request: web.Request, name: str) -> web.Response:
        if name not in machines.requested:
            raise web.HTTPNotFound(text="no such sandbox")
        state = "started"
        if name in starting:
            starting.remove(name)
            state = "creating"
        proxy = f"http://{request.host}/toolbox"
        return web.json_response({"id": f"id-{name}", "name": name, "state": state, "toolboxProxyUrl": proxy})

    def inside(request: web.Request) -> str:
        name = request.match_info["id"].removeprefix("id-")
        if name not in machines.requested:
            raise web.HTTPNotFound(text="no such sandbox")
        return name

    async def create(request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("snapshot") == "missing":
            raise web.HTTPBadRequest(text="no such snapshot")
        machines.make(body["name"], body, body.get("snapshot", ""))
        starting.add(body["name"])
        return described(request, body["name"])

    async def list_all(request: web.Request) -> web.Response:
        return web.json_response({"items": []})

    async def get(request: web.Request) -> web.Response:
        return described(request, request.match_info["name"])

    async def remove(request: web.Request) -> web.Response:
        return web.Response(status=200 if machines.remove(request.match_info["name"]) else 404)

    async def snapshot(request: web.Request) -> web.Response:
        machines.keep(request.match_info["name"], (await request.json())["name"])
        return described(request, request.match_info["name"])

    async def get_snapshot(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.json_response({"id": f"id-{name}"}, status=200 if name in machines.images else 404)

    async def remove_snapshot(request: web.Request) -> web.Response:
        known = machines.remove_image(request.match_info["name"].removeprefix("id-"))
        return web.Response(status=200 if known else 404)

    async def execute(request: web.Request) -> web.Response:
        body = await request.json()
        code, out, err = await machines.run(inside(request), "sh", "-c", body["command"])
        result = (out + err).decode()
        return web.json_response({"exitCode": code if code >= 0 else 128 - code, "result": result})

    async def read(request: web.Request) -> web.Response:
        path = machines.path(inside(request), request.query["path"])
        return web.Response(body=path.read_bytes()) if path.exists() else web.Response(status=404)

    async def write(request: web.Request) -> web.Response:
        path = machines.path(inside(request), request.query["path"])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            return web.Response(status=400)
        path.write_bytes(await _uploaded(request))
        return web.Response()

    application = web.Application(middlewares=[check_key, faulty(machines)], client_max_size=1 << 25)
    application.add_routes(
        [
            web.post("/sandbox", create),
            web.get("/sandbox", list_all),
            web.get("/sandbox/{name}", get),
            web.delete("/sandbox/{name}", remove),
            web.post("/sandbox/{name}/snapshot", snapshot),
            web.get("/snapshots/{name}", get_snapshot),
            web.delete("/snapshots/{name}", remove_snapshot),
            web.post("/toolbox/{id}/process/execute", execute),
            web.get("/toolbox/{id}/files/download", read),
            web.post("/toolbox/{id}/files/upload-v2", write),
        ]
    )
    return application
