"""The gate of SGLang servers, in front of a model of SGLang on the same ASGI stack."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.engines.sglang import memory_gate
from async_rl.engines.sglang.memory_gate import MemoryGate

fastapi = pytest.importorskip("fastapi")

ALL = ["kv_cache", "weights", "cuda_graph"]
REST = ["kv_cache", "cuda_graph"]

App = Callable[..., Any]


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


async def ask(app: App, path: str, body: Any = None, *, on_text: Callable[[], None] | None = None) -> Reply:
    """Make one request to an ASGI application."""
    reply, sent = Reply(), [json.dumps({} if body is None else body).encode()]

    async def receive() -> MutableMapping[str, Any]:
        if sent:
            return {"type": "http.request", "body": sent.pop(), "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError("it is awaited for ever")

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            reply.body += message.get("body", b"")
            if on_text is not None and reply.body:
                on_text()

    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET" if path in ("/health", "/model_info") else "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await app(scope, receive, send)
    return reply


class ModelOfSGLang:
    """SGLang's HTTP process and scheduler, as far as memory is concerned: it dies of what kills SGLang."""

    def __init__(self, *, tokenise_s: float = 0.0, num_tokens: int = 20, seed: int = 0) -> None:
        self.tokenise_s = tokenise_s
        self.num_tokens = num_tokens
        self.rng = random.Random(seed)
        self.missing: set[str] = set()
        self.running = 0
        self.idle = asyncio.Condition()
        self.aborts = 0
        self.died_of = ""
        self.app = fastapi.FastAPI()
        for path, endpoint in (("/health", self.health), ("/model_info", self.model_info)):
            self.app.add_api_route(path, endpoint, methods=["GET"])
        for path, endpoint in (
            ("/generate", self.generate),
            ("/load_lora_adapter", self.model_info),
            ("/unload_lora_adapter", self.model_info),
            ("/flush_cache", self.flush_cache),
            ("/abort_request", self.abort_request),
            ("/release_memory_occupation", self.release),
            ("/resume_memory_occupation", self.resume),
        ):
            self.app.add_api_route(path, endpoint, methods=["POST"])

    def die_if(self, wrong: bool, what: str) -> None:
        if wrong:
            self.died_of = self.died_of or what

    async def run_model(self) -> AsyncIterator[bytes]:
        """Sample tokens; what is still being tokenised misses an abort."""
        await asyncio.sleep(self.rng.uniform(0.0, self.tokenise_s))
        self.die_if(bool(self.missing), f"a call, without {self.missing}")
        aborts, self.running = self.aborts, self.running + 1
        try:
            for _ in range(self.num_tokens):
                yield b"x"
                await asyncio.sleep(0.01)
                if self.aborts > aborts:
                    break
        finally:  # the last batch runs still
            asyncio.get_running_loop().call_later(0.02, lambda: asyncio.ensure_future(self.end_batch()))

    async def end_batch(self) -> None:
        async with self.idle:
            self.running -= 1
            self.idle.notify_all()

    async def generate(self) -> Any:
        return fastapi.responses.StreamingResponse(self.run_model())

    async def health(self) -> Any:
        async for _ in self.run_model():
            break
        return {"samples": "a token"}

    async def model_info(self) -> Any:
        return {"weight_version": "0"}

    async def flush_cache(self, timeout: float = 0.0) -> Any:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                async with self.idle:
                    await self.idle.wait_for(lambda: not self.running)
        return fastapi.Response(status_code=400 if self.running else 200, content="Flush cache failed.")

    async def abort_request(self, request: fastapi.Request) -> Any:
        assert await request.json() == {"abort_all": True}
        self.aborts += 1

    async def release(self, request: fastapi.Request) -> Any:
        tags = set((await request.json()).get("tags") or ALL)
        self.die_if(bool(self.running), f"a release, with {self.running} calls")
        self.die_if(bool(tags & self.missing), f"a release of {tags}, without {self.missing}")
        self.missing |= tags
        await asyncio.sleep(self.rng.uniform(0.0, 0.1))

    async def resume(self, request: fastapi.Request) -> Any:
        tags = set((await request.json()).get("tags") or ALL)
        self.die_if(not tags <= self.missing, f"a resume of {tags}, without {self.missing}")
        await asyncio.sleep(self.rng.uniform(0.0, 0.1))
        self.missing -= tags


async def release(app: App, *tags: str) -> Reply:
    return await ask(app, "/release_memory_occupation", {"tags": tags})


async def resume(app: App, *tags: str) -> Reply:
    return await ask(app, "/resume_memory_occupation", {"tags": tags})


async def hand_over(app: App, rng: random.Random) -> None:
    """Release all memory and take it back, in one of the ways of `engines.device_memory`."""
    assert (await release(app, *ALL)).status == 200
    await asyncio.sleep(rng.uniform(0.0, 0.2))
    for again in range(rng.choice((1, 1, 2))):
        if again:
            assert (await release(app, "weights")).status == 200
        assert (await resume(app, "weights")).status == 200
        await asyncio.sleep(rng.uniform(0.0, 0.2))
    assert (await resume(app, *REST)).status == 200


async def call_all_the_time(app: App, rng: random.Random, replies: list[Reply]) -> None:
    while True:
        await asyncio.sleep(rng.expovariate(20.0))
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.choice((0.1, 60.0))):  # some clients leave
                replies.append(await ask(app, rng.choice(("/generate", "/v1/unknown", "/health"))))


async def hand_over_under_fire(app: App, seed: int) -> list[Reply]:
    """Hand memory over while calls arrive at any time; return what they were answered."""
    rng, replies = random.Random(seed), list[Reply]()
    async with asyncio.TaskGroup() as tasks:
        callers = [
            tasks.create_task(call_all_the_time(app, random.Random(f"{seed} {k}"), replies)) for k in range(8)
        ]
        for _ in range(10):
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            await hand_over(app, rng)
        for caller in callers:
            caller.cancel()
    return replies


@pytest.mark.parametrize("seed", range(8))
async def test_no_call_reaches_a_server_that_lacks_memory(seed: int) -> None:
    server = ModelOfSGLang(tokenise_s=0.05, seed=seed)
    replies = await hand_over_under_fire(MemoryGate(server.app), seed)
    assert server.died_of == ""
    refused = [reply for reply in replies if reply.status == 503]
    assert all(reply.headers["retry-after"] == "5" for reply in refused)
    statuses = {reply.status for reply in replies}
    assert {200, 503} <= statuses <= {200, 404, 503}


async def test_a_server_stays_open_when_its_calls_do_not_end() -> None:
    server = ModelOfSGLang(num_tokens=10**9)
    gate = MemoryGate(server.app, limit_s=3.0)
    server.app.router.routes = [r for r in server.app.router.routes if r.path != "/abort_request"]
    async with asyncio.TaskGroup() as tasks:
        begun = asyncio.Event()
        calling = tasks.create_task(ask(gate, "/generate", on_text=begun.set))
        await begun.wait()
        refused = await release(gate)
        assert refused.status == 409
        assert "1 calls did not end within 3.0 s" in json.loads(refused.body)["message"]
        assert (server.missing, gate.is_closed) == (set(), False)
        calling.cancel()


async def test_a_release_is_refused_when_the_cache_cannot_be_flushed() -> None:
    server = ModelOfSGLang()
    server.running = 1  # a batch that does not end
    gate = MemoryGate(server.app)
    refused = await release(gate)
    assert refused.status == 409
    assert "Flush cache failed" in json.loads(refused.body)["message"]
    assert (server.missing, server.died_of, gate.is_closed) == (set(), "", False)


async def test_health_and_control_requests_pass_a_closed_gate() -> None:
    server = ModelOfSGLang()
    gate = MemoryGate(server.app)
    await release(gate, *ALL)
    for path in ("/model_info", "/flush_cache", "/unload_lora_adapter", "/load_lora_adapter"):
        assert (await ask(gate, path)).status == 200
    health = await ask(gate, "/health")
    assert health.status == 200
    assert b"samples" not in health.body  # SGLang's own health check would sample
    assert (await ask(gate, "/generate")).status == 503
    assert server.died_of == ""


async def test_a_gate_stays_closed_when_a_resume_fails() -> None:
    server = ModelOfSGLang()

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/resume_memory_occupation":
            await server.app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    gate = MemoryGate(broken)
    await release(gate, *ALL)
    assert (await resume(gate, *ALL)).status == 400
    assert (await ask(gate, "/generate")).status == 503


def test_a_server_that_takes_calls_in_several_processes_is_refused() -> None:
    with pytest.raises(SystemExit, match="--tokenizer-worker-num is 3: 3 processes"):
        memory_gate.install(SimpleNamespace(tokenizer_worker_num=3))
