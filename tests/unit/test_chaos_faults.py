"""The parts of the chaos tests that need no model: faults inside a server, shortages, the table."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pybase64

from async_rl.store.journal import Journal
from async_rl.types import Context, Sampled
from verification.audit_run import Result
from verification.chaos.engine_faults import (
    EngineFaults,
    FaultMiddleware,
    row_digests,
)
from verification.chaos.lost_journals import (
    LostJournal,
    count_left,
    left_in,
    read_journals,
)
from verification.chaos.plan import DECK
from verification.chaos.strikes import Strikes

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


def _call(faults: EngineFaults) -> None:
    """Make one generate call through the middleware."""

    async def receive():
        return {"type": "http.request", "body": msgspec.json.encode({"input_ids": PROMPT})}

    async def send(message) -> None:
        assert message["type"].startswith("http.response")

    app = FaultMiddleware(_server, faults, MOE_LAYERS, 2, lambda: None)
    scope = {"type": "http", "method": "POST", "path": "/generate"}
    asyncio.run(app(scope, receive, send))


def test_rows_that_were_sent_are_known_with_the_tokens_before_them(tmp_path) -> None:
    faults = EngineFaults(tmp_path)
    _call(faults)
    tokens, rows = np.array(PROMPT + ANSWER), ROWS[:, list(MOE_LAYERS)].astype(np.uint8)
    trained = row_digests(tokens, rows, 0)
    assert set(trained) == set(faults.sent_rows())
    assert list(row_digests(tokens, rows[3:], 3)) == list(trained[3:])
    assert not set(row_digests(tokens, np.roll(rows, 1, axis=0), 0)) & set(faults.sent_rows())
    tokens[0] = 4
    assert not set(row_digests(tokens, rows, 0)) & set(faults.sent_rows())


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
    assert strikes.finding() == Result("every fault took effect", True, "3 of 3, never: none")
    assert not strikes.finding(required=DECK).holds


def _write_journal(folder: Path, owner_epoch: int, answers: dict[str, list[int]]) -> None:
    journal = Journal(folder)
    for name, answer in answers.items():
        entry = journal.open_entry(name, owner_epoch=owner_epoch)
        entry.segments.append(Context(token_ids=np.array(PROMPT, np.int32)))
        entry.segments.append(
            Sampled(
                token_ids=np.array(answer, np.int32),
                rollout_log_probs=np.zeros(len(answer), np.float32),
                weight_version=0,
                engine_id="engine-0",
                finish_reason="abort",
            )
        )
    journal.write_entries()
    journal.close()


def test_a_journal_counts_for_the_trajectories_that_no_other_worker_has_taken_over(tmp_path) -> None:
    _write_journal(tmp_path / "a", 1, {"t0": [8, 9], "t1": [8], "t2": [9, 8, 8]})
    _write_journal(tmp_path / "b", 2, {"t1": [8, 8, 8]})
    journals = read_journals(tmp_path)
    left = left_in(tmp_path / "a", journals)
    assert left.keys() == {"t0", "t2"}
    assert count_left(left, {"t0": 1, "t1": 1, "t2": 1}) == 5
    assert count_left(left, {"t0": 2, "t2": 1}) == 3, "the other one has failed and begun again"
    assert left_in(tmp_path / "b", journals).keys() == {"t1"}
    assert left_in(tmp_path / "c", journals) == {}


def test_a_run_fails_that_does_not_use_the_journal_of_a_lost_worker() -> None:
    def holds(*journals: LostJournal) -> bool:
        strikes = Strikes()
        for lost in journals:
            strikes.lose_journal(("rollout worker", "SIGKILL"), lost)
        return strikes.journals().holds

    sound, little = LostJournal(num_left=654, num_used=630), LostJournal(num_left=654, num_used=3)
    assert holds()
    assert holds(sound)
    assert not holds(sound, little)
    assert not holds(little, sound), "others' tokens make up for nothing"
    assert holds(LostJournal(num_left=0, num_used=5))
