"""What a real SGLang server sends when a call is aborted, with and without the launcher that omits rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import aiohttp
import msgspec
import pytest

from async_rl.config import ModelConfig, SGLangEngines
from async_rl.engine_protocol import Finish
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.generate_call import encode_request
from async_rl.engines.sglang.server import SGLangServer
from async_rl.types import VersionSpan
from tests.support.engine_calls import Call, call, request
from tests.support.sglang_world import SGLangWorld

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

PROMPT = [30 + i % 200 for i in range(1500)]
"""Long enough that its rows do not arrive with its tokens."""
BUDGET = 500


async def last_event_of_an_abort(server: SGLangServer, *, omit: bool) -> str:
    """Return the last event of a running call that is aborted, as the server sends it."""
    asked = msgspec.structs.replace(request(PROMPT, BUDGET), rows_if_aborted=not omit)
    keys = {"Authorization": f"Bearer {server.api_key}", "Content-Type": "application/json"}
    admin = keys | {"Authorization": f"Bearer {server.admin_key}"}
    last = ""
    async with aiohttp.ClientSession(read_bufsize=1 << 20) as http:
        body = encode_request(asked)
        async with http.post(f"{server.url}/generate", data=body, headers=keys) as response:
            aborted = False
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                last = line[6:].decode()
                if not aborted and json.loads(last)["meta_info"]["completion_tokens"] >= 3:
                    aborted = True
                    async with http.post(
                        f"{server.url}/abort_request", json={"abort_all": True}, headers=admin
                    ) as done:
                        assert done.status == 200
    return last


async def abort_unneeded(engine: SGLangEngine) -> Call:
    running = Call(engine, msgspec.structs.replace(request(PROMPT, BUDGET), rows_if_aborted=False))
    async with asyncio.TaskGroup() as group:
        group.create_task(running.run())
        await running.has_tokens(3)
        await engine.interrupt("abort")
    return running


def check_abort(running: Call) -> None:
    assert isinstance(running.finish, Finish)
    assert (running.finish.reason, running.finish.routing) == ("abort", None)
    assert 3 <= len(running.token_ids) < BUDGET
    span = VersionSpan(start=0, end=len(running.token_ids), weight_version=0)
    assert running.finish.version_spans == (span,)


async def test_everything_else_precedes_the_rows_when_sglang_ends_an_aborted_call(
    sglang_world: SGLangWorld,
) -> None:
    engine = sglang_world.engine()
    await engine.wait_ready()
    try:
        event = await last_event_of_an_abort(sglang_world.server, omit=False)
        meta = json.loads(event)["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        fields = ("output_ids", "finish_reason", "weight_version", "output_token_logprobs")
        fields += ("completion_tokens", "cached_tokens", "weight_versions", "routed_experts")
        places = [event.index(f'"{field}":') for field in fields]
        assert all(before < after for before, after in pairwise(places)), dict(
            zip(fields, places, strict=True)
        )
        rows = len(PROMPT) + meta["completion_tokens"] - 1
        facts = sglang_world.facts
        assert len(meta["routed_experts"]) == -(-rows * facts.num_layers * facts.top_k * 4 // 3) * 4
        aborted = await abort_unneeded(engine)
        check_abort(aborted)
        # All that was fed is still cached: a recovery returns the rows that the sampling used.
        recovered = await call(engine, aborted.sequence, 0)
        assert recovered.finish is not None
        assert recovered.finish.cached_tokens == len(recovered.trace.rows) == len(aborted.sequence) - 1
    finally:
        await engine.close()


@pytest.fixture
async def narrow_engine(
    sglang_world: SGLangWorld, tmp_path: Path
) -> AsyncIterator[tuple[SGLangServer, SGLangEngine]]:
    config = SGLangEngines(max_running_requests=4, max_total_tokens=8192, narrow_routing=True)
    model = ModelConfig(path=str(sglang_world.weights[0]), dtype="float32")
    server = SGLangServer(config, model, routing=True, index=1, log_dir=tmp_path, seed=0)
    keys = {"api_key": server.api_key, "admin_key": server.admin_key}
    engine = SGLangEngine(
        "engine-1",
        server.url,
        sglang_world.facts,
        **keys,
        routing=True,
        narrow_routing=True,
        start_timeout_s=400,
        died=server.died,
    )
    await server.start()
    try:
        await engine.wait_ready()
        yield server, engine
    finally:
        await engine.close()
        await server.stop()


async def check_omitted(server: SGLangServer, engine: SGLangEngine) -> None:
    """Check that aborted calls that ask for it have no rows, and all others have them."""
    meta = json.loads(await last_event_of_an_abort(server, omit=True))["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert "routed_experts" not in meta
    assert "routed_experts" in json.loads(await last_event_of_an_abort(server, omit=False))["meta_info"]
    check_abort(await abort_unneeded(engine))
    # A call that ends by itself has its rows, whatever it asks for in case of an abort.
    whole = Call(engine, msgspec.structs.replace(request(PROMPT, 4), rows_if_aborted=False))
    await whole.run()
    assert whole.finish is not None
    assert whole.finish.reason == "length"
    assert len(whole.trace.rows) == len(PROMPT) + 3


async def test_an_aborted_call_has_no_rows_when_we_start_the_server(sglang_world: SGLangWorld) -> None:
    engine = sglang_world.engine()
    await engine.wait_ready()
    try:
        await check_omitted(sglang_world.server, engine)
    finally:
        await engine.close()


@pytest.mark.long
async def test_an_aborted_call_has_no_rows_when_the_server_sends_narrow_ids(
    narrow_engine: tuple[SGLangServer, SGLangEngine],
) -> None:
    await check_omitted(*narrow_engine)
