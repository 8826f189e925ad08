"""The parts of the chaos tests that need no model: faults inside a server, shortages, the table."""

import asyncio
import itertools
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pybase64

from async_rl.simulation.faults import FAULTS
from tests.chaos.audit import Finding
from tests.chaos.engine_faults import (
    PADDING,
    EngineFaults,
    FaultMiddleware,
    TooBusy,
    row_digests,
)
from tests.chaos.plan import DECK, blows
from tests.chaos.shortages import DescriptorShortage, FullDisk
from tests.chaos.strikes import Strikes

PROMPT = [5, 6, 7]
ANSWER = [8, 9]
ROWS = np.arange(4 * 2 * 2, dtype=np.int32).reshape(4, 2, 2)  # of all tokens but the last
MOE_LAYERS = (1,)


def _events() -> list[bytes]:
    """The events of a call that samples two tokens, as SGLang sends them."""
    last = {"completion_tokens": 2, "routed_experts": pybase64.b64encode(ROWS.tobytes()).decode()}
    events = [
        {"output_ids": ANSWER[:1], "meta_info": {"completion_tokens": 1}},
        {"output_ids": ANSWER[1:], "meta_info": last},
    ]
    return [b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]


async def _server(scope, receive, send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for event in _events():
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _call(faults: EngineFaults, stop=lambda: None) -> list[dict]:
    """What the middleware sends for one generate call."""
    sent: list[dict] = []

    async def receive():
        return {"type": "http.request", "body": msgspec.json.encode({"input_ids": PROMPT})}

    async def send(message) -> None:
        sent.append(dict(message))

    def stopped() -> None:
        sent.append({"type": "stopped"})
        stop()

    app = FaultMiddleware(_server, faults, MOE_LAYERS, 2, stopped)
    asyncio.run(app({"type": "http", "method": "POST", "path": "/generate"}, receive, send))
    return sent


def test_the_deck_has_every_kind_once_before_one_comes_again() -> None:
    dealt = list(itertools.islice(blows(7), 2 * len(DECK)))
    assert dealt == list(itertools.islice(blows(7), 2 * len(DECK)))
    assert dealt != list(itertools.islice(blows(8), 2 * len(DECK)))
    assert (
        {blow.kind for blow in dealt[: len(DECK)]} == {blow.kind for blow in dealt[len(DECK) :]} == set(DECK)
    )
    assert {how for _, how in DECK} - {"SIGKILL", "SIGSTOP"} <= FAULTS.keys()  # the simulation's names


def test_a_server_is_stopped_when_half_of_a_payload_has_left_it(tmp_path) -> None:
    faults = EngineFaults(tmp_path)
    faults.request("stuck_payload", os.getpid())
    sent = _call(faults)
    index = next(i for i, message in enumerate(sent) if message["type"] == "stopped")
    half, rest = sent[index - 1]["body"], sent[index + 1]["body"]
    text = pybase64.b64encode(ROWS.tobytes())
    assert half.endswith(text[: len(text) // 2])
    assert rest.startswith(text[len(text) // 2 :])
    assert len(half) > PADDING
    assert msgspec.json.decode((half + rest).removeprefix(b"data: ").strip())["meta_info"] is not None
    [evidence] = faults.evidence()
    assert (evidence.fault, evidence.bytes_sent, evidence.bytes_left) == (
        "stuck_payload",
        len(half),
        len(rest),
    )
    assert not any(message["type"] == "stopped" for message in _call(faults))  # once for each request


def test_a_server_answers_429_until_the_request_is_withdrawn(tmp_path) -> None:
    faults = EngineFaults(tmp_path)
    faults.request("too_busy", os.getpid(), msgspec.json.encode(TooBusy(time.time() + 1000)))
    start, _ = _call(faults)
    assert start["status"] == 429
    assert (b"retry-after", b"1") in start["headers"]
    assert [each.fault for each in faults.evidence()] == ["too_busy"]
    faults.withdraw("too_busy", os.getpid())
    assert _call(faults)[0]["status"] == 200


def test_rows_that_were_sent_are_known_with_their_tokens(tmp_path) -> None:
    faults = EngineFaults(tmp_path)
    _call(faults)
    tokens, rows = np.array(PROMPT + ANSWER), ROWS[:, list(MOE_LAYERS)].astype(np.uint8)
    trained = row_digests(tokens, rows, 0)
    assert set(trained) == set(faults.sent_rows())
    assert not set(row_digests(tokens, np.roll(rows, 1, axis=0), 0)) & set(faults.sent_rows())
    tokens[0] = 4
    assert not set(row_digests(tokens, rows, 0)) & set(faults.sent_rows())


def test_rows_of_a_later_part_have_the_digests_of_the_whole() -> None:
    tokens, rows = np.arange(9), np.arange(8 * 2).reshape(8, 1, 2)
    assert list(row_digests(tokens, rows[3:], 3)) == list(row_digests(tokens, rows, 0)[3:])


def test_a_process_has_no_descriptor_until_the_shortage_ends() -> None:
    program = (
        "import sys\nfor line in sys.stdin:\n try: open('/dev/null').close(); print('open', flush=True)\n"
    )
    program += " except OSError as e: print(e.errno, flush=True)\n"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> str:
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert ask() == "open"
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        shortage = DescriptorShortage(process.pid)
        assert shortage.tighten()
        assert ask() == "24"
        shortage.end()
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == limits
        assert ask() == "open"
        process.stdin.close()


def test_a_disk_has_no_block_until_it_is_freed(tmp_path, monkeypatch) -> None:
    capacity = 3 << 20

    def disk_usage(folder: Path):
        used = sum(path.stat().st_size for path in Path(folder).iterdir())
        return type("usage", (), {"free": capacity - used})

    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    (tmp_path / "other").write_bytes(bytes(1000))
    disk = FullDisk(tmp_path)
    assert disk.fill()
    disk.free()
    assert disk_usage(tmp_path).free == capacity - 1000


def test_a_fault_that_never_took_effect_fails_the_run() -> None:
    strikes = Strikes()
    for kind in (("engine", "too_busy"), ("engine", "too_busy"), ("disk", "disk_full")):
        strikes.plan(kind)
    strikes.strike(("engine", "too_busy"), {"requests answered 429": 7})
    strikes.strike(("engine", "too_busy"), {"requests answered 429": 2})
    assert strikes.table()[1].split(maxsplit=4) == ["too_busy", "engine", "2", "2", "9 requests answered 429"]
    finding = strikes.finding()
    assert not finding.holds
    assert "disk_full of disk" in finding.detail
    strikes.strike(("disk", "disk_full"))
    assert strikes.finding() == Finding("every fault took effect", True, "3 of 3, never: none")
    assert not strikes.finding(required=DECK).holds
