"""Stop strings end a turn where they would have ended it without interruptions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from async_rl.data.chat_format import load_chat_format
from async_rl.engine_protocol import Chunk, EngineFacts
from async_rl.rollout.session.stop_strings import StopStringAtSeam
from async_rl.types import Trajectory
from tests.support.scripted import ScriptedEngine, sampled
from tests.support.sessions import PROMPT, Bench, Watched, row_versions, rows_under, simulated

FACTS = EngineFacts(
    num_layers=1, moe_layers=(0,), num_experts=8, top_k=2, vocab_size=512, context_length=1024
)


def letters(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def seam_of(before: str, *stop: str) -> StopStringAtSeam:
    return StopStringAtSeam(letters, stop, np.array([*map(ord, before)], np.int32))


@pytest.mark.parametrize(
    ("before", "chunks", "ends"),
    [
        ("so <E", ["ND", "> more"], [None, 1]),
        ("so <EN", ["D> more"], [2]),
        ("so ", ["<END> more"], [5]),  # the engine may strip white space at its first token
        ("so", [" <END> more"], [None]),  # the engine sees it as a whole
        ("so <E", ["LSE> <END>"], [None]),
        ("<EN" * 40, ["D>"], [2]),
        ("so S", ["TO", "P"], [None, 1]),
    ],
)
def test_a_stop_string_is_found_when_it_was_split(
    before: str, chunks: list[str], ends: list[int | None]
) -> None:
    seam = seam_of(before, "<END>", "STOP")
    assert [seam.find_end([*map(ord, chunk)]) for chunk in chunks] == ends


def test_the_text_has_special_tokens_when_a_stop_string_names_one(calculator: Path) -> None:
    chat = load_chat_format(calculator / "model")
    before, after = chat.encode("So <|im"), chat.encode("_end|>\n").tolist()
    end = StopStringAtSeam(chat.raw_text, ["<|im_end|>"], before).find_end(after)
    assert end is not None
    assert chat.raw_text([*before, *after[:end]]) == "So <|im_end|>"
    assert chat.raw_text([chat.end_of_turn_id]) != chat.decode([chat.end_of_turn_id]) == ""


async def one_turn(
    stop: Sequence[str], abort_at: Sequence[int] = (), version: int | None = None
) -> Trajectory:
    """A turn of an engine that is interrupted whenever the sequence has these lengths."""
    policy = Watched()
    bench = Bench(simulated(policy, decode_step_s=0.01, prefill_tokens_per_s=1e9), max_new_tokens=24)
    bench.start()
    async with asyncio.TaskGroup() as tasks:
        turn = tasks.create_task(bench.session.generate(stop=stop))
        for length in abort_at:
            await policy.reaches(length)
            await (bench.abort() if version is None else bench.bump(version))
    assert turn.result().finish_reason == "stop"
    return await bench.finish()


async def test_a_turn_is_the_same_wherever_it_is_interrupted() -> None:
    await one_turn(["no such text", "2"])  # any token has a 2 soon
    free = Bench(simulated(Watched(), decode_step_s=0.01, prefill_tokens_per_s=1e9), max_new_tokens=24)
    free.start()
    words = (await free.session.generate()).text.split(" ")
    stop = " ".join(words[9:13])[1:-1]  # over four tokens, and not whole ones
    whole = await one_turn([stop])
    assert whole.num_sampled_tokens == 13
    for position in range(1, 14):
        for version in (None, 1):
            cut = await one_turn([stop], [PROMPT + position], version)
            assert cut.token_ids.tolist() == whole.token_ids.tolist()
            assert len(cut.rollout_log_probs) == len(cut.weight_versions) == len(cut.token_ids)
            assert cut.trace is not None
            assert cut.trace.valid.all()
            assert np.array_equal(cut.trace.rows, rows_under(cut, row_versions(cut.trace)))
    twice = await one_turn([stop], [PROMPT + 11, PROMPT + 12])
    assert twice.token_ids.tolist() == whole.token_ids.tolist()


async def test_a_chunk_is_cut_and_its_call_is_left_when_a_stop_string_ends_in_it() -> None:
    engine = ScriptedEngine(
        scripts=[
            lambda r: sampled(3, "abort", 0, prompt=PROMPT),
            lambda r: [Chunk.of([103, 104, 105], [-0.1, -0.2, -0.3])],
            lambda r: sampled(0, "length", 0, prompt=len(r.input_ids)),
        ]
    )
    bench = Bench(engine, facts=FACTS)
    bench.start()
    texts: list[str] = []
    turn = await bench.session.generate(stop=["102 103 104"], on_text=texts.append)
    assert turn.token_ids.tolist() == [100, 101, 102, 103, 104]
    assert turn.rollout_log_probs.tolist() == pytest.approx([-0.5, -0.5, -0.5, -0.1, -0.2])
    assert turn.finish_reason == "stop"
    assert "105" not in "".join(texts)
    assert bench.counted("failovers_total") == 0, "the call is left before its finish, which never comes"
    trajectory = await bench.finish()
    assert trajectory.trace is not None
    assert trajectory.trace.valid.all()
    assert len(trajectory.trace.rows) == PROMPT + 5 - 1


@pytest.mark.parametrize("stop", [[""], ["END", ""], [5]])
async def test_stop_strings_are_refused_when_they_cannot_end_a_turn(stop: list[str]) -> None:
    bench = Bench(ScriptedEngine(scripts=[lambda r: sampled(2, "stop", 0, prompt=PROMPT)]))
    bench.start()
    with pytest.raises(ValueError, match="none of them empty"):
        await bench.session.generate(stop=stop)
    await bench.session.generate(stop="END")  # it is not taken for its letters
    assert bench.engines[0].requests[0].sampling.stop == ("END",)  # type: ignore[attr-defined]
