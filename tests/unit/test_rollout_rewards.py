"""Rewards of a run: how they are called, what bounds them, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from aiohttp import web
from msgspec.structs import replace
from pebble import ProcessPool

from async_rl.errors import ConfigError, EnvironmentNotReady, RewardError, RewardUnavailable
from async_rl.observability.metrics import Metrics
from async_rl.rollout.rewards import reward_calls
from async_rl.rollout.rewards.http_rewards import RewardClient, RewardUnreachable
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.rollout.rewards.signatures import parts_of
from async_rl.runtime.reward_values import MAX_REWARD, reward_value
from async_rl.runtime.worker_processes import WorkerProcesses
from async_rl.staleness import Backlog
from async_rl.store.trajectory_queue import pack_groups
from async_rl.types import Completion, Task, TurnRecord
from tests.support import reward_functions
from tests.support.processes import wait_gone
from tests.support.run_config import config_of
from tests.support.stored_batches import store_trajectory
from tests.support.trajectories import make_trajectory

HERE = reward_functions.__name__


def rewards_of(metrics: Metrics | None = None, **rollout: Any) -> Rewards:
    clock = asyncio.get_running_loop().time
    decode = lambda ids: "".join(chr(token) for token in ids)  # noqa: E731
    return Rewards(
        config_of(group_size=3, **rollout), decode=decode, metrics=metrics or Metrics(), clock=clock
    )


def named(reward: dict[str, Any], **rollout: Any) -> Rewards:
    return rewards_of(reward="r", rewards={"r": reward}, **rollout)


def task_of(**fields: Any) -> Task:
    return Task(
        **{"task_id": "t", "messages": [{"role": "user", "content": "2 + 2?"}], "answer": "4", **fields}
    )


def completion_of(text: str, prompt: str = "2 + 2?") -> Completion:
    """A token is a character."""
    return Completion(
        messages=[{"role": "assistant", "content": text}],
        text=text,
        stop_reason="completed",
        token_ids=np.array([ord(c) for c in prompt + text], np.int32),
        response_mask=np.array([False] * len(prompt) + [True] * len(text)),
    )


def count(metrics: Metrics, name: str, reward: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"async_rl_{name}", {"reward": reward, **labels})


# -- how they are called -------------------------------------------------------------------------------------


VERL, SLIME = {"function": f"{HERE}:compute_score"}, {"function": f"{HERE}:rm", "args": {"prompt_tokens": 6}}
LENGTH = {"function": f"{HERE}:length", "args": {"scale": 0.5}}
COUNTING = {"function": f"{HERE}:count_arguments", "style": "verl"}
PART = VERL | {"part": "index"}
OF_VERL = {"data_source": "openai/gsm8k", "metadata": {"extra_info": {"index": 7}}}
OF_SLIME = {"answer": 4, "metadata": {"level": 2}}


@pytest.mark.parametrize(
    ("reward", "fields", "text", "scores"),
    [
        pytest.param(VERL, OF_VERL, "4", {"reward": 1.0, "score": 1.0, "index": 7.0}, id="verl"),
        pytest.param(SLIME, OF_SLIME, "it is 4", {"reward": 1.0}, id="slime"),
        pytest.param(SLIME, OF_SLIME, "it is 5", {"reward": 0.0}, id="slime wrong"),
        pytest.param(LENGTH, {}, "four", {"reward": 2.0}, id="args"),
        pytest.param(COUNTING, {}, "x", {"reward": 4.0}, id="style"),
        pytest.param(PART, {"metadata": {"index": 3}}, "x", {"reward": 3, "index": 3, "score": 0}, id="part"),
    ],
)
async def test_a_function_is_called_as_it_is_with_the_configs_arguments_style_and_part(
    reward: dict[str, Any], fields: dict[str, Any], text: str, scores: dict[str, float]
) -> None:
    assert await named(reward).score_completion(task_of(**fields), completion_of(text)) == scores


async def test_a_group_is_scored_by_one_call_and_nonsense_fails_its_own_alone() -> None:
    rewards = rewards_of(reward=f"{HERE}:relative")
    assert rewards.scores_groups(task_of())
    first, second, third = await rewards.score_group(
        task_of(), [completion_of(t) for t in ("ab", "", "abcd")]
    )
    assert (first, third) == ({"reward": 0.5, "most": 4.0}, {"reward": 1.0, "most": 4.0})
    assert isinstance(second, RewardError)
    assert "returned reward = nan" in str(second)
    slime = rewards_of(reward=f"{HERE}:group_rm")
    assert await slime.score_group(task_of(), [completion_of("abc")]) == [{"reward": 3.0}]


async def test_the_reward_is_zero_without_a_call_when_the_agent_failed() -> None:
    failed = msgspec.structs.replace(completion_of("4"), stop_reason="failed")
    assert await named(VERL).score_completion(task_of(**OF_VERL), failed) == {"reward": 0.0}
    rewards = rewards_of(reward=f"{HERE}:relative")
    alone, first, second = await rewards.score_group(
        task_of(), [failed, completion_of("ab"), completion_of("abcd")]
    )
    assert alone == {"reward": 0.0}
    assert (first, second) == ({"reward": 0.5, "most": 4.0}, {"reward": 1.0, "most": 4.0})
    assert await rewards.score_group(task_of(), [failed]) == [{"reward": 0.0}]


async def test_a_task_has_the_reward_of_its_row_or_its_source_or_the_default() -> None:
    rewards = rewards_of(
        reward="a",
        rewards={"a": {"function": f"{HERE}:length"}},
        rewards_by_source={"gsm8k": f"{HERE}:rm"},
        trust_examples=True,
    )
    assert rewards.name_for(task_of()) == "a"
    assert rewards.name_for(task_of(data_source="other")) == "a"
    assert rewards.name_for(task_of(data_source="gsm8k")) == f"{HERE}:rm"
    assert rewards.name_for(task_of(data_source="gsm8k", reward=f"{HERE}:never")) == f"{HERE}:never"
    with pytest.raises(ConfigError, match=r"reward 'b' is neither a dotted path nor a name .*\(there: a\)"):
        rewards.name_for(task_of(reward="b"))


@pytest.mark.parametrize(
    ("value", "options", "parts"),
    [
        (1, {}, {"reward": 1.0}),
        (np.float32(0.5), {}, {"reward": 0.5}),
        ({"reward": np.int64(2), "a": 1}, {}, {"reward": 2.0, "a": 1.0}),
        ({"score": 1, "pred": "4"}, {"strict": False}, {"reward": 1.0, "score": 1.0}),
        ({"acc": 1, "score": 0}, {"part": "acc"}, {"reward": 1.0, "acc": 1.0, "score": 0.0}),
    ],
)
def test_a_result_is_numbers(value: Any, options: dict[str, Any], parts: dict[str, float]) -> None:
    assert parts_of(value, **options) == parts


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "reward = nan"),
        (None, "reward = None"),
        ({"a": 1}, r"the parts \['a'\], expected one called 'reward'"),
        ({"reward": 1, "why": "x"}, "why = 'x', expected a finite number"),
    ],
)
def test_a_result_that_is_none_says_what_it_is(value: Any, said: str) -> None:
    with pytest.raises(RewardError, match=f"returned {said}"):
        parts_of(value)


# -- what bounds them ----------------------------------------------------------------------------------------


async def test_a_reward_that_hangs_fails_after_its_time_and_retries() -> None:
    metrics, name = Metrics(), "slow"
    settings = {"function": f"{HERE}:never", "timeout_s": 5, "max_retries": 2}
    rewards = rewards_of(metrics, reward=name, rewards={name: settings})
    with pytest.raises(
        RewardError, match=r"reward slow took more than rollout\.rewards\.slow\.timeout_s = 5"
    ):
        await rewards.score_completion(task_of(), completion_of("x"))
    assert asyncio.get_running_loop().time() == 5 + 1 + 5 + 2 + 5
    assert count(metrics, "reward_retries_total", name) == 2
    assert count(metrics, "reward_errors_total", name, cause="infrastructure") == 1
    assert count(metrics, "reward_seconds_count", name) == 3


def unreachable_database() -> Exception:
    error = RuntimeError("cannot look up the answer")
    error.__cause__ = ConnectionRefusedError("10.0.0.7:5432")
    return error


ERRORS = {
    "unreachable database": unreachable_database(),
    "full disk": OSError(errno.ENOSPC, "No space left on device"),
    "no sandbox": EnvironmentNotReady("sandbox: this machine refuses the isolation"),
    "lost connection": aiohttp.ServerDisconnectedError(),
    "own timeout": TimeoutError("its database is slow"),
    "buggy": KeyError("answer"),
}


async def fail(task: Task, completion: Completion) -> float:
    raise ERRORS[completion.text]


@pytest.mark.parametrize("failure", ERRORS)
async def test_a_failure_of_the_infrastructure_is_counted_apart_and_is_no_score(failure: str) -> None:
    infrastructure = failure != "buggy"
    metrics, cause = Metrics(), "infrastructure" if infrastructure else "reward"
    name = f"{__name__}:fail"
    rewards = rewards_of(metrics, reward=name)
    with pytest.raises(RewardError, match=f"raised {type(ERRORS[failure]).__name__}") as failed:
        await rewards.score_completion(task_of(), completion_of(failure))
    assert type(failed.value) is (RewardUnavailable if infrastructure else RewardError)
    assert count(metrics, "reward_errors_total", name, cause=cause) == 1


@pytest.mark.parametrize(("failures", "reward"), [(2, 3.0), (3, None)])
async def test_a_reward_that_raises_is_called_again_as_often_as_it_may(
    failures: int, reward: float | None
) -> None:
    reward_functions.Flaky.calls, reward_functions.Flaky.failures = 0, failures
    rewards = named({"function": f"{HERE}:Flaky.score", "max_retries": 2})
    if reward is not None:
        assert await rewards.score_completion(task_of(), completion_of("x")) == {"reward": reward}
        return
    with pytest.raises(RewardError, match="raised RuntimeError: try again"):
        await rewards.score_completion(task_of(), completion_of("x"))
    assert reward_functions.Flaky.calls == 3


async def test_no_more_calls_run_at_a_time_than_the_config_allows() -> None:
    reward_functions.Crowd.most = 0
    rewards = named({"function": f"{HERE}:Crowd.score", "max_concurrent": 3, "timeout_s": 1.5})
    async with asyncio.TaskGroup() as group:
        scores = [
            group.create_task(rewards.score_completion(task_of(), completion_of("x"))) for _ in range(8)
        ]
    assert [score.result() for score in scores] == [{"reward": 1.0}] * 8  # to wait for a place is not to run
    assert reward_functions.Crowd.most == 3
    assert asyncio.get_running_loop().time() == 3.0


@pytest.mark.real_time
async def test_a_process_that_hangs_or_dies_is_replaced_and_fails_its_call_alone(tmp_path: Path) -> None:
    metrics, name = Metrics(), f"{HERE}:pid"
    rewards = rewards_of(metrics, reward="p", rewards={"p": {"function": name, "timeout_s": 60}})
    try:
        first = (await rewards.score_completion(task_of(), completion_of("x")))["reward"]
        assert first != os.getpid()
        assert (await rewards.score_completion(task_of(), completion_of("x")))["reward"] == first
        with pytest.raises(RewardError, match="raised ProcessExpired"):
            await rewards.score_completion(task_of(), completion_of("die"))
        os.mkfifo(note := tmp_path / "pid")
        call = asyncio.ensure_future(rewards.score_completion(task_of(), completion_of(f"hang in {note}")))
        hung = int(await asyncio.to_thread(note.read_text))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.to_thread(wait_gone, hung)  # the pool reaps it
        assert (await rewards.score_completion(task_of(), completion_of("x")))["reward"] not in (first, hung)
    finally:
        await rewards.close()


@pytest.mark.real_time
@pytest.mark.parametrize("noticed", [True, False])
async def test_a_process_that_is_killed_between_two_calls_is_replaced(noticed: bool) -> None:
    """By the kernel, which is short of memory, for example."""
    workers = WorkerProcesses(f"{HERE}:pid", 1)
    try:
        first = await workers.call(task_of(), completion_of("x"))
        os.kill(int(first), signal.SIGKILL)
        if noticed:
            assert workers._pool is not None
            while workers._pool.active:  # noqa: ASYNC110 - a thread of the pool looks ten times per second
                await asyncio.sleep(0.01)
        others = [workers.call(task_of(), completion_of("x")) for _ in range(3)]
        assert first not in await asyncio.gather(*others)
    finally:
        workers.close()


@pytest.mark.real
@pytest.mark.real_time
@pytest.mark.parametrize("forgets", [True, False])
async def test_a_call_is_made_in_another_pool_when_one_breaks_before_or_after_it_takes_the_call(
    forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, lost = ProcessPool.schedule, list[Future[Any]]()

    def break_first(pool: ProcessPool, *args: Any, **kwargs: Any) -> Any:
        if not lost:
            lost.append(Future())
            pool.stop()
            if forgets:
                return lost[0]
        return schedule(pool, *args, **kwargs)

    workers = WorkerProcesses(f"{HERE}:pid", 1)
    monkeypatch.setattr(ProcessPool, "schedule", break_first)
    try:
        assert await workers.call(task_of(), completion_of("x")) != os.getpid()
        assert lost[0].cancelled() == forgets
    finally:
        workers.close()


@pytest.mark.real_time
async def test_a_call_fails_when_its_workers_are_closed(tmp_path: Path) -> None:
    workers = WorkerProcesses(f"{HERE}:pid", 1)
    os.mkfifo(note := tmp_path / "pid")
    call = asyncio.ensure_future(workers.call(task_of(), completion_of(f"hang in {note}")))
    await asyncio.to_thread(note.read_text)
    await asyncio.to_thread(workers.close)
    with pytest.raises(ChildProcessError, match="have ended"):
        await call


def test_an_async_function_cannot_be_had_in_processes() -> None:
    with pytest.raises(ConfigError, match=r"r is async and configured for 2 worker processes"):
        Rewards(
            config_of(reward="r", rewards={"r": {"function": f"{HERE}:never", "processes": 2}}),
            decode=str,
            metrics=Metrics(),
            clock=time.monotonic,
        )


# -- servers -------------------------------------------------------------------------------------------------


class Server:
    """Returns the given answers in order, and repeats the last."""

    def __init__(self, *answers: web.Response | Callable[[Any], web.Response]) -> None:
        self.answers = list(answers)
        self.seen: list[Any] = []
        self.headers: list[Any] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append(await request.json())
        self.headers.append(request.headers)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            return answer(self.seen[-1])
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    @asynccontextmanager
    async def rewards(self, metrics: Metrics | None = None, **settings: Any) -> AsyncIterator[Rewards]:
        app = web.Application()
        app.router.add_post("/score", self.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/score"
        settings = {"kind": "http", "url": url, **settings}
        rewards = rewards_of(metrics, reward="judge", rewards={"judge": settings})
        try:
            with patch.object(reward_calls, "FIRST_DELAY_S", 0.0):
                yield rewards
        finally:
            await rewards.close()
            await runner.cleanup()


def say(body: str, status: int = 200, **headers: str) -> web.Response:
    return web.Response(text=body, status=status, headers=headers)


@pytest.mark.real_time
async def test_a_server_is_asked_and_its_token_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    server = Server(say('{"reward": 0.5, "style": 1, "why": "short"}'))
    task = task_of(data_source="set", metadata={"level": 2})
    async with server.rewards(token_env="JUDGE_KEY") as rewards:
        assert await rewards.score_completion(task, completion_of("it is 4")) == {"reward": 0.5, "style": 1.0}
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    assert server.seen[0] == {
        "task_id": "t",
        "prompt": task.messages,
        "label": "4",
        "data_source": "set",
        "metadata": {"level": 2},
        "messages": [{"role": "assistant", "content": "it is 4"}],
        "text": "it is 4",
        "response": "it is 4",
        "stop_reason": "completed",
    }


@pytest.mark.real_time
async def test_a_server_scores_a_group_by_one_request() -> None:
    def score(request: Any) -> web.Response:
        return web.json_response({"rewards": [len(each["text"]) for each in request["completions"]]})

    server = Server(score)
    async with server.rewards(group=True) as rewards:
        assert rewards.scores_groups(task_of())
        scores = await rewards.score_group(task_of(), [completion_of("a"), completion_of("abc")])
    assert scores == [{"reward": 1.0}, {"reward": 3.0}]
    assert len(server.seen) == 1


@pytest.mark.real_time
async def test_a_server_is_asked_again_when_it_fails_for_now() -> None:
    metrics = Metrics()
    server = Server(say("", 500), say("", 429, **{"Retry-After": "0"}), say("1"))
    async with server.rewards(metrics) as rewards:
        assert await rewards.score_completion(task_of(), completion_of("x")) == {"reward": 1.0}
    assert count(metrics, "reward_retries_total", "judge") == 2


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("answer", "said", "asked", "infrastructure"),
    [
        (say("no such model: s3cret", 404), r"reward judge refused: HTTP 404: no such model: …$", 1, True),
        (say("too long", 422), r"reward judge refused: HTTP 422: too long$", 1, False),
        (say("<html>"), "refused: its answer is not JSON", 1, True),
        (say("", 302, Location="http://example.org/"), "refused: HTTP 302", 1, True),
        (say("1" * (2 << 20)), "refused: its answer is longer than", 1, True),
        (say("[1]"), r"returned reward = \[1\]", 1, False),
        (say('{"error": "no GPU"}'), "the parts", 1, False),
        (say("s3cret is busy", 503), "is unavailable: HTTP 503: … is busy", 3, True),
    ],
)
async def test_a_server_that_gives_no_reward_fails_the_trajectory(
    monkeypatch: pytest.MonkeyPatch, answer: web.Response, said: str, asked: int, infrastructure: bool
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    server = Server(answer)
    async with server.rewards(token_env="JUDGE_KEY", max_retries=2) as rewards:
        with pytest.raises(RewardError, match=said) as failed:
            await rewards.score_completion(task_of(), completion_of("x"))
    assert len(server.seen) == asked
    assert isinstance(failed.value, RewardUnavailable) == infrastructure


@pytest.mark.real_time
async def test_a_server_that_is_not_there_fails_the_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"kind": "http", "url": "http://127.0.0.1:9/", "max_retries": 1}
    monkeypatch.setattr(reward_calls, "MAX_OUTAGE_S", 0.0)
    rewards = named(settings)
    with pytest.raises(RewardUnavailable, match="is unavailable: ClientConnectorError"):
        await rewards.score_completion(task_of(), completion_of("x"))
    await rewards.close()


async def test_a_server_that_is_started_again_scores_what_waited_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0

    async def post(self: RewardClient, payload: Any) -> float:
        nonlocal calls
        calls += 1
        if calls <= 100:
            raise RewardUnreachable("refused")
        return 1.0

    monkeypatch.setattr(RewardClient, "post_request", post)
    settings = {"kind": "http", "url": "http://127.0.0.1:9/", "max_retries": 0}
    loop, metrics = asyncio.get_running_loop(), Metrics()
    rewards = rewards_of(metrics, reward="judge", rewards={"judge": settings})
    assert await rewards.score_completion(task_of(), completion_of("x")) == {"reward": 1.0}
    assert count(metrics, "reward_retries_total", "judge") == 100
    calls, begin_s = -1000, loop.time()
    with pytest.raises(RewardError, match="is unavailable: refused"):
        await rewards.score_completion(task_of(), completion_of("x"))
    assert loop.time() - begin_s == pytest.approx(300.0, abs=2.0)
    await rewards.close()


def test_a_token_that_is_not_set_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    config = config_of(
        reward="r", rewards={"r": {"kind": "http", "url": "http://x", "token_env": "JUDGE_KEY"}}
    )
    with pytest.raises(ConfigError, match=r"rewards\.r\.token_env names JUDGE_KEY, which is not set"):
        Rewards(config, decode=str, metrics=Metrics(), clock=time.monotonic)


# -- numbers that may be rewards ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
        (torch.tensor(0.25), 0.25),
        (torch.tensor(3), 3.0),
        (Decimal("0.25"), 0.25),
        (-MAX_REWARD, -MAX_REWARD),
        (Decimal("sNaN"), None),
        (torch.tensor(1.0, device="meta"), None),
        (np.array([1.0]), None),
        (torch.tensor([1.0]), None),
        (1e300, None),
        (-1e39, None),
        (10**400, None),
        (math.nan, None),
        (math.inf, None),
        ("1", None),
        (1 + 0j, None),
        (None, None),
    ],
)
def test_a_reward_is_a_number_that_float32_can_hold(number: Any, value: float | None) -> None:
    assert reward_value(number) == value
    if value is None:
        with pytest.raises(RewardError, match=r"expected a finite number, at most 1e\+30"):
            parts_of({"reward": number})
    else:
        assert parts_of(number) == {"reward": value}
        assert np.isfinite(np.float32(value) - np.float32(-value))


@pytest.mark.parametrize(
    "flaw", [{"reward": 1e300}, {"reward": math.nan}, {"reward": None}, {"turns": -1e39}], ids=str
)
def test_a_stored_group_with_an_impossible_reward_is_dropped_and_the_others_are_trained(
    tmp_path: Path, flaw: dict[str, Any]
) -> None:
    groups: dict[str, Any] = {}
    for name in ("good", "bad"):
        stored = store_trajectory(tmp_path, make_trajectory(name))
        if name == "bad" and "turns" in flaw:
            turn = TurnRecord(start=0, end=stored.num_tokens, finish_reason="stop", reward=flaw["turns"])
            trajectory = replace(make_trajectory(name), turns=(turn,))
            stored = store_trajectory(tmp_path / "turns", trajectory)
        elif name == "bad":
            stored = replace(stored, reward=flaw["reward"])
        groups[name] = [stored]
    pack = partial(pack_groups, backlog=Backlog(2, 1, "wait"), min_group_size=1, facts=None)
    packed = pack(0, groups)
    assert packed.unusable == {"bad": "corrupt"}
    assert pack(0, dict(list(groups.items())[:1])).batch is not None
