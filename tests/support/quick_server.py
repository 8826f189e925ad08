"""A server that speaks as much of SGLang's API as a run needs, without a model: `python -m` starts one.

It takes keys as SGLang does, refuses weights that it cannot read, and says of every token under which version
it was made.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from async_rl.engines.sglang.server import SGLangServer
from tests.support.fake_sglang import GOOD_SERVER, event, finish

CALLS = "ASYNC_RL_TEST_CALLS"
"""Environment variable: a folder in which each server writes down the versions under which calls begin."""

ADMIN = ("update_weights_from_disk", "update_weight_version", "abort_request", "flush_cache")


class QuickServer(SGLangServer):
    """Starts one of these where an SGLang server would be started."""

    def command(self) -> list[str]:
        path = ["--model-path", self._config.model.path]
        address = ["--host", self._bind, "--port", str(self._port)]
        return [sys.executable, "-m", "tests.support.quick_server", *path, *address]


def served_versions(folder: Path) -> list[int]:
    """Return, for each server that has been called, the newest version under which a call of it has begun."""
    return [max(int(line) for line in path.read_text().split()) for path in sorted(folder.glob("calls-*"))]


class Policy:
    """What it serves: answers of all tokens asked for, one every few milliseconds."""

    def __init__(self, model_path: str, api_key: str, admin_key: str) -> None:
        self.version, self.path = "0", model_path
        self._keys = {False: f"Bearer {api_key}", True: f"Bearer {admin_key}"}
        self._aborted: dict[str, asyncio.Event] = {}

    async def control(self, request: web.Request) -> web.Response:
        endpoint, text = request.path.strip("/"), await request.text()
        self._admit(request, endpoint in ADMIN)
        body: dict[str, Any] = await request.json() if text else {}
        if endpoint == "abort_request":
            for rid, aborted in self._aborted.items():
                if body.get("abort_all") or rid.startswith(body["rid"]):
                    aborted.set()
        if endpoint == "update_weights_from_disk":
            if not Path(body["model_path"]).is_dir():
                return web.json_response({"success": False, "message": f"no {body['model_path']}"})
            self.path, self.version = body["model_path"], body["weight_version"]
        if endpoint == "update_weight_version":
            self.version = body["new_version"]
        answers = {
            "server_info": GOOD_SERVER,
            "model_info": {"model_path": self.path, "weight_version": self.version},
        }
        return web.json_response(answers.get(endpoint, {"success": True, "message": ""}))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self._admit(request, False)
        body = await request.json()
        self._note_call()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        aborted = self._aborted[body["rid"]] = asyncio.Event()
        length = body["sampling_params"]["max_new_tokens"]
        try:
            for total in range(1, length + 1):
                last = finish("abort") if aborted.is_set() else finish("length") if total == length else None
                await response.write(event([65], total, finish_reason=last, weight_version=self.version))
                if last is not None:
                    break
                await asyncio.sleep(0.005)
            await response.write(b"data: [DONE]\n\n")
        finally:
            del self._aborted[body["rid"]]
        return response

    def _note_call(self) -> None:
        if folder := os.environ.get(CALLS):
            with (Path(folder) / f"calls-{os.getpid()}").open("a") as file:
                file.write(f"{self.version}\n")

    def _admit(self, request: web.Request, admin: bool) -> None:
        if request.headers.get("Authorization") != self._keys[admin]:
            raise web.HTTPUnauthorized


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model-path", "host", "port", "config"):
        parser.add_argument(f"--{name}")
    arguments = parser.parse_args()
    keys = yaml.safe_load(Path(arguments.config).read_text())
    policy = Policy(arguments.model_path, keys["api-key"], keys["admin-api-key"])
    app = web.Application()
    app.router.add_post("/generate", policy.generate)
    app.router.add_route("*", "/{endpoint}", policy.control)
    web.run_app(app, host=arguments.host, port=int(arguments.port), print=None)


if __name__ == "__main__":
    main()
