"""A sender of weights survives the death of a rank of an engine: NCCL, with both ranks on one GPU."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

import pytest

from async_rl.engine_protocol import DistributedUpdate, GroupInvite, WeightBucket
from async_rl.engines.group_liveness import SILENT_S
from async_rl.engines.sglang.server import free_port
from async_rl.errors import EngineError
from async_rl.weights.buckets import plan_buckets, spec_of
from tests.gpu import device
from tests.gpu.sender import bucket_of, send
from tests.support.weight_receiver import ReceivingEngine, digest_of

NUM_BUCKETS = 4
BUCKET_BYTES = device.sized(256 << 20, 4 << 20)
LIMIT_S = SILENT_S + 3


@pytest.mark.proof(needs="trainer", seconds=60, value=55)
@pytest.mark.parametrize(("when", "at"), [("never", ""), ("before", "0"), ("during", "1"), ("between", "1")])
async def test_a_sender_returns_when_a_rank_is_killed(
    when: str, at: str, measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a rank dies before, during or between broadcasts, the sender returns in time and closes the group.

    If none dies, all arrives.
    """
    device.allow_two_ranks(monkeypatch)
    tensors = [(f"tensor {number}", bucket_of(number, BUCKET_BYTES)) for number in range(NUM_BUCKETS)]
    parts = plan_buckets([spec_of(*each) for each in tensors], BUCKET_BYTES)
    plan = [WeightBucket(0, each) for each in (*parts, parts[0])]
    invite = GroupInvite(
        group_name="proof",
        backend=device.BACKEND,
        host="127.0.0.1",
        port=free_port("127.0.0.1"),
        world_size=2,
        rank_offset=1,
    )

    async def receive() -> None:
        await engine.join_weight_group(invite)
        update = DistributedUpdate(weight_version=1, group_name="proof", buckets=tuple(plan))
        with suppress(EngineError):
            await engine.update_weights(update, flush=True)

    engine = await ReceivingEngine.start("engine-0", *(("SIGKILL", when, at) if at else ()))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            await engine.command("moved")  # it has started: the sender waits for 20 s only
            loop = asyncio.get_running_loop()
            sending = loop.run_in_executor(pool, send, invite, NUM_BUCKETS, BUCKET_BYTES)
            sent, _ = await asyncio.gather(sending, receive())
        finally:
            await engine.end()
    measure("the sender returned after", sent.sending_s, "s")
    measure("the group was closed in", sent.closing_s, "s")
    assert sent.is_usable == (not at)
    assert max(sent.sending_s, sent.closing_s) < LIMIT_S
    assert engine.digest == ("" if at else digest_of(plan, dict(tensors)))
