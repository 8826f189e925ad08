import asyncio
import threading
from collections.abc import Sequence
from typing import Any, Final, cast
from unittest.mock import Mock

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers.models import BPE

from async_rl.engine_protocol import Chunk, Engine, EngineFacts, Finish
from async_rl.engines.pool import EngineState
from async_rl.errors import ConfigError, EngineError, PromptTooLong, RequestRefused, VersionMismatch
from async_rl.rollout.session import rollout_session
from async_rl.runtime.supervision import Nursery
from async_rl.types import VersionSpan
from tests.support.scripted import Script, ScriptedEngine, sampled
from tests.support.sessions import PROMPT, Bench
from tests.support.talk import lines, talking

FACTS = EngineFacts(
    num_layers=1, moe_layers=(0,), num_experts=8, top_k=2, vocab_size=512, context_length=1024
)


def make_bench(*engines: ScriptedEngine, **changes: Any) -> Bench:
    return Bench(*cast(tuple[Engine, ...], engines), facts=FACTS, **changes)


def bench(scripts: Sequence[Script], *, start: bool = True, **changes: Any) -> Bench:
    made = make_bench(ScriptedEngine(scripts=scripts), **changes)
    if start:
        made.start()
    return made


def ids_of(trajectory) -> list[int]:
    return trajectory.token_ids[PROMPT:].tolist()


async def test_a_turn_that_is_continued_is_one_message_and_one_text():
    """So that rewards see the whole answer."""
    b = bench(
        [
            lambda r: sampled(4, "length", 0, prompt=PROMPT),
            lambda r: sampled(3, "length", 0, prompt=PROMPT + 4, first=200),
            lambda r: sampled(2, "stop", 0, prompt=PROMPT + 7, first=220),
            lambda r: sampled(2, "stop", 0, prompt=len(r.input_ids), first=240),
        ],
        max_branches=1,
    )
    session, decode = b.session, b.context.chat.decode
    first = await session.generate(max_new_tokens=4)
    assert session.completion.text == first.text
    async with session.branch() as other:
        await other.generate(max_new_tokens=3)
        assert [m["role"] for m in other.messages] == ["user", "assistant"]
    turn = await session.generate()
    whole = decode(np.array([100, 101, 102, 103, 220, 221]))
    assert turn.text == decode(np.array([220, 221]))
    assert session.completion.text == whole
    assert session.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": whole}]
    session.add_messages([{"role": "user", "content": "more"}])
    last = await session.generate()
    assert session.completion.text == last.text
    assert [m["role"] for m in session.messages] == ["user", "assistant", "user", "assistant"]


async def test_recovered_rows_of_weights_that_this_run_has_not_published_are_discarded():
    b = bench(
        [
            lambda r: sampled(16, "length", 0, prompt=PROMPT, rows=False),
            lambda r: sampled(0, "length", 7, prompt=len(r.input_ids)),
            lambda r: sampled(0, "length", 0, prompt=len(r.input_ids)),
        ],
        newest_version=0,
    )
    await b.session.generate()
    trajectory = await b.finish()
    assert trajectory.trace.valid.all()
    assert (trajectory.trace.rows[:, 0, 0] == 0).all()
    assert b.counted("answers_discarded_total", reason="unpublished_weights") == 1


@pytest.mark.parametrize("interrupt", ["retract", "in_place"])
async def test_tokens_count_as_old_as_their_call_when_it_dies_after_weights_changed_in_between(interrupt):
    class Dying(ScriptedEngine):
        async def generate(self, request):
            yield Chunk.of([100, 101], [-1.0] * 2)
            b.pool.hold_engine("engine-0")
            b.pool.serve_engine("engine-0", 1)
            # These may have been in transit before that.
            yield Chunk.of([102, 103], [-1.0] * 2)
            raise EngineError("connection lost")

    second = ScriptedEngine("engine-1", [lambda r: sampled(1, "stop", 1, prompt=PROMPT + 4, first=200)])
    b = make_bench(Dying("engine-0"), second, interrupt=interrupt)
    await b.begin()
    trajectory = await b.finish()
    assert ids_of(trajectory) == [100, 101, 102, 103, 200]
    assert trajectory.weight_versions[PROMPT:].tolist() == [0, 0, 0, 0, 1]


async def test_an_answer_is_refused_when_its_weights_are_older_than_its_lease():
    ids = []

    def answer(tokens, version):
        return lambda r: ids.append(r.request_id) or sampled(tokens, "stop", version, prompt=PROMPT)

    b = bench([answer(3, 1), answer(2, 2)])
    b.pool.hold_engine("engine-0")
    b.pool.serve_engine("engine-0", 2)
    await b.session.generate()
    trajectory = await b.finish()
    assert [(len(s.token_ids), s.weight_version) for s in trajectory.sampled] == [(2, 2)]
    assert [request_id.partition("-")[2] for request_id in ids] == ["0.2", "0.2"]  # held and served
    assert b.counted("answers_discarded_total", reason="older_weights") == 1


async def test_an_answer_is_refused_when_this_run_has_not_published_its_weights():
    """Another run updates the same server: its tokens would count as fresher than any."""

    def answer(tokens, *versions):
        spans = [VersionSpan(start=i, end=i + 1, weight_version=v) for i, v in enumerate(versions)]
        return lambda r: [
            Chunk.of(list(range(100, 100 + tokens)), [-1.0] * tokens),
            Finish(reason="stop", version_spans=tuple(spans)),
        ]

    b = bench(
        [answer(1, 7), answer(2, 1, 2), answer(2, 0, 1)],
        interrupt="in_place",
        replay="none",
        newest_version=1,
    )
    await b.session.generate()
    trajectory = await b.finish()
    assert [s.weight_version for s in trajectory.sampled] == [0, 1]
    assert b.counted("answers_discarded_total", reason="unpublished_weights") == 2


async def test_tokens_are_discarded_when_the_finish_says_that_unknown_weights_sampled_them():
    """A server that was restarted reports `default`; its chunks have come before that."""

    class Restarted(ScriptedEngine):
        async def generate(self, request):
            yield Chunk.of([100, 101, 102], [-1.0] * 3)
            raise VersionMismatch("engine-0 serves weights of version 'default'")

    second = ScriptedEngine("engine-1", [lambda r: sampled(1, "stop", 0, prompt=PROMPT, first=200)])
    b = make_bench(Restarted("engine-0"), second)
    await b.begin()
    assert ids_of(await b.finish()) == [200]
    assert b.counted("answers_discarded_total", reason="wrong_versions") == 1
    assert b.pool.needs_repair("engine-0")


@pytest.mark.parametrize(
    ("error", "last_log_prob", "kept"),
    [
        (VersionMismatch("an answer is of version 0"), -1.0, []),
        (VersionMismatch("an update has changed nothing"), -1.0, [100, 101, 102]),
        (EngineError("gone"), -1.0, [100, 101, 102]),
        (EngineError("gone"), float("nan"), [100, 101]),
    ],
)
async def test_calls_of_a_quarantined_engine_keep_their_valid_tokens_unless_they_are_of_unknown_weights(
    error, last_log_prob, kept
):
    class Hanging(ScriptedEngine):
        async def generate(self, request):
            yield Chunk.of([100, 101, 102], [-1.0, -1.0, last_log_prob])
            await asyncio.Future()

    def answer(request):
        return sampled(1, "stop", 0, prompt=PROMPT + len(kept), first=200)

    b = make_bench(Hanging("engine-0"), ScriptedEngine("engine-1", [answer]))
    b.start()
    async with Nursery() as nursery:
        nursery.start_task("turn", b.session.generate())
        for _ in range(100):
            await asyncio.sleep(0)
        assert b.pool.load_of("engine-0").calls == 1
        b.pool.quarantine_engine("engine-0", error, wrong_weights=not kept)
    assert ids_of(await b.finish()) == [*kept, 200]
    assert b.counted("answers_discarded_total", reason="wrong_versions") == (not kept)


async def test_an_answer_is_refused_when_its_log_probs_are_not_finite():
    def not_finite(request):
        finish = sampled(2, "stop", 0, prompt=PROMPT)[-1]
        return [Chunk.of([1, 2], [-0.1, float("nan")]), finish]

    b = bench([not_finite, lambda r: sampled(3, "stop", 0, prompt=PROMPT)])
    await b.session.generate()
    trajectory = await b.finish()
    assert ids_of(trajectory) == [100, 101, 102]
    assert np.isfinite(trajectory.rollout_log_probs).all()
    assert not b.pool.engines(EngineState.QUARANTINED)  # one strike is not the end of an engine


async def test_a_trajectory_fails_and_no_engine_when_its_request_is_refused():
    b = bench([lambda r: [RequestRefused("engine-0 answered 400: bad stop")]])
    with pytest.raises(RequestRefused):
        await b.session.generate()
    assert not b.pool.engines(EngineState.QUARANTINED)


async def test_tokens_are_segments_when_the_caller_is_cancelled_mid_stream():
    started = asyncio.Event()

    class Hanging(ScriptedEngine):
        async def generate(self, request):
            yield Chunk.of([100, 101, 102], [-1.0] * 3)
            started.set()
            await asyncio.Future()

    b = make_bench(Hanging())
    b.start()
    async with Nursery() as nursery:
        task = nursery.start_task("turn", b.session.generate())
        await started.wait()
        task.cancel()
    assert b.session.remaining_tokens == 64 - PROMPT - 3
    assert b.session.transcript.tokens.segments[-1].token_ids.tolist() == [100, 101, 102]


async def test_messages_are_rendered_together_when_they_are_added_one_by_one():
    b = bench([lambda r: sampled(3, "stop", 0, prompt=PROMPT)])  # without an end of turn
    asked: list[list[str]] = []
    append_ids = b.chat.append_ids

    def note(messages, *, after_length=False):
        asked.append([message["content"] for message in messages])
        return append_ids(messages, after_length=after_length)

    b.chat.append_ids = note  # type: ignore[method-assign]
    await b.session.generate()
    b.session.add_tool_result({"sum": 4}, name="add")
    left = b.session.remaining_tokens
    b.session.add_tool_result("no such city", error=True)
    assert b.session.remaining_tokens == left - 2
    assert asked == [['{"sum":4}'], ['{"sum":4}', "no such city"]]
    trajectory = await b.finish()
    assert ids_of(trajectory) == [100, 101, 102, *[9] * 5]
    assert (trajectory.outcome.num_tool_calls, trajectory.outcome.num_tool_errors) == (2, 1)


@pytest.mark.case(21)
async def test_trailing_tool_rows_are_invalid_when_no_call_follows():
    b = bench([lambda r: sampled(5, "stop", 0, prompt=PROMPT)])
    await b.session.generate()
    b.session.add_messages([{"role": "tool", "content": "4"}])
    trace = (await b.finish()).trace
    assert len(trace.rows) == PROMPT + 5 + 2 - 1
    assert trace.valid.tolist() == [True] * (PROMPT + 4) + [False] * 2


async def test_the_prompt_is_refused_when_it_fills_the_context():
    b = make_bench(ScriptedEngine(), max_context_tokens=PROMPT, max_new_tokens=2)
    with pytest.raises(PromptTooLong, match="max_context_tokens is 7"):
        b.start()


async def test_tool_results_are_refused_when_they_do_not_fit():
    b = bench(
        [lambda r: sampled(3, "stop", 0, prompt=PROMPT)], max_context_tokens=PROMPT + 4, max_new_tokens=3
    )
    await b.session.generate()
    with pytest.raises(PromptTooLong):
        b.session.add_messages([{"role": "tool", "content": "long"}])
    assert b.session.remaining_tokens == 1


async def test_the_trajectory_fails_when_an_engine_keeps_ending_calls_by_itself():
    b = bench([lambda r: sampled(0, "abort", 0, prompt=PROMPT, rows=False)] * 20)
    with pytest.raises(EngineError, match="without an interruption"):
        await b.session.generate()


async def test_no_routing_is_asked_for_when_replay_is_off():
    b = bench([lambda r: sampled(3, "stop", 0, prompt=PROMPT, rows=False)], replay="off")
    await b.session.generate()
    assert (await b.finish()).trace is None
    assert not b.engines[0].requests[0].return_routing


async def test_the_trajectory_ends_as_it_is_when_the_context_is_full():
    b = bench([lambda r: sampled(4, "length", 0, prompt=PROMPT)], max_context_tokens=PROMPT + 4)
    assert (await b.session.generate()).finish_reason == "length"
    assert b.session.remaining_tokens == 0
    with pytest.raises(PromptTooLong, match="the context is full") as caught:
        await b.session.generate()
    assert b.session.has_exceeded(caught.value)
    with pytest.raises(ValueError, match="expected at least 1"):
        await b.session.generate(max_new_tokens=0)
    assert b.session.num_turns == 1
    b.session.end_session()
    assert b.session.stop_reason == "length"


@pytest.mark.parametrize(
    "setting",
    [{"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}],
    ids=lambda s: next(iter(s)),
)
async def test_the_policy_is_sampled_as_the_config_says(setting):
    seen = []

    def script(request):
        seen.append(request.sampling)
        return sampled(3, "stop", 0, prompt=PROMPT)

    await bench([script], replay_sampling=False, **setting).session.generate()
    ((name, value),) = setting.items()
    assert getattr(seen[0], name) == value


@pytest.mark.parametrize(
    ("end", "opened"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("?", False)]
)
async def test_the_completion_says_whether_the_prompt_opened_a_thought(end: str, opened: bool):
    b = bench([lambda r: sampled(5, "length", 0, prompt=PROMPT)])
    b.chat.decode = lambda ids: end  # type: ignore[method-assign]
    await b.session.generate()
    assert b.session.completion.is_in_thought == opened


async def test_messages_that_cannot_fit_are_refused_before_they_are_tokenised():
    b = bench([lambda r: sampled(5, "stop", 0, prompt=PROMPT)])
    b.chat.append_ids = None  # type: ignore[method-assign]
    await b.session.generate()
    with pytest.raises(PromptTooLong, match=r"messages of \d+ bytes cannot fit: \d+ tokens are left"):
        b.session.add_messages([{"role": "tool", "content": "x" * 10_000_000}])


LONG: Final = {"role": "user", "content": "x" * 20_000}


def recording(b: Any, name: str, num_tokens: int = 2) -> list[tuple[str, str]]:
    """Return the threads in which the chat format tokenises from now on, and the first text of each call."""
    calls = []

    def encode(messages: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        calls.append((threading.current_thread().name, messages[0]["content"][:3]))
        return np.full(num_tokens, 9, np.int32)

    setattr(b.chat, name, encode)
    return calls


@pytest.mark.real_time
@pytest.mark.parametrize("call", ["start", "add_messages"])
async def test_long_messages_are_tokenised_in_a_thread_before_the_turn(call: str):
    scripts: list[Script] = [lambda r: sampled(5, "stop", 0, prompt=len(r.input_ids))] * 2
    b = bench(scripts, start=call != "start")
    if call == "add_messages":
        await b.session.generate()
    calls = recording(b, "prompt_ids" if call == "start" else "append_ids")
    message = dict(LONG)
    getattr(b.session, call)([message])
    assert calls == []
    message["content"] = "changed since"
    await b.session.generate()
    assert calls == [("tokenising of long messages", "xxx")]
    assert (await b.finish()).segments[-2].token_ids.tolist() == [9, 9]


@pytest.mark.parametrize("looks", [False, True])
async def test_long_messages_are_left_out_with_their_numbers_when_they_do_not_fit(looks: bool):
    b = bench([lambda r: sampled(5, "stop", 0, prompt=PROMPT)])
    await b.session.generate()
    recording(b, "append_ids", num_tokens=100)
    before = list(b.session.messages)
    b.session.add_messages([LONG])
    assert not looks or b.session.remaining_tokens == 0
    with pytest.raises(
        PromptTooLong, match=r"messages of 100 tokens do not fit: \d+ tokens are left"
    ) as caught:
        await b.session.generate()
    assert b.session.has_exceeded(caught.value)
    assert b.session.messages == before
    assert (await b.finish()).num_sampled_tokens == 5


async def test_all_messages_before_the_first_that_does_not_fit_are_read_by_the_next_turn():
    b = bench([lambda r: sampled(5, "stop", 0, prompt=len(r.input_ids))] * 2)
    await b.session.generate()
    before = list(b.session.messages)
    b.chat.append_ids = lambda messages, **_: np.full(sum(m.get("size", 2) for m in messages), 9, np.int32)
    for message in (added := [LONG, dict(LONG), {**LONG, "size": 100}, {"role": "user", "content": "and?"}]):
        b.session.add_messages([message])
    added[1].clear()
    with pytest.raises(PromptTooLong) as caught:
        await b.session.generate()
    assert b.session.has_exceeded(caught.value)
    assert b.session.messages == [*before, *added[:2]]
    await b.session.generate()
    assert (await b.finish()).segments[-2].token_ids.tolist() == [9] * 4


async def test_long_messages_that_no_turn_could_read_are_left_out_at_the_end():
    b = bench([lambda r: sampled(5, "stop", 0, prompt=PROMPT)])
    await b.session.generate()
    recording(b, "append_ids", num_tokens=100)
    b.session.add_messages([LONG])
    assert b.session.remaining_tokens == 0
    assert len((await b.finish()).token_ids) == PROMPT + 5


async def test_a_session_begins_again_when_a_long_prompt_could_not_be_rendered():
    b = bench([lambda r: sampled(5, "stop", 0, prompt=PROMPT)], start=False)
    rendered, b.chat.prompt_ids = b.chat.prompt_ids, Mock(side_effect=ConfigError("the chat template cannot"))
    b.session.start([LONG])
    with pytest.raises(ConfigError):
        await b.session.generate()
    assert (b.session.messages, b.session.status) == ([], "")
    b.chat.prompt_ids = rendered
    b.session.start([LONG])
    assert (await b.session.generate()).finish_reason == "stop"


async def test_a_long_prompt_that_does_not_fit_fails_with_its_numbers():
    b = bench([], start=False)
    recording(b, "prompt_ids", num_tokens=100)
    b.session.start([LONG])
    with pytest.raises(
        PromptTooLong, match=r"the prompt of task t has 100 tokens, but \S+max_context_tokens is 64"
    ):
        await b.session.generate()


async def test_long_messages_are_counted_and_reported_when_the_tokens_left_are_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rollout_session, "_LONG_S", 0.0)
    b = bench([lambda r: sampled(5, "stop", 0, prompt=PROMPT)])
    await b.session.generate()
    left = b.session.remaining_tokens
    calls = recording(b, "append_ids")
    b.session.add_messages([LONG])
    b.session.add_messages([{"role": "user", "content": "and now?"}])
    assert b.session.remaining_tokens == left - 2
    assert calls == [("MainThread", "xxx")]
    assert f"trajectory {b.session.trajectory_id}: tokenising" in caplog.text


async def test_a_branch_begins_with_a_long_prompt_that_no_turn_has_read():
    b = bench([lambda r: sampled(5, "stop", 0, prompt=2)], start=False, max_branches=1)
    recording(b, "prompt_ids")
    b.session.start([LONG])
    async with b.session.branch() as other:
        assert other.num_tokens == 2
        await other.generate()


@pytest.mark.real_time
async def test_the_status_says_what_was_tokenised_when_the_attempt_is_cancelled_meanwhile():
    b = bench([], start=False)
    began, ends = threading.Event(), threading.Event()

    def encode(messages: Any, tools: Any) -> np.ndarray:
        began.set()
        ends.wait()
        return np.full(2, 9, np.int32)

    b.chat.prompt_ids = encode
    b.session.start([LONG])
    async with Nursery() as nursery:
        running = nursery.start_task("turn", b.session.generate())
        await asyncio.to_thread(began.wait)
        with pytest.raises(RuntimeError, match="while a turn is being written"):
            b.session.add_messages([LONG])
        running.cancel()
    ends.set()
    assert b.session.status == "tokenising 0.0 MB of messages"


async def test_pieces_of_a_turn_keep_their_spaces_when_the_decoder_strips_the_first():
    """As SentencePiece's does; half of a character stays recognisable."""
    tokens = ["a", "▁world", "!", "<0xE4>"]
    tokenizer = tokenizers.Tokenizer(
        BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    b = bench([])
    b.chat.encode = lambda text: np.asarray(tokenizer.encode(text).ids)
    b.chat.raw_text = tokenizer.decode
    assert b.session.pieces([1, 2, 3, 0, 1]) == [" world", "!", "\ufffd", "a", " world"]


async def test_halves_of_surrogate_pairs_are_not_an_error():
    b = bench([lambda r: sampled(5, "stop", 0, prompt=PROMPT)])
    await b.session.generate()
    b.session.add_messages([{"role": "tool", "content": "a\ud83d"}])


USER = {"role": "user"}


async def talked(*said: str) -> Bench:
    """A session after its first turn."""
    bench, _ = talking(lines(*said))
    bench.session.start([{**USER, "content": "q"}])
    await bench.session.generate()
    return bench


async def test_a_session_that_goes_on_after_messages_were_refused_is_not_of_length():
    session = (await talked("A.", "B.")).session
    with pytest.raises(PromptTooLong):
        session.add_messages([{**USER, "content": "x" * 9000}])
    session.add_messages([{**USER, "content": "short"}])
    await session.generate()
    session.end_session(None)
    assert session.completion.stop_reason == "completed"


async def test_messages_that_cannot_fit_together_are_refused_at_the_first_that_is_too_much():
    session = (bench := await talked("A.", "B.")).session
    session.add_messages([{**USER, "content": "kept"}])
    for _ in range(3):
        session.add_messages([{**USER, "content": "x" * 90_000}])
    with pytest.raises(PromptTooLong, match="cannot fit"):
        session.add_messages([{**USER, "content": "x" * 90_000}])
    with pytest.raises(PromptTooLong, match="do not fit"):
        await session.generate()
    assert [message["content"] for message in session.messages] == ["q", "A.", "kept"]
    await session.generate()
    session.end_session(None)
    assert "kept" in bench.chat.decode((await bench.finish()).token_ids)


async def test_results_that_json_does_not_have_are_read_as_what_they_are():
    session = (await talked("A.")).session
    session.add_tool_result({"mean": float("nan"), "most": float("-inf"), "é": 1})
    assert session.messages[-1]["content"] == '{"mean":NaN,"most":-Infinity,"é":1}'
    with pytest.raises(TypeError, match="bytes is not JSON"):
        session.add_tool_result(b"x")
