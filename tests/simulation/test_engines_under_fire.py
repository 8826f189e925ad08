"""The whole loop while engines die, stop, join, leave and are updated; in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from async_rl.engine_protocol import Chunk, EngineHealth
from async_rl.engines import health
from async_rl.engines.membership import EngineMembership
from async_rl.engines.simulated import SimulatedEngine
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import Summary
from async_rl.planning.virtual_time import run_virtual
from async_rl.run import entry, run_engines
from async_rl.runtime.supervision import Nursery
from tests.simulation.test_loop import assert_conserved, make_config, run
from tests.support.local_cluster import LocalCluster

STEPS = 6


RunIntervention = Callable[[LocalCluster], Coroutine[Any, Any, None]]
"""What a test does to a run that continues."""


class Fragile(SimulatedEngine):
    """Counts what it samples and what it had to sample again, and can be stopped as a process can."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.sampled = 0
        self.stopped = False

    def _sample(self, call: Any) -> Chunk:
        self.sampled += 1
        return super()._sample(call)

    async def _deliver(self, call: Any, chunk: Chunk) -> tuple[Chunk, ...]:
        if self.stopped:
            await asyncio.Future()
        return await super()._deliver(call, chunk)

    async def health(self) -> EngineHealth:
        if self.stopped:
            await asyncio.Future()
        return await super().health()

    def restart(self) -> None:
        self.stopped = False
        super().restart()


OVERRIDES = (
    "run.drain_s=5",
    "engine.num_engines=4",
    "engine.decode_step_s=0.05",
    "engine.mean_new_tokens=100",
    "engine.stall_s=10",
    "engine.max_restarts=100",
    "rollout.max_concurrent_trajectories=64",
    "rollout.max_context_tokens=400",
    "rollout.max_new_tokens=300",
)


class World:
    """One run, with somebody beside it who does things to its engines."""

    def __init__(self, calculator: Path, tmp_path: Path, *overrides: str) -> None:
        self.config = make_config(calculator, tmp_path, *OVERRIDES, *overrides)
        self.metrics = Metrics()
        self.cluster = LocalCluster(self.config, step_s=3.0)
        for index, engine in enumerate(self.cluster.engines):
            engine.__class__ = Fragile
            engine.sampled, engine.stopped, engine._update_s = 0, False, 0.3 + 0.1 * index

    @property
    def engines(self) -> list[Any]:
        return self.cluster.engines

    @property
    def sampled(self) -> int:
        """Tokens that engines sampled."""
        return sum(engine.sampled for engine in self.engines)

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"async_rl_{name}", labels) or 0.0

    @property
    def kept(self) -> float:
        """Tokens that sessions have as segments."""
        return self.counted("sampled_tokens_total")

    def run(self, intervene: RunIntervention | None = None) -> Summary:
        return run_virtual(self._run(intervene))

    async def _run(self, intervene: RunIntervention | None) -> Summary:
        numbers = itertools.count()  # what engines sample follows from the names: a run repeats itself
        async with Nursery() as nursery:
            if intervene is not None:
                nursery.start_task("intervention", intervene(self.cluster))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(entry, "Metrics", lambda: self.metrics)
                summary = await run(self.config, self.cluster, new_id=lambda: f"{next(numbers):032x}")
            nursery.cancel_tasks()
        assert_conserved(summary)
        assert summary.trajectories.trained == STEPS * 16
        return summary


def test_nearly_all_sampled_tokens_survive_when_engines_are_killed(calculator: Path, tmp_path: Path) -> None:
    """At least 99% of what engines sampled until they died is in what is trained, queued or in flight."""
    world = World(calculator, tmp_path)
    rng, lost, kills = random.Random(3), [], 0

    async def kill(cluster: LocalCluster) -> None:
        nonlocal kills
        while True:
            await asyncio.sleep(rng.uniform(2.0, 6.0))
            engine = rng.choice(cluster.engines)
            running = sum(call.num_sampled for call in engine._running)
            engine.die()
            kills += 1
            lost.append(running)

    summary = world.run(kill)
    assert kills >= 5
    assert sum(lost) > 500  # half-written answers, all of them on engines that died
    # What was trained, dropped for a reason or is still there holds all but a step of each call.
    assert world.kept >= 0.99 * world.sampled
    assert summary.trajectories.dropped == {}
    assert len(world.cluster.restarts) >= 5


def test_a_stopped_engine_is_noticed_restarted_and_its_trajectories_go_on(
    calculator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP of an idle engine, of one in the middle of calls, of one in the middle of an update."""
    monkeypatch.setattr(health, "PROBE_S", 2.0)
    monkeypatch.setattr(health, "PROBE_TIMEOUT_S", 1.0)
    world = World(calculator, tmp_path)
    noticed: list[float] = []

    async def stop(cluster: LocalCluster) -> None:
        loop = asyncio.get_running_loop()
        for index in (0, 1, 2):
            await asyncio.sleep(7.0)
            begin, before = loop.time(), len(cluster.restarts)
            cluster.engines[index].stopped = True  # type: ignore[attr-defined]
            while len(cluster.restarts) == before:  # noqa: ASYNC110 - virtual time costs nothing
                await asyncio.sleep(0.1)
            noticed.append(loop.time() - begin)

    world.run(stop)
    assert sorted(world.cluster.restarts) == ["engine-0", "engine-1", "engine-2"]
    assert max(noticed) < 11.5  # engine.stall_s and an eighth, or sooner by probes


@pytest.mark.parametrize("interrupt", [pytest.param("abort", marks=pytest.mark.long), "in_place"])
def test_somebody_generates_at_every_moment_when_updates_roll(
    calculator: Path, tmp_path: Path, interrupt: str
) -> None:
    """No group is dispatched as younger than the oldest weights that are served."""
    routing = ["routing.merge=splice"] if interrupt == "in_place" else []
    rolling = ("weights.rolling=true", f"weights.interrupt={interrupt}", "rollout.max_staleness=1")
    world = World(calculator, tmp_path, *rolling, *routing)
    updates: list[int] = []
    standing: set[str] = set()
    for engine in world.engines:
        original = engine.update_weights

        async def update(change: Any, *, flush: bool, engine: Any = engine, original: Any = original) -> None:
            others = [other for other in world.engines if other is not engine]
            before = sum(other.sampled for other in others)
            if change.weight_version:
                standing.add(engine.engine_id)
                assert len(standing) == 1
            await original(change, flush=flush)
            standing.discard(engine.engine_id)
            if change.weight_version:
                updates.append(sum(other.sampled for other in others) - before)

        engine.update_weights = update
    summary = world.run()
    assert len(updates) == STEPS * 4
    # 0.3 s and more are six decode steps, in which the others have gone on; when the bound lets in nothing
    # new until the version is out, what they had may be done before.
    assert sum(tokens >= 6 for tokens in updates) >= 0.75 * len(updates)
    assert (summary.interrupted_share or 0) > 0


def test_an_update_that_aborts_everything_drops_nothing(calculator: Path, tmp_path: Path) -> None:
    """Seen elsewhere: a publish aborts all that is in flight and drops its groups (miles#2589, #2296)."""
    world = World(calculator, tmp_path)
    summary = world.run()
    assert (summary.interrupted_share or 0) > 0.1
    assert summary.trajectories.dropped == {}
    assert world.kept >= 0.99 * world.sampled
    assert world.counted("prefilled_again_tokens_total", cause="update") > 500


def test_a_pause_in_place_ends_and_what_it_paused_goes_on(calculator: Path, tmp_path: Path) -> None:
    """Seen elsewhere: an in-place pause that never ends (sglang#22620), engines killed by a drain after
    resume (prime-rl#2841). Here one engine even dies while it is paused.
    """
    world = World(calculator, tmp_path, "weights.interrupt=in_place", "routing.merge=splice")
    victim = world.engines[1]
    original, updates = victim.update_weights, 0

    async def die_in_the_second(change: Any, *, flush: bool) -> None:
        nonlocal updates
        updates += 1
        if updates == 2:
            victim.die()
        await original(change, flush=flush)

    victim.update_weights = die_in_the_second
    summary = world.run()
    assert world.cluster.restarts == ["engine-1"]
    assert summary.trajectories.dropped == {}


def test_engines_join_and_leave_a_running_job(
    calculator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def membership(*arguments: Any) -> EngineMembership:
        return EngineMembership(*arguments, drain_s=1.0)

    monkeypatch.setattr(run_engines, "EngineMembership", membership)
    servers = tmp_path / "servers.txt"
    servers.write_text("http://a:1\nhttp://b:1\n")
    world = World(calculator, tmp_path, f"engine.urls_file={servers}")
    template = list(world.engines)
    joined_at: list[int] = []

    async def come_and_go(cluster: LocalCluster) -> None:
        await asyncio.sleep(20.0)
        servers.write_text("http://b:1\nhttp://c:1\n")

    original = world.cluster.connect_engine

    def connect(engine_id: str, url: str) -> Any:
        engine: Any = original(engine_id, url)
        engine.__class__ = Fragile
        engine.sampled, engine.stopped = 0, False
        joined_at.append(world.cluster.trainer.step)
        return engine

    world.cluster.connect_engine = connect  # type: ignore[method-assign]
    world.run(come_and_go)
    a, b, c = (engine for engine in world.engines if engine not in template)
    assert joined_at[:2] == [0, 0]
    assert joined_at[2] > 0
    assert world.cluster.left == [a.engine_id]
    assert a._version < b._version == c._version == STEPS  # the one that left was left alone
    assert min(a.sampled, b.sampled, c.sampled) > 100
