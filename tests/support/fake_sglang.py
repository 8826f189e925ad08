"""An HTTP server that says what a test wants SGLang to say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from async_rl.config import SGLangEngines
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.model_facts import facts_of
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.server_checks import ServerNeeds

HANG = b"hang"
"""Among a stream's parts: say nothing more until the client goes."""
CUT = b"cut"
"""Among a stream's parts: drop the connection."""

GOOD_SERVER = {"incremental_streaming_output": True, "enable_return_routed_experts": True, "pp_size": 1}


def facts(**changed: Any) -> EngineFacts:
    """Three layers, the first dense; 8 experts, top-2."""
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
        "vocab_size": 300,
        "max_position_embeddings": 64,
    }
    return facts_of(config | changed)


def event(
    ids: list[int],
    total: int,
    *,
    log_probs: list | None = None,
    scored_ids: list[int] | None = None,
    **meta: Any,
) -> bytes:
    """One server-sent event as SGLang writes it: new ids, and the count of all.

    Log-probs are of the first ids, unless `scored_ids` names others.
    """
    values = [-0.5] * len(ids) if log_probs is None else log_probs
    scored_ids = scored_ids or [1] * (len(values) - len(ids)) + ids
    meta = {
        "finish_reason": None,
        "weight_version": "0",
        "completion_tokens": total,
        "output_token_logprobs": [[*scored, None] for scored in zip(values, scored_ids, strict=False)],
    } | meta
    body = json.dumps({"text": "x", "output_ids": ids, "meta_info": meta}, separators=(",", ":"))
    return f"data: {body}\n\n".encode()


def finish(reason: str, **more: Any) -> dict[str, Any]:
    """The value of `finish_reason`."""
    return {"type": reason} | more


def new_client(
    url: str,
    known: EngineFacts,
    client: type[SGLangEngine] = SGLangEngine,
    *,
    config: SGLangEngines | None = None,
    needs: ServerNeeds | None = None,
    **changes: Any,
) -> SGLangEngine:
    """Return a client whose settings and needs are changed by name; other names are arguments of it."""
    config, needs = config or SGLangEngines(), needs or ServerNeeds()
    asked = {name: changes.pop(name) for name in needs.__struct_fields__ if name in changes}
    given = {name: changes.pop(name) for name in config.__struct_fields__ if name in changes}
    name = changes.pop("engine_id", "engine-0")
    return client(name, url, known, replace(config, **given), replace(needs, **asked), **changes)


class FakeSGLang:
    """`streams` are answered to calls in turn; `answers` to control requests, by endpoint.

    A stream is what is sent part by part; an event among the parts is waited for. An answer is (status,
    body), or a function of the request's body that makes one.
    """

    def __init__(self) -> None:
        self.streams: list[list[bytes | asyncio.Event]] = []
        self.answers: dict[str, Any] = {
            "server_info": (200, GOOD_SERVER),
            "model_info": (200, {"model_path": "m", "weight_version": "0"}),
            "ready": (200, {}),
        }
        self.asked: list[tuple[str, Any]] = []
        self.keys: dict[str, str | None] = {}
        self.url = ""

    def requests(self, endpoint: str) -> list[Any]:
        """Bodies that were sent to an endpoint."""
        return [body for name, body in self.asked if name == endpoint]

    async def _control(self, request: web.Request) -> web.Response:
        endpoint, text = request.path.strip("/"), await request.text()
        body = json.loads(text) if text else None
        self.asked.append((endpoint, body))
        self.keys[endpoint] = request.headers.get("Authorization")
        answer: tuple[int, Any] | Callable = self.answers.get(
            endpoint, (200, {"success": True, "message": ""})
        )
        status, content = answer(body) if callable(answer) else answer
        return web.json_response(content, status=status)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(("generate", await request.json()))
        self.keys["generate"] = request.headers.get("Authorization")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in self.streams.pop(0):
            if part == HANG:
                await asyncio.Event().wait()
            if isinstance(part, asyncio.Event):
                await part.wait()
                continue
            if part == CUT:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(part)
        await response.write(b"data: [DONE]\n\n")
        return response

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FakeSGLang]:
        """Answer on a free port of the loopback while the block runs."""
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_route("*", "/{endpoint:.+}", self._control)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    @asynccontextmanager
    async def client(self, **settings: Any) -> AsyncIterator[SGLangEngine]:
        """Serve, with a client of it."""
        async with self.serve():
            known = settings.pop("facts", facts())
            engine = new_client(self.url, known, api_key="api", admin_key="admin", **settings)
            try:
                yield engine
            finally:
                await engine.close()
