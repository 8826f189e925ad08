"""What the queue, the archive and the retries of an incarnation take from the config."""

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from async_rl.config import Config, apply_override, parse_config, to_builtins
from async_rl.data.dataset import order_of
from async_rl.observability.metrics import Metrics
from async_rl.rollout.groups import GroupInFlight
from async_rl.run import recovery
from async_rl.run.recovery import RecoveredState, restore_progress
from async_rl.store.spool import Spool, SpoolFolder
from async_rl.types import Group
from tests.support.run_config import config_with
from tests.support.small_run import small_run
from tests.support.trajectories import make_trajectory
from verification.simulation.scenario import FACTS


def recover(
    config: Config, folder: Path, *, node: str = "", flaws: dict[str, str] | None = None
) -> RecoveredState:
    metrics = Metrics()
    progress = asyncio.run(restore_progress(config.queue, folder, 0, metrics, node=node))
    tasks, read_batch = small_run(0).tasks, AsyncMock(return_value=flaws or {})
    return RecoveredState(config, progress, folder, tasks, FACTS, metrics, lambda: 0.0, read_batch)


@pytest.fixture
def bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the bounds of an incarnation that starts with other settings than the usual ones."""
    seen: dict[str, Any] = {}

    def spool(directory: Path, max_bytes: int | None, **options: Any) -> Spool:
        seen["queue.max_bytes"] = max_bytes
        seen["queue.spool_dir"] = options["node_directory"].parent.name
        return Spool(directory, max_bytes, **options)

    monkeypatch.setattr(recovery, "Spool", spool)
    config = config_with(
        "queue.max_bytes=2000000",
        f"queue.journal_dir={tmp_path / 'fast'}",
        f"queue.spool_dir={tmp_path / 'disk'}",
        "run.keep_trajectories=0",
        **to_builtins(small_run(0).config),
    )
    recovered = recover(config, tmp_path)
    seen["run.keep_trajectories"] = recovered.archive
    assert recovered.journals is not None
    seen["queue.journal_dir"] = recovered.journals.base.parent.relative_to(tmp_path).name
    recovered.write_and_close()
    recovered.queue.close()
    return seen


@pytest.mark.parametrize(
    ("key", "bound"),
    [
        ("queue.max_bytes", 2_000_000),
        ("queue.journal_dir", "fast"),
        ("queue.spool_dir", "disk"),
        ("run.keep_trajectories", None),
    ],
)
def test_an_incarnation_is_bounded_as_the_config_says(bounds: dict[str, Any], key: str, bound: Any) -> None:
    assert bounds[key] == bound


def test_journals_keep_what_is_in_flight_after_a_restart(tmp_path: Path) -> None:
    """Also trajectories with branches, which the ledger does not know before they end."""
    scenario = small_run(0)
    task_id = scenario.tasks[0].task_id

    first = recover(scenario.config, tmp_path)
    order = order_of(scenario.tasks, scenario.config.run.seed, scenario.config.data.shuffle)
    known = scenario.tasks[order.task_at(0)].task_id
    in_flight = GroupInFlight("g0", scenario.tasks[0], 0, ["a"], "wait")
    gone = GroupInFlight("g1", scenario.tasks[0], 1, ["b"], "wait")
    first.queue.groups.dispatch_group("g0", known, 0, ["a"], 0, in_flight)
    first.queue.groups.dispatch_group("g1", f"not {task_id}", 1, ["b"], 0, gone)
    assert first.journal is not None
    (segment,) = make_trajectory("a", sampled=[(3, 0)], routing=False).segments[-1:]
    for name in ("a", "a.1", "b"):
        first.journal.open_entry(name, owner_epoch=1).segments.append(segment)
    first.write_and_close()
    first.queue.close()
    second = recover(scenario.config, tmp_path)
    assert second.journalled.keys() == {"a", "a.1", "b"}
    assert second.journals is not None
    assert second.journals.take_released() == ["b"]  # the data has no such task now
    second.write_and_close()
    second.queue.close()


@pytest.mark.parametrize(
    ("worker_ends", "expected"),
    [
        pytest.param(None, [0] * 8 + [1] * 16, id="no-worker"),
        pytest.param(12, [0] * 16 + [1] * 8, id="a-worker-that-ends"),
        pytest.param(24, [0] * 24, id="a-worker"),
    ],
)
def test_a_node_is_lost_when_it_has_not_answered_for_the_limit(
    worker_ends: int | None, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a worker there answers, only its reader is silent: it is replaced every 8 ticks."""
    scenario = small_run(0)
    tree = to_builtins(scenario.config)
    apply_override(tree, f"queue.spool_dir={tmp_path / 'disk'}")
    monkeypatch.setattr(recovery, "NODE_LOST_S", 16.0)
    recovered = recover(parse_config(tree), tmp_path)
    (stored,) = SpoolFolder(tmp_path / "disk" / "a", "a").store_tree([make_trajectory("t")])
    recovered.spool.hold([stored])
    recovered.spool.writers["a"] = 0 if worker_ends is None else 1
    replace_reader, replaced = recovered.spool.nodes.replace_reader, list[str]()

    def note(node: str) -> None:
        replaced.append(node)
        replace_reader(node)

    monkeypatch.setattr(recovered.spool.nodes, "replace_reader", note)
    lost_after: list[int] = []

    async def sleep(delay_s: float) -> None:
        assert delay_s == 2.0
        lost_after.append(len(recovered.spool.nodes.lost))
        if len(lost_after) == worker_ends:
            recovered.spool.writers["a"] -= 1
        if len(lost_after) == 24:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(recovered.services["spool nodes"]())
    assert lost_after == expected
    assert replaced == ["a"] * {None: 0, 12: 1, 24: 2}[worker_ends]
    monkeypatch.undo()
    recovered.write_and_close()
    recovered.queue.close()


def test_the_dispatcher_learns_of_groups_that_a_node_which_is_there_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the data is exhausted, so that it waits for no admission."""
    config = config_with(f"queue.spool_dir={tmp_path / 'disk'}", **to_builtins(small_run(0).config))
    names = [f"t{number}" for number in range(config.trainer.groups_per_batch)]
    recovered = recover(config, tmp_path, node="here", flaws=dict.fromkeys(names, "does not exist"))

    async def lose_frames() -> None:
        for position, name in enumerate(names):
            group_id = f"group of {name}"
            recovered.queue.groups.dispatch_group(group_id, "task", position, [name], 0)
            trajectory = make_trajectory(name, group_id, sampled=[(3, 0)], routing=False)
            stored = recovered.spool.store_tree([trajectory])
            await recovered.queue.put_group(Group(group_id=group_id, trajectories=stored))
            Path(stored[0].path).unlink()
        assert await recovered.queue.next_batch(0, wait=False) is None

    asyncio.run(lose_frames())
    assert len(recovered.queue.groups.restored) == len(names)
    changed = recovered.feeder.retries.changed
    assert not changed.is_set()
    monkeypatch.setattr(asyncio, "sleep", AsyncMock(side_effect=[None, asyncio.CancelledError]))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(recovered.services["spool nodes"]())
    assert changed.is_set()
    monkeypatch.undo()
    recovered.write_and_close()
    recovered.queue.close()
