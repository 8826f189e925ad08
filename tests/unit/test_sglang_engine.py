"""The client of SGLang against a server that says what a test wants."""

from __future__ import annotations

import asyncio
import base64
import gc
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, closing, nullcontext, suppress
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from async_rl.config import parse_config
from async_rl.engine_protocol import (
    DiskUpdate,
    DistributedUpdate,
    EngineFacts,
    Finish,
    GenerateRequest,
    PayloadProgress,
    Retraction,
    RoutingPayload,
    SamplingParams,
    TensorSpec,
    WeightBucket,
)
from async_rl.engines.sglang import client, http_client
from async_rl.engines.sglang.aborted_rows import OMIT_ABORTED_ROWS
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.connect import sglang_client
from async_rl.engines.sglang.server_checks import ServerState
from async_rl.errors import (
    AlignmentError,
    CallLost,
    ConfigError,
    EngineError,
    EngineTimeout,
    EnvironmentNotReady,
    RequestRefused,
    VersionMismatch,
    WeightSyncError,
)
from async_rl.types import RoutingTrace, VersionSpan
from tests.support.engine_calls import Call, call, request
from tests.support.fake_sglang import CUT, GOOD_SERVER, HANG, FakeSGLang, event, facts, finish, new_client

pytestmark = pytest.mark.real_time

PROMPT = [5, 6, 7]
STOP = finish("stop", matched=2)
IN_QUEUE = finish("abort", message="Abort in waiting queue")


def payload(rows: int, layers: int = 3, top_k: int = 2) -> tuple[str, np.ndarray]:
    """Base64 as SGLang sends it, and the ids in it; the first layer is dense."""
    ids = np.random.default_rng(rows).permuted(
        np.tile(np.arange(8, dtype=np.int32), (rows, layers, 1)), axis=-1
    )
    ids = np.ascontiguousarray(ids[..., :top_k])
    ids[:, 0] = 0
    return base64.b64encode(ids.tobytes()).decode(), ids


@pytest.fixture
def server() -> FakeSGLang:
    return FakeSGLang()


async def answered(
    server: FakeSGLang, *parts: bytes, prompt: list[int] = PROMPT, max_new_tokens: int = 8, **settings: Any
) -> Call:
    """Make a call that is answered with these parts; settings are the client's."""
    server.streams = [[*parts]]
    async with server.client(**settings) as engine:
        return await call(engine, prompt, max_new_tokens)


def long_context(num_tokens: int = 1 << 16, **changed: Any) -> EngineFacts:
    return facts(max_position_embeddings=num_tokens, **changed)


# -- streams --------------------------------------------------------------------------------------------


async def test_tokens_rows_and_versions_are_delivered_when_a_stream_ends(server: FakeSGLang) -> None:
    encoded, ids = payload(6)
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 4}]
    last = {"routed_experts": encoded, "weight_version": "4", "weight_versions": spans, "cached_tokens": 2}
    ended = await answered(
        server,
        event([10], 1),
        event([11, 12], 3, log_probs=[-1.0, -2.0]),
        event([2], 4, finish_reason=STOP, **last),
    )
    assert ended.token_ids == [10, 11, 12, 2]
    assert ended.log_probs == [-0.5, -1.0, -2.0, -0.5]
    assert ended.finish.reason == "stop"
    assert [(s.start, s.end, s.weight_version) for s in ended.finish.version_spans] == [(0, 1, 3), (1, 4, 4)]
    assert ended.finish.cached_tokens == 2
    assert np.array_equal(ended.trace.rows, ids[:, 1:])
    assert ended.trace.rows.dtype == np.uint8
    assert [s.weight_version for s in ended.trace.spans] == [4]


Scores = list[tuple[float | None, int, None]]


async def score(server: FakeSGLang, prompt: list[int], scores: Scores) -> Finish:
    """Make a call that samples nothing and asks for log-probs of the prompt's last two tokens."""
    asked = msgspec.structs.replace(request(prompt, 0), score_from=2, return_routing=False)
    server.streams = [[event([], 0, finish_reason=finish("length"), input_token_logprobs=scores)]]
    async with server.client() as engine:
        return (await Call(engine, asked).run()).finish


@pytest.mark.parametrize(
    ("token_id", "reported"),
    [(7, 7), (299, 0)],  # in place of the last id of the vocabulary SGLang reports 0
)
async def test_a_prompt_is_scored_from_the_token_that_is_asked_for(
    server: FakeSGLang, token_id: int, reported: int
) -> None:
    scores = [(None, 6, None), (-1.5, reported, None), (-0.25, 8, None)]
    ended = await score(server, [5, 6, token_id, 8], scores)
    assert ended.scores.tolist() == [-1.5, -0.25]
    (asked,) = server.requests("generate")
    assert (asked["logprob_start_len"], asked["return_logprob"]) == (1, True)
    assert asked["sampling_params"]["max_new_tokens"] == 0


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([(None, 6, None), (-1.5, 0, None), (-0.25, 8, None)], "not those of its last 2 tokens"),
        ([(-0.25, 8, None)], "not those of its last 2 tokens"),
        ([(None, 6, None), (None, 7, None), (-0.25, 8, None)], "missing or above 0"),
        ([(None, 6, None), (0.5, 7, None), (-0.25, 8, None)], "missing or above 0"),
    ],
)
async def test_scores_of_other_tokens_or_none_are_an_error(
    server: FakeSGLang, scores: Scores, words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        await score(server, [5, 6, 7, 8], scores)


async def test_ids_and_both_keys_are_sent_when_a_call_is_made(server: FakeSGLang) -> None:
    server.streams = [[event([1], 1, finish_reason=finish("length"))]]
    async with server.client() as engine:
        await call(engine, PROMPT, 1, temperature=0.5, stop=[9])
        await engine.interrupt("abort")
    (body,) = server.requests("generate")
    wanted = {"stream": True, "return_logprob": True, "return_routed_experts": True}
    assert (wanted | {"input_ids": PROMPT, "routed_experts_start_len": 0}).items() <= body.items()
    sampling = {"max_new_tokens": 1, "temperature": 0.5, "skip_special_tokens": False}
    assert sampling.items() <= body["sampling_params"].items()
    assert body["sampling_params"]["stop_token_ids"] == [9]
    assert server.keys["generate"] == "Bearer api"
    assert server.keys["abort_request"] == "Bearer admin"


async def test_retractions_are_between_the_events_that_report_them(server: FakeSGLang) -> None:
    ended = await answered(
        server,
        event([10], 1, num_retractions=0),
        event([11, 12, 13], 4, num_retractions=1),  # after 1, 2 or 3 tokens
        event([14], 5, num_retractions=1),
        event([15], 6, num_retractions=3),  # twice after 5
        event([15], 6, num_retractions=0, finish_reason=IN_QUEUE),
    )
    assert ended.token_ids == [10, 11, 12, 13, 14, 15]
    assert ended.finish.retractions == (
        Retraction(at_least=1, at_most=3),
        Retraction(at_least=5, at_most=5, count=2),
    )


def unwanted(max_new_tokens: int, stop: tuple[int, ...] = ()) -> GenerateRequest:
    """A call whose rows are not needed if it is aborted."""
    return msgspec.structs.replace(request(PROMPT, max_new_tokens, stop=stop), rows_if_aborted=False)


async def collect(engine: SGLangEngine, asked: GenerateRequest) -> tuple[list[int], Finish]:
    events = [e async for e in engine.generate(asked)]
    assert isinstance(events[-1], Finish)
    return [token for e in events[:-1] for token in e.token_ids], events[-1]


@pytest.mark.parametrize("sent", [10, 1 << 17])
async def test_the_connection_is_left_where_rows_begin_when_an_aborted_call_needs_none(
    server: FakeSGLang, sent: int
) -> None:
    last = event([12], 3, finish_reason=finish("abort"), cached_tokens=2, routed_experts="A" * (1 << 20))
    begin = last.index(b'"routed_experts":"') + 18
    server.streams = [[event([10, 11], 2), last[: begin + sent], HANG]]
    async with server.client() as engine, asyncio.timeout(60):
        token_ids, ended = await collect(engine, unwanted(8))
    assert token_ids == [10, 11, 12]
    assert (ended.reason, ended.routing, ended.cached_tokens) == ("abort", None, 2)
    assert ended.version_spans == (VersionSpan(start=0, end=3, weight_version=0),)
    assert not server.requests("abort_request")
    assert server.requests("generate")[0]["sampling_params"]["custom_params"] == {OMIT_ABORTED_ROWS: True}


@pytest.mark.parametrize(("budget", "stop", "kept"), [(8, (), False), (1, (), True), (8, (10,), True)])
async def test_rows_of_an_aborted_call_are_dropped_unless_it_ended_by_itself_in_that_step(
    server: FakeSGLang, budget: int, stop: tuple[int, ...], kept: bool
) -> None:
    last = event([10], 1, finish_reason=finish("abort"), routed_experts=payload(3)[0])
    server.streams = [[last], [last]]
    async with server.client() as engine:
        assert ((await collect(engine, unwanted(budget, stop)))[1].routing is not None) == kept
        assert (await collect(engine, request(PROMPT, 8)))[1].routing is not None


async def test_versions_are_left_open_when_they_follow_rows_that_are_not_read(server: FakeSGLang) -> None:
    last = event([10], 1, finish_reason=finish("abort"), routed_experts="A" * (1 << 20))
    last = last.replace(b'"weight_version":"0",', b"")
    server.streams = [[last[:-40], HANG]]
    async with server.client() as engine, asyncio.timeout(60):
        token_ids, ended = await collect(engine, unwanted(8))
    assert (token_ids, ended.version_spans) == ([10], ())


async def test_the_common_prefix_is_kept_when_log_probs_are_missing(server: FakeSGLang) -> None:
    """Seen elsewhere: an abort returns more ids than log-probs, and verl then discards all that is new."""
    last = event([11, 12], 3, log_probs=[-2.0], finish_reason=finish("abort"), routed_experts=payload(5)[0])
    ended = await answered(server, event([10], 1), last)
    assert ended.token_ids == [10, 11]
    assert ended.log_probs == [-0.5, -2.0]
    assert [s.end for s in ended.finish.version_spans] == [2]
    assert ended.finish.routing is None


NO_UTF8 = event([1], 1).replace(b'"x"', b'"\xff"').replace(b'"text"', b'"error":{"message":"\xff"},"t"')
WRONG_SPANS = [{"version": "0", "start": 1, "end": 1}]
FINISHED = event([10, 2], 2, finish_reason=STOP)
OF_UNKNOWN_VERSIONS = [event([11], 2, finish_reason=STOP, weight_version=name) for name in ("default", "3")]
OF_UNKNOWN_VERSIONS += [event([11], 2, finish_reason=STOP, weight_version="9" * 5000)]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (event([10, 11], 2), "--incremental-streaming-output"),  # it streams everything anew
        (event([12], 3), "counts 3 tokens"),  # one is lost on the way
        (event([11], 2).replace(b"[-0.5,11,", b"[-0.5,13,"), "log-probs of other tokens"),
        (FINISHED.replace(b'"completion_tokens":2,', b""), "counts 0 tokens"),
        pytest.param(CUT, "connection lost", marks=pytest.mark.case(17)),
        (b"", "without a finish"),
        (b"data: {nonsense\n\n", "of an unknown format"),
        (NO_UTF8, "format"),
        (b'data: {"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n", "format"),
        (event([11], 2, finish_reason=finish("whim")), "unknown reason"),
        (event([11], 2, finish_reason=finish("abort", status_code=500, message="boom")), "boom"),
        (event([11], 2, finish_reason=STOP, weight_versions=WRONG_SPANS), "versions"),
        (event([11], 2, finish_reason=STOP, weight_version="default"), "'default'"),
        (event([11], 2, finish_reason=STOP, weight_version="9" * 5000), "versions are decimal"),
        (event([300], 2), "outside the vocabulary of 300"),
        (event([-1], 2), "wrong .*Expected `int` >= 0"),
        (event([11, 12], 3), "asked for at most 2"),
        (event([11], 2, log_probs=[0.01]), r"wrong .*Expected `float` <= 0\.001 - at .*logprobs"),
        (b'data: {"text":"' + b"x" * (2 << 20), "an event of more than"),
        (event([11], 2, finish_reason=STOP, weight_version="3"), "2 weight versions during .*, at last 3"),
        (event([], 1, finish_reason=finish("length")), "at its length, after 1 of 2 tokens"),
        (event([11], 2, finish_reason=STOP) + event([12], 3, finish_reason=STOP), "an event after the end"),
    ],
    ids=range(22),
)
async def test_an_engine_is_at_fault_and_earlier_tokens_stay_when_its_response_cannot_be_true(
    server: FakeSGLang, part: bytes, words: str
) -> None:
    server.streams = [[event([10], 1), part, *([] if part == b"" else [HANG])]]
    async with server.client() as engine:
        running = Call(engine, request(PROMPT, 2))
        with pytest.raises(EngineError, match=words) as raised:
            await running.run()
    assert isinstance(raised.value, VersionMismatch) == (part in OF_UNKNOWN_VERSIONS)
    assert running.token_ids in ([10], [10, 11])


async def test_a_payload_is_refused_before_its_end_when_it_is_far_too_long(server: FakeSGLang) -> None:
    last = event([10], 1, finish_reason=STOP, routed_experts="A" * (1 << 20))
    with pytest.raises(EngineError, match="more than twice the 4 rows"):
        await answered(server, last, HANG, max_new_tokens=2)


@pytest.mark.parametrize("masked", [False, True])
async def test_tokens_before_the_one_that_an_abort_repeats_are_kept(server: FakeSGLang, masked: bool) -> None:
    """SGLang joins the events of a retracted call that it had not sent when the call is aborted."""
    asked, meta, first_meta = request(PROMPT, 8), dict[str, list](), dict[str, list]()
    log_probs = [-1.0, -2.0, -3.0]
    if masked:
        asked = msgspec.structs.replace(asked, sampling=SamplingParams(top_k=2), return_mask=True)
        first_meta |= {"output_token_sampling_mask": [[10]], "output_token_sampling_logprobs": [-1.0]}
        kept = [[10], [11], [12]]
        meta |= {"output_token_sampling_mask": kept, "output_token_sampling_logprobs": log_probs}
    joined = event(
        [11, 12, 12],
        3,
        log_probs=[*log_probs[1:], *log_probs],
        scored_ids=[11, 12, 10, 11, 12],
        finish_reason=IN_QUEUE,
        **meta,
    )
    server.streams = [[event([10], 1, log_probs=[-1.0], **first_meta), joined]]
    async with server.client() as engine:
        ended = await Call(engine, asked).run()
    assert ended.token_ids == [10, 11, 12]
    assert ended.log_probs == log_probs
    assert ended.finish.reason == "abort"


async def test_a_null_log_prob_is_nan_when_the_server_computed_none(server: FakeSGLang) -> None:
    ended = await answered(server, event([10], 1, log_probs=[None], finish_reason=STOP))
    assert math.isnan(ended.log_probs[0])


async def test_a_request_is_refused_when_the_server_says_so(server: FakeSGLang) -> None:
    with pytest.raises(RequestRefused, match="must be finite"):
        await answered(server, b'data: {"error":{"message":"temperature must be finite","code":400}}\n\n')


@pytest.mark.case(16)
async def test_an_id_is_refused_when_it_could_begin_another(server: FakeSGLang) -> None:
    short = msgspec.structs.replace(request(PROMPT, 8), request_id="1")
    async with server.client() as engine:
        with pytest.raises(ValueError, match="'1' of 1 characters, expected at least 32"):
            await Call(engine, short).run()
    assert server.requests("generate") == []


@pytest.mark.case(17)
async def test_the_engine_is_told_when_a_stream_is_left(server: FakeSGLang) -> None:
    server.streams = [[event([10], 1), HANG]]
    async with server.client() as engine:
        asked = request(PROMPT, 8)
        async with aclosing(engine.generate(asked)) as stream:
            await anext(stream)
    assert server.requests("abort_request") == [{"rid": asked.request_id}]


async def test_a_stream_can_be_left_while_its_client_is_closed(server: FakeSGLang) -> None:
    """The engine leaves: its calls are dropped, and its client is closed in the same turn."""
    server.streams = [[event([10], 1), HANG]]
    async with server.client() as engine:
        stream = engine.generate(request(PROMPT, 8))
        await anext(stream)
        leaving = asyncio.ensure_future(stream.aclose())
        await engine.close()
        await leaving


# -- connections ----------------------------------------------------------------------------------------

REPLY = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (
    len(ONE_TOKEN := event([1], 1, finish_reason=STOP)),
    ONE_TOKEN,
)


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]


@asynccontextmanager
async def raw_server(answer: Answer, **settings: float) -> AsyncIterator[tuple[SGLangEngine, list[int]]]:
    """Answer each request with raw bytes; False closes the connection.

    Yields a client and the list of ports that have connected to the server.
    """
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer.get_extra_info("peername")[1])
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                if not await answer(reader, writer):
                    return

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    engine = new_client(url, facts(), **settings)
    try:
        yield engine, connections
    finally:
        await engine.close()
        server.close()


def sends(raw: bytes, *, keeps: bool = False) -> Answer:
    """An answer to every request; `keeps` the connection open."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(raw)
        return keeps

    return answer


async def test_one_connection_serves_calls_in_turn_and_each_concurrent_call_has_its_own() -> None:
    together = asyncio.Barrier(150)
    waiting = [False]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if waiting[0]:
            await together.wait()  # all calls are open at the same time
        writer.write(REPLY)
        return True

    async with raw_server(answer) as (engine, connections):
        for _ in range(3):
            assert (await call(engine, PROMPT, 1)).token_ids == [1]
        assert len(connections) == 1
        waiting[0] = True
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for _ in range(150):
                group.create_task(call(engine, PROMPT, 1))
        assert len(connections) == 150


async def test_an_engine_without_a_server_cannot_be_reached() -> None:
    async with raw_server(sends(b"")) as (engine, _):
        pass
    with pytest.raises(EngineError, match="cannot be reached") as raised:
        await call(engine, PROMPT, 1)
    assert not isinstance(raised.value, CallLost)
    await engine.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        REPLY[:-9],
        HEAD + b"Content-Length: -1\r\n\r\n",
        CHUNKED + b"-1\r\nhello",
        CHUNKED + b"5" + b"x" * 70_000 + b"\r\nhello",
        HEAD + b"X: " + b"x" * 70_000 + b"\r\n\r\n",
        HEAD + b"".join(b"X-%d: x\r\n" % i for i in range(5000)) + b"\r\n",
        b"HTTP/1.1 " + b"2" * 70_000,
    ],
    ids=range(9),
)
async def test_the_call_is_lost_when_the_response_is_cut_or_invalid(raw: bytes) -> None:
    async with raw_server(sends(raw)) as (engine, _):
        with pytest.raises(CallLost):
            await call(engine, PROMPT, 8)


async def test_limits_of_a_client_are_those_of_the_config() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await reader.read()

    limits = {"request_timeout_s": 0.05, "start_timeout_s": 0.1}
    config = parse_config({"model": {"path": "m"}, "engine": limits})
    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        engine = sglang_client(config, "engine-0", url, facts(), (None, None), None)
        with pytest.raises(CallLost, match=r"did not take a request within 0\.05 s"):
            await call(engine, PROMPT, 8)
        with pytest.raises(EnvironmentNotReady, match=r"engine\.start_timeout_s = 0\.1"):
            await engine.wait_ready()
        await engine.close()


# -- routing --------------------------------------------------------------------------------------------


def base64_of(ids: np.ndarray) -> str:
    return base64.b64encode(ids.tobytes()).decode()


async def decode(
    server: FakeSGLang, encoded: str, *, num_rows: int = 4, narrow: bool = False, **changed: Any
) -> RoutingTrace:
    """The routing of a call that has so many rows, as the client decodes it."""
    last = event([1], 1, finish_reason=STOP, routed_experts=encoded)
    known = long_context(1 << 20, **changed)
    ended = await answered(server, last, prompt=[5] * num_rows, facts=known, narrow_routing=narrow)
    assert ended.token_ids == [1]
    return ended.trace


@pytest.mark.parametrize("num_rows", [0, 1, 2, 10_921, 10_922, 10_923, 20_001])
@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (300, np.uint16)])
def test_every_block_is_decoded_when_a_payload_has_several(
    num_rows: int, num_experts: int, dtype: type
) -> None:
    first = np.random.default_rng(num_rows).integers(num_experts, size=(num_rows, 3, 1), dtype=np.int32)
    ids = np.concatenate([first, (first + 7) % num_experts], axis=-1)
    ids[:1] = num_experts - 1, num_experts - 2
    known = facts(num_experts=num_experts, mlp_only_layers=[1])
    engine = SGLangEngine("engine-0", "http://nowhere", known)
    data = base64.b64encode(ids.tobytes())
    trace = engine.decode_routing(RoutingPayload(data=data, num_rows=num_rows, weight_version=3))
    assert np.array_equal(trace.rows, ids[:, [0, 2]])
    assert trace.rows.dtype == dtype


@pytest.mark.case(2)
@pytest.mark.parametrize("surplus", [-1, 1])
async def test_a_payload_is_refused_when_it_has_an_element_too_few_or_too_many(
    server: FakeSGLang, surplus: int
) -> None:
    encoded, ids = payload(4)
    assert np.array_equal((await decode(server, encoded)).rows, ids[:, 1:])
    with pytest.raises(AlignmentError, match=f"{24 + surplus} expert ids came, expected 4 rows"):
        await decode(server, base64_of(np.resize(ids, ids.size + surplus)))


@pytest.mark.case(8)
@pytest.mark.parametrize("num_rows", [4, 4000])
async def test_rows_are_the_last_events_when_an_earlier_one_has_some_too(
    server: FakeSGLang, num_rows: int
) -> None:
    early = event([1], 1, routed_experts=payload(num_rows - 1)[0])
    encoded, ids = payload(num_rows)
    asked = {"prompt": list(range(num_rows - 1)), "facts": long_context()}
    ended = await answered(server, early, event([2], 2, finish_reason=STOP, routed_experts=encoded), **asked)
    assert np.array_equal(ended.trace.rows, ids[:, 1:])
    ended = await answered(server, early, event([2], 2, finish_reason=STOP), **asked)
    assert ended.finish.routing is None


@pytest.mark.parametrize(
    ("place", "value", "num_rows", "words"),
    [
        (np.s_[:, 2], 0, 4, r"layers \[2\] have experts"),
        (np.s_[1, 1, 0], 8, 4, "expert id 8"),
        (np.s_[1, 1, 0], -1, 4, "expert id -1"),
        (np.s_[1, 1], 3, 4, r"\[3, 3\] of row 1, layer 0 are not distinct"),
        (np.s_[-1, -1, -1], 8, 30_000, "expert id 8 outside"),
    ],
    ids=range(5),
)
async def test_a_payload_is_refused_when_ids_in_it_are_impossible(
    server: FakeSGLang, place: Any, value: int, num_rows: int, words: str
) -> None:
    _, ids = payload(num_rows)
    ids[place] = value
    with pytest.raises(AlignmentError, match=words):
        await decode(server, base64_of(ids), num_rows=num_rows)


@pytest.mark.parametrize("num_rows", [4, 1, 3, 200_000])
@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (300, np.uint16)])
async def test_narrow_rows_are_taken_as_they_are_when_the_engine_narrows(
    server: FakeSGLang, num_rows: int, num_experts: int, dtype: type
) -> None:
    first = np.random.default_rng(num_rows).integers(num_experts, size=(num_rows, 2, 1))
    ids = (np.concatenate([first, first + 7], axis=-1) % num_experts).astype(dtype)
    trace = await decode(server, base64_of(ids), num_rows=num_rows, narrow=True, num_experts=num_experts)
    assert np.array_equal(trace.rows, ids)
    assert trace.rows.dtype == dtype
    assert trace.moe_layers == (1, 2)
    assert not trace.rows.flags.writeable


@pytest.mark.parametrize("num_rows", [4, 30_000])
@pytest.mark.parametrize("narrow", [False, True])
async def test_the_other_wire_is_named_when_the_length_is_just_that(
    server: FakeSGLang, num_rows: int, narrow: bool
) -> None:
    _, ids = payload(num_rows)
    sent = ids if narrow else ids[:, 1:].astype(np.uint8)
    expected = "without" if narrow else "with"
    with pytest.raises(AlignmentError, match=f"started {expected} engine.narrow_routing"):
        await decode(server, base64_of(sent), num_rows=num_rows, narrow=narrow)


@pytest.mark.parametrize(("num_rows", "refused"), [(63, False), (64, True)])
async def test_one_expert_a_token_is_refused_when_a_layer_is_zero_in_many_rows(
    server: FakeSGLang, num_rows: int, refused: bool
) -> None:
    encoded = base64_of(np.zeros((num_rows, 3, 1), np.int32))
    with pytest.raises(AlignmentError, match="does not record its choice") if refused else nullcontext():
        await decode(server, encoded, num_rows=num_rows, num_experts_per_tok=1)


# -- interruption and weights ---------------------------------------------------------------------------


async def read_until_the_finish(stream: AsyncIterator[Any]) -> int:
    """Read an aborted call; return how often its payload made progress."""
    events = [event async for event in stream]
    assert [e.reason for e in events if isinstance(e, Finish)] == ["abort"]
    return sum(isinstance(event, PayloadProgress) for event in events)


async def test_aborts_are_repeated_when_a_request_missed_the_first(server: FakeSGLang) -> None:
    release = asyncio.Event()

    def abort(body):
        if len(server.requests("abort_request")) == 3:
            release.set()
        return 200, {}

    server.answers["abort_request"] = abort
    server.streams = [[event([10], 1), release, event([11], 2, finish_reason=finish("abort"))]]
    async with server.client() as engine:
        stream = engine.generate(request(PROMPT, 8))
        await anext(stream)
        async with asyncio.TaskGroup() as group:
            group.create_task(read_until_the_finish(stream))
            await engine.interrupt("abort")
    aborts = server.requests("abort_request")
    assert len(aborts) >= 3
    assert aborts == [{"abort_all": True}] * len(aborts)


@pytest.mark.parametrize("size", [16_000, 10])
async def test_an_interrupt_waits_only_as_long_as_pieces_of_a_payload_arrive(
    server: FakeSGLang, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Rows of an aborted call may take longer than any answer; each piece is progress, but not each byte."""
    monkeypatch.setattr(client, "ABORT_RESEND_S", (0.1, 0.1))
    monkeypatch.setattr(client, "PIECE_BYTES", 8_000)
    pieces = [asyncio.Event() for _ in range(8)]
    numbers = iter(pieces)

    def abort(body):
        if (following := next(numbers, None)) is not None:
            following.set()
        return 200, {}

    server.answers["abort_request"] = abort
    last = event([11], 2, finish_reason=finish("abort"), routed_experts="A" * 32 * 7000)
    begins = [0, *range(70_000, 70_000 + size * len(pieces), size)]
    parts = [last[begin:end] for begin, end in pairwise([*begins, len(last)])]
    stream = [event([10], 1)]
    for arrives, part in zip(pieces, parts, strict=False):
        stream += [arrives, part]
    server.streams = [[*stream, *parts[len(pieces) :]]]
    async with server.client(request_timeout_s=0.6, facts=long_context()) as engine:
        calls = engine.generate(request([5] * 7000, 8))
        await anext(calls)
        reading = asyncio.create_task(read_until_the_finish(calls))
        too_slow = pytest.raises(EngineTimeout, match=r"still runs 1 calls and has sent nothing for 0\.6 s")
        with too_slow if size < client.PIECE_BYTES else nullcontext():
            await engine.interrupt("abort")
            assert await reading >= len(pieces)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def accept_version(server: FakeSGLang):
    """An update endpoint that takes the weights."""

    def update(body):
        if (version := body.get("weight_version")) is not None:
            server.answers["model_info"] = (200, {"model_path": "m", "weight_version": version})
        return 200, {"success": True, "message": "ok"}

    return update


DISK = DiskUpdate(weight_version=4, path="/w")


async def test_an_update_is_read_back_and_fails_when_that_is_another_version(server: FakeSGLang) -> None:
    async with server.client() as engine:
        with pytest.raises(VersionMismatch, match="serves weight version 0 after an update to 4"):
            await engine.update_weights(DISK, flush=True)
        server.answers["update_weights_from_disk"] = accept_version(server)
        await engine.update_weights(DISK, flush=True)
    wanted = {"model_path": "/w", "weight_version": "4", "flush_cache": True}
    assert server.requests("update_weights_from_disk") == [wanted] * 2


async def test_the_version_counts_once_when_the_flush_was_refused_at_first(server: FakeSGLang) -> None:
    message = "Weights were updated, but the cache was not flushed because requests are still running"
    server.answers["update_weights_from_disk"] = (400, {"success": False, "message": message})

    def count(body):
        server.answers["model_info"] = (200, {"weight_version": body["new_version"]})
        return 200, {"success": True}

    server.answers["update_weight_version"] = count
    async with server.client() as engine:
        await engine.update_weights(DISK, flush=True)
    assert len(server.requests("update_weights_from_disk")) == 1
    assert len(server.requests("flush_cache")) == 1
    assert server.requests("update_weight_version") == [{"new_version": "4", "abort_all_requests": False}]


@pytest.mark.parametrize(("kind", "afterwards"), [("disk", []), ("distributed", ["end_weight_update"])])
async def test_an_update_fails_and_ends_when_the_server_refuses_it(
    server: FakeSGLang, kind: str, afterwards: list[str]
) -> None:
    endpoint = f"update_weights_from_{kind}"
    server.answers[endpoint] = (400, {"success": False, "message": "no such folder"})
    async with server.client() as engine:
        with pytest.raises(WeightSyncError, match="no such folder"):
            await engine.update_weights(DISK if kind == "disk" else distributed(), flush=True)
    asked = [name for name, _ in server.asked]
    assert asked[asked.index(endpoint) + 1 :] == afterwards


def distributed() -> DistributedUpdate:
    first = TensorSpec(name="a", dtype="float32", shape=(2, 3))
    second = TensorSpec(name="b", dtype="bfloat16", shape=(4,))
    buckets = (WeightBucket(0, (first,)), WeightBucket(2, (second,)))
    return DistributedUpdate(weight_version=5, group_name="g", buckets=buckets)


async def test_only_the_last_bucket_flushes_and_counts_when_weights_are_broadcast(server: FakeSGLang) -> None:
    server.answers["update_weights_from_distributed"] = accept_version(server)
    async with server.client() as engine:
        await engine.update_weights(distributed(), flush=True)
    first, second = server.requests("update_weights_from_distributed")
    open_ = {
        "names": ["a"],
        "shapes": [[2, 3]],
        "flush_cache": False,
        "weight_version": None,
        "group_name": "g-0",
    }
    last = {
        "names": ["b"],
        "group_name": "g-2",
        "dtypes": ["bfloat16"],
        "flush_cache": True,
        "weight_version": "5",
    }
    assert open_.items() <= first.items()
    assert last.items() <= second.items()
    order = [name for name, _ in server.asked if "weight" in name]
    assert (order[0], order[-1]) == ("begin_weight_update", "end_weight_update")


# -- start ----------------------------------------------------------------------------------------------


async def test_a_server_is_at_version_zero_when_it_starts_without_a_number(server: FakeSGLang) -> None:
    server.answers["model_info"] = (200, {"weight_version": "default"})
    async with server.client(routing=True) as engine:
        await engine.wait_ready()
    assert server.requests("update_weight_version") == [{"new_version": "0", "abort_all_requests": False}]


async def start(server: FakeSGLang, changed: dict[str, Any], *, routing: bool = True, **model: Any) -> None:
    """Wait for a server with these changes to what it reports of itself."""
    server.answers["server_info"] = (200, GOOD_SERVER | changed)
    server.answers["model_info"] = (200, {"weight_version": "0"} | model)
    async with server.client(routing=routing) as engine:
        await engine.wait_ready()


DRAFTS = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}


@pytest.mark.case(3, 9)
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"incremental_streaming_output": False}, "--incremental-streaming-output"),
        ({"enable_return_routed_experts": False}, "--enable-return-routed-experts, .*routing.replay=off"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"pp_size": 2}, "--pp-size 2"),
        (DRAFTS | {"speculative_eagle_topk": 4}, "tree speculation"),
        (DRAFTS | {"speculative_accept_threshold_single": 0.9}, "threshold-single 0.9.*expected 1"),
        (DRAFTS | {"speculative_accept_threshold_acc": 0.9}, "threshold-acc 0.9.*expected 1"),
        ({"moe_runner_backend": "flashinfer_trtllm"}, "bypasses the recorded top-k"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill .*routing.replay=off"),
    ],
)
async def test_a_server_is_refused_when_its_routing_would_be_wrong(
    server: FakeSGLang, changed: dict, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        await start(server, changed)


@pytest.mark.parametrize(
    ("changed", "routing"),
    [(DRAFTS, True), ({"enable_return_routed_experts": False, "pp_size": 2}, False)],
)
async def test_a_server_will_do_when_all_that_is_needed_is_right(
    server: FakeSGLang, changed: dict, routing: bool
) -> None:
    await start(server, changed, routing=routing)
    assert server.requests("server_info") == [None]


@pytest.mark.parametrize(
    ("preferred", "refused"),
    [
        ('{"frequency_penalty": 0.5, "top_p": 0.5}', "frequency_penalty = 0.5:"),
        ({"top_p": 0.5, "temperature": 0.1}, None),  # each call has its own
        (None, None),
    ],
)
async def test_a_server_with_sampling_settings_that_calls_do_not_override_is_refused(
    server: FakeSGLang, preferred: dict | str | None, refused: str | None
) -> None:
    words = rf"--preferred-sampling-params {refused}.*: start it without"
    with nullcontext() if refused is None else pytest.raises(ConfigError, match=words):
        await start(server, {}, preferred_sampling_params=preferred)


async def test_waiting_ends_with_the_end_of_the_log_when_the_server_died(server: FakeSGLang) -> None:
    server.answers["ready"] = (503, {})

    async def state() -> ServerState:
        return ServerState("CUDA out of memory" if len(server.requests("ready")) > 1 else None)

    async with server.client(state=state) as engine:
        with pytest.raises(EnvironmentNotReady, match="CUDA out of memory"):
            await engine.wait_ready()


@pytest.mark.parametrize("compiles_on", [True, False])
async def test_the_limit_of_a_start_begins_anew_with_each_compiler(
    server: FakeSGLang, compiles_on: bool
) -> None:
    server.answers["ready"] = lambda _: (200 if started > 12 else 503, {})
    started = 0

    async def state() -> ServerState:
        nonlocal started
        started += 1
        return ServerState(compilers=frozenset({started if compiles_on else 1}))

    async with server.client(state=state, start_timeout_s=2.0) as engine:
        with (
            nullcontext() if compiles_on else pytest.raises(EnvironmentNotReady, match="start_timeout_s = 2")
        ):
            await engine.wait_ready()


@pytest.mark.parametrize("status", [404, 401])
async def test_waiting_ends_soon_when_another_kind_of_server_answers(
    server: FakeSGLang, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("async_rl.engines.sglang.client.REFUSED_S", 0.05)
    server.answers["ready"] = (status, {})
    async with server.client(start_timeout_s=60.0) as engine:
        with pytest.raises(EnvironmentNotReady, match=f"GET /ready with {status}, so it is no SGLang server"):
            await engine.wait_ready()


async def test_a_proxy_that_learns_of_the_server_is_waited_for(server: FakeSGLang) -> None:
    server.answers["ready"] = lambda _: (200 if len(server.requests("ready")) > 3 else 404, {})
    async with server.client(start_timeout_s=60.0) as engine:
        await engine.wait_ready()


async def test_a_wrong_key_is_named_when_the_server_refuses_it(server: FakeSGLang) -> None:
    server.answers["server_info"] = (401, {"error": "Unauthorized"})
    async with server.client() as engine:
        with pytest.raises(EnvironmentNotReady, match="401"):
            await engine.wait_ready()
        server.answers["pause_generation"] = (401, {"error": "Unauthorized"})
        with pytest.raises(EngineError, match="refuses our admin key"):
            await engine.interrupt("retract")


@pytest.mark.real
async def test_the_connection_is_closed_when_a_call_is_cancelled_while_it_is_aborted(
    server: FakeSGLang,
) -> None:
    server.streams = [[event([10], 1), HANG]]
    asyncio.get_running_loop().set_debug(True)  # aiohttp then warns of a response that is not closed
    async with server.client() as engine:
        began = asyncio.Event()

        async def read() -> None:
            async with aclosing(engine.generate(request(PROMPT, 8))) as stream:
                async for _ in stream:
                    began.set()

        task = asyncio.create_task(read())
        await began.wait()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # the abort request is under way
        with suppress(asyncio.CancelledError):
            await task
        gc.collect()


# -- responses that no sound server sends -----------------------------------------------------------------


async def test_bytes_that_drip_into_the_headers_do_not_extend_their_time() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD + b"X: ")
        with suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        return False

    async with raw_server(answer, request_timeout_s=0.2) as (engine, _):
        with pytest.raises(CallLost, match=r"did not take a request within 0\.2 s"):
            await call(engine, PROMPT, 8)


async def test_a_long_reply_to_a_control_request_is_not_read_to_its_end(
    server: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "MAX_REPLY_BYTES", 1000)
    server.answers["server_info"] = (200, GOOD_SERVER | {"more": "x" * 1000})
    async with server.client() as engine:
        with pytest.raises(EnvironmentNotReady, match="more than 1000 bytes"):
            await engine.wait_ready()
