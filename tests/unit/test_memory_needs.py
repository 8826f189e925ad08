"""The memory of trajectories that `async-rl check` reports, and that workers keep to."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import msgspec
import pytest

from async_rl.config import Config
from async_rl.engine_protocol import EngineFacts
from async_rl.rollout.session.tokens import GrowingMask
from async_rl.run.memory_needs import describe_memory, trajectory_bytes
from async_rl.types import SamplingMask
from tests.support.run_config import config_with

QWEN = EngineFacts(
    num_layers=48,
    moe_layers=tuple(range(48)),
    num_experts=128,
    top_k=8,
    vocab_size=151936,
    context_length=40960,
)


def replaying(replay: str = "r3", **rollout: Any) -> Config:
    return config_with(f"routing.replay={replay}", rollout={"max_context_tokens": 32768, **rollout})


def test_rows_of_layers_with_experts_count_as_sent_and_before_and_after_a_merge() -> None:
    rows = math.ceil(3.05 * 48 * 8)
    assert trajectory_bytes(replaying(), QWEN) == 32768 * (rows + 48)
    assert trajectory_bytes(replaying(max_branches=3), QWEN) == 4 * 32768 * (rows + 48)
    assert trajectory_bytes(replaying(replay="off"), QWEN) == 32768 * 48
    some = msgspec.structs.replace(QWEN, moe_layers=tuple(range(3, 48)))
    assert trajectory_bytes(replaying(), some) == 32768 * (math.ceil(3.05 * 45 * 8) + 48)


def test_a_trajectory_whose_flips_are_measured_keeps_the_rows_of_each_version_when_they_are_spliced() -> None:
    config = replaying(max_staleness=5)
    routing = msgspec.structs.replace(config.routing, merge="splice", flip_sample=1.0)
    config = msgspec.structs.replace(config, routing=routing)
    assert trajectory_bytes(config, QWEN) == 32768 * ((3 + 6) * 48 * 8 + 48)


@pytest.mark.parametrize("num_calls", [1, 4])
def test_the_masks_of_a_truncated_distribution_fit_what_is_reported(num_calls: int) -> None:
    num_tokens, top_k = 4096, 64
    config = replaying(
        "off", max_context_tokens=num_tokens, top_k=top_k, top_p=0.99, max_concurrent_trajectories=1
    )
    per_chunk = SamplingMask.of([list(range(70_000, 70_000 + top_k))] * 8)
    tracemalloc.start()
    try:
        parts = []
        for _ in range(num_calls):
            call, length = GrowingMask(), num_tokens // num_calls
            for _ in range(0, length, len(per_chunk)):
                call.extend(per_chunk)
            parts.append(call.part(0, length))
        joined = SamplingMask.joined([*parts, SamplingMask.untruncated(1)])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(joined) == num_tokens + 1
    reported = trajectory_bytes(config, QWEN)
    assert reported / 2 < peak < reported


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        (0, "at most 9.5 GiB in the driver: 256 of up to 38 MiB"),
        (1, "at most 9.5 GiB in each rollout worker: 256 of up to 38 MiB"),
        (2, "at most 9.5 GiB in each rollout worker: 256 of"),  # the other one may be missing
        (5, "at most 2.4 GiB in each rollout worker: 64 of"),
    ],
)
def test_each_worker_has_its_share_while_one_of_the_others_is_missing(workers: int, found: str) -> None:
    config = replaying(num_workers=workers, max_concurrent_trajectories=256)
    assert found in describe_memory(config, QWEN)
