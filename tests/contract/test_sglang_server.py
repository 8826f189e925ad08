"""What only a real SGLang server can show: its process, its keys, broadcast weights."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from async_rl.config import ModelConfig, SGLangEngines
from async_rl.engine_protocol import (
    Chunk,
    DiskUpdate,
    DistributedUpdate,
    Finish,
    GenerateRequest,
    GroupInvite,
    TensorUpdate,
)
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.memory_gate import RETRY_AFTER_S
from async_rl.engines.sglang.server import SGLangServer, free_port
from async_rl.errors import ConfigError, EngineBusy, EngineError, EnvironmentNotReady, WeightSyncError
from async_rl.weights.weight_folder import WeightFolder
from tests.support.engine_calls import Call, call, request
from tests.support.sglang_world import VOCAB_SIZE, SGLangWorld, in_trainer_order
from trainer.weights.weight_export import WeightExport

pytestmark = pytest.mark.sglang

PROMPT = [40, 41, 42, 43]


@pytest.fixture
async def engine(sglang_world: SGLangWorld):
    made = sglang_world.engine()
    await made.wait_ready()
    await made.update_weights(DiskUpdate(weight_version=0, path=str(sglang_world.weights[0])), flush=True)
    yield made
    await made.close()


BUCKET_BYTES = 64 << 10


class Sender:
    """What the trainer has of weights, for the transports that send them piece by piece."""

    def __init__(self, weights: Path, before: Path, scratch: Path) -> None:
        self.before = before
        self.scratch = scratch
        self.tensors = in_trainer_order(load_file(weights / "model.safetensors"))
        self.export = WeightExport(
            lambda: iter(self.tensors.items()),
            0,
            torch.device("cpu"),
            check=lambda specs: None,
            group_timeout_s=30.0,
        )
        self.plan = self.export.plan_buckets(BUCKET_BYTES)

    async def broadcast(self, engine: SGLangEngine, version: int) -> None:
        invite = GroupInvite(
            group_name="test",
            backend="gloo",
            host="127.0.0.1",
            port=free_port("127.0.0.1"),
            world_size=2,
            rank_offset=1,
        )
        await asyncio.gather(
            asyncio.to_thread(self.export.open_group, invite), engine.join_weight_group(invite)
        )
        update = DistributedUpdate(weight_version=version, group_name="test", buckets=self.plan)
        await asyncio.gather(
            asyncio.to_thread(self.export.send_weights, ["test"], BUCKET_BYTES),
            engine.update_weights(update, flush=True),
        )
        await asyncio.gather(
            asyncio.to_thread(self.export.close_group, "test"), engine.leave_weight_group("test")
        )

    async def share(
        self, engine: SGLangEngine, version: int, before: Callable[[int], None] = lambda number: None
    ) -> None:
        async def buckets() -> AsyncGenerator[list[bytes], None]:
            for number in range(len(self.plan)):
                before(number)
                yield self.export.share_bucket(number, BUCKET_BYTES, 1)

        update = TensorUpdate(weight_version=version, num_buckets=len(self.plan), buckets=buckets)
        await engine.update_weights(update, flush=True)

    async def delta(self, engine: SGLangEngine, version: int) -> None:
        now, folder = self.tensors, WeightFolder(self.scratch / "host")
        self.tensors = in_trainer_order(load_file(self.before / "model.safetensors"))
        assert not self.export.write_delta(self.scratch / "delta", None, version - 1)
        self.tensors = now
        assert self.export.write_delta(self.scratch / "delta", version - 1, version)
        folder.copy_version(str(self.before), version - 1)
        path = folder.apply_delta(str(self.scratch / "delta"))
        await engine.update_weights(DiskUpdate(weight_version=version, path=path), flush=True)


@pytest.fixture
def sender(sglang_world: SGLangWorld, tmp_path: Path) -> Iterator[Sender]:
    made = Sender(sglang_world.weights[1], sglang_world.weights[0], tmp_path)
    assert len(made.plan) > 2
    yield made
    made.export.close()


@pytest.mark.parametrize("transport", ["broadcast", "share", "delta"])
async def test_the_weights_are_the_senders_bit_for_bit_when_they_are_sent(
    sglang_world: SGLangWorld, engine: SGLangEngine, sender: Sender, transport: str
) -> None:
    (before,) = await engine.checksums()
    await engine.update_weights(DiskUpdate(weight_version=1, path=str(sglang_world.weights[1])), flush=True)
    expected = await call(engine, PROMPT, 12)
    (loaded,) = await engine.checksums()
    await engine.update_weights(DiskUpdate(weight_version=0, path=str(sglang_world.weights[0])), flush=True)

    await getattr(sender, transport)(engine, 2)
    after = await call(engine, PROMPT, 12)
    assert (await engine.health()).weight_version == 2
    assert after.token_ids == expected.token_ids
    assert after.log_probs == expected.log_probs
    assert [s.weight_version for s in after.finish.version_spans] == [2]
    assert await engine.checksums() == (loaded,) == (sender.export.checksums(),)
    assert all(before[name] != loaded[name] for name in loaded if "norm" not in name)


async def test_a_whole_update_follows_when_one_was_left_in_the_middle(
    engine: SGLangEngine, sender: Sender
) -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise WeightSyncError("the trainer is gone")

    (before,) = await engine.checksums()
    with pytest.raises(WeightSyncError, match="the trainer is gone"):
        await sender.share(engine, 2, before=fail)
    (half,) = await engine.checksums()
    whole = sender.export.checksums()
    assert (await engine.health()).weight_version == 0
    assert {half[name] == whole[name] for name in half if before[name] != whole[name]} == {True, False}
    await sender.share(engine, 3)
    assert await engine.checksums() == (whole,)


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


async def test_no_call_reaches_a_server_from_the_beginning_of_a_release_to_the_last_resume(
    sglang_world: SGLangWorld, engine: SGLangEngine
) -> None:
    server = sglang_world.server
    generate = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}

    async def post(endpoint: str, key: str, body: object) -> tuple[int, str | None]:
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post(f"{server.url}/{endpoint}", headers=headers, json=body) as response:
            return response.status, response.headers.get("Retry-After")

    async with aiohttp.ClientSession() as session:
        running = Call(engine, request(PROMPT, 1500))
        async with asyncio.TaskGroup() as tasks:
            late = tasks.create_task(running.run())
            await running.has_tokens(1)
            assert await post("release_memory_occupation", server.api_key, {}) == (401, None)
            await engine.release_memory(("kv_cache", "cuda_graph", "weights"))  # not interrupted before
            await late
        assert running.finish is not None
        assert running.finish.reason == "abort"
        assert await post("generate", server.api_key, generate) == (503, str(RETRY_AFTER_S))
        with pytest.raises(EngineBusy):
            await call(engine, PROMPT, 2)
        async with session.get(f"{server.url}/health") as health:
            assert health.status == 200
        await engine.resume_memory(("weights",))
        await engine.update_weights(
            DiskUpdate(weight_version=0, path=str(sglang_world.weights[0])), flush=True
        )
        assert await post("generate", server.api_key, generate) == (503, str(RETRY_AFTER_S))
        await engine.resume_memory(("kv_cache", "cuda_graph"))
        assert await post("generate", server.api_key, generate) == (200, None)


async def test_a_server_survives_releases_of_its_memory_while_clients_call_and_leave(
    sglang_world: SGLangWorld, engine: SGLangEngine
) -> None:
    server, rng, statuses = sglang_world.server, random.Random(0), Counter[int]()
    headers = {"Authorization": f"Bearer {server.api_key}"}

    async def call_and_leave() -> None:
        while True:
            body = {
                "input_ids": [rng.randrange(40, 90) for _ in range(rng.randrange(1, 60))],
                "sampling_params": {"max_new_tokens": rng.choice((1, 20, 400))},
                "stream": True,
            }
            async with session.post(f"{server.url}/generate", json=body) as response:
                statuses[response.status] += 1
                for _ in range(rng.choice((0, 1, 5))):
                    await response.content.readany()
                response.close()  # the server notices that later

    async with aiohttp.ClientSession(headers=headers) as session, asyncio.TaskGroup() as tasks:
        callers = [tasks.create_task(call_and_leave()) for _ in range(6)]
        for cycle in range(2):
            while statuses[200] < 10 * (cycle + 1):
                async with session.get(f"{server.url}/model_info"):
                    pass
            await engine.release_memory(("kv_cache", "cuda_graph", "weights"))
            await engine.resume_memory(("weights",))
            await engine.update_weights(
                DiskUpdate(weight_version=0, path=str(sglang_world.weights[0])), flush=True
            )
            await engine.resume_memory(("kv_cache", "cuda_graph"))
        for caller in callers:
            caller.cancel()
    assert statuses.keys() == {200, 503}
    assert await server.died() is None
    assert len((await call(engine, PROMPT, 3)).token_ids) == 3


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


async def test_a_prompt_is_scored_as_it_was_sampled_and_in_any_pieces(engine: SGLangEngine) -> None:
    """Longer than a piece of a chunked prefill (256 tokens), with and without a cached prefix."""
    sampled = await call(engine, PROMPT, 300, temperature=1.0)
    token_ids = sampled.sequence

    async def scores(score_from: int, end: int) -> np.ndarray:
        asked = msgspec.structs.replace(request(token_ids[:end], 0), score_from=score_from)
        ended = await Call(engine, msgspec.structs.replace(asked, return_routing=False)).run()
        assert ended.finish is not None
        assert ended.finish.scores is not None
        return ended.finish.scores

    whole = await scores(1, len(token_ids))
    assert len(whole) == len(token_ids) - 1
    np.testing.assert_allclose(whole[len(PROMPT) - 1 :], sampled.log_probs, atol=1e-4)
    for score_from, end in ((len(PROMPT), len(token_ids)), (270, len(token_ids)), (2, 40), (39, 40)):
        if end <= len(token_ids) and score_from < end:
            np.testing.assert_allclose(
                await scores(score_from, end), whole[score_from - 1 : end - 1], atol=1e-4
            )


async def test_a_prompt_with_the_last_token_of_the_vocabulary_is_scored(engine: SGLangEngine) -> None:
    """SGLang reports id 0 in its place; its log-prob is that of the token."""

    async def score(last: int) -> float:
        asked = msgspec.structs.replace(request([*PROMPT, last], 0), score_from=len(PROMPT))
        ended = await Call(engine, msgspec.structs.replace(asked, return_routing=False)).run()
        assert ended.finish is not None
        assert ended.finish.scores is not None
        return float(ended.finish.scores[0])

    log_probs = [await score(token_id) for token_id in range(VOCAB_SIZE)]
    assert np.exp(log_probs).sum() == pytest.approx(1.0, abs=1e-4)  # it is not that of id 0 a second time


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
@pytest.mark.timeout(400)  # it is started three times
@pytest.mark.long
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
        sender = Sender(sglang_world.weights[1], sglang_world.weights[0], tmp_path)

        def kill(number: int) -> None:
            if number == 1:
                os.killpg(server.pid, signal.SIGKILL)

        with pytest.raises(EngineError):
            await sender.share(engine, 2, before=kill)
        await server.wait()
        await server.start()
        await engine.wait_ready()
        await sender.share(engine, 3)  # from the same memory
        assert (await engine.checksums()) == (sender.export.checksums(),)
        sender.export.close()
        os.killpg(server.pid, signal.SIGSTOP)  # one that is stopped, its guard too, can be ended
    finally:
        await engine.close()
        await replaying.close()
        await server.stop()
    assert group_of(server.pid) == []


async def test_the_end_of_its_log_is_reported_when_a_server_does_not_start(tmp_path: Path) -> None:
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


async def stream_sizes(
    engine: SGLangEngine, asked: GenerateRequest, interrupt_at: int
) -> tuple[list[int], Finish]:
    """Make a call; return the number of tokens of each event, and its finish."""
    sizes: list[int] = []
    interrupted: asyncio.Task[None] | None = None
    async for event in engine.generate(asked):
        if isinstance(event, Finish):
            if interrupted is not None:
                await interrupted
            return sizes, event
        if isinstance(event, Chunk):
            sizes.append(len(event.token_ids))
            if sum(sizes) >= interrupt_at and interrupted is None:
                interrupted = asyncio.create_task(engine.interrupt("abort"))
    raise AssertionError("a stream without a finish")


async def test_an_event_has_as_many_tokens_as_asked_for_and_an_abort_delivers_the_rest(
    engine: SGLangEngine,
) -> None:
    def asked(tokens: int) -> GenerateRequest:
        return msgspec.structs.replace(request(PROMPT, tokens), stream_interval=8)

    sizes, finish = await stream_sizes(engine, asked(20), interrupt_at=1000)
    assert sum(sizes) == 20
    assert finish.reason == "length"
    # The first token at once, then eight at a time, unless events are joined.
    assert {*itertools.accumulate(sizes)} <= {1, 9, 17, 20}
    sizes, finish = await stream_sizes(engine, asked(1500), interrupt_at=9)
    await engine.resume_generation("abort")
    assert finish.reason == "abort"
    # `CallAccount` compares the number of tokens that have come with the server's own: nothing is lost.
    assert sum(sizes) == finish.version_spans[-1].end < 1500
