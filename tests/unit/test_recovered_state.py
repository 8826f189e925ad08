"""What the queue, the archive and the retries of an incarnation take from the config."""

from pathlib import Path
from typing import Any

import pytest

from async_rl.config import apply_override, parse_config, to_builtins
from async_rl.data.feeder import TaskRetries
from async_rl.observability.metrics import Metrics
from async_rl.queue.spool import Spool
from async_rl.run import recovery
from async_rl.run.recovery import RecoveredState
from async_rl.simulation.scenario import FACTS
from tests.support.small_run import small_run


@pytest.fixture
def bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns the bounds of an incarnation that starts with other settings than the usual ones."""
    seen: dict[str, Any] = {}

    def spool(directory: Path, max_bytes: int | None) -> Spool:
        seen["queue.max_bytes"] = max_bytes
        return Spool(directory, max_bytes)

    def retries(*, max_retries: int, **options: Any) -> TaskRetries:
        seen["rollout.max_task_retries"] = max_retries
        return TaskRetries(max_retries=max_retries, **options)

    monkeypatch.setattr(recovery, "Spool", spool)
    monkeypatch.setattr(recovery, "TaskRetries", retries)
    tree = to_builtins(small_run(0).config)
    for override in (
        "queue.max_bytes=2000000",
        f"queue.journal_dir={tmp_path / 'fast'}",
        "rollout.max_task_retries=5",
        "run.keep_trajectories=0",
    ):
        apply_override(tree, override)
    recovered = RecoveredState(
        parse_config(tree), tmp_path, small_run(0).tasks, FACTS, 0, Metrics(), lambda: 0.0
    )
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
        ("rollout.max_task_retries", 5),
        ("run.keep_trajectories", None),
    ],
)
def test_an_incarnation_is_bounded_as_the_config_says(bounds: dict[str, Any], key: str, bound: Any) -> None:
    assert bounds[key] == bound
