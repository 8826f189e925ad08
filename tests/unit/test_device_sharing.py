"""Hand-overs of shared devices, call by call, when engines take weights by handles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from async_rl.engine_protocol import TensorUpdate
from async_rl.engines.pool import EngineState
from async_rl.errors import EngineError, TrainerError
from async_rl.run.device_sharing import SharedDevices
from async_rl.runtime.supervision import first_error
from async_rl.trainer_protocol import Trainer
from tests.unit.test_weight_sync import Bench

REST = "kv_cache cuda_graph"


class Log(list[str]):
    """The calls of one party, which are also put into a list of all."""

    def __init__(self, who: str, everything: list[str]) -> None:
        self._who, self._everything = who, everything

    def append(self, what: str) -> None:
        super().append(what)
        self._everything.append(f"{self._who} {what}")


class World(Bench):
    """Engines, a trainer and their shared devices."""

    def __init__(self, folder: Path, engines: int = 2, transport: str = "tensor") -> None:
        super().__init__(folder, engines=engines, transport=transport, interrupt="abort", shared=True)
        self.log: list[str] = []
        for engine in self.engines:
            engine.log = Log(engine.engine_id, self.log)
        self.ended: list[str] = []
        self.devices = SharedDevices(self.pool, self.end, self.metrics, lambda: 0.0, timeout_s=5.0)
        self.fails: Callable[[str, tuple[Any, ...]], bool] = lambda name, arguments: False
        world, calls = self, self.trainer

        class Logged:
            def __getattr__(self, name: str) -> Any:
                async def call(*arguments: Any) -> Any:
                    if name in ("offload", "reload"):
                        world.log.append(
                            f"trainer {name}" + (" all but weights" if True in arguments else "")
                        )
                    elif name in ("share_bucket", "publish"):
                        world.log.append(f"trainer {name} {arguments[0] if name == 'share_bucket' else ''}")
                    if world.fails(name, arguments):
                        raise TrainerError("the trainer died")
                    return await getattr(calls, name)(*arguments)

                return call

        self.logged = cast(Trainer, Logged())

    async def end(self, engine_id: str) -> None:
        self.ended.append(engine_id)

    async def begin(self) -> None:
        """Let engines serve version 0, which has files."""
        if (sender := self.sync._sender) is not None:
            sender._trainer = self.logged  # type: ignore[attr-defined]
        await self.devices.clear_devices()
        await self.devices.start_engines(self.sync, self.logged, 0, Path("/model"))
        self.log.clear()
        for engine in self.engines:
            engine.log.clear()

    async def step(self, version: int) -> None:
        await self.devices.hand_to_trainer(self.logged)
        self.log.clear()
        for engine in self.engines:
            engine.log.clear()
        await self.devices.hand_to_engines(self.sync, self.logged, version)

    def state_of(self, engine_id: str) -> EngineState:
        snapshot = self.pool.snapshot_of(engine_id)
        assert snapshot is not None
        return snapshot.state


async def started(folder: Path, engines: int = 2, **changes: str) -> World:
    world = World(folder, engines, **changes)
    await world.begin()
    return world


async def test_weights_pass_from_device_to_device_in_an_order_in_which_memory_suffices(tmp_path):
    world = await started(tmp_path, engines=1)
    await world.step(1)
    assert world.serving() == {"engine-0": 1}
    assert [each for each in world.log if "share" not in each] == [
        "trainer offload all but weights",
        "engine-0 take weights",
        "engine-0 update flush",
        "trainer offload",
        f"engine-0 take {REST}",
        "engine-0 health",
    ]
    shares = [index for index, each in enumerate(world.log) if "share" in each]
    assert [world.log[index] for index in shares] == ["trainer share_bucket 0", "trainer share_bucket 1"]
    assert world.log.index("engine-0 take weights") < shares[0]
    assert shares[1] < world.log.index("trainer offload")
    assert world.engines[0].buckets == [[b"0.0"], [b"1.0"]]


async def test_nothing_is_written_after_the_version_that_training_starts_from(tmp_path):
    world = await started(tmp_path)
    for version in (1, 2):
        await world.step(version)
    assert world.serving() == {"engine-0": 2, "engine-1": 2}
    assert not [name for name, _ in world.trainer.calls if name == "publish"]
    report = await hand_over(world, 3)
    assert (report.num_bytes, report.parts) == (16, {})


async def test_a_checkpoints_weights_are_handed_over_without_files_when_training_starts_from_it(tmp_path):
    world = await started(tmp_path)
    await world.devices.hand_to_trainer(world.logged)
    world.log.clear()
    await world.devices.start_engines(world.sync, world.logged, 3, None)
    assert world.serving() == {"engine-0": 3, "engine-1": 3}
    assert not [each for each in world.log if "publish" in each]
    assert [len(engine.buckets) for engine in world.engines] == [2, 2]


@pytest.mark.parametrize(("transport", "num_bytes"), [("tensor", 16), ("disk", 5)])
async def test_updates_are_observed_when_an_engine_has_taken_them(tmp_path, transport, num_bytes):
    world = await started(tmp_path, transport=transport)
    value = world.metrics.registry.get_sample_value

    def updates() -> float:
        return value("async_rl_weight_sync_seconds_count", {"phase": "total"}) or 0.0

    before = updates()
    if transport == "disk":
        (tmp_path / "version_1").mkdir()
        (tmp_path / "version_1" / "w").write_bytes(b"12345")
    assert (await hand_over(world, 1)).num_bytes == num_bytes
    assert (updates() - before, value("async_rl_weight_sync_bytes_total")) == (1, num_bytes)
    for engine in world.engines:
        world.pool.quarantine_engine(engine.engine_id, EngineError("it broke"))
    await hand_over(world, 2)
    assert updates() - before == 1


async def hand_over(world: World, version: int) -> Any:
    await world.devices.hand_to_trainer(world.logged)
    return await world.devices.hand_to_engines(world.sync, world.logged, version)


@pytest.mark.parametrize("fails_in", ["take weights", "update flush", f"take {REST}", "health"])
async def test_an_engine_is_left_behind_when_it_fails_anywhere_in_a_hand_over(tmp_path, fails_in):
    world = await started(tmp_path)
    world.engines[0].fail_in, world.engines[0].error = fails_in, EngineError("it broke")
    await world.step(1)
    assert world.serving() == {"engine-1": 1}
    assert len(world.engines[1].buckets) == 2
    assert world.state_of("engine-0") is EngineState.QUARANTINED
    await world.devices.hand_to_trainer(world.logged)
    assert world.ended == ["engine-0"]


async def test_the_other_engines_get_all_buckets_when_one_dies_in_the_first(tmp_path):
    world = await started(tmp_path)

    async def die(update: TensorUpdate, *, flush: bool) -> None:
        async for _ in update.buckets():
            world.pool.quarantine_engine("engine-0", EngineError("its process ended"))
            await asyncio.Future()

    world.engines[0].update_weights = die
    await world.step(1)
    assert world.serving() == {"engine-1": 1}
    assert len(world.engines[1].buckets) == 2


@pytest.mark.parametrize(
    "fails_in", ["offload all but weights", "the first bucket", "the last one", "offload"]
)
async def test_engines_release_weights_when_the_trainer_fails_in_a_hand_over(tmp_path, fails_in):
    world = await started(tmp_path)
    moments = {
        "offload all but weights": lambda name, given: name == "offload" and True in given,
        "the first bucket": lambda name, given: name == "share_bucket" and given[0] == 0,
        "the last one": lambda name, given: name == "share_bucket" and given[0] == 1,
        "offload": lambda name, given: name == "offload" and True not in given,
    }
    world.fails = moments[fails_in]
    with pytest.raises((TrainerError, ExceptionGroup)) as caught:
        await world.step(1)
    assert isinstance(first_error(caught.value), TrainerError)
    assert world.pool.engines(EngineState.QUARANTINED) == []
    world.fails = lambda name, given: False
    world.log.clear()
    await world.devices.clear_devices()
    took = fails_in != "offload all but weights"  # else they hold nothing
    assert sorted(world.log) == [f"engine-{number} release weights" for number in (0, 1) if took]
    assert world.ended == []
    assert world.devices.phases.phase == "trainer"
    await world.devices.start_engines(world.sync, world.logged, 0, Path("/model"))
    assert world.serving() == {"engine-0": 0, "engine-1": 0}


async def test_an_engine_waits_for_the_next_hand_over_when_it_was_restarted_after_one(tmp_path):
    world = await started(tmp_path)
    world.restart("engine-0")
    await world.sync.catch_up_engine("engine-0")
    assert world.serving() == {"engine-0": 0, "engine-1": 0}  # the first version has files
    await world.step(1)
    world.restart("engine-0")
    await world.sync.catch_up_engine("engine-0")
    assert world.serving() == {"engine-1": 1}
    assert world.state_of("engine-0") is EngineState.JOINING
    assert not world.devices.are_starved(world.sync)
    world.pool.quarantine_engine("engine-1", EngineError("it broke"))
    assert world.devices.are_starved(world.sync)
    await world.step(1)  # the same version once more
    assert world.serving() == {"engine-0": 1}
    assert world.ended == ["engine-1"]
    assert not world.devices.are_starved(world.sync)
