"""What `make test` shows of real parts, on one SGLang server: weights, sessions, a stop, and a run under Ray.

`make test-real` has more of each: the other files of this folder, and `tests/integration/test_real_loop.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from async_rl import placement
from async_rl.config import (
    Config,
    ModelConfig,
    RolloutConfig,
    SimulatedEngines,
    parse_config,
)
from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import Engine
from async_rl.engines import health
from async_rl.engines.health import HealthWatch
from async_rl.engines.pool import EnginePool
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.server import SGLangServer
from async_rl.errors import EnvironmentNotReady
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import step_record_log
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.session.transcript import Transcript
from async_rl.runtime.supervision import Nursery, services
from async_rl.store.journal import JournalEntry
from async_rl.types import Task
from tests.support.engine_calls import call
from tests.support.fake_sglang import facts
from tests.support.ray_runs import make_run_folder
from tests.support.sessions import PROMPT, Bench, Watched, row_versions, simulated
from tests.support.sglang_world import SGLangWorld
from tests.support.watched_engine import NeverStops, WatchedEngine
from tests.support.weight_sender import WeightSender

pytestmark = pytest.mark.sglang

ANSWER = 150
"""Tokens of an answer that still runs when it is interrupted, also on a loaded machine."""


@pytest.mark.parametrize("transport", ["broadcast", "share", "delta"])
async def test_the_weights_are_the_senders_bit_for_bit_when_they_are_sent(
    sglang_world: SGLangWorld, engine: SGLangEngine, tmp_path: Path, transport: str
) -> None:
    sender, prompt = WeightSender(sglang_world, tmp_path), [40, 41, 42, 43]
    (before,) = await engine.checksums()
    await sglang_world.load(engine, 1)
    expected = await call(engine, prompt, 12)
    (loaded,) = await engine.checksums()
    await sglang_world.load(engine, 0)

    await getattr(sender, transport)(engine, 2)
    after = await call(engine, prompt, 12)
    assert (await engine.health()).weight_version == 2
    assert after.token_ids == expected.token_ids
    assert after.log_probs == expected.log_probs
    assert [s.weight_version for s in after.finish.version_spans] == [2]
    assert await engine.checksums() == (loaded,) == (sender.export.checksums(),)
    assert all(before[name] != loaded[name] for name in loaded if "norm" not in name)
    sender.export.close()


@pytest.mark.case(10, 11, 12, 18, 20)
@pytest.mark.parametrize("merge", ["replace", "splice"])
async def test_rows_are_of_the_versions_that_the_merge_promises_when_an_update_interrupts(
    sglang_world: SGLangWorld, engine: SGLangEngine, merge: str
) -> None:
    watched = WatchedEngine(engine)
    bench = Bench(
        cast(Engine, watched),
        facts=sglang_world.facts,
        weights=[str(path) for path in sglang_world.weights],
        merge=merge,
        top_k=1,
        max_context_tokens=1024,
        max_new_tokens=ANSWER,
    )
    bench.start()
    async with asyncio.TaskGroup() as group:
        group.create_task(bench.session.generate())
        await watched.has_tokens(4)
        await bench.bump(1)
    trajectory = await bench.finish()
    first, second = trajectory.sampled
    assert (first.weight_version, second.weight_version) == (0, 1)
    assert len(first.token_ids) >= 4
    boundary = PROMPT + len(first.token_ids) - 1
    wanted = trajectory.num_tokens - 1
    old = 0 if merge == "replace" else boundary
    assert watched.asked == [0, old]
    assert row_versions(trajectory.trace) == [0] * old + [1] * (wanted - old)
    assert trajectory.trace.valid.all()
    assert bench.counted("routing_mixed_versions_total") == 0
    found = np.sort(trajectory.trace.rows, axis=-1)
    new_rows, old_rows = [
        await sglang_world.expert_sets(engine, trajectory.token_ids.tolist(), version) for version in (1, 0)
    ]
    assert np.array_equal(found[old:], new_rows[old:])
    assert np.array_equal(found[:old], old_rows[:old])
    # The control: the two versions do choose different experts.
    assert (old_rows[:boundary] == new_rows[:boundary]).all(axis=-1).mean() < 0.9


async def test_nearly_all_tokens_survive_and_calls_move_when_a_server_is_stopped(
    sglang_world: SGLangWorld, engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP of the whole group: no connection breaks, no process ends, and nothing answers."""
    calls, tokens, answer = 3, 100, 400
    real = WatchedEngine(engine)
    spare = simulated(Watched(), "spare", facts=sglang_world.facts, decode_step_s=0.001)
    metrics = Metrics()
    pool = EnginePool(metrics, time.monotonic)
    config = SimulatedEngines(stall_s=2.0)
    monkeypatch.setattr(health, "PROBE_S", 0.5)
    monkeypatch.setattr(health, "PROBE_TIMEOUT_S", 0.5)
    for each in (real, spare):
        pool.add_engine(cast(Engine, each))
    pool.serve_engine("engine-0", 0)

    ids = iter(f"f{number:031x}" for number in range(1000))
    context = SessionContext(
        chat=cast(ChatFormat, NeverStops()),
        config=Config(
            model=ModelConfig(path="m"),
            rollout=RolloutConfig(max_context_tokens=1024, max_new_tokens=answer),
        ),
        metrics=metrics,
        clock=time.monotonic,
        serving_clock=pool.own.serving_clock,
        calls=pool.dispatcher,
        facts=sglang_world.facts,
        new_id=lambda: next(ids),
    )

    def session(number: int) -> RolloutSession:
        transcript = Transcript(context, JournalEntry(f"{number:032x}"))
        made = RolloutSession(context, Task(task_id="t", messages=[]), transcript, group_id="g")
        made.start([{"role": "user", "content": "hi"}])
        return made

    sessions = [session(number) for number in range(calls)]
    group = sglang_world.server.pid
    assert group is not None
    try:
        async with Nursery() as nursery:
            for number, made in enumerate(sessions):
                nursery.start_task(f"session {number}", made.generate())
            await real.has_tokens(calls * tokens)
            # From here on: on a slow machine probes could be missed before, when no other engine serves.
            async with services(health=HealthWatch(pool, config, metrics, time.monotonic).watch_engines):
                os.killpg(group, signal.SIGSTOP)
                pool.serve_engine("spare", 0)
                async with asyncio.timeout(60):
                    assert await pool.wait_for_repair() == "engine-0"
    finally:
        os.killpg(group, signal.SIGCONT)
    trajectories = [await made.finish_trajectory("completed", {"reward": 1.0}) for made in sessions]
    kept = sum(len(s.token_ids) for t in trajectories for s in t.sampled if s.engine_id == "engine-0")
    # Nothing that came is lost; what the server had sampled and not sent yet is a step of each call.
    assert kept == real.tokens >= calls * tokens
    assert kept / (kept + calls) >= 0.99
    for trajectory in trajectories:
        assert [s.engine_id for s in trajectory.sampled] == ["engine-0", "spare"]
        assert trajectory.outcome.num_failovers == 1
        assert trajectory.num_tokens == PROMPT + answer
        assert np.isfinite(trajectory.rollout_log_probs).all()
    await engine.wait_ready()  # it continues as if nothing had been, for the tests after this one
    assert (await engine.health()).weight_version == 0


class FailingServer(SGLangServer):
    """A server that does not start."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", "import sys; print('no such option', file=sys.stderr); sys.exit(2)"]


async def test_the_end_of_its_log_is_reported_when_a_server_does_not_start(tmp_path: Path) -> None:
    config = Config(model=ModelConfig(path=str(tmp_path / "nowhere")))
    server = FailingServer(config, index=2, log_dir=tmp_path)
    engine = SGLangEngine("engine-2", server.url, facts(), state=server.state)
    await server.start()
    try:
        with pytest.raises(EnvironmentNotReady, match=r"ended with code 2(.|\n)*no such option"):
            await engine.wait_ready()
    finally:
        await engine.close()
        await server.stop()


@pytest.mark.megatron
@pytest.mark.ray
async def test_a_trainer_under_ray_learns_from_answers_of_a_server_and_updates_it(
    sglang_world: SGLangWorld, engine: SGLangEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server was started elsewhere (`engine.urls`); `test_real_loop.py` has runs that start theirs."""
    server, model = sglang_world.server, sglang_world.weights[0]
    template = "{% for m in messages %}<bos>{{ m.role }}:{{ m.content }}<pad>{% endfor %}"
    (model / "chat_template.jinja").write_text(
        template + "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
    )
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "prompt": "1 + 1"}\n{"id": "b", "prompt": "2 + 2"}\n')
    monkeypatch.setenv("ASYNC_RL_ENGINE_API_KEY", server.api_key)
    monkeypatch.setenv("ASYNC_RL_ENGINE_ADMIN_KEY", server.admin_key)
    tree: dict[str, Any] = {
        "run": {"name": "real", "dir": str(tmp_path), "max_steps": 2, "drain_s": 60},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(tmp_path / "tasks.jsonl")},
        "engine": {"urls": [server.url], "device": "cpu"},
        "rollout": {
            "agent_loop": "agent_loops.single_turn:SingleTurnLoop",
            "reward": "tests.support.ray_runs:fingerprint",
            "group_size": 2,
            "max_concurrent_trajectories": 4,
            "max_staleness": 1,
            "max_context_tokens": 256,
            "max_new_tokens": 32,
            "num_workers": 0,
        },
        "trainer": {"device": "cpu", "groups_per_batch": 1, "optimizer": {"lr": 1e-3}},
    }
    config = parse_config(tree)
    run_dir = make_run_folder(config)
    summary = await placement.run(config, run_dir, asyncio.Event())
    assert summary.weight_versions == 2
    assert summary.trajectories.trained == 4
    assert summary.trajectories.unaccounted == 0
    assert summary.staleness_max <= 1
    # Equal weights, float32: the trainer's log-probs are the engine's.
    assert summary.log_prob_abs_diff_mean is not None
    assert summary.log_prob_abs_diff_mean < 1e-4
    assert summary.routing.rows_checked > 0
    assert summary.routing.rows_invalid == 0
    records = list(step_record_log(run_dir / "metrics.jsonl").read())
    assert [record.weight_version for record in records] == [1, 2]
    assert all(np.isfinite(record.grad_norm) and record.grad_norm > 0 for record in records)
    assert (await engine.health()).weight_version == 2
    assert (run_dir / "checkpoints" / "step_00000002").is_dir()
