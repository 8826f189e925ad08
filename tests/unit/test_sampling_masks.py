"""Masks of truncated sampling: from an engine's events to the batch, over aborts, failovers and restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.engine_protocol import Chunk, Finish, GenerateRequest, SamplingParams
from async_rl.engines.sglang.generate_call import CallAccount, encode_request
from async_rl.errors import ConfigError, EngineError, RequestRefused
from async_rl.run.preflight import check_temperature
from async_rl.store.frames import read_trajectories
from async_rl.store.journal import Journal
from async_rl.types import SamplingMask, SamplingSettings, Trajectory, VersionSpan
from tests.support.fake_sglang import GOOD_SERVER, FakeSGLang, event, finish
from tests.support.journals import continue_journals, reopen_entry
from tests.support.run_config import config_of
from tests.support.scripted import ScriptedEngine
from tests.support.sessions import Bench
from tests.support.stored_batches import taken_batch
from tests.support.trajectories import MadeGroup
from tests.unit.test_session import PROMPT

TRUNCATED: dict[str, Any] = {"top_p": 0.9, "top_k": 4, "replay": "off"}


def masked(ids: list[int], *, exclude: bool = False) -> Chunk:
    """A chunk whose n-th token was sampled out of n + 1 tokens."""
    kept = [[*range(token + exclude, token + exclude + index + 1)] for index, token in enumerate(ids)]
    return Chunk.of(ids, [-0.5] * len(ids), SamplingMask.of(kept))


def ended(reason: Any, version: int, count: int) -> Finish:
    spans = (VersionSpan(start=0, end=count, weight_version=version),) if count else ()
    return Finish(reason=reason, version_spans=spans)


def bench_of(*scripts: Any, **settings: Any) -> Bench:
    bench = Bench(ScriptedEngine("engine-0", scripts), **TRUNCATED, **settings)
    bench.start()
    return bench


def lists(mask: SamplingMask | None) -> list[list[int]]:
    assert mask is not None
    return [mask[position : position + 1].token_ids.tolist() for position in range(len(mask))]


# -- the mask itself --------------------------------------------------------------------------------------


KEPT = [[3, 9], [], [70000], [1, 2, 3]]


def test_a_mask_has_what_it_was_made_of() -> None:
    mask = SamplingMask.of(KEPT)
    assert lists(mask) == KEPT
    assert (mask.token_ids.dtype, mask.counts.dtype) == (np.uint32, np.uint16)
    assert SamplingMask.of([[65535]]).token_ids.dtype == np.uint16
    assert lists(mask[1:3]) == [[], [70000]]
    assert lists(mask.take(np.array([3, 0, 0, 1]))) == [[1, 2, 3], [3, 9], [3, 9], []]
    joined = SamplingMask.joined([mask[2:], SamplingMask.untruncated(2), mask[:1]])
    assert lists(joined) == [[70000], [1, 2, 3], [], [], [3, 9]]
    assert mask.rows.tolist() == [0, 0, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ([[1 << 32]], "negative or wider than 32 bits"),
        ([[1], [0] * 65536], "has 65536 token ids at a position, expected at most 65535"),
        ([[1], [500]], "has the token id 500, expected less than 500"),
    ],
)
def test_a_mask_of_impossible_ids_is_refused(kept: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingMask.of(kept, 500)


@pytest.mark.parametrize("length", [0, 1, 2, 50])
def test_a_mask_keeps_a_token_if_its_list_has_it_or_is_empty(length: int) -> None:
    rng = np.random.default_rng(length)
    for largest in (4, 1 << 17):
        kept = [rng.integers(0, largest, rng.integers(0, 5)).tolist() for _ in range(length)]
        tokens = [int(rng.choice(ids)) if ids and rng.random() < 0.5 else 3 for ids in kept]
        expected = [not ids or token in ids for ids, token in zip(kept, tokens, strict=True)]
        assert SamplingMask.of(kept).keeps(np.array(tokens, np.int32)).tolist() == expected


# -- sessions ---------------------------------------------------------------------------------------------


async def sampled_mask(bench: Bench) -> tuple[Trajectory, list[list[int]]]:
    await bench.session.generate()
    trajectory = await bench.finish()
    return trajectory, lists(trajectory.sampling_mask)


async def test_masks_are_requested_and_kept_when_a_call_is_aborted_and_resumed() -> None:
    bench = bench_of(
        lambda r: [masked([100, 101]), masked([102]), ended("abort", 0, 3)],
        lambda r: [masked([200, 201]), ended("stop", 1, 2)],
    )
    trajectory, mask = await sampled_mask(bench)
    assert mask[:PROMPT] == [[]] * PROMPT
    assert mask[PROMPT:] == [[100], [101, 102], [102], [200], [201, 202]]
    assert [request.return_mask for request in bench.engines[0].requests] == [True, True]
    assert [segment.mask is not None for segment in trajectory.sampled] == [True, True]


async def test_masks_are_divided_with_their_tokens_when_versions_change_within_a_call() -> None:
    spans = (VersionSpan(start=0, end=1, weight_version=0), VersionSpan(start=1, end=3, weight_version=1))
    bench = bench_of(lambda r: [masked([100, 101, 102]), Finish(reason="stop", version_spans=spans)])
    trajectory, _ = await sampled_mask(bench)
    assert [lists(segment.mask) for segment in trajectory.sampled] == [[[100]], [[101, 102], [102, 103, 104]]]


async def test_masks_of_tokens_that_are_cut_off_go_with_them() -> None:
    def break_off(request: GenerateRequest) -> list[Any]:
        chunk = masked([100, 101, 102])
        chunk.log_probs[1] = np.nan
        return [chunk, EngineError("gone")]

    other = ScriptedEngine("engine-1", [lambda r: [masked([200]), ended("stop", 0, 1)]])
    bench = Bench(ScriptedEngine("engine-0", [break_off]), other, **TRUNCATED)
    bench.start()
    _, mask = await sampled_mask(bench)
    assert mask[PROMPT:] == [[100], [200]]


@pytest.mark.parametrize(
    "wrong",
    [
        masked([300, 301], exclude=True),
        Chunk.of([300], [-0.5]),
        Chunk.of([300, 301], [-0.5, -0.5], SamplingMask.of([[300]])),
        Chunk.of([300], [-0.5], SamplingMask.of([[]])),
    ],
    ids=["excludes its token", "none", "too short", "empty"],
)
async def test_tokens_with_a_wrong_mask_are_discarded_and_are_a_strike(
    wrong: Chunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(
        lambda r: [masked([100]), wrong, ended("stop", 0, 3)],
        lambda r: [masked([200]), ended("stop", 0, 1)],
    )
    strikes: list[Any] = []
    record = bench.pool.record_strike
    monkeypatch.setattr(bench.pool, "record_strike", lambda *given: (strikes.append(given), record(*given)))
    trajectory, mask = await sampled_mask(bench)
    assert mask[PROMPT:] == [[100], [200]]
    assert trajectory.outcome.num_failovers == 1
    assert [engine for engine, _ in strikes] == ["engine-0"]
    assert bench.counted("answers_discarded_total", reason="wrong_mask") == 1


async def test_no_masks_are_requested_when_sampling_is_not_truncated_or_not_replayed() -> None:
    for settings in ({}, {"top_p": 0.9, "top_k": 4, "replay_sampling": False}):
        script = [lambda r: [Chunk.of([100], [-0.5]), ended("stop", 0, 1)]]
        bench = Bench(ScriptedEngine("engine-0", script), replay="off", **settings)
        await bench.begin()
        assert not bench.engines[0].requests[0].return_mask
        assert (await bench.finish()).sampling_mask is None


async def test_masks_of_a_running_call_are_restored_after_a_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "000001")
    entry = journal.open_entry("0" * 32)

    class Writing(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Any:
            yield masked([100, 101])
            journal.write_entries()
            yield masked([102])
            journal.write_entries()
            written.set()
            await asyncio.Future()

    bench = Bench(Writing(), entry=entry, **TRUNCATED)
    bench.start()
    written = asyncio.Event()
    running = asyncio.ensure_future(bench.session.generate())
    await written.wait()
    journal.close()  # the process is killed: what it knows beyond the journal is lost
    journal, left = continue_journals(tmp_path, ["0" * 32])
    goes_on = Bench(
        ScriptedEngine("engine-0", [lambda r: [masked([200]), ended("stop", 0, 1)]]),
        entry=reopen_entry(journal, left["0" * 32].copied()),
        **TRUNCATED | {"temperature": 0.5, "top_k": 7},
    )
    goes_on.start()
    trajectory, mask = await sampled_mask(goes_on)
    journal.close()
    running.cancel()
    assert mask[PROMPT:][:3] == [[100], [101, 102], [102]]
    assert mask[-1] == [200]
    old, new = (segment.sampling for segment in trajectory.sampled)
    assert old == SamplingSettings(top_p=0.9, top_k=4)
    assert new == SamplingSettings(temperature=0.5, top_p=0.9, top_k=7)
    group = MadeGroup(group_id="a", task_id="task", trajectories=(trajectory,))
    found = read_trajectories(taken_batch(tmp_path / "frames", [group], 0)).temperatures
    assert np.isnan(found[:PROMPT]).all()
    assert found[PROMPT:].tolist() == [1.0, 1.0, 1.0, 0.5]


# -- frames and batches -----------------------------------------------------------------------------------


async def finished(*ids: int) -> Trajectory:
    bench = bench_of(lambda r: [masked(list(ids)), ended("stop", 0, len(ids))])
    return (await sampled_mask(bench))[0]


async def test_a_batch_has_the_masks_of_those_trajectories_that_are_read(tmp_path: Path) -> None:
    one, other = await finished(100, 101), await finished(65, 66, 67)
    groups = [
        MadeGroup(group_id=name, task_id="task", trajectories=(each,))
        for name, each in (("a", one), ("b", other))
    ]
    taken = taken_batch(tmp_path, groups, 0)
    whole = read_trajectories(taken).sampling_mask
    assert lists(whole) == [*lists(one.sampling_mask), *lists(other.sampling_mask)]
    part = read_trajectories(taken, [1]).sampling_mask
    assert lists(part) == [[]] * one.num_tokens + lists(other.sampling_mask)
    assert read_trajectories(taken, []).sampling_mask is None


# -- SGLang -----------------------------------------------------------------------------------------------


def request(**sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="0" * 32,
        input_ids=np.array([5, 6], np.int32),
        max_new_tokens=8,
        sampling=SamplingParams(top_p=0.9, top_k=4, **sampling),
        return_mask=True,
    )


def document(ids: list[int], total: int, kept: list[list[int]], log_probs: list[float], **meta: Any) -> bytes:
    masks = {"output_token_sampling_mask": kept, "output_token_sampling_logprobs": log_probs}
    return event(ids, total, **masks, **meta).removeprefix(b"data: ").strip()


def test_masks_are_asked_for_and_log_probs_are_those_of_the_truncated_distribution() -> None:
    assert b'"return_sampling_mask":true' in encode_request(request(min_p=0.1))
    assert b'"min_p":0.1' in encode_request(request(min_p=0.1))
    account = CallAccount("engine-0", request(), 300)
    account.read_event(document([7], 1, [[7, 8]], [-0.25]), None)
    account.read_event(document([9, 10], 3, [[9], [1, 10]], [0.0, -1.5]), None)
    with pytest.raises(EngineError, match="outside the vocabulary of 300"):  # what came before is kept
        account.read_event(document([300], 4, [[9]], [-0.5]), None)
    chunk = account.take_chunk()
    assert chunk is not None
    assert chunk.log_probs.tolist() == [-0.25, 0.0, -1.5]
    assert lists(chunk.mask) == [[7, 8], [9], [1, 10]]


def test_masks_are_cut_with_their_tokens_when_an_abort_repeats_or_lacks_some() -> None:
    account = CallAccount("engine-0", request(), 300)
    account.read_event(document([7, 8], 2, [[7], [8]], [-0.5, -0.5]), None)
    end = finish("abort", message="x")
    account.read_event(document([8, 9, 10], 4, [[7], [8], [9]], [-0.5, -0.5, -0.75], finish_reason=end), None)
    chunk = account.take_chunk()
    assert chunk is not None
    assert len(chunk.token_ids) == len(chunk.log_probs) == len(chunk.mask or ())


@pytest.mark.parametrize(
    ("kept", "log_probs", "words"),
    [
        ([[7, 300]], [-0.5], "has the token id 300, expected less than 300"),
        ([[7]], [], "0 log-probs of the same tokens"),
        ([[7]], [0.5], r"Expected `float` <= 0\.001"),
    ],
)
def test_a_mask_that_cannot_be_is_an_error_of_the_engine(
    kept: list[list[int]], log_probs: list[float], words: str
) -> None:
    account = CallAccount("engine-0", request(), 300)
    with pytest.raises(EngineError, match=words):
        account.read_event(document([7], 1, kept, log_probs), None)


def test_a_mask_that_overflows_is_a_refused_request_and_no_interruption() -> None:
    account = CallAccount("engine-0", request(), 300)
    overflow = finish("abort", status_code=400, message="Sampling support exceeds --sampling-mask-max-tokens")
    with pytest.raises(RequestRefused, match="Sampling support exceeds"):
        account.read_event(document([7], 1, [[7]], [-0.5], finish_reason=overflow), None)


def test_the_longest_event_of_a_call_allows_for_its_masks() -> None:
    limits = [
        CallAccount("engine-0", replace(request(), sampling=SamplingParams(top_k=top_k)), 300).max_event_bytes
        for top_k in (1, 4096)
    ]
    longest = len(document([7] * 8, 8, [[151_935] * 4096] * 8, [-0.123456789] * 8))
    assert longest < limits[1]
    assert limits[0] < limits[1]


MASKS = {"sampling_mask_max_tokens": 4096}


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "returns no sampling masks: use SGLang 0.5.23"),
        ({"sampling_mask_max_tokens": 16}, "below rollout.top_k = 20: start it with --sampling-mask-max"),
        (MASKS | {"speculative_algorithm": "EAGLE"}, "drafts have no sampling masks"),
        (MASKS | {"sampling_backend": "ascend"}, "ascend, which has no masks"),
        (MASKS | {"sampling_backend": "pytorch"}, None),
    ],
)
async def test_a_server_is_refused_when_it_cannot_return_the_masks_that_are_needed(
    changed: dict[str, Any], words: str | None
) -> None:
    server = FakeSGLang()
    server.answers["server_info"] = (200, GOOD_SERVER | changed)
    async with server.client(routing=False, mask_top_k=20) as engine:
        if words is None:
            await engine.wait_ready()
        else:
            with pytest.raises(ConfigError, match=words):
                await engine.wait_ready()


@pytest.mark.parametrize(
    "sampling",
    [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5000}, {"top_p": 0.9, "top_k": 4097}],
)
def test_sampling_that_cannot_be_replayed_is_refused(sampling: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="engines return at most 4096 kept tokens"):
        config_of(**sampling)
    config_of(**sampling, replay_sampling=False)
    config_of(**sampling | {"top_k": 20})


def test_a_temperature_at_which_engines_are_greedy_is_refused() -> None:
    check_temperature(config_of(temperature=0.01))
    with pytest.raises(
        ConfigError, match=r"rollout\.temperature is 1e-07, expected at least 0\.01: engines are greedy"
    ):
        check_temperature(config_of(temperature=1e-7))
