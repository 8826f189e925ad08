"""Measures what an event of a streamed reply costs the process that reads it.

    python benchmarks/stream_events.py [--streams 512] [--step-ms 25] [--rounds 3] [--json FILE]

Whole turns run against a server in another process, which sends what SGLang 0.5.23 sends: after each decode
step one event for each running request, as one HTTP chunk. The path is the real one: socket, HTTP client,
events, pool, session, tokens, and a journal that writes every second. CPU time is that of this process with
all its threads, from the first request to the last finish; the calls themselves are part of it. `paced` has a
decode step every `--step-ms`, `flat out` has no pause between steps. Figures are medians of the rounds.
The longest pause is how late a timer of the event loop was, and in parentheses the CPU time of its thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.config import RolloutConfig, RoutingConfig
from async_rl.data.chat_format import ChatFormat
from async_rl.engines.model_facts import facts_of
from async_rl.engines.pool import EnginePool
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.observability.metrics import Metrics
from async_rl.queue.journal import Journal
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.session.transcript import Transcript
from async_rl.runtime.short_pauses import short_pauses
from async_rl.types import Task
from benchmarks.support.loop_pauses import PauseRecorder, Pauses

PROMPT = np.arange(256, dtype=np.int32) % 500
VOCAB = 151_936
FACTS = facts_of({"num_hidden_layers": 2, "vocab_size": VOCAB, "max_position_embeddings": 10**7})
JOURNAL_S = 1.0
_STARTED_PER_TURN = 16
_SETTLE_S = 1.0


# -- the server, in a process of its own ----------------------------------------------------------------


def _frame(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _events(tokens: int, per_event: int) -> list[bytes]:
    """The chunks of one reply; real ones differ only in the request's id."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, tokens).tolist()
    log_probs = (-rng.exponential(1.0, tokens)).astype(np.float32).astype(float).tolist()
    frames = []
    for begin in range(0, tokens, per_event):
        end = min(begin + per_event, tokens)
        meta = {
            "id": "0" * 32,
            "finish_reason": {"type": "length", "length": tokens} if end == tokens else None,
            "prompt_tokens": len(PROMPT),
            "weight_version": "0",
            "num_retractions": 0,
            "output_token_logprobs": [[log_probs[i], ids[i], None] for i in range(begin, end)],
            "reasoning_tokens": 0,
            "completion_tokens": end,
            "cached_tokens": 0,
        }
        event = {"text": " some" * (end - begin), "output_ids": ids[begin:end], "meta_info": meta}
        frames.append(_frame(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"))
    frames[-1] += _frame(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return frames


_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


class _Server:
    """Decodes for all its requests in step."""

    def __init__(self, frames: list[bytes], step_s: float) -> None:
        self.frames = frames
        self.step_s = step_s
        self.running: dict[asyncio.Transport, int] = {}
        self.started = asyncio.Event()

    async def decode(self) -> None:
        due = time.perf_counter()
        while True:
            if not self.running:
                self.started.clear()
                await self.started.wait()
                due = time.perf_counter()
            for transport, index in list(self.running.items()):
                if transport.get_write_buffer_size() > 1 << 16:
                    continue  # the client is behind
                transport.write(self.frames[index] if index else _HEAD + self.frames[0])
                if index + 1 < len(self.frames):
                    self.running[transport] = index + 1
                else:
                    del self.running[transport]
            due += self.step_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


class _Connection(asyncio.Protocol):
    def __init__(self, server: _Server) -> None:
        self.server = server
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            found = re.search(rb"(?i)content-length: (\d+)", self.buffer[:end])
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self.buffer) < size:
                return
            self.buffer = self.buffer[size:]
            self.server.running[self.transport] = 0
            self.server.started.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.server.running.pop(self.transport, None)


def _serve(ready: Connection, tokens: int, per_event: int, step_s: float) -> None:
    async def main() -> None:
        server = _Server(_events(tokens, per_event), step_s)
        listener = await asyncio.get_running_loop().create_server(
            lambda: _Connection(server), "127.0.0.1", 0, backlog=4096
        )
        ready.send(listener.sockets[0].getsockname()[1])
        await server.decode()

    asyncio.run(main())


# -- the client -----------------------------------------------------------------------------------------


class _Chat:
    """A fixed prompt; nothing is decoded, as tokenizers are not what is measured."""

    stop_token_ids = ()
    end_of_turn_id = None

    def prompt_ids(self, messages: object, tools: object = ()) -> np.ndarray:
        return PROMPT

    def decode(self, token_ids: object) -> str:
        return ""


async def _turns(url: str, streams: int, tokens: int, folder: Path) -> tuple[float, float, Pauses]:
    """Run one turn in each stream; returns seconds of wall and CPU time, and pauses of the event loop."""
    metrics = Metrics()
    engine = SGLangEngine("engine-0", url, FACTS)
    pool = EnginePool(metrics, time.monotonic)
    pool.add_engine(engine)
    pool.serve_engine("engine-0", 0)
    rollout = RolloutConfig(max_context_tokens=len(PROMPT) + tokens, max_new_tokens=tokens)
    ids = iter(range(1 << 60))
    context = SessionContext(
        chat=cast(ChatFormat, _Chat()),
        rollout=rollout,
        metrics=metrics,
        clock=time.monotonic,
        serving_clock=pool.serving_clock,
        calls=pool,
        facts=FACTS,
        routing=RoutingConfig(replay="off"),
        interrupt="abort",
        new_id=lambda: f"{next(ids):032x}",
    )
    journal = Journal(folder)

    async def write_journal() -> None:
        while True:
            await asyncio.sleep(JOURNAL_S)
            await journal.write_in_thread()

    async def turn(number: int) -> None:
        name = f"t{number}"
        entry = journal.open_entry(name, 1, None)
        session = RolloutSession(
            context, Task(task_id="t", messages=[]), Transcript(context, entry), group_id="g"
        )
        session.start([])
        if len((await session.generate()).token_ids) != tokens:
            raise RuntimeError("a turn has the wrong number of tokens")
        recorder.stop()  # all streams end at once here, and in no run
        pool.dispatcher.forget_trajectory(name)
        journal.remove_entries([name])

    writer = asyncio.create_task(write_journal())
    recorder = PauseRecorder()
    asyncio.get_running_loop().call_later(_SETTLE_S, recorder.start)
    begin, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(turn(number))
            if number % _STARTED_PER_TURN == 0:  # as the dispatcher and the messages of a worker do
                await asyncio.sleep(0)
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    writer.cancel()
    await asyncio.gather(writer, return_exceptions=True)
    journal.close()
    await engine.close()
    return wall, cpu, recorder.pauses


async def _turns_in_a_run(url: str, streams: int, tokens: int, folder: Path) -> tuple[float, float, Pauses]:
    with short_pauses():  # as every process of a run
        return await _turns(url, streams, tokens, folder)


def _measure(streams: int, events: int, per_event: int, step_s: float) -> dict[str, float]:
    tokens = events * per_event
    receiver, sender = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(sender, tokens, per_event, step_s), daemon=True
    )
    server.start()
    sender.close()
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            url = f"http://127.0.0.1:{receiver.recv()}"
            wall, cpu, pauses = asyncio.run(_turns_in_a_run(url, streams, tokens, Path(folder)))
    finally:
        server.terminate()
        server.join()
    return {
        "us_an_event": 1e6 * cpu / (streams * events),
        "us_a_token": 1e6 * cpu / (streams * tokens),
        "tokens_per_cpu_s": streams * tokens / cpu,
        "cpu_share": cpu / wall,
        "longest_pause_ms": 1e3 * pauses.longest_s,
        "longest_pause_cpu_ms": 1e3 * pauses.longest_cpu_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer streams and events, one round")
    parser.add_argument("--streams", type=int, help="default: 512")
    parser.add_argument("--events", type=int, help="events of each stream (default: 512)")
    parser.add_argument("--tokens-per-event", type=int, nargs="+", default=[1, 8, 50])
    parser.add_argument("--step-ms", type=float, default=25.0, help="time of a decode step when paced")
    parser.add_argument("--rounds", type=int, help="default: 3")
    parser.add_argument("--json", metavar="FILE", help="write the same rows there")
    arguments = parser.parse_args()
    streams, events, rounds_of = (64, 64, 1) if arguments.quick else (512, 512, 3)
    streams, events = arguments.streams or streams, arguments.events or events
    rows: list[dict[str, object]] = []
    columns = f"{'us/event':>9} {'us/token':>9} {'tokens/CPU s':>13} {'CPU':>5} {'pause ms (CPU)':>15}"
    print(f"{'':<10} {'tokens/event':>12} {columns}")
    for mode, step_s in (("paced", arguments.step_ms / 1e3), ("flat out", 0.0)):
        for per_event in arguments.tokens_per_event:
            rounds = [
                _measure(streams, events, per_event, step_s) for _ in range(arguments.rounds or rounds_of)
            ]
            pick: Callable[[str], float] = lambda key: statistics.median(r[key] for r in rounds)  # noqa: B023, E731
            row: dict[str, object] = {
                "mode": mode,
                "streams": streams,
                "tokens_per_event": per_event,
            }
            row |= {key: round(pick(key), 3) for key in rounds[0]}
            row["load"] = os.getloadavg()[0]
            rows.append(row)
            print(
                f"{mode:<10} {per_event:>12} {pick('us_an_event'):>9.1f} {pick('us_a_token'):>9.2f} "
                f"{pick('tokens_per_cpu_s'):>13.0f} {pick('cpu_share'):>5.2f} "
                f"{pick('longest_pause_ms'):>9.1f} ({pick('longest_pause_cpu_ms'):.1f})",
                flush=True,
            )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
