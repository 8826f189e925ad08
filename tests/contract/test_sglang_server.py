"""What only a real SGLang server can show: its process, its keys, its memory, its weights, and what it sends.

`test_real_parts.py` sends weights by each transport.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import aiohttp
import msgspec
import numpy as np
import psutil
import pytest
import torch
from torch.multiprocessing import reductions

from async_rl.config import WeightsConfig
from async_rl.engine_protocol import DiskUpdate, GroupInvite, TensorSpec
from async_rl.engines.device_memory import stop_engine
from async_rl.engines.pool import EnginePool
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.generate_call import encode_request
from async_rl.engines.sglang.memory_gate import RETRY_AFTER_S
from async_rl.engines.sglang.server import SGLangServer, free_port
from async_rl.errors import ConfigError, EngineBusy, EngineError, WeightSyncError
from async_rl.observability.metrics import Metrics
from async_rl.trainer_protocol import Trainer
from async_rl.types import VersionSpan
from async_rl.weights import checksums
from async_rl.weights.broadcast import WeightGroup
from async_rl.weights.checksums import VersionVerifier
from async_rl.weights.shared_memory import payload_for
from tests.support.engine_calls import Call, call, request
from tests.support.scripted import RecordingTrainer
from tests.support.sglang_world import VOCAB_SIZE, SGLangWorld
from tests.support.weight_sender import WeightSender

pytestmark = [pytest.mark.real, pytest.mark.sglang]

PROMPT = [40, 41, 42, 43]

LONG_PROMPT = [30 + i % 200 for i in range(1500)]
"""Long enough that its rows do not arrive with its tokens."""
BUDGET = 500
"""Tokens of a call that is aborted before it has them all."""


# -- weights --------------------------------------------------------------------------------------------


async def test_a_whole_update_follows_when_one_was_left_in_the_middle(
    sglang_world: SGLangWorld, engine: SGLangEngine, tmp_path: Path
) -> None:
    sender = WeightSender(sglang_world, tmp_path)

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
    sender.export.close()


async def test_weights_are_sent_when_the_engine_has_memory_for_nothing_else(
    sglang_world: SGLangWorld, engine: SGLangEngine, tmp_path: Path
) -> None:
    sender = WeightSender(sglang_world, tmp_path)
    stopped = await stop_engine(engine, engine.interrupt)
    loadable = await (await stopped.release_all()).resume_weights()
    empty = await loadable.release_weights()  # a hand-over that was cut short
    loadable = await empty.resume_weights()
    await sender.share(engine, 2)
    await loadable.resume_rest()
    assert (await engine.health()).weight_version == 2
    assert await engine.checksums() == (sender.export.checksums(),)
    assert len((await call(engine, PROMPT, 3)).token_ids) == 3
    sender.export.close()


def test_sglang_reads_the_handle_of_a_bucket_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its allow list has all that is in the pickle, and it knows the GPU by its UUID."""
    from sglang.srt.utils import MultiprocessingSerializer, patch_torch

    arguments = (torch.Tensor, torch.Size([8]), (1,), 0, torch.storage.TypedStorage, torch.uint8, 0)
    others = (b"handle", 8, 0, False, b"counter", 0, b"event", True)
    handle = reductions.rebuild_cuda_tensor, (*arguments, *others)
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: handle)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid="gpu-a"))
    spec = TensorSpec(name="a", dtype="float32", shape=(2,))
    payload = payload_for(cast(torch.Tensor, SimpleNamespace(is_cuda=True)), [spec])
    opened: list[object] = []

    def of_number(number: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"gpu-{'bca'[number]}")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", of_number)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", patch_torch._rebuild_cuda_tensor_modified)
    monkeypatch.setattr(
        reductions, "_rebuild_cuda_tensor_original", lambda *given: opened.append(given), raising=False
    )
    MultiprocessingSerializer.deserialize(payload)
    assert opened == [(*arguments[:6], 2, *others)]


def test_sending_weights_fails_when_no_engine_joins() -> None:
    where = {"host": "127.0.0.1", "port": free_port("127.0.0.1"), "world_size": 2, "rank_offset": 1}
    with pytest.raises(WeightSyncError, match="not all engines joined the weight-update group alone-0"):
        WeightGroup(GroupInvite(group_name="alone", backend="gloo", **where), timeout_s=1)


async def test_old_weights_stay_when_new_ones_cannot_be_read(engine: SGLangEngine, tmp_path: Path) -> None:
    before = await call(engine, PROMPT, 4)
    with pytest.raises(WeightSyncError, match="refused weight version 9"):
        await engine.update_weights(DiskUpdate(weight_version=9, path=str(tmp_path)), flush=True)
    assert (await engine.health()).weight_version == 0
    assert (await call(engine, PROMPT, 4)).log_probs == pytest.approx(before.log_probs, abs=1e-5)


async def test_weights_that_stay_are_found_by_sums_and_by_the_canary(
    sglang_world: SGLangWorld,
    engine: SGLangEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checksums, "WATCH_EVERY", 1)
    metrics, trainer = Metrics(), RecordingTrainer()
    pool = EnginePool(metrics, lambda: 0.0)
    verifier = VersionVerifier(WeightsConfig(), pool=pool, trainer=cast(Trainer, trainer), metrics=metrics)

    async def load(version: int, path: Path) -> float | None:
        trainer.checksum_seed = version  # the trainer's weights change with every version
        await engine.interrupt("abort")
        await engine.update_weights(DiskUpdate(weight_version=version, path=str(path)), flush=True)
        await verifier.expect_version(version)
        await verifier.verify_version(engine, version, from_files=True)
        labels = {"engine": "engine-0"}
        return metrics.registry.get_sample_value("async_rl_served_weights_unchanged", labels)

    old, new = sglang_world.weights
    assert [await load(version, old) for version in (1, 2, 3)] == [0, 1, 1]
    assert "serves the weights of version 1: no log-prob of a fixed text" in caplog.text
    assert "serves the weights of version 1: no checksum" in caplog.text
    assert await load(4, new) == 0


# -- keys, processes and memory --------------------------------------------------------------------------


async def test_each_key_opens_its_own_doors_when_both_are_set(
    sglang_world: SGLangWorld, engine: SGLangEngine
) -> None:
    server = sglang_world.server
    for method, endpoint, key, status in (
        ("GET", "model_info", None, 401),
        ("GET", "model_info", server.api_key, 200),
        ("POST", "flush_cache", None, 401),
        ("POST", "flush_cache", server.api_key, 401),
        ("POST", "flush_cache", server.admin_key, 200),
    ):
        assert (await sglang_world.ask(method, endpoint, key)).status == status
    told = (await sglang_world.ask("GET", "server_info", server.api_key)).text
    assert '"tp_size"' in told
    assert server.admin_key not in told


async def test_no_call_reaches_a_server_from_the_beginning_of_a_release_to_the_last_resume(
    sglang_world: SGLangWorld, engine: SGLangEngine
) -> None:
    key = sglang_world.server.api_key
    generate = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}

    async def try_to_generate() -> tuple[int, str | None]:
        return (await sglang_world.ask("POST", "generate", key, generate))[:2]

    running = Call(engine, request(PROMPT, 1500))
    async with asyncio.TaskGroup() as tasks:
        late = tasks.create_task(running.run())
        await running.has_tokens(1)
        assert (await sglang_world.ask("POST", "release_memory_occupation", key, {})).status == 401
        await engine.release_memory(("kv_cache", "cuda_graph", "weights"))  # not interrupted before
        await late
    assert running.finish is not None
    assert running.finish.reason == "abort"
    assert await try_to_generate() == (503, str(RETRY_AFTER_S))
    with pytest.raises(EngineBusy):
        await call(engine, PROMPT, 2)
    assert (await sglang_world.ask("GET", "health", None)).status == 200
    await engine.resume_memory(("weights",))
    await sglang_world.load(engine, 0)
    assert await try_to_generate() == (503, str(RETRY_AFTER_S))
    await engine.resume_memory(("kv_cache", "cuda_graph"))
    assert await try_to_generate() == (200, None)


def test_the_keys_and_ports_cannot_be_seen_from_outside_when_the_server_runs(
    sglang_world: SGLangWorld,
) -> None:
    server = sglang_world.server
    command_lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in group_of(server.pid)]
    assert len(command_lines) >= 3
    assert any("--weight-version=0" in line for line in command_lines)
    for secret in (server.api_key, server.admin_key):
        assert not any(secret in line for line in command_lines)
        assert secret not in server.log_path.read_text()
    addresses = {
        connection.laddr.ip
        for pid in group_of(server.pid)
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}  # the store that SGLang's own ranks meet at included


def group_of(group: int | None) -> list[int]:
    """The living processes of a group."""
    members = []
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
    return members


@pytest.mark.case(3)
@pytest.mark.timeout(400)  # it is started three times
@pytest.mark.long
async def test_a_server_can_be_killed_and_started_again(tmp_path: Path) -> None:
    world = SGLangWorld(tmp_path, routing=False, index=1, max_running_requests=2)
    server, engine, replaying = world.server, world.engine(), world.engine(routing=True)
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
        assert "ended with code" in str((await server.state()).exit_reason)

        await server.start()
        await engine.wait_ready()
        assert (await engine.health()).weight_version == 0
        assert len((await call(engine, PROMPT, 5)).token_ids) == 5
        sender = WeightSender(world, tmp_path)

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


# -- what it sends ---------------------------------------------------------------------------------------


async def test_a_prompt_is_scored_as_it_was_sampled_and_in_any_pieces(engine: SGLangEngine) -> None:
    """Longer than a piece of a chunked prefill (256 tokens), with and without a cached prefix."""
    sampled = await call(engine, PROMPT, 300, temperature=1.0)
    token_ids = sampled.sequence

    async def scores(score_from: int, end: int | list[int]) -> np.ndarray:
        tokens = token_ids[:end] if isinstance(end, int) else end
        asked = msgspec.structs.replace(request(tokens, 0), score_from=score_from)
        ended = await Call(engine, msgspec.structs.replace(asked, return_routing=False)).run()
        assert ended.finish is not None
        assert ended.finish.scores is not None
        return ended.finish.scores

    whole = await scores(1, len(token_ids))
    assert len(whole) == len(token_ids) - 1
    np.testing.assert_allclose(whole[len(PROMPT) - 1 :], sampled.log_probs, atol=1e-4)
    for score_from, end in ((len(PROMPT), len(token_ids)), (270, len(token_ids)), (2, 40), (39, 40)):
        np.testing.assert_allclose(await scores(score_from, end), whole[score_from - 1 : end - 1], atol=1e-4)
    # SGLang reports id 0 in the place of the vocabulary's last token; the log-prob is not that of id 0.
    every = await asyncio.gather(*(scores(len(PROMPT), [*PROMPT, last]) for last in range(VOCAB_SIZE)))
    assert np.exp(np.concatenate(every)).sum() == pytest.approx(1.0, abs=1e-4)


async def test_an_abort_delivers_the_tokens_that_wait_for_their_event(engine: SGLangEngine) -> None:
    running = Call(engine, msgspec.structs.replace(request(PROMPT, 1500), stream_interval=8))
    async with asyncio.TaskGroup() as group:
        group.create_task(running.run())
        await running.has_tokens(9)
        await engine.interrupt("abort")
    assert running.finish is not None
    assert running.finish.reason == "abort"
    # `CallAccount` compares the number of tokens that have come with the server's own: nothing is lost.
    assert len(running.token_ids) == running.finish.version_spans[-1].end < 1500


async def last_event_of_an_abort(server: SGLangServer, *, omit: bool) -> str:
    """Return the last event of a running call that is aborted, as the server sends it."""
    asked = msgspec.structs.replace(request(LONG_PROMPT, BUDGET), rows_if_aborted=not omit)
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


async def test_everything_else_precedes_the_rows_when_sglang_ends_an_aborted_call(
    sglang_world: SGLangWorld, engine: SGLangEngine
) -> None:
    event = await last_event_of_an_abort(sglang_world.server, omit=False)
    meta = json.loads(event)["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    fields = ("output_ids", "finish_reason", "weight_version", "output_token_logprobs")
    fields += ("completion_tokens", "cached_tokens", "weight_versions", "routed_experts")
    places = [event.index(f'"{field}":') for field in fields]
    assert all(before < after for before, after in pairwise(places)), dict(zip(fields, places, strict=True))
    rows = len(LONG_PROMPT) + meta["completion_tokens"] - 1
    facts = sglang_world.facts
    assert len(meta["routed_experts"]) == -(-rows * facts.num_layers * facts.top_k * 4 // 3) * 4
    aborted = Call(engine, msgspec.structs.replace(request(LONG_PROMPT, BUDGET), rows_if_aborted=False))
    async with asyncio.TaskGroup() as group:
        group.create_task(aborted.run())
        await aborted.has_tokens(3)
        await engine.interrupt("abort")
    assert aborted.finish is not None
    assert (aborted.finish.reason, aborted.finish.routing) == ("abort", None)
    span = VersionSpan(start=0, end=len(aborted.token_ids), weight_version=0)
    assert aborted.finish.version_spans == (span,)
    # All that was fed is still cached: a recovery returns the rows that the sampling used.
    recovered = await call(engine, aborted.sequence, 0)
    assert recovered.finish is not None
    assert recovered.finish.cached_tokens == len(recovered.trace.rows) == len(aborted.sequence) - 1


async def test_an_aborted_call_has_no_rows_when_it_asks_for_none(
    sglang_world: SGLangWorld, engine: SGLangEngine
) -> None:
    meta = json.loads(await last_event_of_an_abort(sglang_world.server, omit=True))["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert "routed_experts" not in meta
    # A call that ends by itself has its rows, whatever it asks for in case of an abort.
    whole = Call(engine, msgspec.structs.replace(request(LONG_PROMPT, 4), rows_if_aborted=False))
    await whole.run()
    assert whole.finish is not None
    assert whole.finish.reason == "length"
    assert len(whole.trace.rows) == len(LONG_PROMPT) + 3
