"""Servers with SGLang's HTTP interface that decode at a given pace, without a model and with little CPU.

    python -m benchmarks.support.paced_server NUMBER_OF_ENGINES

```
 POST /generate ─► a stream ─► every step of its engine: one token; every `stream_interval` tokens: one event
 POST /abort_request, /pause_generation, /continue_generation, /update_weights_from_disk, … as SGLang answers
 GET  /counts, POST /pace                   what a benchmark asks for; SGLang has neither
```

One process serves several engines, each on a port of its own with steps of its own. Its first line of output
is a JSON list of their URLs. Events are encoded once per position in an answer, and a write adds only the
request's id and weight version. A stream whose reader is slow gets no event until it has read: the pace
drops, and `late_steps` says so. An answer ends after `answer_tokens`, or at `max_new_tokens`. Answers that
are running when a length is set end at uniformly drawn lengths, so that later ones do not all end together.
"""

from __future__ import annotations

import asyncio
import gc
import random
import re
import sys
import time
from collections import defaultdict
from functools import lru_cache
from typing import Any, Final

import msgspec

from async_rl.runtime.processes import die_with_parent

_MAX_UNREAD_BYTES: Final = 1 << 16
"""A stream with more unread bytes in this process gets no further event."""

_STOP_TOKEN: Final = 2
_FIRST_TOKEN: Final = 3
_LONGEST_SLEEP_S: Final = 0.1
"""A new pace takes effect within this time."""

_NUM_TOKENS: Final = 250
_LOG_PROB: Final = -0.6931471824645996

_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_DONE: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"

_SERVER_INFO: Final = {
    "version": "0.5.23",
    "incremental_streaming_output": True,
    "enable_return_routed_experts": True,
    "pp_size": 1,
}


class Counts(msgspec.Struct):
    """What the engines of one process have done since it started."""

    tokens: int = 0
    events: int = 0
    answers: int = 0
    """Calls that ended by themselves."""
    aborted: int = 0
    late_steps: int = 0
    """Steps that were left out, because this process was late or a reader was slow."""
    running: int = 0


class _Sampling(msgspec.Struct):
    max_new_tokens: int
    stream_interval: int | None = None


class _GenerateBody(msgspec.Struct):
    rid: str
    input_ids: list[int]
    sampling_params: _Sampling


_decode_generate = msgspec.json.Decoder(_GenerateBody).decode


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the engines of one process answer."""

    step_s: float = 0.02
    """Seconds per token of a stream."""
    answer_tokens: int = 1 << 40
    """Length of an answer, unless `max_new_tokens` is shorter."""
    stream_interval: int | None = None
    """Tokens per event, whatever a request says; None follows the request, and takes 1 without its word."""
    held: bool = False
    """Whether engines decode nothing."""

    def interval_of(self, body: _GenerateBody) -> int:
        """Return the tokens of one event of a call."""
        return self.stream_interval or body.sampling_params.stream_interval or 1


class _Stream:
    """One running call."""

    __slots__ = ("body", "interval", "limit", "middle", "spans", "total", "transport")

    def __init__(self, transport: asyncio.Transport, body: _GenerateBody, interval: int) -> None:
        self.transport = transport
        self.body = body
        self.interval = interval
        self.limit = body.sampling_params.max_new_tokens
        self.total = 0
        self.spans: list[list[Any]] = []
        self.middle = b""

    @property
    def longest(self) -> int:
        """Tokens that the request allows."""
        return self.body.sampling_params.max_new_tokens

    def sample_under(self, version: str) -> None:
        """Sample the next tokens under a weight version."""
        self.spans.append([version, self.total])
        self.middle = f'{self.body.rid}","weight_version":"{version}",'.encode()


class PacedEngine:
    """One engine: a port, a weight version, and streams that advance together.

    Example:
        >>> engine = PacedEngine(Pace(step_s=0.02), Counts(), seed=0)
        >>> server = await asyncio.get_running_loop().create_server(engine.connection, "127.0.0.1", 0)
        >>> await engine.run_steps()
    """

    def __init__(self, pace: Pace, counts: Counts, seed: int) -> None:
        self._pace = pace
        self._counts = counts
        self._random = random.Random(seed)
        self._version, self._path = "0", "model"
        self._paused = False
        self._tick = 0
        self._due: defaultdict[int, list[_Stream]] = defaultdict(list)
        self._streams: dict[str, _Stream] = {}

    def connection(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        return _Connection(self)

    def set_pace(self, pace: Pace) -> None:
        """Answer in another way; running answers follow after their next event, with lengths of their own."""
        for stream in self._streams.values():
            stream.interval = pace.interval_of(stream.body)
        if pace.answer_tokens != self._pace.answer_tokens:
            for stream in self._streams.values():
                most = max(1, min(pace.answer_tokens, stream.longest) - stream.total)
                stream.limit = min(stream.total + self._random.randint(1, most), stream.longest)
        self._pace = pace

    async def run_steps(self) -> None:
        """Give every stream a token per step; never returns."""
        clock = time.monotonic
        next_s = clock() + self._random.random() * self._pace.step_s
        while True:
            await asyncio.sleep(max(0.0, min(next_s - clock(), _LONGEST_SLEEP_S)))
            step_s = self._pace.step_s
            if (now_s := clock()) < next_s:
                next_s = min(next_s, now_s + step_s)  # the pace may have changed
                continue
            late = int((now_s - next_s) / step_s)
            next_s += (1 + late) * step_s
            if not (self._paused or self._pace.held):
                self._counts.late_steps += late * len(self._streams)
                self.advance()

    def advance(self) -> None:
        """Take a step."""
        self._tick += 1
        for stream in self._due.pop(self._tick, ()):
            if stream.total < 0:
                continue  # aborted
            if stream.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
                self._counts.late_steps += 1
                self._due[self._tick + 1].append(stream)
                continue
            new = min(stream.interval, max(1, stream.limit - stream.total))
            stream.total += new
            self._counts.tokens += new
            self._counts.events += 1
            if stream.total >= stream.limit:
                self._counts.answers += 1
                is_cut = stream.total < stream.longest
                self._end(
                    stream, new, {"type": "stop", "matched": _STOP_TOKEN} if is_cut else {"type": "length"}
                )
                continue
            head, tail = _event_parts(stream.total, new)
            size = len(head) + len(stream.middle) + len(tail)
            stream.transport.write(b"%x\r\n%b%b%b\r\n" % (size, head, stream.middle, tail))
            self._schedule(stream)

    def _schedule(self, stream: _Stream) -> None:
        tokens = min(stream.interval, stream.limit - stream.total)
        self._due[self._tick + max(1, tokens)].append(stream)

    def _end(self, stream: _Stream, new: int, reason: dict[str, Any]) -> None:
        """Write the last event of a stream."""
        body, total = stream.body, stream.total
        ids = _token_ids(total, new)
        if reason["type"] == "stop":
            ids[-1] = _STOP_TOKEN
        ends = [start for _, start in stream.spans[1:]] + [total]
        meta: dict[str, Any] = {
            "id": body.rid,
            "finish_reason": reason,
            "prompt_tokens": len(body.input_ids),
            "weight_version": stream.spans[-1][0],
            "weight_versions": [
                {"version": version, "start": start, "end": end}
                for (version, start), end in zip(stream.spans, ends, strict=True)
                if end > start
            ],
            "completion_tokens": total,
            "cached_tokens": 0,
            "output_token_logprobs": [[_LOG_PROB, token, None] for token in ids],
        }
        document = {"text": "x", "output_ids": ids, "meta_info": meta}
        data = b"data: " + msgspec.json.encode(document) + b"\n\n"
        stream.transport.write(b"%x\r\n%b\r\n%b" % (len(data), data, _DONE))
        self._remove(stream)

    def _remove(self, stream: _Stream) -> None:
        stream.total = -1
        del self._streams[stream.body.rid]
        self._counts.running -= 1

    # -- requests ---------------------------------------------------------------------------------------

    def generate(self, transport: asyncio.Transport, content: bytes) -> None:
        """Start a stream."""
        body = _decode_generate(content)
        pace = self._pace
        stream = self._streams[body.rid] = _Stream(transport, body, pace.interval_of(body))
        stream.limit = min(stream.limit, pace.answer_tokens)
        stream.sample_under(self._version)
        self._counts.running += 1
        transport.write(_HEAD)
        self._schedule(stream)

    def control(self, endpoint: str, content: bytes) -> Any:
        """Return the reply to any other request."""
        body = msgspec.json.decode(content) if content else {}
        match endpoint:
            case "server_info":
                return _SERVER_INFO
            case "model_info":
                return {"model_path": self._path, "weight_version": self._version}
            case "counts":
                return self._counts
            case "pace":
                self.set_pace(msgspec.convert(body, Pace))
            case "abort_request":
                for rid in [r for r in self._streams if body.get("abort_all") or r.startswith(body["rid"])]:
                    self._counts.aborted += 1
                    self._end(self._streams[rid], 0, {"type": "abort", "message": "Aborted"})
            case "pause_generation":
                self._paused = True
            case "continue_generation":
                self._paused = False
        self._path = body.get("model_path", self._path)
        version = body.get("weight_version") or body.get("new_version")
        if version is not None:
            self._version = version
            for stream in self._streams.values():
                stream.sample_under(version)
        return {"success": True, "message": ""}

    def drop_connection(self, transport: asyncio.Transport) -> None:
        """End the stream of a connection that is lost."""
        for stream in [s for s in self._streams.values() if s.transport is transport]:
            self._remove(stream)


class _Connection(asyncio.Protocol):
    """Just enough HTTP: bodies with a length, one request at a time on a connection."""

    def __init__(self, engine: PacedEngine) -> None:
        self._engine = engine
        self._buffer = b""
        self._is_stream = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            found = re.search(rb"(?i)content-length: (\d+)", head)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._buffer) < size:
                return
            content, self._buffer = self._buffer[end + 4 : size], self._buffer[size:]
            endpoint = head.split(b" ", 2)[1].strip(b"/").decode()
            if endpoint == "generate":
                self._is_stream = True
                self._engine.generate(self._transport, content)
                continue
            reply = msgspec.json.encode(self._engine.control(endpoint, content))
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(reply), reply)
            )

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_stream:
            self._engine.drop_connection(self._transport)


def _token_ids(total: int, new: int) -> list[int]:
    return [_FIRST_TOKEN + position % _NUM_TOKENS for position in range(total - new, total)]


@lru_cache(maxsize=1 << 17)
def _event_parts(total: int, new: int) -> tuple[bytes, bytes]:
    """Return what an event that brings a call to `total` tokens has before and after id and version."""
    ids = _token_ids(total, new)
    log_probs = [[_LOG_PROB, token, None] for token in ids]
    head = b'data: {"text":"x","output_ids":%b,"meta_info":{"id":"' % msgspec.json.encode(ids)
    tail = (
        b'"finish_reason":null,"prompt_tokens":64,"total_retractions":0,"output_token_logprobs":%b,'
        b'"completion_tokens":%d,"cached_tokens":0}}\n\n' % (msgspec.json.encode(log_probs), total)
    )
    return head, tail


async def serve_engines(num_engines: int) -> None:
    """Serve engines on free ports of the loopback, print their URLs, and never return."""
    counts, loop = Counts(), asyncio.get_running_loop()
    engines = [PacedEngine(Pace(), counts, seed) for seed in range(num_engines)]
    servers = [await loop.create_server(e.connection, "127.0.0.1", 0, backlog=4096) for e in engines]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    print(msgspec.json.encode(urls).decode(), flush=True)
    await asyncio.gather(*(engine.run_steps() for engine in engines))


if __name__ == "__main__":
    gc.disable()  # streams have no reference cycles, and a collection would delay steps
    die_with_parent()
    asyncio.run(serve_engines(int(sys.argv[1])))
