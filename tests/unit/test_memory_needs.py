"""The memory of trajectories that `async-rl check` reports, and that workers keep to."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from async_rl import routing
from async_rl.config import Config, parse_config
from async_rl.engine_protocol import EngineFacts
from async_rl.run.memory_needs import describe_memory, trajectory_bytes

QWEN = EngineFacts(
    num_layers=48,
    moe_layers=tuple(range(48)),
    num_experts=128,
    top_k=8,
    vocab_size=151936,
    context_length=40960,
)


def config_with(replay: str = "r3", **rollout: Any) -> Config:
    return parse_config(
        {
            "model": {"path": "m"},
            "data": {"path": "d"},
            "rollout": {"max_context_tokens": 32768, **rollout},
            "routing": {"replay": replay},
        }
    )


def test_rows_count_as_sent_and_before_and_after_a_merge() -> None:
    rows = 3 * 48 * 8
    assert trajectory_bytes(config_with(), QWEN) == 32768 * (rows + 48)
    assert trajectory_bytes(config_with(max_branches=3), QWEN) == 4 * 32768 * (rows + 48)
    assert trajectory_bytes(config_with(replay="off"), QWEN) == 32768 * 48


def test_layers_without_experts_have_no_rows() -> None:
    some = msgspec.structs.replace(QWEN, moe_layers=tuple(range(3, 48)))
    assert trajectory_bytes(config_with(), some) == 32768 * (3 * 45 * 8 + 48)


@pytest.mark.parametrize("num_answers", [1, 2, 32])
def test_rows_in_several_answers_are_merged_in_what_is_reported(num_answers: int) -> None:
    tokens = np.arange(2049, dtype=np.int32)
    config = config_with(max_context_tokens=len(tokens))
    rows = np.tile(np.arange(8, dtype=np.uint8), (len(tokens) - 1, 48, 1))
    cuts = [len(rows) * i // num_answers for i in range(num_answers + 1)]
    answers = [
        routing.make_trace(rows[:end][begin:], 128, 0, moe_layers=QWEN.moe_layers, token_ids=tokens[:end])
        for begin, end in pairwise(cuts)
    ]
    tracemalloc.start()
    try:
        merged = None
        for begin, answer in zip(cuts, answers, strict=False):
            merged = routing.splice(merged, answer, start=begin)
        assert merged is not None
        routing.check(routing.fit(merged, tokens), len(tokens), QWEN.moe_layers)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows.nbytes + peak < trajectory_bytes(config, QWEN)


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        (0, "at most 9.4 GiB in the driver: 256 of up to 38 MiB"),
        (1, "at most 9.4 GiB in each rollout worker: 256 of up to 38 MiB"),
        (2, "at most 9.4 GiB in each rollout worker: 256 of"),  # the other one may be missing
        (5, "at most 2.3 GiB in each rollout worker: 64 of"),
    ],
)
def test_each_worker_has_its_share_while_one_of_the_others_is_missing(workers: int, found: str) -> None:
    config = config_with(num_workers=workers, max_concurrent_trajectories=256)
    assert found in describe_memory(config, QWEN)
