import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest

from async_rl.config import Config, LoraConfig, PlacementConfig, SGLangEngines, WeightsConfig
from async_rl.engine_protocol import Engine, EngineHealth, GroupInvite, InterruptMode
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.errors import EngineError, TrainerError, WeightsNotReceived, WeightSyncError
from async_rl.observability.metrics import Metrics
from async_rl.runtime.supervision import Nursery, first_error
from async_rl.trainer_protocol import SendReport, Trainer
from async_rl.weights import checksums, delta_delivery, publisher
from async_rl.weights.delta import DeltaRefused
from async_rl.weights.delta_delivery import WeightRoutes
from async_rl.weights.weight_sync import WeightSync
from tests.support.scripted import RecordingTrainer, ScriptedEngine


async def a_port(rank: int) -> tuple[str, int]:
    return "127.0.0.1", 1


class ScriptedFolder:
    """Records its requests; refuses or hangs when a test wants it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.refuses: dict[str, Exception] = {}
        self.hangs = False

    async def copy_version(self, path: str, version: int) -> str:
        return await self._step("copy", f"whole {version}")

    async def apply_delta(self, path: str) -> str:
        return await self._step("apply", f"changed {Path(path).name}")

    async def _step(self, name: str, result: str) -> str:
        self.log.append(result)
        if self.hangs:
            await asyncio.Future()
        if name in self.refuses:
            raise self.refuses[name]
        return result


class Bench:
    """A pool of scripted engines under a sync."""

    def __init__(
        self,
        tmp_path: Path,
        engines: int = 2,
        tp_size: int = 1,
        generation: int = 0,
        adapters: bool = False,
        shared: bool = False,
        ranks_beside: Mapping[str, Sequence[int]] = MappingProxyType({}),
        open_port: Callable[[int], Awaitable[tuple[str, int]]] | None = None,
        **changes: Any,
    ) -> None:
        self.pool = EnginePool(Metrics(), lambda: 0.0)
        self.engines = [ScriptedEngine(f"engine-{index}") for index in range(engines)]
        for engine in self.engines:
            self.pool.add_engine(cast(Engine, engine))
        self.trainer = RecordingTrainer()
        self.metrics = Metrics()
        self.folders: dict[str, ScriptedFolder] = {}
        config = SimpleNamespace(
            weights=WeightsConfig(**changes),
            engine=SGLangEngines(tp_size=tp_size),
            adapters=LoraConfig() if adapters else None,
            placement=PlacementConfig(shared=shared),
        )
        routes = SimpleNamespace(
            weight_backend="gloo",
            abortable_servers=True,
            open_port=open_port or a_port,
            local_folder=self.folders.get,
            ranks_beside=lambda engine_id: ranks_beside.get(engine_id, ()),
        )
        self.sync = WeightSync(
            cast(Config, config),
            pool=self.pool,
            trainer=cast(Trainer, self.trainer),
            routes=cast(WeightRoutes, routes),
            directory=tmp_path,
            metrics=self.metrics,
            clock=lambda: 0.0,
            generation=generation,
        )

    async def start(self, version: int = 0) -> None:
        await self.sync.start_from_version(version, Path("/model") if version == 0 else None)
        for engine in self.engines:
            engine.log.clear()
        self.trainer.calls.clear()

    def restart(self, engine_id: str) -> None:
        """Let an engine fail and come back, as repair does before it catches up."""
        self.pool.quarantine_engine(engine_id, EngineError("killed"))
        self.pool.rejoin_engine(engine_id)

    def serving(self) -> dict[str, int]:
        return {
            e.engine_id: self.pool.version_of(e.engine_id) for e in self.pool.engines(EngineState.SERVING)
        }


async def started(tmp_path: Path, *arguments: Any, **changes: Any) -> Bench:
    """A bench whose engines serve version 0."""
    bench = Bench(tmp_path, *arguments, **changes)
    await bench.start()
    return bench


def replace_update(engine: ScriptedEngine, update: Callable[..., Awaitable[None]]) -> None:
    """Update an engine by `update(original, change)`; the original takes the change."""
    original = engine.update_weights

    async def replaced(change: Any, *, flush: bool) -> None:
        await update(functools.partial(original, flush=flush), change)

    engine.update_weights = replaced  # type: ignore[method-assign]


async def test_the_cache_stays_and_sessions_expect_the_version_when_interrupted_in_place(tmp_path):
    """Calls that go on in place can report it before their engine serves again."""
    bench = await started(tmp_path, interrupt="in_place")
    expected = []

    async def interrupt(mode: str) -> None:
        expected.append(bench.pool.dispatcher.newest_version)

    for engine in bench.engines:
        engine.interrupt = interrupt
    await bench.sync.update_engines(1)
    assert expected == [1, 1]
    assert "update" in bench.engines[0].log


@pytest.mark.parametrize(
    "script",
    [{"fail_in": "update flush", "error": EngineError("refused")}, {"lie": 0}],
    ids=["refused", "another version is read back"],
)
async def test_an_engine_is_quarantined_when_its_update_fails_and_the_others_go_on(tmp_path, script):
    bench = await started(tmp_path)
    vars(bench.engines[0]).update(script)
    await bench.sync.update_engines(1)
    assert bench.serving() == {"engine-1": 1}
    assert bench.pool.version_of("engine-0") == 0


async def test_the_job_goes_on_when_no_engine_took_the_update(tmp_path):
    bench = await started(tmp_path, engines=1)
    bench.engines[0].fail_in, bench.engines[0].error = "interrupt", EngineError("gone")
    report = await bench.sync.update_engines(1)
    assert (report.weight_version, report.pause_s, report.num_bytes) == (1, 0.0, 0)
    assert bench.serving() == {}
    assert "gone" in str(bench.pool.error_of("engine-0"))
    bench.engines[0].fail_in = None
    bench.pool.rejoin_engine("engine-0")
    await bench.sync.catch_up_engine("engine-0")
    assert bench.serving() == {"engine-0": 1}


async def test_old_versions_leave_the_disk_when_newer_ones_are_published(tmp_path):
    bench = await started(tmp_path)
    for version in range(1, 5):
        (tmp_path / f"version_{version}").mkdir()
        await bench.sync.update_engines(version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_3", "version_4"]


async def distributed(tmp_path: Path, engines: int = 3, external: int = 0, **changes: Any) -> Bench:
    """Engines that the run started, but for the last ones; all have taken version 1."""
    bench = Bench(tmp_path, engines=engines, transport="distributed", **changes)
    bench.folders |= {f"engine-{index}": ScriptedFolder() for index in range(engines - external)}
    await bench.sync.start_from_version(0, Path("/model"))
    await bench.sync.update_engines(1)
    return bench


def groups_of(bench: Bench) -> list[str]:
    return [engine.updates[-1].group_name for engine in bench.engines]


async def test_engines_of_the_run_share_a_group_with_each_sender_and_others_have_their_own(tmp_path):
    bench = await distributed(tmp_path, engines=4, external=2)
    first, second, third, fourth = groups_of(bench)
    assert first == second
    assert len({first, third, fourth}) == 3
    assert bench.engines[0].groups == {f"{first}-0", f"{first}-1"}
    calls = bench.trainer.calls
    invites = [arguments[0] for name, arguments in calls if name == "open_weight_group"]
    assert sorted((invite.sender, invite.world_size) for invite in invites) == [
        *[(0, 2), (0, 2), (0, 3), (1, 2), (1, 2), (1, 3)]
    ]
    sent = [arguments[0] for name, arguments in calls if name == "send_weights"]
    assert sent == [sorted({first, third, fourth})]


async def test_groups_stay_until_their_members_change_and_are_left_on_both_sides(tmp_path):
    bench = await distributed(tmp_path)

    def closed() -> list[str]:
        return [arguments[0] for name, arguments in bench.trainer.calls if name == "close_weight_group"]

    (before,) = set(groups_of(bench))
    await bench.sync.update_engines(2)
    assert set(groups_of(bench)) == {before}
    bench.pool.remove_engine("engine-0")
    await bench.sync.remove_engine("engine-0")
    assert closed() == []  # the trainer may be in a step
    await bench.sync.update_engines(3)
    assert bench.serving() == {"engine-1": 3, "engine-2": 3}
    after = bench.engines[1].updates[-1].group_name
    assert closed() == [before] != [after]
    assert bench.engines[1].groups == {f"{after}-0", f"{after}-1"}
    await bench.sync.close()
    assert closed() == [before, after]
    assert not bench.engines[1].groups


@pytest.mark.parametrize("transport", ["distributed", "tensor"])
async def test_a_restarted_engine_takes_the_next_update_with_the_others(tmp_path, transport):
    bench = await started(tmp_path, transport=transport)
    await bench.sync.update_engines(1)
    before = bench.engines[0].updates[-1]
    bench.restart("engine-0")
    async with Nursery() as nursery:
        catching_up = nursery.start_task("catch up", bench.sync.catch_up_engine("engine-0"))
        await asyncio.sleep(60)
        assert not catching_up.done()
        await bench.sync.update_engines(2)
    assert bench.serving() == {"engine-0": 2, "engine-1": 2}
    assert "publish" not in [name for name, _ in bench.trainer.calls]
    if transport == "distributed":  # its process is another one
        assert bench.engines[0].updates[-1].group_name != before.group_name


async def test_a_restarted_engine_that_fails_in_the_next_update_harms_no_other(tmp_path):
    bench = await distributed(tmp_path)
    bench.restart("engine-0")
    once(bench.engines[0], raising(EngineError("gone again")))
    async with Nursery() as nursery:
        catching_up = nursery.start_task("catch up", failure_of(bench.sync.catch_up_engine("engine-0")))
        await asyncio.sleep(1)
        await bench.sync.update_engines(2)
    assert "gone again" in str(catching_up.result())
    assert bench.serving() == {"engine-1": 2, "engine-2": 2}
    assert bench.pool.needs_repair("engine-0")


async def test_a_version_is_sent_to_one_engine_alone_when_most_do_not_serve(tmp_path):
    bench = await distributed(tmp_path)
    for engine_id in ("engine-0", "engine-1"):
        bench.restart(engine_id)
    async with Nursery() as nursery:
        async with bench.sync.trainer_busy:
            nursery.start_task("catch up", bench.sync.catch_up_engine("engine-0"))
            await asyncio.sleep(60)
            assert bench.serving() == {"engine-2": 1}  # the trainer has changed its weights
    assert bench.serving() == {"engine-0": 1, "engine-2": 1}
    async with Nursery() as nursery:
        nursery.start_task("catch up", bench.sync.catch_up_engine("engine-1"))
        await asyncio.sleep(1)
        await bench.sync.update_engines(2)
    assert bench.serving() == {"engine-0": 2, "engine-1": 2, "engine-2": 2}
    assert "publish" not in [name for name, _ in bench.trainer.calls]


async def test_the_engines_that_wait_for_an_update_are_sent_the_version_when_the_others_fail(tmp_path):
    bench = await distributed(tmp_path)
    bench.restart("engine-0")
    async with Nursery() as nursery:
        nursery.start_task("catch up", bench.sync.catch_up_engine("engine-0"))
        await asyncio.sleep(1)
        for engine_id in ("engine-1", "engine-2"):
            bench.pool.quarantine_engine(engine_id, EngineError("it has ended"))
    assert bench.serving() == {"engine-0": 1}


async def test_all_engines_take_the_trainers_version_early_when_one_needs_it(tmp_path):
    """With `weights.every` the trainer may hold a version that engines would take later."""
    bench = await distributed(tmp_path)
    for engine_id in ("engine-0", "engine-1"):
        bench.restart(engine_id)
    bench.sync.trainer_version = 3
    await bench.sync.catch_up_engine("engine-0")
    assert bench.serving() == {"engine-0": 3, "engine-2": 3}
    assert bench.sync.current_version == 3


async def test_files_of_a_version_are_not_made_of_a_later_one(tmp_path):
    bench = await started(tmp_path, transport="delta")
    bench.sync.trainer_version = 2
    bench.restart("engine-0")
    await bench.sync.catch_up_engine("engine-0")
    assert bench.serving() == {"engine-0": 2, "engine-1": 2}


async def test_an_engine_that_an_evaluation_returns_is_sent_the_version_at_once(tmp_path):
    bench = await distributed(tmp_path)
    assert bench.pool.lend_engine("engine-0")
    await bench.sync.update_engines(2)
    await bench.sync.catch_up.take_back_engine("engine-0")
    assert bench.serving() == {"engine-0": 2, "engine-1": 2, "engine-2": 2}
    assert "publish" not in [name for name, _ in bench.trainer.calls]


async def test_an_engine_that_waits_for_the_trainer_takes_the_update_that_comes_first(tmp_path):
    bench = await distributed(tmp_path)
    assert bench.pool.lend_engine("engine-0")
    async with Nursery() as nursery:
        async with bench.sync.trainer_busy:
            nursery.start_task("take back", bench.sync.catch_up.take_back_engine("engine-0"))
            await asyncio.sleep(1)
            await bench.sync.update_engines(2)
            assert bench.serving() == {"engine-0": 2, "engine-1": 2, "engine-2": 2}
    assert [name for name, _ in bench.trainer.calls].count("send_weights") == 2


async def test_an_engine_that_left_while_it_waited_for_an_update_is_not_updated(tmp_path):
    bench = await distributed(tmp_path)
    bench.restart("engine-0")
    async with Nursery() as nursery:
        nursery.start_task("catch up", bench.sync.catch_up_engine("engine-0"))
        await asyncio.sleep(1)
        await bench.pool.drain_engine("engine-0")
        bench.pool.remove_engine("engine-0")
        await bench.sync.update_engines(2)
    assert bench.serving() == {"engine-1": 2, "engine-2": 2}


async def test_an_engine_that_joins_has_no_calls_and_no_cache_of_an_earlier_driver(tmp_path):
    bench = await started(tmp_path, transport="tensor", interrupt="in_place")
    await bench.sync.update_engines(1)
    bench.restart("engine-0")
    bench.engines[0].log.clear()
    async with Nursery() as nursery:
        nursery.start_task("catch up", bench.sync.catch_up_engine("engine-0"))
        await asyncio.sleep(1)
        assert bench.pool.oldest_version == 1
        await bench.sync.update_engines(2)
    assert "update flush" in bench.engines[0].log
    assert "update flush" not in bench.engines[1].log


async def failure_of(call: Awaitable[None]) -> EngineError:
    with pytest.raises(EngineError) as failed:
        await call
    return failed.value


def aborting(bench: Bench) -> asyncio.Event:
    """What the driver sets when it lets the trainer abort the group."""
    aborted = asyncio.Event()

    async def abort(name: str) -> None:
        aborted.set()

    bench.trainer.abort_weight_group = abort
    return aborted


def once(engine: ScriptedEngine, act: Callable[[], Awaitable[None]]) -> None:
    """Let something happen instead of an engine's next update."""
    update_weights = engine.update_weights

    async def replaced(update: Any, *, flush: bool) -> None:
        engine.update_weights = update_weights
        await act()

    engine.update_weights = replaced


def raising(error: Exception, after: asyncio.Event | None = None) -> Callable[[], Awaitable[None]]:
    async def act() -> None:
        if after is not None:
            await after.wait()
        raise error

    return act


@pytest.mark.parametrize("notices", ["by itself", "by the abort"])
@pytest.mark.parametrize("failure", ["dies", "is silent", "does not answer"])
async def test_engines_take_a_version_in_another_group_when_one_of_theirs_fails(tmp_path, failure, notices):
    """All that wait for it return when the broadcast is aborted; one may notice before."""
    bench = await distributed(tmp_path)
    (before,) = set(groups_of(bench))
    aborted = aborting(bench)
    first, second, third = bench.engines
    if failure == "dies":
        once(first, raising(EngineError("connection reset")))
    else:
        Stopper(first, "update_weights")
    if failure == "is silent":
        send_weights = bench.trainer.send_weights

        async def find_silent(names: list[str], bucket_bytes: int) -> SendReport:
            bench.trainer.send_weights = send_weights
            return SendReport(silent={f"{before}-0": [1]})

        bench.trainer.send_weights = find_silent
    if notices == "by itself" or failure == "does not answer":
        once(second, raising(WeightsNotReceived("engine-1: connection closed by peer")))
    else:
        once(second, raising(WeightsNotReceived("engine-1: aborted: no sign of life"), aborted))
    if failure == "is silent" and notices == "by the abort":
        aborted.set()  # the sender has found it by itself
    once(third, raising(WeightsNotReceived("engine-2: aborted: by the driver"), aborted))
    await bench.sync.update_engines(2)
    assert aborted.is_set()
    assert bench.serving() == {"engine-1": 2, "engine-2": 2}
    assert bench.pool.version_of("engine-0") == 1
    assert second.updates[-1].group_name == third.updates[-1].group_name != before


async def test_an_engine_that_alone_does_not_receive_is_quarantined(tmp_path):
    bench = await distributed(tmp_path)
    aborted = aborting(bench)
    once(bench.engines[0], raising(WeightsNotReceived("engine-0: no route")))
    for engine in bench.engines[1:]:
        once(engine, raising(WeightsNotReceived("aborted: by the driver"), aborted))
    await bench.sync.update_engines(2)
    assert bench.serving() == {"engine-1": 2, "engine-2": 2}


async def test_each_rank_of_an_engine_reads_from_the_trainer_rank_on_its_gpu(tmp_path):
    ranks = {"engine-0": [2, 0], "engine-1": [1, 3]}
    bench = await started(tmp_path, transport="tensor", tp_size=2, ranks_beside=ranks)
    await bench.sync.update_engines(1)
    shared = [arguments[2] for name, arguments in bench.trainer.calls if name == "share_bucket"]
    assert shared == [[2, 0, 1, 3]] * 2
    assert bench.engines[1].buckets == [[b"0.2", b"0.3"], [b"1.2", b"1.3"]]


async def test_all_are_quarantined_when_the_sender_alone_fails(tmp_path):
    bench = await distributed(tmp_path)
    aborting(bench)
    for engine in bench.engines:
        once(engine, raising(WeightsNotReceived("aborted: the sender has closed the group")))
    await bench.sync.update_engines(2)
    assert bench.serving() == {}


async def test_a_failure_does_not_reach_an_engine_with_a_group_of_its_own(tmp_path):
    bench = await distributed(tmp_path, external=1)
    aborted = aborting(bench)
    once(bench.engines[2], raising(EngineError("connection reset")))
    await bench.sync.update_engines(2)
    assert bench.serving() == {"engine-0": 2, "engine-1": 2}
    assert aborted.is_set()  # the senders do not wait for it
    assert len(bench.engines[0].updates) == 2


async def test_a_sync_says_what_its_parts_took_and_what_was_sent(tmp_path):
    bench = await distributed(tmp_path, external=1)
    report = await bench.sync.update_engines(2)
    assert {name: report.parts[name] for name in ("gather", "send")} == {"gather": 0.5, "send": 0.25}
    assert report.num_bytes == 2 * 16  # once for the engines of the run, once for the other one


async def test_another_port_is_tried_when_one_is_taken_before_the_sender_listens(tmp_path):
    bench = await distributed(tmp_path)
    bench.sync._groups.forget("engine-1")  # as after a restart of it
    opened = bench.trainer.open_weight_group

    async def open_once(invite: GroupInvite) -> None:
        bench.trainer.open_weight_group = opened
        raise WeightSyncError("address already in use")

    bench.trainer.open_weight_group = open_once
    await bench.sync.update_engines(2)
    assert bench.serving() == {"engine-0": 2, "engine-1": 2, "engine-2": 2}
    assert len(bench.engines[0].groups) == 2


async def test_an_engine_that_loses_the_group_with_the_sender_is_not_blamed(tmp_path):
    """The others of a group fail a moment before the sender says that one of them did not join."""
    bench = await distributed(tmp_path)
    bench.sync._groups.forget("engine-1")
    stopped, other = Stopper(bench.engines[1], "join_weight_group"), bench.engines[2]
    join = other.join_weight_group

    async def lose_the_store(invite: GroupInvite) -> None:
        await asyncio.sleep(19.98)
        raise EngineError("the store is gone")

    async def give_up(invite: GroupInvite) -> None:
        await asyncio.sleep(20)
        bench.trainer.open_weight_group = opened
        other.join_weight_group = join
        raise WeightSyncError("not all engines joined")

    opened, bench.trainer.open_weight_group = bench.trainer.open_weight_group, give_up
    other.join_weight_group = lose_the_store
    await bench.sync.update_engines(2)
    assert stopped.reached.is_set()
    assert bench.serving() == {"engine-0": 2, "engine-2": 2}


@pytest.mark.parametrize("answers", [True, False])
async def test_a_group_is_opened_without_an_engine_that_does_not_join(tmp_path, answers):
    bench = await distributed(tmp_path)
    bench.sync._groups.forget("engine-1")  # as after a restart of it
    given_up = asyncio.Event()
    opened = bench.trainer.open_weight_group
    first, _, third = bench.engines
    joins = third.join_weight_group

    async def open_once(invite: GroupInvite) -> None:
        bench.trainer.open_weight_group = opened
        await asyncio.sleep(20.0)
        given_up.set()
        raise WeightSyncError("2 of 3 engines joined")

    async def fail_with_it(invite: GroupInvite) -> None:
        third.join_weight_group = joins
        await given_up.wait()
        raise EngineError("the store is gone")

    bench.trainer.open_weight_group = open_once
    third.join_weight_group = fail_with_it
    if answers:
        first.fail_in, first.error = "join", EngineError("no such endpoint")
    else:
        Stopper(first, "join_weight_group")
    await bench.sync.update_engines(2)
    assert bench.serving() == {"engine-1": 2, "engine-2": 2}
    why = "no such endpoint" if answers else "2 of 3 engines joined"
    assert why in str(bench.pool.error_of("engine-0"))


@pytest.mark.parametrize(
    ("transport", "external", "generation", "loads"),
    [
        ("distributed", True, 0, True),
        ("tensor", True, 0, True),
        ("distributed", False, 0, False),
        ("disk", True, 0, False),
        ("disk", False, 1, True),  # by a trainer that has ended
    ],
)
async def test_an_engine_at_version_0_loads_it_if_it_may_have_been_sent_a_part_of_the_next(
    tmp_path, transport, external, generation, loads
):
    """Such an engine still reports the version that it had before."""
    bench = Bench(tmp_path, engines=1, transport=transport, generation=generation)
    if not external:
        bench.folders["engine-0"] = ScriptedFolder()
    await bench.sync.start_from_version(0, Path("/model"))
    assert ("update flush" in bench.engines[0].log) == loads


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("transport", ["distributed", "tensor"])
async def test_a_checkpoints_weights_are_sent_without_files_when_training_starts_from_it(
    tmp_path, transport, rolling
):
    bench = Bench(tmp_path, transport=transport, rolling=rolling)
    await bench.sync.start_from_version(3, None)
    assert bench.serving() == {"engine-0": 3, "engine-1": 3}
    assert [engine.weight_version for engine in bench.engines] == [3, 3]
    opened = [name for name, _ in bench.trainer.calls].count("open_weight_group")
    await bench.sync.update_engines(4)
    assert bench.serving() == {"engine-0": 4, "engine-1": 4}
    calls = [name for name, _ in bench.trainer.calls]
    assert (calls.count("publish"), calls.count("open_weight_group")) == (0, opened)


async def test_an_engine_that_does_not_take_a_checkpoints_weights_ends_the_first_start_only(tmp_path):
    for generation in (0, 1):
        bench = Bench(tmp_path, transport="distributed", generation=generation)
        bench.engines[0].fail_in, bench.engines[0].error = "update flush", EngineError("it broke")
        if not generation:
            with pytest.raises(EngineError, match="it broke"):
                await bench.sync.start_from_version(3, None)
            continue
        await bench.sync.start_from_version(3, None)
        assert bench.serving() == {"engine-1": 3}
        assert "it broke" in str(bench.pool.error_of("engine-0"))
        # The trainer before it may have left them paused.
        assert [engine.log[0] for engine in bench.engines] == ["resume"] * 2


async def test_files_tell_which_sums_can_be_compared_when_a_run_begins_with_a_checkpoint(tmp_path):
    for generation, published in ((0, 1), (1, 0)):
        bench = Bench(tmp_path, transport="tensor", verify="checksum", generation=generation)
        bench.trainer.checksum_seed = 3
        await bench.sync.start_from_version(3, None)
        assert bench.serving() == {"engine-0": 3, "engine-1": 3}
        assert sum(name == "publish" for name, _ in bench.trainer.calls) == published


async def test_engines_that_outlive_a_run_join_groups_of_the_next_one(tmp_path):
    killed = Bench(tmp_path, transport="distributed")
    await killed.start()
    left = [set(engine.groups) for engine in killed.engines]
    bench = Bench(tmp_path, transport="distributed")
    for engine, before in zip(bench.engines, killed.engines, strict=True):
        engine.groups = before.groups
    await bench.start()
    assert bench.serving() == {"engine-0": 0, "engine-1": 0}
    await bench.sync.close()
    assert [engine.groups for engine in bench.engines] == left


async def test_a_run_ends_although_an_engine_does_not_leave_its_group(tmp_path):
    bench = await started(tmp_path, transport="distributed")
    Stopper(bench.engines[0], "leave_weight_group")
    bench.engines[1].fail_in, bench.engines[1].error = "leave", EngineError("it has ended")
    await bench.sync.close()
    assert sum(name == "close_weight_group" for name, _ in bench.trainer.calls) == 2


async def test_senders_open_their_groups_one_after_the_other(tmp_path):
    """A port is free until someone listens on it: none is asked for before the last one is in use."""
    ports: list[int] = []

    async def next_port(rank: int) -> tuple[str, int]:
        ports.append(rank)
        return "127.0.0.1", rank

    bench = Bench(tmp_path, engines=2, transport="distributed", open_port=next_port)

    async def open_slowly(invite: GroupInvite) -> None:
        assert invite.port == invite.sender == ports[-1]
        await asyncio.sleep(1.0)
        assert invite.port == ports[-1]

    bench.trainer.open_weight_group = open_slowly
    await bench.start()
    assert ports == [0, 1, 0, 1]


async def test_every_engine_reads_a_payload_of_its_own_for_each_rank_when_memory_is_shared(tmp_path):
    bench = await started(tmp_path, transport="tensor", tp_size=2, bucket_bytes=1 << 20)
    await bench.sync.update_engines(1)
    assert bench.serving() == {"engine-0": 1, "engine-1": 1}
    shared = [a for name, a in bench.trainer.calls if name == "share_bucket"]
    assert shared == [(0, 1 << 20, [0] * 4), (1, 1 << 20, [0] * 4)]
    payloads = [payload for engine in bench.engines for bucket in engine.buckets for payload in bucket]
    assert len(set(payloads)) == 8
    assert bench.engines[0].buckets == [[b"0.0", b"0.1"], [b"1.0", b"1.1"]]


async def test_all_are_quarantined_when_the_trainer_cannot_share_a_bucket(tmp_path):
    bench = await started(tmp_path, transport="tensor")
    share = bench.trainer.share_bucket

    async def once(number: int, bucket_bytes: int, ranks: list[int]) -> list[bytes]:
        if number:
            raise WeightSyncError("shared memory is full")
        return await share(number, bucket_bytes, ranks)

    bench.trainer.share_bucket = once  # type: ignore[method-assign]
    await bench.sync.update_engines(1)
    assert bench.serving() == {}
    assert "sent 1 of 2 buckets" in str(bench.pool.error_of("engine-0"))


async def test_the_engine_is_quarantined_when_an_update_hangs(tmp_path):
    bench = await started(tmp_path, timeout_s=0.01)
    Stopper(bench.engines[0], "update_weights")
    await bench.sync.update_engines(1)
    assert bench.serving() == {"engine-1": 1}
    assert "weights.timeout_s" in str(bench.pool.error_of("engine-0"))


async def test_start_fails_with_the_cause_when_an_engine_does_not_take_the_first_weights(tmp_path):
    bench = Bench(tmp_path, engines=1)
    bench.engines[0].fail_in, bench.engines[0].error = "health", EngineError("not there")
    with pytest.raises(ExceptionGroup) as caught:
        await bench.sync.start_from_version(0, Path("/model"))
    assert "not there" in str(first_error(caught.value))


# -- under fire ------------------------------------------------------------------------------------------


class Stopper:
    """Stops an engine in one of its steps until it is let go."""

    def __init__(self, engine: ScriptedEngine, step: str) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        original = getattr(engine, step)

        async def stopped(*arguments: Any, **named: Any) -> Any:
            self.reached.set()
            await self.go.wait()
            return await original(*arguments, **named)

        setattr(engine, step, stopped)


@pytest.mark.parametrize("transport", ["disk", "distributed", "tensor", "delta"])
@pytest.mark.parametrize("step", ["interrupt", "update_weights", "health", "resume_generation"])
async def test_no_engine_serves_an_unknown_version_when_an_update_is_cancelled(tmp_path, step, transport):
    """The trainer dies, or the run ends, in the middle: one engine stands there, the other is wherever."""
    bench = await started(tmp_path, transport=transport, interrupt="retract")
    stopper = Stopper(bench.engines[0], step)
    async with Nursery() as nursery:
        update = nursery.start_task("update", bench.sync.update_engines(1))
        await stopper.reached.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        update.cancel()
    for engine in bench.engines:
        standing = bench.pool.snapshot_of(engine.engine_id)
        assert standing is not None
        served = standing.state is EngineState.SERVING
        assert served or standing.state is EngineState.QUARANTINED  # so that repair brings it back
        assert not served or (standing.weight_version == engine.weight_version == 1)
    assert bench.pool.snapshot_of("engine-0").state is EngineState.QUARANTINED
    assert "was cut short" in str(bench.pool.error_of("engine-0"))
    # The trainer, which may have to write a checkpoint, waits for no engine.
    aborts = [arguments for name, arguments in bench.trainer.calls if name == "abort_weight_group"]
    sends = transport == "distributed" and step == "update_weights"
    assert bool(aborts) or not sends


async def test_an_update_ends_early_when_its_engine_is_found_dead(tmp_path):
    """A stopped process takes no weights, and `weights.timeout_s` is long."""
    bench = await started(tmp_path, timeout_s=300.0)
    stopper = Stopper(bench.engines[0], "update_weights")
    async with Nursery() as nursery:
        nursery.start_task("update", bench.sync.update_engines(1))
        await stopper.reached.wait()
        await asyncio.sleep(20.0)
        bench.pool.quarantine_engine("engine-0", EngineError("three probes missed"))
    assert asyncio.get_running_loop().time() == 20.0
    assert bench.serving() == {"engine-1": 1}
    assert "three probes missed" in str(bench.pool.error_of("engine-0"))


@pytest.mark.parametrize("transport", ["disk", "delta"])
async def test_updates_go_on_while_a_joining_engine_loads(tmp_path, transport):
    bench = await started(tmp_path, transport=transport)
    bench.restart("engine-0")
    loading = Stopper(bench.engines[0], "update_weights")
    async with Nursery() as nursery:
        nursery.start_task("catch up", bench.sync.catch_up_engine("engine-0"))
        async with bench.sync.trainer_busy:
            await bench.sync.update_engines(1)
        await loading.reached.wait()
        async with asyncio.timeout(60), bench.sync.trainer_busy:
            await bench.sync.update_engines(2)
        assert bench.serving() == {"engine-1": 2}
        loading.go.set()
    # What it had loaded was overtaken: it loaded again before it served.
    assert bench.serving() == {"engine-0": 2, "engine-1": 2}
    assert bench.engines[0].weight_version == 2
    assert bench.engines[0].log.count("update flush") >= 2


async def test_an_engine_catches_up_once_at_a_time(tmp_path):
    """It may come back from an evaluation and be restarted before it has caught up.

    The load begun first would otherwise interrupt it when the second one has let it serve.
    """
    bench = await started(tmp_path)
    assert bench.pool.lend_engine("engine-0")
    await bench.sync.update_engines(1)
    loading = Stopper(bench.engines[0], "update_weights")
    async with Nursery() as nursery:
        nursery.start_task("take back", bench.sync.catch_up.take_back_engine("engine-0"))
        await loading.reached.wait()
        nursery.start_task("repair", bench.sync.catch_up_engine("engine-0"))
        await bench.sync.update_engines(2)
        await asyncio.sleep(1.0)
        loading.go.set()
    assert bench.serving() == {"engine-0": 2, "engine-1": 2}
    assert bench.engines[0].weight_version == 2


async def test_the_calls_of_an_engine_end_before_it_is_taken_back_with_the_weights_it_has(tmp_path):
    """An evaluation that failed may have left some, in the driver or in workers."""
    bench = await started(tmp_path)
    assert bench.pool.lend_engine("engine-0")
    serving, interrupt = [], bench.engines[0].interrupt

    async def watched(mode: InterruptMode) -> None:
        serving.append(bench.serving())
        await interrupt(mode)

    bench.engines[0].interrupt = watched  # type: ignore[method-assign]
    await bench.sync.catch_up.take_back_engine("engine-0")
    assert bench.engines[0].log == ["interrupt", "resume"]
    assert serving == [{"engine-1": 0}]
    assert bench.serving() == {"engine-0": 0, "engine-1": 0}


async def test_an_engine_that_is_taken_back_during_an_update_catches_up(tmp_path):
    bench = await started(tmp_path)
    assert bench.pool.lend_engine("engine-0")
    stopper = Stopper(bench.engines[0], "interrupt")
    async with Nursery() as nursery:
        nursery.start_task("take back", bench.sync.catch_up.take_back_engine("engine-0"))
        await stopper.reached.wait()
        await bench.sync.update_engines(1)  # it waits for no engine that is lent
        stopper.go.set()
    assert bench.serving() == {"engine-0": 1, "engine-1": 1}


@pytest.mark.parametrize("version", [0, 1], ids=["in its last calls", "while it catches up"])
async def test_an_engine_that_is_found_dead_while_it_is_taken_back_is_waited_for_no_longer(tmp_path, version):
    """Its restart brings it to the version; `weights.timeout_s` is long."""
    bench = await started(tmp_path, timeout_s=300.0)
    assert bench.pool.lend_engine("engine-0")
    if version:
        await bench.sync.update_engines(version)
    stopper = Stopper(bench.engines[0], "update_weights" if version else "interrupt")
    dead = EngineError("three probes missed")
    asyncio.get_running_loop().call_later(20.0, bench.pool.quarantine_engine, "engine-0", dead)
    with pytest.raises(EngineError, match="three probes missed"):
        await bench.sync.catch_up.take_back_engine("engine-0")
    assert asyncio.get_running_loop().time() == 20.0
    assert bench.serving() == {"engine-1": version}
    stopper.go.set()
    bench.pool.rejoin_engine("engine-0")
    await bench.sync.catch_up_engine("engine-0")
    assert bench.serving() == {"engine-0": version, "engine-1": version}


async def test_files_stay_while_a_joining_engine_reads_them(tmp_path, monkeypatch):
    monkeypatch.setattr(publisher, "KEEP_VERSIONS", 1)
    bench = await started(tmp_path)
    (tmp_path / "version_1").mkdir()
    await bench.sync.update_engines(1)
    bench.restart("engine-0")
    loading = Stopper(bench.engines[0], "update_weights")
    async with Nursery() as nursery:
        nursery.start_task("catch up", bench.sync.catch_up_engine("engine-0"))
        await loading.reached.wait()
        await bench.sync.update_engines(2)
        assert (tmp_path / "version_1").exists()
        loading.go.set()
    assert not (tmp_path / "version_1").exists()  # at once: no later version may come


@pytest.mark.parametrize("transport", ["disk", "distributed", "tensor", "delta"])
async def test_an_update_leaves_an_engine_alone_when_it_was_restarted_since_it_was_stopped(
    tmp_path, transport
):
    bench = await started(tmp_path, transport=transport)
    interrupt = bench.engines[0].interrupt

    async def then_restarted(mode):
        await interrupt(mode)
        bench.restart("engine-0")

    bench.engines[0].interrupt = then_restarted  # type: ignore[method-assign]
    await bench.sync.update_engines(1)
    assert bench.serving() == {"engine-1": 1}
    assert not any(call.startswith("update") for call in bench.engines[0].log)


async def test_an_engine_serves_nothing_when_it_was_restarted_after_it_was_read_back(tmp_path):
    bench = await started(tmp_path)
    bench.restart("engine-0")
    health, answers = bench.engines[0].health, list[EngineHealth]()

    async def then_restarted() -> EngineHealth:
        answers.append(await health())
        if len(answers) == 2:  # the first is before the load
            bench.restart("engine-0")
        return answers[-1]

    bench.engines[0].health = then_restarted  # type: ignore[method-assign]
    await bench.sync.catch_up_engine("engine-0")
    assert bench.serving() == {"engine-1": 0}
    await bench.sync.catch_up_engine("engine-0")
    assert bench.serving() == {"engine-0": 0, "engine-1": 0}


async def test_updates_wait_for_a_joining_engine_that_was_overtaken_twice(tmp_path):
    bench = await started(tmp_path)
    await bench.sync.update_engines(1)
    bench.restart("engine-0")
    version = 1

    async def overtaken(original, change):
        nonlocal version
        if version < 3:
            version += 1
            await bench.sync.update_engines(version)
        elif change.weight_version == 3:
            nursery.start_task("update", bench.sync.update_engines(4))
            for _ in range(20):  # as long as an update takes
                await asyncio.sleep(0)
            assert bench.serving() == {"engine-1": 3}
        await original(change)

    replace_update(bench.engines[0], overtaken)
    async with Nursery() as nursery:
        await bench.sync.catch_up_engine("engine-0")
        assert bench.serving()["engine-0"] == 3
    assert bench.serving() == {"engine-0": 4, "engine-1": 4}


# -- checksums -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["disk", "distributed", "tensor", "delta"])
async def test_an_engine_is_quarantined_when_its_weights_sum_to_something_else(tmp_path, transport):
    """It says that it has the version, and has half of it."""
    bench = await started(tmp_path, transport=transport, verify="checksum")
    bench.trainer.checksum_seed = 1

    async def halfway(original, change):
        await original(change)
        bench.engines[1].fused = "half"

    replace_update(bench.engines[1], halfway)
    await bench.sync.update_engines(1)
    assert bench.serving() == {"engine-0": 1}
    assert "fused of rank 0 sums to half, and to 1 on engine-0" in str(bench.pool.error_of("engine-1"))


async def test_all_are_quarantined_when_they_agree_and_the_trainer_does_not(tmp_path):
    bench = await started(tmp_path, transport="tensor", verify="checksum")
    bench.trainer.checksum_seed = 7
    await bench.sync.update_engines(1)
    assert bench.serving() == {}
    assert "w sums to 1, and to 7 in the trainer" in str(bench.pool.error_of("engine-0"))


async def test_an_engine_that_serves_is_quarantined_when_another_has_loaded_files_that_sum_differently(
    tmp_path,
):
    bench = await started(tmp_path, transport="tensor", verify="checksum")
    bench.trainer.checksum_seed = 1
    bench.engines[0].fused = "wrong"
    bench.engines[1].fail_in, bench.engines[1].error = "interrupt", EngineError("gone")
    await bench.sync.update_engines(1)
    assert bench.serving() == {"engine-0": 1}
    bench.engines[1].fail_in = None
    bench.pool.rejoin_engine("engine-1")
    bench.sync._publisher.adopt_files(1, tmp_path)
    await bench.sync.catch_up_engine("engine-1")
    assert bench.serving() == {"engine-1": 1}
    assert "fused of rank 0 sums to wrong" in str(bench.pool.error_of("engine-0"))


async def update_to(bench: Bench, *versions: int) -> list[list[float | None]]:
    """Update to versions, and return the metric of both engines after each."""
    value, found = bench.metrics.registry.get_sample_value, []
    for version in versions:
        await bench.sync.update_engines(version)
        labels = [{"engine": engine.engine_id} for engine in bench.engines]
        found.append([value("async_rl_served_weights_unchanged", engine) for engine in labels])
    return found


async def test_an_engine_is_reported_when_its_weights_stay_and_the_trainers_change(
    tmp_path, caplog, monkeypatch
):
    """It says that it has the version. Both engines are asked every third version."""
    monkeypatch.setattr(checksums, "WATCH_EVERY", 3)
    bench = await started(tmp_path)
    bench.engines[1].sums = {"w": "old"}
    assert await update_to(bench, 1, 2, 3, 4, 5, 6) == [[None, None]] * 2 + [[0, 0]] * 3 + [[0, 1]]
    assert [engine.log.count("sums") for engine in bench.engines] == [2, 2]
    assert "engine-1 reports version 6 and serves the weights of version 3" in caplog.text
    assert bench.serving() == {"engine-0": 6, "engine-1": 6}
    assert await update_to(bench, 9) == [[0, 1]]
    bench.engines[1].sums = None
    assert await update_to(bench, 12) == [[0, 0]]


async def test_no_engine_is_reported_when_the_trainers_weights_stay_too(tmp_path, monkeypatch):
    """As at learning rate 0."""
    monkeypatch.setattr(checksums, "WATCH_EVERY", 1)
    bench = await started(tmp_path)
    bench.trainer.checksum_seed = 7
    for engine in bench.engines:
        engine.sums = {"w": "7"}
    assert await update_to(bench, 1, 2, 3) == [[0, 0]] * 3


@pytest.mark.parametrize("step", ["sums", "canary", "hang", "trainer"])
async def test_a_run_goes_on_when_weights_cannot_be_watched(tmp_path, caplog, step, monkeypatch):
    monkeypatch.setattr(checksums, "WATCH_EVERY", 1)
    bench = await started(tmp_path, timeout_s=30.0)

    async def hang(request):
        await asyncio.Future()
        yield

    async def no_checksums() -> dict[str, str]:
        raise TrainerError("rank 1 has no checksums")

    if step == "hang":
        bench.engines[0].generate = hang
    elif step == "trainer":
        bench.trainer.checksums = no_checksums
    bench.engines[0].fail_in, bench.engines[0].error = step, EngineError("404 for it")
    assert await update_to(bench, 1, 2) == [[0, 0]] * 2
    assert "cannot watch whether" in caplog.text
    assert bench.serving() == {"engine-0": 2, "engine-1": 2}


@pytest.mark.parametrize("has_sums", [True, False])
async def test_an_engine_is_reported_when_it_computes_with_old_copies_of_its_weights(
    tmp_path, caplog, has_sums, monkeypatch
):
    monkeypatch.setattr(checksums, "WATCH_EVERY", 2)
    bench = await started(tmp_path)
    stuck = bench.engines[1]
    if not has_sums:
        stuck.fail_in, stuck.error = "sums", EngineError("404 for /weights_checker")
    stuck.answers_as = 0
    assert await update_to(bench, 1, 2, 3, 4) == [[None, None], [0, 0], [0, 0], [0, 1]]
    assert "engine-1 reports version 4 and serves the weights of version 2: no log-prob of a" in caplog.text
    stuck.answers_as = None
    assert await update_to(bench, 6) == [[0, 0]]


@pytest.mark.parametrize("interrupt", ["retract", "in_place"])
async def test_a_paused_engine_gets_no_canary(tmp_path, interrupt, monkeypatch):
    monkeypatch.setattr(checksums, "WATCH_EVERY", 1)
    bench = await started(tmp_path, interrupt=interrupt)
    assert await update_to(bench, 1, 2) == [[0, 0]] * 2
    assert [engine.log.count("canary") for engine in bench.engines] == [0, 0]
    assert [engine.log.count("sums") for engine in bench.engines] == [2, 2]


# -- deltas ----------------------------------------------------------------------------------------------


async def test_engines_are_told_whole_paths_when_the_run_has_relative_ones(tmp_path, monkeypatch):
    """A server that somebody else has started has another working folder, and perhaps another model."""
    monkeypatch.chdir(tmp_path)
    bench = Bench(Path("weights"), engines=1)
    (engine,) = bench.engines

    async def health():
        return EngineHealth(weight_version=engine.weight_version, model_path="/elsewhere")

    engine.health = health  # type: ignore[method-assign]
    await bench.sync.start_from_version(0, Path("model"))
    await bench.sync.update_engines(1)
    files = str(tmp_path / "weights" / "version_1")
    assert [update.path for update in engine.updates] == [str(tmp_path / "model"), files]
    assert bench.trainer.calls == [("publish", (files, 1))]


def deltas(tmp_path: Path, engines: int = 1, **changes: Any) -> tuple[Bench, list[str]]:
    """A bench whose trainer writes a delta wherever it has the base; the folders that engines load."""
    bench = Bench(tmp_path, engines, transport="delta", **changes)
    bench.folders |= {engine.engine_id: ScriptedFolder() for engine in bench.engines}
    loaded: list[str] = []
    kept: list[int] = []

    async def publish_delta(path: str, base: int | None, version: int) -> bool:
        kept.append(version)
        return base is not None and kept[-2:-1] == [base]

    async def update(original, change):
        loaded.append(change.path)
        await original(change)

    bench.trainer.publish_delta = publish_delta  # type: ignore[attr-defined]
    for engine in bench.engines:
        replace_update(engine, update)
    return bench, loaded


def fallbacks(bench: Bench) -> dict[str, float]:
    (family,) = bench.metrics.weight_delta_fallbacks_total.collect()
    return {s.labels["reason"]: s.value for s in family.samples if s.name.endswith("_total")}


async def test_a_version_goes_out_whole_and_the_ones_after_it_as_deltas(tmp_path, monkeypatch):
    monkeypatch.setattr(delta_delivery, "FULL_EVERY", 2)
    bench, loaded = deltas(tmp_path)
    await bench.start()
    for version in range(1, 6):
        await bench.sync.update_engines(version)
    assert loaded == ["whole 1", "changed delta_2", "changed delta_3", "whole 4", "changed delta_5"]
    assert [a[1] for name, a in bench.trainer.calls if name == "publish"] == [1, 4]
    assert fallbacks(bench) == {}
    assert bench.serving() == {"engine-0": 5}


@pytest.mark.parametrize("reason", ["base", "damaged", "failed"])
async def test_whole_files_are_copied_when_a_delta_is_refused(tmp_path, reason):
    bench, loaded = deltas(tmp_path, engines=2)
    await bench.start()
    await bench.sync.update_engines(1)
    bench.folders["engine-1"].refuses["apply"] = DeltaRefused("not that one", reason)
    await bench.sync.update_engines(2)
    assert sorted(loaded[2:]) == ["changed delta_2", "whole 2"]
    assert fallbacks(bench) == {reason: 1}
    assert bench.serving() == {"engine-0": 2, "engine-1": 2}
    bench.folders["engine-1"].refuses.clear()
    await bench.sync.update_engines(3)
    assert loaded[4:] == ["changed delta_3"] * 2


@pytest.mark.parametrize(("hangs", "reason"), [(False, "no_actor"), (True, "failed")])
async def test_the_published_files_are_loaded_when_the_host_has_no_folder_or_does_not_answer(
    tmp_path, hangs, reason
):
    bench, loaded = deltas(tmp_path, engines=2, timeout_s=7.0)
    if not hangs:
        bench.folders.pop("engine-1")
    await bench.start()
    await bench.sync.update_engines(1)
    if hangs:
        bench.folders["engine-1"].hangs = True
    await bench.sync.update_engines(2)
    assert asyncio.get_running_loop().time() == (2 * 7.0 if hangs else 0.0)
    assert sorted(loaded[2:]) == [str(tmp_path / "version_2"), "changed delta_2"]
    assert fallbacks(bench) == {reason: 2}
    assert bench.serving() == {"engine-0": 2, "engine-1": 2}


async def test_a_delta_is_applied_while_its_engine_goes_on_generating_and_leaves_the_disk(tmp_path):
    bench, _ = deltas(tmp_path)
    (tmp_path / "delta_9").mkdir()  # of an earlier incarnation
    await bench.start()
    folder, engine = bench.folders["engine-0"], bench.engines[0]
    folder.log = engine.log
    await bench.sync.update_engines(1)
    (tmp_path / "delta_2").mkdir()
    await bench.sync.update_engines(2)
    assert list(tmp_path.iterdir()) == []
    assert engine.log == [
        *("whole 1", "interrupt", "update flush", "health", "resume"),
        *("changed delta_2", "interrupt", "update flush", "health", "resume"),
    ]
