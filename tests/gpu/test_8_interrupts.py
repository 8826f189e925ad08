"""Interrupted calls continue under CUDA graphs and overlapped scheduling, with narrow routing rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from async_rl.engine_protocol import InterruptMode
from async_rl.engines.sglang.client import SGLangEngine
from benchmarks.real_parts import random_prompts
from tests.gpu import device
from tests.gpu.models import build, serving
from tests.support.engine_calls import Call, call, request
from tests.support.sglang_world import never_stop

pytestmark = pytest.mark.proof(needs="engine", seconds=300, value=90)
MODES: tuple[InterruptMode, ...] = ("abort", "retract", "in_place")
NUM_CALLS = 6
TOKENS = device.sized(400, 60)
INTERRUPTED_AFTER = 20
CONTINUED = 5
"""Tokens after an interruption that show where a call went on."""


async def test_interrupted_calls_answer_as_uninterrupted_ones(tmp_path: Path, measure) -> None:
    """Greedy calls that are interrupted have the tokens and experts of calls that are not.

    Products in other batches are rounded otherwise, so that a call may take another token of nearly the same
    log-prob at any time. A token that was lost or came twice would change all calls at their interruptions.
    """
    model = build(tmp_path / "model")
    never_stop(model)
    prompts = [prompt.tolist() for prompt in random_prompts(NUM_CALLS, seed=0)]
    async with serving(model, tmp_path, narrow=True) as engine:
        info = await engine.http.get_info("server_info", dict)
        whole = await asyncio.gather(*(call(engine, prompt, TOKENS) for prompt in prompts))
        for mode in MODES:
            check_interrupted(mode, whole, await interrupt(engine, prompts, mode), measure)
    assert not info["disable_overlap_schedule"]
    graphs = info["cuda_graph_config"]
    device.end_rehearsal()
    assert graphs["decode"]["backend"] != "disabled"


def check_interrupted(
    mode: str, whole: Sequence[Call], interrupted: Sequence[tuple[list[int], Call, int]], measure
) -> None:
    equal, rows, reached, continued = [], [], 0, 0
    for one, (tokens, last, cut) in zip(whole, interrupted, strict=True):
        assert len(tokens) == len(one.token_ids) == TOKENS
        assert last.trace.rows.dtype == np.uint8
        differ = np.array(tokens) != np.array(one.token_ids)
        equal.append(end := int(differ.argmax()) if differ.any() else TOKENS)
        num_fed = len(one.asked.input_ids) + end - 1
        rows.append((last.expert_sets[:num_fed] == one.expert_sets[:num_fed]).all(axis=-1).mean())
        reached += end >= cut
        continued += end >= min(TOKENS, cut + CONTINUED)
    measure(f"{mode}: tokens before another one, mean", float(np.mean(equal)), f"of {TOKENS}")
    measure(f"{mode}: calls equal until interrupted, and after", continued, f"of {reached}")
    measure(f"{mode}: equal experts of layers up to there", 100 * float(np.mean(rows)), "% of rows")
    assert min(rows) > 0.95
    assert continued > max(1, reached / 2)


async def interrupt(
    engine: SGLangEngine, prompts: Sequence[Sequence[int]], mode: InterruptMode
) -> list[tuple[list[int], Call, int]]:
    """Interrupt calls; return the tokens of each, the call with its rows, and the tokens before that."""
    calls = [Call(engine, request(prompt, TOKENS)) for prompt in prompts]
    async with asyncio.TaskGroup() as group:
        for each in calls:
            group.create_task(each.run())
        for each in calls:
            await each.has_tokens(INTERRUPTED_AFTER)
        await engine.interrupt(mode)
        cuts = [len(each.token_ids) for each in calls]
        assert max(cuts) < TOKENS
        await engine.resume_generation(mode)
    if mode != "abort":
        return [(each.token_ids, each, cut) for each, cut in zip(calls, cuts, strict=True)]
    ends = await asyncio.gather(
        *(call(engine, each.sequence, TOKENS - cut) for each, cut in zip(calls, cuts, strict=True))
    )
    return [
        ([*each.token_ids, *end.token_ids], end, cut)
        for each, end, cut in zip(calls, ends, cuts, strict=True)
    ]
