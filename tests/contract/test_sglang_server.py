"""What only a real SGLang server can show: its process, its keys, broadcast weights."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import psutil
import pytest
import torch
from safetensors.torch import load_file

from async_rl.config import ModelConfig, SGLangEngines
from async_rl.engines.protocol import DiskUpdate, DistributedUpdate, GroupInvite
from async_rl.engines.server import SGLangServer, free_port
from async_rl.engines.sglang import SGLangEngine
from async_rl.errors import ConfigError, EngineError, EnvironmentNotReady, WeightSyncError
from async_rl.weights.broadcast import WeightGroup, send_buckets
from async_rl.weights.buckets import fill_buckets, largest_of, plan_buckets, spec_of
from tests.support.engine_calls import Call, call, request
from tests.support.sglang_world import SGLangWorld

pytestmark = pytest.mark.sglang

PROMPT = [40, 41, 42, 43]


@pytest.fixture
async def engine(sglang_world: SGLangWorld):
    made = sglang_world.engine()
    await made.wait_ready()
    await made.update_weights(DiskUpdate(weight_version=0, path=str(sglang_world.weights[0])), flush=True)
    yield made
    await made.close()


async def test_the_weights_are_the_senders_when_they_are_broadcast(
    sglang_world: SGLangWorld, engine: SGLangEngine
) -> None:
    path = sglang_world.weights[1]
    await engine.update_weights(DiskUpdate(weight_version=1, path=str(path)), flush=True)
    expected = await call(engine, PROMPT, 12)
    await engine.update_weights(DiskUpdate(weight_version=0, path=str(sglang_world.weights[0])), flush=True)

    tensors = load_file(path / "model.safetensors")
    buckets = plan_buckets([spec_of(name, t) for name, t in tensors.items()], 64 << 10)
    assert len(buckets) > 2
    invite = GroupInvite(
        group_name="test",
        backend="gloo",
        host="127.0.0.1",
        port=free_port("127.0.0.1"),
        world_size=2,
        rank_offset=1,
    )
    group, _ = await asyncio.gather(
        asyncio.to_thread(WeightGroup, invite, 30.0), engine.join_weight_group(invite)
    )
    update = DistributedUpdate(weight_version=2, group_name="test", buckets=buckets)
    data = fill_buckets(tensors.items(), buckets, [torch.empty(largest_of(buckets), dtype=torch.uint8)])
    await asyncio.gather(
        asyncio.to_thread(send_buckets, data, {"test": group}), engine.update_weights(update, flush=True)
    )
    after = await call(engine, PROMPT, 12)
    await asyncio.gather(asyncio.to_thread(group.close), engine.leave_weight_group("test"))
    assert (await engine.health()).weight_version == 2
    assert after.token_ids == expected.token_ids
    assert after.log_probs == expected.log_probs
    assert [s.weight_version for s in after.finish.version_spans] == [2]


async def test_old_weights_stay_when_new_ones_cannot_be_read(engine: SGLangEngine, tmp_path: Path) -> None:
    before = await call(engine, PROMPT, 4)
    with pytest.raises(WeightSyncError, match="refused weight version 9"):
        await engine.update_weights(DiskUpdate(weight_version=9, path=str(tmp_path)), flush=True)
    assert (await engine.health()).weight_version == 0
    assert (await call(engine, PROMPT, 4)).log_probs == pytest.approx(before.log_probs, abs=1e-5)


async def test_each_key_opens_its_own_doors_when_both_are_set(
    sglang_world: SGLangWorld, engine: SGLangEngine
) -> None:
    server = sglang_world.server

    async def status(method: str, endpoint: str, key: str | None) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with session.request(method, f"{server.url}/{endpoint}", headers=headers, json={}) as response:
            return response.status

    async with aiohttp.ClientSession() as session:
        assert await status("GET", "model_info", None) == 401
        assert await status("GET", "model_info", server.api_key) == 200
        assert await status("POST", "flush_cache", None) == 401
        assert await status("POST", "flush_cache", server.api_key) == 401
        assert await status("POST", "flush_cache", server.admin_key) == 200


def test_the_keys_cannot_be_seen_when_the_server_runs(sglang_world: SGLangWorld) -> None:
    server = sglang_world.server
    command_lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in group_of(server.pid)]
    assert len(command_lines) >= 3
    assert any("--weight-version=0" in line for line in command_lines)
    for secret in (server.api_key, server.admin_key):
        assert not any(secret in line for line in command_lines)
        assert secret not in server.log_path.read_text()


def test_the_server_listens_on_loopback_only_when_told_to(sglang_world: SGLangWorld) -> None:
    addresses = {
        connection.laddr.ip
        for pid in group_of(sglang_world.server.pid)
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}  # the store that SGLang's own ranks meet at included


async def test_the_admin_key_is_not_told_to_who_has_the_other_one(sglang_world: SGLangWorld) -> None:
    server = sglang_world.server
    headers = {"Authorization": f"Bearer {server.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{server.url}/server_info") as response,
    ):
        text = await response.text()
    assert '"tp_size"' in text
    assert server.admin_key not in text


def group_of(group: int | None) -> list[int]:
    """The living processes of a group."""
    members = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                state, _, of = (path / "stat").read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(of) == group and state not in "ZX":
                members.append(int(path.name))
    return members


@pytest.mark.case(3)
async def test_a_server_can_be_killed_and_started_again(sglang_world: SGLangWorld, tmp_path: Path) -> None:
    server = SGLangServer(
        SGLangEngines(max_running_requests=2, max_total_tokens=4096),
        ModelConfig(path=str(sglang_world.weights[0]), dtype="float32"),
        routing=False,
        index=1,
        log_dir=tmp_path,
        seed=0,
    )
    keys = {"api_key": server.api_key, "admin_key": server.admin_key}
    engine = SGLangEngine("engine-1", server.url, sglang_world.facts, **keys, died=server.died)
    replaying = SGLangEngine("engine-1", server.url, sglang_world.facts, **keys, routing=True)
    try:
        await server.start()
        await engine.wait_ready()
        with pytest.raises(ConfigError, match="--enable-return-routed-experts"):
            await replaying.wait_ready()
        # For the reason that is given: it does not refuse to leave routing out.
        assert (await call(engine, PROMPT, 2)).finish.routing is None
        running = Call(engine, request(PROMPT, 1500))
        task = asyncio.create_task(running.run())
        await running.has_tokens(3)
        first = group_of(server.pid)
        os.kill(max(first), signal.SIGKILL)  # the youngest: a child of the server proper
        with pytest.raises(EngineError):
            await task
        await server.wait()
        assert group_of(server.pid) == []
        assert len(running.token_ids) >= 3
        assert "ended with code" in await server.died()

        await server.start()
        await engine.wait_ready()
        assert (await engine.health()).weight_version == 0
        assert len((await call(engine, PROMPT, 5)).token_ids) == 5
        os.killpg(server.pid, signal.SIGSTOP)  # one that is stopped, its guard too, can be ended
    finally:
        await engine.close()
        await replaying.close()
        await server.stop()
    assert group_of(server.pid) == []


async def test_its_last_words_are_told_when_a_server_does_not_start(tmp_path: Path) -> None:
    server = SGLangServer(
        SGLangEngines(max_total_tokens=4096, extra_args=["--no-such-option"]),
        ModelConfig(path=str(tmp_path / "nowhere")),
        routing=True,
        index=2,
        log_dir=tmp_path,
        seed=0,
    )
    from tests.support.fake_sglang import facts

    engine = SGLangEngine("engine-2", server.url, facts(), died=server.died)
    await server.start()
    try:
        with pytest.raises(EnvironmentNotReady, match=r"ended with code 2(.|\n)*no-such-option"):
            await engine.wait_ready()
    finally:
        await engine.close()
        await server.stop()
